package transport

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/skeindb/skein/keyspace"
)

// sessionOut is the sending direction of a stream over a session. Its lane is fixed,
// which keeps the order.
type sessionOut struct {
	s    *Session
	key  streamKey
	lane *Lane
}

func (o *sessionOut) side() uint8 {
	if o.key.opened {
		return sideOpener
	}
	return sideHandler
}

func (o *sessionOut) data(ctx context.Context, payload []byte) error {
	h := dataFrame(o.key.id, o.side())
	err := o.lane.enqueueWait(ctx, &h, payload)
	if errors.Is(err, ErrNoRoute) {
		return fmt.Errorf("%w: %w", ErrUnreachable, context.Cause(o.s.ctx))
	}
	return err
}

func (o *sessionOut) grant(bytes uint32) {
	h := creditFrame(o.key.id, o.side(), bytes)
	o.s.force(o.lane, &h, nil)
}

func (o *sessionOut) end(err error) {
	o.s.mu.Lock()
	delete(o.s.streams, o.key)
	o.s.mu.Unlock()
	st, body := statusOK, []byte(nil)
	if r, ok := err.(*passedResult); ok { //nolint:errorlint // passStream made it, unwrapped
		st, body = statusOf(r.callResult)
	} else if err != nil {
		st, body = statusError, errorBody(err)
	}
	h := endFrame(o.key.id, o.side(), st)
	o.s.force(o.lane, &h, body)
}

// OpenStream opens a stream to the handler of a node, with a first message. It does not
// wait for the handler: Send and Recv return a refusal, as a *CallError. OpenStream's
// own error is a *CallError too, certainly not delivered. ctx bounds only the opening;
// the caller must Close the stream.
func (e *Endpoint) OpenStream(ctx context.Context, to keyspace.NodeID, m Method, first []byte) (Stream, error) {
	refused := func(err error) error {
		return &CallError{Peer: to, Method: m, NotDelivered: true, Err: err}
	}
	c, ok := e.classOf(m)
	if !ok {
		return nil, refused(ErrNoMethod)
	}
	if err := ctx.Err(); err != nil {
		return nil, refused(err)
	}
	if to == e.cfg.Node {
		st, err := e.loop.open(m, first)
		if err != nil {
			return nil, refused(err)
		}
		return st, nil
	}
	s, err := e.route(to, c, len(first))
	if errors.Is(err, ErrNoRoute) {
		return e.openAround(ctx, to, m, c, first)
	}
	if err != nil {
		return nil, refused(err)
	}
	st, err := s.open(ctx, c, first, func() {}, func(id uint64) header { return openFrame(id, m) })
	if err != nil {
		return nil, refused(err)
	}
	return st, nil
}

// openAround opens a stream to a node without a session by way of one that reaches it.
// When the session with the node itself stands again, the stream ends as if its session
// were lost, and the opener opens the next one directly.
func (e *Endpoint) openAround(ctx context.Context, to keyspace.NodeID, m Method, c Class, first []byte) (Stream, error) {
	refused := func(err error) (Stream, error) {
		return nil, &CallError{Peer: to, Method: m, NotDelivered: true, Err: err}
	}
	p, relays := e.peer(to), e.around(to, c, len(first))
	if p == nil || len(relays) == 0 {
		return refused(ErrNoRoute)
	}
	d := new(detour)
	st, err := relays[0].open(ctx, c, first, func() { p.detours.remove(d) }, func(id uint64) header { return passOpenFrame(framePassOpen, id, m, to) })
	if err != nil {
		return refused(err)
	}
	p.detours.add(d, st)
	if p.sessions[KindMain].Load() != nil {
		p.detours.end(errDirect) // Attach may have come before add
	}
	return st, nil
}

func (s *Session) open(ctx context.Context, c Class, first []byte, drained func(), frame func(id uint64) header) (*stream, error) {
	key := streamKey{id: s.ep.nextID.Add(1), opened: true}
	out := &sessionOut{s: s, key: key, lane: s.laneFor(c, key.id)}
	st := newStream(s.ep.cfg.StreamWindowBytes, s.cfg.StreamWindowBytes, s.maxMessage, drained)
	st.out = out
	if err := s.addStream(key, st); err != nil {
		return nil, err
	}
	h := frame(key.id)
	if err := out.lane.enqueueWait(ctx, &h, first); err != nil {
		s.mu.Lock()
		delete(s.streams, key)
		s.mu.Unlock()
		return nil, err
	}
	return st, nil
}

func (s *Session) addStream(key streamKey, st *stream) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		return ErrNoRoute
	}
	if _, ok := s.streams[key]; ok {
		return fmt.Errorf("%w: stream %d twice", errProtocol, key.id)
	}
	s.streams[key] = st
	return nil
}

// serveStream starts the handler of a stream, or passes the stream on, or refuses it.
func (s *Session) serveStream(c Class, f *frame) error {
	e := s.ep
	key := streamKey{id: f.id}
	refuse := func(st status) {
		h := endFrame(key.id, sideHandler, st)
		s.force(s.laneFor(c, key.id), &h, nil)
	}
	entry, ok := e.streams[f.method]
	if !ok {
		refuse(statusNoMethod)
		return nil
	}
	from, fn := s.cfg.Peer, entry.fn
	if f.kind == framePassedOpen {
		if from = f.node; e.peer(from) == nil {
			refuse(statusNoRoute)
			return nil
		}
	}
	if f.kind == framePassOpen {
		to, m := f.node, f.method
		fn = func(_ context.Context, _ keyspace.NodeID, first []byte, st Stream) error {
			return s.passStream(to, m, c, first, st)
		}
	}
	if entry.class != c {
		return fmt.Errorf("%w: %s by class %s", errProtocol, f.method, c)
	}
	if int(s.peer.streams.Add(1)) > e.cfg.MaxStreams {
		s.peer.streams.Add(-1)
		e.metrics.class[c].busy.Inc()
		refuse(statusBusy)
		return nil
	}
	ctx, cancel := context.WithCancel(s.ctx)
	st := newStream(e.cfg.StreamWindowBytes, s.cfg.StreamWindowBytes, s.maxMessage, cancel)
	st.out = &sessionOut{s: s, key: key, lane: s.laneFor(c, key.id)}
	first := f.payload
	err := s.addStream(key, st)
	if err == nil && !e.Go(func() {
		defer s.peer.streams.Add(-1)
		e.runStream(ctx, c, from, fn, first, st)
	}) {
		err = ErrClosed
	}
	if err != nil {
		cancel()
		s.peer.streams.Add(-1)
	}
	return err
}

// passStream passes a stream on to a node with which a session stands, and to no other
// relay. The credit of either side bounds what it holds of the other's messages. Each side
// gets all that the other one has sent before its end, and then that end. So the contexts
// that end with a side are not used here: a side says itself how it has ended.
func (s *Session) passStream(to keyspace.NodeID, m Method, c Class, first []byte, back Stream) error {
	e := s.ep
	next, err := e.route(to, c, len(first))
	if err != nil {
		return &passedResult{callResult{err: err, notDelivered: true}}
	}
	ahead, err := next.open(e.ctx, c, first, func() {}, func(id uint64) header { return passOpenFrame(framePassedOpen, id, m, s.cfg.Peer) })
	if err != nil {
		return &passedResult{callResult{err: err, notDelivered: true}}
	}
	e.metrics.passed.Inc()
	// A receiver that reads nothing must not keep the loss of the opener from its handler.
	lost := context.AfterFunc(s.ctx, func() { ahead.Close(&passedResult{callResult{err: ErrUnreachable}}) })
	defer lost()
	over := make(chan struct{})
	go func() {
		defer close(over)
		if ended, err := pump(e.ctx, back, ahead); ended {
			ahead.Close(passedEnd(err))
		}
	}()
	ended, err := pump(e.ctx, ahead, back)
	if ended {
		back.Close(passedEnd(err)) // and so ends the other pump
	}
	<-over
	ahead.Close(nil)
	return nil
}

// pump moves messages from one stream to the other until one of them ends. ended says that it
// was from, and err is how: nil if it was closed without error.
func pump(ctx context.Context, from, to Stream) (ended bool, err error) {
	for {
		payload, err := from.Recv(ctx)
		switch {
		case errors.Is(err, io.EOF):
			return true, nil
		case err != nil:
			return true, err
		}
		if err := to.Send(ctx, payload); err != nil {
			return false, err
		}
		Recycle(payload)
	}
}

// receiveStream passes a frame to its stream. It ignores late frames of streams that
// this side has closed.
func (s *Session) receiveStream(f *frame) error {
	key := keyOf(f.id, f.side)
	s.mu.Lock()
	st := s.streams[key]
	if f.kind == frameEnd {
		delete(s.streams, key)
	}
	s.mu.Unlock()
	if st == nil {
		return nil
	}
	switch f.kind {
	case frameData:
		return st.onData(f.payload)
	case frameCredit:
		return st.onGrant(f.credit)
	case frameEnd:
		r, err := resultOf(f.status, f.payload)
		if err != nil {
			return err
		}
		st.finish(endOf(r, s.cfg.Peer))
	default:
		panic(fmt.Sprintf("transport: frame of kind %d for a stream", f.kind))
	}
	return nil
}
