package watch

import (
	"slices"

	"go.etcd.io/etcd/api/v3/mvccpb"

	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/keyspace"
)

// Request is what a watcher wants.
type Request struct {
	Span keyspace.Span
	// Start is the first revision wanted; 0 begins behind the current one.
	Start keyspace.Revision
	// Prev wants the version before each event along.
	Prev bool
	// NoPut and NoDelete leave events out.
	NoPut, NoDelete bool
	// Hold gives out nothing before Told was called: what comes before then waits within the
	// bounds of a client that takes nothing.
	Hold bool
}

// keptQueue is how many places of its queue a watcher keeps while nothing waits for it.
const keptQueue = 4

// Watcher is one watcher of a Stream. Its fields are guarded by the hub's mu.
type Watcher struct {
	// ID is the caller's, which the hub does not look at.
	ID int64

	s   *Stream
	req Request
	// from is the first revision that it gets now; group where it is, as which of the
	// members.
	from  keyspace.Revision
	group *group
	at    int
	// compactedStart is where it begins if just that is compacted: of that revision it is
	// told what a compaction keeps. 0 for all others, who are owed everything.
	compactedStart keyspace.Revision

	queue []delivery
	bytes int64
	// told is the highest revision that its client was told, by an event or by progress, 0
	// before any.
	told keyspace.Revision
	// compacted is set where it was cancelled; ready says that it is in s.ready or s.held.
	// tooLarge is a revision for which it was.
	compacted, tooLarge keyspace.Revision
	ready               bool
	closed              bool
	// past says that it began in the past, or that its client was too slow: while it lags
	// for that nobody asks for the stream's progress.
	past bool
	// held says that its client was not told of it yet.
	held bool
}

// Told ends what Request.Hold has begun.
func (w *Watcher) Told() {
	w.s.hub.mu.Lock()
	defer w.s.hub.mu.Unlock()
	if w.held = false; !w.closed {
		w.readyLocked()
	}
}

// wants says whether the watcher gets the event.
func (w *Watcher) wants(e *event) bool {
	if e.rev < w.from {
		return false
	}
	if e.plain.Type == mvccpb.Event_PUT {
		return !w.req.NoPut
	}
	return !w.req.NoDelete
}

// keptOf leaves out, where the watcher begins at just the compacted revision, the events of
// writes that a later one of the same transaction has replaced there: a compaction keeps the
// last one of a key. etcd leaves them out for whoever reads that revision behind the
// compaction, also for one that began before it and lags; but that one is owed all, and the
// store has it: a version keeps what it has replaced for as long as it is there itself.
func (w *Watcher) keptOf(batch []*event) []*event {
	at := w.compactedStart
	if at == 0 || batch[0].rev > at {
		return batch
	}
	last := map[string]*event{}
	for _, e := range batch {
		if e.rev == at {
			last[string(e.key())] = e
		}
	}
	return slices.DeleteFunc(slices.Clone(batch), func(e *event) bool { return e.rev == at && last[string(e.key())] != e })
}

// offerLocked queues a batch for the watcher's client, without what it does not want.
// It refuses where too much waits already.
func (w *Watcher) offerLocked(batch []*event, d delivery) bool {
	h := w.s.hub
	own := w.keptOf(batch)
	if i := slices.IndexFunc(own, func(e *event) bool { return !w.wants(e) }); i >= 0 || len(own) < len(batch) {
		d = h.newDelivery(slices.DeleteFunc(slices.Clone(own), func(e *event) bool { return !w.wants(e) }), w.req.Prev, d.rev)
		if len(d.events) == 0 {
			return true
		}
	}
	if len(w.queue) > 0 && (w.bytes+d.bytes > h.cfg.WatcherBytes || h.queuedBytes+d.adds() > h.cfg.QueuedBytes) {
		return false
	}
	w.queue = append(w.queue, d)
	w.bytes += d.bytes
	h.queuedBytes += d.adds()
	d.of.users++
	w.readyLocked()
	return true
}

// takeLocked takes what the client gets next from the queue: of several deliveries that
// have come together while it took nothing as many as fit into one, since a client that does
// not keep up is helped by fewer messages.
func (w *Watcher) takeLocked() Delivery {
	first := &w.queue[0]
	small := first.bytes <= maxDeliveryBytes && len(first.events) <= maxDeliveryRevisions && first.last() <= w.s.ceiling
	if !small {
		if n := fitting(first.events, w.s.ceiling); n < len(first.events) {
			return w.takePartLocked(n)
		}
	}
	n, events, bytes := 1, len(first.events), first.bytes
	for ; n < len(w.queue); n++ {
		events += len(w.queue[n].events)
		if bytes += w.queue[n].bytes; bytes > maxDeliveryBytes || events > maxDeliveryRevisions || w.queue[n].last() > w.s.ceiling {
			break
		}
	}
	d := Delivery{Watcher: w, Events: first.events, Revision: w.queue[n-1].rev}
	if n > 1 {
		d.Events = make([]*mvccpb.Event, 0, events)
	}
	shared := true
	for i := range w.queue[:n] {
		q := &w.queue[i]
		if n > 1 {
			d.Events = append(d.Events, q.events...)
		}
		// What is left of a delivery that was taken in parts is not what others get.
		if shared = shared && len(q.of.events) == len(q.events); shared {
			d.parts = append(d.parts, q.of)
		}
		w.bytes -= q.bytes
		w.s.hub.releaseDelivery(q)
	}
	if !shared {
		d.parts = nil
	}
	rest := copy(w.queue, w.queue[n:])
	clear(w.queue[rest:])
	if w.queue = w.queue[:rest]; rest == 0 && cap(w.queue) > keptQueue {
		w.queue = nil
	}
	return d
}

// takePartLocked takes the first events of the first delivery, whole revisions.
func (w *Watcher) takePartLocked(n int) Delivery {
	first := &w.queue[0]
	events := first.events[:n:n]
	bytes := first.bytes / int64(len(first.events)) * int64(n)
	first.events, first.bytes = first.events[n:], first.bytes-bytes
	w.bytes -= bytes
	return Delivery{Watcher: w, Events: events, Revision: keyspace.Revision(events[n-1].Kv.ModRevision)}
}

func (w *Watcher) readyLocked() {
	if w.held {
		return
	}
	if !w.ready {
		w.ready = true
		w.s.ready = append(w.s.ready, w)
	}
	w.s.signal()
}

// cancelLocked ends the watcher, which has left its group: behind what waits for its
// client it is told why.
func (w *Watcher) cancelLocked(at keyspace.Revision) {
	w.compacted = at
	w.readyLocked()
}

// forgetLocked drops what waits.
func (w *Watcher) forgetLocked() {
	for i := range w.queue {
		w.s.hub.releaseDelivery(&w.queue[i])
	}
	w.queue, w.bytes = nil, 0
}

// passedLocked says up to where the watcher's client has taken everything. ok is false
// where the watcher lags. One that begins later has passed what it does not want.
func (w *Watcher) passedLocked() (rev keyspace.Revision, ok bool) {
	if rev, ok = w.reachedLocked(); ok && len(w.queue) == 0 && mutation.Is(mutation.ProgressTooEarly) {
		return w.s.hub.logEnd, true
	}
	return rev, ok
}

// reachedLocked says up to where the watcher's client has taken everything that it gets. ok
// is false where the watcher lags or has ended.
func (w *Watcher) reachedLocked() (rev keyspace.Revision, ok bool) {
	if w.s.hub.run == nil || w.closed || w.group == nil || !w.group.live {
		return 0, false
	}
	if len(w.queue) > 0 {
		return w.queue[0].first() - 1, true
	}
	rev = w.s.hub.frontierLocked(w.group.span)
	if p := &w.group.pending; p.len() > 0 {
		rev = min(rev, p.first().rev-1) // what is complete may be held back for a moment
	}
	// What is complete may be less than it was: a range that takes in another one has resolved of
	// no more than either. clientv3 goes on behind the last answer, be it an event or progress,
	// and would be told twice what lies between; and Kubernetes' watch cache takes its own
	// revision from progress.
	return max(rev, w.told), true
}

// Progress says up to where the watcher's client has got everything: all events at or
// below the revision were given out by Next. The caller tells the client, so it is never
// less than before. ok is false where the watcher lags, its client does, or it begins later.
func (w *Watcher) Progress() (rev keyspace.Revision, ok bool) {
	w.s.hub.mu.Lock()
	defer w.s.hub.mu.Unlock()
	if rev, ok = w.passedLocked(); !ok || len(w.queue) > 0 || rev < w.req.Start || rev < w.from-1 {
		return rev, false
	}
	w.told = rev
	return rev, true
}
