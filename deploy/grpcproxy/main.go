// Command skein-grpc-proxy is etcd's gRPC proxy, with its flags: one watch of the cluster for many of the same, one
// stream for many leases, and a namespace. It links etcd's server with its storage, so it is a program and a module of
// its own, and skein grpc-proxy starts it.
package main

import (
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
)

func main() {
	os.Args = append([]string{"skein", "grpc-proxy"}, os.Args[1:]...)
	etcdmain.Main(os.Args)
}
