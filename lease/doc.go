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
// keepalive, or since it was granted. A keepalive is acknowledged only by a node that was
// seen to lead after the call came; whoever leads next counts all TTLs from then on
// anew. Only the monotonic clock counts.
//
// L2. That a lease ends is decided by an entry of the leader's own term. One that was
// deposed, and wakes late, decides nothing.
//
// L3. From the decision on a lease is not renewed and nothing is registered with it. Who
// asks waits for the outcome, a wait bounded by the asker's patience.
//
// L4. An ended lease leaves no key: its record goes only after the Revoker has deleted
// all keys in all registered spans, at one revision. Whoever leads takes up the records
// whose end is decided first, and tries again, later and later, what fails.
//
// # What if …
//
//   - 10,000 leases expire at once: at most PerSecond are decided a second, and no more
//     while many decisions wait for their Revoker, of which Parallel run at a time.
//   - the ranges of a lease have no leader: its attempts wait longer and longer, and hold
//     up no other lease.
//   - the leader is stopped for a minute and wakes: if it was deposed, its decision is a
//     no-op. If nobody else led meanwhile, nobody was told of a keepalive either.
//   - the wall clock is set: nobody looks at it.
//   - the Timer of an earlier term still ends a lease: that is idempotent, and says which
//     incarnation it means.
//
// # What it does not do
//
// It knows no keys and no ranges: the Revoker does. It does not write records: the
// placement group does. It makes no decision on a node that does not lead.
package lease
