// Package engine is the node's one Pebble store. It holds the data of all replicas of the
// node and knows neither raft nor etcd.
//
// # Guarantees
//
//   - A committed batch is visible at once and durable later. Pebble's own WAL is off,
//     because the shared log (package wal) already holds every change. After a crash the
//     store is a prefix of what was committed, in commit order. Only an ingest may survive
//     although older batches that do not overlap it are lost. A group's applied record
//     moves in the same batch or ingest as the group's data. So each group by itself is
//     always such a prefix, and the wal can replay the rest.
//   - Durability is an event: after each flush OnDurable's listeners are called, and read
//     how far their groups are durable (DurableApplied).
//   - A Snapshot or an open Iterator shows one state, even while an ingest excises the span
//     that it reads.
//   - IngestTables returns only when the ingested data survive a crash.
//   - A full disk is a state (Space), not a failure: reads and deletes continue, and the
//     state ends by itself when there is space again.
//   - A bad table with data of ranges alone is reported (OnCorruption), and reads of it fail. No
//     table has records of the node itself beside such data.
//   - After an error that makes the store untrustworthy (a failed fsync, corruption of the node's
//     own records) Fatal is closed, and nothing is reported durable from then on. The node must stop. No
//     acknowledged write is lost, because the wal has it. If a write of the manifest fails,
//     Pebble cannot continue and the process panics.
//
// The engine decides nothing about revisions (package mvcc), raft logs (package wal) or
// replicas (raftgroup and shard, its callers). It starts three goroutines, which Close
// stops and waits for, and none per write.
//
// # Key layout
//
// The first byte of a key is its kind; docs/format/engine.md has the bytes.
//
//	0x10  node-local       records of the node itself
//	0x20  applied records  one for each group
//	0x30  group-local      free keys of each group
//	0x40  versioned        user keys with a revision, newest first
//	0x50  lease index      the user keys attached to each lease
//
// # What if
//
//   - the process dies: what was not flushed is lost, as a suffix of the commits. The wal
//     replays each group from its applied record on.
//   - a flush or compaction finds no space: the ballast file is deleted and Space reports
//     Full. The flush is retried once a second and compactions pause. The last reserve is
//     kept for the manifest, whose failed write would end the process.
//   - the store is above its quota: OverQuota says so. All goes on, and the store is compacted until it
//     is below.
//   - the process can open no more files: as on a full disk, with a reserve of open files in the
//     place of the ballast. A read waits for a file: one while an entry is applied cannot fail.
//   - an fsync fails: Fatal. The page cache proves nothing afterwards.
//   - the machine flushes slowly: commits stall once MemTableStops memtables are full, and
//     Metrics count it. The wal's bounds refuse proposals before that.
//
// # Files
//
// From the top down: calls between files go down this list.
//
//	engine.go    Open, Close, sizes of spans
//	quota.go     the bound that an operator sets
//	export.go    a group's state into tables
//	ingest.go    tables into the store, after a check
//	applied.go   applied records, written and read
//	access.go    reads, batches, snapshots
//	dir.go       a node's directories, locked and compared
//	instance.go  the instance of a node that has no identity yet
//	identity.go  identity files
//	events.go    what Pebble reports: errors, flushes, its log
//	corruption.go  bad tables: what they hold, and who is told
//	manifest.go    whether the manifest is whole
//	durable.go   listeners to durability, Flush
//	space.go     a full disk: the state, the ballast, Pebble's file system
//	files.go     open files in reserve, for when no more can be opened
//	pace.go      the rate of compactions
//	grants.go    how many compactions run at a time
//	options.go   Options, Pebble's table settings
//	comparer.go  the order of keys, filters by revision
//	metrics.go   metrics, the size of the store
//	fatal.go     the error that ends the store
//	keys.go      physical keys
package engine
