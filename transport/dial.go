package transport

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/quic-go/quic-go"
	"go.uber.org/zap"

	"github.com/skeindb/skein/keyspace"
)

// Delays of the dialler. The node with the higher id lets the other one dial first.
const (
	firstDelay = 10 * time.Millisecond
	yieldDelay = 60 * time.Millisecond
	backoffMin = 50 * time.Millisecond
	backoffMax = 2 * time.Second
	// backoffMaxTCP is backoffMax of CarrierTLS, where knocks may not get through to tell a peer that it is looked for. Who
	// refuses a connection says so at once.
	backoffMaxTCP  = 500 * time.Millisecond
	misconfigDelay = 5 * time.Second
	// briefSession is how long a session stands before the backoff begins anew after it. Where further connections of a session
	// over TCP cannot be made, each session ends at once.
	briefSession = time.Second
)

// noBulkLogged is the failed bulk attempts beside a main session after which the
// failure is logged. They take longer than it takes to notice that the peer is down.
const noBulkLogged = 12

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

func (l *link) start() {
	for k := range Kind(numKinds) {
		l.q.Go(func() { l.dialLoop(k) })
	}
}

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

// dialUntilServed makes attempts until a session stands, whoever made it, or until the
// addresses change. It goes on after a brief session.
func (l *link) dialUntilServed(k Kind) {
	if k == KindMain {
		// Whatever the carrier: the peer may wait for knocks only as long as fits its own.
		knocking, cancel := context.WithCancel(l.ctx)
		defer cancel()
		l.q.Go(func() { l.knock(knocking) })
	}
	backoff := backoffMin
	for tries := 0; l.ctx.Err() == nil; tries++ {
		moved := l.addrsMoved()
		s, err := l.dialNext(k, tries)
		var delay time.Duration
		switch {
		case err == nil && l.awaitSession(k, s):
			return
		case err == nil:
			delay = jitter(backoff)
		case l.ctx.Err() == nil:
			delay = l.dialFailed(k, err, backoff)
		}
		if l.ctx.Err() != nil || l.sleep(k, delay, moved) {
			return
		}
		backoff = min(2*backoff, l.q.backoffMax(k))
	}
}

// awaitSession waits for the end of a session that this node has made. It returns false for a brief main session, unless
// the peer restarts.
func (l *link) awaitSession(k Kind, s *Session) bool {
	if k == KindBulk {
		l.noBulk = 0
	}
	made := l.q.clock.Now()
	select {
	case <-s.Done():
	case <-l.ctx.Done():
		return true
	}
	return k != KindMain || l.q.clock.Now().Sub(made) >= briefSession || restarts(context.Cause(s.ctx))
}

func (q *QUIC) backoffMax(k Kind) time.Duration {
	if k == KindMain && q.opts.Carrier == CarrierTLS {
		return backoffMaxTCP
	}
	return backoffMax
}

// mayDialAtOnce says that the last session ended because the peer restarts, so that it
// is back already or will be soon.
func (l *link) mayDialAtOnce(k Kind) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	err := l.slots[k].lastEnd
	l.slots[k].lastEnd = nil
	return restarts(err)
}

// restarts says whether a session ended so because the peer restarts.
func restarts(err error) bool {
	_, reset := errors.AsType[*quic.StatelessResetError](err)
	return reset || isShutdown(err)
}

// awaitNeed waits until a session is missing and nobody makes one. It returns false
// when the link ends.
func (l *link) awaitNeed(k Kind) bool {
	for l.ctx.Err() == nil {
		s := l.session(k)
		l.mu.Lock()
		// A peer without an address must dial by itself.
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

// sleep waits for d. It returns true if a session cut the wait short, or addresses that
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

// dialFailed logs and counts a failed attempt, and returns how long to wait.
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

// bulkFailed logs that a peer is reachable by UDP alone.
func (l *link) bulkFailed(err error) {
	if l.session(KindMain) == nil {
		l.noBulk = 0
		return
	}
	if l.noBulk++; l.noBulk == noBulkLogged {
		l.q.log.Error("a peer's port does not answer to TCP, so that no range is copied to it or from it: open peer ports for TCP as well as UDP",
			zap.Stringer("peer", l.id), zap.Error(err))
	}
}

// dialNext tries the peer's addresses by turns, and for each name the addresses that it
// resolves to.
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
	l.setAbort(k, cancel)
	defer l.setAbort(k, nil)
	host, targets, err := resolve(ctx, addr)
	if err != nil {
		return nil, err
	}
	l.note(addr, targets)
	target := targets[turn%len(targets)]
	conn, err := q.connect(ctx, k, target, q.creds.dialling(host, l.id))
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w", addr, err)
	}
	stop := context.AfterFunc(ctx, func() { conn.close(closeEnded, "given up") })
	defer stop()
	s, err := l.handshake(conn, k, stop)
	if err != nil {
		// The peer's own reason, if any, tells more than a failed read.
		if cause := conn.cause(); cause != nil {
			err = fmt.Errorf("%w (%w)", err, cause)
		}
		conn.close(closeEnded, "no session")
		return nil, fmt.Errorf("dial %s: %w", addr, err)
	}
	return s, nil
}

// connect makes the connection that the kind of session uses.
func (q *QUIC) connect(ctx context.Context, k Kind, target netip.AddrPort, tc *tls.Config) (wire, error) {
	if k == KindBulk || q.opts.Carrier == CarrierTLS {
		w, err := q.dialTCP(ctx, target, tc)
		if err != nil {
			return nil, err // a nil interface, not an interface with a nil pointer
		}
		if k == KindMain {
			w.again = q.dialAgain(target, tc)
		}
		return w, nil
	}
	tr, err := q.sockets.forTarget(target.Addr())
	if err != nil {
		return nil, err
	}
	conn, err := tr.Dial(ctx, net.UDPAddrFromAddrPort(target), tc, q.config())
	if err != nil {
		return nil, err
	}
	return &quicWire{Conn: conn}, nil
}

func (l *link) setAbort(k Kind, abort func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.slots[k].abort = abort
}

// handshake is the dialler's side of the making of a session. keep stops the attempt
// from being aborted, and returns false if it was aborted already.
func (l *link) handshake(conn wire, k Kind, keep func() bool) (*Session, error) {
	q := l.q
	if !l.beginHello(k) {
		return nil, &refusalError{verdictDuplicate}
	}
	defer func() {
		l.mu.Lock()
		l.slots[k].helloSent = false
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
	return l.attach(conn, fr, &answer, true)
}

// served says that a connection of the peer's is or becomes the session: it came in
// while this node dialled.
func (l *link) served(k Kind) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.slots[k].accepting != nil || l.session(k) != nil
}

// beginHello says whether a Hello may be sent.
func (l *link) beginHello(k Kind) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.slots[k].accepting != nil || l.session(k) != nil {
		return false
	}
	l.slots[k].helloSent = true
	return true
}

// checkAnswer compares an answer with the node that was dialled.
func (q *QUIC) checkAnswer(conn wire, answer *hello, want keyspace.NodeID) error {
	if answer.verdict != verdictWelcome && answer.verdict != verdictRecovery {
		return &refusalError{answer.verdict}
	}
	if answer.cluster != q.cfg.Cluster || answer.node != want {
		return fmt.Errorf("%w: node %s of cluster %s answers, wanted %s of %s", errIdentity, answer.node, answer.cluster, want, q.cfg.Cluster)
	}
	if err := q.checkCertificate(conn, answer); err != nil {
		return err
	}
	// The peer that waits for a recovery needs to be heard: it may be what this node waits for.
	if v := q.recovered(answer); v != verdictWelcome || answer.verdict != verdictWelcome {
		return &refusalError{verdictRecovery}
	}
	if v := q.meet(answer); v != verdictWelcome {
		return &refusalError{v}
	}
	return nil
}
