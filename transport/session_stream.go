package transport

import (
	"context"
	"errors"
	"fmt"

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
	if err != nil {
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
	if err != nil {
		return nil, refused(err)
	}
	st, err := s.open(ctx, m, c, first)
	if err != nil {
		return nil, refused(err)
	}
	return st, nil
}

func (s *Session) open(ctx context.Context, m Method, c Class, first []byte) (*stream, error) {
	key := streamKey{id: s.ep.nextID.Add(1), opened: true}
	out := &sessionOut{s: s, key: key, lane: s.laneFor(c, key.id)}
	st := newStream(s.ep.cfg.StreamWindowBytes, s.cfg.StreamWindowBytes, s.maxMessage, func() {})
	st.out = out
	if err := s.addStream(key, st); err != nil {
		return nil, err
	}
	h := openFrame(key.id, m)
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

// serveStream starts the handler of a stream, or refuses it.
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
		e.runStream(ctx, c, s.cfg.Peer, entry.fn, first, st)
	}) {
		err = ErrClosed
	}
	if err != nil {
		cancel()
		s.peer.streams.Add(-1)
	}
	return err
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
