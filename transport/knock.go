package transport

import (
	"context"
	"encoding/binary"
	"net"
	"net/netip"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
)

// A node that has no session with a peer knocks: it sends a small datagram to every address of the peer that it has found, far
// more often than it dials. A peer that has lost its disk, and is the only founder of the cluster, thereby learns within a
// moment that somebody knows it (Config.Knocked). A knock proves nothing. It is a reason to wait for the dial behind it.

// KnockEvery lies between two knocks.
const KnockEvery = 100 * time.Millisecond

// knockBytes is the size of a knock: kind, cluster, who knocks, and whom it looks for. By its first bits it is no QUIC packet.
const knockBytes = 1 + 3*8

func knockFrame(cluster keyspace.ClusterID, from, to keyspace.NodeID) []byte {
	be := binary.BigEndian
	b := append(make([]byte, 0, knockBytes), frameKnock)
	b = be.AppendUint64(b, uint64(cluster))
	b = be.AppendUint64(b, uint64(from))
	return be.AppendUint64(b, uint64(to))
}

// parseKnock returns who knocks, and false for what is no knock at this node of this cluster.
func parseKnock(b []byte, cluster keyspace.ClusterID, self keyspace.NodeID) (from keyspace.NodeID, ok bool) {
	be := binary.BigEndian
	if len(b) < knockBytes || b[0] != frameKnock || keyspace.ClusterID(be.Uint64(b[1:])) != cluster || keyspace.NodeID(be.Uint64(b[17:])) != self {
		return 0, false
	}
	return keyspace.NodeID(be.Uint64(b[9:])), true
}

// knock knocks until there is a session or ctx ends.
func (l *link) knock(ctx context.Context) {
	b := knockFrame(l.q.cfg.Cluster, l.q.cfg.Node, l.id)
	for clock.Sleep(ctx, l.q.clock, KnockEvery) == nil && l.session(KindMain) == nil {
		for _, to := range l.found() {
			if tr, err := l.q.sockets.forTarget(to.Addr()); err == nil {
				_, _ = tr.WriteTo(b, net.UDPAddrFromAddrPort(to)) // the next one may pass
			}
		}
	}
}

// note keeps what an address of the peer was resolved to.
func (l *link) note(addr string, targets []netip.AddrPort) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.targets == nil {
		l.targets = map[string][]netip.AddrPort{}
	}
	l.targets[addr] = targets
}

// found returns where the peer may be, as far as its addresses are no names or were resolved by an attempt.
func (l *link) found() (all []netip.AddrPort) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, addr := range l.addrs {
		if target, err := netip.ParseAddrPort(addr); err == nil {
			all = append(all, target)
		} else {
			all = append(all, l.targets[addr]...)
		}
	}
	return all
}

// hearKnocks tells of the knocks of nodes that are no peers, until nobody wants to know.
func (q *QUIC) hearKnocks(s *socket) {
	b := make([]byte, 2*knockBytes)
	for {
		n, _, err := s.transport.ReadNonQUICPacket(q.ctx, b)
		if err != nil {
			return
		}
		from, ok := parseKnock(b[:n], q.cfg.Cluster, q.cfg.Node)
		if ok && q.link(from) == nil && !q.cfg.Knocked(from) {
			return
		}
	}
}
