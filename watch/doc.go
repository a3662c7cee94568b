// Package watch is a gateway's side of watches: it puts the events of many ranges into the
// one order of their revisions, for any number of watchers. Package etcdapi calls it. It
// reaches ranges by rangeapi, the range map by router, and the sequencer's allocation log by
// placement's client. It knows neither etcd's protocol nor permissions, and it never looks at
// values. While nobody watches, it has no goroutine, stream or timer.
//
// # What it guarantees
//
//  1. A watcher gets every event of its span from its first revision on exactly once, in the
//     order of (revision, operation, key). All events of a revision come in one delivery.
//  2. No event of revision r leaves before all allocations of the span at or below r are
//     delivered or void. Ranges without an allocation are not asked.
//  3. A client never gets progress below one of its events or below earlier progress.
//  4. A watcher that is slow, late or far in the past reads history and delays nobody.
//  5. Every buffer has a bound. A watcher beyond it goes on from history. Events that clients
//     do not take are dropped first, and read again when the client takes them.
//
// # How it works
//
//	sequencer ── allocation log ─────────▶ pending allocations ┐
//	replicas ─── feeds, one per range ───▶ subscriptions ──────┼─▶ frontier
//	leaders ──── feed position for r ────▶ subscriptions ──────┘      │ releases
//	                   │ events                                       ▼
//	                   ▼                                 ┌──▶ live groups ──▶ watchers ──▶ clients
//	             recent events ──────────────────────────┤                     ▲
//	replicas ─── history, page by page ──────────────────┴──▶ lagging groups ──┘
//
// A subscription is a span of keys whose events one range's feed tells. Subscriptions cover
// all that is watched, with one feed per range however many watchers there are. The feed comes
// from this node's own replica if there is one, which costs no message, otherwise from the
// leader. A replica feeds what it applies, in that order, with its resolved revision.
//
// The allocation log says which range was given which revision. An allocation is pending at
// every subscription that overlaps its range, until the range's resolved revision passes it.
// The frontier of a span is the highest revision below all of its pending allocations: events
// up to the frontier are released. If an allocation is pending for longer than Config.Overdue,
// the hub asks the range's leader. The leader answers under its lease, once everything that was
// under way is applied. Its answer is a feed position, and counts when the feed reaches it.
//
// Watchers of one span at one position form a group, which holds the events above the frontier.
// Groups share encoded events. After a release a group of many watchers pauses for some
// milliseconds (pauseEach), because each watcher's message costs more than the events in it.
// The first event after a quiet time leaves at once.
//
// # Life of a watch
//
//  1. Create. Watch asks the sequencer for the current revision. The watcher begins above it, or
//     at the revision that the request names. In etcd a write's event is on its way before the
//     write is answered. So an answer whose header carries a revision follows the events up to
//     that revision (Settled). It does not wait for watchers that read the past, and for a
//     silent range it waits once, 5 s at most. Meanwhile requests are taken and events leave.
//     Under writes, a watcher that joins others on its stream waits 1 to 4 ms, or up to the 25 ms
//     of a pause. The first watcher of a stream waits for nothing.
//  2. Subscribe. New subscriptions begin at the current revision. The hub asks for earlier
//     events only if a watcher begins there, so a new watcher wakes no range at rest.
//  3. Release. A transaction over several ranges is one revision with an allocation for each
//     range. It leaves when all of them have brought it. Its locks may end long after higher
//     revisions were applied beside them. A range that holds such a lock is resolved only up to
//     the lock's floor, and so are the heirs of its split (shard's applyState.advance has the proof). All watchers of the range wait for the
//     lock, because the resolved revision is one number per range. A number per span would need
//     the names of all locks below it in every feed position. A lock ends within seconds, or when
//     the anchor's range has a quorum again.
//  4. Catch up. A lagging group reads history from replicas. It goes live where recent events are
//     still in memory. Lagging watchers of one span read together if they are close.
//  5. Progress. A client asks for the progress of its whole stream, and clientv3 resumes every
//     watcher behind the answer. So the answer is the lowest revision that all watchers have
//     reached, and not below any event that one of them was told. If one watcher is behind, events
//     above that are held back, for 0.1 s at most (holdMost), and not again within ten times as
//     long. sim.Stream judges this order.
//  6. One key several times in one revision. etcd allows two nested transactions with a
//     put and a delete of it, and a put beside a delete to the end of all keys. Each is an event, in the order of
//     the operations, and the version before is that of the revision before. A watcher that begins
//     at exactly the compacted revision gets only the last one of a key, as in etcd. A watcher that
//     began earlier gets all of them, or is told that they are compacted; etcd sends it the rest.
//  7. Large revisions. Feeds and pages divide a revision that is larger than a message; only its
//     last part raises the resolved revision. A watcher gets the revision whole. The hub reads at
//     most Config.RevisionBytes of one revision (64 MiB), and four times as much of one revision at
//     a time. The largest transaction is as large: 128 operations on values of 1.5 MiB, with
//     the versions before. A watcher whose next revision is larger is cancelled with
//     that reason. etcd holds the revision in memory anyway and sends it.
//
// # States of a subscription
//
//	                located                    feed opened
//	without range ───────────▶ without feed ───────────────▶ fed
//	      ▲                          ▲                        │
//	      │                          └── stream lost, error ──┤ elsewhere, after a pause
//	      └── split, merged, newer generation ────────────────┘
//
// Allocations stay pending at a subscription without a range. The subscriptions of a range's
// heirs inherit the pending allocations of its own, and continue at its resolved revision.
//
// # States of a group
//
//	            recent events reach back to its position
//	new ─────────────────────────────────────────────────▶ live
//	 │ begins in the past                                   │ client too slow, or
//	 ▼                                                      ▼ too many bytes pending
//	idle ── client took all ──▶ queued ── a reader ──▶ reading ──▶ live, idle or queued
//	                              ▲                       │
//	                              └─────── parked ◀───────┘ nothing resolved, no room, an error
//
// # What if
//
//  1. A revision is lost with its leader: the range's next event passes it, or the next leader
//     declares it void when asked.
//  2. A range is split: its subscription gives way to those of all heirs.
//  3. An allocation names a range that nobody here knows: nothing at or above it leaves until the
//     range map names the range. After Overdue all subscriptions are asked, because a leader of a
//     range that was not split since cannot be its parent.
//  4. The sequencer changes, or this node falls behind its log: the revisions between become
//     pending at all subscriptions, and each leader is asked once.
//  5. All replicas of a range have moved: after each known replica has failed, the range map is
//     loaded anew.
//  6. A feed breaks: another one begins at the resolved revision, elsewhere. Events that come twice
//     are dropped.
//  7. The local replica lags: the leader's answer names a position that the feed does not reach
//     within Overdue, and the feed moves to the leader.
//  8. A subscription's next events are compacted: its watchers are cancelled with the revision.
//
// # Invariants
//
//  1. Subscriptions do not overlap and cover all spans that are watched.
//  2. An allocation above a subscription's resolved revision is pending there.
//  3. A subscription's resolved revision never decreases. A leader's answer raises it only when
//     the feed has reached the answer's position.
//  4. A group is live only if all events above its position are in recent events or will come.
//  5. Bytes that leave a queue were counted in queuedBytes, and bytes that leave a group in
//     pendingBytes.
//
// # Locks
//
// Hub.mu guards all state. It is not held over calls of Log, Feeds or Ranges, but SpanOf and Learn
// do not block and are exceptions. A leaf, plan.mu, guards one read of history and is never
// taken together with Hub.mu.
//
// # Files
//
// From the top down; calls go downwards (internal/archtest holds it):
//
//	stream.go         Stream, the watchers of one client: create, deliver, progress
//	hub.go            Hub: its state, its goroutines, their start and stop
//	locate.go         finds the ranges of subscriptions, and their replicas after a move
//	cover.go          which subscriptions cover what is watched; splits and merges
//	log.go            the allocation log: at which subscriptions an allocation is pending
//	feed.go           feeds of subscriptions, and the streams from nodes that carry them
//	history.go        readers of history, for groups that lag
//	golive.go         a lagging group becomes live
//	ask.go            questions to leaders, and what follows every change
//	release.go        events of live groups: hold, release, pause, shed
//	lag.go            groups that lag: queue, share, drop what clients do not take
//	standing.go       how far clients are behind, for operators
//	watcher.go        one watcher's queue, and what its client has got
//	group.go          group: watchers of one span at one position
//	groupindex.go     the live groups by span and key
//	delivery.go       what waits for a client; encoded once for several
//	allocations.go    pending allocations, and the frontier of a span
//	subscription.go   subscription: its state, its place among the others
//	recent.go         the events that came last
//	eventlist.go      a sorted list of events
//	event.go          event, shared by all who watch its key
//	config.go         Config, and what a hub needs of others
//	metrics.go        metrics
//	wake.go           wake-ups and timers of the hub's goroutines
package watch
