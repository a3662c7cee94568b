// Package sequencer allocates revisions. The leader of the placement group is the sequencer:
// it counts in memory below a ceiling that the group has committed ahead, so that an
// allocation costs no disk write.
//
//	batch of a node ──▶ Sequencer.Begin ──▶ allocator ──▶ Grant ──▶ the node
//	                                          │    │
//	                        lease, ReadIndex ─┘    ├──▶ AllocationLog ──▶ ServeLog ──▶ gateways
//	                                               └──▶ RaiseCeiling, LowerCeiling ──▶ placement group
//
// The allocator is a state machine without locks, clocks, raft and network: its inputs are
// its methods, its outputs lists of things to do. Sequencer runs it: it brings lease, raft and
// callers.
//
// # Phases of an allocator
//
//	following ──lead──▶ starting ──ceiling committed──▶ serving ──end──▶ ending ──lowered──▶ ended
//	    ▲                  ▲                               ▲                │                  │
//	    └── any phase, when the term is over               └──── resume ────┴──── resume ──────┘
//
// A resumed allocator whose ceiling was lowered goes through starting again.
//
// # What it guarantees
//
// S1. A revision is allocated once. All revisions of a term lie above the ceiling that the
// sequencer found when it started, and at or below the one that it has committed since. The
// next sequencer starts at that one.
//
// S2. Revisions do not step back in real time. A batch is answered only after the sequencer
// held its lease, or confirmed its leadership by a ReadIndex round, at a moment after the batch
// had arrived.
//
// S3. Without failures every revision is used. A planned end of the allocations (a transfer of
// leadership, a stop of the leader) lowers the ceiling to the last revision before anybody else
// can start from it. A lost leader leaves a gap, and so may a stop of all nodes at once
// (docs/decisions/0023-stop-of-all-nodes.md). The gap is at most CeilingBlock, or the revisions of eight commits of a
// ceiling where those are more, or four times the block before where batches waited for it, and at most MaxCeilingBlock.
//
// S4. A batch that is repeated with its number gets the same answer again, as long as it is the
// last one of its process.
//
// S5. The allocation log has no holes: it holds every revision in (After, Last] of one term.
//
// # What if …
//
// … the sequencer dies? Clients repeat unanswered batches at the next leader. Nobody uses the
// numbers that the dead one had allocated without an answer.
//
// … it is paused and wakes after its lease? Its ReadIndex round fails, or the successor answers
// it. Then an entry of the successor's term is applied here, and the sequencer refuses.
//
// … the ceiling cannot be raised, because the group has lost its quorum? Batches wait at the
// ceiling. Nothing is ever allocated above it.
//
// … raft drops the proposal of a ceiling? The sequencer proposes it again after a pause. What was
// wanted in one term is never proposed in another.
//
// … a client withdraws a batch? Nothing is allocated for it any more. Something may have been.
//
// … the sequencer's node stops? It refuses the batches that wait, and then lowers the ceiling to
// the last revision. A ceiling under way is waited for, so the lowering is the last word of the
// term in the log. Only then does it hand over. Batches that it has answered lie at or below the
// lowered ceiling. If the node comes to lead after that, it allocates nothing (Close).
//
// … all nodes stop in the same second? The leader lowers its ceiling while a quorum is left. A
// successor that nobody asks leaves the ceiling low. Otherwise the next start skips as many
// revisions as after a crash.
//
// … a follower of the log is too slow? The part that was overwritten is missing: the next part
// begins above the end of the one before, and the follower must ask the ranges.
//
// # Locks
//
// Sequencer's mutex comes before AllocationLog's, and so does that of its parts. Sequencer
// answers batches outside its lock. It proposes and begins rounds from one goroutine, never from
// a callback of raft's. The placement Service's lock comes before all of them.
//
// # Files
//
// From the top down: calls between files go down this list.
//
//	sequencer.go       Sequencer: the allocator with lease, raft and callers
//	metrics.go         metrics
//	allocator.go       the allocator, a state machine
//	batch.go           batches and grants, and their forms
//	log_serve.go       the allocation log for those who follow it
//	log_part.go        the form of its parts
//	allocation_log.go  AllocationLog: which range got which revision
package sequencer
