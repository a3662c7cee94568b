// Package wal is the one log that all raft groups of a node share.
//
// It stores raft entries, hard states and the removal of whole groups. One write and
// one fsync serve every group that submitted a batch during the previous fsync.
// raftgroup is its only writer. Nothing else in Skein is durable before the wal reports
// it durable: Pebble runs without a log of its own.
//
// # What is guaranteed
//
//   - A synced batch whose completion was called without an error survives any
//     crash. Recovery finds a prefix of the submitted batches: nothing behind a lost
//     batch survives, and no batch survives in part.
//   - Recovery cuts a torn tail. It never cuts damage to bytes that a mark calls
//     synced, and never overlooks a missing or shortened file: Open fails with a
//     *CorruptionError that names file and offset. A mark stands directly behind the
//     bytes that it proves, so the loss of the very last block of the log destroys
//     data and proof together, and is cut as a torn tail. docs/format/wal.md lists
//     what is not detected.
//   - Recovery never reads data from an earlier use of a recycled file as a record.
//   - After a failed write or fsync the log accepts nothing more, for good (Fatal).
//   - Submit never waits for the disk.
//
// The log does not know what entries mean, does not decide what may be truncated, and
// does not repair: a damaged log is left to the operator or to placement. It cannot tell
// a lost log from a new one; see BeganEmpty.
//
// # How it works
//
// The log is a list of segment files of one size, filled with zeros ahead of use
// and recycled when dead. A segment has a random salt and a sequence number;
// every record names the salt, and its checksum also covers sequence and offset.
// A sealed segment ends with a mark that names the next one, which is on the disk by
// then. The next segment records where its predecessor ends. So the loss of either is
// detected.
//
// Each record repeats its group's whole small state (compacted index and term, hard
// state). A group therefore needs only its newest record and those with live entries,
// and the log can drop its oldest segment without reading it. This is the whole
// garbage collection:
//
//	 oldest                                            active     prepared
//	[ 7: g1 g9 ][ 8: g1 ][ 9: - ][ 10: g2 g3 ... ] --> [ 11 ]  -> [ 12 ]
//	      |                                               ^
//	      '-------- tails are written again --------------'
//
// A group is listed at the oldest segment that it needs. The oldest segment is
// recycled when its list is empty, everything submitted up to then is durable, and a
// durable mark says that the log begins later.
//
// A group that holds an old segment with a small tail is rewritten at the head. A rewrite
// takes its place in the order of submission, so no rewritten entry can win over a later
// one. It is made in steps of at most 256 KiB, so that nobody's fsync waits for a whole
// tail. The entries of each record take the place of those with the same indexes.
// The layer above handles groups with large tails: see Pinning. It compacts them, and
// calls Move for those that it cannot compact, which are then rewritten like small ones.
//
// The rewriter needs a ready segment. Without one, the rest of the active segment is for hard
// states and commits, and the rewriter waits. But it goes on where what it rewrites fits there
// with room to spare, and so frees a segment.
//
// The rewriter goes through the log once and then waits until a quarter of the log has
// changed; otherwise it would move a log of nothing but tails for ever. So it writes at
// most four times what others write, and the log stays within five quarters of all tails,
// or within its target if that is longer. If the tails alone exceed the target, a warning
// names the groups with the largest ones.
//
// # What if ...
//
// I1: the process dies. Its writes are in the page cache. Open reads them, writes the
// bytes that are not known to be synced once more, and syncs them before anybody may
// rely on them.
//
// I2: the power fails. Unsynced pages survive at random. A mark before each write
// says up to which offset the segment is known to be synced. Damage below the highest
// such offset is rot; damage above it is a torn tail. When the log falls idle it
// writes the mark at once, without an fsync of its own.
//
// I3: an fsync fails. The pages are clean and may be lost: nothing is retried,
// every pending completion gets the error, Fatal is closed.
//
// I4: the disk is full. The next segment is always prepared in advance. The log goes
// on in it, and Space reports SpaceFull until the one after it is prepared. A file system
// that writes in place has room for every write within a segment; on one that copies
// on write or compresses, such a write can fail and then ends the log as in I3. The same
// holds if the process can open no more files.
//
// I5: a rewrite is interrupted. Each rewritten record exists as a whole or not at all,
// and the old records stay until it is durable. What no step has moved is where it was.
//
// I6: a group was removed, and the engine lost the deletion in a crash. The
// tombstone is kept, and carried along at the head, until Batch.Forget.
//
// I7: the disk hangs. Submit keeps accepting batches, Overloaded and Progress show the
// backlog, and Close gives up after a while and reports what may be lost.
//
// # Locks
//
// Log.mu orders submissions and guards the queue and the list of segments.
// GroupLog.mu guards one group's index. pins.mu guards the lists of groups at
// segments, cache.mu the cache's list. They are taken in this order, and none is
// held over disk access or a callback.
//
// # Files
//
// From the top down: calls between files go down this list.
//
//	recover.go  Open: finding the segments, replaying them
//	writer.go   the goroutine that writes and syncs
//	prepare.go  the goroutine that prepares segments
//	reclaim.go  the old end of the log, the goroutine that rewrites tails
//	read.go     entries read back from a segment
//	log.go      Log: Submit, Sync, Close, its state
//	batch.go    Batch: what is written together
//	group.go    GroupLog: the view of one group
//	pins.go     which groups hold which segment
//	cache.go    entries in memory
//	scan.go     records of a segment, where its proven part ends
//	segment.go  a segment file, made or reused
//	options.go  Options
//	format.go   the bytes of headers, marks and records
//	fsyncs.go   how long the last fsyncs have taken
//	metrics.go  metrics
package wal
