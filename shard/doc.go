// Package shard is one replica of a range: the state machine that every replica
// runs, and what the leader does on top of it: evaluate, sequence, propose, apply,
// answer. Package shard/eval says what a request does, shard/locktable who waits for the
// locks of transactions, shard/command what stands in the log.
//
//	Client ── bus method 16, or a function call ──▶ Store ──▶ Replica
//
//	 writes   queue ─▶ evaluate ─▶ sequence ─▶ propose ─▶ apply ─▶ answer
//	                   (pool)      (Sequencer) (raftgroup) │
//	          overlay: ◀─ added ──────────────── removed ──┘
//
//	 reads    wait for older changes of the keys ─▶ lease or ReadIndex ─▶ Pebble
//	          ─▶ compacted? span? ─▶ answer
//
// Packages below it have parts of a replica: command the bytes of log and state, locktable the
// locks of transactions, rangefeed the feeds of applied events, load sizes, rates and automatic
// splits. Package replicas decides which replicas a node has.
//
// A Store holds the replicas of one node. It has a fixed pool of goroutines that
// evaluate, one range at a time each; a caller waits in its own goroutine, and a
// range that nobody asks has no goroutine, timer or channel.
//
// # What it guarantees
//
// S1. A batch belongs to the leadership in which it was evaluated: a term, and
// within the term a chain. Each entry names the entry that it was evaluated on and
// is applied only on that one, in its own term and generation; anything else is a
// no-op on every replica alike. So a write that was lost in the middle takes with
// it all that were evaluated on top of it, and no stale compare ever wins.
//
// S2. Everything that can refuse a request is settled before a revision is asked for
// (package eval). After that only the loss of leadership drops a write.
//
// S3. An answer that shows what is not applied yet is held back until it is: a
// write until its own entry is applied, a request that changes nothing until every
// pending version that it saw is applied and the leadership was confirmed after it.
//
// S4 is package eval's: a revision that is not known yet is above its floor.
//
// S5. A read at R answers the state at R exactly: it waits for the changes of its
// keys that may be at or below R, then confirms the leadership, then reads, then
// checks the range's compacted revision and generation.
//
// S6. A request that fails says whether it may have been applied. "Not applied" is
// said only of what was never proposed, was certainly dropped, or is behind an
// entry of a newer term in the log.
//
// S7. From proposing a split until its fate is known the leader answers nothing for
// the span that leaves.
//
// S8. Every entry carries the hash of all versions before it, as its leader counted
// them; a replica that counted otherwise stops the node with both values.
//
// S9. Everything is bounded: bytes in all pipelines of the node, the queue of a
// range, an entry, the count of batches in flight, remembered pages and versions.
//
// S10. A range's resolved revision is a fact that any replica knows from what it has
// applied: Every version at or below it that there will ever be is applied here. If a range
// has fallen silent, its leader answers for it (AwaitResolved). It answers only when
// everything that may yet appear has: batches that are sequenced or proposed, and those behind
// a split whose fate is open. Feeds stand on it, see package rangefeed.
//
// S11 is package eval's: what the version cache knows is true. Here each version is replaced
// when a batch of the leader's own is applied; whatever else changes the replica's state
// ends its key epochs.
//
// S12. A lock of a transaction over several ranges is a fact of the log. What was
// compared under it stays as it is, and nobody else writes what it will write; package
// locktable says who waits for it. A transaction waits only before it has a revision. It
// happens when its record is applied at its anchor, which needs the anchor's own lock.
// Whoever decides against it takes that lock away and leaves a fence. No lock and no record
// outlives the interest of a coordinator by more than seconds.
//
// S13. A key is attached to a lease only while the range has a mark of it, which says that
// the lease's record lists the range; apply refuses anything else. A mark comes only by a
// registration that was asked for and answered in one leadership, without a revoke of the
// lease reaching the range in between. So whoever revokes a lease, having locked its
// record, finds every key.
//
// S14. A replica answers by itself (ReadHere) at revisions up to its resolved one. No version
// at or below that will come on any replica. The answer needs no leader, and is never taken
// back.
//
// # Large reads
//
// A read of any size is made of pages (rangeapi.Page), each of so many bytes at most and complete
// in itself: the next one begins where this one ended, at the same revision, at whatever
// range and leader there is by then. Keys leave a range as they will stand on the client's
// wire. How many keys there are behind a piece is remembered by the place where it ended.
//
// # Leases
//
//	put to a lease   mark ─▶ evaluate; no mark ─▶ Leases.Register ─▶ mark (an item) ─▶ evaluate
//	Revoke           in one range: tombstones, and the mark's end, in one entry
//	Prepare          in several: a lock on the mark and on all keys; the mark goes with it
//	LeaseKeys        the keys of a lease
//
// The index lease to keys is the node's and written with the versions, each of which says
// which lease its key leaves. A split moves nothing in it, both halves keep the marks, and a
// snapshot carries what its marks cover.
//
// # Transactions over several ranges
//
//	Prepare  guards and writes are evaluated under the lock table ─▶ lock with intents
//	Commit   at the anchor: record, and the anchor's own intents become versions
//	Resolve  at the others: intents become versions, or nothing
//	Forget   at the anchor, when no lock is left
//	Decide   who meets an old lock and finds no coordinator: the record, or a fence
//
// All are items of a batch's entry and obey its chain, term and generation; a batch of
// items alone asks for no revision. A range that has no lock and no record has no lock
// table, and pays a comparison with nil.
//
// # What if …
//
// … the leader loses its term while a batch waits for revisions? The batch and the
// overlay behind it are discarded, its requests are rerouted unseen, and the late
// answer is ignored: its batch is nobody's any more. The numbers bear no event.
//
// … it loses its term after the proposal? The requests wait for the log: the entry
// itself answers them, or the first entry of a newer term says that it never
// comes. Beyond FateTimeout they get etcd's error for an unknown fate.
//
// … a proposal is dropped in a term that goes on (a transfer that failed)? The chain
// is cut there: what was proposed behind it applies nowhere, and the next batch is
// evaluated on the last entry before the cut.
//
// … a client gives up? Before evaluation its request is dropped, after it its write
// is still proposed.
//
// … a follower skips a split because a snapshot carried it past? The child's leader
// sends to a group that is not here; this node asks it for the descriptor and opens
// an empty replica, which a snapshot fills.
//
// … two ranges come to one span? The order to create a range as it was founded may
// arrive after a snapshot of its child. Whoever is about to hold a span claims it,
// and who comes later is refused: two logs over one span would undo each other.
//
// … placement has no leader when a range is to be split? The child's id comes from a
// block that was fetched before.
//
// … a replica disagrees? The node stops: see S8.
//
// … a range splits under a lock? The lock is cut, both halves keep its name, and the
// record finds them by their keys. The record itself goes with the anchor key.
//
// … a merge brings a half back to where the other one was ended, or two locks of an attempt
// into one range of which one was ended before? What has lost its anchor's half commits
// nothing, and the mark of a lease goes only where the whole range has no key of it, no lock that
// is to attach one, and no other lock that revokes it.
//
// … a coordinator dies, or is cut off from whoever meets its lock? The range's leader asks
// its node, and if that does not know the attempt or is not alive, has the anchor decide.
// A coordinator that lives and comes late finds its lock gone and starts over.
//
// … the answer of a registration comes late, when the lease was revoked meanwhile? The revoke
// has ended the registration here, and nobody takes the answer. At another leader nobody
// knows of it.
//
// … a transaction over several ranges lacks a mark? It may hold something that a revoke
// waits for, for which the registration waits: it gives way, and waits only while it holds
// nothing.
//
// … a node crashes between a snapshot and what it has to forget of its old index? What is
// left names keys whose versions know better.
//
// … a prepare arrives when its attempt was decided against? The anchor's fence refuses
// it; anywhere else it leaves a lock that no record lists, which is pushed away.
//
// # What it does not do
//
// It does not route, merge answers or events of several ranges, coordinate transactions
// over them, or count the time of leases. A delete too large for one entry is
// refused as such: its gateway makes a transaction of it. Latches need no table:
// evaluation of a range is serial, the overlay lets the next write of a hot key begin at
// once, and a lock that is evaluated and not yet applied is in the lock table.
package shard
