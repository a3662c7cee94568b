package transport

import (
	"bytes"
	"context"
	"errors"
	"io"
	"sync"
	"sync/atomic"

	"github.com/skeindb/skein/internal/wake"
)

// loopback carries a node's messages to itself without encoding. Only streams copy. It
// has the same bounds as the network path and is as asynchronous.
type loopback struct {
	e        *Endpoint
	queues   [numClasses]loopQueue
	handlers [maxCallMethods]atomic.Int32
	streams  atomic.Int32
}

// loopQueue holds one class's one-way messages until its goroutine delivers them.
type loopQueue struct {
	wake wake.Signal

	budget budget

	mu     sync.Mutex // guards what follows
	in     []loopMessage
	closed bool
}

type loopMessage struct {
	method  Method
	payload []byte
}

func (l *loopback) init(e *Endpoint) {
	l.e = e
	for c := range l.queues {
		q := &l.queues[c]
		q.wake = wake.New()
		q.budget.pool, q.budget.total = &e.queues, new(atomic.Int64)
	}
}

func (l *loopback) run() {
	for c := range l.queues {
		l.e.Go(func() { l.deliver(&l.queues[c]) })
	}
}

func (l *loopback) close() {
	for c := range l.queues {
		q := &l.queues[c]
		q.mu.Lock()
		q.closed = true
		q.in = nil
		q.mu.Unlock()
		q.wake.Set()
	}
}

func (l *loopback) send(m Method, c Class, payload []byte) error {
	if len(payload) > l.e.cfg.MaxMessageBytes {
		return ErrTooLarge
	}
	q := &l.queues[c]
	q.mu.Lock()
	defer q.mu.Unlock()
	switch {
	case q.closed:
		return ErrClosed
	case !q.budget.take(len(payload)+messageHeader, false):
		l.e.metrics.class[c].dropped.Inc()
		return ErrQueueFull
	}
	q.in = append(q.in, loopMessage{m, payload})
	if len(q.in) == 1 {
		q.wake.Set()
	}
	return nil
}

// deliver calls the handlers of one class until the loopback is closed.
func (l *loopback) deliver(q *loopQueue) {
	var batch []loopMessage
	for {
		q.mu.Lock()
		batch, q.in = q.in, batch[:0]
		closed := q.closed
		q.mu.Unlock()
		if closed {
			return
		}
		if len(batch) == 0 {
			<-q.wake
			continue
		}
		n := 0
		for i, m := range batch {
			if h, ok := l.e.sends[m.method]; ok && l.e.ctx.Err() == nil {
				h.fn(l.e.cfg.Node, m.payload)
			}
			n += len(m.payload) + messageHeader
			batch[i] = loopMessage{}
		}
		q.budget.release(n)
	}
}

func (l *loopback) call(ctx context.Context, m Method, c Class, payload []byte) callResult {
	e := l.e
	entry, ok := e.calls[m]
	switch {
	case !ok:
		return callResult{err: ErrNoMethod, notDelivered: true}
	case len(payload) > e.cfg.MaxMessageBytes:
		return callResult{err: ErrTooLarge, notDelivered: true}
	case int(l.handlers[entry.index].Add(1)) > e.cfg.MaxHandlers:
		l.handlers[entry.index].Add(-1)
		e.metrics.class[c].busy.Inc()
		return callResult{err: ErrPeerBusy, notDelivered: true}
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	done := make(chan callResult, 1)
	if !e.Go(func() {
		defer l.handlers[entry.index].Add(-1)
		done <- l.runCall(ctx, c, entry.fn, payload)
	}) {
		l.handlers[entry.index].Add(-1)
		return callResult{err: ErrClosed, notDelivered: true}
	}
	select {
	case r := <-done:
		return r
	case <-ctx.Done():
		return callResult{err: ctx.Err()}
	case <-e.ctx.Done():
		return callResult{err: ErrClosed}
	}
}

func (l *loopback) runCall(ctx context.Context, c Class, fn CallHandler, payload []byte) callResult {
	gauge := l.e.metrics.class[c].handlers
	gauge.Inc()
	defer gauge.Dec()
	answer, err := fn(ctx, l.e.cfg.Node, payload)
	switch {
	case expired(ctx, err):
		return callResult{err: context.DeadlineExceeded}
	case ctx.Err() != nil && errors.Is(err, ctx.Err()):
		// The same error as when the caller sees the end of its context first; which
		// comes first is chance.
		return callResult{err: ctx.Err()}
	case err != nil:
		return callResult{err: asRemote(err)}
	case len(answer) > l.e.cfg.MaxMessageBytes:
		return callResult{err: ErrTooLarge}
	}
	return callResult{payload: answer}
}

// loopOut is the sending direction of a stream within the node.
type loopOut struct {
	e     *Endpoint
	other *stream
}

func (o *loopOut) data(_ context.Context, payload []byte) error {
	if o.e.ctx.Err() != nil {
		return ErrClosed
	}
	return o.other.onData(bytes.Clone(payload))
}

func (o *loopOut) grant(bytes uint32) {
	if err := o.other.onGrant(bytes); err != nil {
		panic(err)
	}
}

func (o *loopOut) end(err error) {
	if err == nil {
		o.other.finish(io.EOF)
		return
	}
	o.other.finish(asRemote(err))
}

func (l *loopback) open(m Method, first []byte) (*stream, error) {
	e := l.e
	entry, ok := e.streams[m]
	switch {
	case !ok:
		return nil, ErrNoMethod
	case len(first) > e.cfg.MaxMessageBytes:
		return nil, ErrTooLarge
	case int(l.streams.Add(1)) > e.cfg.MaxStreams:
		l.streams.Add(-1)
		return nil, ErrPeerBusy
	}
	w := e.cfg.StreamWindowBytes
	ctx, cancel := context.WithCancel(e.ctx)
	near := newStream(w, w, e.cfg.MaxMessageBytes, func() {})
	far := newStream(w, w, e.cfg.MaxMessageBytes, cancel)
	near.out, far.out = &loopOut{e, far}, &loopOut{e, near}
	if !e.Go(func() {
		defer l.streams.Add(-1)
		e.runStream(ctx, entry.class, e.cfg.Node, entry.fn, first, far)
	}) {
		cancel()
		l.streams.Add(-1)
		return nil, ErrClosed
	}
	return near, nil
}
