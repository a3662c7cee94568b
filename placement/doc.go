// Package placement is the placement group and what lives beside it: the raft
// group that holds the range map, the node table, the id blocks, the settings and
// the ceiling of revisions; the sequencer, which is the leader of that group in
// its other task of allocating revisions; the founding of a cluster; and the
// client side of all that, which every node has.
//
//	shard, router, etcdapi, node
//	      │ Sequence, RangeMap, ReportDescriptors, Compact, Members, Quiesce …
//	   Client ──────────── bus (methods 32 to 35), or a function call ─────┐
//	                                                                       Service
//	                                        Sequencer ── ceiling ──▶ Machine │
//	                                            │ lease, ReadIndex      ▲    │
//	                                            └───────── raftgroup ───┘────┘
//
// A node has one Client and one Service. The Service of a node that has a replica
// of the placement group has a Machine (the replicated state); the Service of the
// leader has a Sequencer that serves. Every other Service refuses with NotLeader
// and the leader that it knows.
//
// # What it guarantees
//
// P1. A revision is allocated once. All revisions that a sequencer allocates lie
// above the ceiling that it found when it started and at or below the one that it
// has committed since; the next sequencer starts at that one.
//
// P2. Revisions do not step back in real time. A request is answered only after
// the sequencer held its lease, or confirmed its leadership by a ReadIndex round
// begun, at a moment after the request had arrived.
//
// P3. Without failures every revision is used. A planned end of the allocations (a
// transfer of leadership, a clean stop, also of all nodes at once) lowers the
// ceiling to the last revision before anybody else can start from it. A leader that is
// lost leaves a gap of at most CeilingBlock.
//
// P4. A request that is repeated with its number gets the same answer again,
// for as long as it is the last one of its node and process. A node uses only the
// answer to its current number, from the call that it is waiting for.
//
// P5. The range map covers the keyspace exactly once, at every applied index.
// Reported descriptors replace others only where they tile the same span.
//
// P6. The compacted revision is committed and visible to every later allocation
// before Compact answers: whoever asks for a revision afterwards is told of it.
//
// P7. The allocation log that FollowLog brings says of every revision which ranges got
// it, in order, or that nobody knows any more. An earlier term's sequencer hands
// nothing out once a later one's part has come.
//
// # What if …
//
// … the sequencer dies? Its node's clients find the next leader; requests that had
// no answer are asked again with the same content; numbers that the dead one gave
// them are used by nobody.
//
// … the sequencer is paused and wakes after its lease? It has no lease and its
// ReadIndex round fails or is answered by its successor's term, which its own
// applied entries then show: it refuses.
//
// … the ceiling cannot be raised, since the group has lost its quorum? Allocations
// wait at the ceiling, never above it.
//
// … all nodes are stopped in the same second, or one after the other? Whoever leads
// lets a node go when a quorum of voters has said, after that node began to stop,
// that they do not stop themselves: so there is always a quorum that nobody let go,
// whoever led when. The last ones wait until all pipelines are closed, 3 s at most,
// and go when the ceiling is lowered.
//
// … a leader is left behind by nodes that could wait no longer? Its ceiling is lowered
// before they leave. It allocates again when a quorum says that it stays.
//
// … a member of the group is to go, the sequencer itself? An operation on OwnGroup, as on
// a range: learner first, then one joint configuration; who leads and is to go ends its
// allocations, lowers the ceiling and hands over before. Whoever leads next, on a member
// that a snapshot has filled too, starts from the ceiling in its applied state, once an
// entry of its own term is in it (P1); lease and ReadIndex need both halves of a joint
// configuration (P2). A replica that has left is removed and noted, and its id never comes
// back: one that began anew without its log could be half of a quorum that is no more.
//
// … a node was away while all whom it knows left the group? Any node tells it the map,
// with the members and the addresses of all nodes, and who leads.
//
// # What it does not do
//
// It moves no data and opens no replicas: RangeControl does, wired by node. It does
// not know what keys mean, and it does not route requests.
package placement
