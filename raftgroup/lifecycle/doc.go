// Package lifecycle opens and removes a node's replicas of raft groups. Ranges and the
// placement group come and go by the same rules; package shard and package placement say
// through an [Owner] what differs.
//
//	               a peer speaks to it           the peer lists it as a member
//	      absent ──────────────────────▶ asking ───────────────────────────────▶ open, empty
//	        │  Unknown                     │ not a member, or has left              │
//	        │                              ▼                                        │ a snapshot
//	        │                            absent                                     ▼
//	        └───── the owner has its records (start, split, order to create) ───▶ open
//	                                                                                │ Check
//	                                                                                ▼
//	gone for good ◀── Gone ◀── Destroy ◀── End ◀───────────────── Removed ◀────── Verdict
//	(tombstone)                 data,      users are sent away,     │   ▲           │   ▲
//	                            log, state tombstone                └───┘           └───┘
//	                                                             a step fails:     Wait: again
//	                                                             again in RetryAfter
//
// A Lifecycle has two goroutines. RunOpener asks peers, which may take AskTimeout each. RunGC
// removes replicas, up to MaxTogether step by step together, because each step ends with a flush.
//
// # What it guarantees
//
//  1. A replica that has left never comes back. Its tombstone is durable before its log is
//     deleted, and no replica with that id or a lower one is opened. The log held its votes. A
//     replica that began anew could elect a leader without the entries that it acknowledged,
//     before that leader hears of the removal.
//  2. A replica is removed only if a committed configuration is without it: the one that it
//     applied, or a newer one that the node heard of. A leader's word alone is a reason to
//     look, no more: the leader may not have heard of the replica yet.
//  3. A removal that began is completed. Until then every failure is followed by another
//     attempt, and after a crash the owner finds the rest and calls [Lifecycle.Continue].
//  4. An empty replica is opened only if the peer that speaks to it lists exactly this replica.
//  5. Unknown and Check never block. At most MaxUnknown questions wait.
//
// # What if …
//
//   - A peer does not answer: After AskTimeout all questions to that peer are dropped. It
//     speaks again, and the questions to other peers do not wait for it.
//
//   - A node was down, or its replica slept, while the replica was removed: Nobody tells it.
//     Every SweepEvery the owner names the replicas to look at.
//
//   - One of the replicas that are removed together fails at a step: It is tried again with the
//     next ones. The others go on without it.
//
//   - A newer replica of the same group is spoken to before the old one is removed: Its owner
//     removes the old one first ([Lifecycle.Remove]), or waits until the peer speaks again.
//
//   - The node crashes between the tombstone and the deletion: raftgroup repeats the deletion
//     (Host.FinishRemovals), or the owner finds the state of a replica that has left.
//
//   - The messages of a group outlive it: Left refuses the replica before a peer is asked.
//
// # Locks
//
// removing is held while replicas are removed together. mu guards the queues and is a leaf: it is never held
// while the owner is called.
//
// # Files
//
//   - lifecycle.go: The Lifecycle and its interface to an owner.
//   - open.go: Replicas that peers speak to.
//   - gc.go: Replicas that are removed.
//   - tombstone.go: What a node remembers of replicas that have left.
package lifecycle
