// Package lease counts the time of leases and ends them.
//
// The records of leases are the placement group's. On the node that leads it a [Timer]
// has a clock for each of them; on every node a [Gateway] answers etcd's Lease service.
//
//	etcdapi ── Gateway ── placement.Client ──bus── placement.Service (leader)
//	              │                                   │ records      ▲ decisions
//	              │ keys                              ▼ and renewals │
//	           Revoker (router) ◀──── end a lease ── Timer ─────────┘
//
// # What it guarantees
//
// L1. No lease expires before its TTL has passed since the call of its last acknowledged
// keepalive, or since it was granted. Only a node that was confirmed as leader after the call
// acknowledges a keepalive. The next leader starts all TTLs anew. Only the monotonic clock
// counts.
//
// L2. An entry of the leader's own term decides the end of a lease. A deposed leader that wakes
// late decides nothing.
//
// L3. From the decision on a lease is not renewed and nothing is registered with it. Callers wait
// for the outcome until their own deadline.
//
// L4. An ended lease leaves no key: its record goes only after the Revoker has deleted all keys
// in all registered spans, at one revision. A new leader first takes up the leases with a decided
// end. It retries failures with growing pauses.
//
// L5. A revoke by a client who may not write every key deletes only keys that were checked for it.
// It names the revision of the check. The ranges delete nothing if a key of the lease is newer. Then an entry takes the
// decision back, and the gateway looks at the keys again.
//
// # Life of a lease
//
//  1. Grant. It is an entry of the placement group. Its index is the lease's incarnation, so
//     words about a revoked lease never apply to a later one with the same id. On the node that
//     leads placement the Timer counts the TTL on the monotonic clock. The record lists a span
//     from the beginning if the last 16 registrations were all of that span, and it is a range's.
//     So the lease may have a range in which it gets no key. Its end waits for that range too.
//  2. Attach. See "Keys of a lease".
//  3. Keepalive. It is no entry. Keepalives of one node go together to the leader of placement.
//     It acknowledges them only after it has proven that it leads. The next leader starts all
//     TTLs anew, later than anything that was acknowledged, and adds an election timeout.
//  4. End. An entry in the leader's own term decides it, for a revoke and for an expiry. A
//     leader that was stopped and deposed therefore decides nothing when it wakes. From the
//     decision on, registrations, keepalives, lookups and lists of the lease wait for the
//     outcome. The router deletes the keys of all registered spans at one revision and removes
//     the attachments. Then another entry forgets the record, and all callers that waited get
//     LeaseNotFound. A failed attempt is repeated, later each time. A new leader first takes up
//     what is decided.
//
// At most 1,000 expired leases are decided in a second. At most 16 are ended at a time, of
// which at most 8 have failed before. A first attempt takes a second at most. A lease has keys
// in at most 921 ranges, as they were when it was first attached there. All leases together
// take 64 MiB. Beyond either bound the answer is ResourceExhausted.
//
// # Keys of a lease
//
//  1. Attach. A put with a lease checks whether its range has an attachment of the lease. The
//     attachment says that the lease's record lists the range. Without one the put waits before
//     it has a revision. The range's leader has the record list the range. Then the put's own
//     entry brings the attachment. That happens once for each lease and range. A put without a
//     lease pays nothing.
//  2. Index. Each node has an index of the keys that belong to a lease, by lease and key. The
//     batch of the version that attaches or detaches a key writes it. A version that keeps the
//     key's lease writes nothing there. The index knows no ranges: a split moves nothing in it,
//     and both halves keep the attachments.
//  3. Revoke. The lease's record is locked first, so that no range is registered any more. A
//     lease with keys in one range ends by one entry there: all tombstones at one revision, and
//     the end of the attachment. A lease with keys in several ranges ends by a transaction.
//     Each range locks its attachment, so that puts with the lease wait, and the keys. Both go
//     at the transaction's revision. It covers up to 1,024 ranges with keys, out of up to 4,096
//     ranges that the lease's spans may have become. If no range has a key, the attachments go
//     and no revision is used.
//  4. Finish. The revoke has finished, and the lease's record may go, when all its locks have
//     ended. A merge may move such a lock or attachment, and a split may divide it: they are
//     found by the spans that the record lists then. A revoke may be repeated. It never touches
//     a later lease of the same id, which has another incarnation. It is repeated if ranges
//     with parts of the lease's spans were merged meanwhile, because the attachment may have
//     come back.
//  5. Check. The gateway asks placement for the lease and the current revision, then the ranges for the keys,
//     then whether the client may delete them. The revoke carries that revision into the lease's record, so
//     that a new leader knows it too. Each range compares it with its keys under the lock of the lease.
//     If a key is newer in one range, no range deletes any. A lease whose keys are in more ranges than a revision may
//     concern may have lost a part of them by then. While a check is on its way the lease ends like any other: nothing
//     is registered. A revoke without a check takes its place.
//  6. Register. A registration lives in the memory of one leadership. It ends with a revoke
//     that reaches the range, with a split, and with the leadership. So no late answer brings
//     an attachment for a lease that is gone.
//
// # What if …
//
//   - 10,000 leases expire at once: at most PerSecond are decided a second, and fewer while many
//     of them wait for their Revoker. Parallel of these run at a time.
//
//   - The ranges of a lease have no leader: its attempts pause longer and longer, and delay no
//     other lease.
//
//   - The leader is stopped for a minute and wakes: if it was deposed, its decision is a no-op.
//     Without another leader meanwhile, nobody acknowledged a keepalive either.
//
//   - The wall clock is set: nothing reads it.
//
//   - The Timer of an earlier term still ends a lease: the request is idempotent and names the
//     incarnation.
//
// # What it does not do
//
// It knows no keys and no ranges: the Revoker does. It does not write records: the
// placement group does. It makes no decision on a node that does not lead.
//
// # Files
//
//	gateway.go       etcd's Lease service on any node
//	timer.go         the Timer: grants, keepalives, revokes, terms
//	drive.go         the goroutine that ends leases
//	deadlines.go     which lease ends when
//	metrics.go       metrics
//	mutation_off.go  no mutations
//	mutation_on.go   mutations, with the build tag planted
package lease
