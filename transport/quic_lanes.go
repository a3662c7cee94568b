package transport

import (
	"context"
	"fmt"
	"sync"

	"github.com/quic-go/quic-go"
	"go.uber.org/zap"
)

// warnOnce logs a warning the first time that its key is seen.
func (q *QUIC) warnOnce(key, msg string, fields ...zap.Field) {
	q.mu.Lock()
	again := q.warned[key]
	q.warned[key] = true
	q.mu.Unlock()
	if !again {
		q.log.Warn(msg, fields...)
	}
}

func (w *quicWire) serve(q *QUIC, fr *frameReader, s *Session) { q.serve(w.Conn, w.ctl, fr, s) }

// serve moves the bytes of a session over its connection until either ends.
func (q *QUIC) serve(conn *quic.Conn, ctl *quic.Stream, fr *frameReader, s *Session) {
	fr.max = frameLimit(&q.cfg)
	if !conn.ConnectionState().GSO {
		q.warnOnce("gso", "the network interface offers no segmentation offload for UDP: the bus takes twice the CPU", zap.Stringer("peer", s.Peer()))
	}
	run := func(fn func()) {
		if !q.Go(fn) {
			s.End(ErrClosed)
		}
	}
	for _, lane := range s.Lanes() {
		if lane.Class() == ClassControl {
			ctl.SetPriority(0, true)
			run(func() { q.writeLane(s, lane, ctl) })
			continue
		}
		run(func() { q.openLane(conn, s, lane) })
	}
	run(func() { q.readLane(s, fr, ClassControl) })
	run(func() { q.acceptLanes(conn, s) })
	run(func() {
		select {
		case <-conn.Context().Done():
			s.End(context.Cause(conn.Context()))
		case <-s.Done():
		}
	})
}

// frameLimit is the largest body of a frame that a peer may send.
func frameLimit(c *Config) int { return c.MaxMessageBytes + maxErrorBytes + maxHeaderBytes }

// streamWriter is the sending half of a QUIC stream.
type streamWriter interface {
	Write(b []byte) (int, error)
}

// openLane opens a lane's stream with the first batch, and writes the batches.
func (q *QUIC) openLane(conn *quic.Conn, s *Session, lane *Lane) {
	first, ok := lane.Take()
	if !ok {
		return
	}
	str, err := conn.OpenUniStreamSync(s.ctx)
	if err == nil {
		str.SetPriority(priorityOf(s, lane), true)
		_, err = str.Write(append(appendLane(make([]byte, 0, 16+len(first.Bytes())), lane.Class(), lane.Slot()), first.Bytes()...))
	}
	first.Done()
	if err != nil {
		s.End(fmt.Errorf("open lane %s/%d: %w", lane.Class(), lane.Slot(), err))
		return
	}
	q.writeLane(s, lane, str)
}

// priorityOf returns the urgency of a lane within its connection, 0 the highest.
func priorityOf(s *Session, lane *Lane) int8 {
	p := int8(lane.Class()) * 2
	if lane.Class() == ClassRequest && lane.Slot() > 0 && lane.Slot() == len(s.lanes[ClassRequest])-1 {
		p++ // large calls and answers
	}
	return p
}

// writeLane writes batch after batch. Frames that gather during one write leave with
// the next.
func (q *QUIC) writeLane(s *Session, lane *Lane, w streamWriter) {
	if w, ok := w.(interface{ TryWriteAll(b []byte) error }); ok {
		lane.setTryWrite(w.TryWriteAll)
	}
	for {
		b, ok := lane.Take()
		if !ok {
			return
		}
		_, err := w.Write(b.Bytes())
		b.Done()
		if err != nil {
			s.End(fmt.Errorf("write lane %s/%d: %w", lane.Class(), lane.Slot(), err))
			return
		}
	}
}

func (q *QUIC) acceptLanes(conn *quic.Conn, s *Session) {
	var (
		mu   sync.Mutex
		seen [numClasses][maxLanes]bool // guarded by mu
	)
	first := func(c Class, slot int) bool {
		mu.Lock()
		defer mu.Unlock()
		again := seen[c][slot]
		seen[c][slot] = true
		return !again
	}
	for {
		str, err := conn.AcceptUniStream(s.ctx)
		if err != nil {
			s.End(err)
			return
		}
		q.Go(func() {
			fr := newFrameReader(str, frameLimit(&q.cfg))
			b, err := fr.body()
			if err != nil {
				s.End(fmt.Errorf("lane header: %w", err))
				return
			}
			c, slot, err := parseLane(b)
			if err == nil && (kindOf(c) != s.cfg.Kind || c == ClassControl || !first(c, slot)) {
				err = fmt.Errorf("%w: lane %s/%d on the %s session", errProtocol, c, slot, s.cfg.Kind)
			}
			if err != nil {
				s.End(err)
				return
			}
			q.readLane(s, fr, c)
		})
	}
}

// readLane receives the frames of one lane.
func (q *QUIC) readLane(s *Session, fr *frameReader, c Class) {
	if !s.BeginRead(c) {
		return
	}
	defer s.EndRead(c)
	m := &q.metrics.class[c]
	frames := 0
	for {
		f, err := fr.next()
		if err == nil {
			frames++
			err = s.receive(c, &f)
		}
		if fr.r.Buffered() == 0 || err != nil {
			m.framesReceived.Add(float64(frames))
			m.bytesReceived.Add(float64(fr.taken))
			s.received.Add(float64(fr.taken))
			frames, fr.taken = 0, 0
		}
		if err != nil {
			// The end of a connection is no clean end of its streams.
			s.End(fmt.Errorf("read class %s: %w", c, unexpectedEnd(err)))
			return
		}
	}
}
