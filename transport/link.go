package transport

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/certs"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/wake"
	"github.com/skeindb/skein/keyspace"
)

// link makes the sessions with one peer and keeps them up. Both nodes may dial. A
// connection becomes a session in three steps: the dialler's Hello, the accepter's
// answer, the dialler's confirmation.
//
// Two connections made at the same time are decided so: the node with the lower id
// refuses a Hello while its own awaits the answer. The node with the higher id does not
// confirm its own connection once it has answered a Hello. So a confirmation is always
// right and replaces an older session: the dialler has lost that session, or it would
// not have dialled.
type link struct {
	q      *QUIC
	id     keyspace.NodeID
	ctx    context.Context
	cancel context.CancelFunc
	kick   [numKinds]wake.Signal // check again whether to dial
	// noBulk counts failed attempts in a row to make a bulk session beside a main one.
	// It belongs to the bulk dialler.
	noBulk int

	mu    sync.Mutex // guards what follows
	addrs []string
	moved uint64 // counts changes of addrs
	// targets are what addrs were resolved to last.
	targets map[string][]netip.AddrPort
	slots   [numKinds]slot
}

// slot is the state of the handshakes for one kind of session.
type slot struct {
	helloSent bool   // this node's Hello awaits its answer
	accepting wire   // whose Hello was answered last and awaits confirmation
	lastEnd   error  // why the last session ended
	abort     func() // ends the attempt under way; nil without one
}

func newLink(q *QUIC, id keyspace.NodeID) *link {
	l := &link{q: q, id: id}
	l.ctx, l.cancel = context.WithCancel(q.ctx)
	for k := range l.kick {
		l.kick[k] = wake.New()
	}
	return l
}

func (l *link) setAddrs(addrs []string) {
	l.mu.Lock()
	l.addrs, l.targets = distinctAddrs(addrs), nil
	l.moved++
	for k := range l.slots {
		if abort := l.slots[k].abort; abort != nil {
			abort() // the attempt may dial an address that is no longer the peer's
		}
	}
	l.mu.Unlock()
	for k := range l.kick {
		l.kick[k].Set()
	}
}

func (l *link) session(k Kind) *Session {
	if p := l.q.peer(l.id); p != nil {
		return p.sessions[k].Load()
	}
	return nil
}

// addrsMoved returns how often the addresses were set.
func (l *link) addrsMoved() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.moved
}

func (q *QUIC) hello(k Kind, to keyspace.NodeID, v verdict) *hello {
	h := &hello{
		verdict: v, kind: k, cluster: q.cfg.Cluster, node: q.cfg.Node, to: to, boot: q.cfg.Boot,
		maxMessage: uint32(q.cfg.MaxMessageBytes), window: uint32(q.cfg.StreamWindowBytes),
	}
	if q.cfg.Version != nil {
		h.version, h.reads = q.cfg.Version.Now()
		if q.cfg.Version.Fresh() {
			h.features |= featureFresh
		}
	}
	if q.cfg.Recovery != nil {
		together := false
		if h.plan, together = q.cfg.Recovery.Now(); together {
			h.features |= featureTogether
		}
	}
	return h
}

// recovered compares a peer's recovery with this node's. The peer has proven who it is.
func (q *QUIC) recovered(h *hello) verdict {
	if q.cfg.Recovery != nil && !q.cfg.Recovery.Meet(h.node, h.plan, h.features&featureTogether != 0) {
		return verdictRecovery
	}
	return verdictWelcome
}

// meet compares a peer's version with this node's, before there is a session. A node that was away
// while the cluster was upgraded learns the version here, before it sends or stores anything. Its
// peers may not read the version before any more; those that do need not wait until it is noted, as with
// a full disk. A new node tells nobody a version: what its build
// begins with may be above the cluster's.
func (q *QUIC) meet(h *hello) verdict {
	if q.cfg.Version == nil {
		return verdictWelcome
	}
	own, reads := q.cfg.Version.Now()
	fresh, peerFresh := q.cfg.Version.Fresh(), h.features&featureFresh != 0
	if h.version > reads.Newest || own > h.reads.Newest || h.version > own && peerFresh && !fresh || own > h.version && fresh && !peerFresh {
		q.log.Warn("a peer's build is too old or too new for this one; start builds that both read the cluster's version",
			zap.Stringer("peer", h.node), zap.Uint32("peer-writes", uint32(h.version)), zap.Stringer("peer-reads", h.reads),
			zap.Uint32("writes", uint32(own)), zap.Stringer("reads", reads))
		return verdictVersion
	}
	if h.version > own {
		if err := q.cfg.Version.Raise(h.version); err != nil {
			q.log.Warn("the cluster's version cannot be noted yet", zap.Stringer("peer", h.node), zap.Error(err))
			if own < h.reads.Oldest {
				return verdictClosing
			}
			// The node is one that has not heard of it yet. The map will tell it again.
		}
	}
	return verdictWelcome
}

// limitTime closes the connection unless the returned timer is stopped in time.
func (q *QUIC) limitTime(conn wire) clock.Timer {
	return q.clock.AfterFunc(2*q.opts.HandshakeTimeout, func() {
		conn.close(closeRefused, errTooLate.Error())
	})
}

// checkCertificate compares a peer's Hello with its certificate, if it showed one.
func (q *QUIC) checkCertificate(conn wire, h *hello) error {
	shown := conn.certificates()
	if len(shown) == 0 {
		return nil
	}
	id, proven, err := provenIdentity(shown[0])
	switch {
	case err != nil:
		return err
	case proven:
		return q.creds.fits(id, h.node)
	case q.creds.selfMade == nil:
		q.warnOnce("trusted", "node ids are TRUSTED, NOT PROVEN: the certificates of peers do not name their node by a URI, so each holder of a certificate of the authority can pose as any node",
			zap.Stringer("peer", h.node), zap.Stringer("expected", certs.NodeURI("NAME")), zap.String("or", IdentityURI(h.cluster, h.node)))
	}
	return nil
}

// attach makes the connection the peer's session. dialled says that this node has made the connection.
func (l *link) attach(conn wire, fr *frameReader, h *hello, dialled bool) (*Session, error) {
	q, k := l.q, h.kind
	s, err := q.Attach(SessionConfig{
		Peer: l.id, Boot: h.boot, Kind: k,
		MaxMessageBytes: int(h.maxMessage), StreamWindowBytes: int(h.window), Reads: h.reads,
		Holds: func() error { return q.creds.holds(conn.certificates(), dialled) },
		Ended: func(err error) {
			l.mu.Lock()
			l.slots[k].lastEnd = err
			l.mu.Unlock()
			conn.close(endCode(err), "")
			l.kick[k].Set()
		},
	})
	if err != nil {
		return nil, err
	}
	q.log.Info("session with peer", zap.Stringer("peer", l.id), zap.Stringer("boot", h.boot), zap.Stringer("kind", k),
		zap.Stringer("remote", conn.RemoteAddr()))
	conn.serve(q, fr, s)
	for k := range l.kick {
		l.kick[k].Set() // a main session allows the bulk one
	}
	return s, nil
}

// certificateCheckInterval is how long a session may outlive the peer's certificate. A check costs about as much
// as the verification in a handshake.
const certificateCheckInterval = time.Minute

// checkEveryMinute ends the sessions with peers whose certificates do not hold any more: they have ended, or
// are revoked, or the authority has been exchanged.
func (q *QUIC) checkEveryMinute() {
	for clock.Sleep(q.ctx, q.clock, certificateCheckInterval) == nil {
		for _, p := range *q.table.Load() {
			for k := range p.sessions {
				s := p.sessions[k].Load()
				if s == nil || s.cfg.Holds == nil {
					continue
				}
				if err := s.cfg.Holds(); err != nil {
					q.log.Warn("ended a session with a peer, whose certificate does not hold any more", zap.Stringer("peer", p.id), zap.Stringer("kind", Kind(k)), zap.Error(err))
					s.End(fmt.Errorf("%w: %w", errIdentity, err))
				}
			}
		}
	}
}

func (q *QUIC) link(id keyspace.NodeID) *link {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.links[id]
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
