package etcdapi

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"go.uber.org/zap"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/auth"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/wake"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/watch"
)

// etcd's texts for watchers that it does not create. clientv3 gives them to its callers; etcd's API
// has no error values for them.
const (
	reasonTooLarge    = "skein: revision %d is too large for one watch response"
	reasonTooMany     = "skein: this node has no memory for another watcher: watch at another node, end watchers, watch prefixes in place of keys, or raise --memory-budget-bytes"
	reasonEmptyRange  = "mvcc: watcher range is empty"
	reasonDuplicateID = "mvcc: duplicate watch ID provided on the WatchStream"
)

const (
	// autoWatchID has the server choose an id. invalidWatchID is the id of a watcher that was not
	// created, and of progress for all watchers of a stream.
	autoWatchID    = 0
	invalidWatchID = -1
	// controlQueue bounds the answers that wait for their header, and those that wait for the
	// sender. Beyond it the stream's requests wait.
	controlQueue = 16
	// createWithin is for how long creating a watcher is tried while no sequencer answers.
	// headerWithin is for how long an answer waits for the revision of its header.
	createWithin = 5 * time.Second
	// After one timeout the next answers wait for headerAgain only, until the sequencer answers.
	headerWithin = 5 * time.Second
	headerAgain  = 100 * time.Millisecond
	retryPause   = 20 * time.Millisecond
	// holdPause is how often a stream looks whether its events may be told.
	holdPause = 20 * time.Millisecond
	// settleWithin is for how long an answer waits for the events that belong before it. If a range
	// has no leader for longer, its watchers get events later, and the stream's other watchers do
	// not wait.
	settleWithin = 5 * time.Second
)

// watchServer is etcd's Watch service.
type watchServer struct {
	s *Server
	// local says that its clients are in this process: they take messages, and no encoded ones.
	local bool
	pb.UnsafeWatchServer
}

// watchStream is one stream. One goroutine takes requests, one asks the sequencer for what their
// answers need, and the handler's own sends.
type watchStream struct {
	s     *Server
	grpc  pb.Watch_WatchServer
	local bool // see watchServer
	hub   *watch.Stream
	// end ends the stream with an error.
	end context.CancelCauseFunc
	// asked are answers in the order of their requests, and control those that may be sent.
	asked, control chan control
	// ask has a value when the client wants progress.
	ask wake.Signal

	mu sync.Mutex
	// Guarded by mu. ids are the watchers by their ids. As in etcd, one that was cancelled for
	// compaction keeps its id until its client cancels it too. nextID is the server's next choice.
	ids    map[int64]*watcher
	nextID int64
	// ended are the watchers whose clients may not have their events any more, and are to be told so.
	ended []*watcher
	// revoked has a value when there are some.
	revoked wake.Signal

	// announced are the watchers whose creation the client was told. Only the sender uses them.
	announced map[*watch.Watcher]*watcher

	// shared is the response being sent, if its events were encoded for many. Its head has headRevision and headTerm: all
	// watchers of the stream share one header at a time.
	// Only the sender uses them.
	shared       sharedResponse
	headRevision keyspace.Revision
	headTerm     uint64

	// next is the next answer. It is sent behind the events that belong before it, or at overdue,
	// which is set if it has to wait. Only the sender uses them.
	next    *control
	overdue clock.Timer
}

// watcher is a watcher of the stream.
type watcher struct {
	id       int64
	began    clock.Time
	w        *watch.Watcher
	fragment bool
	// req is the client's request, and caller is its sender. Guarded by the stream's mu.
	req    *pb.WatchCreateRequest
	caller *auth.Caller
	// denied says that the caller may not have the events any more: the sender drops them.
	denied atomic.Bool
	// progress says that the client wants progress, and quiet that nothing was sent since the last
	// tick. Only the sender uses quiet.
	progress, quiet bool
}

// control is an answer to a request, with the watcher that it creates or ends. Without a header it
// gets that of the current revision.
type control struct {
	resp         *pb.WatchResponse
	created, end *watcher
}

// Watch serves a stream of watchers.
func (ws *watchServer) Watch(g pb.Watch_WatchServer) error {
	st := &watchStream{
		s: ws.s, grpc: g, local: ws.local, hub: ws.s.opts.Watches.NewStream(), ask: wake.New(),
		asked: make(chan control, controlQueue), control: make(chan control, controlQueue), revoked: wake.New(),
		ids: make(map[int64]*watcher), announced: make(map[*watch.Watcher]*watcher),
	}
	defer st.hub.Close()
	ctx, cancel := context.WithCancelCause(g.Context())
	defer cancel(nil)
	st.end = cancel
	ws.s.watchers.add(st)
	defer ws.s.watchers.remove(st)
	// From here on LoadBegun ends the stream. It may have passed by before.
	if err := ws.s.whileLoading(ctx, pb.Watch_Watch_FullMethodName, nil); err != nil {
		return err
	}
	received := make(chan error, 1)
	// It may wait for the client until the handler returns, which ends the stream.
	go func() { received <- st.receive(ctx) }()
	var asker sync.WaitGroup
	asker.Go(func() { st.askSequencer(ctx) })
	err := st.send(ctx, received)
	cancel(nil)
	asker.Wait()
	if loads := (loadBegun{}); errors.As(context.Cause(ctx), &loads) {
		return kverror.GRPC(loads.why)
	}
	if errors.Is(err, context.Canceled) {
		return rpctypes.ErrGRPCWatchCanceled
	}
	return err
}

// now is always ready.
var now = func() chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}()

// turnsOfEvents is how many times events are sent before everything else has its turn, and before
// the stream yields the processor. A put to a prefix with a thousand watchers makes a thousand
// messages, and the next put must not wait for them. Events that come meanwhile leave in the same
// messages.
const turnsOfEvents = 16

// send sends answers, events and progress until the stream ends.
func (st *watchStream) send(ctx context.Context, received <-chan error) error {
	tick := st.s.opts.Clock.NewTimer(st.s.progressInterval())
	defer tick.Stop()
	defer st.endWait()
	for turn := 0; ; {
		// Answers are sent in the order of their requests.
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
			if err := st.awaitRights(ctx); err != nil {
				return err
			}
			if err := st.deliver(d); err != nil {
				return err
			}
			if turn++; turn < turnsOfEvents {
				continue
			}
			runtime.Gosched()
			wake = now // there may be more; everything else still has its turn
		}
		control, overdue := st.control, (<-chan time.Time)(nil)
		if st.next != nil {
			control, overdue = nil, st.overdue.C()
			if turn > 0 {
				wake = now // it may have waited for the message just sent
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
		case <-st.revoked:
			if err := st.endRevoked(); err != nil {
				return err
			}
		case <-tick.C():
			if err := st.notify(); err != nil {
				return err
			}
			tick.Reset(st.s.progressInterval())
		case err := <-received:
			if err != nil {
				return err
			}
			received = nil // the client sends no more, and still receives
		case <-st.s.ending:
			return rpctypes.ErrGRPCStopped
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// endRevoked tells the client which watchers were ended.
func (st *watchStream) endRevoked() error {
	st.mu.Lock()
	ended := st.ended
	st.ended = nil
	st.mu.Unlock()
	for _, w := range ended {
		if _, told := st.announced[w.w]; !told {
			// Its creation waits to be told: answer comes back to it.
			st.mu.Lock()
			st.ended = append(st.ended, w)
			st.mu.Unlock()
			continue
		}
		delete(st.announced, w.w)
		st.forget(w.id)
		err := st.sendResponse(&pb.WatchResponse{
			Header: st.header(0), WatchId: w.id, Canceled: true, CancelReason: rpctypes.ErrGRPCPermissionDenied.Error(),
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// progressInterval is the time between two looks for watchers that are due progress. It has some
// jitter, so that streams that began together drift apart.
func (s *Server) progressInterval() time.Duration {
	d := s.opts.WatchProgressInterval
	if tenth := int64(d / 10); tenth > 0 {
		d += time.Duration(int64(s.opts.Clock.Now()) % tenth)
	}
	return d
}

// answers sends the available answers in order. An answer with a revision in its header follows the
// events of all announced watchers up to that revision, as progress does. If a put was answered and
// a watcher is refused then, the put's event comes first, as in etcd. giveUp says that the next
// answer has waited for long enough.
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
		c.created.w.Announced()
		if c.created.denied.Load() {
			st.revoked.Set()
		}
	}
	st.s.metrics.WatchControlSeconds.Observe(timer.Elapsed().Seconds())
	return nil
}

// deliver sends a delivery to a watcher that was announced.
func (st *watchStream) deliver(d watch.Delivery) error {
	if d.Watcher == nil {
		return st.sendResponse(&pb.WatchResponse{Header: st.header(d.Revision), WatchId: invalidWatchID})
	}
	w := st.announced[d.Watcher]
	if w == nil || w.denied.Load() {
		return nil // the hub had it before the watcher was ended
	}
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
	ok := !st.local
	if ok {
		st.shared.events, ok = d.AppendEncoded(st.shared.events[:0])
	}
	if !ok {
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
	clear(st.shared.events) // gRPC has its own references; an idle stream keeps none
	return st.sent(err)
}

// sendFragments sends a response in fragments below the bound of a message, or of one larger event.
func (st *watchStream) sendFragments(resp *pb.WatchResponse) error {
	limit := st.s.opts.MaxRequestBytes + grpcOverheadBytes
	if proto.Size(resp) < limit || len(resp.Events) < 2 {
		return st.sendResponse(resp)
	}
	empty := proto.Size(&pb.WatchResponse{Header: resp.Header, WatchId: resp.WatchId, Fragment: true})
	for events := resp.Events; len(events) > 0; {
		n := fitting(events, empty, limit)
		fragment := &pb.WatchResponse{Header: resp.Header, WatchId: resp.WatchId, Events: events[:n:n], Fragment: n < len(events)}
		if err := st.sendResponse(fragment); err != nil {
			return err
		}
		events = events[n:]
	}
	return nil
}

// fitting returns how many of the events fit into a message, at least one.
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

// notify sends progress to the watchers that want it and got nothing since the last tick.
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

// sent counts a response that could not be sent.
func (st *watchStream) sent(err error) error {
	if err != nil && st.grpc.Context().Err() == nil {
		st.s.metrics.StreamFailures.WithLabelValues("send", "watch").Inc()
	}
	return err
}

// header returns a response's header. etcd has revision 0 there when it cancels for compaction.
func (st *watchStream) header(rev keyspace.Revision) *pb.ResponseHeader {
	h := &pb.ResponseHeader{Revision: int64(rev)}
	st.s.fill(h)
	return h
}

// receive takes requests until the client sends no more, which is no error, or the stream ends.
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
				continue // as in etcd: a watcher created behind it does not answer it
			}
			st.ask.Set() // a request that waits will be asked later than this one came
		}
		if err != nil {
			return kverror.GRPC(err)
		}
		if c.resp == nil {
			continue // etcd does not answer unknown requests
		}
		select {
		case st.asked <- c:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// askSequencer gets the current revision for headers and for progress until the stream ends. No
// request waits for it.
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

// askProgress requests the stream's progress. If no sequencer answers, the client asks again.
func (st *watchStream) askProgress(ctx context.Context) {
	ctx, cancel := clock.WithTimeout(ctx, st.s.opts.Clock, createWithin)
	defer cancel()
	if err := st.hub.RequestProgress(ctx); err != nil {
		st.s.log.Debug("ask for a stream's progress", zap.Error(err))
	}
}

// begin begins a watcher. It tries again while no sequencer answers, because etcd's clients do not
// know such a failure.
func (st *watchStream) begin(ctx context.Context, id int64, req watch.Request) (w *watch.Watcher, current keyspace.Revision, err error) {
	wctx, cancel := clock.WithTimeout(ctx, st.s.opts.Clock, createWithin)
	defer cancel()
	for {
		w, current, err = st.hub.Watch(wctx, id, req)
		if err == nil || errors.Is(err, watch.ErrStopped) || errors.Is(err, watch.ErrTooMany) || kverror.IsAccessChanged(err) || clock.Sleep(wctx, st.s.opts.Clock, retryPause) != nil {
			return w, current, err
		}
	}
}

// current returns the revision for an answer's header. If no sequencer answers soon, that is the
// last known one, and ok is false.
func (st *watchStream) current(ctx context.Context, within time.Duration) (rev keyspace.Revision, ok bool) {
	ctx, cancel := clock.WithTimeout(ctx, st.s.opts.Clock, within)
	defer cancel()
	rev, err := st.hub.Current(ctx)
	if err != nil {
		rev = st.hub.Known()
	}
	return rev, err == nil
}

// create creates a watcher, or says why not.
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
	if _, _, err := st.s.permitted(ctx, r); err != nil {
		st.s.auditDenial(ctx, watchMethod, err)
		return st.refuse(reasonDenied(err)), nil
	}
	span, ok := keyspace.FromEtcd(key, r.GetRangeEnd())
	if !ok {
		return st.refuse(reasonEmptyRange), nil
	}
	w := &watcher{id: r.GetWatchId(), began: st.s.opts.Clock.Now(), req: r, fragment: r.GetFragment(), progress: r.GetProgressNotify(), quiet: true}
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
	var hw *watch.Watcher
	var current keyspace.Revision
	var denied error
	err := st.s.again(ctx, func(ctx context.Context) (err error) {
		if ctx, denied = st.permit(ctx, w); denied == nil {
			hw, current, err = st.begin(ctx, w.id, req)
		}
		return err
	})
	switch {
	case denied != nil:
		st.forget(w.id)
		return st.refuse(reasonDenied(denied)), nil
	case errors.Is(err, watch.ErrStopped) || ctx.Err() != nil:
		return control{}, err
	case errors.Is(err, watch.ErrTooMany):
		st.forget(w.id)
		return st.refuse(reasonTooMany), nil
	case err != nil:
		st.forget(w.id)
		return st.refuse(rpctypes.ErrorDesc(kverror.GRPC(err))), nil
	}
	if !st.began(w, hw) {
		st.hub.Cancel(hw)
		st.forget(w.id)
		return st.refuse(reasonDenied(kverror.GRPC(kverror.PermissionDenied))), nil
	}
	resp := &pb.WatchResponse{Header: st.header(current), WatchId: w.id, Created: true}
	return control{resp: resp, created: w}, nil
}

// began notes the hub's watcher. It is false where the watcher was ended meanwhile.
func (st *watchStream) began(w *watcher, hw *watch.Watcher) bool {
	st.mu.Lock()
	defer st.mu.Unlock()
	w.w = hw
	return !w.denied.Load()
}

// claimID gives the watcher its id: the client's or, without one, the next free one.
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

// refuse answers a request whose watcher is not created.
func (st *watchStream) refuse(reason string) control {
	return control{resp: &pb.WatchResponse{
		WatchId: invalidWatchID, Created: true, Canceled: true, CancelReason: reason,
	}}
}

// forget frees a watcher's id.
func (st *watchStream) forget(id int64) {
	st.mu.Lock()
	defer st.mu.Unlock()
	delete(st.ids, id)
}

// forgetAsked is forget for a client's request, and cancels the watcher: endDenied does not see it any more. A watcher
// whose rights were taken away ends by itself.
func (st *watchStream) forgetAsked(id int64) *watcher {
	st.mu.Lock()
	defer st.mu.Unlock()
	w := st.ids[id]
	if w == nil || w.denied.Load() {
		return nil
	}
	delete(st.ids, id)
	st.hub.Cancel(w.w)
	return w
}

// cancel ends a watcher. An unknown one gets no answer.
func (st *watchStream) cancel(r *pb.WatchCancelRequest) control {
	if r == nil {
		return control{}
	}
	w := st.forgetAsked(r.GetWatchId())
	if w == nil {
		return control{}
	}
	return control{resp: &pb.WatchResponse{WatchId: w.id, Canceled: true}, end: w}
}
