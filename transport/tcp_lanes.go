package transport

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"fmt"
	"net/netip"
	"sync"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
)

// Main sessions go over TCP where the dialler has CarrierTLS, for networks that block UDP. Classes and lanes must not wait
// for each other, so each lane has a connection of its own. The first connection carries the handshake and the control class. Its
// dialler makes the others, and says with a key of the first one's TLS session which session each belongs to.

// A joining is the first frame of a further connection.
type joining struct {
	key   sessionKey
	class Class
	// The connection carries the dialler's lane of this slot. The accepter has all its lanes share the
	// connections of a class, of which there are so many.
	slot, of int
}

// A sessionKey is known to the two ends of a session's first connection alone.
type sessionKey [16]byte

// sessionKeyLabel is that of RFC 8446, section 7.5.
const sessionKeyLabel = "EXPORTER-skein-bus-session"

func (w *tcpWire) sessionKey() (key sessionKey, err error) {
	state := w.ConnectionState()
	b, err := state.ExportKeyingMaterial(sessionKeyLabel, nil, len(key))
	copy(key[:], b)
	return key, err
}

const joinBody = 1 + len(sessionKey{}) + 3

func joinFrame(j joining) []byte {
	dst := binary.BigEndian.AppendUint32(make([]byte, 0, lengthBytes+joinBody), uint32(joinBody))
	dst = append(dst, frameJoin)
	dst = append(dst, j.key[:]...)
	return append(dst, uint8(j.class), uint8(j.slot), uint8(j.of))
}

// parseJoin decodes the body of a frameJoin.
func parseJoin(b []byte) (j joining, err error) {
	if len(b) < joinBody || b[0] != frameJoin {
		return j, fmt.Errorf("%w: a further connection begins with %x", errMalformed, b[:min(len(b), 8)])
	}
	rest := b[1+copy(j.key[:], b[1:]):]
	j.class, j.slot, j.of = Class(rest[0]), int(rest[1]), int(rest[2])
	if j.class >= numClasses || kindOf(j.class) != KindMain || j.class == ClassControl || j.of > maxLanes || j.slot >= j.of {
		return j, fmt.Errorf("%w: connection %d of %d for class %d", errMalformed, j.slot, j.of, rest[0])
	}
	return j, nil
}

// meetings are the sessions over TCP whose further connections this node accepts.
type meetings struct {
	mu  sync.Mutex
	all map[sessionKey]*meeting
}

// A meeting is where a session and its further connections find each other. Either may come first.
type meeting struct {
	came  chan struct{} // closed once session is set
	s     *Session
	users int // the session, and connections that wait for it
	taken [numClasses][maxLanes]bool
	of    [numClasses]int // that of the first connection; 0 before it came
}

// enter returns the meeting of a key, which leave has to be called for.
func (m *meetings) enter(key sessionKey) *meeting {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.all == nil {
		m.all = map[sessionKey]*meeting{}
	}
	one := m.all[key]
	if one == nil {
		one = &meeting{came: make(chan struct{})}
		m.all[key] = one
	}
	one.users++
	return one
}

func (m *meetings) leave(key sessionKey) {
	m.mu.Lock()
	defer m.mu.Unlock()
	one := m.all[key]
	if one.users--; one.users == 0 {
		delete(m.all, key)
	}
}

// take says whether the connection is the first for its lane, and agrees with the others of its class on how many there are:
// otherwise two connections would carry one lane, or none.
func (m *meetings) take(one *meeting, j joining) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	taken, of := &one.taken[j.class][j.slot], &one.of[j.class]
	if *taken || *of != 0 && *of != j.of {
		return false
	}
	*taken, *of = true, j.of
	return true
}

func (w *tcpWire) serve(q *QUIC, fr *frameReader, s *Session) {
	if s.cfg.Kind == KindMain {
		w.serveMain(q, fr, s)
	} else {
		w.serveBulk(q, fr, s)
	}
}

// serveMain moves the bytes of a main session.
func (w *tcpWire) serveMain(q *QUIC, fr *frameReader, s *Session) {
	run := func(fn func()) {
		if !q.Go(fn) {
			s.End(ErrClosed)
		}
	}
	key, err := w.sessionKey()
	if err != nil {
		s.End(fmt.Errorf("key of the session: %w", err))
		return
	}
	fr.max = frameLimit(&q.cfg)
	for _, lane := range s.Lanes() {
		c := lane.Class()
		switch {
		case c == ClassControl:
			run(func() { q.writeLane(s, lane, w.Conn) })
		case w.again != nil:
			j := joining{key: key, class: c, slot: lane.Slot(), of: len(s.lanes[c])}
			run(func() { w.openLane(q, s, j) })
		}
	}
	run(func() { q.readLane(s, fr, ClassControl) })
	if w.again != nil {
		return
	}
	one := q.meetings.enter(key)
	one.s = s
	close(one.came)
	run(func() {
		<-s.Done()
		q.meetings.leave(key)
	})
}

// openLane makes the connection of one lane. The session ends if that fails: what waits in the lane would never leave.
func (w *tcpWire) openLane(q *QUIC, s *Session, j joining) {
	ctx, cancel := clock.WithTimeout(s.ctx, q.clock, 2*q.opts.HandshakeTimeout)
	defer cancel()
	more, err := w.again(ctx)
	if err == nil {
		_, err = more.Write(joinFrame(j))
	}
	if err != nil {
		if more != nil {
			more.close(closeEnded, "")
		}
		s.End(fmt.Errorf("connection for lane %s/%d: %w", j.class, j.slot, err))
		return
	}
	q.serveLane(s, more, newFrameReader(more.Conn, frameLimit(&q.cfg)), j)
}

// join gives a further connection to its session. b is the body of its first frame.
func (q *QUIC) join(w *tcpWire, fr *frameReader, b []byte, keep func() bool) {
	err := func() error {
		j, err := parseJoin(b)
		if err != nil {
			return err
		}
		one := q.meetings.enter(j.key)
		defer q.meetings.leave(j.key)
		ctx, cancel := clock.WithTimeout(q.ctx, q.clock, 2*q.opts.HandshakeTimeout)
		defer cancel()
		select {
		case <-one.came:
		case <-ctx.Done():
			return fmt.Errorf("no session for a further connection: %w", context.Cause(ctx))
		}
		if !q.meetings.take(one, j) || !keep() {
			return fmt.Errorf("%w: connection for lane %s/%d", errProtocol, j.class, j.slot)
		}
		fr.max = frameLimit(&q.cfg)
		q.serveLane(one.s, w, fr, j)
		return nil
	}()
	if err != nil {
		q.log.Debug("refused a further connection", zap.Stringer("remote", w.RemoteAddr()), zap.Error(err))
		w.close(closeRefused, err.Error())
	}
}

// serveLane moves the bytes of a further connection until it or the session ends.
func (q *QUIC) serveLane(s *Session, w *tcpWire, fr *frameReader, j joining) {
	context.AfterFunc(s.ctx, func() { w.close(closeEnded, "") })
	run := func(fn func()) {
		if !q.Go(fn) {
			s.End(ErrClosed)
		}
	}
	out := &lanesWriter{w: w.Conn}
	for _, lane := range s.lanes[j.class] {
		if lane.Slot()%j.of == j.slot {
			run(func() { q.writeLane(s, lane, out) })
		}
	}
	run(func() { q.readLane(s, fr, j.class) })
}

// dialAgain returns how the dialler of a connection makes further ones.
func (q *QUIC) dialAgain(target netip.AddrPort, tc *tls.Config) func(context.Context) (*tcpWire, error) {
	return func(ctx context.Context) (*tcpWire, error) { return q.dialTCP(ctx, target, tc.Clone()) }
}
