package transport

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
)

// errReplaced ends a session that a newer one with the same peer replaces.
var errReplaced = errors.New("transport: replaced by a newer session")

// errRaised ends a session with a peer that does not read what this node writes by now.
var errRaised = errors.New("transport: the cluster was upgraded, and the peer's build is too old")

// SessionConfig names the peer of a session and holds the values agreed in the Hello.
type SessionConfig struct {
	Peer keyspace.NodeID
	Boot keyspace.BootID
	Kind Kind
	// MaxMessageBytes and StreamWindowBytes are the peer's limits.
	MaxMessageBytes   int
	StreamWindowBytes int
	// Reads are the versions that the peer reads, zero for a carrier without Hellos. The session ends
	// when this node writes in a higher one.
	Reads keyspace.Versions
	// Holds says why the peer's certificates do not hold any more, or nil. Nil for a carrier without
	// certificates.
	Holds func() error
	// Ended is called once, with the reason, when the session ends. It must not
	// block.
	Ended func(error)
}

// Session is an established connection with a peer, of one Kind. Its carrier takes
// batches from Lanes and passes received frames to Receive. It ends once, for whatever
// reason: queued frames are dropped, calls and streams fail.
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

	// readers are the goroutines that dispatch a class; before are those of the session
	// that this one replaced. Readers begin when before have ended: otherwise an old
	// session's message could be handled after a newer one.
	readers, before [numClasses]*sync.WaitGroup

	mu      sync.Mutex // guards what follows
	ended   bool
	calls   map[uint64]*pendingCall
	serving map[uint64]*clock.LazyDeadline
	streams map[streamKey]*stream
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

// End ends the session: queued frames are dropped, calls and streams fail, and Ended is
// called. Only the first End counts.
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
		if broke(err) {
			s.peer.metrics.receivedFailures.Inc()
		}
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

// broke says whether a session that ended so was still needed.
func broke(err error) bool {
	return !errors.Is(err, ErrClosed) && !errors.Is(err, ErrNoRoute) && !errors.Is(err, errReplaced)
}

// downPeer reports the loss of the main session and ends the bulk session.
func (s *Session) downPeer(err error) {
	e := s.ep
	e.mu.Lock()
	if s.peer.sessions[KindMain].Load() == nil {
		e.setStateLocked(s.peer, false, s.peer.state.Boot)
	}
	e.mu.Unlock()
	s.peer.metrics.disconnections.Inc()
	if bulk := s.peer.sessions[KindBulk].Load(); bulk != nil {
		bulk.End(err)
	}
	e.log.Warn("peer is down: its connection has ended", zap.Stringer("peer", s.cfg.Peer), zap.Stringer("boot", s.cfg.Boot), zap.Error(err))
}

// BeginRead is called by a carrier's goroutine before its first Receive for a class,
// and EndRead after its last. It waits until the session before this one has received
// everything of the class. It returns false if the session has ended.
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

// laneFor returns the lane of an order key. It leaves out the last of several request
// lanes, which laneForCall uses for large payloads.
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

// largeBytes is the size from which a call or answer uses the last request lane, so
// that small ones do not wait behind it.
const largeBytes = 128 << 10

func (s *Session) laneForCall(c Class, id uint64, payloadBytes int) *Lane {
	if n := len(s.lanes[c]); c == ClassRequest && n > 1 && payloadBytes >= largeBytes {
		return s.lanes[c][n-1]
	}
	return s.laneFor(c, id)
}

// force enqueues a small frame that must not be lost. If even the room behind the full
// queue is used up, the peer does not read its answers, and the session ends.
func (s *Session) force(l *Lane, h *header, payload []byte) {
	if err := l.enqueue(h, payload, true, nil); errors.Is(err, ErrQueueFull) {
		s.End(fmt.Errorf("%w: peer does not read its answers", errProtocol))
	}
}

// ping sends the peer a ping.
func (s *Session) ping() {
	p := &s.probe
	p.missed.Add(1)
	p.mu.Lock()
	p.number++
	number := p.number
	slot := &p.sent[number%uint64(len(p.sent))]
	slot.number, slot.at = number, s.ep.clock.Now()
	p.mu.Unlock()
	h := pingFrame(framePing, number)
	// A full control queue counts as an unanswered probe.
	_ = s.lanes[ClassControl][0].enqueue(&h, pingPadding, false, nil)
}
