package transport

import (
	"github.com/skeindb/skein/internal/mutation"
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
		e.metrics.class[c].dropped.Inc()
		if p := e.peer(to); p != nil {
			p.metrics.sentFailures.Inc()
		}
		return err
	}
	h := messageFrame(m)
	err = s.laneFor(c, order).enqueue(&h, payload, false, nil)
	if c == ClassControl && s.probe.due.Load() && s.probe.due.Swap(false) {
		s.ping()
	}
	return err
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
		return nil, ErrNoRoute
	}
	if payloadBytes > s.maxMessage {
		return nil, ErrTooLarge
	}
	return s, nil
}

// maxRelays is how many nodes are asked to pass on one call. Each of them has said lately
// that it hears the receiver, so the first one mostly does it.
const maxRelays = 3

// around returns sessions with nodes that hear a node with which no session stands. Only
// what clients wait for goes around a broken link: raft bears it, and copies would load
// the relay.
func (e *Endpoint) around(to keyspace.NodeID, c Class, payloadBytes int) (sessions []*Session) {
	var relays []keyspace.NodeID
	if c == ClassRequest && !mutation.Is(mutation.NoWayAround) && e.cfg.Relays != nil && e.peer(to) != nil {
		relays = e.cfg.Relays(to)
	}
	for i := range relays {
		// By turns: otherwise one node would carry what all others send around.
		id := relays[(int(e.nextID.Load()%uint64(len(relays)))+i)%len(relays)]
		s, err := e.route(id, c, payloadBytes)
		if err == nil && id != to {
			sessions = append(sessions, s)
		}
		if len(sessions) == maxRelays {
			break
		}
	}
	if len(sessions) > 0 {
		e.metrics.detours.Inc()
	} else {
		e.metrics.class[c].dropped.Inc()
		if p := e.peer(to); p != nil {
			p.metrics.sentFailures.Inc()
		}
	}
	return sessions
}
