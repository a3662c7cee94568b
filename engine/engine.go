package engine

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"go.uber.org/zap"
	"golang.org/x/sync/semaphore"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/wake"
	"github.com/skeindb/skein/keyspace"
)

// closeTimeout bounds each step of Close: the last flush, and the end of Pebble's own
// work. After a timeout the state is as after a crash, and the wal has what is missing.
const closeTimeout = 10 * time.Second

// Engine is the open store. Its methods may be called from many goroutines, but not after
// Close or Abort has begun.
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
	corrupt corruptions
	quota   quota
	// borders are where tables end, in order; nil is tableBorders.
	borders atomic.Pointer[[][]byte]
	// excising keeps snapshots from being made or closed during an excising ingest. When such
	// an ingest begins, Pebble collects the snapshots that it must flush, and at its end it
	// panics if there is another one. A snapshot takes one share, an ingest all. It is a
	// semaphore because its waiters wait for a disk: in tests a mutex would stop the
	// virtual clock.
	excising *semaphore.Weighted
	// placing says that a flush puts ingested tables into their places, and may excise.
	placing atomic.Bool

	// ctx ends when Close begins to stop the goroutines that tasks counts.
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

// Open opens the store in o.Dir and creates it if it does not exist.
func Open(o Options) (*Engine, error) {
	if err := o.fill(); err != nil {
		return nil, err
	}
	e := &Engine{fs: o.FS, dir: o.Dir, clock: o.Clock, logger: o.Logger, metrics: o.Metrics, onLost: o.onLost, excising: semaphore.NewWeighted(excisingAll)}
	e.ctx, e.stop = context.WithCancel(context.Background())
	e.fatal.once = make(chan struct{})
	e.durable.init()
	e.flusher.init()
	e.corrupt.wake = wake.New()
	e.quota.bytes = o.QuotaBytes
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
	e.space.opened.Store(true)
	e.space.pace.db.Store(e.db)
	e.metrics.quotaBytes = e.QuotaBytes
	e.metrics.attach(e)
	e.space.poll()
	if e.quota.bytes > 0 {
		e.lookAtQuota()
		e.tasks.Go(e.quotaLoop)
	}
	e.tasks.Go(e.flusherLoop)
	e.tasks.Go(e.durabilityLoop)
	e.tasks.Go(func() { e.space.loop() })
	return e, nil
}

func (e *Engine) pebbleOptions(o *Options) *pebble.Options {
	po := &pebble.Options{
		FS:                          e.space.wrap(o.FS),
		Cache:                       pebble.NewCache(o.cacheSize()),
		DisableWAL:                  true,
		MemTableSize:                uint64(o.MemTableBytes),
		MemTableStopWritesThreshold: MemTableStops,
		MaxOpenFiles:                o.MaxOpenFiles,
		// The stop threshold is high, because stalled commits stall all groups of the
		// node.
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
	// The range delete of a removed replica soon frees its tables, without waiting for a
	// compaction that happens to touch them.
	po.FlushDelayDeleteRange = 10 * time.Second
	po.Experimental.SpanPolicyFunc = e.bordered
	po.Experimental.CompactionScheduler = newGrants(e.clock)
	setTableOptions(po)
	po.EnsureDefaults()
	return po
}

// Close makes everything committed durable and closes the store. It takes at most twice
// 10 s. If the disk is full or hangs, what is not durable is left to the wal, as after a
// crash, and the error says so. Call it once, after all snapshots, iterators and batches
// are closed.
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

// Abort closes the store without a flush, as a crash would, and stops its goroutines. It
// is Close's second half and the simulator's crash.
func (e *Engine) Abort() error {
	e.metrics.detach(e)
	e.stop()
	err := within(e.clock, closeTimeout, func() error {
		// No goroutine may call Pebble after it is closed.
		e.tasks.Wait()
		e.space.reserve.close()
		return e.db.Close()
	})
	if err != nil {
		return fmt.Errorf("engine: close: %w", err)
	}
	return nil
}

// errTimeout is returned by within when it stops waiting.
var errTimeout = errors.New("gave up waiting")

// openPebble opens the store. It turns Pebble's panics during Open into errors: those
// through Fatalf, and those with the error of a failed directory sync.
func openPebble(dir string, po *pebble.Options) (db *pebble.DB, err error) {
	defer func() {
		p := recover()
		if perr, ok := p.(error); ok {
			err = perr
		} else if p != nil {
			panic(p)
		}
	}()
	if err := checkManifest(po.FS, dir); err != nil {
		return nil, err
	}
	return pebble.Open(dir, po)
}

// within calls f and waits for it, but not longer than limit.
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

// Empty reports whether the store contains no key at all. A store with a block that
// cannot be read is not empty. Who needs the block finds out whose it is.
func (e *Engine) Empty() (empty bool, err error) {
	it, err := e.NewIter(IterOptions{})
	if err != nil {
		return false, err
	}
	empty = !it.First()
	err = errors.Join(it.Error(), it.Close())
	if IsCorruption(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("engine: look for a first key: %w", err)
	}
	return empty, nil
}

// EstimateBytes returns roughly how much disk the data in the span takes. Unflushed data
// do not count.
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
