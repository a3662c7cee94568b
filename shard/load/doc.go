// Package load measures how large and how busy the ranges of a node are, and
// splits those that this node leads and that exceed a bound.
//
// Each replica holds a Range, which counts its requests. One Meter for the node
// turns the counts into rates, asks the store for sizes, and starts splits. A
// split moves no data and asks no other node, and only the leader can see from
// the keys whether its range divides. So the leader decides alone, and placement
// learns of the split as of any other.
//
// # What is guaranteed
//
//   - A range at rest costs no timer, tick or goroutine. Its first request or
//     entry puts it on the meter's list again.
//
//   - Counting takes no lock and no clock reading of its own. A request outside
//     the sample costs a few additions and one comparison.
//
//   - A split by size needs an estimate of the span that the range has now. A split
//     by load needs load above the bound for splitAfter, and a sample that divides.
//
//   - At most splitsAtOnce automatic splits of a node are under way.
//
//   - A range that exceeds a bound and is not split says why (Figures.Unsplit).
//
//   - Samples, estimates for each tick and retries are bounded.
//
//   - The heat map gets each counted request once: at the next tick, or when Run ends. See package heat.
//
// Rates and sizes are estimates: they follow within seconds and serve decisions,
// not accounts. The package does not divide a range by itself: it names a key, and
// the Owner splits.
//
// # How it works
//
//	replica, its lock held                     Meter.Run, one goroutine, every second
//
//	Read, Wrote ──▶ counts ────────────────▶ rates: means over 10 s
//	     │ one of many                          │
//	     └─────────▶ sample ── 10 s old ──────▶ where does the load divide?
//	Applied ──────▶ applied bytes ───────────▶ size: estimate of the tables + bytes not in them
//	                                            │
//	                                            ▼ too large, or busy for 30 s and divisible
//	                             Owner.CanSplit ──▶ key ──▶ Owner.Split ──▶ retry later if it fails
//
// The size of a range is what the store's tables hold of its span, plus the bytes
// that were applied since those tables were written. The meter estimates it again
// when the store has written tables or the span has changed.
//
// # States of a range
//
//	          Read, Wrote, Applied, Measure
//	at rest ────────────────────────────────▶ measured ──── load ≥ bound ────▶ hot: sampled
//	   ▲                                        │  ▲                             │
//	   └── 30 ticks without a request or entry ─┘  └── load < 0.8 × bound, split ┘
//
// # Life of a split
//
//  1. Measure. Each replica counts what it serves and applies in plain fields, under the
//     lock that a request takes anyway. Once a second the meter of shard/load turns the
//     counts into decaying means, for active replicas alone. A replica at rest is on no
//     list; its first request puts it there. A range's size on disk is the store's estimate
//     plus what was applied since. The estimate is renewed when the store has written
//     tables, for 100 ranges a second at most. Measures of shard's Store returns it all.
//  2. Too large (--range-max-bytes, 256 MiB). The leader looks for the key in the middle: it
//     asks the store some dozens of times how much lies below a key (mvcc.FindSplitKey), which
//     reads no data. If much is only in memtables, they are flushed before. If one key with
//     all its versions has more than seven eighths, nothing is split. The next look is a
//     minute later, then ever later, up to an hour.
//  3. Too hot (--range-split-load, requests a second). While the load is above that, the
//     leader samples 128 requests in 10 s. keyspace/divide looks for a key with a quarter or
//     more of the load on each side: the earlier half of the sample proposes it, and the
//     later half must confirm it. Three kinds of load are left alone: a single hot key, load
//     that moves along the keys (a split would soon have all of it on one side), and
//     requests that span everything. After 30 s of divisible load the range is split.
//  4. Split. It is the same as by command. At most two splits run on a node. A range waits
//     if its members are changing, if one of its nodes is silent, or if it was split in the
//     last 10 s. After a split each half is measured by the tables of its own span. Data in
//     memtables count for neither half, so that nothing is split for bytes that it lost.
//  5. If not. skein range show, the log (once) and skein_shard_splits_left_total say why a
//     range is not split.
//
// The leader decides, and not placement. (The leaders in placement/decide/simulate do the
// same.) A split moves nothing and needs no other node. The sample need not travel. Sizes
// are right again at the leader immediately after a split, and in placement's reports only
// later. And only a range's keys say that it cannot be divided, so that anybody else would
// ask again and again.
//
// # What if
//
//   - One key has most of the bytes or of the load: The range stays whole and says
//     so. The meter tries again, later each time, up to an hour.
//
//   - The load moves along the keys, or requests span the range: No key divides such
//     load. The range stays whole and says so.
//
//   - A range was just split: Bytes that are not in tables may belong to either half.
//     They count for neither until the store writes them, so no half is split again
//     for bytes that it lost. Both halves wait splitRest before another split.
//
//   - The leadership moves: The counts and the size stay, and the new leader measures
//     its range at once. A sample ends with the leadership.
//
//   - A member of the range is changing, or a node is silent: CanSplit refuses, and
//     the meter tries again after splitRetry, later each time.
//
//   - Thousands of ranges come into use at once, as at a start: The meter asks the
//     store for estimatesPerTick sizes at each tick.
//
//   - The store writes tables or compacts while ranges rest: The meter looks again at
//     those that had bytes outside of tables, and at sweptPerFlush others.
//
//   - The owner stops: The meter drops the range at its next tick. Run ends with its
//     context and waits for the splits that it started.
//
// # Locks
//
// The owner's lock guards a Range. Owner.LoadState is called with it, Owner.CanSplit
// and Owner.Split without it. The lock of the meter's list is a leaf below it. Neither
// is held over the store.
//
// # Files
//
//   - meter.go: The Meter, its tick, and ranges at rest.
//   - split.go: When a range is split, where, and the retries.
//   - hot.go: Sampling of hot ranges, and the verdict on a sample.
//   - range.go: The counts of a replica, its rates and its size.
//   - heat.go: What the heat map gets.
//   - sampler.go: An even sample of requests.
//   - list.go: The ranges that have come into use.
//   - metrics.go: The metrics.
package load
