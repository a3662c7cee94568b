// Package raftgroup runs many raft groups on one host. It is the engine that all
// ranges and the placement group stand on. It knows raft's messages and a
// StateMachine, and nothing of keys or placement: commands belong to shard and
// placement, its callers; node makes the Host.
//
// # What is guaranteed
//
//   - A proposal that a StateMachine sees in Apply is durable on a quorum, and is
//     seen by every replica at the same index in the same order.
//   - Propose tells what was certainly not appended; of anything else the fate is
//     unknown until it is applied. Nothing is forwarded or proposed twice.
//   - A leader lease (Lease) is exclusive: while a reader holds it to be valid, no
//     other replica of the group was elected. It needs bounded clock drift and
//     nothing else; ReadIndex needs not even that.
//   - A snapshot or an entry is answered only when it survives a crash.
//   - No call blocks without an end, and every queue is bounded, with a defined
//     answer where it is full: ErrFull to proposers and readers, loss to peers.
//   - A group that sleeps costs no tick, message, timer, goroutine or channel.
//
// It does not retry proposals, route requests, choose members or split groups,
// and it flushes nothing when it stops.
//
// # How it works
//
//	bus ──frames──▶ handleFrame ──▶┐                        ┌─▶ frames, one per peer and class
//	Propose, ReadIndex, ... ──────▶│ work of the group      │
//	tick (awake groups only) ─────▶│ + its worker's queue   │
//	pacer (woken groups) ─────────▶│                        │
//	                               ▼                        │
//	                       worker: one pass ── visit ×256 ──┼─▶ one wal batch ──fsync──▶ durable
//	                               ▲   ▲                    │                              │
//	                               │   └────────────────────│── responses, one lock ◀──────┘
//	                               │                        ▼
//	                               └── completions ◀── applier: many groups, one engine batch
//	                                                        │ Apply, Applied, LeaderChanged,
//	                                                        ▼ callbacks: in order per group
//	                                                   StateMachine
//
// A group belongs to one worker and one applier for good, by its id; system
// groups have a worker and an applier of their own. Everything that comes for a
// group is put into its work under the worker's lock. A pass takes up to 256
// groups, then reads the clock once, then visits each: completions, messages,
// calls, reads, proposals, tick; then raft is asked once for all that follows.
// At the pass's end frames leave, then the batch goes to the wal. So MsgApp does
// not wait for the leader's own fsync, and one frame and one fsync serve all
// groups of the pass. What must not leave before the fsync (MsgAppResp, votes)
// stands among the batch's responses. Workers wait for nothing but log reads for a
// lagging follower that the wal has no longer in memory; these are bounded per
// message and counted.
//
// # States of a replica
//
//	            Open                 a message, a client, the pacer
//	(on disk) ───────▶ asleep ─────────────────────────────────────▶ awake
//	                     ▲                                             │
//	                     │  follower: the leader's notice              │
//	                     ├─────────────────────────────────────────────┤
//	                     │  leader: idle, all living followers match   │
//	                     │                                             │
//	                     │  no configuration, or told "removed"        │
//	                     └─────────────────────────────────────────────┘
//	empty ── stream ──▶ receiving ── verified, stepped ──▶ installing ── flush, wal ──▶ follower
//
// # The lease
//
// A heartbeat's context begins with the host's number: the clock reading of the
// pass that sends it, taken before raft emitted it. Followers echo it; before they
// answer, their host makes a promise: for one election timeout it drops votes and
// pre-votes and does not let the replica campaign, whatever raft believes by then.
// Frames carry how long the sender's host promises. The leader adds promise to
// number for each voter, takes what a joint quorum has promised, and subtracts a
// tick and the clock drift. A restarted host keeps, as an embargo, the longest
// promise that it was ever configured for; that length is durable before the
// first promise. A transfer gives the lease up for the rest of the term before raft
// may send MsgTimeoutNow, because its votes are free of promises.
//
// # What if
//
//   - the process is paused: the clock runs on, and who asks Lease compares it
//     with the clock. Ticks that were missed are not made up for.
//   - a disk hangs: Progress of the wal stands still, or a batch stays on its way into
//     the engine and no table grows; the host stops its ticks and heartbeats, refuses proposals, and says
//     so to its peers, who elect others. When it moves again the host goes on as a
//     follower of those.
//   - a disk is full: the engine is flushed at once, while it still can be, and no
//     snapshot is received.
//   - the wal cannot keep up: entries from leaders are dropped until it does; they
//     come again.
//   - a node dies with thousands of leaders: the survivors wake those groups at
//     WakesPerSecond, in order of their ids; in each, all choose the same candidate.
//   - a leader steps down while the others sleep: any vote, client or message wakes
//     them, and one that hears no heartbeat for an election timeout forgets the leader.
//   - a follower's node dies and the group falls asleep without it: its return is
//     seen by the leader's host, which wakes the group.
//   - a replica is opened whose log stands in the wal and whose applied record a crash
//     has taken: Open refuses; a split that is replayed makes the record again, and
//     nothing skips one that is committed here (beginReceive).
//   - a message comes for a replica that is not here: votes are kept for its Open,
//     Unknown is told, entries are dropped.
//   - a removed replica campaigns: the leader tells it so and does not wake.
//   - a snapshot's sender dies: the receiver keeps the whole tables for a while, for the
//     next one, and deletes the others; raft never heard of it.
//   - the host dies between a snapshot's ingest and the log's reset, or after the
//     hard state fell behind what is applied: Open reconciles the two.
//   - the engine refuses a batch: Fatal. The wal applies again after the restart.
//
// # Invariants
//
// Asserted where the number stands in brackets; a violation panics with both
// values.
//
//  1. Term, commit and applied of a replica never decrease. [noteState, onApplied,
//     Group.entry]
//  2. Entries are applied without a gap, in order. [Group.entry]
//  3. The log is never truncated past the durably applied index. [truncate]
//  4. No heartbeat is answered without a promise that covers it. [checkPromise]
//  5. No MsgTimeoutNow leaves a leader that has not given up its lease. [send]
//  6. The term of a lease never decreases, and a lease is revoked before anything
//     of a newer term leaves the host. [publishLease, noteState]
//  7. A snapshot is answered only when it is in the engine durably. [installed]
//  8. Raft's configuration and the applied record's agree. [applyConf]
//  9. What is released from a budget was taken from it. [release]
//  10. A replica's log continues its applied record, and nothing is committed that is
//     not in the log. [reconcile: refuses to open]
//
// # Locks
//
// Host.mu (groups) is taken before parking.mu and before worker.mu; peers.mu,
// pacer.mu, truncator.mu, snapshots.mu and applier.mu are leaves. None is held
// over a callback, the bus, the wal's or the engine's disk. Fields of a Group say
// who owns them; most belong to the worker's goroutine and have no lock.
package raftgroup
