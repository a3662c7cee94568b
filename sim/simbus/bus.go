package simbus

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/skeindb/skein/internal/wake"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/transport"
)

// Bus is one node's bus: the methods of *transport.QUIC over the simulated network.
type Bus struct {
	*transport.Endpoint
	net *Network

	// Guarded by net.mu.
	started, crashed bool

	closing sync.Once
}

// NewBus makes the bus of a node. The node may have had one before that was closed or
// has crashed; then cfg has another boot id.
func (n *Network) NewBus(cfg transport.Config) (*Bus, error) {
	e, err := transport.NewEndpoint(cfg)
	if err != nil {
		return nil, err
	}
	return &Bus{Endpoint: e, net: n}, nil
}

// Start puts the node on the network.
func (b *Bus) Start() error {
	if err := b.Run(); err != nil {
		return err
	}
	n := b.net
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.buses[b.Self()] != nil {
		return fmt.Errorf("simbus: node %s is on the network already", b.Self())
	}
	b.started = true
	n.buses[b.Self()] = b
	for _, id := range b.Peers() {
		n.connectLocked(n.pairLocked(b.Self(), id))
	}
	return nil
}

// Close tells the peers, if they can be reached, and waits for every handler.
func (b *Bus) Close() error {
	b.closing.Do(func() {
		n := b.net
		n.mu.Lock()
		if n.buses[b.Self()] == b {
			delete(n.buses, b.Self())
		}
		n.mu.Unlock()
		b.Stop()
		b.Wait()
	})
	return nil
}

// SetPeer makes a node known. Addresses mean nothing here.
func (b *Bus) SetPeer(id keyspace.NodeID, _ []string) {
	if id == b.Self() {
		return
	}
	b.AddPeer(id)
	b.net.mu.Lock()
	defer b.net.mu.Unlock()
	b.net.connectLocked(b.net.pairLocked(b.Self(), id))
}

// RemovePeer ends the sessions with a node and refuses it from now on.
func (b *Bus) RemovePeer(id keyspace.NodeID) { b.DropPeer(id) }

// pair is two nodes and the sessions between them, each with an end at both.
type pair struct {
	ids        direction // from < to
	connecting bool
	ends       [2][2]*transport.Session // kind, then the nodes of ids
}

func (n *Network) pairLocked(a, b keyspace.NodeID) *pair {
	d := direction{min(a, b), max(a, b)}
	p := n.pairs[d]
	if p == nil {
		p = &pair{ids: d}
		n.pairs[d] = p
	}
	return p
}

// Times of the making of a session, in place of handshakes and backoff.
const (
	connectMin    = 2 * time.Millisecond
	connectJitter = 60 * time.Millisecond
)

// connectLocked schedules the missing sessions of a pair, if they can be made. Every
// change that may allow one calls it again.
func (n *Network) connectLocked(p *pair) {
	if p.connecting || !n.canConnectLocked(p) {
		return
	}
	p.connecting = true
	n.clock.AfterFunc(connectMin+time.Duration(n.rand.Int64N(int64(connectJitter))), func() {
		for k := range transport.Kind(len(p.ends)) {
			n.connect(p, k)
		}
		n.mu.Lock()
		p.connecting = false
		missing := !p.standsLocked(transport.KindMain) || !p.standsLocked(transport.KindBulk)
		if missing {
			n.connectLocked(p)
		}
		n.mu.Unlock()
	})
}

func (n *Network) canConnectLocked(p *pair) bool {
	a, b := n.buses[p.ids.from], n.buses[p.ids.to]
	if a == nil || b == nil || !knows(a, b) || !knows(b, a) {
		return false
	}
	for _, id := range []keyspace.NodeID{p.ids.from, p.ids.to} {
		if n.paused[id] {
			return false
		}
	}
	return !n.cut[p.ids] && !n.cut[direction{p.ids.to, p.ids.from}]
}

func knows(a, b *Bus) bool {
	for _, id := range a.Peers() {
		if id == b.Self() {
			return true
		}
	}
	return false
}

// standsLocked says whether both ends of a session live.
func (p *pair) standsLocked(k transport.Kind) bool {
	for _, s := range p.ends[k] {
		if s == nil || ended(s) {
			return false
		}
	}
	return true
}

func ended(s *transport.Session) bool {
	select {
	case <-s.Done():
		return true
	default:
		return false
	}
}

// connect makes one session between the nodes of a pair.
func (n *Network) connect(p *pair, k transport.Kind) {
	n.mu.Lock()
	if !n.canConnectLocked(p) || p.standsLocked(k) {
		n.mu.Unlock()
		return
	}
	buses := [2]*Bus{n.buses[p.ids.from], n.buses[p.ids.to]}
	n.made++
	number := n.made
	n.mu.Unlock()
	a, b := met(buses[0].Config(), buses[1].Config()), met(buses[1].Config(), buses[0].Config())
	if !a || !b {
		return
	}
	j := &joint{net: n, pair: p}
	for side := range buses {
		s, err := n.attach(j, buses, side, k)
		if err != nil {
			j.end(side, err)
			return
		}
		j.set(side, s)
	}
	n.mu.Lock()
	p.ends[k] = j.both()
	n.mu.Unlock()
	n.stats.sessions.Add(1)
	ends := j.both()
	for side, d := range []direction{p.ids, {p.ids.to, p.ids.from}} {
		for _, l := range ends[side].Lanes() {
			w := &wire{
				net: n, d: d, buses: buses, class: l.Class(), rand: n.laneRand(d, number, l),
				arrived: wake.New(), room: wake.New(),
			}
			from, to := ends[side], ends[1-side]
			if !buses[side].Go(func() { w.carry(from, l) }) {
				from.End(transport.ErrClosed)
			}
			if !buses[1-side].Go(func() { w.deliver(to) }) {
				to.End(transport.ErrClosed)
			}
		}
	}
}

// met tells a node of its peer's recovery, as a Hello does, and returns whether there may be a session.
func met(me, other transport.Config) bool {
	if me.Recovery == nil {
		return true
	}
	plan, together := uint64(0), false
	if other.Recovery != nil {
		plan, together = other.Recovery.Now()
	}
	return me.Recovery.Meet(other.Node, plan, together)
}

func (n *Network) attach(j *joint, buses [2]*Bus, side int, k transport.Kind) (*transport.Session, error) {
	me, other := buses[side], buses[1-side].Config()
	return me.Attach(transport.SessionConfig{
		Peer: other.Node, Boot: other.Boot, Kind: k,
		MaxMessageBytes: other.MaxMessageBytes, StreamWindowBytes: other.StreamWindowBytes,
		Ended: func(err error) { j.ended(me, side, err) },
	})
}

// joint is the two ends of one session.
type joint struct {
	net  *Network
	pair *pair

	mu   sync.Mutex
	ends [2]*transport.Session
	over [2]bool
}

func (j *joint) set(side int, s *transport.Session) {
	j.mu.Lock()
	j.ends[side] = s
	over := j.over[1-side]
	j.mu.Unlock()
	if over {
		s.End(errClosedByPeer)
	}
}

func (j *joint) both() [2]*transport.Session {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.ends
}

// end ends one side, if it stands.
func (j *joint) end(side int, err error) {
	j.mu.Lock()
	j.over[side] = true
	other := j.ends[1-side]
	j.mu.Unlock()
	if other != nil {
		other.End(err)
	}
}

// errClosedByPeer says that the other end closed the session.
var errClosedByPeer = errors.New("simbus: closed by the peer")

// ended tells the other end, if the message gets through, and has a new session made.
func (j *joint) ended(me *Bus, side int, _ error) {
	n, d := j.net, j.pair.ids
	if side == 1 {
		d = direction{d.to, d.from}
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.connectLocked(j.pair)
	if me.crashed {
		return
	}
	f, ok := n.faults[d]
	if !ok {
		f = n.standard
	}
	n.clock.AfterFunc(f.Delay.draw(n.rand), func() {
		if !n.path(d, [2]*Bus{me, me}).cut {
			j.end(side, errClosedByPeer)
		}
	})
}
