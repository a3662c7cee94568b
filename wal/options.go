package wal

import (
	"errors"
	"fmt"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
)

// Options configures a Log. FS, Dir and Clock must be set; everything else has a
// default that holds for zero.
type Options struct {
	// FS and Dir say where the segments are. The caller holds the directory's lock.
	FS  vfs.FS
	Dir string
	// SegmentBytes is the size of a segment; 64 MiB by default, at least 16 KiB. An entry
	// must be smaller than a third of it, see [MaxEntryBytes]. A restart may change it.
	SegmentBytes int64
	// MaxBatchBytes bounds what one write takes from the queue; 4 MiB by default. A
	// single larger batch is still written as a whole.
	MaxBatchBytes int64
	// QueueBytes is how many submitted and unwritten bytes make the log Overloaded; 64
	// MiB by default.
	QueueBytes int64
	// EntryCacheBytes bounds the written entries kept in memory, over all groups; 64 MiB
	// by default.
	EntryCacheBytes int64
	// SpareSegments is how many segments are prepared ahead of the active one, as the
	// reserve on a full disk; 1 by default and at least.
	SpareSegments int
	// TargetBytes is the length beyond which the log is shortened; 1 GiB by default, at
	// least 4 segments. From half of it on, the log rewrites groups without entries at
	// the head, so that they do not hold old segments. Beyond all of it, it rewrites
	// small tails too, and those for which Move was called; Pinning names the groups that
	// remain. Each tail is rewritten once. It is rewritten again only after a quarter of
	// the log, or a segment, has become new or unneeded.
	TargetBytes int64
	// SmallTailBytes is the size up to which a group's tail is rewritten without a Move;
	// 64 KiB by default.
	SmallTailBytes int64
	// LazySync is how long an unsynced batch waits for an fsync that another batch needs
	// before it gets its own; 1 s by default.
	LazySync time.Duration
	// MayAllocate reports whether the log may create a file of that many bytes; nil always
	// allows it. It keeps the log from taking the room that another user of the disk has
	// freed for its own last writes. The log calls it with no lock held, and it must not
	// block. A refusal counts as a full disk, and the log asks again every second; a
	// permanent refusal ends in a stopped log. The log does not ask for its first
	// segment, nor when it reuses a dead one.
	MayAllocate func(bytes int64) bool
	Clock       clock.Clock
	// Logger and Metrics may be nil.
	Logger  *zap.Logger
	Metrics *Metrics
}

const (
	minSegmentBytes     = 16 << 10
	maxSegmentBytes     = 1 << 30
	defaultSegmentBytes = 64 << 20
)

// withDefaults fills in defaults and rejects invalid values.
func (o Options) withDefaults() (Options, error) {
	if o.FS == nil || o.Dir == "" || o.Clock == nil {
		return o, errors.New("wal: FS, Dir and Clock must be set")
	}
	orDefault(&o.SegmentBytes, defaultSegmentBytes)
	orDefault(&o.MaxBatchBytes, 4<<20)
	orDefault(&o.QueueBytes, 64<<20)
	orDefault(&o.EntryCacheBytes, 64<<20)
	orDefault(&o.SpareSegments, 1)
	orDefault(&o.TargetBytes, max(1<<30, 4*o.SegmentBytes))
	orDefault(&o.SmallTailBytes, 64<<10)
	orDefault(&o.LazySync, time.Second)
	if o.Logger == nil {
		o.Logger = zap.NewNop()
	}
	if o.Metrics == nil {
		o.Metrics = NewMetrics(nil)
	}
	if o.SegmentBytes < minSegmentBytes || o.SegmentBytes > maxSegmentBytes {
		return o, fmt.Errorf("wal: SegmentBytes %d not in [%d, %d]", o.SegmentBytes, minSegmentBytes, maxSegmentBytes)
	}
	if o.TargetBytes < 4*o.SegmentBytes {
		return o, fmt.Errorf("wal: TargetBytes %d below 4 segments of %d", o.TargetBytes, o.SegmentBytes)
	}
	if o.SpareSegments < 1 || o.MaxBatchBytes < 1 || o.QueueBytes < 1 || o.EntryCacheBytes < 1 ||
		o.SmallTailBytes < 1 || o.LazySync < 1 {
		return o, errors.New("wal: negative bound")
	}
	o.SmallTailBytes = min(o.SmallTailBytes, o.unitBytes()/2)
	return o, nil
}

// unitBytes is the largest atomic write: a third of a segment, which also bounds the
// space that a rotation wastes.
func (o *Options) unitBytes() int64 { return (o.SegmentBytes - headerLen) / 3 }

// MaxEntryBytes returns the maximum size of one entry's data in a log with segments of
// that size; 0 is the default size.
func MaxEntryBytes(segmentBytes int64) int64 {
	orDefault(&segmentBytes, defaultSegmentBytes)
	o := Options{SegmentBytes: segmentBytes}
	return o.unitBytes() - recordLen - entryLen
}

// MaxEntryBytes returns the maximum size of one entry's data; Append panics on a larger
// one.
func (l *Log) MaxEntryBytes() int64 { return MaxEntryBytes(l.opts.SegmentBytes) }

func orDefault[T int | int64 | time.Duration](v *T, d T) {
	if *v == 0 {
		*v = d
	}
}
