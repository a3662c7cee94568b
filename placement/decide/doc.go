// Package decide says what placement should change in a cluster and why: replicas to rebuild,
// move or remove, leaders to transfer, ranges to merge.
//
// It is a state machine without a machine: no I/O, no goroutine, no clock. Placement tells it
// what has changed (PutNode, PutRange, Finish …), and asks it from time to time what to do
// (Decide, with the time). Placement executes the answers and reports how they ended. The same
// calls with the same seed give the same answers.
//
//	reports of nodes ──▶ PutNode, PutRange ──▶ needs, in queues by urgency ─┐
//	                                     └──▶ nodes, ordered by what they carry ─┤
//	        executor ◀── Operation, with what must still hold ◀── Decide ◀───────┘
//	            └──────▶ Finish
//
// # Order
//
// Urgent needs come first and take the copies that nodes can bear:
//
//  1. ranges that the next loss would stop, then other repairs;
//  2. joint configurations and learners that were left behind;
//  3. nodes that are being emptied;
//  4. replicas that share a zone without need;
//  5. the replication factor;
//  6. balance of bytes, load and leaders;
//  7. merges.
//
// A replica in quarantine counts as lost, and is repaired at once.
//
// Leaders split their ranges by themselves. A range has one operation at a time. Only a repair
// touches a range with a silent voter. A range below its quorum is left alone: no change of its
// configuration could be committed.
//
// # Why it does not thrash
//
// Other systems have moved replicas to and fro for years, for five reasons. Each one has its
// remedy here.
//
// They decided by figures that follow a move late, as the use of a disk does, and moved again
// before they saw the first move. Here a node carries what is planned: as soon as an operation
// is decided, its bytes and its leader count at their destination. Used space as reported only
// guards against full disks.
//
// Several measures pulled one replica to different sides. Here they have an order. A node's
// excess is what it carries beyond its band. Moving bytes lowers the excess of bytes and never
// raises that of load. Moving load lowers the excess of load and never raises that of bytes.
// Moving leaders raises neither, and evens out their numbers. So each step lowers (excess of
// bytes, excess of load, inequality of leaders) in the order of a dictionary. In a cluster that
// does not change, no state comes twice, and the moves end.
//
// Noise pushed a node at the edge of its band over it. Here work begins outside of a band and
// continues until a narrower one is reached. Giver and taker never change sides in a move: the
// giver still has more than the taker, in proportion, when it is done. Load must have stayed
// outside for a while, longer if a move would carry off little, and the time restarts when the
// load changes much. The same holds for leaders, so a restarted node is back before others get
// its leaders. A copied range stays where it is for a time, and even longer before it may return
// to the node that balance took it from.
//
// Targets could not be reached. Here a zone that cannot hold more than one replica of each range
// has as its share what it can hold, not what its disks would suggest. The nodes of a zone are
// compared with that share. A silent zone keeps its share until its nodes count as dead. If the
// right zone is only busy, a repair waits for it: a worse place would have to be mended later.
//
// Merges gathered replicas that balance then spread. Here two neighbours are bound to each other
// from the first step, so the replicas of a row of ranges do not move from one to the next. They
// move only if they have not moved for an hour and no other neighbour is there without a move.
// They never move to a node from which balance would take them away again.
//
// While the sequencer's node has little to do, the leads of ranges in use go there, and its load
// is not balanced. Neither load nor the number of leads moves them away. So each step lowers the
// number of leads that are elsewhere. Once the node has much to do that ends, and does not begin again for a time.
//
// Moves are few. Bytes go from the fullest to the emptiest node, large ranges first, and stop at
// the narrower band. The next operation reuses what an abandoned one has copied. The bounds of a
// split are at least four times those of a merge, in bytes and in load. Nothing merges within an
// hour of its last split or merge, nor before it was small and cold for as long. A border that
// somebody has set stays. A failed merge is tried again ever later, and in the end not any more.
//
// # Cost
//
// A change costs what its range's replicas cost, and a node's change of state what its replicas
// cost. A round looks at the heads of the queues, the ends of the orders, and bounded samples of
// the replicas of the nodes there. It also reviews a bounded piece of all ranges in turn, to find
// what only time changes: an age, a new zone.
//
// # Files
//
// From the top down: calls between files go down this list.
//
//	explain.go    why a range is as it is
//	round.go      Decide: a round
//	replicate.go  another replication factor
//	merge.go      the way to a merge
//	cluster.go    Cluster: what it is told
//	can.go        what may be drained or removed
//	balance.go    bytes are balanced
//	gather.go     leaders go to the sequencer's node, while it has little to do
//	load.go       load and leaders are balanced
//	share.go      shares of nodes, their bands, what may be moved
//	act.go        one operation for each need
//	assess.go     what a range needs
//	mergeable.go  whether two neighbours should be one
//	emit.go       an operation is decided
//	target.go     where a replica goes, who can do something now
//	replicas.go   what a range's replicas come to
//	index.go      orders of nodes and ranges by what they carry
//	settings.go   settings
//	queue.go      ranges in need
//	operation.go  Operation, and what it requires
//	node.go       Node
package decide
