package transport

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"time"

	"github.com/quic-go/quic-go"
	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
)

// A joining node may not know yet which node of which cluster it is. It has the peer
// URLs of others, its own, and a peer certificate. It asks the others and gets the
// answer of their Config.Tell, but no session.

// maxToldBytes bounds the answer to a joining node.
const maxToldBytes = 32 << 20

// askFrame is the question, and toldFrame the answer to it.
func askFrame() []byte {
	return append(binary.BigEndian.AppendUint32(nil, 1), frameAsk)
}

func toldFrame(answer []byte) []byte {
	dst := binary.BigEndian.AppendUint32(make([]byte, 0, lengthBytes+1+len(answer)), uint32(1+len(answer)))
	return append(append(dst, frameTold), answer...)
}

// told reads the answer.
func (fr *frameReader) told() ([]byte, error) {
	fr.max = maxToldBytes
	n, err := fr.length()
	if err != nil {
		return nil, err
	}
	b, err := readGrowing(fr.r, lengthBytes+n)
	if err != nil {
		return nil, unexpectedEnd(err)
	}
	if b[lengthBytes] != frameTold {
		return nil, fmt.Errorf("%w: kind %d is no answer to Ask", errMalformed, b[lengthBytes])
	}
	return b[lengthBytes+1:], nil
}

// answerAsk answers a joining node. If that does not close the connection, the timer of
// the handshake does.
func (q *QUIC) answerAsk(conn wire, ctl io.WriteCloser) {
	answer := []byte(nil)
	if q.cfg.Tell != nil {
		answer = q.cfg.Tell()
	}
	if len(answer) == 0 || len(answer) >= maxToldBytes {
		conn.close(closeRefused, "nothing to tell")
		return
	}
	if _, err := ctl.Write(toldFrame(answer)); err == nil {
		_ = ctl.Close()
		conn.awaitEnd() // the answer would be lost otherwise
	}
	conn.close(closeEnded, "told")
}

// AskOptions say how a joining node asks.
type AskOptions struct {
	Clock clock.Clock
	// Security is that of the bus that the joining node will have.
	Security Security
	// HandshakeTimeout is how long the node may be silent. Default 1 s.
	HandshakeTimeout time.Duration
	// Carrier is that of the bus that the joining node will have.
	Carrier Carrier
}

// Ask asks the node at addr, HOST:PORT, as a joining node, and returns the answer of
// its Config.Tell. It tries the addresses of the name one after the other, until ctx
// ends.
func Ask(ctx context.Context, o AskOptions, addr string) ([]byte, error) {
	if o.HandshakeTimeout == 0 {
		o.HandshakeTimeout = time.Second
	}
	cfg := Config{Clock: o.Clock}
	cfg.setDefaults()
	creds, err := newCredentials(&cfg, o.Security)
	if err != nil {
		return nil, err
	}
	ss, err := openSockets(nil, nil, func(string, string, ...zap.Field) {})
	if err != nil {
		return nil, err
	}
	defer func() { _ = ss.close() }() // the sockets were opened for this question only
	host, targets, err := resolve(ctx, addr)
	if err != nil {
		return nil, err
	}
	qc := quicConfig(&cfg, &Options{HandshakeTimeout: o.HandshakeTimeout, IdleTimeout: 3 * o.HandshakeTimeout}, 1)
	var errs []error
	for _, target := range targets {
		var answer []byte
		if tc := creds.dialling(host, 0); o.Carrier == CarrierTLS {
			answer, err = o.askTCP(ctx, target, tc)
		} else {
			answer, err = o.askQUIC(ctx, ss, target, tc, qc)
		}
		if err == nil {
			return answer, nil
		}
		errs = append(errs, err)
	}
	return nil, fmt.Errorf("transport: ask %s: %w", addr, errors.Join(errs...))
}

func (o *AskOptions) askTCP(ctx context.Context, target netip.AddrPort, tc *tls.Config) ([]byte, error) {
	ctx, cancel := clock.WithTimeout(ctx, o.Clock, 2*o.HandshakeTimeout)
	defer cancel() // which closes the connection
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", target.String())
	if err != nil {
		return nil, err
	}
	context.AfterFunc(ctx, func() { _ = conn.Close() })
	t := tls.Client(conn, tc)
	if err := t.HandshakeContext(ctx); err != nil {
		return nil, err
	}
	if err := speaksALPN(t); err != nil {
		return nil, err
	}
	if _, err := t.Write(askFrame()); err != nil {
		return nil, err
	}
	answer, err := newFrameReader(t, maxToldBytes).told()
	if cause := context.Cause(ctx); err != nil && cause != nil {
		err = fmt.Errorf("%w (%w)", err, cause)
	}
	return answer, err
}

func (o *AskOptions) askQUIC(ctx context.Context, ss *sockets, target netip.AddrPort, tc *tls.Config, qc *quic.Config) ([]byte, error) {
	tr, err := ss.forTarget(target.Addr())
	if err != nil {
		return nil, err
	}
	conn, err := tr.Dial(ctx, net.UDPAddrFromAddrPort(target), tc, qc)
	if err != nil {
		return nil, err
	}
	defer func() { _ = conn.CloseWithError(closeEnded, "") }()
	limit := o.Clock.AfterFunc(2*o.HandshakeTimeout, func() { _ = conn.CloseWithError(closeEnded, errTooLate.Error()) })
	defer limit.Stop()
	ctl, err := conn.OpenStream()
	if err != nil {
		return nil, err
	}
	if _, err := ctl.Write(askFrame()); err != nil {
		return nil, err
	}
	answer, err := newFrameReader(ctl, maxToldBytes).told()
	if cause := context.Cause(conn.Context()); err != nil && cause != nil {
		err = fmt.Errorf("%w (%w)", err, cause) // the peer's own reason tells more
	}
	return answer, err
}
