// Package node makes one Skein node of its parts. A Core is the directories, the wal, the
// engine, the bus, the raft host, the placement service and client, the replicas and the
// router. A Node is a Core with the ports for clients and operators.
//
// # Start
//
//	directories → wal → engine → bus (bound, silent) → raft host → placement → replicas →
//	handlers → bus (speaks) → admission, on the first start → raft host and placement group →
//	clients of placement → ports
//
// Nothing is served before everything below it stands. A start that fails undoes its steps in
// reverse order.
//
// # Stop
//
//	ports close, requests under way end → pipelines of the ranges close, leaderships are handed
//	over → the ceiling of revisions is lowered, placement is handed over → clients, replicas,
//	raft host → engine flushed → wal → bus → directories
//
// Each step has a bound in time. After a second signal the process ends at once, which costs
// only a replay.
//
// # What if
//
//   - The disk lies, fails an fsync or rots: the node stops with the error of wal or engine,
//     since the state of the disk is unknown.
//
//   - The disk is full: the node refuses puts to the ranges that it leads, with etcd's error, and
//     raises an alarm for itself. Reads and deletes go on, and the alarm ends once there is room.
//     The node flushes its memory at the beginning. The wal then takes no new file from the
//     reserve, and no snapshot is received. If even the wal's reserve is used up, the disk counts
//     as hanging.
//
//   - A disk hangs, the wal's or the engine's: the node falls silent, and others lead its ranges
//     within two or three election timeouts. When the disk comes back the node takes part again.
//
//   - Either the log or the engine is lost: the node refuses to start and names the directory. As
//     a new node it would have forgotten its votes.
//
//   - The directory is empty, but the cluster knows this node: the peers say so at the admission,
//     and the node refuses to start. A node that has forgotten its votes must not vote again.
//
//   - The bus reaches nobody: the node waits. It serves once there is a quorum.
//
// It decides nothing: no request, no placement. Package operate carries out operators' commands,
// and package join brings nodes in. cmd calls Run; the simulator opens Cores.
//
// # Files
//
// From the top down: calls between files go down this list.
//
//	node.go        Run, Node: the process, its ports, start and stop
//	admin.go       the backend of the admin service
//	etcd.go        what etcd's services ask of the node itself
//	open.go        Open: a Core from its directories up
//	membership.go  the first start, and what the directory says of the cluster
//	questions.go   questions of other nodes, and those to them
//	callbacks.go   what parts call of parts that are made after them
//	compact.go     how a compaction waits for reads on all nodes
//	lease.go       the time of leases, for placement
//	measure.go     the measures of this node, for placement
//	core.go        Core, Options, Stop, Crash
//	table.go       the node table on disk, and the bus's peers
//	budget.go      how the memory is divided
//	memory.go      the process's memory limit
//	stages.go      what a start or stop is at, for who waits for it
package node
