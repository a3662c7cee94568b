// Command skein runs a node of Skein and looks after a cluster. See README.md.
//
// # Files
//
// From the top down: calls between files go down this list.
//
//	main.go           the command line, exit codes
//	help.go           examples, and the words that the help explains
//	start.go          skein start: one node
//	process.go        the node as this process
//	configuration.go  skein config
//	demo.go           skein demo
//	status.go         skein status and doctor
//	top.go            skein top
//	debug.go          skein debug
//	slow.go           skein debug slow
//	watchers.go       skein debug watchers
//	node.go           skein node, cluster and audit
//	placement.go      skein placement
//	range.go          skein range
//	hold.go           skein hold
//	cert.go           skein cert
//	recover.go        skein recover, and --force-new-cluster
//	backup.go         skein backup, what backups are read by
//	mirror.go         skein mirror
//	transfer.go       skein backup create and follow, restore, import, export
//	diff.go           skein diff
//	explain.go        skein explain
//	version.go        skein version
//	complete.go       what a tab completes
//	etcdctl.go        skein etcdctl: etcd's own command line
//	gateway.go        skein gateway: etcd's TCP proxy
//	grpcproxy.go      skein grpc-proxy: becomes the program of etcd's gRPC proxy
//	admin.go          flags of all commands that ask a running cluster
//	command.go        what all commands share
package main
