// Package locktable keeps the locks of transactions over several ranges at one replica, and
// the requests that wait for them. It knows no replica: a [Waiter] is all it asks of a
// request, and its owner moves requests between the table and its own queue.
//
//	request ─▶ Conflict, Meets ──free──▶ (evaluation) ─▶ Acquire ─▶ (log) ─▶ Apply
//	              ▲      │ a lock is in the way                 │ entry lost   │
//	              │      ▼                                      ▼              │
//	              │     Wait ─────▶ blocked                  Release           │
//	              │                    │  the lock ended: Wake ◀───────────────┘
//	              │                    ▼
//	            Next ◀─────────────  woken
//
// A lock is pending from its evaluation until its entry is applied, then it is a fact that
// every replica of the range has. Only a leader has pending locks and waiters; [Table.DropPending]
// forgets the former when its leadership ends.
//
// # Files
//
//	table.go      the interface: conflicts, changes, what there is
//	wait.go       who waits for whom
//	push.go       which old locks and records to ask about
//	set.go        the locks and records
//	keys.go       the keys and leases of requests
//	spanindex.go  locks and waiters by key
//
// # Locks
//
// A Table has no mutex. Its owner guards it: a replica with its mu, as it guards the overlay,
// because a request is gated, evaluated and blocked in one state. No method blocks or takes a
// mutex. A method calls its owner only for the values of a Waiter. [Shared] is used by several
// tables at a time, and is safe for that.
//
// # What holds
//
// L1. A read waits for a lock that writes one of its keys, and a write waits for every lock on
// its keys. A read at a revision waits only if the transaction's revision may be at or below
// it, which is so for a lock with a lower floor.
//
// L2. Nobody waits in a circle. A transaction waits for younger ones only and gives way to older
// ones (wait-die). A transaction that holds nothing anywhere ("patient") may wait for all.
//
// L3. Nobody waits for ever behind others that come later. Waiters have their turn in the order
// in which they first waited. A transaction that only compares a key waits behind an older
// waiter that will write it. One that attaches keys to a lease waits behind an older revoke.
//
// L4. A wake costs what it achieves. Waiters for one key take turns: once the first has locked
// the key again, the others go on waiting without being looked at. Waiters without a key, and
// impatient transactions, each have their turn: what they meet next may be older.
//
// L5. A table without locks and records has no maps. Asking it costs a comparison with nil.
//
// L6. [Shared.Bytes] counts every lock of every table of the node, pending ones with their
// intents.
//
// # What if …
//
// … the entry of a pending lock is lost? The owner calls Release: the lock ends and its waiters
// have their turn.
//
// … the leadership ends? DropPending ends pending locks and wakes all waiters, which the owner
// takes by TakeWoken and answers.
//
// … a sweep makes a lock smaller? Apply replaces it. It keeps its age, and its waiters look
// again: what they wait for may be free.
//
// … a caller gives up? Leave takes its request away from the lock.
//
// … a lease is being registered, and there is no lock to wait for? A Held without a Lock has
// waiters as any other; it never is in the set.
package locktable
