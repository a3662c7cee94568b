// Package mvcc keeps the versions of user keys in package engine's store: put, read
// at a revision, scan, count, history, removal of old versions, hash. There is no
// index in memory; the order of the physical keys is the index.
//
// It has no state, no goroutine and no lock: every function works on the Reader or
// Writer that it is given, so that atomicity and isolation are those of the batch,
// snapshot or iterator behind it. It knows neither raft nor requests: revisions,
// sub-revisions and versions are chosen by its caller, package shard, which alone
// uses it.
//
// # Model
//
// A user key has at most one version for each revision: what the transaction left of it. A
// version is a put or a tombstone. Where a transaction has written a key before (etcd
// refuses two puts of a key, but lets a put and a delete pass that are in two transactions
// within it) the version carries those earlier writes: no read shows them, and History
// makes events of them. They stay for as long as it does.
// Physically a version is one Pebble key, (user key, revision), and the versions of a user
// key lie side by side, the newest first:
//
//	key/"a"@9   tombstone
//	key/"a"@7   put, create 3, version 2
//	key/"a"@3   put, create 3, version 1
//	key/"b"@5   put, create 5, version 1
//
// A read of "a" at revision 8 seeks to (a, 8) and stands on (a, 7). A scan goes from
// user key to user key by Pebble's NextPrefix and does not see the versions between.
//
// # Compaction's rule
//
// With the compacted revision C, these versions count, and RemoveOld keeps them:
//
//   - every version above C;
//   - of each user key the newest version at or below C, unless it is a tombstone
//     below C. A tombstone at exactly C stays, because a watch may begin at C and
//     must see it.
//
// In the figure, C = 7 removes (a, 3), C = 9 removes (a, 3) and (a, 7) and keeps the
// tombstone, and C = 10 removes it too. The rule is monotone: removing by C and then by
// D > C leaves what removing by D alone does. So replicas may be at any place of
// their removal, and Hash, which counts by the rule and not by what is there, is the
// same on all of them.
//
// # What if
//
//   - a crash takes unflushed removals back: the next RemoveOld removes again.
//   - a reader asks below the compacted revision: it gets what is left. The caller
//     checks, and checks again after it took its snapshot.
//   - a stored value cannot be decoded: ErrCorrupt, and nothing is guessed.
package mvcc
