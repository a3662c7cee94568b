// Package decide says what placement should change in a cluster: which replicas are
// rebuilt, moved or removed, who leads, which ranges are merged, and why.
// Ranges are split by their leaders (package shard/load), without a decision.
//
// It is a state machine without a machine: no I/O, no goroutine, no clock. Placement
// tells it what has changed (PutNode, PutRange, Finish …), asks it from time to time
// what to do (Decide, with the time), carries the answers out and tells it how they
// ended. The same calls with the same seed bring the same answers.
//
//	reports of nodes ──▶ PutNode, PutRange ──▶ needs, in queues by urgency ─┐
//	                                     └──▶ nodes, ordered by what they carry ─┤
//	        executor ◀── Operation, with what must still hold ◀── Decide ◀───────┘
//	            └──────▶ Finish
//
// # Order
//
// What is urgent comes first, and takes the copies that nodes can bear: ranges that the
// next loss would stop, other repairs, joint configurations and learners that somebody
// left behind, nodes that are emptied, replicas that share a zone without need, the
// replication factor; then balance of bytes, load and leaders; then merges.
// A range has one operation at a time. Nothing but repair touches a range one of whose
// voters is silent, and a range below its quorum is left alone: no change of its
// configuration could be committed.
//
// # Why it does not thrash
//
// Other systems have moved replicas to and fro for years, for five reasons that are
// kept out here each in its own way:
//
//   - They decided by figures that follow a move late (what a disk has in use), and so
//     moved again before they saw the first move. Here a node carries what is planned:
//     the moment an operation is decided, its bytes and its leader count where they
//     will be. Used space reported by nodes is only a guard against full disks.
//   - Several measures pulled one replica to different sides. Here they have an order.
//     A node's excess is what it carries beyond its band. Moving bytes lowers the
//     excess of bytes and never raises that of load; moving load lowers the excess of
//     load and never raises that of bytes; moving leaders raises neither and makes
//     their numbers more equal. So each step lowers (excess of bytes, excess of load,
//     inequality of leaders) in the order of a dictionary: with a cluster that does
//     not change there is no way back to where one has been, and an end.
//   - A node at the edge of its band was pushed over it by noise. Here work begins
//     outside of a band and goes on until a narrower one is reached; giver and taker
//     never change sides in a move (the giver still has more than the taker, in
//     proportion, when it is done). Load must have stayed outside for a while, the
//     longer the less a move would carry off, and counts anew when it changes much;
//     leaders too, so that a node that is only restarted is back before others get
//     them. A range that was copied is left where it is for a time, and is not moved
//     back to where balance took it from for longer.
//   - Targets that cannot be reached: a zone that cannot hold more than one replica of
//     each range has as its share what it can hold, not what its disks would suggest,
//     and the nodes of a zone are held against that. A zone that is silent keeps its
//     share until its nodes count as dead. Where the right zone is only busy, a repair
//     waits for it and takes no worse one that would have to be mended later.
//   - Merges gathered replicas that balance then spread. Two neighbours are bound to each
//     other from the first step, so that a row of them is not carried from one to the
//     next; they move only when they have not been moved for an hour, where no other
//     neighbour can be had without a move, and never to where balance would take them
//     away again.
//
// Few moves: bytes go from the fullest to the emptiest, large ranges first, and stop as
// soon as the narrower band is reached; what was copied for an operation that was given
// up is taken up by the next. What splits is at least four times of what merges, in bytes
// and in load, and nothing merges within an hour of its last split or merge, or before it
// was small and cold for as long. A border that somebody has set stays. A merge that has
// failed is tried again ever later, and in the end not any more.
//
// # Cost
//
// A change costs what its range's replicas cost, a node's change of state its replicas.
// A round looks at the heads of the queues, the ends of the orders, bounded samples of
// the replicas of the nodes there, and a bounded piece of all ranges in turn, so that
// what only time changes (an age, a zone that has appeared) is found too.
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
