package transport

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/quic-go/quic-go"
	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
)

// link makes the sessions with one peer and keeps them up. Both nodes may dial.
// A connection becomes a session in three steps: the dialler's Hello, the other's
// answer, the dialler's confirmation. Of two connections that are made at the same
// time one wins by this rule: the node with the lower id refuses a Hello while its
// own awaits the answer, and the node with the higher id confirms nothing of its
// own once it has answered a Hello. A confirmation is therefore always right, and
// replaces whatever stood: the dialler has lost that, or would not have dialled.
type link struct {
	q      *QUIC
	id     keyspace.NodeID
	ctx    context.Context
	cancel context.CancelFunc
	kick   [numKinds]chan struct{} // capacity 1: look again whether to dial
	// noBulk counts attempts in a row to make a bulk session that failed beside a main one.
	// It belongs to the bulk dialler.
	noBulk int

	mu    sync.Mutex // guards what follows
	addrs []string
	moved uint64 // counts changes of addrs
	slots [numKinds]slot
}

// slot is the state of the handshakes for one kind of session.
type slot struct {
	greeting  bool   // this node's Hello awaits its answer
	accepting wire   // whose Hello was answered last and awaits confirmation
	lastEnd   error  // why the last session ended
	giveUp    func() // ends the attempt under way; nil without one
}

func newLink(q *QUIC, id keyspace.NodeID) *link {
	l := &link{q: q, id: id}
	l.ctx, l.cancel = context.WithCancel(q.ctx)
	for k := range l.kick {
		l.kick[k] = make(chan struct{}, 1)
	}
	return l
}

func (l *link) start() {
	for k := range Kind(numKinds) {
		l.q.Go(func() { l.dialLoop(k) })
	}
}

func (l *link) setAddrs(addrs []string) {
	l.mu.Lock()
	l.addrs = distinctAddrs(addrs)
	l.moved++
	for k := range l.slots {
		if giveUp := l.slots[k].giveUp; giveUp != nil {
			giveUp() // where it dials, nobody may be any more
		}
	}
	l.mu.Unlock()
	for k := range l.kick {
		wake(l.kick[k])
	}
}

func (l *link) session(k Kind) *Session {
	if p := l.q.peer(l.id); p != nil {
		return p.sessions[k].Load()
	}
	return nil
}

// Times of the dialler. The node with the higher id lets the other one begin.
const (
	firstDelay     = 10 * time.Millisecond
	yieldDelay     = 60 * time.Millisecond
	backoffMin     = 50 * time.Millisecond
	backoffMax     = 2 * time.Second
	misconfigDelay = 5 * time.Second
)

// dialLoop dials whenever a session is missing.
func (l *link) dialLoop(k Kind) {
	for l.awaitNeed(k) {
		if !l.mayDialAtOnce(k) {
			delay := jitter(firstDelay)
			if l.id < l.q.Self() {
				delay += yieldDelay
			}
			if l.sleep(k, delay, l.addrsMoved()) {
				continue
			}
		}
		l.dialUntilServed(k)
	}
}

// dialUntilServed makes attempts until a session stands, whoever made it, or the
// addresses change.
func (l *link) dialUntilServed(k Kind) {
	backoff := backoffMin
	for tries := 0; l.ctx.Err() == nil; tries++ {
		moved := l.addrsMoved()
		s, err := l.dialNext(k, tries)
		if err == nil {
			if k == KindBulk {
				l.noBulk = 0
			}
			select {
			case <-s.Done():
			case <-l.ctx.Done():
			}
			return
		}
		if l.ctx.Err() != nil || l.sleep(k, l.dialFailed(k, err, backoff), moved) {
			return
		}
		backoff = min(2*backoff, backoffMax)
	}
}

// mayDialAtOnce says that the last session ended because the peer restarts: it is
// there again, or will be soon.
func (l *link) mayDialAtOnce(k Kind) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	err := l.slots[k].lastEnd
	l.slots[k].lastEnd = nil
	if _, ok := errors.AsType[*quic.StatelessResetError](err); ok {
		return true
	}
	return isShutdown(err)
}

// awaitNeed waits until a session is missing and nobody makes one. It returns
// false at the link's end.
func (l *link) awaitNeed(k Kind) bool {
	for l.ctx.Err() == nil {
		s := l.session(k)
		l.mu.Lock()
		// A peer without an address may only come by itself.
		wait := l.slots[k].accepting != nil || len(l.addrs) == 0
		l.mu.Unlock()
		if s == nil && !wait && (k == KindMain || l.session(KindMain) != nil) {
			return true
		}
		var ended <-chan struct{}
		if s != nil {
			ended = s.Done()
		}
		select {
		case <-l.kick[k]:
		case <-ended:
		case <-l.ctx.Done():
		}
	}
	return false
}

// addrsMoved returns how often the addresses were set.
func (l *link) addrsMoved() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.moved
}

// sleep waits. It says whether it was cut short by a session, or by addresses that
// were set after moved was read.
func (l *link) sleep(k Kind, d time.Duration, moved uint64) bool {
	t := l.q.clock.NewTimer(d)
	defer t.Stop()
	for {
		if l.addrsMoved() != moved || l.session(k) != nil {
			return true
		}
		select {
		case <-t.C():
			return false
		case <-l.ctx.Done():
			return false
		case <-l.kick[k]:
		}
	}
}

// dialFailed logs and counts, and returns how long to wait.
func (l *link) dialFailed(k Kind, err error, backoff time.Duration) time.Duration {
	kind, delay := "unreachable", jitter(backoff)
	te, isTransport := errors.AsType[*quic.TransportError](err)
	re, isRefusal := errors.AsType[*refusalError](err)
	switch {
	case isRefusal && re.verdict == verdictDuplicate:
		return yieldDelay
	case isRefusal && re.verdict.lasting(), errors.Is(err, errIdentity):
		kind, delay = "refused", misconfigDelay
		l.q.log.Error("a peer does not fit: check cluster, peer addresses and certificates", zap.Stringer("peer", l.id), zap.Error(err))
	case isTransport && te.ErrorCode.IsCryptoError(), isTLS(err):
		kind, delay = "tls", misconfigDelay
		l.q.log.Error("the TLS handshake with a peer failed", zap.Stringer("peer", l.id), zap.Error(err))
	case isRefusal:
		kind = "refused"
	}
	if k == KindBulk && kind == "unreachable" {
		l.bulkFailed(err)
	}
	l.q.metrics.dialFailures.WithLabelValues(kind).Inc()
	l.q.log.Debug("dial failed", zap.Stringer("peer", l.id), zap.Stringer("kind", k), zap.Error(err), zap.Duration("again_in", delay))
	return delay
}

// noBulkTold is after how many attempts it is told that a peer has no bulk session though it
// has a main one. They take longer than it takes to notice that the peer is down.
const noBulkTold = 12

// bulkFailed tells of a peer that is reached by UDP alone.
func (l *link) bulkFailed(err error) {
	if l.session(KindMain) == nil {
		l.noBulk = 0
		return
	}
	if l.noBulk++; l.noBulk == noBulkTold {
		l.q.log.Error("a peer's port does not answer to TCP, so that no range is copied to it or from it: open peer ports for TCP as well as UDP",
			zap.Stringer("peer", l.id), zap.Error(err))
	}
}

// jitter returns a random time up to d, at least 1 ms.
func jitter(d time.Duration) time.Duration {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails since Go 1.24
	return time.Millisecond + time.Duration(binary.BigEndian.Uint64(b[:])%uint64(d))
}

// refusalError is a refused Hello.
type refusalError struct {
	verdict verdict
}

func (e *refusalError) Error() string { return "refused: " + e.verdict.String() }

// dialNext tries the peer's addresses by turns, and so the addresses that the name
// in each of them resolves to.
func (l *link) dialNext(k Kind, tries int) (*Session, error) {
	l.mu.Lock()
	addrs := l.addrs
	l.mu.Unlock()
	if len(addrs) == 0 {
		return nil, errors.New("no address")
	}
	return l.dial(k, addrs[tries%len(addrs)], tries/len(addrs))
}

// dial makes one attempt.
func (l *link) dial(k Kind, addr string, turn int) (*Session, error) {
	q := l.q
	ctx, cancel := context.WithTimeout(l.ctx, 2*q.opts.HandshakeTimeout)
	defer cancel()
	l.setGiveUp(k, cancel)
	defer l.setGiveUp(k, nil)
	host, targets, err := resolve(ctx, addr)
	if err != nil {
		return nil, err
	}
	target := targets[turn%len(targets)]
	tc, err := q.creds.dialling(host, l.id)
	if err != nil {
		return nil, err
	}
	conn, err := q.connect(ctx, k, target, tc)
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w", addr, err)
	}
	stop := context.AfterFunc(ctx, func() { conn.close(closeEnded, "given up") })
	defer stop()
	s, err := l.greet(conn, k, stop)
	if err != nil {
		// The peer's own reason, if it gave one, says more than a failed read.
		if cause := conn.cause(); cause != nil {
			err = fmt.Errorf("%w (%w)", err, cause)
		}
		conn.close(closeEnded, "no session")
		return nil, fmt.Errorf("dial %s: %w", addr, err)
	}
	return s, nil
}

// connect makes a connection of the carrier that the kind of session wants.
func (q *QUIC) connect(ctx context.Context, k Kind, target netip.AddrPort, tc *tls.Config) (wire, error) {
	if k == KindBulk {
		w, err := q.dialTCP(ctx, target, tc)
		if err != nil {
			return nil, err // no wire, not a nil one
		}
		return w, nil
	}
	tr, err := q.sockets.forTarget(target.Addr())
	if err != nil {
		return nil, err
	}
	conn, err := tr.Dial(ctx, net.UDPAddrFromAddrPort(target), tc, q.config)
	if err != nil {
		return nil, err
	}
	return &quicWire{Conn: conn}, nil
}

func (l *link) setGiveUp(k Kind, giveUp func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.slots[k].giveUp = giveUp
}

func (q *QUIC) hello(k Kind, to keyspace.NodeID, v verdict) *hello {
	return &hello{
		verdict: v, kind: k, cluster: q.cfg.Cluster, node: q.cfg.Node, to: to, boot: q.cfg.Boot,
		maxMessage: uint32(q.cfg.MaxMessageBytes), window: uint32(q.cfg.StreamWindowBytes),
	}
}

// errTooLate says that a Hello or its answer took too long.
var errTooLate = errors.New("no hello in time")

// limitTime closes the connection unless the returned timer is stopped in time.
func (q *QUIC) limitTime(conn wire) clock.Timer {
	return q.clock.AfterFunc(2*q.opts.HandshakeTimeout, func() {
		conn.close(closeRefused, errTooLate.Error())
	})
}

// greet is the dialler's side of the making of a session. keep says whether the attempt was
// not given up, and it cannot be any more then: what stands is a session.
func (l *link) greet(conn wire, k Kind, keep func() bool) (*Session, error) {
	q := l.q
	if !l.beginGreet(k) {
		return nil, &refusalError{verdictDuplicate}
	}
	defer func() {
		l.mu.Lock()
		l.slots[k].greeting = false
		l.mu.Unlock()
	}()
	limit := q.limitTime(conn)
	defer limit.Stop()
	ctl, err := conn.control(q.ctx, true)
	if err != nil {
		return nil, err
	}
	if _, err := ctl.Write(helloFrame(frameHello, q.hello(k, l.id, verdictWelcome))); err != nil {
		return nil, err
	}
	fr := newFrameReader(ctl, maxHelloBytes)
	b, err := fr.body()
	if err != nil {
		return nil, err
	}
	answer, err := parseHello(b, frameAnswer)
	if err != nil {
		return nil, err
	}
	if err := q.checkAnswer(conn, &answer, l.id); err != nil {
		return nil, err
	}
	if l.served(k) {
		return nil, &refusalError{verdictDuplicate}
	}
	if _, err := ctl.Write(appendConfirm(nil)); err != nil {
		return nil, err
	}
	if !limit.Stop() || !keep() {
		return nil, errTooLate
	}
	answer.kind = k
	return l.attach(conn, fr, &answer)
}

// served says that the peer's own connection serves or is about to: it came in while
// this node dialled.
func (l *link) served(k Kind) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.slots[k].accepting != nil || l.session(k) != nil
}

// beginGreet says whether a Hello may be sent.
func (l *link) beginGreet(k Kind) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.slots[k].accepting != nil || l.session(k) != nil {
		return false
	}
	l.slots[k].greeting = true
	return true
}

// checkAnswer compares an answer with what was wanted.
func (q *QUIC) checkAnswer(conn wire, answer *hello, want keyspace.NodeID) error {
	if answer.verdict != verdictWelcome {
		return &refusalError{answer.verdict}
	}
	if answer.cluster != q.cfg.Cluster || answer.node != want {
		return fmt.Errorf("%w: node %s of cluster %s answers, wanted %s of %s", errIdentity, answer.node, answer.cluster, want, q.cfg.Cluster)
	}
	return q.checkCertificate(conn, answer)
}

func (q *QUIC) checkCertificate(conn wire, h *hello) error {
	proven, err := checkIdentity(conn.certificates(), h.cluster, h.node)
	if err == nil && !proven && q.creds.selfMade == nil {
		q.warnOnce("trusted", "node ids are TRUSTED, NOT PROVEN: the certificates of peers do not name their node by a "+URIScheme+"://CLUSTER/NODE URI, so each holder of a certificate of the authority can pose as any node",
			zap.Stringer("peer", h.node), zap.String("expected", IdentityURI(h.cluster, h.node)))
	}
	return err
}

// accept is the other side: it reads a Hello, answers it and waits for the
// confirmation.
func (q *QUIC) accept(conn wire) {
	limit := q.limitTime(conn)
	defer limit.Stop()
	stop := context.AfterFunc(q.ctx, func() { conn.close(closeShutdown, "closing") })
	defer stop()
	ctl, err := conn.control(q.ctx, false)
	if err != nil {
		conn.close(closeRefused, "no hello")
		return
	}
	fr := newFrameReader(ctl, maxHelloBytes)
	b, err := fr.body()
	if err != nil {
		conn.close(closeRefused, "no hello")
		return
	}
	if b[0] == frameAsk {
		q.tell(conn, ctl)
		return
	}
	h, err := parseHello(b, frameHello)
	if err != nil {
		q.refuse(conn, ctl, &h, verdictMalformed)
		return
	}
	l, v := q.judge(conn, &h)
	if v == verdictWelcome && !l.beginAccept(conn, h.kind) {
		v = verdictDuplicate
	}
	if v != verdictWelcome {
		q.refuse(conn, ctl, &h, v)
		return
	}
	defer l.endAccept(conn, h.kind)
	if _, err = ctl.Write(helloFrame(frameAnswer, q.hello(h.kind, h.node, verdictWelcome))); err == nil {
		b, err = fr.body()
	}
	if err == nil {
		err = parseConfirm(b)
	}
	switch {
	case err != nil:
	case !limit.Stop():
		err = errTooLate
	case !l.stillAccepting(conn, h.kind):
		err = errReplaced
	}
	if err == nil {
		_, err = l.attach(conn, fr, &h)
	}
	if err != nil {
		conn.close(closeDuplicate, "no session")
	}
}

// judge decides on a Hello.
func (q *QUIC) judge(conn wire, h *hello) (*link, verdict) {
	if h.cluster != q.cfg.Cluster {
		return nil, verdictCluster
	}
	if h.to != q.cfg.Node || h.node == q.cfg.Node {
		return nil, verdictNode
	}
	if !conn.only(h.kind) {
		return nil, verdictMalformed
	}
	if err := q.checkCertificate(conn, h); err != nil {
		return nil, verdictIdentity
	}
	l := q.link(h.node)
	switch {
	case q.ctx.Err() != nil:
		return nil, verdictClosing
	case l == nil:
		if q.cfg.Unknown != nil {
			q.cfg.Unknown(h.node)
		}
		return nil, verdictUnknown
	}
	return l, verdictWelcome
}

// refuse answers a Hello with the reason, and closes.
func (q *QUIC) refuse(conn wire, ctl io.WriteCloser, h *hello, v verdict) {
	q.metrics.refusals.WithLabelValues(v.String()).Inc()
	if v.lasting() {
		q.log.Warn("refused a node", zap.Stringer("peer", h.node), zap.Stringer("cluster", h.cluster),
			zap.Stringer("remote", conn.RemoteAddr()), zap.Stringer("reason", v))
	}
	if _, err := ctl.Write(helloFrame(frameAnswer, q.hello(h.kind, h.node, v))); err == nil {
		_ = ctl.Close()
		// The dialler closes once it has read why; the answer would be lost otherwise.
		conn.awaitEnd()
	}
	conn.close(closeRefused, v.String())
}

// beginAccept says whether a Hello may be answered now. Of two that the peer sent
// the later counts.
func (l *link) beginAccept(conn wire, k Kind) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.slots[k].greeting && l.q.Self() < l.id {
		return false
	}
	l.slots[k].accepting = conn
	return true
}

func (l *link) stillAccepting(conn wire, k Kind) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.slots[k].accepting == conn
}

func (l *link) endAccept(conn wire, k Kind) {
	l.mu.Lock()
	if l.slots[k].accepting == conn {
		l.slots[k].accepting = nil
	}
	l.mu.Unlock()
	wake(l.kick[k])
}

// attach makes the connection the peer's session.
func (l *link) attach(conn wire, fr *frameReader, h *hello) (*Session, error) {
	q, k := l.q, h.kind
	s, err := q.Attach(SessionConfig{
		Peer: l.id, Boot: h.boot, Kind: k,
		MaxMessageBytes: int(h.maxMessage), StreamWindowBytes: int(h.window),
		Ended: func(err error) {
			l.mu.Lock()
			l.slots[k].lastEnd = err
			l.mu.Unlock()
			conn.close(endCode(err), "")
			wake(l.kick[k])
		},
	})
	if err != nil {
		return nil, err
	}
	q.log.Info("session with peer", zap.Stringer("peer", l.id), zap.Stringer("boot", h.boot), zap.Stringer("kind", k),
		zap.Stringer("remote", conn.RemoteAddr()))
	conn.serve(q, fr, s)
	for k := range l.kick {
		wake(l.kick[k]) // a main session allows the bulk one
	}
	return s, nil
}
