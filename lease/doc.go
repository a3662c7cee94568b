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
package lease
