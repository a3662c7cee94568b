package transport

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/quic-go/quic-go"
	"go.uber.org/zap"

	"github.com/skeindb/skein/keyspace"
)

// Options configure a QUIC bus.
type Options struct {
	Config
	// Listen are the host:port pairs of the listen peer URLs; one UDP socket each.
	Listen []string
	// Security is how peers know each other.
	Security Security
	// HandshakeTimeout bounds how long a dialled node may be silent; an attempt takes
	// twice as long at most. UDP does not tell that nobody listens, so this is also
	// what a dead node costs. Too little refuses peers that are far away. Default 1 s.
	HandshakeTimeout time.Duration
	// IdleTimeout is how long a silent connection lasts. Default 3 s.
	IdleTimeout time.Duration
}

// The codes with which a connection is closed.
const (
	closeShutdown  quic.ApplicationErrorCode = 1 // the node stops; it may come back at once
	closeDuplicate quic.ApplicationErrorCode = 2 // another connection serves
	closeRefused   quic.ApplicationErrorCode = 3 // the Hello was refused
	closeProtocol  quic.ApplicationErrorCode = 4
	closeEnded     quic.ApplicationErrorCode = 5 // given up for another reason
)

// QUIC is the bus of real clusters: an Endpoint whose carrier is QUIC.
type QUIC struct {
	*Endpoint
	opts    Options
	creds   *credentials
	sockets *sockets
	config  *quic.Config
	// greeting bounds the connections that have not told who they are.
	// shaking bounds the TCP connections that have not come through the TLS handshake.
	greeting, shaking chan struct{}

	mu      sync.Mutex // guards what follows
	started bool
	closed  bool
	links   map[keyspace.NodeID]*link
	warned  map[string]bool // what was logged once
}

// maxGreeting bounds the connections that have not told who they are.
const maxGreeting = 256

// NewQUIC binds the sockets and checks the certificates. Nothing is sent or
// answered before Start.
func NewQUIC(opts Options) (*QUIC, error) {
	e, err := NewEndpoint(opts.Config)
	if err != nil {
		return nil, err
	}
	if opts.HandshakeTimeout == 0 {
		opts.HandshakeTimeout = time.Second
	}
	if opts.IdleTimeout == 0 {
		opts.IdleTimeout = 3 * time.Second
	}
	q := &QUIC{
		Endpoint: e, opts: opts,
		greeting: make(chan struct{}, maxGreeting),
		shaking:  make(chan struct{}, maxGreeting),
		links:    map[keyspace.NodeID]*link{},
		warned:   map[string]bool{},
	}
	q.config = quicConfig(&q.cfg, &opts)
	if q.creds, err = newCredentials(&q.cfg, opts.Security); err != nil {
		return nil, err
	}
	key, err := q.creds.resetKey(q.cfg.Node)
	if err != nil {
		return nil, err
	}
	if q.sockets, err = openSockets(opts.Listen, (*quic.StatelessResetKey)(key), q.warnOnce); err != nil {
		return nil, err
	}
	if opts.Security.SelfMade {
		q.log.Warn("peer traffic is NOT AUTHENTICATED: " + cmp.Or(opts.Security.Why, "certificates are self-made") +
			", so anybody who reaches the peer port can pose as a node; use https:// peer URLs with certificates")
	}
	return q, nil
}

// maxStreamWindow bounds what one unread stream pins of its connection's window.
const maxStreamWindow = 4 << 20

// quicConfig returns the parameters of every connection. The connection's window
// exceeds what all of its streams together may hold: else unread data of one class
// would stop the others.
func quicConfig(c *Config, opts *Options) *quic.Config {
	streams := 2
	for _, n := range c.Lanes {
		streams += n
	}
	return &quic.Config{
		Versions:                       []quic.Version{quic.Version1},
		HandshakeIdleTimeout:           opts.HandshakeTimeout,
		MaxIdleTimeout:                 opts.IdleTimeout,
		KeepAlivePeriod:                opts.IdleTimeout / 3,
		InitialStreamReceiveWindow:     1 << 20,
		MaxStreamReceiveWindow:         maxStreamWindow,
		InitialConnectionReceiveWindow: uint64(streams) * maxStreamWindow,
		MaxConnectionReceiveWindow:     uint64(streams) * maxStreamWindow,
		MaxIncomingStreams:             1,
		MaxIncomingUniStreams:          numClasses * maxLanes,
	}
}

// Addrs returns the addresses that the bus listens on, in the order of Listen.
func (q *QUIC) Addrs() []string { return q.sockets.addrs() }

// Start begins to listen and to dial.
func (q *QUIC) Start() error {
	if err := q.Run(); err != nil {
		return err
	}
	for i := range q.sockets.listen {
		ln, err := q.sockets.serve(i, q.creds, q.config)
		if err != nil {
			return fmt.Errorf("transport: listen on %s: %w", q.opts.Listen[i], err)
		}
		q.Go(func() { q.acceptLoop(ln) })
		q.Go(func() { q.acceptTCP(q.sockets.listen[i].tcp) })
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.started = true
	for _, l := range q.links {
		l.start()
	}
	return nil
}

// Close tells the peers, ends every handler's context and waits for all of them.
func (q *QUIC) Close() error {
	q.mu.Lock()
	if q.closed {
		q.mu.Unlock()
		return nil
	}
	q.closed = true
	for _, l := range q.links {
		l.cancel()
	}
	q.mu.Unlock()
	q.Stop()
	err := q.sockets.close()
	q.Wait()
	return err
}

// SetPeer makes a node known by its host:port addresses, or changes them: a
// standing session stays, and the next one goes to the new addresses.
func (q *QUIC) SetPeer(id keyspace.NodeID, addrs []string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed || id == q.Self() {
		return
	}
	l := q.links[id]
	if l == nil {
		q.AddPeer(id)
		l = newLink(q, id)
		q.links[id] = l
		l.setAddrs(addrs)
		if q.started {
			l.start()
		}
		return
	}
	l.setAddrs(addrs)
}

// RemovePeer ends the sessions with a node and refuses it from now on.
func (q *QUIC) RemovePeer(id keyspace.NodeID) {
	q.mu.Lock()
	l := q.links[id]
	delete(q.links, id)
	q.mu.Unlock()
	if l != nil {
		l.cancel()
		q.DropPeer(id)
	}
}

func (q *QUIC) link(id keyspace.NodeID) *link {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.links[id]
}

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

func (q *QUIC) acceptLoop(ln *quic.Listener) {
	for {
		conn, err := ln.Accept(q.ctx)
		if err != nil {
			if q.ctx.Err() == nil {
				q.log.Error("the peer listener ended", zap.Error(err))
			}
			return
		}
		q.bounded(q.greeting, func() { _ = conn.CloseWithError(closeRefused, "too many connections without a hello, or closing") },
			func() { q.accept(&quicWire{Conn: conn}) })
	}
}

// bounded runs fn in a goroutine while it has one of the places, or refuses where none is free.
func (q *QUIC) bounded(places chan struct{}, refuse, fn func()) {
	select {
	case places <- struct{}{}:
	default:
		q.metrics.refusals.WithLabelValues("too many").Inc()
		refuse()
		return
	}
	if !q.Go(func() {
		defer func() { <-places }()
		fn()
	}) {
		<-places
		refuse()
	}
}

// isShutdown says that the peer closed its bus.
func isShutdown(err error) bool {
	ae, ok := errors.AsType[*quic.ApplicationError](err)
	return ok && ae.Remote && ae.ErrorCode == closeShutdown
}

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

// openLane opens a lane's stream when it has something to say, and writes it.
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

// priorityOf returns the urgency of a lane within its connection, 0 the first.
func priorityOf(s *Session, lane *Lane) int8 {
	p := int8(lane.Class()) * 2
	if lane.Class() == ClassRequest && lane.Slot() > 0 && lane.Slot() == len(s.lanes[ClassRequest])-1 {
		p++ // large calls and answers
	}
	return p
}

// writeLane writes batch after batch. Whatever gathers during one write leaves
// with the next.
func (q *QUIC) writeLane(s *Session, lane *Lane, w streamWriter) {
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
			s.End(fmt.Errorf("read class %s: %w", c, err))
			return
		}
	}
}

// endCode returns the code with which a session's connection is closed.
func endCode(err error) quic.ApplicationErrorCode {
	switch {
	case errors.Is(err, ErrClosed):
		return closeShutdown
	case errors.Is(err, errReplaced):
		return closeDuplicate
	case errors.Is(err, errProtocol), errors.Is(err, errMalformed):
		return closeProtocol
	}
	return closeEnded
}

// distinctAddrs returns a copy without repetitions, in the given order.
func distinctAddrs(addrs []string) []string {
	var out []string
	for _, a := range addrs {
		if !slices.Contains(out, a) {
			out = append(out, a)
		}
	}
	return out
}
