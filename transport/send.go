package transport

import (
	"github.com/skeindb/skein/keyspace"
)

// Send queues a one-way message. Messages of one (peer, class, order) arrive in order
// or not at all. It never blocks: ErrQueueFull, ErrNoRoute, ErrTooLarge, ErrNoMethod
// and ErrClosed come at once and mean that it was not sent. The payload belongs to the
// bus after the call.
func (e *Endpoint) Send(to keyspace.NodeID, m Method, order uint64, payload []byte) error {
	c, ok := e.classOf(m)
	if !ok {
		return ErrNoMethod
	}
	if to == e.cfg.Node {
		return e.loop.send(m, c, payload)
	}
	s, err := e.route(to, c, len(payload))
	if err != nil {
		return err
	}
	h := messageFrame(m)
	return s.laneFor(c, order).enqueue(&h, payload, false, nil)
}

// route returns the session for a message of the class.
func (e *Endpoint) route(to keyspace.NodeID, c Class, payloadBytes int) (*Session, error) {
	if e.ctx.Err() != nil {
		return nil, ErrClosed
	}
	p := e.peer(to)
	if p == nil {
		return nil, ErrNoRoute
	}
	s := p.sessions[kindOf(c)].Load()
	if s == nil {
		e.metrics.class[c].dropped.Inc()
		return nil, ErrNoRoute
	}
	if payloadBytes > s.maxMessage {
		return nil, ErrTooLarge
	}
	return s, nil
}
