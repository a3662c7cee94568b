package watch

import (
	"context"
	"errors"
	"iter"
	"slices"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/clock"
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

// Delivery is what a watcher is told at a time.
type Delivery struct {
	Watcher *Watcher
	// Events are those of whole revisions, in order. They are shared and must not be
	// changed.
	Events []*mvccpb.Event
	// Revision is a revision at or above that of all events, up to which there are no
	// others. Without events, Compacted and TooLarge, this is the answer to
	// RequestProgress, for all watchers of the stream, and Watcher is nil: none of them was
	// told an event above it.
	Revision keyspace.Revision
	// Compacted, if not 0, ends the watcher: events that it has not got were compacted up
	// to there.
	Compacted keyspace.Revision
	// TooLarge, if not 0, ends the watcher: that revision alone has more events of its span
	// than four times Config.RevisionBytes, and is not told in pieces.
	TooLarge keyspace.Revision

	// parts are what Events is made of, if other watchers get all of them too.
	parts []*sharedEvents
}

// delivery is what waits for a watcher's client.
type delivery struct {
	events []*mvccpb.Event
	bytes  int64
	rev    keyspace.Revision
	of     *sharedEvents
}

// first is the revision of its first event.
func (d *delivery) first() keyspace.Revision {
	return keyspace.Revision(d.events[0].Kv.ModRevision)
}

// last is the revision of its last event.
func (d *delivery) last() keyspace.Revision {
	return keyspace.Revision(d.events[len(d.events)-1].Kv.ModRevision)
}

// sharedEvents are events that wait for the clients of several watchers. What all of them
// hold is counted once, until the last one has taken its own.
type sharedEvents struct {
	// Guarded by the hub's mu.
	bytes int64
	users int

	// events are set where there is more than one watcher: the first one whose client
	// takes them has them encoded for all.
	events []*mvccpb.Event
	once   sync.Once
	// encoded is set by once.
	encoded []byte
}

// share is called before the events are offered to several watchers. Both forms of them
// wait together.
func (s *sharedEvents) share(events []*mvccpb.Event) {
	s.events = events
	s.bytes *= 2
}

// encode returns the events as they stand in an encoded WatchResponse.
func (s *sharedEvents) encode() []byte {
	s.once.Do(func() { s.encoded = appendEvents(nil, s.events) })
	return s.encoded
}

// fieldEvents is the field of a WatchResponse that holds an event.
const fieldEvents protowire.Number = 11

// appendEvents appends events as they stand in an encoded WatchResponse.
func appendEvents(dst []byte, events []*mvccpb.Event) []byte {
	size := 0
	for _, e := range events {
		size += protowire.SizeTag(fieldEvents) + protowire.SizeBytes(proto.Size(e))
	}
	dst = slices.Grow(dst, size)
	for _, e := range events {
		dst = protowire.AppendTag(dst, fieldEvents, protowire.BytesType)
		dst = protowire.AppendVarint(dst, uint64(proto.Size(e)))
		var err error
		if dst, err = (proto.MarshalOptions{UseCachedSize: true}).MarshalAppend(dst, e); err != nil {
			panic("watch: an event that was made here: " + err.Error()) // no string in it, no required field
		}
	}
	return dst
}

// AppendEncoded appends the events to parts as they stand in an encoded WatchResponse, one
// slice behind the other, if that is made but once for many watchers; ok is false where it
// is not. The bytes must not be changed.
func (d *Delivery) AppendEncoded(parts [][]byte) (_ [][]byte, ok bool) {
	for _, s := range d.parts {
		parts = append(parts, s.encode())
	}
	return parts, len(d.parts) > 0
}

// keptQueue is how many places of its queue a watcher keeps while nothing waits for it.
const keptQueue = 4

// deliveryBytes is what each of the watchers holds of it by itself.
const deliveryBytes = 64

// newDelivery shows a batch with the versions before, if they are wanted: none where the
// revision before is compacted, whoever remembers it, as etcd does, which looks when it
// sends.
func (h *Hub) newDelivery(batch []*event, prev bool, rev keyspace.Revision) delivery {
	d := delivery{rev: rev, events: make([]*mvccpb.Event, len(batch)), of: &sharedEvents{}}
	for i, e := range batch {
		d.events[i] = e.message(prev && e.rev > h.compacted)
		d.bytes += e.bytes
	}
	d.of.bytes = d.bytes
	return d
}

// adds is what it adds to the bytes that wait, if one more watcher holds it.
func (d *delivery) adds() int64 {
	if d.of.users > 0 {
		return deliveryBytes
	}
	return deliveryBytes + d.of.bytes
}

// releaseDelivery gives back what a watcher holds of a delivery.
func (h *Hub) releaseDelivery(d *delivery) {
	d.of.users--
	h.queuedBytes -= d.adds()
}

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

// Bounds of what a client is told at a time: one that takes no more in one message
// would otherwise never come further. One revision is never divided.
const (
	maxDeliveryRevisions = 1000
	maxDeliveryBytes     = 1 << 20
)

// fitting returns how many of the events fit into a delivery of none above the ceiling, which
// the first one is not.
func fitting(events []*mvccpb.Event, ceiling keyspace.Revision) int {
	border, revisions, bytes := 0, 1, 0
	for i, e := range events {
		if i > 0 && e.Kv.ModRevision != events[i-1].Kv.ModRevision {
			if border, revisions = i, revisions+1; revisions > maxDeliveryRevisions || e.Kv.ModRevision > int64(ceiling) {
				return border
			}
		}
		bytes += len(e.Kv.Key) + len(e.Kv.Value) + 64
		if e.PrevKv != nil {
			bytes += len(e.PrevKv.Key) + len(e.PrevKv.Value) + 64
		}
		if bytes > maxDeliveryBytes && border > 0 {
			return border
		}
	}
	return len(events)
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

// Stream are the watchers of one client's stream. Its methods may be called from many
// goroutines.
type Stream struct {
	hub *Hub
	// wake gets a value when there may be something to take.
	wake chan struct{}

	// Guarded by hub's mu.
	watchers map[*Watcher]struct{}
	ready    []*Watcher
	// asked is the revision that progress was asked for first, 0 for none, and askedLast
	// the last one. unsettled says that Settled was not so when it was last called.
	asked, askedLast keyspace.Revision
	unsettled        bool
	// ceiling is the revision above which no event is given out: MaxRevision, unless events are
	// held back for progress, since heldSince, and not again before holdNext. held are watchers
	// that were ready and have nothing below it.
	ceiling             keyspace.Revision
	heldSince, holdNext clock.Time
	held                []*Watcher
	// behind is a revision for which nobody waits for a watcher that has not come there yet.
	behind keyspace.Revision
	closed bool
}

// Events are held back for progress, see Stream.progressLocked, for as long as holdMost, and a
// tick more where nothing else happens: they do not wait longer for a range that does not speak.
// Behind that they flow for holdRest times as long, however often progress is asked for.
const (
	holdMost = 100 * time.Millisecond
	holdRest = 10
)

// ErrStopped says that the hub has stopped, or the stream is closed.
var ErrStopped = errors.New("watch: stopped")

// NewStream returns a stream without watchers. It must be closed.
func (h *Hub) NewStream() *Stream {
	h.cfg.Metrics.Streams.Inc()
	s := &Stream{hub: h, wake: make(chan struct{}, 1), watchers: map[*Watcher]struct{}{}, ceiling: keyspace.MaxRevision}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.streams[s] = struct{}{}
	return s
}

func (s *Stream) signal() { kick(s.wake) }

// Watch begins a watcher: nothing is missing above current, which is the revision at a
// moment during the call. A start that is compacted makes the
// watcher one that is cancelled with its first delivery.
// Its deliveries may be there before Watch returns.
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
	// The log may have told more by now than the answer.
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

// Cancel ends a watcher. It says whether there was one to end.
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

// Next waits for the next delivery of any of the stream's watchers. Each watcher's come
// in order; none comes after it was cancelled.
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

// Known returns the last revision that is known here to be handed out.
func (s *Stream) Known() keyspace.Revision {
	s.hub.mu.Lock()
	defer s.hub.mu.Unlock()
	return s.hub.logEnd
}

// Ready returns a channel that gets a value when Next may not have to wait.
func (s *Stream) Ready() <-chan struct{} { return s.wake }

// TryNext is Next that does not wait; ok is false where there is nothing.
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
			h.lagLocked(w.group) // what waited for it was taken back
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

// progressLocked says up to where all watchers of the stream have got everything, if
// that is what was asked for.
//
// clientv3 has each of them go on behind the answer, be it lower than where it was: it would be
// told twice what lies between once the stream breaks. So the answer is not below an event that
// one of them was told, as it never is in etcd. Under load there is always one whose ranges are
// a little behind what another one was told: then what is above that waits until all have come
// there.
func (s *Stream) progressLocked() (rev keyspace.Revision, ok bool) {
	rev, told, ok := s.leastLocked()
	if ok && rev < told && !mutation.Is(mutation.ProgressBehindEvent) {
		s.holdLocked(told)
		return 0, false
	}
	s.liftLocked()
	return rev, ok
}

// leastLocked says up to where all watchers of the stream have got everything, and up to where
// one of them was told events. ok is false where that is below what was asked for, or below
// where one of them begins: its client would go on there.
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

// holdLocked has no event above the revision given out, unless that was so a moment ago.
func (s *Stream) holdLocked(ceiling keyspace.Revision) {
	if now := s.hub.cfg.Clock.Now(); s.ceiling == keyspace.MaxRevision && now >= s.holdNext {
		s.ceiling, s.heldSince = ceiling, now
	}
}

// liftLocked has events given out again.
func (s *Stream) liftLocked() {
	if s.ceiling == keyspace.MaxRevision {
		return
	}
	now := s.hub.cfg.Clock.Now()
	s.ceiling, s.holdNext = keyspace.MaxRevision, now.Add(holdRest*now.Sub(s.heldSince))
	s.ready, s.held = append(s.held, s.ready...), nil
	s.signal()
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
	// What is complete may be less than it was: a range that takes in another one has spoken of
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

// RequestProgress has Next give out a revision without events, once all watchers of the
// stream have got everything up to what is current at a moment after the call. Requests
// that come before one is answered share one more answer. Like in etcd, none is answered
// that comes beside a watcher which begins later than that, or which reads the past, since
// it began there or its client was too slow: the client asks again. The stream's events may
// wait for the answer, for holdMost and a tick.
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

// awaitLocked has the stream woken by what is released while somebody waits for that.
func (s *Stream) awaitLocked() {
	if s.asked != 0 || s.unsettled {
		s.hub.progress[s] = struct{}{}
		return
	}
	delete(s.hub.progress, s)
}

// Settled says whether the watchers that are live, of those given, have got everything at
// or below the revision: none of them is given an event of it any more. Until that is so
// Ready's channel gets a value whenever it may have become so. Who lags is not waited for,
// like in etcd, and nor is who has not come to where giveUp was said last: then nobody is
// waited for, and who begins later where others do not get on is as little.
func (s *Stream) Settled(rev keyspace.Revision, watchers iter.Seq[*Watcher], giveUp bool) bool {
	s.hub.mu.Lock()
	defer s.hub.mu.Unlock()
	s.unsettled = !s.settledLocked(rev, watchers, giveUp)
	s.awaitLocked()
	return !s.unsettled
}

func (s *Stream) settledLocked(rev keyspace.Revision, watchers iter.Seq[*Watcher], giveUp bool) bool {
	if s.hub.releasedLocked(rev) && s.takenLocked(rev) {
		return true // whoever they are
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

// takenLocked says whether no watcher of the stream has to be given an event at or below the
// revision that was released.
func (s *Stream) takenLocked(rev keyspace.Revision) bool {
	waits := func(w *Watcher) bool { return len(w.queue) > 0 && w.queue[0].first() <= rev }
	return !slices.ContainsFunc(s.ready, waits) && !slices.ContainsFunc(s.held, waits)
}
