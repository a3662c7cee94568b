package wal

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/wake"
	"github.com/skeindb/skein/keyspace"
)

// ErrClosed is returned after Close.
var ErrClosed = errors.New("wal: closed")

// SpaceState says whether there is room for the reserve.
type SpaceState uint8

const (
	// SpaceOK is the ordinary state.
	SpaceOK SpaceState = iota
	// SpaceFull says that the disk has no space for the next reserve segment. The log
	// continues in the segments that it has, and new writes should be refused. It retries
	// every second and whenever a segment becomes free.
	SpaceFull
)

// Log is the node's log. It owns three goroutines: the writer, the preparer of
// segments and the rewriter of small tails; Close stops them and waits.
type Log struct {
	opts Options
	// beganEmpty is set by Open.
	beganEmpty bool
	dir        directory
	metrics    *Metrics
	fsyncs     recentFsyncs
	logger     *zap.Logger
	clock      clock.Clock
	cache      *cache
	pins       pins
	// bufs holds buffers of written batches.
	bufs sync.Pool

	// files is held shared by reads of segments and exclusively by Close. It is the only
	// lock held over disk access; only Close waits for it.
	files       sync.RWMutex
	filesClosed bool

	fatal      chan struct{}
	writerDone chan struct{}
	// stop ends the preparer and the rewriter; wait waits for them.
	stop          chan struct{}
	wait          sync.WaitGroup
	prepareSignal wake.Signal
	rewriteSignal wake.Signal
	syncs         atomic.Uint64
	// churn counts the bytes of written records from the layers above and of tails that
	// these gave up: both may have freed space in old segments.
	churn atomic.Int64
	space atomic.Uint32

	// mu orders submissions.
	mu sync.Mutex
	// work wakes the writer.
	work   *sync.Cond
	groups map[keyspace.GroupID]*GroupLog
	// queue holds the batches of which the writer has not taken everything; queued is the
	// size of what is not written.
	queue  []*Batch
	queued int64
	// flight is when the oldest batch being written was submitted; 0 for none.
	flight clock.Time
	// submitted numbers the records in the order of submission; written and durable are
	// the numbers reached.
	submitted, written, durable uint64
	// segs is the log in order; the last segment is active. ready segments are prepared
	// for use, dead ones are no longer needed.
	segs, ready, dead []*segment
	nextSeq           uint64
	reclaim           reclaim
	lastCycle         cycleResult
	// rewriteHeld says that the rewriter waits for a ready segment.
	rewriteHeld bool
	lazyDue     bool
	// closing is set by Close, stopped when the writer has finished.
	closing, stopped bool
	err              error
}

// BeganEmpty reports whether this Open found a log that was never written to: the log
// is new, or its files are lost. The log cannot tell these apart, but its owner can: if
// the engine holds data that can only have come through a log, the owner must stop.
//
// Open and Close write nothing into such a log, so that the next Open says the same.
// An owner who takes it for a new one calls Sync before it makes anything else
// durable; from then on the log is not empty any more.
func (l *Log) BeganEmpty() bool { return l.beganEmpty }

// Group returns a group's view; that of an unknown group is empty.
func (l *Log) Group(id keyspace.GroupID) *GroupLog {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.groupLocked(id)
}

func (l *Log) groupLocked(id keyspace.GroupID) *GroupLog {
	g := l.groups[id]
	if g == nil {
		g = &GroupLog{log: l, id: id}
		l.groups[id] = g
	}
	return g
}

// Groups returns the groups that have state, in ascending order.
func (l *Log) Groups() []keyspace.GroupID { return l.groupsWith((*GroupLog).Exists) }

// Removed returns the groups that have a tombstone, in ascending order.
func (l *Log) Removed() []keyspace.GroupID { return l.groupsWith((*GroupLog).Removed) }

func (l *Log) groupsWith(is func(*GroupLog) bool) []keyspace.GroupID {
	l.mu.Lock()
	defer l.mu.Unlock()
	var ids []keyspace.GroupID
	for id, g := range l.groups {
		if is(g) {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids
}

// Submit hands a batch to the log and returns without waiting for the disk. The views
// of the groups show the batch at once.
//
// The writer's goroutine calls done once per batch, in the order of submission. done
// gets nil once a synced batch is durable or an unsynced one is written, or the error
// that ended the log. done must not block; it may call Submit, and it may be nil. After
// Close it is called before Submit returns.
func (l *Log) Submit(b *Batch, done func(error)) {
	if b.log != l || b.at != 0 {
		panic(fmt.Sprintf("wal: batch of log %p, submitted at %d, is submitted to log %p", b.log, b.at, l))
	}
	b.done, b.at = done, l.clock.Now()
	if !l.accept(b) && done != nil {
		done(ErrClosed)
	}
}

// accept applies the batch to the views and queues it. It returns false when the writer
// has stopped.
func (l *Log) accept(b *Batch) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.stopped {
		return false
	}
	if l.err == nil {
		for i := range b.ops {
			o := &b.ops[i]
			l.submitted++
			o.no = l.submitted
			g := o.g
			if g == nil {
				g = l.groupLocked(o.group)
			}
			g.submit(o, b.buf[o.from:o.to])
			if o.kind == kindForget && !o.skip {
				delete(l.groups, o.group)
			}
		}
		l.queued += b.cutUnits(l.opts.unitBytes())
		l.metrics.queueBytes.Set(float64(l.queued))
	}
	l.queue = append(l.queue, b)
	l.work.Signal()
	return true
}

// Overloaded reports whether more than QueueBytes wait to be written. Submit still
// accepts batches; callers that can refuse work should.
func (l *Log) Overloaded() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.queued > l.opts.QueueBytes
}

// Sync returns once everything submitted before is durable. It always writes to the disk
// and syncs it, so its return also proves that the disk makes progress.
func (l *Log) Sync(ctx context.Context) error {
	done := make(chan error, 1)
	b := l.NewBatch()
	b.probe = true
	l.Submit(b, func(err error) { done <- err })
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return fmt.Errorf("wal: sync: %w", ctx.Err())
	}
}

// Fatal is closed when the log has failed for good. The node must stop: the views may
// show records that are not on the disk.
func (l *Log) Fatal() <-chan struct{} { return l.fatal }

// Err returns what ended the log, or nil.
func (l *Log) Err() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.err
}

// Progress returns the number of completed fsyncs, and how long the oldest unfinished
// batch has been waiting, 0 if there is none. On a stalled disk the count stops while the
// wait grows. If nothing is submitted, Sync is the probe.
func (l *Log) Progress() (completedSyncs uint64, oldestPending time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	at := l.flight
	if at == 0 && len(l.queue) > 0 {
		at = l.queue[0].at
	}
	if at != 0 {
		oldestPending = max(l.clock.Now().Sub(at), 1)
	}
	return l.syncs.Load(), oldestPending
}

// Space reports whether the disk has space for the reserve.
func (l *Log) Space() SpaceState { return SpaceState(l.space.Load()) }

// LiveBytes returns the length of the log from the oldest needed segment on: what a
// restart reads.
func (l *Log) LiveBytes() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.liveBytesLocked()
}

func (l *Log) liveBytesLocked() int64 {
	var n int64
	for i := l.oldestNeededLocked(); i < len(l.segs); i++ {
		n += l.segs[i].end.Load()
	}
	return n
}

// oldestNeededLocked returns the position of the oldest segment at which a group is
// listed, or of the active segment if there is none.
func (l *Log) oldestNeededLocked() int {
	for i, s := range l.segs[:len(l.segs)-1] {
		if !l.pins.none(s) {
			return i
		}
	}
	return len(l.segs) - 1
}

// fail ends the log. The first error is kept.
func (l *Log) fail(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err != nil {
		return
	}
	l.err = err
	close(l.fatal)
	l.work.Signal()
	l.logger.Error("wal failed and accepts no more records", zap.Error(err))
}

// closeTimeout bounds Close. A disk that hangs must not keep the process from ending.
const closeTimeout = 10 * time.Second

// Close writes and syncs everything submitted, stops the goroutines and closes the files.
// Batches that cannot be written complete with an error. The views must not be read
// during or after Close: they return ErrClosed for entries that are not in memory.
//
// After 10 s Close gives up with an error that says how much may be lost. The log has
// failed then. Its goroutines end, and the remaining completions are called, when the
// disk returns.
func (l *Log) Close() error {
	l.mu.Lock()
	if l.closing {
		l.mu.Unlock()
		return ErrClosed
	}
	l.closing = true
	l.work.Signal()
	l.mu.Unlock()
	done := make(chan error, 1)
	go func() { done <- l.end() }()
	timer := l.clock.NewTimer(closeTimeout)
	defer timer.Stop()
	select {
	case err := <-done:
		return err
	case <-timer.C():
		return l.closeTimedOut()
	}
}

// end waits for the goroutines and closes the files.
func (l *Log) end() error {
	// The writer may still need the preparer, and the preparer may wait for the writer.
	<-l.writerDone
	close(l.stop)
	l.wait.Wait()
	return errors.Join(l.Err(), l.closeFiles())
}

// closeTimedOut fails a log that could not be closed in time.
func (l *Log) closeTimedOut() error {
	earlier := l.Err()
	l.mu.Lock()
	lost, queued := l.submitted-l.durable, l.queued
	l.mu.Unlock()
	what := "all records are durable"
	if lost > 0 {
		what = fmt.Sprintf("the last %d records submitted may be lost, %d bytes of them were not written", lost, queued)
	}
	err := fmt.Errorf("wal: close: gave up waiting for the disk after %s: %s", closeTimeout, what)
	l.fail(err)
	return errors.Join(earlier, err)
}

func (l *Log) closeFiles() error {
	l.files.Lock()
	defer l.files.Unlock()
	l.filesClosed = true
	var errs []error
	if l.dir.held != nil {
		errs = append(errs, l.dir.held.Close())
	}
	for _, s := range slices.Concat(l.segs, l.ready, l.dead) {
		if s.file == nil {
			continue
		}
		if err := s.file.Close(); err != nil {
			errs = append(errs, fmt.Errorf("wal: close %s: %w", s.path, err))
		}
	}
	return errors.Join(errs...)
}
