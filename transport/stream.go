package transport

import (
	"context"
	"fmt"
	"io"
	"sync"

	"github.com/skeindb/skein/internal/wake"
	"github.com/skeindb/skein/keyspace"
)

// streamMessageCost is added to a message's bytes when credit is counted: empty
// messages take memory too.
const streamMessageCost = 64

// streamKey names a stream within a session: both sides number theirs from 1.
type streamKey struct {
	id     uint64
	opened bool // by this side
}

func keyOf(id uint64, fromSide uint8) streamKey {
	return streamKey{id: id, opened: fromSide == sideHandler}
}

// streamOut is the sending direction of one end of a stream.
type streamOut interface {
	// data carries one message; it may wait for room until ctx ends.
	data(ctx context.Context, payload []byte) error
	grant(bytes uint32)
	end(err error)
}

// stream is one end of a stream. It may send while credit is left, so the other end
// holds at most the window and one message.
type stream struct {
	out        streamOut
	window     int64 // what this end grants
	maxMessage int
	drained    func() // called once nothing more will be received; not nil
	recvWake   wake.Signal
	sendWake   wake.Signal

	mu       sync.Mutex // guards what follows
	in       [][]byte
	held     int64 // cost of in, and of received messages whose credit was not yet returned
	consumed int64 // the part of held whose credit is to be returned
	credit   int64 // what the other end grants
	granted  int64 // credit's upper bound
	ending   error // what Recv returns after in; nil while the other end lives
	closed   bool  // on this side
}

func newStream(window, credit int, maxMessage int, drained func()) *stream {
	return &stream{
		window: int64(window), credit: int64(credit), granted: int64(credit), maxMessage: maxMessage, drained: drained,
		recvWake: wake.New(), sendWake: wake.New(),
	}
}

// Send implements Stream.
func (st *stream) Send(ctx context.Context, payload []byte) error {
	if len(payload) > st.maxMessage {
		return ErrTooLarge
	}
	cost := int64(len(payload) + streamMessageCost)
	for {
		st.mu.Lock()
		switch {
		case st.closed:
			st.mu.Unlock()
			return ErrStreamClosed
		case st.ending != nil:
			err := st.ending
			st.mu.Unlock()
			return err
		case st.credit > 0:
			st.credit -= cost
			st.mu.Unlock()
			err := st.out.data(ctx, payload)
			if err != nil {
				st.mu.Lock()
				st.credit += cost
				st.mu.Unlock()
			}
			return err
		}
		st.mu.Unlock()
		select {
		case <-st.sendWake:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Recv implements Stream. It returns a message that is there even if ctx has ended.
func (st *stream) Recv(ctx context.Context) ([]byte, error) {
	for {
		payload, grant, err := st.pop()
		if grant > 0 {
			st.out.grant(uint32(grant))
		}
		if payload != nil || err != nil {
			return payload, err
		}
		select {
		case <-st.recvWake:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// pop returns the next message, never nil, or the end, or neither.
func (st *stream) pop() (payload []byte, grant int64, err error) {
	st.mu.Lock()
	defer st.mu.Unlock()
	switch {
	case st.closed:
		return nil, 0, ErrStreamClosed
	case len(st.in) == 0:
		return nil, 0, st.ending
	}
	payload = st.in[0]
	if payload == nil {
		payload = []byte{}
	}
	st.in[0] = nil
	st.in = st.in[1:]
	st.consumed += int64(len(payload) + streamMessageCost)
	if st.consumed >= st.window/2 && st.ending == nil {
		grant = st.consumed
		st.held -= grant
		st.consumed = 0
	}
	if len(st.in) == 0 && st.ending != nil {
		st.drained()
	}
	return payload, grant, nil
}

// Close implements Stream.
func (st *stream) Close(err error) {
	st.mu.Lock()
	if st.closed {
		st.mu.Unlock()
		return
	}
	st.closed = true
	st.in = nil
	over := st.ending != nil
	st.mu.Unlock()
	st.recvWake.Set()
	st.sendWake.Set()
	st.drained()
	if !over {
		st.out.end(err)
	}
}

// onData takes a message from the other end. It fails if the message exceeds the
// credit.
func (st *stream) onData(payload []byte) error {
	st.mu.Lock()
	defer st.mu.Unlock()
	if st.closed || st.ending != nil {
		return nil
	}
	if st.held >= st.window {
		return fmt.Errorf("%w: stream holds %d bytes of %d", errProtocol, st.held, st.window)
	}
	st.held += int64(len(payload) + streamMessageCost)
	st.in = append(st.in, payload)
	st.recvWake.Set()
	return nil
}

// onGrant takes credit from the other end.
func (st *stream) onGrant(bytes uint32) error {
	st.mu.Lock()
	defer st.mu.Unlock()
	if st.credit+int64(bytes) > st.granted {
		return fmt.Errorf("%w: credit %d + %d above %d", errProtocol, st.credit, bytes, st.granted)
	}
	st.credit += int64(bytes)
	st.sendWake.Set()
	return nil
}

// finish ends the stream on behalf of the other end or of the lost session. After a
// clean end a handler with messages to read keeps its context.
func (st *stream) finish(err error) {
	st.mu.Lock()
	if st.ending != nil || st.closed {
		st.mu.Unlock()
		return
	}
	st.ending = err
	drained := len(st.in) == 0 || err != io.EOF //nolint:errorlint // exactly the clean end
	st.mu.Unlock()
	st.recvWake.Set()
	st.sendWake.Set()
	if drained {
		st.drained()
	}
}

// abandon ends the stream on both sides as if its session were lost.
func (st *stream) abandon(err error) {
	st.mu.Lock()
	if st.ending != nil || st.closed {
		st.mu.Unlock()
		return
	}
	st.ending = err
	st.mu.Unlock()
	st.recvWake.Set()
	st.sendWake.Set()
	st.drained()
	st.out.end(nil)
}

func (e *Endpoint) runStream(ctx context.Context, c Class, from keyspace.NodeID, fn StreamHandler, first []byte, st *stream) {
	gauge := e.metrics.class[c].handlers
	gauge.Inc()
	defer gauge.Dec()
	st.Close(fn(ctx, from, first, st))
}
