// Command skein runs a node of Skein and looks after a cluster. See README.md.
//
// # Files
//
//   - main.go: The command line, exit codes.
//   - start.go: skein start.
//   - recover.go: skein recover, and --force-new-cluster.
//   - node.go: skein node, skein audit.
//   - placement.go: skein placement.
//   - admin.go: skein range, skein cluster; how a running cluster is asked.
//   - cert.go: skein cert.
//   - demo.go: skein demo.
//   - command.go: What commands have in common.
package main
