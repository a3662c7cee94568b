package transport

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync/atomic"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/keyspace"
)

// pendingCall is a call that waits for its answer.
type pendingCall struct {
	lane *Lane
	// pos is where the call's frame begins in its lane, and the highest number until it
	// is queued. enqueue writes it under the lane's lock; it is read after the lane is
	// closed.
	pos  uint64
	done chan callResult // capacity 1; gets exactly one value
}

// Call asks the handler of a node and waits for its answer until ctx ends; then the
// handler's context ends too. The error is a *RemoteError if it came from the handler,
// else a *CallError, which says whether the handler certainly never ran. The payload
// belongs to the bus, the answer to the caller.
func (e *Endpoint) Call(ctx context.Context, to keyspace.NodeID, m Method, payload []byte) ([]byte, error) {
	refused := func(err error) error {
		return &CallError{Peer: to, Method: m, NotDelivered: true, Err: err}
	}
	c, ok := e.classOf(m)
	if !ok {
		return nil, refused(ErrNoMethod)
	}
	timeout, err := timeLeft(ctx)
	if err != nil {
		return nil, refused(err)
	}
	var r callResult
	if to == e.cfg.Node {
		r = e.loop.call(ctx, m, c, payload)
	} else {
		s, err := e.route(to, c, len(payload))
		switch {
		case err == nil:
			r = s.call(ctx, c, payload, func(id uint64) header { return callFrame(id, m, timeout) })
		case errors.Is(err, ErrNoRoute):
			r = e.callAround(ctx, to, m, c, timeout, payload)
		default:
			return nil, refused(err)
		}
	}
	if r.err == nil {
		return r.payload, nil
	}
	if re, ok := r.err.(*RemoteError); ok { //nolint:errorlint // the bus made it, unwrapped
		return nil, re
	}
	return nil, &CallError{Peer: to, Method: m, NotDelivered: r.notDelivered, Err: r.err}
}

// callAround calls a node without a session by way of one that reaches it. A node may have
// lost its session since it said so: then it refuses, and the next one is asked.
func (e *Endpoint) callAround(ctx context.Context, to keyspace.NodeID, m Method, c Class, timeout time.Duration, payload []byte) callResult {
	r := callResult{err: ErrNoRoute, notDelivered: true}
	for _, s := range e.around(to, c, len(payload)) {
		r = s.call(ctx, c, payload, func(id uint64) header { return passCallFrame(framePassCall, id, m, timeout, to) })
		if !r.notDelivered || !errors.Is(r.err, ErrNoRoute) && !errors.Is(r.err, ErrClosed) {
			break
		}
	}
	return r
}

// timeLeft returns the time to the context's deadline, 0 if it has none. Context
// deadlines use package time's clock, so it compares with that clock.
func timeLeft(ctx context.Context) (time.Duration, error) {
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	deadline, ok := ctx.Deadline()
	if !ok {
		return 0, nil
	}
	left := time.Until(deadline) //nolint:forbidigo // see above: not the node's clock
	if left <= 0 {
		return 0, context.DeadlineExceeded
	}
	return max(left, time.Microsecond), nil
}

func (s *Session) call(ctx context.Context, c Class, payload []byte, frame func(id uint64) header) callResult {
	id := s.ep.nextID.Add(1)
	pc := s.ep.newPending(s.laneForCall(c, id, len(payload)))
	s.mu.Lock()
	switch {
	case s.ended:
		s.mu.Unlock()
		return callResult{err: ErrNoRoute, notDelivered: true}
	case len(s.calls) >= s.ep.cfg.MaxCalls:
		s.mu.Unlock()
		return callResult{err: ErrQueueFull, notDelivered: true}
	}
	s.calls[id] = pc
	s.mu.Unlock()
	h := frame(id)
	if err := pc.lane.enqueue(&h, payload, false, &pc.pos); err != nil {
		s.forgetCall(id)
		return callResult{err: err, notDelivered: true}
	}
	r, err := clock.Await(ctx, pc.done)
	if err == nil || !s.forgetCall(id) {
		if err != nil {
			r = <-pc.done
		}
		s.ep.pendings.Put(pc)
		return r
	}
	h = cancelFrame(id)
	s.force(pc.lane, &h, nil)
	return callResult{err: err}
}

// newPending returns a pending call with an empty channel. It may reuse one whose
// result was received: nobody else refers to that any more.
func (e *Endpoint) newPending(l *Lane) *pendingCall {
	pc, ok := e.pendings.Get().(*pendingCall)
	if !ok {
		pc = &pendingCall{done: make(chan callResult, 1)}
	}
	pc.lane, pc.pos = l, math.MaxUint64
	return pc
}

// forgetCall says whether the call was still waiting.
func (s *Session) forgetCall(id uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, ok := s.calls[id]
	delete(s.calls, id)
	return ok
}

func (s *Session) receiveReply(f *frame) error {
	r, err := resultOf(f.status, f.payload)
	if err != nil {
		return err
	}
	s.mu.Lock()
	pc := s.calls[f.id]
	delete(s.calls, f.id)
	s.mu.Unlock()
	if pc != nil {
		pc.done <- r
	}
	return nil
}

// serveCall starts the handler of a call, or passes the call on, or refuses it. Calls that
// are passed on count as the caller's here and in the end, so that a relay's other calls
// have room beside them.
func (s *Session) serveCall(c Class, f *frame) error {
	e := s.ep
	from := s.peer
	if f.kind == framePassedCall {
		if from = e.peer(f.node); from == nil {
			s.refuse(c, f.id, statusNoRoute)
			return nil
		}
	}
	entry, ok := e.calls[f.method]
	if !ok {
		s.refuse(c, f.id, statusNoMethod)
		return nil
	}
	if entry.class != c {
		return fmt.Errorf("%w: %s by class %s", errProtocol, f.method, c)
	}
	run := running{&from.handlers[entry.index], &from.held, len(f.payload) + handlerBytes}
	if !run.begin(e.cfg.MaxHandlers) {
		e.metrics.class[c].busy.Inc()
		s.refuse(c, f.id, statusBusy)
		return nil
	}
	ctx := e.timers.Endable(f.timeout)
	id, payload := f.id, f.payload
	serve := func() (status, []byte) { return s.handleCall(ctx, from.id, entry, payload) }
	if f.kind == framePassCall {
		to, m, timeout := f.node, f.method, f.timeout
		serve = func() (status, []byte) { return s.passCall(ctx, to, m, c, timeout, payload) }
	}
	err := s.registerCall(id, ctx)
	if err == nil && !e.Go(func() { s.runCall(c, id, run, serve) }) {
		s.refuse(c, id, statusClosing)
		err = ErrClosed
	}
	if err != nil {
		ctx.End()
		run.handlers.Add(-1)
		run.held.release(run.bytes)
	}
	return err
}

// running is a handler of a call as its peer's bounds count it.
type running struct {
	handlers *atomic.Int32
	held     *budget
	bytes    int
}

// begin says whether there is room for it.
func (r *running) begin(most int) bool {
	if int(r.handlers.Add(1)) <= most && r.held.take(r.bytes, false) {
		return true
	}
	r.handlers.Add(-1)
	return false
}

// registerCall records a running handler's context, which the end of the session or a
// cancellation from the caller ends.
func (s *Session) registerCall(id uint64, ctx *clock.LazyDeadline) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		return ErrClosed
	}
	if _, ok := s.serving[id]; ok {
		return fmt.Errorf("%w: call %d twice", errProtocol, id)
	}
	s.serving[id] = ctx
	return nil
}

// runCall runs a handler, or passes a call on, and sends the answer. While the answer waits
// for room it counts as running, so the number of unread answers is bounded.
func (s *Session) runCall(c Class, id uint64, run running, serve func() (status, []byte)) {
	gauge := s.ep.metrics.class[c].handlers
	gauge.Inc()
	defer gauge.Dec()
	defer run.handlers.Add(-1)
	st, answer := serve()
	run.held.release(run.bytes) // its bytes are not those that the answer may have to wait for
	if !s.cancelCall(id) {
		return // the caller has given up, or the session ended
	}
	h := replyFrame(id, st)
	// This fails only if the session ends, which fails the call at the other side too.
	_ = s.laneForCall(c, id, len(answer)).enqueueWait(s.ctx, &h, answer)
}

// handleCall runs a handler.
func (s *Session) handleCall(ctx context.Context, from keyspace.NodeID, entry callEntry, payload []byte) (status, []byte) {
	answer, err := entry.fn(ctx, from, payload)
	switch {
	case expired(ctx, err):
		return statusExpired, nil
	case err != nil:
		return statusError, errorBody(err)
	case len(answer) > s.maxMessage:
		return statusTooLarge, nil
	}
	return statusOK, answer
}

// passCall passes a call on to a node with which a session stands, and to no other relay.
func (s *Session) passCall(ctx context.Context, to keyspace.NodeID, m Method, c Class, timeout time.Duration, payload []byte) (status, []byte) {
	next, err := s.ep.route(to, c, len(payload))
	if err != nil && mutation.Is(mutation.RelayRelays) {
		return statusOf(s.ep.callAround(ctx, to, m, c, timeout, payload))
	}
	if err != nil {
		return statusOf(callResult{err: err, notDelivered: true})
	}
	s.ep.metrics.passed.Inc()
	from := s.cfg.Peer
	return statusOf(next.call(ctx, c, payload, func(id uint64) header { return passCallFrame(framePassedCall, id, m, timeout, from) }))
}

// cancelCall ends the context of a running handler. It says whether it was known.
func (s *Session) cancelCall(id uint64) bool {
	s.mu.Lock()
	ctx := s.serving[id]
	delete(s.serving, id)
	s.mu.Unlock()
	if ctx == nil {
		return false
	}
	ctx.End()
	return true
}

// refuse answers a call that did not run.
func (s *Session) refuse(c Class, id uint64, st status) {
	h := replyFrame(id, st)
	s.force(s.laneForCall(c, id, 0), &h, nil)
}
