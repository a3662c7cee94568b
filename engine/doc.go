// Package engine is the node's one Pebble store. It holds the data of all
// replicas of the node and knows neither raft nor etcd.
//
// Guarantees:
//
//   - A committed batch is visible at once and durable later: Pebble's own WAL is
//     off, because the shared log (package wal) already holds every change. After
//     a crash the store is a prefix of what was committed, in commit order; only
//     an ingest may survive though older batches that do not overlap it are lost.
//     The applied record of a group moves in the same batch, or the same ingest,
//     as the group's data, so that each group alone is always such a prefix and
//     the wal can replay the rest.
//   - Durability is an event: OnDurable's listeners are called after each flush
//     and read again how far their groups are durable (DurableApplied).
//   - A Snapshot and an open Iterator see one state, also while an ingest excises
//     the span that they read.
//   - IngestTables returns only when what it ingested survives a crash.
//   - A full disk is a state (Space), not an end: reads and deletes go on, and the
//     state ends by itself when there is room again.
//   - An error behind which the store can no longer be trusted (a failed fsync,
//     corruption) closes Fatal, and nothing is called durable from then on. The node
//     must stop; nothing that was acknowledged is lost, because the wal has it. After
//     a failed write of the manifest Pebble cannot go on: the process panics.
//
// What it does not do: it decides nothing about revisions (package mvcc), raft
// logs (package wal) or replicas (raftgroup, shard), which are its callers. It
// starts three goroutines, which Close stops and waits for, and none per write.
//
// # Key layout
//
// The first byte of a key says what it is; docs/format/engine.md has the bytes.
//
//	0x10  node-local       records of the node itself
//	0x20  applied records  one for each group
//	0x30  group-local      free keys of each group
//	0x40  versioned        user keys with a revision, newest first
//
// # What if
//
//   - the process dies: what was not flushed is gone, as a suffix of the commits.
//     The wal replays from each group's applied record.
//   - a flush or compaction finds no room: the ballast file is given up, Space says
//     Full, the flush is tried again once a second, compactions pause, and the last
//     reserve stays for the manifest, whose failed write would end the process.
//   - an fsync fails: Fatal. What is in the page cache afterwards proves nothing.
//   - the machine is slow to flush: commits stall once MemTableStops memtables are
//     full; Metrics count it. The wal's bounds refuse proposals before that.
package engine
