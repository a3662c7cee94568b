// Package process is what a node needs of the process that runs it alone: the memory limit and the pace of the garbage
// collector, the service manager that waits for the node, and an end of the process where a stage of the node's start or
// stop hangs. A node within another program has none of it: all this belongs to the program.
package process
