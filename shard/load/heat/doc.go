// Package heat keeps which keys had how many requests when. An operator looks at this map to find a hot prefix, or a
// load that moves along the keys. Counts of ranges are exact. How the load of a range lies over its
// keys is known by a sample.
//
// Each node keeps what its own replicas have served, and a query asks all nodes. A request is counted once, on
// the node that serves it. So a split, a merge, a move or a change of the leader counts nothing twice.
//
// # What is guaranteed
//
//   - Each request that the meter of shard/load counts is in exactly one cell of each of the three stored
//     resolutions, until that column is old enough to go. Bytes likewise.
//
//   - A node takes at most 2,000 samples a second. Samples take at most 2 MiB, and 150 bytes more for each range that
//     was in use within the minute. The store has at most 8 MiB.
//
//   - An idle node costs nothing. It has no columns for that time, and starts no timer.
//
//   - A query needs no quorum and no placement. A node that does not answer is missing, and the rest is shown.
//
// A crash loses the last minutes. A request is counted at the first of its keys: a read of a whole prefix lies at
// the beginning of the prefix.
//
// # How it works
//
//	meter of shard/load, every second        Recorder                            Store
//
//	counts of each range ──▶ Add ──▶ of this minute, by range ──▶ cells ──▶ Add ──▶ column of a minute
//	samples of its keys  ──▶          and its span               (fold)        ──▶ … of ten minutes
//	                                                                           ──▶ … of an hour
//
//	a query ──▶ NewQuery (which columns) ──▶ each node's Store.Grid ──▶ Merge ──▶ rows × columns
//
// A [Column] is a list of cells. Each begins at a key and reaches to the next one's. So a few hundred cells cover all
// keys. fold makes one list of many. Where there are too many cells it joins neighbours, the coldest ones first. A cell
// that another list cuts is divided evenly, since nobody knows better. Nothing is lost by rounding.
//
// # What if
//
//   - The clock is set back: The minutes that come again add to the columns that are there. No request is lost or
//     counted twice; such a column has the requests of more than a minute.
//
//   - The clock is set ahead, and back: The columns of that time displace as many of the oldest ones, and are the
//     first to go after it.
//
//   - A range splits or merges within the minute: What it served before counts for the span that it had then.
//
//   - A column in the store cannot be decoded: It is left out, and replaced when its minute is written again.
//
//   - There is load of very different keys, with long names: Columns have fewer and larger cells.
//
//   - The disk is full: Columns go to the engine's memory, and to the disk with the next flush that succeeds.
//
// # Locks
//
// The Recorder's lock guards what is pending. The Store's lock is below it. The owner's lock of a range is not
// held with either.
//
// # Files
//
//   - recorder.go: what is pending, and the samples.
//   - store.go: columns in the engine, three resolutions.
//   - grid.go: queries, and the map that answers them.
//   - column.go: a column and its bytes, resolutions, keys.
//   - fold.go: many lists of cells to one.
//   - counts.go: what is counted.
package heat
