package transport

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"time"

	"github.com/quic-go/quic-go"
	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
)

func (q *QUIC) acceptLoop(ln *quic.Listener) {
	for {
		conn, err := ln.Accept(q.ctx)
		if err != nil {
			if q.ctx.Err() == nil {
				q.log.Error("the peer listener ended", zap.Error(err))
			}
			return
		}
		q.bounded(q.unidentified, func() { _ = conn.CloseWithError(closeRefused, "too many connections without a hello, or closing") },
			func() { q.accept(&quicWire{Conn: conn}) })
	}
}

// bounded runs fn in a goroutine that holds one of the places. It calls refuse if none
// is free.
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

// How long a listener pauses after it could not take a connection, for example because
// the process has too many files open.
const (
	acceptPauseMin = 5 * time.Millisecond
	acceptPauseMax = time.Second
)

// acceptTCP takes connections of diallers.
func (q *QUIC) acceptTCP(ln net.Listener) {
	pause := acceptPauseMin
	for {
		conn, err := ln.Accept()
		if err == nil {
			pause = acceptPauseMin
			q.acceptTLS(conn)
			continue
		}
		if q.ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
			return
		}
		q.log.Error("the peer listener for TCP takes no connection", zap.Error(err), zap.Duration("again_in", pause))
		if clock.Sleep(q.ctx, q.clock, pause) != nil {
			return
		}
		pause = min(2*pause, acceptPauseMax)
	}
}

// acceptTLS does the handshake with a dialler in a goroutine. Before the handshake the
// dialler may be anybody, so these connections have a bound of their own. They cannot
// keep out nodes that come by QUIC or that have a certificate.
func (q *QUIC) acceptTLS(conn net.Conn) {
	refuse := func() { _ = conn.Close() }
	q.bounded(q.tlsPending, refuse, func() {
		tc := &tls.Config{
			MinVersion: tls.VersionTLS13,
			NextProtos: []string{ALPN},
			GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
				c := q.creds.accepting()
				c.DynamicRecordSizingDisabled = true
				return c, nil
			},
		}
		w, err := q.handshakeTLS(q.ctx, tls.Server(conn, tc))
		if err != nil {
			refuse()
			q.log.Debug("a TLS handshake failed", zap.Stringer("remote", conn.RemoteAddr()), zap.Error(err))
			return
		}
		q.bounded(q.unidentified, refuse, func() { q.accept(w) })
	})
}

// accept is the accepter's side: it reads a Hello, answers it and waits for the
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
	switch w, overTCP := conn.(*tcpWire); {
	case b[0] == frameAsk:
		q.answerAsk(conn, ctl)
		return
	case b[0] == frameJoin && overTCP:
		q.join(w, fr, b, limit.Stop)
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
		_, err = l.attach(conn, fr, &h, false)
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
	// Only the row of a known node says which name its certificate has to prove.
	if err := q.checkCertificate(conn, h); err != nil {
		return nil, verdictIdentity
	}
	if v := q.recovered(h); v != verdictWelcome {
		return l, v
	}
	return l, q.meet(h)
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

// beginAccept says whether a Hello may be answered now. Of two Hellos from the peer the
// later counts.
func (l *link) beginAccept(conn wire, k Kind) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.slots[k].helloSent && l.q.Self() < l.id {
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
	l.kick[k].Set()
}
