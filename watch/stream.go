package watch

import (
	"context"
	"errors"
	"iter"
	"slices"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/internal/wake"
	"github.com/skeindb/skein/keyspace"
)

// Stream is the watchers of one client's stream. Its methods may be called from many goroutines.
type Stream struct {
	hub *Hub
	// wake gets a value when there may be a delivery to take.
	wake wake.Signal

	// Guarded by hub's mu.
	watchers map[*Watcher]struct{}
	ready    []*Watcher
	// asked is the first revision whose progress was requested, 0 for none; askedLast is the last
	// one. unsettled says that the last call of Settled returned false.
	asked, askedLast keyspace.Revision
	unsettled        bool
	// No event above ceiling leaves. It is MaxRevision unless events are held back for progress.
	// heldSince is when that began, and holdNext when it may begin again. held are ready watchers
	// without an event at or below ceiling.
	ceiling             keyspace.Revision
	heldSince, holdNext clock.Time
	held                []*Watcher
	// Settled does not wait for a watcher that has not reached behind.
	behind keyspace.Revision
	closed bool
}

// Events are held back for progress (progressLocked) for holdMost, plus a tick if nothing else
// happens. So they do not wait longer for a silent range. Then they flow for at least holdRest
// times as long, however often a client requests progress.
const (
	holdMost = 100 * time.Millisecond
	holdRest = 10
)

// ErrStopped says that the hub has stopped, or that the stream is closed.
var ErrStopped = errors.New("watch: stopped")

// ErrTooMany says that there is no room for another watcher.
var ErrTooMany = errors.New("watch: Config.IdleBytes are used up")

// What a watcher and a stream take at rest, with the parts of etcdapi and gRPC. Measured by loadtest idle:
// 730 bytes for a watcher of a key of 13 bytes, 28 kB for a stream. A watcher has its keys in keyCopies
// places.
const (
	watcherBytes = 768
	streamBytes  = 28 << 10
	keyCopies    = 6
)

// idleBytes is what the watcher counts for.
func (r *Request) idleBytes() int64 {
	return watcherBytes + keyCopies*int64(len(r.Span.Start)+len(r.Span.End))
}

// idleLocked counts the watcher, and the stream with its first one, by n times. That is 1 or -1.
func (s *Stream) idleLocked(w *Watcher, n int64) {
	s.hub.idleBytes += n * w.req.idleBytes()
	if len(s.watchers) == 0 {
		s.hub.idleBytes += n * streamBytes
	}
}

// NewStream returns a stream without watchers. It must be closed.
func (h *Hub) NewStream() *Stream {
	h.cfg.Metrics.Streams.Inc()
	s := &Stream{hub: h, wake: wake.New(), watchers: map[*Watcher]struct{}{}, ceiling: keyspace.MaxRevision}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.streams[s] = struct{}{}
	return s
}

// Watch begins a watcher, or returns ErrTooMany. The watcher misses nothing above current, the
// revision at a moment during the call. A watcher with a compacted start is cancelled with its first delivery. Deliveries may
// arrive before Watch returns.
func (s *Stream) Watch(ctx context.Context, id int64, req Request) (w *Watcher, current keyspace.Revision, err error) {
	h := s.hub
	a, err := h.cfg.Ranges.Current(ctx)
	if err != nil {
		return nil, 0, err
	}
	w = &Watcher{ID: id, s: s, req: req, from: req.Start, held: req.Hold}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.stopped || s.closed {
		return nil, 0, ErrStopped
	}
	if s.idleLocked(w, 1); h.idleBytes > h.cfg.IdleBytes {
		s.idleLocked(w, -1)
		return nil, 0, ErrTooMany
	}
	if h.watchers++; h.watchers == 1 {
		h.wakeLocked(a.Current)
	}
	h.compacted = max(h.compacted, a.Compacted)
	s.watchers[w] = struct{}{}
	h.cfg.Metrics.Watchers.Inc()
	if req.Start > 0 && req.Start < a.Compacted {
		w.cancelLocked(a.Compacted)
		return w, a.Current, nil
	}
	// The log may be ahead of the answer by now.
	current = max(a.Current, h.logEnd)
	pos := current
	if req.Start > 0 {
		pos = min(req.Start-1, current)
	}
	w.from, w.past = max(w.from, pos+1), pos < current
	if req.Start == a.Compacted {
		w.compactedStart = req.Start
	}
	h.coverLocked(req.Span, current)
	if req.Prev {
		h.wantPrevLocked(req.Span)
	}
	g := h.lagBehindLocked(w, pos)
	g.least = a.Current
	if !h.goLiveLocked(g) {
		h.lagLocked(g)
	}
	return w, current, nil
}

// Cancel ends a watcher. It returns false if the watcher had ended before.
func (s *Stream) Cancel(w *Watcher) bool {
	s.hub.mu.Lock()
	defer s.hub.mu.Unlock()
	return s.removeLocked(w)
}

func (s *Stream) removeLocked(w *Watcher) bool {
	if w.closed {
		return false
	}
	h := s.hub
	w.closed = true
	delete(s.watchers, w)
	s.idleLocked(w, -1)
	if w.group != nil {
		h.leaveLocked(w)
	}
	w.forgetLocked()
	h.cfg.Metrics.Watchers.Dec()
	if h.watchers--; h.watchers == 0 {
		h.idleSince = h.cfg.Clock.Now()
	}
	s.signal()
	return true
}

// Close ends all watchers.
func (s *Stream) Close() {
	h := s.hub
	h.mu.Lock()
	defer h.mu.Unlock()
	if s.closed {
		return
	}
	s.closed = true
	delete(h.progress, s)
	delete(h.streams, s)
	for w := range s.watchers {
		s.removeLocked(w)
	}
	h.cfg.Metrics.Streams.Dec()
	s.signal()
}

// Next waits for the next delivery of any of the stream's watchers. The deliveries of one watcher
// come in order, and none comes after the watcher was cancelled.
func (s *Stream) Next(ctx context.Context) (Delivery, error) {
	for {
		d, ok, err := s.next()
		if ok || err != nil {
			return d, err
		}
		select {
		case <-s.wake:
		case <-ctx.Done():
			return Delivery{}, ctx.Err()
		}
	}
}

// Current returns the current revision, as of a moment after the call.
func (s *Stream) Current(ctx context.Context) (keyspace.Revision, error) {
	a, err := s.hub.cfg.Ranges.Current(ctx)
	return a.Current, err
}

// Known returns the last allocated revision that this node knows of.
func (s *Stream) Known() keyspace.Revision {
	s.hub.mu.Lock()
	defer s.hub.mu.Unlock()
	return s.hub.logEnd
}

// Ready returns a channel that gets a value when Next may not have to wait.
func (s *Stream) Ready() <-chan struct{} { return s.wake }

// TryNext is Next without waiting; ok is false if there is no delivery.
func (s *Stream) TryNext() (d Delivery, ok bool, err error) { return s.next() }

func (s *Stream) next() (d Delivery, ok bool, err error) {
	h := s.hub
	h.mu.Lock()
	defer h.mu.Unlock()
	if s.closed || h.stopped {
		return d, false, ErrStopped
	}
	if s.ceiling != keyspace.MaxRevision && h.cfg.Clock.Now().Sub(s.heldSince) >= holdMost {
		s.liftLocked()
	}
	for len(s.ready) > 0 {
		w := s.ready[0]
		s.ready[0] = nil
		s.ready = s.ready[1:]
		if len(w.queue) > 0 && w.queue[0].first() > s.ceiling {
			s.held = append(s.held, w)
			continue
		}
		w.ready = false
		switch {
		case w.closed:
		case len(w.queue) > 0:
			d = w.takeLocked()
			w.told = keyspace.Revision(d.Events[len(d.Events)-1].Kv.ModRevision)
			if len(w.queue) > 0 || w.compacted != 0 || w.tooLarge != 0 {
				w.readyLocked()
			} else if w.group != nil && !w.group.live {
				h.lagLocked(w.group)
			}
			h.cfg.Metrics.Events.Add(float64(len(d.Events)))
			return d, true, nil
		case w.compacted != 0 || w.tooLarge != 0:
			s.removeLocked(w)
			return Delivery{Watcher: w, Compacted: w.compacted, TooLarge: w.tooLarge}, true, nil
		case w.group != nil && !w.group.live:
			h.lagLocked(w.group) // its queue was reclaimed
		}
	}
	if rev, ok := s.progressLocked(); ok {
		if s.asked = s.askedLast; s.asked <= rev {
			s.asked = 0
			s.awaitLocked()
		}
		for w := range s.watchers {
			w.told = max(w.told, rev)
		}
		return Delivery{Revision: rev}, true, nil
	}
	return d, false, nil
}

// progressLocked returns the revision that all watchers of the stream have reached, if progress was
// requested.
//
// clientv3 resumes every watcher behind the answer, even if that is lower than where the watcher
// was. The client would get the events between them twice after a broken stream. So the answer is
// never below an event that one of the watchers was told, as in etcd. Under load some watcher's
// ranges are always a little behind another watcher's last event. Then the events above that wait
// until all watchers have come there.
func (s *Stream) progressLocked() (rev keyspace.Revision, ok bool) {
	rev, told, ok := s.leastLocked()
	if ok && rev < told && !mutation.Is(mutation.ProgressBehindEvent) {
		s.holdLocked(told)
		return 0, false
	}
	s.liftLocked()
	return rev, ok
}

// leastLocked returns the revision that all watchers have reached, and the highest revision that
// one of them was told. The result is not ok if the former is
// below the request, or below the start of one watcher, because its client would resume there.
func (s *Stream) leastLocked() (rev, told keyspace.Revision, ok bool) {
	if s.asked == 0 || len(s.watchers) == 0 {
		return 0, 0, false
	}
	rev, due := keyspace.MaxRevision, s.asked
	for w := range s.watchers {
		at, ok := w.passedLocked()
		if !ok || at < s.asked {
			return 0, 0, false
		}
		rev, due, told = min(rev, at), max(due, w.from-1), max(told, w.told)
	}
	return rev, told, rev >= due
}

// holdLocked holds events above the ceiling back, unless it did so a moment ago.
func (s *Stream) holdLocked(ceiling keyspace.Revision) {
	if now := s.hub.cfg.Clock.Now(); s.ceiling == keyspace.MaxRevision && now >= s.holdNext {
		s.ceiling, s.heldSince = ceiling, now
	}
}

// liftLocked lets events flow again.
func (s *Stream) liftLocked() {
	if s.ceiling == keyspace.MaxRevision {
		return
	}
	now := s.hub.cfg.Clock.Now()
	s.ceiling, s.holdNext = keyspace.MaxRevision, now.Add(holdRest*now.Sub(s.heldSince))
	s.ready, s.held = append(s.held, s.ready...), nil
	s.signal()
}

// RequestProgress has Next return a revision without events, once all watchers have everything up
// to the revision current at a moment after the call. Requests that come before an answer share one
// more answer. As in etcd, a request gets no answer while a watcher begins later than that
// revision, or reads the past; the client asks again. A watcher reads the past if it began there,
// or if its client was too slow. The stream's events may wait for the answer for holdMost and a
// tick.
func (s *Stream) RequestProgress(ctx context.Context) error {
	h := s.hub
	a, err := h.cfg.Ranges.Current(ctx)
	if err != nil {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for w := range s.watchers {
		if w.req.Start > a.Current || w.past && w.group != nil && !w.group.live {
			return nil
		}
	}
	if len(s.watchers) > 0 && !s.closed && h.run != nil {
		if s.askedLast = max(s.askedLast, a.Current); s.asked == 0 {
			s.asked = a.Current
		}
		s.awaitLocked()
		s.signal()
	}
	return nil
}

// awaitLocked has releases wake the stream while somebody waits for one.
func (s *Stream) awaitLocked() {
	if s.asked != 0 || s.unsettled {
		s.hub.progress[s] = struct{}{}
		return
	}
	delete(s.hub.progress, s)
}

// Settled says whether the given watchers that are live have got everything at or below the
// revision. Until it returns true, Ready's channel gets a value whenever that may have changed. As
// in etcd, it does not wait for watchers that lag. With giveUp it waits for nobody. From then on it ignores watchers below
// that revision, and new ones beside them.
func (s *Stream) Settled(rev keyspace.Revision, watchers iter.Seq[*Watcher], giveUp bool) bool {
	s.hub.mu.Lock()
	defer s.hub.mu.Unlock()
	s.unsettled = !s.settledLocked(rev, watchers, giveUp)
	s.awaitLocked()
	return !s.unsettled
}

func (s *Stream) settledLocked(rev keyspace.Revision, watchers iter.Seq[*Watcher], giveUp bool) bool {
	if s.hub.releasedLocked(rev) && s.takenLocked(rev) {
		return true // for any watchers
	}
	if giveUp {
		s.behind = max(s.behind, rev)
		return true
	}
	for w := range watchers {
		at, ok := w.reachedLocked()
		if ok && at < rev && at >= s.behind && (len(w.queue) > 0 || w.from <= rev) {
			return false
		}
	}
	return true
}

// takenLocked says whether all released events at or below the revision have left the queues.
func (s *Stream) takenLocked(rev keyspace.Revision) bool {
	waits := func(w *Watcher) bool { return len(w.queue) > 0 && w.queue[0].first() <= rev }
	return !slices.ContainsFunc(s.ready, waits) && !slices.ContainsFunc(s.held, waits)
}
