// Package api holds Skein's own wire types: the .proto files and the Go code made of
// them. Only this package and client promise compatibility to the outside. The etcd
// API is not here: its types are imported from go.etcd.io/etcd/api/v3.
//
// adminpb is the admin service that every node offers on its client port and that
// the commands skein range and skein node use. pipepb is the pipe, for clients of any language.
package api

//go:generate sh generate.sh
