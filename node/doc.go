// Package node makes one Skein node of the parts: the directories, the wal, the
// engine, the bus, the raft host, the placement service and client, the replicas
// and the router (together: a Core), and in front of them the ports that clients
// and operators use (a Node).
//
// # Start
//
// directories → wal → engine → bus (bound, silent) → raft host → placement →
// replicas → handlers → bus (speaks) → introduction, on the first start → raft host
// and placement group → clients of placement → ports. Nothing is served before everything
// below it stands, and a start that fails undoes what it had done, in reverse.
//
// # Stop
//
// the node says that it stops to whoever asks → ports stop accepting, and requests under
// way end → the pipelines of the ranges are closed and leaderships handed over → the ceiling of
// revisions is lowered (Quiesce) → clients, replicas, raft host → engine flushed →
// wal → bus → directories. Each step has a bound in time; after a second signal
// the process ends at once, which costs nothing but a replay.
//
// # What if
//
// … the disk lies, fails an fsync or rots: the node stops with the error of wal or
// engine, since what is on the disk is not known any more.
//
// … the disk is full: the node refuses the puts to ranges that it leads, with etcd's
// error for that, and says so as an alarm of its own; reads and deletes go on, and it
// ends when there is room again. What is in memory is flushed at the beginning, the wal
// takes no new file of the last room, and no snapshot is received. Should even the wal's
// reserve be used up, the disk counts as one that hangs.
//
// … a disk hangs, the wal's or the engine's: the node falls silent, others lead its ranges
// within two or three election timeouts, and when the disk comes back the node takes
// part again.
//
// … the log is lost and the engine is there, or the other way round: the node refuses
// to start and names the directory. Taken for a new one it would have forgotten its
// votes.
//
// … the directory is empty although the cluster knows this node: the peers say so
// at the introduction, and the node refuses to start: a node that has forgotten its
// votes must not vote again.
//
// … the bus cannot reach anybody: the node waits; it serves when a quorum stands.
//
// It decides nothing: no request, no placement. cmd calls Run; the simulator opens
// Cores.
package node
