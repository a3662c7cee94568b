package etcdapi

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"runtime"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"go.uber.org/zap"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/watch"
)

// What etcd says of watchers that it does not make. clientv3 gives these texts to its
// callers; etcd has no error values for them in its API.
const (
	reasonTooLarge    = "skein: revision %d is too large for one watch response"
	reasonEmptyRange  = "mvcc: watcher range is empty"
	reasonDuplicateID = "mvcc: duplicate watch ID provided on the WatchStream"
)

const (
	// autoWatchID has the server choose an id; invalidWatchID is that of a watcher that was
	// not made, and of progress for all watchers of a stream.
	autoWatchID    = 0
	invalidWatchID = -1
	// controlQueue is how many answers to requests wait for their header, and how many
	// for the sender; beyond it the stream's requests wait.
	controlQueue = 16
	// createWithin is for how long a watcher is tried to be made while no sequencer
	// answers, headerWithin for how long an answer waits for the revision of its header.
	createWithin = 5 * time.Second
	// Once none has, those behind it wait for headerAgain only, until one does.
	headerWithin = 5 * time.Second
	headerAgain  = 100 * time.Millisecond
	retryPause   = 20 * time.Millisecond
	// settleWithin is for how long an answer waits for the events that belong before it. A
	// range without a leader for longer than that has its watchers told later, and does not
	// keep the stream from having others.
	settleWithin = 5 * time.Second
)

// watchServer is etcd's Watch service.
type watchServer struct {
	s *Server
	pb.UnsafeWatchServer
}

// watchStream is one stream: a goroutine takes requests, one asks the sequencer for what
// their answers need, and another one, the handler's own, sends whatever there is to send.
type watchStream struct {
	s    *Server
	grpc pb.Watch_WatchServer
	hub  *watch.Stream
	// asked are answers in the order of their requests, control those that may be sent.
	asked, control chan control
	// ask has a value when the client wants to know how far it is.
	ask chan struct{}

	mu sync.Mutex
	// Guarded by mu. ids are the watchers by their ids; one that was cancelled for
	// compaction keeps its id until its client cancels it too, as in etcd. nextID is the
	// next one that the server chooses.
	ids    map[int64]*watcher
	nextID int64

	// announced are the watchers whose creation the client was told. Only the sender touches
	// them.
	announced map[*watch.Watcher]*watcher

	// shared is the response that is being sent, if its events were encoded for many. Its
	// head has headRevision, of headTerm: what the stream's watchers are told at a time they
	// are told with one header. Only the sender touches them.
	shared       sharedResponse
	headRevision keyspace.Revision
	headTerm     uint64

	// next is the answer that is sent next, once all is that belongs before it: until
	// overdue, which is set where it had to wait. Only the sender touches them.
	next    *control
	overdue clock.Timer
}

// watcher is a watcher as its stream knows it.
type watcher struct {
	id       int64
	w        *watch.Watcher
	fragment bool
	// progress says that the client wants progress, quiet that nothing was sent since the
	// last tick. Only the sender touches quiet.
	progress, quiet bool
}

// control is an answer to a request, and whose creation or end it tells. Without a header it
// gets that of the current revision.
type control struct {
	resp         *pb.WatchResponse
	created, end *watcher
}

// Watch serves a stream of watchers.
func (ws *watchServer) Watch(g pb.Watch_WatchServer) error {
	st := &watchStream{
		s: ws.s, grpc: g, hub: ws.s.opts.Watches.NewStream(), ask: make(chan struct{}, 1),
		asked: make(chan control, controlQueue), control: make(chan control, controlQueue),
		ids: make(map[int64]*watcher), announced: make(map[*watch.Watcher]*watcher),
	}
	defer st.hub.Close()
	ctx, cancel := context.WithCancel(g.Context())
	defer cancel()
	received := make(chan error, 1)
	// It may wait for the client until the handler has returned, which ends the stream.
	go func() { received <- st.receive(ctx) }()
	var asker sync.WaitGroup
	asker.Go(func() { st.askSequencer(ctx) })
	err := st.send(ctx, received)
	cancel()
	asker.Wait()
	if errors.Is(err, context.Canceled) {
		return rpctypes.ErrGRPCWatchCanceled
	}
	return err
}

// now is ready at all times.
var now = func() chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}()

// turnsOfEvents is how many times events may be sent before all else has its turn, and
// before a stream gives way to what else the node does: a put to a prefix with a thousand
// watchers makes a thousand messages, which the next put need not wait for. What comes
// meanwhile leaves in the same messages.
const turnsOfEvents = 16

// send sends answers, events and progress, until the stream ends.
func (st *watchStream) send(ctx context.Context, received <-chan error) error {
	tick := st.s.opts.Clock.NewTimer(st.s.progressInterval())
	defer tick.Stop()
	defer st.endWait()
	for turn := 0; ; {
		// What was asked for first is answered first.
		if turn == 0 {
			if err := st.answers(false); err != nil {
				return err
			}
		}
		d, ok, err := st.hub.TryNext()
		if err != nil {
			return rpctypes.ErrGRPCStopped
		}
		wake := st.hub.Ready()
		if ok {
			if err := st.deliver(d); err != nil {
				return err
			}
			if turn++; turn < turnsOfEvents {
				continue
			}
			runtime.Gosched()
			wake = now // there may be more; all else has its turn still
		}
		control, overdue := st.control, (<-chan time.Time)(nil)
		if st.next != nil {
			control, overdue = nil, st.overdue.C()
			if turn > 0 {
				wake = now // what it waited for may be what was just sent
			}
		}
		turn = 0
		select {
		case c := <-control:
			st.next = &c
		case <-overdue:
			if err := st.answers(true); err != nil {
				return err
			}
		case <-wake:
		case <-tick.C():
			if err := st.notify(); err != nil {
				return err
			}
			tick.Reset(st.s.progressInterval())
		case err := <-received:
			if err != nil {
				return err
			}
			received = nil // the client says no more, and still listens
		case <-st.s.ending:
			return rpctypes.ErrGRPCStopped
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// progressInterval is the time between two looks for watchers that are due progress,
// with some jitter, so that streams which began together do not stay together.
func (s *Server) progressInterval() time.Duration {
	d := s.opts.WatchProgressInterval
	if tenth := int64(d / 10); tenth > 0 {
		d += time.Duration(int64(s.opts.Clock.Now()) % tenth)
	}
	return d
}

// answers sends the answers that are there, in order. An answer under the header of a
// revision goes behind the events up to there of all watchers that the client has, as
// progress does: where a put was answered and a watcher is refused then, the put's event
// comes first, like in etcd. giveUp says that the next one has waited for long enough.
func (st *watchStream) answers(giveUp bool) error {
	for {
		if st.next == nil {
			select {
			case c := <-st.control:
				st.next = &c
			default:
				return nil
			}
		}
		rev := keyspace.Revision(st.next.resp.GetHeader().GetRevision())
		if !st.hub.Settled(rev, maps.Keys(st.announced), giveUp) {
			if st.overdue == nil {
				st.overdue = st.s.opts.Clock.NewTimer(settleWithin)
			}
			return nil
		}
		c := *st.next
		st.endWait()
		giveUp = false
		if err := st.answer(c); err != nil {
			return err
		}
	}
}

// endWait ends the wait of the next answer.
func (st *watchStream) endWait() {
	st.next = nil
	if st.overdue != nil {
		st.overdue.Stop()
		st.overdue = nil
	}
}

// answer sends the answer to a request.
func (st *watchStream) answer(c control) error {
	timer := clock.StartStopwatch()
	if err := st.sendResponse(c.resp); err != nil {
		return err
	}
	if c.end != nil {
		delete(st.announced, c.end.w)
	}
	if c.created != nil {
		st.announced[c.created.w] = c.created
		c.created.w.Told()
	}
	st.s.metrics.WatchControlSeconds.Observe(timer.Elapsed().Seconds())
	return nil
}

// deliver sends what a watcher is told, whose creation was told before.
func (st *watchStream) deliver(d watch.Delivery) error {
	if d.Watcher == nil {
		return st.sendResponse(&pb.WatchResponse{Header: st.header(d.Revision), WatchId: invalidWatchID})
	}
	w := st.announced[d.Watcher]
	if d.Compacted != 0 {
		delete(st.announced, d.Watcher)
		return st.sendResponse(&pb.WatchResponse{
			Header: st.header(0), WatchId: w.id, Canceled: true, CompactRevision: int64(d.Compacted),
		})
	}
	if d.TooLarge != 0 {
		delete(st.announced, d.Watcher)
		return st.sendResponse(&pb.WatchResponse{
			Header: st.header(0), WatchId: w.id, Canceled: true, CancelReason: fmt.Sprintf(reasonTooLarge, d.TooLarge),
		})
	}
	timer := clock.StartStopwatch()
	w.quiet = false
	if err := st.sendEvents(w, &d); err != nil {
		return err
	}
	took := timer.Elapsed().Seconds()
	st.s.metrics.WatchSendSeconds.Observe(took)
	st.s.metrics.WatchEventSeconds.Observe(took / float64(max(len(d.Events), 1)))
	return nil
}

// sendEvents sends a watcher its events.
func (st *watchStream) sendEvents(w *watcher, d *watch.Delivery) error {
	if w.fragment {
		return st.sendFragments(&pb.WatchResponse{Header: st.header(d.Revision), WatchId: w.id, Events: d.Events})
	}
	var ok bool
	if st.shared.events, ok = d.AppendEncoded(st.shared.events[:0]); !ok {
		return st.sendResponse(&pb.WatchResponse{Header: st.header(d.Revision), WatchId: w.id, Events: d.Events})
	}
	if term := st.s.opts.Node.Term(); d.Revision != st.headRevision || term != st.headTerm || st.shared.head == nil {
		head, err := appendWatchHeader(nil, st.header(d.Revision))
		if err != nil {
			return err
		}
		st.shared.head, st.headRevision, st.headTerm = head, d.Revision, term
	}
	st.shared.id = w.id
	err := st.grpc.SendMsg(&st.shared)
	clear(st.shared.events) // gRPC has its own hold of them: a stream that is at rest keeps none
	return st.sent(err)
}

// sendFragments sends a response in pieces that stay below the bound of a message, or
// hold one event that does not.
func (st *watchStream) sendFragments(resp *pb.WatchResponse) error {
	limit := st.s.opts.MaxRequestBytes + grpcOverheadBytes
	if proto.Size(resp) < limit || len(resp.Events) < 2 {
		return st.sendResponse(resp)
	}
	empty := proto.Size(&pb.WatchResponse{Header: resp.Header, WatchId: resp.WatchId, Fragment: true})
	for events := resp.Events; len(events) > 0; {
		n := fitting(events, empty, limit)
		piece := &pb.WatchResponse{Header: resp.Header, WatchId: resp.WatchId, Events: events[:n:n], Fragment: n < len(events)}
		if err := st.sendResponse(piece); err != nil {
			return err
		}
		events = events[n:]
	}
	return nil
}

// fitting returns how many of the events fit into a message, one at least.
func fitting(events []*mvccpb.Event, size, limit int) int {
	for i, e := range events {
		body := proto.Size(e)
		size += 1 + varintBytes(body) + body
		if i > 0 && size >= limit {
			return i
		}
	}
	return len(events)
}

func varintBytes(n int) int {
	b := 1
	for ; n >= 1<<7; n >>= 7 {
		b++
	}
	return b
}

// notify tells the watchers that want it, and were told nothing since the last tick, how
// far they are.
func (st *watchStream) notify() error {
	timer := clock.StartStopwatch()
	for hw, w := range st.announced {
		if !w.progress {
			continue
		}
		quiet := w.quiet
		w.quiet = true
		if !quiet {
			continue
		}
		if rev, ok := hw.Progress(); ok {
			if err := st.sendResponse(&pb.WatchResponse{Header: st.header(rev), WatchId: w.id}); err != nil {
				return err
			}
		}
	}
	st.s.metrics.WatchProgressSeconds.Observe(timer.Elapsed().Seconds())
	return nil
}

func (st *watchStream) sendResponse(resp *pb.WatchResponse) error {
	return st.sent(st.grpc.Send(resp))
}

// sent counts what could not be sent.
func (st *watchStream) sent(err error) error {
	if err != nil && st.grpc.Context().Err() == nil {
		st.s.metrics.StreamFailures.WithLabelValues("send", "watch").Inc()
	}
	return err
}

// header is a response's header; 0 is what etcd has where it cancels for compaction.
func (st *watchStream) header(rev keyspace.Revision) *pb.ResponseHeader {
	h := &pb.ResponseHeader{Revision: int64(rev)}
	st.s.fill(h)
	return h
}

// receive takes requests until the client sends no more, which is no error, or the
// stream ends.
func (st *watchStream) receive(ctx context.Context) error {
	for {
		req, err := st.grpc.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		var c control
		switch r := req.GetRequestUnion().(type) {
		case *pb.WatchRequest_CreateRequest:
			c, err = st.create(ctx, r.CreateRequest)
		case *pb.WatchRequest_CancelRequest:
			c = st.cancel(r.CancelRequest)
		case *pb.WatchRequest_ProgressRequest:
			if !st.watching() {
				continue // like in etcd: a watcher that is made behind it does not answer it
			}
			select {
			case st.ask <- struct{}{}:
			default: // the one that waits will be asked for later than this one
			}
		}
		if err != nil {
			return kverror.GRPC(err)
		}
		if c.resp == nil {
			continue // etcd does not answer what it does not understand
		}
		select {
		case st.asked <- c:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// askSequencer asks for what is current where a header says so, and how far the stream is,
// until it ends. No request waits for that.
func (st *watchStream) askSequencer(ctx context.Context) {
	within := headerWithin
	for {
		select {
		case <-st.ask:
			st.askProgress(ctx)
		case c := <-st.asked:
			if c.resp.Header == nil {
				rev, known := st.current(ctx, within)
				if c.resp.Header, within = st.header(rev), headerWithin; !known {
					within = headerAgain
				}
			}
			select {
			case st.control <- c:
			case <-ctx.Done():
				return
			}
		case <-ctx.Done():
			return
		}
	}
}

// askProgress asks how far the stream is; where no sequencer answers, the client asks again.
func (st *watchStream) askProgress(ctx context.Context) {
	ctx, cancel := clock.WithTimeout(ctx, st.s.opts.Clock, createWithin)
	defer cancel()
	if err := st.hub.RequestProgress(ctx); err != nil {
		st.s.log.Debug("ask for a stream's progress", zap.Error(err))
	}
}

// begin begins a watcher, again while no sequencer answers: it would be a failure that
// etcd's clients do not know.
func (st *watchStream) begin(ctx context.Context, id int64, req watch.Request) (w *watch.Watcher, current keyspace.Revision, err error) {
	wctx, cancel := clock.WithTimeout(ctx, st.s.opts.Clock, createWithin)
	defer cancel()
	for {
		w, current, err = st.hub.Watch(wctx, id, req)
		if err == nil || errors.Is(err, watch.ErrStopped) || clock.Sleep(wctx, st.s.opts.Clock, retryPause) != nil {
			return w, current, err
		}
	}
}

// current is the revision of an answer's header: the last known one, and ok is false, where
// no sequencer answers soon.
func (st *watchStream) current(ctx context.Context, within time.Duration) (rev keyspace.Revision, ok bool) {
	ctx, cancel := clock.WithTimeout(ctx, st.s.opts.Clock, within)
	defer cancel()
	rev, err := st.hub.Current(ctx)
	if err != nil {
		rev = st.hub.Known()
	}
	return rev, err == nil
}

// create makes a watcher, or says why not.
func (st *watchStream) create(ctx context.Context, r *pb.WatchCreateRequest) (control, error) {
	if r == nil {
		return control{}, nil
	}
	key := r.GetKey()
	if len(key) == 0 {
		key = []byte{0} // the smallest key
	}
	if r.GetStartRevision() < 0 {
		return st.refuse(rpctypes.ErrCompacted.Error()), nil
	}
	span, ok := keyspace.FromEtcd(key, r.GetRangeEnd())
	if !ok {
		return st.refuse(reasonEmptyRange), nil
	}
	w := &watcher{id: r.GetWatchId(), fragment: r.GetFragment(), progress: r.GetProgressNotify(), quiet: true}
	if !st.claimID(w) {
		return st.refuse(reasonDuplicateID), nil
	}
	req := watch.Request{
		Span: span, Start: min(keyspace.Revision(r.GetStartRevision()), keyspace.MaxRevision), Prev: r.GetPrevKv(), Hold: true,
	}
	for _, f := range r.GetFilters() {
		req.NoPut = req.NoPut || f == pb.WatchCreateRequest_NOPUT
		req.NoDelete = req.NoDelete || f == pb.WatchCreateRequest_NODELETE
	}
	hw, current, err := st.begin(ctx, w.id, req)
	switch {
	case errors.Is(err, watch.ErrStopped) || ctx.Err() != nil:
		return control{}, err
	case err != nil:
		st.forget(w.id)
		return st.refuse(rpctypes.ErrorDesc(kverror.GRPC(err))), nil
	}
	w.w = hw
	resp := &pb.WatchResponse{Header: st.header(current), WatchId: w.id, Created: true}
	return control{resp: resp, created: w}, nil
}

// claimID gives the watcher its id, which is the client's or, if it has none, the next
// that is free.
func (st *watchStream) claimID(w *watcher) bool {
	st.mu.Lock()
	defer st.mu.Unlock()
	if w.id == autoWatchID {
		for st.ids[st.nextID] != nil {
			st.nextID++
		}
		w.id = st.nextID
		st.nextID++
	} else if st.ids[w.id] != nil {
		return false
	}
	st.ids[w.id] = w
	return true
}

// watching says whether the stream has watchers at this point of its requests.
func (st *watchStream) watching() bool {
	st.mu.Lock()
	defer st.mu.Unlock()
	return len(st.ids) > 0
}

// refuse answers the request for a watcher that is not made.
func (st *watchStream) refuse(reason string) control {
	return control{resp: &pb.WatchResponse{
		WatchId: invalidWatchID, Created: true, Canceled: true, CancelReason: reason,
	}}
}

// forget gives a watcher's id free, and returns whose it was.
func (st *watchStream) forget(id int64) *watcher {
	st.mu.Lock()
	defer st.mu.Unlock()
	w := st.ids[id]
	delete(st.ids, id)
	return w
}

// cancel ends a watcher; one that there is not gets no answer.
func (st *watchStream) cancel(r *pb.WatchCancelRequest) control {
	if r == nil {
		return control{}
	}
	w := st.forget(r.GetWatchId())
	if w == nil {
		return control{}
	}
	st.hub.Cancel(w.w)
	return control{resp: &pb.WatchResponse{WatchId: w.id, Canceled: true}, end: w}
}
