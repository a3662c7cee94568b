package shard

import (
	"time"

	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
)

// Limits bound what a node's replicas hold and take in. Zero values mean the
// default in the comment.
type Limits struct {
	// MaxRequestBytes bounds one request in its encoded form (etcd's
	// max-request-bytes). Default 1.5 MiB, at most [rangeapi.MaxRequestBytes] by the default of
	// MaxEntryBytes. RequestTooLarge beyond it.
	MaxRequestBytes int
	// StandingBytes bounds what replicas and the rows of the range map take at rest. A node beyond
	// it takes no more replicas, and splits no range. 0 is no bound.
	StandingBytes int64
	// MaxTxnOps bounds compares and operations of a transaction (etcd's
	// max-txn-ops). Default 128. TooManyOps beyond it.
	MaxTxnOps int
	// MaxEntryBytes bounds what one request may write, and what the requests of one
	// entry write together. Default 4 MiB and 64 KiB. A DeleteRange beyond it is refused.
	MaxEntryBytes int
	// MaxRecordBytes bounds the commit record of a transaction, and what an entry of a load brings. RequestTooLarge
	// beyond it: no entry could hold it. A record that only has too little room beside others is tried again.
	MaxRecordBytes int
	// PendingBytes bounds all requests of the node that wait for evaluation, a
	// revision or their entry. Default 128 MiB. TooManyRequests beyond it.
	PendingBytes int64
	// RangePendingBytes bounds the same for one range. Default 32 MiB.
	RangePendingBytes int64
	// BatchRequests bounds the requests of one entry. Default 2048.
	BatchRequests int
	// EvaluateTurn is how long a pass evaluates about, before what it has is sent on its way
	// and other ranges have their turn. Default 4 ms.
	EvaluateTurn time.Duration
	// InflightBatches bounds the proposed and not yet applied entries of a range. What comes meanwhile shares the next one. Fewer
	// cost less for a write under load, and have it wait longer for followers that are far away. Default 8.
	InflightBatches int
	// ScanBytes bounds what one request may read into memory: compares, previous
	// values and answers. Default 256 MiB. AnswerTooLarge beyond it.
	ScanBytes int64
	// ReadBytes bounds what all requests of the node have read into memory and not
	// answered. Default 512 MiB. More wait, but for one alone.
	ReadBytes int64
	// AnswerBytes bounds the keys of one answer to a RangeRequest of a span. Default
	// 8 MiB, well below what a message of the bus may have. ReadByPages beyond it: the
	// gateway asks for pages.
	AnswerBytes int64
	// VersionCacheBytes bounds what the node remembers of the newest versions of keys that it
	// wrote or read lately. Default 32 MiB, about 70,000 keys with values of 256 bytes.
	VersionCacheBytes int64
	// LockBytes bounds what transactions over several ranges have locked and intend to
	// write in all replicas of the node. Default 32 MiB. TooManyRequests beyond it.
	LockBytes int64
	// PrevBytes bounds the previous keys and values that a transaction over several ranges
	// gets back from one range: they fit into a message of the bus. Default 16 MiB.
	// RequestTooLarge beyond it, and nothing is locked.
	PrevBytes int
	// Pages is how many places behind a page the node remembers the count of.
	// Default 4096.
	Pages int
	// FateTimeout is how long a write whose leader was lost waits for the log to
	// tell its fate. Default 7 s, etcd's request timeout.
	FateTimeout time.Duration
	// RemoveBatch bounds the versions that one step of removing old ones looks at, and
	// those that it removes (etcd's compaction-batch-limit). Default 1000. Too high makes
	// steps that others wait for on a small machine, too low spends them on beginning.
	RemoveBatch int64
	// RemovePause is the pause after each such step (etcd's compaction-sleep-interval).
	// Default 0: three times as long as the step took, 1 ms at least.
	RemovePause time.Duration
	// RangeMaxBytes is what a range may take of the disk before its leader splits it by
	// itself. Default 256 MiB; negative is without bound.
	RangeMaxBytes int64
	// RangeSplitLoad is the requests a second, reads and writes, above which a leader splits
	// its range where they divide. Default DefaultSplitLoad; negative is without bound.
	RangeSplitLoad int64
	// MergeHold is how long the left range of a merge is held at most. A merge is past it soon,
	// or something is in its way, and the left range need not stand still with the right one.
	// Default 400 ms; negative is not at all: what a merge does may not depend on it.
	MergeHold time.Duration
}

// DefaultSplitLoad is Limits.RangeSplitLoad where it is not set. A range by itself bears far
// more: a put's evaluation and apply take 3 µs (BenchmarkPut), a get's 0.4. But the whole path
// takes 61 µs of the three nodes' processors for a put and 26 for a get (docs/PERFORMANCE.md),
// about half of them at the leader. So 10,000 requests a second are a quarter of a core there,
// which is worth giving to another node. Below that, more ranges only make batches smaller.
const DefaultSplitLoad = 10_000

// entrySlackBytes is what an entry holds beyond a request of MaxRequestBytes, for what each
// operation takes beside key and value.
const entrySlackBytes = 64 << 10

func (l *Limits) fill() {
	setDefault(&l.MaxRequestBytes, 3<<19)
	setDefault(&l.MaxTxnOps, 128)
	setDefault(&l.MaxEntryBytes, rangeapi.MaxRequestBytes+entrySlackBytes)
	setDefault(&l.MaxRecordBytes, 2*l.MaxEntryBytes)
	setDefault(&l.PendingBytes, 128<<20)
	setDefault(&l.RangePendingBytes, 32<<20)
	setDefault(&l.BatchRequests, 2048)
	setDefault(&l.EvaluateTurn, 4*time.Millisecond)
	setDefault(&l.MergeHold, 400*time.Millisecond)
	setDefault(&l.InflightBatches, 8)
	setDefault(&l.ScanBytes, 256<<20)
	setDefault(&l.ReadBytes, 512<<20)
	setDefault(&l.AnswerBytes, 8<<20)
	setDefault(&l.VersionCacheBytes, 32<<20)
	setDefault(&l.LockBytes, 32<<20)
	setDefault(&l.PrevBytes, 16<<20)
	setDefault(&l.Pages, 4096)
	setDefault(&l.FateTimeout, 7*time.Second)
	setDefault(&l.RemoveBatch, 1000)
	setDefault(&l.RangeMaxBytes, 256<<20)
	setDefault(&l.RangeSplitLoad, DefaultSplitLoad)
}

func setDefault[T int | int64 | time.Duration](v *T, d T) {
	if *v == 0 {
		*v = d
	}
}

// What a replica takes at rest in all packages, and a row of the range map on placement's leader. With
// 10,000 ranges a lone node has 9.2 kB for each (node's BenchmarkIdleReplicas). A profile shows a sixth of
// it in the map, the router's cache and the reports to placement.
const (
	replicaBytes = 7680
	rowBytes     = 1536
)

// Room says why there is no memory for so many more replicas and rows of their ranges.
func (s *Store) Room(more int) error {
	limit := s.cfg.Limits.StandingBytes
	if limit == 0 {
		return nil
	}
	s.mu.RLock()
	have := len(s.replicas)
	s.mu.RUnlock()
	rows := have
	if s.cfg.Placed != nil {
		rows = max(rows, s.cfg.Placed.Ranges())
	}
	if int64(have+more)*replicaBytes+int64(rows+more)*rowBytes <= limit {
		return nil
	}
	return kverror.New(kverror.TooManyRequests, "no memory on this node for %d replicas beside its %d and for a map of %d ranges: raise --memory-budget-bytes, add nodes or merge ranges", more, have, rows)
}
