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

	mu   sync.Mutex
	sent [8]struct { // by number modulo its length; guarded by mu
		number uint64
		at     clock.Time
	}
}

func (s *Session) pingLoop() {
	e := s.ep
	t := e.clock.NewTimer(clock.UntilNext(e.clock, e.cfg.PingInterval)) // all sessions at once
	defer t.Stop()
	number, rest := uint64(0), 0
	for {
		if s.probe.heard.Swap(false) && s.probe.missed.Load() == 0 && rest > 1 {
			rest--
			if !s.pause(t) {
				return
			}
			continue
		}
		number, rest = number+1, restingPings
		// Unanswered probes are counted, not timed: a pause of this process must not make
		// it blame the peer.
		if missed := int(s.probe.missed.Add(1)) - 1; missed >= e.cfg.MaxMissedPings {
			s.End(fmt.Errorf("%w: %d probes unanswered", ErrUnreachable, missed))
			return
		}
		p := &s.probe
		p.mu.Lock()
		slot := &p.sent[number%uint64(len(p.sent))]
		slot.number, slot.at = number, e.clock.Now()
		p.mu.Unlock()
		h := pingFrame(framePing, number)
		// A full control queue counts as an unanswered probe.
		_ = s.lanes[ClassControl][0].enqueue(&h, pingPadding, false, nil)
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
