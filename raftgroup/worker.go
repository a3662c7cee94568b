package raftgroup

import (
	"sync"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/wal"
)

// item is one group's turn in a pass.
type item struct {
	g *Group
	k *work
	// read says that the visit has read from the log's files, or would have.
	read bool
}

// worker drives a fixed part of the host's groups, in one pass at a time. Everything that
// arrives for a group goes into its work under mu, and the group into the queue. A pass
// takes many groups and visits them one after another. It sends their messages as one
// frame for each peer and class, and submits their writes to the wal as one batch. It runs in the worker's goroutine,
// or in that of somebody who has brought work (help).
type worker struct {
	h  *Host
	no int

	mu struct {
		sync.Mutex
		queue   []*Group // each at most once
		head    int
		stopped bool
		running bool     // the worker's goroutine has begun: no pass is run before
		awake   []*Group // the groups that a tick visits; Group.awakeAt is the index here
		free    []*work
		inPass  bool
		ended   clock.Stopwatch // since the last pass
		notices []waitingNotice // groups that hold commit notices back; a timer runs while there are any
		// noticeTimer says that it runs.
		noticeTimer bool
	}
	cond *sync.Cond // of mu
	pass func()     // passLocked, for those who help

	// The rest is owned by the pass.
	now clock.Time // the clock of this pass, read after its work was taken
	// readBytes is how much this pass has read from the log's files.
	readBytes int64
	items     []item
	out       outbox
	batch     *wal.Batch
	record    *passRecord
	scheduled []scheduledTask // tasks for the appliers, handed over when the pass ends
	riding    []*Group        // groups whose commit notices go with this pass's entries
}

func newWorker(h *Host, no int) *worker {
	w := &worker{h: h, no: no}
	w.cond = sync.NewCond(&w.mu.Mutex)
	w.pass = w.passLocked
	w.out.init(w)
	return w
}

// run is the worker's goroutine. After stop it ends once the queue is empty.
func (w *worker) run() {
	w.mu.Lock()
	w.mu.running = true
	for {
		for w.mu.inPass || w.waitingLocked() == 0 {
			if w.mu.stopped && !w.mu.inPass {
				w.mu.Unlock()
				return
			}
			w.cond.Wait()
		}
		w.passLocked()
	}
}

// passLocked runs one pass. mu must be held; it is not while the pass runs.
func (w *worker) passLocked() {
	w.mu.inPass = true
	w.takeLocked()
	w.mu.Unlock()
	// Read after the work was taken: every heartbeat to be answered has arrived by
	// now, and none is sent with an earlier reading.
	w.now, w.readBytes = w.h.cfg.Clock.Now(), 0
	for i := range w.items {
		it, before := &w.items[i], w.readBytes
		it.g.visit(it.k)
		it.read = w.readBytes != before || it.g.readDeferred
	}
	w.finish()
	w.mu.Lock()
	for _, it := range w.items {
		if it.read {
			it.g.afterRead = helpAfterRead
		} else if it.g.afterRead > 0 {
			it.g.afterRead--
		}
		if it.k.reset(); it.k.small() && len(w.mu.free) < 2*passGroupsMax {
			w.mu.free = append(w.mu.free, it.k)
		}
	}
	clear(w.items)
	w.items = w.items[:0]
	w.mu.inPass, w.mu.ended = false, clock.StartStopwatch()
}

// takeLocked takes enough groups with work for one pass. mu must be held.
func (w *worker) takeLocked() {
	for w.mu.head < len(w.mu.queue) && len(w.items) < passGroupsMax {
		g := w.mu.queue[w.mu.head]
		w.mu.queue[w.mu.head] = nil
		w.mu.head++
		w.items = append(w.items, item{g: g, k: g.work})
		g.work, g.queued = nil, false
	}
	switch {
	case w.mu.head == len(w.mu.queue):
		w.mu.queue, w.mu.head = w.mu.queue[:0], 0
	case w.mu.head >= passGroupsMax && 2*w.mu.head >= len(w.mu.queue):
		n := copy(w.mu.queue, w.mu.queue[w.mu.head:])
		clear(w.mu.queue[n:])
		w.mu.queue, w.mu.head = w.mu.queue[:n], 0
	}
}

// stop ends the worker once its queue is empty.
func (w *worker) stop() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.mu.stopped = true
	w.cond.Broadcast()
}

// finish ends a pass. Frames do not wait for the pass's own fsync: MsgApp need not, and
// messages that must wait are among the batch's responses. The frames leave after the
// submission: the scheduler first runs the goroutine that was woken last, and the path to
// the peers takes longer.
func (w *worker) finish() {
	w.h.m.passGroups.Observe(float64(len(w.items)))
	if w.out.entries {
		w.carryCommitNotices()
	}
	if w.batch != nil {
		b, rec := w.batch, w.record
		w.batch, w.record = nil, nil
		rec.watch = clock.StartStopwatch()
		b.SetSync(rec.sync)
		w.h.cfg.WAL.Submit(b, func(err error) { w.durable(rec, err) })
	}
	w.out.flush()
	if len(w.scheduled) > 0 {
		w.h.startApplies(w.scheduled)
		clear(w.scheduled)
		w.scheduled = w.scheduled[:0]
	}
}
