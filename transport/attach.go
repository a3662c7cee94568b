package transport

import (
	"context"
	"fmt"
	"sync"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/wake"
)

// Attach installs a session for its peer and ends the session that it replaces. It
// fails if the peer is not known (any more) or the endpoint is closed.
func (e *Endpoint) Attach(cfg SessionConfig) (*Session, error) {
	p := e.peer(cfg.Peer)
	if p == nil {
		return nil, fmt.Errorf("transport: session with node %s: %w", cfg.Peer, ErrNoRoute)
	}
	p.attach.Lock()
	defer p.attach.Unlock()
	s := e.newSession(p, cfg)
	slot := &p.sessions[cfg.Kind]
	if old := slot.Load(); old != nil {
		old.End(errReplaced)
	}
	for c := range Class(numClasses) {
		if kindOf(c) == cfg.Kind {
			s.before[c], p.readers[c] = p.readers[c], s.readers[c]
		}
	}
	slot.Store(s)
	e.metrics.sessions.Inc()
	if cfg.Kind == KindMain {
		p.detours.end(errDirect)
		if bulk := p.sessions[KindBulk].Load(); bulk != nil && bulk.cfg.Boot != cfg.Boot {
			bulk.End(errReplaced)
		}
		e.mu.Lock()
		if slot.Load() == s {
			e.setStateLocked(p, true, cfg.Boot)
		}
		e.mu.Unlock()
	}
	if e.peer(cfg.Peer) != p || e.ctx.Err() != nil || cfg.Kind == KindMain && !e.Go(s.pingLoop) {
		s.End(ErrClosed)
		return nil, fmt.Errorf("transport: session with node %s: %w", cfg.Peer, ErrClosed)
	}
	return s, nil
}

func (e *Endpoint) newSession(p *peer, cfg SessionConfig) *Session {
	s := &Session{
		ep: e, peer: p, cfg: cfg,
		maxMessage: min(cfg.MaxMessageBytes, e.cfg.MaxMessageBytes),
		calls:      map[uint64]*pendingCall{},
		serving:    map[uint64]*clock.LazyDeadline{},
		streams:    map[streamKey]*stream{},
	}
	s.ctx, s.cancel = context.WithCancelCause(e.ctx)
	s.received = e.metrics.peerReceived.WithLabelValues(cfg.Peer.String())
	sent := e.metrics.peerSent.WithLabelValues(cfg.Peer.String())
	for c := range Class(numClasses) {
		s.readers[c] = new(sync.WaitGroup)
		if kindOf(c) != cfg.Kind {
			continue
		}
		m := &e.metrics.class[c]
		b := &budget{pool: &e.queues, total: m.queued}
		for slot := range e.cfg.Lanes[c] {
			s.lanes[c] = append(s.lanes[c], &Lane{
				class: c, slot: slot, budget: b, metrics: m, sent: sent, failed: p.metrics.sentFailures,
				wake: wake.New(), ended: s.ctx.Done(),
			})
		}
	}
	return s
}
