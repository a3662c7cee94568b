package transport

import (
	"cmp"
	"fmt"
	"sync"
	"time"

	"github.com/quic-go/quic-go"

	"github.com/skeindb/skein/keyspace"
)

// Options configure a QUIC bus.
type Options struct {
	Config
	// Listen are the host:port pairs of the listen peer URLs; one UDP socket each.
	Listen []string
	// Security is how peers know each other.
	Security Security
	// HandshakeTimeout bounds how long a dialled node may be silent; an attempt takes at
	// most twice as long. UDP does not report that nobody listens, so this is also the
	// cost of a dead node. Too little refuses peers that are far away. Default 1 s.
	HandshakeTimeout time.Duration
	// IdleTimeout is how long a silent connection lasts. Default 3 s.
	IdleTimeout time.Duration
	// Carrier is what the main sessions go over that this node dials. It accepts both.
	Carrier Carrier
}

// A Carrier is what main sessions go over.
type Carrier uint8

const (
	// CarrierQUIC is QUIC over UDP.
	CarrierQUIC Carrier = iota
	// CarrierTLS is TLS over TCP, a connection for each lane: for networks that block UDP.
	CarrierTLS
)

// QUIC is the bus of real clusters: an Endpoint whose carrier is QUIC.
type QUIC struct {
	*Endpoint
	opts    Options
	creds   *credentials
	sockets *sockets
	// unidentified bounds the connections that have not sent a valid Hello. tlsPending
	// bounds the TCP connections that have not finished the TLS handshake.
	unidentified, tlsPending chan struct{}
	meetings                 meetings

	mu      sync.Mutex // guards what follows
	started bool
	closed  bool
	links   map[keyspace.NodeID]*link
	warned  map[string]bool // warnings that were logged once
}

// maxUnidentified bounds the connections that have not sent a valid Hello.
const maxUnidentified = 256

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
		unidentified: make(chan struct{}, maxUnidentified),
		tlsPending:   make(chan struct{}, maxUnidentified),
		links:        map[keyspace.NodeID]*link{},
		warned:       map[string]bool{},
	}
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

// Addrs returns the addresses that the bus listens on, in the order of Listen.
func (q *QUIC) Addrs() []string { return q.sockets.addrs() }

// Start begins to listen and to dial.
func (q *QUIC) Start() error {
	if err := q.Run(); err != nil {
		return err
	}
	for i := range q.sockets.listen {
		ln, err := q.sockets.serve(i, q.creds, q.config())
		if err != nil {
			return fmt.Errorf("transport: listen on %s: %w", q.opts.Listen[i], err)
		}
		q.Go(func() { q.acceptLoop(ln) })
		q.Go(func() { q.acceptTCP(q.sockets.listen[i].tcp) })
		if q.cfg.Knocked != nil {
			q.Go(func() { q.hearKnocks(q.sockets.listen[i]) })
		}
	}
	if q.creds.selfMade == nil {
		q.Go(q.checkEveryMinute)
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

// SetPeer makes a node known by its host:port addresses, or changes them. An
// established session stays; the next one goes to the new addresses.
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
