package engine

import (
	"errors"
	"runtime"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/bloom"
	"github.com/cockroachdb/pebble/v2/vfs"
	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
)

// Defaults of Options.
const (
	DefaultCacheBytes    = 256 << 20
	DefaultMemTableBytes = 64 << 20
	DefaultBallastBytes  = 64 << 20
	DefaultLowSpaceBytes = 512 << 20
	DefaultMaxOpenFiles  = 4096
)

// MemTableStops is how many unflushed memtables make commits wait. MemTableStops *
// MemTableBytes bounds the memory of unflushed writes.
const MemTableStops = 4

// Options configure the store. A zero number means its default.
type Options struct {
	// FS is the file system; nil is the machine's.
	FS vfs.FS
	// Dir is the store's directory within FS. Open makes it if it is missing.
	Dir string
	// CacheBytes is what the block cache has at least, beside full memtables. What memtables do
	// not take is the cache's too. If it is too small, every put reads the previous version
	// from disk.
	CacheBytes int64
	// MemTableBytes is the size of one memtable. It bounds what one flush writes and,
	// times MemTableStops, the memory of unflushed data. If it is too small there are
	// many small tables, if too large a long replay after a crash.
	MemTableBytes int64
	// MaxOpenFiles bounds the open tables.
	MaxOpenFiles int
	// CompactionConcurrency bounds the concurrent compactions; 0 is half of the
	// processors, at least 1.
	CompactionConcurrency int
	// BallastBytes is the size of the file that is deleted when the disk is full, at most
	// a fiftieth of the disk; a negative size means no ballast.
	BallastBytes int64
	// LowSpaceBytes is the free space below which the store counts as full, at most a
	// twentieth of the disk. If it is negative, only a failed write makes the store full.
	LowSpaceBytes int64
	// QuotaBytes bounds the store's size: above it the store is as on a full disk. 0 or less is no bound.
	QuotaBytes int64
	// Clock is the node's clock. Required.
	Clock clock.Clock
	// Logger receives the log; nil is none.
	Logger *zap.Logger
	// Metrics records the measurements of one Engine; nil is none.
	Metrics *Metrics

	onLost func()
}

func (o *Options) fill() error {
	if o.Clock == nil {
		return errors.New("engine: Options.Clock is required")
	}
	if o.Dir == "" {
		return errors.New("engine: Options.Dir is required")
	}
	if o.Logger == nil {
		o.Logger = zap.NewNop()
	}
	if o.Metrics == nil {
		o.Metrics = NewMetrics(nil)
	}
	o.setSizes()
	if o.MaxOpenFiles == 0 {
		o.MaxOpenFiles = DefaultMaxOpenFiles
	}
	if o.CompactionConcurrency == 0 {
		o.CompactionConcurrency = max(1, runtime.GOMAXPROCS(0)/2)
	}
	if o.CacheBytes < 0 || o.MemTableBytes < 0 || o.MaxOpenFiles < 0 || o.CompactionConcurrency < 0 {
		return errors.New("engine: negative size in Options")
	}
	return nil
}

// cacheSize is the size to give to Pebble's cache, which takes the memory of all memtables from it.
// Without their part, two full memtables would leave a small cache nothing.
func (o *Options) cacheSize() int64 { return o.CacheBytes + MemTableStops*o.MemTableBytes }

func (o *Options) setSizes() {
	if o.FS == nil {
		o.FS = vfs.Default
	}
	setDefault(&o.CacheBytes, DefaultCacheBytes)
	setDefault(&o.MemTableBytes, DefaultMemTableBytes)
	setDefault(&o.BallastBytes, DefaultBallastBytes)
	setDefault(&o.LowSpaceBytes, DefaultLowSpaceBytes)
}

func setDefault(v *int64, d int64) {
	if *v == 0 {
		*v = d
	}
}

// Pebble doubles the table size with each level, up to 128 MiB. But it keeps the values
// of older versions in memory until their table is complete, each 4 KiB block in 32 KiB.
// So one compaction could take 1 GiB.
const (
	targetTableBytes int64 = 2 << 20
	maxTableBytes    int64 = 16 << 20
)

// indexBlockBytes holds the index of a whole table of 16 MiB. The index is then one block of the cache, and not a top and
// parts, which are looked up one after the other. A get of what is cached takes a tenth less CPU (BenchmarkLarge in mvcc).
const indexBlockBytes = 256 << 10

// storeFormat is Pebble's format of the store. Pebble never goes back to an earlier one. So a later
// one belongs to a later cluster version (keyspace.Version), and is taken once that counts.
const storeFormat = pebble.FormatValueSeparation

// compression spends little CPU, which is the main cost of a put. Tables of the upper
// levels live briefly and stay uncompressed. The last two levels, with nearly all the
// data, use the fastest algorithm.
var compression = func() pebble.DBCompressionSettings {
	s := pebble.DBCompressionNone
	s.Name = "lower levels"
	for i := len(s.Levels) - 2; i < len(s.Levels); i++ {
		s.Levels[i] = pebble.DBCompressionFastest.Levels[i]
	}
	return s
}()

// setTableOptions sets the options that the store's tables share with exported ones.
func setTableOptions(po *pebble.Options) {
	po.Comparer = comparer
	po.FormatMajorVersion = storeFormat
	po.BlockPropertyCollectors = []func() pebble.BlockPropertyCollector{newRevisionCollector}
	for i := range po.Levels {
		po.Levels[i].IndexBlockSize = indexBlockBytes
		// With ten bits per user key, one lookup of an absent key in a hundred reads a
		// block. Filters contain prefixes: one for all versions of a key. The last level has
		// them too: without, a put of a new key takes half as much CPU again.
		po.Levels[i].FilterPolicy = bloom.FilterPolicy(10)
	}
	po.ApplyCompressionSettings(func() pebble.DBCompressionSettings { return compression })
}

// tableOptions are the options with which exported tables are written and read: those of
// the store.
var tableOptions = func() *pebble.Options {
	po := &pebble.Options{}
	setTableOptions(po)
	po.EnsureDefaults()
	return po
}()
