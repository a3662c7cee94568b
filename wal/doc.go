// Package wal is the one log that all raft groups of a node share.
//
// It stores raft entries, hard states and the fate of whole groups. One write
// and one fsync serve every group that had something to say while the fsync
// before was running. raftgroup is its only writer; nothing else in Skein is
// durable before the wal says so (Pebble runs without a log of its own).
//
// # What is guaranteed
//
//   - A batch whose completion was called without an error is there after any
//     crash, if it was a synced one. Recovery finds a prefix of the submitted
//     batches: nothing behind a lost batch survives, no batch survives in part.
//   - A torn tail is cut. Damage to bytes that a mark calls synced is never cut, nor
//     is a file missed or shortened: Open refuses with a *CorruptionError that names
//     file and offset. Marks stand directly behind what they prove, so a lost block at
//     the very end of the log takes what it held together with the proof and is cut;
//     docs/format/wal.md says exactly what is not detected.
//   - Nothing of an older use of a recycled file is ever read as a record.
//   - After a failed write or fsync the log takes nothing more, for good (Fatal).
//   - Submit never waits for the disk.
//
// It does not know what entries mean, does not decide what may be truncated, and
// does not repair: a damaged log is the operator's or the placement's matter. It
// cannot tell a lost log from a new one; see BeganEmpty.
//
// # How it works
//
// The log is a list of segment files of one size, filled with zeros ahead of use
// and recycled when dead. A segment has a random salt and a sequence number;
// every record names the salt, and its checksum also covers sequence and offset.
// A segment that is left ends with a mark that names the next one, which is on the
// disk by then, and the next one says where it ends: neither can be lost unseen.
// Each record repeats its group's whole small state (compacted index and term,
// hard state), so that of a group only the newest record and those with live
// entries are needed, and the log can be cut off at its old end at any segment
// without looking at what was in it. That is the whole garbage collection:
//
//	 oldest                                            active     prepared
//	[ 7: g1 g9 ][ 8: g1 ][ 9: - ][ 10: g2 g3 ... ] --> [ 11 ]  -> [ 12 ]
//	      |                                               ^
//	      '----- small tails are written again -----------'
//
// A group is listed at the oldest segment that it needs. When the oldest segment
// has an empty list, the file is recycled, but only after everything that was
// submitted up to then is durable, and after a durable mark has said that the log
// now begins later. A group that holds an old segment with a small tail is
// written again at the head as one record that stands for all that is known of
// it; since the head is ordered as everything else is, no rewritten entry can
// win over what was submitted after it. Groups with large tails are the upper
// layer's matter, and so are small ones that are too many: see Pinning. The rewriter
// goes through the log once and then waits until enough has changed, so that a log
// of nothing but small tails is not moved for ever.
//
// # What if ...
//
// I1: the process dies. What was written lies in the page cache. Open reads it,
// writes the bytes that are not known to be synced once more and syncs them
// before anybody may rely on them.
//
// I2: the power fails. Unsynced pages survive at random. Before each write stands
// a mark that says up to where the segment is known to be synced. A bad spot
// below the highest such word is rot; one above it is a torn tail. When the log
// falls idle the mark follows at once, without an fsync of its own.
//
// I3: an fsync fails. The pages are clean and may be lost: nothing is retried,
// every pending completion gets the error, Fatal is closed.
//
// I4: the disk is full. The next segment is always there already; the log goes on
// in it and Space says Full until the one after it could be prepared. Within a
// segment there is room on file systems that write in place; on one that copies on
// write or compresses, a write without room there ends the log as I3 does.
//
// I5: a rewrite is interrupted. The rewritten record is there as a whole or not at
// all, and the old ones are there until it is durable.
//
// I6: a group was removed, and the engine lost the deletion in a crash. The
// tombstone is kept, and carried along at the head, until Batch.Forget.
//
// I7: the disk hangs. Submit goes on, Overloaded and Progress tell, and Close gives up
// after a while and says what may be lost.
//
// # Locks
//
// Log.mu orders submissions and guards the queue and the list of segments.
// GroupLog.mu guards one group's index. pins.mu guards the lists of groups at
// segments, cache.mu the cache's list. They are taken in this order, and none is
// held over disk access or a callback.
package wal
