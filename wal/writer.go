package wal

import (
	"fmt"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/mutation"
)

// writer is the state of the goroutine that writes. Submissions gather in the queue while
// it writes and syncs. When the disk is idle it takes as many as fit. No timer is on this
// path.
type writer struct {
	l   *Log
	buf []byte
	// active is the segment being written and lastMark its newest mark.
	active   *segment
	lastMark mark
	// planned is the last run of each group as it will be after the current write.
	planned map[*GroupLog]run
	// unsynced says that records, or a mark that frees segments, are written and not
	// synced; unsyncedRecords counts the records.
	unsynced        bool
	unsyncedRecords int
	lazy            clock.Timer
	lazyOn          bool
	// rewriteDue says that tails may have to be rewritten. The rewriter is woken once the
	// writer is idle: its submissions would otherwise race with the mark.
	rewriteDue bool
}

// batchPart is a part of a batch that one write takes from the queue.
type batchPart struct {
	batch    *Batch
	from, to int
}

// write is one write: its parts, and the batches that end in it.
type write struct {
	parts []batchPart
	bytes int64
	sync  bool
	probe bool
	last  uint64
}

type step uint8

const (
	stepWait step = iota
	stepWrite
	stepRotate
	stepLazySync
	stepNoRoom
	stepFail
	stepStop
)

func (w *writer) run() {
	l := w.l
	defer close(l.writerDone)
	for {
		var do write
		l.mu.Lock()
		s := w.nextLocked(&do)
		for s == stepWait {
			l.work.Wait()
			s = w.nextLocked(&do)
		}
		l.mu.Unlock()
		switch s {
		case stepWrite:
			w.do(&do)
		case stepRotate:
			w.rotate()
		case stepLazySync:
			if w.unsynced && w.syncActive() {
				w.idle()
			}
		case stepNoRoom:
			l.fail(fmt.Errorf("%w: no room for the last records", ErrClosed))
		case stepFail:
			w.drain()
		case stepStop:
			w.finish()
			return
		case stepWait: // waited for above
		}
	}
}

// nextLocked returns the next step and fills do with what is to be written.
func (w *writer) nextLocked(do *write) step {
	l := w.l
	due := l.lazyDue
	if due {
		l.lazyDue, w.lazyOn = false, false
	}
	if len(l.queue) == 0 {
		switch {
		case l.closing:
			l.stopped = true
			return stepStop
		case l.err == nil && due:
			return stepLazySync
		}
		return stepWait
	}
	if l.err != nil {
		return stepFail
	}
	if w.takeLocked(do) {
		do.sync = do.sync || due
		return stepWrite
	}
	if len(l.ready) > 0 {
		return stepRotate
	}
	if l.closing && l.Space() == SpaceFull {
		return stepNoRoom
	}
	if l.Space() == SpaceOK {
		// On a full disk the preparer retries by itself.
		l.prepareSignal.Set()
	}
	return stepWait
}

// takeLocked takes whole units from the queue, as many as fit into the segment and the
// bound on a write. If the segment is full it takes nothing and returns false.
func (w *writer) takeLocked(do *write) bool {
	l := w.l
	*do = write{parts: do.parts[:0]}
	// A mark before the records and the seal must always fit.
	room := w.active.size - w.active.end.Load() - 2*markLen
	for len(l.queue) > 0 {
		b := l.queue[0]
		from := b.next
		end, size := b.unit()
		if size > room-do.bytes || (len(do.parts) > 0 && do.bytes+size > l.opts.MaxBatchBytes) {
			break
		}
		b.next = end
		do.bytes += size
		do.probe = do.probe || b.probe
		if n := len(do.parts); n > 0 && do.parts[n-1].batch == b {
			do.parts[n-1].to = end
		} else {
			do.parts = append(do.parts, batchPart{b, from, end})
		}
		if end == len(b.ops) {
			do.sync = do.sync || b.sync
			l.queue[0] = nil
			l.queue = l.queue[1:]
		}
	}
	if len(do.parts) == 0 {
		return false
	}
	if len(l.queue) == 0 {
		l.queue = nil
	}
	l.flight = do.parts[0].batch.at
	return true
}

// do writes and syncs, and completes the batches.
func (w *writer) do(do *write) {
	l := w.l
	records := w.encode(do)
	if err := w.put(w.buf); err != nil {
		l.fail(err)
		w.complete(do, err)
		return
	}
	w.locate(do)
	l.mu.Lock()
	l.written = max(l.written, do.last)
	l.queued -= do.bytes
	l.mu.Unlock()
	w.unsyncedRecords += records
	w.unsynced = w.unsynced || records > 0
	l.metrics.batchBytes.Observe(float64(len(w.buf)))
	if do.sync && !mutation.Is(mutation.FsyncSkipped) && !w.syncActive() {
		w.complete(do, l.Err())
		return
	}
	w.complete(do, nil)
	for _, c := range l.cache.evict(l.written) {
		c.g.dropChunk(c)
	}
	l.metrics.cacheBytes.Set(float64(l.cache.size()))
	w.idle()
}

// encode lays the records out behind the segment's end and returns their number.
func (w *writer) encode(do *write) (records int) {
	w.buf = w.buf[:0]
	if m := w.mark(); m != w.lastMark || (do.probe && do.bytes == 0) {
		w.addMark(m)
	}
	clear(w.planned)
	at := w.active.end.Load()
	for _, p := range do.parts {
		for i := p.from; i < p.to; i++ {
			o := &p.batch.ops[i]
			do.last = o.no
			if o.skip {
				continue
			}
			from := len(w.buf)
			o.off = at + int64(from)
			w.buf = append(w.buf, p.batch.buf[o.from:o.to]...)
			rec := w.buf[from:]
			w.plan(o)
			putPrev(rec, o.prevOff, o.prevLen)
			if o.unitEnd {
				rec[17] |= flagUnitEnd
			}
			seal(rec, w.active.segmentHeader, o.off)
			records++
		}
	}
	return records
}

// plan decides to which record the op's record is chained. The groups learn it only when
// the records are written, so that nobody reads there too early. Until then the writer
// remembers the new runs.
func (w *writer) plan(o *op) {
	if len(o.ents) == 0 {
		return
	}
	length := int64(o.to - o.from)
	var few [2]termSpan
	spans := spansOf(few[:0], o.ents)
	last, ok := w.planned[o.g]
	if !ok {
		last, ok = o.g.lastRun()
	}
	if ok && o.kind == kindAppend && last.follows(w.active, spans[0], length) {
		o.prevOff, o.prevLen = last.off, last.len
		last.extend(o.off, length, spans[0].last)
		spans = spans[1:]
	}
	if len(spans) > 0 {
		last = newRun(w.active, o.off, length, spans[len(spans)-1])
	}
	w.planned[o.g] = last
}

func (w *writer) locate(do *write) {
	for _, p := range do.parts {
		for i := p.from; i < p.to; i++ {
			o := &p.batch.ops[i]
			if o.skip {
				continue
			}
			o.g.locate(o, w.active, o.off, int64(o.to-o.from), o.prevOff, o.prevLen)
			if p.batch.rewrite {
				w.l.metrics.rewritten.Add(float64(o.to - o.from))
			} else {
				w.l.churn.Add(int64(o.to - o.from))
			}
		}
	}
}

// mark returns the mark that is true now.
func (w *writer) mark() mark {
	return mark{
		durable: w.active.synced, oldest: w.l.announced(),
		prevSeq: w.active.prevSeq, prevEnd: w.active.prevEnd,
	}
}

func (w *writer) addMark(m mark) {
	w.buf = appendMark(w.buf, m, w.active.segmentHeader, w.active.end.Load()+int64(len(w.buf)))
	if m.oldest > w.lastMark.oldest {
		w.unsynced = true
	}
	w.lastMark = m
}

// put writes at the segment's end. An error ends the log, because the contents of the
// disk are then unknown.
func (w *writer) put(b []byte) error {
	if len(b) == 0 {
		return nil
	}
	s := w.active
	if _, err := s.file.WriteAt(b, s.end.Load()); err != nil {
		return fmt.Errorf("wal: write %d bytes to %s at %d: %w", len(b), s.path, s.end.Load(), err)
	}
	s.end.Add(int64(len(b)))
	w.l.metrics.writtenBytes.Add(float64(len(b)))
	return nil
}

// syncActive makes everything written durable. It returns false if the log has failed. It
// never retries a failed fsync, which may have dropped the pages.
func (w *writer) syncActive() bool {
	l, s := w.l, w.active
	watch := clock.StartStopwatch()
	if err := s.file.SyncData(); err != nil {
		l.fail(fmt.Errorf("wal: sync %s: %w", s.path, err))
		return false
	}
	took := watch.Elapsed()
	l.metrics.fsyncSeconds.Observe(took.Seconds())
	l.fsyncs.add(took)
	l.metrics.appendsPerSync.Observe(float64(w.unsyncedRecords))
	l.syncs.Add(1)
	s.synced = s.end.Load()
	w.unsynced, w.unsyncedRecords = false, 0
	w.rewriteDue = l.synced(w.lastMark.oldest) || w.rewriteDue
	return true
}

// complete completes the batches that end in the write.
func (w *writer) complete(do *write, err error) {
	l := w.l
	l.mu.Lock()
	l.flight = 0
	queued := l.queued
	l.mu.Unlock()
	l.metrics.queueBytes.Set(float64(queued))
	for _, p := range do.parts {
		if p.to < len(p.batch.ops) {
			continue
		}
		l.recycle(p.batch)
		if p.batch.done != nil {
			p.batch.done(err)
		}
	}
}

// idle writes the mark with which the next write would begin, if nothing is queued. From
// then on damage below it is detected.
func (w *writer) idle() {
	l := w.l
	l.mu.Lock()
	busy := len(l.queue) > 0 || l.err != nil
	l.mu.Unlock()
	if m := w.mark(); !busy && m != w.lastMark && w.active.size-w.active.end.Load() >= 2*markLen {
		w.buf = w.buf[:0]
		w.addMark(m)
		if err := w.put(w.buf); err != nil {
			l.fail(err)
			return
		}
	}
	w.armLazySync()
	if w.rewriteDue {
		w.rewriteDue = false
		l.rewriteSignal.Set()
	}
}

// armLazySync bounds how long written records stay unsynced.
func (w *writer) armLazySync() {
	if !w.unsynced || w.lazyOn {
		return
	}
	l := w.l
	w.lazyOn = true
	w.lazy = l.clock.AfterFunc(l.opts.LazySync, func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.lazyDue = true
		l.work.Signal()
	})
}

// rotate continues in the next segment. It seals the old segment with a mark that names
// the next one. The next segment has had this name on the disk since it was prepared, so
// recovery treats its absence as a loss. Then rotate syncs the whole old segment, as the
// new one's first mark states.
func (w *writer) rotate() {
	l := w.l
	l.mu.Lock()
	next := l.ready[0]
	l.mu.Unlock()
	m := w.mark()
	m.next = next.seq
	w.buf = w.buf[:0]
	w.addMark(m)
	if err := w.put(w.buf); err != nil {
		l.fail(err)
		return
	}
	if !w.syncActive() {
		return
	}
	l.mu.Lock()
	l.ready = l.ready[1:]
	next.prevSeq, next.prevEnd = w.active.seq, w.active.end.Load()
	l.segs = append(l.segs, next)
	l.mu.Unlock()
	l.logger.Debug("next segment", zap.String("file", next.path))
	w.active, w.lastMark = next, mark{}
	l.gauges()
	w.rewriteDue = true
	l.prepareSignal.Set()
}

// drain completes everything with the error that ended the log.
func (w *writer) drain() {
	l := w.l
	l.mu.Lock()
	queue, err := l.queue, l.err
	l.queue, l.flight, l.queued = nil, 0, 0
	l.mu.Unlock()
	for _, b := range queue {
		if b.done != nil {
			b.done(err)
		}
	}
}

// finish makes everything durable, together with a mark that proves it. A segment without
// records needs no mark, and a mark would make a log that began empty count as used.
func (w *writer) finish() {
	if w.lazy != nil {
		w.lazy.Stop()
	}
	l := w.l
	if l.Err() != nil || !w.syncActive() {
		return
	}
	if m := w.mark(); m.durable > headerLen && m != w.lastMark && w.active.size-w.active.end.Load() >= 2*markLen {
		w.buf = w.buf[:0]
		w.addMark(m)
		if err := w.put(w.buf); err != nil {
			l.fail(err)
			return
		}
		w.syncActive()
	}
}
