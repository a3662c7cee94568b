// Package watch is the gateway's side of watches: it puts the events of many ranges
// into the one order of their revisions, for any number of watchers.
//
//	sequencer ── allocation log ──────────▶ owed: who must still speak of what
//	replicas  ── feeds, one per range ──▶ subscriptions ─▶ recent ─▶ groups ─▶ watchers ─▶ clients
//	leaders   ── "complete up to r" ────▶ subscriptions                 ▲
//	replicas  ── history, page by page ────────────── groups that lag
//
// # What it guarantees
//
// W1. A watcher gets every event of its span from its first revision on exactly once,
// in the order of (revision, operation, key), all of one revision in one delivery.
//
// W2. Nothing of revision r leaves before every revision at or below r that was handed to
// a range of the span is delivered or void. The allocation log says which there are; a
// range speaks of them by its feed, which tells how far it is complete, or by its
// leader's answer. Ranges that were handed nothing are not asked.
//
// W3. Progress is the same number: a revision that it tells was passed by every event at
// or below it. That of a stream is not below an event that one of its watchers was told.
//
// W4. Whoever is slow, late or far in the past reads history and delays nobody. Every
// buffer has a bound, beyond which watchers go on from history. What was read for clients
// that do not take it is given up first, and read again when they do.
//
// W5. Feeds and pages of history divide a revision that is too large for one message; a
// watcher gets it whole all the same, as nothing is released before its range is complete
// up to there. Of one revision as much is read for that as Config.RevisionBytes, of one at a
// time four times as much; a watcher whose next one is larger is cancelled, with a reason.
//
// # How
//
// A subscription is a span of keys whose events one range tells. Subscriptions cover what is watched; the
// range of one may be unknown for a while, but what its span was handed is owed all the
// time. What was before a subscription began is asked for only where a watcher begins there: one
// from now on asks nobody and wakes nobody. A subscription is fed by this node's own replica if there is one, which costs no message,
// else by the leader. A allocation that is owed for longer than Overdue is asked for at the
// range's leader, whose answer names a place in the range's order of changes and counts
// as soon as the feed has come there.
//
// Watchers of one span at one position are a group, which collects what may not leave
// yet. A watcher that begins in the past, and one whose client is too slow, has a group
// of its own that reads history, up to where the events of late are kept in memory;
// there it joins the others.
//
// # What if …
//
// … a revision is lost with its leader? The range's next event says so, or the next
// leader when asked.
//
// … a transaction writes several ranges? Its revision has a record for each in the log, and
// leaves when all of them have brought it. A range may bring it long after higher ones, or
// in pieces: while a lock of it is there, the range says that it is complete up to below
// it, and so does each heir that has a part of the lock.
//
// … a range is split? Its subscription gives way to those of all its heirs, which owe what it
// owed and begin where it was complete.
//
// … a allocation names a range that nobody here knows? Nothing at or above it leaves until
// the map of ranges tells, or, after Overdue, until all subscriptions have been asked: the leader
// of a range that was not split in between is not its parent.
//
// … the sequencer changes, or this node falls out of its log? Of the revisions between
// nobody tells; all subscriptions owe them, and each leader is asked once.
//
// … all replicas of a range have moved? When each of those that were known has failed,
// the map of ranges is asked anew.
//
// … a feed breaks? It is opened again where it was complete, elsewhere; what comes twice
// is dropped.
//
// … the local replica lags or is cut off? Its leader's answer names a place that the
// feed does not reach; the feed moves to the leader.
//
// … what a watcher has not got yet is compacted? It is cancelled with the revision.
//
// # What it does not do
//
// It does not speak etcd's protocol, decide who may watch, or look at values. Nothing of
// it runs while nobody watches. Package etcdapi calls it.
package watch
