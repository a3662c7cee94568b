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
	// Start is the first revision wanted; 0 begins above the current one.
	Start keyspace.Revision
	// Prev wants the version before each event.
	Prev bool
	// NoPut and NoDelete leave events out.
	NoPut, NoDelete bool
	// Hold delivers nothing until Announced is called. Events wait meanwhile, within the bounds of a
	// slow client.
	Hold bool
}

// keptQueue is the capacity that an empty queue keeps.
const keptQueue = 4

// Watcher is one watcher of a Stream. Its fields are guarded by the hub's mu.
type Watcher struct {
	// ID is the caller's; the hub ignores it.
	ID int64

	s   *Stream
	req Request
	// from is the first revision that the watcher still gets. group has it as member number at.
	from  keyspace.Revision
	group *group
	at    int
	// compactedStart is the start, if exactly that revision is compacted: the
	// watcher gets only its events that a compaction keeps. It is 0 for all others.
	compactedStart keyspace.Revision

	queue []delivery
	bytes int64
	// told is the highest revision that the client was told, by an event or by progress, or 0.
	told keyspace.Revision
	// compacted and tooLarge are the revisions for which the watcher was cancelled, or 0. ready
	// says that it is in s.ready or s.held.
	compacted, tooLarge keyspace.Revision
	ready               bool
	closed              bool
	// past says that the watcher began in the past, or that its client was too slow. While it lags
	// for that, requests for the stream's progress are not answered.
	past bool
	// held says that Announced was not called yet.
	held bool
}

// Announced ends what Request.Hold began.
func (w *Watcher) Announced() {
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

// keptOf applies to a watcher that begins at exactly the compacted revision. It leaves out events of that revision that a later operation of the
// transaction replaced, as a compaction does. etcd leaves them out also for a watcher that began earlier and lags. Here
// that one gets all of them: a version keeps what it has replaced for as long as it exists.
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

// offerLocked queues the wanted events of a batch for the watcher's client. It refuses if too much
// waits already.
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
	h.queuedEvents += len(d.events)
	d.of.users++
	w.readyLocked()
	return true
}

// takeLocked takes the next delivery from the queue. It joins as many queued ones as fit, because a
// slow client is helped by fewer messages.
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
		// The rest of a delivery that was taken in parts is not what others get.
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

// takePartLocked takes the first n events of the first delivery, which are whole revisions.
func (w *Watcher) takePartLocked(n int) Delivery {
	first := &w.queue[0]
	events := first.events[:n:n]
	bytes := first.bytes / int64(len(first.events)) * int64(n)
	first.events, first.bytes = first.events[n:], first.bytes-bytes
	w.bytes -= bytes
	w.s.hub.queuedEvents -= n
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

// cancelLocked cancels a watcher that has left its group. The client is told after what waits for
// it.
func (w *Watcher) cancelLocked(at keyspace.Revision) {
	w.compacted = at
	w.readyLocked()
}

// forgetLocked drops the queue.
func (w *Watcher) forgetLocked() {
	for i := range w.queue {
		w.s.hub.releaseDelivery(&w.queue[i])
	}
	w.queue, w.bytes = nil, 0
}

// passedLocked returns the revision up to which the client has taken everything. ok is false if the
// watcher lags. A watcher that begins later has passed what it does not want.
func (w *Watcher) passedLocked() (rev keyspace.Revision, ok bool) {
	if rev, ok = w.reachedLocked(); ok && len(w.queue) == 0 && mutation.Is(mutation.ProgressTooEarly) {
		return w.s.hub.logEnd, true
	}
	return rev, ok
}

// reachedLocked returns the revision up to which the client has taken everything that it gets. ok
// is false if the watcher lags or has ended.
func (w *Watcher) reachedLocked() (rev keyspace.Revision, ok bool) {
	if w.s.hub.run == nil || w.closed || w.group == nil || !w.group.live {
		return 0, false
	}
	if len(w.queue) > 0 {
		return w.queue[0].first() - 1, true
	}
	rev = w.s.hub.frontierLocked(w.group.span)
	if p := &w.group.pending; p.len() > 0 {
		rev = min(rev, p.first().rev-1) // a pause may hold resolved events back
	}
	// The frontier may go back: a range that absorbs another one has resolved no more than either.
	// But clientv3 resumes behind its last event or progress, and would get events twice. Kubernetes' watch cache takes its own revision from progress.
	return max(rev, w.told), true
}

// Progress returns the revision up to which the client has got everything: Next has returned all
// events at or below it. The caller tells the client, so it never goes back. ok is false if the
// watcher or its client lags, or if the watcher begins later.
func (w *Watcher) Progress() (rev keyspace.Revision, ok bool) {
	w.s.hub.mu.Lock()
	defer w.s.hub.mu.Unlock()
	if rev, ok = w.passedLocked(); !ok || len(w.queue) > 0 || rev < w.req.Start || rev < w.from-1 {
		return rev, false
	}
	w.told = rev
	return rev, true
}
