// Package eval says what a request does to a range and what it answers. It evaluates on the
// leader's state: the applied versions, and over them the pending ones, which are evaluated
// and not yet applied. It knows no replica, no log and no other range.
//
//	Input    Store ◀──────────── applied versions, in the engine
//	         Cache, Epochs ◀──── newest applied versions, in memory
//	         Overlay ◀────────── pending versions, by key, oldest first
//	         Leases, Floor, Current, Compacted, bounds
//	           │
//	           ▼
//	Evaluation: Run │ Prepare │ Revoke │ PrepareRevoke
//	           │         view: own writes ▷ overlay ▷ cache ▷ store
//	           ▼
//	Output   Writes: pending versions, for the overlay and the entry
//	         Draft: the answer, which still lacks revisions
//	         Seen: the newest batch on whose fate the answer depends
//	         or an error: WaitError, FutureError, NeedsLease, Refusal, ErrOtherPath
//
// A [Reader] answers what changes nothing, from the same applied state and at a revision: a range,
// a page of one, a transaction without writes.
//
// The owner of the pipeline puts the writes into its overlay and a [Batch]. Once the batch has
// revisions it calls [PendingTxn.SetRevision] and [Draft.Settle]. It takes the versions out of
// the overlay when the batch is applied or discarded.
//
// # Files
//
//	prepare.go       a range's share of a transaction over several ranges
//	revoke.go        the keys of a lease that is revoked
//	read.go          Reader: requests that change nothing, from the applied state
//	readpage.go      pages of large reads
//	cut.go           pages of a cut: stored versions
//	readcount.go     live keys of a span, known or counted
//	evaluate.go      input and output; puts, deletes, transactions of one range
//	compare.go       the compares of a transaction choose its path
//	draft.go         answers that lack revisions
//	rangeop.go       reads inside a transaction
//	sweep.go         the next keys that a committed lock deletes
//	load.go          the versions of a load that one entry has; leases without keys
//	view.go          the state that one request sees
//	spancount.go     living applied keys of spans that transactions count
//	overlay.go       pending versions by key
//	versioncache.go  newest applied versions, and the epochs in which they are true
//	slotindex.go     the index of the version cache
//	pending.go       batches, transactions and versions that are not applied
//	store.go         the applied state in the engine
//	budget.go        what requests may hold of what they read
//	count.go         live keys at a revision, and counts behind pages
//
// # Locks
//
// An Evaluation is for one goroutine. Input.Guard, the replica's mu, guards the overlay, the
// epochs, the record and the counts; the view takes it for each look and holds it over no read of the store. The
// VersionCache, ReadLimit and PageCounts guard themselves. Lock order: Guard, then a part of
// the VersionCache.
//
// # What holds
//
// S2. Everything that can refuse a request is found before it changes anything, and so before
// it is given a revision.
//
// S3, its half here. Seen names the newest batch of which the evaluation has seen a version.
// An answer or a refusal is held back until that batch is applied.
//
// S4. A revision that is not known yet is above the floor of its transaction: the highest
// revision that the node had heard of at its evaluation. So a compare with a number at or
// below the floor is decided, and one above it waits for the revision (WaitError).
//
// S5, its half here. [Overlay.NewestBatch] finds the newest batch with a change of a span that
// is, or may turn out to be, at or below a revision. A read at the revision waits for it.
//
// S11. The version cache holds, under an epoch of a replica, only newest applied versions. The
// replica replaces a version when it applies a batch of its own. Any other change of the
// replica's state ends the epochs, and with them all entries.
//
// A compare, and everything else of a transaction that is decided before its first operation,
// sees the state before the transaction. An operation sees what those before it have written.
//
// # What if …
//
// … a version is applied while a request looks? The view looks at the overlay first and at the
// store after it. A version applied in between is in both; the overlay's is newer or the same.
//
// … the overlay is thrown away meanwhile? The evaluation goes on with the old one. Its owner
// sees that the leadership or the chain has changed, and evaluates again or refuses.
//
// … a transaction reads at a revision that the range has not heard of? FutureError: the owner
// asks the sequencer what was allocated, and evaluates again or refuses.
//
// … a put names a lease without an attachment here? NeedsLease: the owner has the range
// registered with the lease, and evaluates again.
//
// … a request refuses itself by what it saw, such as a key that is not there? Refusal: it is
// held back as an answer is, because what it saw may yet be discarded.
//
// … a revision arrives while an answer is drafted? The draft asks for it before it makes the
// message: it has the revision at once, or remembers to fill it in.
//
// … a range absorbs its neighbour? It takes over the neighbour's epochs ([KeyEpochs.Absorb]).
// Nobody puts anything under them for the neighbour any more.
//
// … a transaction that writes asks for a count? The record knows that of the whole range,
// [SpanCounts] those of spans that were counted before. What is pending is added.
//
// … a count is asked for at an old revision? [LiveCounts] knows the changes since then, up to a
// bound, [PageCounts] what was counted before. Otherwise the store is scanned.
package eval
