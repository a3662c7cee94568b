// Package process is for a process that runs nothing but a node. It sets the memory limit, the pace of the garbage collector and on how many processors Go runs, keeps the memory from being swapped out where that is wanted,
// tells the service manager how far the node is, and ends the process where a stage of the node's start or stop hangs. A node
// within another program has none of this, since the program decides it.
package process
