// Package bundle makes a node's part of a debug bundle: its settings, build, log, metrics, stacks, profiles and a trace.
//
// It asks nobody else, and so needs no quorum. Files are made beside each other within bounds of time and size: one that
// hangs costs itself alone. Package redact takes keys and secrets out before they leave the node; skein debug bundle
// (package adminapi) puts the parts of all nodes together.
package bundle
