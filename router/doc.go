// Package router is a gateway's side of the keyspace. It sends each request to the range that
// holds its keys, reads over many ranges at one revision, and coordinates transactions over many
// ranges. It retries without the client's notice whatever certainly was not proposed. Packages
// etcdapi, watch and lease call it. It reaches ranges by rangeapi's Client, and the range map and
// the sequencer by placement's. It holds no data, and no state that it cannot ask for again.
//
// # What it guarantees
//
//  1. A write is sent again only if the first attempt did not and will not take effect, by
//     kverror's table.
//  2. A linearizable read is answered at one revision, asked for after the request came. A
//     serializable read is answered at one revision that replicas of this node have resolved.
//  3. A read of any size takes a bounded part of the node's memory. It waits for that part in the
//     order in which reads began, until its client's deadline.
//  4. A request ends at its deadline. Its work ends after Config.Timeout with etcd's timeout error;
//     a large read is many pieces of work.
//  5. A transaction over several ranges happens at one revision or not at all.
//
// # How it works
//
//	etcdapi ──▶ Put, DeleteRange, Txn ─── one range ───────────▶ routing ──▶ rangeapi.Client
//	                   │ several ranges                              ▲
//	                   ▼                                             │
//	              transaction: plan, prepare, revision, commit ──────┤
//	                                                                 │
//	etcdapi ──▶ Range, RangeStream ── current revision ──▶ span readers, one range's page each
//	                   │ serializable
//	                   └──▶ this node's replicas
//
// The range cache holds descriptors and the node that led each range last. An answer that refuses
// a request brings newer descriptors or the leader. Without either, the router asks the replicas
// in turn and loads the range map anew. A node that is not alive is asked last.
//
// Start is for callers without a goroutine for each request. It begins the first attempt of Put, DeleteRange or Txn, if the
// range is led here. The function that it returns waits for the answer, and then tries again as those three do.
//
// # Life of a get
//
//  1. Revision. The gateway asks the sequencer for the current revision R, in the coalesced request
//     that writes use, with count 0. R becomes the header's revision, and the answer is the state
//     at R.
//  2. Route. The router reads all ranges of the span at R in parallel, from their leaders, page by
//     page. A page has as many keys as fit into its bytes, and says where the next one begins. After
//     a split, a move or a lost leader the router asks once more for the rest. A RangeStream passes
//     each page to its client as the leader has encoded it. A read with a limit asks the ranges one
//     after the other, because most such reads end in the first range.
//  3. Read. The leader waits for changes of these keys that were under way when the read arrived and
//     whose floor is below R. It checks its lease, or does a ReadIndex, in the same term. It reads a
//     single key from the version cache if the newest version is there and at or below R, otherwise
//     from a Pebble snapshot. Last it compares R with the range's compacted revision. If the overlay
//     is discarded meanwhile, the read starts over.
//  4. Count. The range counts its live keys, or remembers an earlier count. The leader remembers the
//     keys behind a page in its range, and the gateway those in later ranges. So each page of a
//     client costs one request.
//  5. Serializable. Such a read asks no sequencer. A read in one range is answered by this node's
//     replica at its resolved revision. A read over several ranges takes the highest resolved
//     revision of their replicas here, and asks the leaders of the ranges that are behind. If they
//     do not answer soon, or cannot exist for lack of live voters, it takes the lowest, which needs
//     nobody else. The header names the revision, which does not go back for a client of this node.
//
// # Life of a transaction over several ranges
//
// A transaction within one range is a put with compares and costs no more. All others:
//
//  1. Plan. The gateway predicts the path through the compares. At first it assumes that all hold;
//     later it evaluates them at one revision. A path without writes is a read at that revision.
//  2. Prepare. In parallel, each range gets the compares that lead to the path (guards) and its part
//     of the writes. It evaluates them on its newest state and replicates one lock. The lock keeps
//     the compared keys unchanged and holds the writes (intents), which lack only their revision. A
//     transaction that meets a lock waits. Of two transactions the younger gives way, and starts
//     over with its age. After maxMisses wrong paths the gateway locks all compared keys and
//     chooses the path under these locks.
//  3. Commit. The gateway asks for one revision and names all ranges that write. The anchor is the
//     smallest key that the path writes. Its range decides: it stores the commit record if the
//     anchor's lock is still there, and the same entry turns the anchor's intents into versions.
//     A path without changes has no record. It ends the anchor's lock instead, and starts over if
//     that lock was gone. Otherwise a gateway that was taken for dead might mix compares of one
//     moment with reads of another.
//  4. Answer. Its reads see the revision before its own, under its own writes. Its own locks do not
//     block them, and compaction waits for them.
//  5. Resolve. The other ranges turn their intents into versions. The gateway forgets the record
//     afterwards, together with others, every 20 ms. A delete too large for one entry has no
//     intents: its lock covers the span, which is deleted in entries of bounded size.
//
// # Life of a compaction
//
//  1. Commit. The placement group commits the compacted revision. It answers once every later
//     answer of the sequencer carries that revision. From then on no gateway answers a read at
//     an older one. With --auto-compaction-retention package compactor asks for compactions, on
//     the node that leads placement.
//  2. Raise. Nodes learn of it with the revisions that they ask for, or within a minute. The
//     leader of each range that has changed raises the range's own compacted revision by an
//     entry. A range at rest sleeps on.
//  3. Remove. Each replica then removes old versions by itself. It takes one bounded step at a
//     time (--compaction-batch-limit), over all ranges of the node in turn. After each step it
//     pauses three times as long as the step took, or for --compaction-sleep-interval. So
//     removal takes a quarter of a core at most. It looks only at blocks with versions newer
//     than its last pass.
//  4. Wait. A physical compaction is answered when every replica on a live node has removed.
//     The gateway asks the leaders for the entry that raises the revision, and then every
//     replica. (etcd waits for the one member that was asked.) A range keeps what transactions
//     over several ranges may still read. If that delays the compaction, the range's leader
//     asks all nodes whether they coordinate a transaction that began earlier. So the
//     compaction waits as long as those transactions take. A live node that does not answer
//     delays it by 20 s.
//
// # States of an attempt
//
//	planned ─▶ preparing ─▶ prepared ─▶ sequenced ─▶ committed ─▶ resolved ─▶ forgotten
//	               │            │           │            │
//	               └────────────┼───────────┘            └─ gateway gone: the anchor's range resolves
//	                            ▼
//	                        aborted ─▶ planned again, under a new name
//
// An attempt's name is never used again, so a late command of an aborted attempt has no effect.
//
// # What if
//
//  1. The client goes away: before there is a revision, the attempt is aborted. Afterwards it goes
//     on without the client.
//  2. The gateway dies: once there is a commit record, nothing depends on the gateway. A range asks
//     about locks older than half a second. If the coordinator's node is dead or does not know the
//     attempt, the anchor says what became of it, or aborts it for good.
//  3. The anchor's range has no quorum: the locks of its transactions stay. Questions in vain get
//     half of a range's and of a node's questions at a time, so other locks do not wait for them.
//  4. The answer to a commit is lost: the gateway sends the commit again with the same revision. If
//     others have decided by then, the client learns that the fate is unknown.
//     The same holds for a commit that is refused. If no repetition can change the refusal, the
//     attempt ends: it is aborted, or the anchor decides if an earlier commit may have been executed.
//  5. A range splits under an attempt: the attempt starts over, or its locks are resolved in all
//     heirs.
//  6. A read's revision is compacted before it is read: a read that named no revision starts over.
//  7. The node stops: Drain lets attempts that have a revision end.
//
// # Invariants
//
//  1. The range cache holds no two ranges that overlap, and no older descriptor replaces a newer
//     one.
//  2. A revision that the sequencer gave to an attempt is used by that attempt or by nobody.
//  3. An attempt is active at its coordinator as long as the coordinator may commit it or resolves
//     its locks.
//  4. Bytes that are returned to a budget were taken from it. (package internal/budget)
//  5. The revision of serializable reads of a range never goes back on this node.
//  6. What waits for the memory of an answer holds no lock that another reader waits for. [newTxn]
//
// # Locks
//
// coordinator.mu, txn.mu, rangeCache.mu and counts.mu are leaves: none is taken
// under another, and none is held over a call of another package. Lookups of a
// key take no lock, because each change of the cache makes a new slice.
//
// # Files
//
// From the top down; calls go downwards (internal/archtest holds it):
//
//	own.go           requests of the process itself
//	router.go        Router: make, stop, what other packages learn from it
//	kv.go            Put, DeleteRange, Txn, Compact
//	load.go          versions for a new cluster
//	hash.go          the hash of all ranges
//	cut.go           the versions of a cut through the store, page by page
//	lease.go         a lease's end over all ranges, and the keys of a lease
//	txn.go           a transaction over several ranges: attempts until one is decided
//	txncommit.go     revision, decision, resolution and abort of an attempt
//	txnprepare.go    prepares all participants of an attempt
//	txncompare.go    evaluates compares at one revision
//	txnanswer.go     the answer of a transaction
//	pusher.go        what becomes of an attempt whose lock somebody meets
//	stream.go        RangeStream
//	read.go          Range, and the revision of a read
//	serializable.go  serializable reads
//	readspan.go      one read of a span, from one range or many
//	spanreader.go    reads a span page by page
//	nearby.go        reads of ranges from the replicas of this node
//	count.go         counts of keys, and those remembered
//	readrange.go     one read of one range
//	txncommand.go    sends transaction commands to ranges
//	txnattempt.go    the state of a transaction and of its attempts
//	txnplan.go       a path through the compares, and each participant's part of it
//	txnreads.go      which revisions transactions may still read
//	sequence.go      the current revision
//	coordinator.go   the transactions that this node coordinates, and their budget
//	reservation.go   the budget of answers
//	routing.go       finds a range's leader, and retries
//	limit.go         a request's time
//	shape.go         requests for parts of a span, and answers made of parts
//	cache.go         the range cache
//	config.go        Config, and what a router needs of others
//	metrics.go       metrics
package router
