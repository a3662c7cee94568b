// Package mvcc keeps the versions of user keys in package engine's store: put, read at a
// revision, scan, count, history, removal of old versions, hash. It has no index in
// memory: the order of the physical keys is the index.
//
// It has no state, no goroutine and no lock. Every function works on the Reader or Writer
// that it gets, so atomicity and isolation are those of the batch, snapshot or iterator
// behind it. It knows neither raft nor requests. Its only caller, package shard, chooses
// revisions, operation numbers and versions.
//
// # Model
//
// A user key has at most one version for each revision: the key's state after that
// transaction. A version is a put or a tombstone.
//
// A transaction may write a key more than once. (etcd refuses two puts of a key, but
// accepts a put and a delete that are in two transactions within it.) The version then
// carries the earlier writes: no read shows them, and History turns them into events. They
// stay as long as the version does.
//
// Physically a version is one Pebble key, (user key, revision). The versions of a user key
// are adjacent, the newest first:
//
//	key/"a"@9   tombstone
//	key/"a"@7   put, create 3, version 2
//	key/"a"@3   put, create 3, version 1
//	key/"b"@5   put, create 5, version 1
//
// A read of "a" at revision 8 seeks to (a, 8) and finds (a, 7). A scan moves from user key
// to user key with Pebble's NextPrefix and does not see the versions in between.
//
// # The compaction rule
//
// For the compacted revision C these versions count, and RemoveOld keeps them:
//
//   - every version above C;
//   - of each user key the newest version at or below C, unless it is a tombstone below C.
//     A tombstone at exactly C stays, because a watch may begin at C and must see it.
//
// In the figure, C = 7 removes (a, 3). C = 9 removes (a, 3) and (a, 7) and keeps the
// tombstone. C = 10 removes the tombstone too. The rule is monotone: removing by C and then
// by D > C leaves the same as removing by D alone. So replicas may be at different places of
// their removal. Hash applies the rule and ignores what is physically there, so it is the
// same on all of them.
//
// # What if
//
//   - a crash takes unflushed removals back: the next RemoveOld removes again.
//   - a reader asks below the compacted revision: it gets what is left. The caller checks
//     before, and again after it has taken its snapshot.
//   - a stored value cannot be decoded: ErrCorrupt, and nothing is guessed.
//
// # Files
//
// From the top down: calls between files go down this list.
//
//	history.go    versions in the order of revisions
//	versions.go   the versions of a cut, in the order of keys
//	hash.go       the hash of what the compaction rule keeps; that of one write
//	remove.go     the removal of old versions
//	splitkey.go   the key that divides a span's bytes
//	read.go       Get, Scan, Count: the state at a revision
//	lease.go      the index of keys that are attached to leases
//	codec.go      Version, and its bytes
package mvcc
