// Package pipepb is the generated code of pipe.proto: Skein's streaming API. Package pipeapi serves it, and
// package client speaks it.
package pipepb
