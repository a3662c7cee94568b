package transport

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
)

// Kind says what a session is for: two sessions with a peer make it fully
// reachable.
type Kind uint8

// The kinds of sessions.
const (
	// KindMain carries every class but ClassBulk. The peer is up while it stands.
	KindMain Kind = iota
	// KindBulk carries ClassBulk: on a connection of its own, since within one
	// connection bulk would sit before everything else. It ends with the main one.
	KindBulk

	numKinds = 2
)

// String returns the kind's name in logs.
func (k Kind) String() string {
	if k == KindBulk {
		return "bulk"
	}
	return "main"
}

func kindOf(c Class) Kind {
	if c == ClassBulk {
		return KindBulk
	}
	return KindMain
}

// errReplaced ends a session that a newer one with the same peer replaces.
var errReplaced = errors.New("transport: replaced by a newer session")

// errProtocol ends a session whose peer broke the protocol.
var errProtocol = errors.New("transport: protocol violation")

// SessionConfig says with whom a session is and what was agreed in the Hello.
type SessionConfig struct {
	Peer keyspace.NodeID
	Boot keyspace.BootID
	Kind Kind
	// MaxMessageBytes and StreamWindowBytes are what the peer accepts.
	MaxMessageBytes   int
	StreamWindowBytes int
	// Ended is called once, with the reason, when the session ends. It must not
	// block.
	Ended func(error)
}

// Session is an established connection with a peer, of one Kind. Its carrier takes
// batches from Lanes and gives what arrives to Receive. Whatever ends it, it
// ends once: queued frames are dropped, calls and streams fail.
type Session struct {
	ep         *Endpoint
	peer       *peer
	cfg        SessionConfig
	maxMessage int // the smaller of both sides' limits
	lanes      [numClasses][]*Lane
	ctx        context.Context // parent of the contexts of handlers
	cancel     context.CancelCauseFunc
	probe      probe
	received   prometheus.Counter // bytes from the peer, over all classes

	// readers are the goroutines that dispatch a class; they begin when before, those
	// of the session that this one replaced, have ended: else a message of the old
	// session could be handled after a later one.
	readers, before [numClasses]*sync.WaitGroup

	mu      sync.Mutex // guards what follows
	ended   bool
	calls   map[uint64]*pendingCall
	serving map[uint64]*clock.Patience
	streams map[streamKey]*stream
}

// Attach makes a session the one by which its peer is reached, and ends the one
// that was. It fails if the peer is not known (any more) or the endpoint closed.
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
		serving:    map[uint64]*clock.Patience{},
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
		b := &budget{limit: &e.queueBytes[c], total: m.queued}
		for slot := range e.cfg.Lanes[c] {
			s.lanes[c] = append(s.lanes[c], &Lane{
				class: c, slot: slot, budget: b, metrics: m, sent: sent,
				wake: make(chan struct{}, 1), ended: s.ctx.Done(),
			})
		}
	}
	return s
}

// Lanes returns the session's outgoing queues, the most urgent class first.
func (s *Session) Lanes() []*Lane {
	var all []*Lane
	for _, lanes := range s.lanes {
		all = append(all, lanes...)
	}
	return all
}

// Peer returns the node that the session is with.
func (s *Session) Peer() keyspace.NodeID { return s.cfg.Peer }

// Done is closed when the session ends.
func (s *Session) Done() <-chan struct{} { return s.ctx.Done() }

// End ends the session: what is queued is dropped, calls and streams fail, and
// Ended is called. Only the first End counts.
func (s *Session) End(err error) {
	s.mu.Lock()
	if s.ended {
		s.mu.Unlock()
		return
	}
	s.ended = true
	calls, serving, streams := s.calls, s.serving, s.streams
	s.calls, s.serving, s.streams = nil, nil, nil
	s.mu.Unlock()

	s.cancel(err)
	for _, ctx := range serving {
		ctx.End()
	}
	taken := map[*Lane]uint64{}
	for _, l := range s.Lanes() {
		taken[l] = l.close()
	}
	e := s.ep
	if s.peer.sessions[s.cfg.Kind].CompareAndSwap(s, nil) {
		e.metrics.sessions.Dec()
		e.metrics.sessionEnds.Inc()
		if s.cfg.Kind == KindMain {
			s.downPeer(err)
		}
	}
	lost := fmt.Errorf("%w: %w", ErrUnreachable, err)
	for _, id := range slices.Sorted(maps.Keys(calls)) {
		pc := calls[id]
		pc.done <- callResult{err: lost, notDelivered: pc.pos >= taken[pc.lane]}
	}
	for _, st := range streams {
		st.finish(lost)
	}
	if s.cfg.Ended != nil {
		s.cfg.Ended(err)
	}
}

// downPeer tells of the loss of the main session, which the bulk one follows.
func (s *Session) downPeer(err error) {
	e := s.ep
	e.mu.Lock()
	if s.peer.sessions[KindMain].Load() == nil {
		e.setStateLocked(s.peer, false, s.peer.state.Boot)
	}
	e.mu.Unlock()
	if bulk := s.peer.sessions[KindBulk].Load(); bulk != nil {
		bulk.End(err)
	}
	e.log.Info("peer is down", zap.Stringer("peer", s.cfg.Peer), zap.Stringer("boot", s.cfg.Boot), zap.Error(err))
}

// BeginRead is called by a carrier's goroutine before its first Receive for a
// class, and EndRead after its last. It waits until nothing of the class is
// received on the session before this one. It returns false if the session ended.
func (s *Session) BeginRead(c Class) bool {
	s.mu.Lock()
	if s.ended {
		s.mu.Unlock()
		return false
	}
	s.readers[c].Add(1)
	s.mu.Unlock()
	if s.before[c] != nil {
		s.before[c].Wait()
	}
	return true
}

// EndRead is the counterpart of BeginRead.
func (s *Session) EndRead(c Class) { s.readers[c].Done() }

// Receive takes one frame, with its length in front, that came by a lane of the
// class. It keeps the frame's memory. The frames of a lane are received by one
// goroutine. After an error, which has ended the session, there is nothing more to
// receive.
func (s *Session) Receive(c Class, b []byte) error {
	f, err := parseFrame(b[min(len(b), lengthBytes):])
	if err == nil {
		err = s.receive(c, &f)
	}
	if err != nil {
		s.End(err)
	}
	return err
}

// receive dispatches one frame whose payload may be kept.
func (s *Session) receive(c Class, f *frame) error {
	if kindOf(c) != s.cfg.Kind || len(f.payload) > s.ep.cfg.MaxMessageBytes+maxErrorBytes {
		return fmt.Errorf("%w: class %s, %d bytes on the %s session", errProtocol, c, len(f.payload), s.cfg.Kind)
	}
	if s.ctx.Err() != nil {
		return context.Cause(s.ctx)
	}
	switch f.kind {
	case frameMessage:
		return s.receiveMessage(c, f)
	case frameCall:
		return s.serveCall(c, f)
	case frameReply:
		return s.receiveReply(f)
	case frameCancel:
		s.cancelCall(f.id)
	case frameOpen:
		return s.serveStream(c, f)
	case frameData, frameCredit, frameEnd:
		return s.receiveStream(f)
	case framePing:
		h := pingFrame(framePong, f.id)
		// Full only if the peer reads nothing; then it gets no pong, and gives up.
		_ = s.lanes[c][0].enqueue(&h, pingPadding, false, nil)
	case framePong:
		s.pong(f.id)
	}
	return nil
}

func (s *Session) receiveMessage(c Class, f *frame) error {
	h, ok := s.ep.sends[f.method]
	if !ok {
		// A peer of another version: its messages are lost, as any may be.
		return nil
	}
	if h.class != c {
		return fmt.Errorf("%w: %s by class %s", errProtocol, f.method, c)
	}
	h.fn(s.cfg.Peer, f.payload)
	return nil
}

// laneFor returns the lane of an order key. The last of several request lanes is
// left out: it is largeLane's.
func (s *Session) laneFor(c Class, order uint64) *Lane {
	n := len(s.lanes[c])
	if c == ClassRequest && n > 1 {
		n--
	}
	if n == 1 {
		return s.lanes[c][0]
	}
	// Fibonacci hashing: order keys are often small consecutive numbers.
	return s.lanes[c][(order*0x9e3779b97f4a7c15>>32)%uint64(n)]
}

// largeBytes is the size from which a call or answer leaves by the last request
// lane, so that small ones do not wait behind it.
const largeBytes = 128 << 10

func (s *Session) laneForCall(c Class, id uint64, payloadBytes int) *Lane {
	if n := len(s.lanes[c]); c == ClassRequest && n > 1 && payloadBytes >= largeBytes {
		return s.lanes[c][n-1]
	}
	return s.laneFor(c, id)
}

// force enqueues a small frame that must not be lost. Where even the room behind
// the full queue is used up, the peer does not read what it asked for.
func (s *Session) force(l *Lane, h *header, payload []byte) {
	if err := l.enqueue(h, payload, true, nil); errors.Is(err, ErrQueueFull) {
		s.End(fmt.Errorf("%w: peer does not read its answers", errProtocol))
	}
}

// probe is what a session knows of its pings. Pings are sent as data: a restarted
// peer answers data, but not QUIC's own keep-alives, with a stateless reset.
type probe struct {
	missed atomic.Int32 // pings since the last pong

	mu   sync.Mutex
	sent [8]struct { // by number modulo its length; guarded by mu
		number uint64
		at     clock.Time
	}
}

func (s *Session) pingLoop() {
	e := s.ep
	t := e.clock.NewTimer(e.cfg.PingInterval)
	defer t.Stop()
	for number := uint64(1); ; number++ {
		// Unanswered probes are counted, not timed: the first one after this process was
		// stopped for a while must not find the peer guilty.
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
		// A full control queue is as good as an unanswered probe.
		_ = s.lanes[ClassControl][0].enqueue(&h, pingPadding, false, nil)
		select {
		case <-t.C():
			t.Reset(e.cfg.PingInterval)
		case <-s.ctx.Done():
			return
		}
	}
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
