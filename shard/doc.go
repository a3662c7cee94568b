// Package shard is one replica of a range: the state machine that every replica
// runs, and what the leader does on top of it: evaluate, sequence, propose, apply,
// answer. Package shard/pipeline carries a write from admission to answer, shard/eval says what a
// request does, shard/locktable who waits for the locks of transactions, shard/command what stands
// in the log.
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
// evaluate, one range at a time each. A caller waits in its own goroutine. An idle
// range has no goroutine, timer or channel.
//
// # What it guarantees
//
// S1, S2 and S3 are package pipeline's. A batch belongs to the leadership in which it was
// evaluated. A request is accepted or refused before it has a revision. An answer that shows
// state which is not applied yet is held back.
//
// S4 is package eval's: a revision that is not known yet is above its floor.
//
// S5. A read at R answers the state at R exactly. It waits for the changes of its
// keys that may be at or below R. Then it confirms the leadership, reads, and checks
// the range's compacted revision and generation.
//
// S6 is package pipeline's: a request that fails says whether it may have been applied.
//
// S7. From proposing a split until its fate is known the leader answers nothing for
// the span that leaves.
//
// S8. Every entry carries the hash of all versions before it, as its leader counted
// them; a replica that counted otherwise answers nothing until a majority agrees with it, and
// goes into quarantine if one does not. The log has both values.
//
// S9. Everything is bounded: bytes in all pipelines of the node, the queue of a
// range, an entry, the count of batches in flight, remembered pages and versions.
//
// S10. A range's resolved revision is a fact that any replica knows from what it has
// applied: Every version at or below it that there will ever be is applied here. If a range
// has fallen silent, its leader answers for it (AwaitResolved). It waits for all that may still
// bring a version at or below the revision: batches that are sequenced or proposed, locks, and
// a split whose fate is open. Feeds stand on it, see package rangefeed.
//
// S11 is package eval's: what the version cache knows is true. Here each version is replaced
// when a batch of the leader's own is applied; whatever else changes the replica's state
// ends its key epochs.
//
// S12. A lock of a transaction over several ranges is a fact of the log. While it stands,
// compared keys do not change, and nobody else writes the keys that it will write. Package
// locktable says who waits for it. A transaction waits only before it has a revision. It
// happens when its record is applied at its anchor, which needs the anchor's own lock.
// Whoever decides against it takes that lock away and leaves a fence. No lock and no record
// outlives the interest of a coordinator by more than seconds.
//
// S13. A key is attached to a lease only while the range has an attachment of it, which says that
// the lease's record lists the range; apply refuses anything else. An attachment comes only by a
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
// A read of any size is made of pages (rangeapi.Page) of bounded size, each complete in itself.
// The next one begins where this one ended, at the same revision. Another range or leader may
// answer it by then. Keys leave a range in the form of the client's wire. The leader's node
// remembers, by the place where a page ended, how many keys follow.
//
// # Leases
//
//	put to a lease   attachment ─▶ evaluate; none ─▶ Leases.Register ─▶ attachment (an item) ─▶ evaluate, for the same
//	                 entry or one behind it
//	Revoke           in one range: tombstones, and the attachment's end, in one entry
//	Prepare          in several: a lock on the attachment and on all keys; the attachment goes with it
//	LeaseKeys        the keys of a lease
//
// The index lease to keys is the node's and written with the versions, each of which says
// which lease its key leaves. A split moves nothing in it, both halves keep the attachments, and a
// snapshot carries what its attachments cover.
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
// # Life of a merge
//
// The left one of two neighbours absorbs the right one. The keys stay where they are, in the
// node's one store. What moves is what the right range knows of them.
//
//  1. Prepare. Somebody asks placement for an operation of kind merge (skein range merge
//     ID). It binds both ranges: neither has another operation. Placement's leader
//     executes it. Each step is idempotent and carries the operation's id, so that the next
//     leader of placement can continue. A merge that is already binding is aborted then,
//     because its right range may stand still. The right range's replicas move to the nodes
//     of the left one's, and its lead to the left one's leader.
//  2. Bind. An entry of the placement group turns the operation from preparing to binding:
//     from now on orders that bind may be sent. Then an entry of the left range binds it. It
//     serves on, is not split and not compacted further, and keeps its members. Leases that
//     it registers from now on register the span of both ranges.
//  3. Store. Every node makes durable what it has applied, while both ranges serve: one node
//     after the other, and all of them once more if that took long. So little is left to
//     store while the right range stands still.
//  4. Freeze. An entry of the right range, behind its closed pipeline. From its proposal on
//     the range answers nothing: no read, no write, no void. Requests wait at its leader.
//     From here on the left range is held: its leader finishes what is under way and
//     evaluates nothing new until it absorbs, so that it can absorb at once. Nothing depends
//     on the hold. It ends with the order, or after 0.4 s: if the rest takes longer, the
//     left range need not stand still with the right one.
//  5. Settle. Every replica of the right range has applied the freeze, and that is durable
//     in its node's store. The nodes are asked together with the freeze and wait for it. If
//     one has not settled within 2 s, the merge is aborted.
//  6. Commit. One entry of the placement group compares both rows (generation and
//     configuration) and replaces them by one row with a generation above both. It is the
//     only commit point. The same entry makes every lease that lists a part of the span list
//     all of it. Abort is another entry there; the state takes one of the two.
//  7. Absorb. An entry of the left range, behind its closed pipeline. Each replica reads the
//     right range's last state from its own node's store and takes it over (applyAbsorb):
//     span, last revision, compacted revision, count, hash, fence, locks (two halves of one
//     become one again), commit records and attachments. The feeds of both ranges end there,
//     and the heir's feed begins at the lower of their two resolved revisions. The version
//     cache of the right range's keys is kept: all who have waited come at once now, and to
//     look up each key would take longer than everything else. Requests that waited at the
//     right range are sent to the left one. What a transaction may still read is pinned.
//  8. Release. After an abort both ranges are released, and a fence makes late orders of
//     this merge ineffective. A merge that is aborted while preparing has ended with that
//     entry, because nothing that binds was ever ordered. So it needs no quorum of either
//     range, and if one has lost its quorum, the other is repaired and moved again. Later an
//     order may be on its way, and the operation lasts until both are released. By then
//     their replicas are on the same nodes, so that lost nodes take the quorum of both or of
//     neither.
//  9. Remove. When a node's store has the absorb for good, the right range's group, log and
//     local state are removed like those of a moved replica, with the same note.
//
// Why the absorb never waits. If an apply waited for another group of its node, it would
// need that group's quorum after a crash. That quorum may be gone, because the other nodes
// have removed the group. The freeze is durable everywhere before the commit, so no crash
// takes the right range back to before it, and a replayed absorb finds what it needs. The
// price is a small flush while the range stands still.
//
// Snapshots past the absorb. A snapshot may bring a slow replica of the left range past the
// absorb. It may overlap a frozen replica of the right range, which ends first and is
// removed then. The left range's resolved revision says nothing about keys that it has got
// in this way. Package shard/replicas removes a frozen replica that nobody here
// needs, once the map gives its first key to another range with a higher generation. The
// generation of a key only grows.
//
// # Life of a load
//
// A new cluster can be given finished versions at given revisions: by restore, import or mirror. Placement says
// that it is being loaded, and hands out no revision meanwhile. So a range sees no other write.
//
//  1. Bulk. Versions come in the order of the store: by key, the newest version of a key first. Only that
//     one counts as living and is attached to its lease. The record's cursor is the last version.
//  2. Follow. Versions come in the order of revisions. The leader reads what each key was before.
//  3. Trim. A lease can end at the source meanwhile. Then its keys go, and its attachment is left, of which no
//     lease's record would know. The leader looks for those without a key, and entries take them away.
//     That is also done while a range follows, whenever its attachments have doubled.
//  4. End. One entry of each range: its last revision is the store's, and it takes no more of the load.
//
// An entry names the cursor on which it stands, and does nothing on another. A split cuts the cursor.
// Merges, compaction and counts rest, and the resolved revision stays where it was: feeds and reads at a
// replica show nothing of it before the end. Keys are attached at once, with the load's one incarnation: the
// leases' records list the ranges before the load is finished, and no lease ends before.
//
// # What if …
//
// … the leadership ends, a proposal is dropped, or a client gives up while a write is under way?
// See package pipeline.
//
// … a follower skips a split because a snapshot carried it past? The child's leader
// sends to a group that is not here; this node asks it for the descriptor and opens
// an empty replica, which a snapshot fills.
//
// … two ranges come to one span? The order to create a range as it was at bootstrap may
// arrive after a snapshot of its child. A replica claims its span before it holds it,
// and a later one is refused: two logs over one span would undo each other.
//
// … placement has no leader when a range is to be split? The child's id comes from a
// block that was fetched before.
//
// … an entry breaks a rule, whatever replica looks at it? It does nothing, on every replica alike
// (refuse.go). The log has a line for it, and a metric counts it.
//
// … a node cannot read the keys of a replica? It goes into quarantine: it votes, leads, applies
// and answers nothing any more. The others serve on. A start opens a replica into quarantine if
// its records cannot be read. A bad table goes once no replica has keys in it.
//
// … a replica's hash differs from its leader's? Either of them may be wrong. The replica asks all
// voters, and those look too (doubt.go). All answer nothing, and apply what is in the log. Who has
// another hash than a majority goes into quarantine. Without a majority nobody answers on.
//
// … a range splits under a lock? The lock is cut, both halves keep its name, and the
// record finds them by their keys. The record itself goes with the anchor key.
//
// … a merge brings a half back to where the other one was ended, or two locks of an attempt
// into one range of which one was ended before? A transaction whose lock at the anchor is lost
// commits nothing. The attachment of a lease goes only when the whole range has no key of it,
// no lock that will attach one, and no other lock that revokes it.
//
// … a coordinator dies, or is cut off from whoever meets its lock? The range's leader asks
// its node, and if that does not know the attempt or is not alive, has the anchor decide.
// A coordinator that lives and comes late finds its lock gone and starts over.
//
// … the answer of a registration comes late, when the lease was revoked meanwhile? The revoke
// has ended the registration here, and nobody takes the answer. At another leader nobody
// knows of it.
//
// … a transaction over several ranges lacks an attachment? It may hold something that a revoke
// waits for, for which the registration waits: it gives way, and waits only while it holds
// nothing.
//
// … a node crashes between a snapshot and what it has to forget of its old index? What is
// left names keys whose versions know better.
//
// … a prepare arrives when its attempt was decided against? The anchor's fence refuses
// it; anywhere else it leaves a lock that no record lists, which is pushed away.
//
// # Locks
//
// A replica's mu guards its applied state as it is published, its pipeline, locks, feeds and load.
// The host's apply pool alone touches what is being applied. No lock is held over the disk, the
// network, the sequencer or a caller's answer. Lock order: a replica's mu, then the
// store's, the pool's, the meter's or the version cache's.
//
// # Files
//
// From the top down: calls between files go down this list.
//
//	serve.go        what other nodes ask on the bus
//	start.go        a Store: start, requests of this node, stop
//	apply.go        the state machine: entries, snapshots
//	drain.go        leaderships are handed over before a stop
//	versions.go     pages of a cut through the range
//	feeds.go        feeds and history of applied events
//	admin.go        what changes, moves or describes replicas: the server
//	merge.go        a merge on every replica
//	loading.go      finished versions for a new cluster
//	doubt.go        replicas that have counted different hashes
//	quarantine.go   replicas that are closed until they are replaced
//	lifecycle.go    a replica as package replicas sees it
//	leadership.go   leaderships that begin and end
//	here.go         reads of this replica without its leader
//	push.go         old locks: what became of their transactions
//	txncommand.go   commands of transactions over several ranges
//	revoke.go       the keys of a revoked lease
//	locks.go        what is applied goes into the lock table
//	members.go      changes of members, transfers
//	resolved.go     the resolved revision
//	read.go         what makes a read at the leader right
//	measure.go      sizes and loads
//	pins.go         what holds a compaction back
//	mergestep.go    steps of a merge at the leader
//	split.go        splits
//	pipeline.go     a replica as its pipeline sees it
//	txnapply.go     items of transactions on every replica
//	lease.go        attachments of leases and their registrations
//	refuse.go       entries that break a rule, and what they have changed until then
//	txnseal.go      what a command adds to an entry
//	removal.go      whether old versions are removed
//	stages.go       where the time of requests went
//	adminclient.go  the client for admin.go
//	replica.go      Replica, its state, its errors
//	metrics.go      metrics
//	limits.go       Limits
//	store.go        Store, its state, what it needs
//	maintenance.go  compacted revisions, old versions, counts
//
// # What it does not do
//
// It does not route, merge answers or events of several ranges, coordinate transactions
// over them, or count the time of leases. A delete too large for one entry is
// refused as such: its gateway makes a transaction of it. There is no table of latches.
// Evaluation of a range is serial, and the overlay lets the next write of a hot key begin
// at once. A lock is in the lock table from its evaluation on.
package shard
