// Package raftgroup runs many raft groups on one host. All ranges and the placement group
// are built on it. It knows raft's messages and a StateMachine, but neither keys nor
// placement: shard and placement, its callers, own the commands. Package node makes the
// Host.
//
// # Guarantees
//
//   - A proposal that a StateMachine sees in Apply is durable on a quorum. Every replica
//     sees it at the same index, in the same order.
//   - Propose reports what certainly was not appended. The fate of anything else is
//     unknown until it is applied. Nothing is forwarded or proposed twice.
//   - A leader lease (Lease) is exclusive: while a reader holds it valid, no other replica
//     of the group has been elected. This relies on bounded clock drift alone; ReadIndex
//     does not rely even on that.
//   - A replica acknowledges an entry or a snapshot only when it survives a crash.
//   - No call blocks for ever. Every queue is bounded and says what happens when it is
//     full: proposers and readers get ErrFull, messages from peers are dropped.
//   - A sleeping group costs no tick, message, timer, goroutine or channel.
//
// The package does not retry proposals, route requests, choose members or split groups.
// It flushes nothing when it stops.
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
// Its id assigns a group to one worker and one applier for good. System groups have a
// worker and an applier of their own. Everything that arrives for a group goes into the
// group's work, under the worker's lock.
//
// A pass takes up to 256 groups, then reads the clock once, then visits each group:
// completions, messages, calls, reads, proposals, the tick. Then it asks raft once for
// everything that follows. At the end of the pass the batch goes to the wal and the frames
// to the bus. So MsgApp does not wait for the leader's own fsync, and one frame and one
// fsync serve all groups of the pass. Messages that must wait for the fsync (MsgAppResp,
// votes) are among the batch's responses.
//
// Work comes from proposers, the bus's reader, the wal's writer and the applier. Each of them runs the pass over it
// itself, unless a pass is under way or has just ended, or more groups wait. Then the worker's goroutine runs it.
// Waking that goroutine costs more than the pass of one group.
//
// A pass waits for nothing but reads of the log. Only entries that are no longer in memory
// need one: a lagging follower asks for them, or a restart has to apply them. Such reads are
// bounded for each pass and counted. A group that has read is left to the worker's goroutine for a while.
//
// A new commit index alone waits 2 to 3 ms for the next entry, which carries it along, to the followers and into the
// leader's own wal. If none follows, the followers get a commit notice: a message with the commit index that
// needs no response. Where other groups of the worker send entries to the same nodes meanwhile, it leaves with those, after
// 1 to 8 ms.
//
// # States of a replica
//
//	            Open                 a message, a client, the pacer
//	(on disk) ───────▶ asleep ─────────────────────────────────────▶ awake
//	                     ▲                                             │
//	                     │  follower: the leader's notice              │
//	                     ├─────────────────────────────────────────────┤
//	                     │  leader: idle, all live followers match     │
//	                     │                                             │
//	                     │  no configuration, or told "removed"        │
//	                     └─────────────────────────────────────────────┘
//	empty ── stream ──▶ receiving ── verified, stepped ──▶ installing ── flush, wal ──▶ follower
//
// A leader's group is idle after ten ticks without a proposal, a read or a message that wants it awake. A host is crowded with more
// than 64 awake groups. There a group is idle after fewer ticks, but at least two. One that has only woken for a proposal
// sleeps as soon as its followers have the entry and its commit index. Its ticks and heartbeats would cost more than the entry.
//
// A sleeping group has no lease, so its next read begins with a ReadIndex. After one the group stays awake for ten ticks, on a crowded
// host too. Followers learn from heartbeats which entries nobody needs. A group that slept without one wakes once, when the leader
// has made the entries durable.
//
// # The lease
//
// Each heartbeat's context begins with the host's number: the clock reading of the pass
// that sends it, taken before raft emits it. Followers echo the number. Before a follower
// responds, its host makes a promise: for one election timeout it drops votes and pre-votes
// for this replica and does not let it campaign, whatever raft believes by then. Frames
// state how long the sender's host promises.
//
// For each voter the leader adds promise and number. It takes the time that a joint quorum
// has promised and subtracts a tick and the clock drift: that is when the lease ends.
//
// A restarted host observes an embargo, because it has forgotten its promises. For the
// longest promise that an earlier run may have made it neither votes nor campaigns. That
// length is durable before the first promise is made. It becomes shorter when a run with a
// shorter promise has outlasted its embargo: no promise of an earlier run stands then.
//
// A transfer gives the lease up for the rest of the term before raft may send
// MsgTimeoutNow, because the votes for its target are exempt from promises.
//
// # Life of a copy
//
// A copy of a replica is a stream of tables: from one state of the sender's store to files
// beside the receiver's, which takes them in when all have arrived. --copy-bytes-per-second
// bounds what a node sends in all its copies together, and what it receives. Time is divided
// into steps of 10 ms. What is due in a step passes at once, in messages of 63 KiB, and a
// copy that is ahead sleeps until the next step.
//
// Placement gives a node four copies at a time, and up to sixteen while they have less than
// 32 MiB together, because a small copy mostly waits. The tables of four started copies are
// transferred, first come, first served. If all were transferred at once, all would end at
// once, and the rate would be unused while they are taken in. The other copies are told that
// they wait, for ten minutes at most. A sender is told to wait, too, while its tables are
// checked and taken in, which takes minutes on a full node; but not while the receiver's
// disk is full or does not move, because that may take any time. A side that sees no
// progress for a minute gives the copy up, and with it its place.
//
// A copy breaks off when its connection is lost or its sender loses the lead. The next one
// begins anew, from a newer state (docs/decisions/0018-copies-begin-anew.md).
//
// # What if
//
//   - the process is paused: the clock keeps running, and readers compare the lease with
//     the clock. Missed ticks are not made up for.
//   - a disk stalls: Progress of the wal stops, or a batch stays on its way into the engine
//     while no table grows. The host stops its ticks and heartbeats, refuses proposals and
//     tells its peers, who elect other leaders. When the disk recovers, the host continues
//     as their follower.
//   - a disk is full: the engine is flushed at once, while it still can be, and the host
//     receives no snapshots.
//   - the wal is too long: the host flushes the engine, and a second later cuts off
//     followers that lag, also living ones, and snapshots that wait for their turn. What
//     stays moves to the head of the wal. It may be uncommitted because a quorum is lost, or
//     not applied, or behind a snapshot that is transferred or installed. It may also belong
//     to a replica that could not be opened. Hard states and tombstones move earlier, at
//     half of the wal's target. So no group holds the others' log.
//   - the wal cannot keep up: the host drops entries from leaders until it can. Raft sends
//     them again.
//   - a node with thousands of leaders dies: the others wake those groups at WakesPerSecond,
//     in the order of their ids. In each group all choose the same candidate.
//   - a node hears less than half of the other members for longer than a liveness timeout: it is isolated and
//     hands over what it leads. It may be the only leader that can reach this node.
//   - a leader loses the links to its followers while its group sleeps: they elect another leader.
//     The old one gives the lead up as soon as other nodes say that they hear the followers.
//   - a leader steps down while the others sleep: any vote, client or message wakes them. A
//     woken replica that hears no heartbeat for an election timeout forgets the leader.
//   - a follower's node dies and the group falls asleep without it: the leader's host sees
//     the node return and wakes the group.
//   - Open finds a log in the wal whose applied record a crash has taken: it refuses. A
//     split that is replayed makes the record again, and no snapshot skips a split that is
//     committed here (beginReceive). A caller who knows that no split is to come keeps the
//     replica closed.
//   - an entry breaks a rule: it does nothing, on every replica alike ([Entry]).
//   - a replica cannot apply an entry, because a read fails or its state has gone astray: it
//     goes into quarantine ([Host.Quarantine]). The host goes on with all others. A replica
//     that its caller cannot load is kept closed from the start ([Host.KeepClosed]).
//   - a message arrives for a replica that is not here: its votes are kept for Open, Unknown
//     is told, entries are dropped.
//   - a removed replica campaigns: the leader tells it so and stays asleep.
//   - a snapshot's sender dies: the receiver deletes what has arrived. Raft never heard of
//     this snapshot, and the next one starts over.
//   - the host dies between a snapshot's ingest and the log's reset, or the hard state is
//     behind the applied index: Open reconciles the two.
//   - the engine rejects a batch: Fatal. After the restart the wal applies it again.
//
// # Invariants
//
// The names in brackets assert them; a violation panics with both values.
//
//  1. Term, commit and applied index of a replica never decrease. [noteState, onApplied,
//     Group.entry]
//  2. Entries are applied in order, without a gap. [Group.entry]
//  3. The log is never truncated past the durably applied index. [truncate]
//  4. No heartbeat is answered without a promise that covers it. [checkPromise]
//  5. No MsgTimeoutNow leaves a leader that has not given up its lease. [send]
//  6. The term of a lease never decreases. A lease is revoked before anything of a newer
//     term leaves the host. [publishLease, noteState]
//  7. A snapshot is answered only when it is durable in the engine. [installed]
//  8. Raft's configuration and the applied record's agree. [applyConf]
//  9. Bytes released from a budget were taken from it. [release]
//  10. A replica's log continues its applied record, and nothing is committed that is not
//     in the log. [reconcile: refuses to open]
//
// # Locks
//
// Host.mu (groups) is taken before voteBuffer.mu and before worker.mu. The locks peers.mu,
// pacer.mu, truncator.mu, snapshots.mu and applier.mu are leaves. None is held over a
// callback, the bus, or the disk of wal or engine. Fields of a Group say who owns them;
// most belong to its worker's pass and need no lock.
//
// # Files
//
// From the top down: calls between files go down this list.
//
//	host.go              the host: making, starting and stopping it, its tick
//	open.go              opening a group: log and applied record are reconciled
//	group.go             a group's exported methods, what others may read of it
//	inbound.go           frames from the bus, votes for replicas that are not open
//	snapshot_receive.go  a snapshot that arrives, until raft gets it
//	worker.go            the loop of a worker: its passes
//	step.go              one visit of a group: messages in, raft's Ready out
//	storage.go           raft's view of the wal, raft's log lines
//	commit_notice.go     commit indexes that wait for the next entry
//	sleep.go             a group's tick, how it falls asleep, the pacer's turn
//	snapshot_send.go     a snapshot on its way to a follower
//	apply.go             the loop of an applier: entries into the engine
//	quarantine.go        a replica that is closed until it is replaced
//	close.go             closing a group, removing it for good
//	snapshot_install.go  a verified snapshot into the engine
//	commit.go            who made the quorum, and what came after
//	append.go            raft's appends into the wal, and a snapshot in their order
//	confchange.go        changes of the members, transfers of leadership
//	proposals.go         proposals and the budgets that bound them
//	readindex.go         ReadIndex: rounds, waiters, expiry
//	truncate.go          what the log may lose, the bound on the wal
//	snapshot.go          slots, rates, turns and the header of snapshots
//	wake.go              waking a group, who campaigns when its leader is lost
//	lease.go             the leader lease and the promises behind it
//	route.go             on which node a replica is
//	outbox.go            a pass's messages, as frames
//	liveness.go          which nodes live, which of them are isolated
//	disk.go              whether this node's disks make progress
//	pacer.go             wake-ups at a bounded rate
//	work.go              what waits for a group's next visit, its worker's queue
//	apply_queue.go       what waits for a group's applier
//	registry.go          the open groups, their workers
//	conf_entry.go        a configuration change as an entry
//	configuration.go     a configuration in all its forms
//	codec.go             the bytes of frames
//	failure.go           the error that ends the host
//	api.go               errors, Config, the interfaces around the package
//	config.go            defaults, checks, bounds that are not configurable
//	metrics.go           metrics
//	mutation_on.go       mutations, with the build tag planted
//	mutation_off.go      their absence in an ordinary build
package raftgroup
