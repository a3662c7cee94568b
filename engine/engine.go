package engine

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/bloom"
	"github.com/cockroachdb/pebble/v2/vfs"
	"go.uber.org/zap"
	"golang.org/x/sync/semaphore"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
)

// Defaults of Options.
const (
	DefaultCacheBytes    = 256 << 20
	DefaultMemTableBytes = 64 << 20
	DefaultBallastBytes  = 64 << 20
	DefaultLowSpaceBytes = 512 << 20
	DefaultMaxOpenFiles  = 4096
)

// MemTableStops is how many memtables may wait for their flush before commits
// wait too. MemTableStops * MemTableBytes bounds the memory of unflushed writes.
const MemTableStops = 4

// closeTimeout bounds each of the two steps of Close: the last flush and the end
// of Pebble's own work. What is given up then is as after a crash: the wal has it.
const closeTimeout = 10 * time.Second

// ErrClosed is the error of calls that the end of the engine cut off.
var ErrClosed = errors.New("engine: closed")

// Options say how to open the store. The zero value of a number is its default.
type Options struct {
	// FS is the file system. Nil is the machine's.
	FS vfs.FS
	// Dir is the directory of the store within FS; it is made where it is absent.
	Dir string
	// CacheBytes is the size of the block cache. Too little makes every put read
	// the disk for the version before it.
	CacheBytes int64
	// MemTableBytes is the size of one memtable. It bounds what one flush writes
	// and, times MemTableStops, the memory of what is not flushed. Too little makes
	// many small tables, too much a long replay after a crash.
	MemTableBytes int64
	// MaxOpenFiles bounds the open tables.
	MaxOpenFiles int
	// CompactionConcurrency bounds the compactions that run at once; 0 is half of
	// the processors, at least 1.
	CompactionConcurrency int
	// BallastBytes is the size of the file that is given up when the disk is full,
	// at most a fiftieth of the disk; negative is none.
	BallastBytes int64
	// LowSpaceBytes is the free space below which the store counts as full, at
	// most a twentieth of the disk; negative: only a failed write says so.
	LowSpaceBytes int64
	// Clock is the node's clock. Required.
	Clock clock.Clock
	// Logger takes the log. Nil is none.
	Logger *zap.Logger
	// Metrics takes the measurements; one Metrics serves one Engine. Nil is none.
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

// Engine is the open store. Its methods may be called from many goroutines, but
// none after Close or Abort has begun.
type Engine struct {
	db      *pebble.DB
	fs      vfs.FS // as given: without ballast and gate
	dir     string
	clock   clock.Clock
	logger  *zap.Logger
	metrics *Metrics
	space   *space
	flusher flusher
	durable durability
	// excising keeps snapshots from being made during an ingest that excises: Pebble looks
	// for those that it must have flushed when it begins, and panics where it meets another
	// one at its end. A snapshot has a share of it, such an ingest all. Who waits for it waits
	// for a disk, in tests too, where a mutex would stop their clock.
	excising *semaphore.Weighted

	// ctx ends when Close begins to stop the goroutines, which tasks counts.
	ctx   context.Context
	stop  context.CancelFunc
	tasks sync.WaitGroup

	fatal struct {
		sync.Mutex
		// once is closed at the first fatal error, which err holds.
		once chan struct{}
		err  error
	}
	onLost func() // for tests: called before a fatal error of Pebble ends the process
}

// Open opens the store in o.Dir, or makes it.
func Open(o Options) (*Engine, error) {
	if err := o.fill(); err != nil {
		return nil, err
	}
	e := &Engine{fs: o.FS, dir: o.Dir, clock: o.Clock, logger: o.Logger, metrics: o.Metrics, onLost: o.onLost, excising: semaphore.NewWeighted(excisingAll)}
	e.ctx, e.stop = context.WithCancel(context.Background())
	e.fatal.once = make(chan struct{})
	e.durable.init()
	e.flusher.init()
	if err := makeDir(o.FS, o.Dir); err != nil {
		return nil, err
	}
	if err := e.emptyStaging(); err != nil {
		return nil, err
	}
	e.space = newSpace(e.ctx, e.Err, &o)

	po := e.pebbleOptions(&o)
	var err error
	e.db, err = openPebble(o.Dir, po)
	po.Cache.Unref()
	if err != nil {
		e.stop()
		return nil, fmt.Errorf("engine: open %s: %w", o.Dir, err)
	}
	e.space.pace.db.Store(e.db)
	e.metrics.attach(e)
	e.space.poll()
	e.tasks.Go(e.flusherLoop)
	e.tasks.Go(e.durabilityLoop)
	e.tasks.Go(func() { e.space.loop() })
	return e, nil
}

func (e *Engine) pebbleOptions(o *Options) *pebble.Options {
	po := &pebble.Options{
		FS:                          e.space.wrap(o.FS),
		Cache:                       pebble.NewCache(o.CacheBytes),
		DisableWAL:                  true,
		MemTableSize:                uint64(o.MemTableBytes),
		MemTableStopWritesThreshold: MemTableStops,
		MaxOpenFiles:                o.MaxOpenFiles,
		// The stop is far off, since stalled commits stall all groups of the node.
		L0CompactionThreshold: l0Compaction,
		L0StopWritesThreshold: 1000,
		LBaseMaxBytes:         64 << 20,
		CompactionConcurrencyRange: func() (int, int) {
			return 1, o.CompactionConcurrency
		},
		Logger:        pebbleLogger{e},
		EventListener: e.listener(),
	}
	for i := range po.TargetFileSizes {
		po.TargetFileSizes[i] = min(targetTableBytes<<i, maxTableBytes)
	}
	po.Experimental.L0CompactionConcurrency = 2
	// A range delete of a removed replica frees its tables soon, without waiting
	// for a compaction that happens to touch them.
	po.FlushDelayDeleteRange = 10 * time.Second
	setTableOptions(po)
	po.EnsureDefaults()
	return po
}

// Pebble makes the tables of each level twice as large as those above, 128 MiB at most. But it
// keeps the values of older versions in memory until their table is whole, each block of
// 4 KiB in memory of 32, so that one compaction could take a GiB.
const (
	targetTableBytes int64 = 2 << 20
	maxTableBytes    int64 = 16 << 20
)

// compression spends little of the processor, which is what a put costs most of:
// tables of the upper levels are short-lived and stay as they are, the last two
// levels, with nearly all the data, get the fastest algorithm.
var compression = func() pebble.DBCompressionSettings {
	s := pebble.DBCompressionNone
	s.Name = "lower levels"
	for i := len(s.Levels) - 2; i < len(s.Levels); i++ {
		s.Levels[i] = pebble.DBCompressionFastest.Levels[i]
	}
	return s
}()

// setTableOptions sets what the tables of the store and exported ones share.
func setTableOptions(po *pebble.Options) {
	po.Comparer = comparer
	po.FormatMajorVersion = pebble.FormatNewest
	po.BlockPropertyCollectors = []func() pebble.BlockPropertyCollector{newRevisionCollector}
	for i := range po.Levels {
		// Ten bits per user key: one in a hundred lookups of an absent key reads a
		// block. Filters hold prefixes, one for all versions of a key.
		po.Levels[i].FilterPolicy = bloom.FilterPolicy(10)
	}
	po.ApplyCompressionSettings(func() pebble.DBCompressionSettings { return compression })
}

// Close makes everything that was committed durable and closes the store. It
// takes at most twice 10 s: where the disk is full or hangs, what is not durable
// then is left to the wal, as after a crash, and the error says so. It is called
// once, after all snapshots, iterators and batches are closed.
func (e *Engine) Close() error {
	var flushErr error
	if e.Err() == nil {
		ctx, cancel := context.WithCancel(e.ctx)
		t := e.clock.AfterFunc(closeTimeout, cancel)
		if flushErr = e.Flush(ctx); flushErr != nil {
			flushErr = fmt.Errorf("engine: close: last flush: %w", flushErr)
		}
		t.Stop()
		cancel()
	}
	err := errors.Join(flushErr, e.Abort())
	if ferr := e.Err(); ferr != nil && !errors.Is(err, ferr) {
		err = errors.Join(err, fmt.Errorf("engine: close: %w", ferr))
	}
	return err
}

// Abort closes the store without a flush, as a crash would, and stops its
// goroutines. It is Close's second half and the simulator's crash.
func (e *Engine) Abort() error {
	e.metrics.detach(e)
	e.stop()
	err := within(e.clock, closeTimeout, func() error {
		// No goroutine may call Pebble once it is closed.
		e.tasks.Wait()
		return e.db.Close()
	})
	if err != nil {
		return fmt.Errorf("engine: close: %w", err)
	}
	return nil
}

// errTimeout is within's error when it stops waiting.
var errTimeout = errors.New("gave up waiting")

// openPebble opens the store. Pebble reports some errors of that by a panic: through
// Fatalf, or with the error of a failed sync of a directory.
func openPebble(dir string, po *pebble.Options) (db *pebble.DB, err error) {
	defer func() {
		p := recover()
		if perr, ok := p.(error); ok {
			err = perr
		} else if p != nil {
			panic(p)
		}
	}()
	return pebble.Open(dir, po)
}

// within calls f and waits for it, but no longer than limit.
func within(c clock.Clock, limit time.Duration, f func() error) error {
	done := make(chan error, 1)
	go func() { done <- f() }()
	t := c.NewTimer(limit)
	defer t.Stop()
	select {
	case err := <-done:
		return err
	case <-t.C():
		return errTimeout
	}
}

// Empty says whether the store holds nothing at all.
func (e *Engine) Empty() (empty bool, err error) {
	it, err := e.NewIter(IterOptions{})
	if err != nil {
		return false, err
	}
	empty = !it.First()
	if err := errors.Join(it.Error(), it.Close()); err != nil {
		return false, fmt.Errorf("engine: look for a first key: %w", err)
	}
	return empty, nil
}

// EstimateBytes returns about how much disk the data in the span takes. What is
// not flushed does not count.
func (e *Engine) EstimateBytes(s KeySpan) (int64, error) {
	n, err := e.db.EstimateDiskUsage(s.Lower, s.Upper)
	if err != nil {
		return 0, fmt.Errorf("engine: estimate %s: %w", s, err)
	}
	return int64(n), nil
}

// EstimateSpanBytes is EstimateBytes for the user keys of a span.
func (e *Engine) EstimateSpanBytes(s keyspace.Span) (int64, error) {
	return e.EstimateBytes(VersionedSpan(s))
}

// DiskBytes returns how much disk the store takes, and how much of that is in use
// by its newest state. Both are etcd's dbSize and dbSizeInUse.
func (e *Engine) DiskBytes() (total, inUse int64) {
	m := e.db.Metrics()
	all := m.Total()
	return int64(m.DiskSpaceUsage()), all.TablesSize
}
