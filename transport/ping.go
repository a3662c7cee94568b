package transport

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
)

// restingPings is in how many intervals a peer is pinged once that is heard and answers. It is heard
// all the time: nodes send each other a liveness message several times a second.
const restingPings = 4

// probe is the state of a session's pings. Pings are sent as data: a restarted peer
// answers data with a stateless reset, but not QUIC's own keep-alives.
type probe struct {
	missed atomic.Int32 // pings since the last pong
	heard  atomic.Bool  // something has come since the last look
	due    atomic.Bool  // the next message of ClassControl takes a ping along

	mu     sync.Mutex
	number uint64
	sent   [8]struct { // by number modulo its length; guarded by mu
		number uint64
		at     clock.Time
	}
}

// pingLoop probes the peer. An interval before a resting peer's ping, it leaves the ping to the next message of ClassControl,
// since a packet of its own costs both sides as much as the message's.
func (s *Session) pingLoop() {
	e, p := s.ep, &s.probe
	t := e.clock.NewTimer(clock.UntilNext(e.clock, e.cfg.PingInterval)) // all sessions at once
	defer t.Stop()
	for rest := 0; ; {
		// Unanswered probes are counted, not timed: a pause of this process must not make
		// it blame the peer.
		missed := int(p.missed.Load())
		switch heard := p.heard.Swap(false); {
		case heard && missed == 0 && rest > 1:
			rest--
			p.due.Store(rest == 1)
		case rest == 1 && !p.due.Swap(false):
			rest = restingPings // it went with a message
		case missed >= e.cfg.MaxMissedPings:
			s.End(fmt.Errorf("%w: %d probes unanswered", ErrUnreachable, missed))
			return
		default:
			rest = restingPings
			s.ping()
		}
		if !s.pause(t) {
			return
		}
	}
}

// pause waits for the next interval, and ends the session if the peer cannot read what this node writes from now on.
// It returns false once the session has ended.
func (s *Session) pause(t clock.Timer) bool {
	select {
	case <-t.C():
		t.Reset(clock.UntilNext(s.ep.clock, s.ep.cfg.PingInterval))
	case <-s.ctx.Done():
		return false
	}
	if v := s.ep.cfg.Version; v != nil && s.cfg.Reads != (keyspace.Versions{}) {
		if now, _ := v.Now(); now > s.cfg.Reads.Newest {
			s.peer.end(errRaised)
			return false
		}
	}
	return true
}

func (s *Session) pong(number uint64) {
	e, p := s.ep, &s.probe
	p.mu.Lock()
	slot := p.sent[number%uint64(len(p.sent))]
	p.mu.Unlock()
	if s.cfg.Kind != KindMain || slot.number != number || number == 0 {
		return
	}
	p.missed.Store(0)
	rtt := max(e.clock.Now().Sub(slot.at), time.Nanosecond)
	e.metrics.roundTrip.WithLabelValues(s.cfg.Peer.String()).Observe(rtt.Seconds())
	e.mu.Lock()
	s.peer.state.RTT = rtt
	e.mu.Unlock()
}
