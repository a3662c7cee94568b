package transport_test

import (
	"crypto/rand"
	"crypto/x509"
	"math/big"
	"net"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/transport"
)

// steeredClock is the system's clock, but for the minutes between two checks, which end when the test says so, and
// a wall clock that is ahead.
type steeredClock struct {
	clock.Clock
	minutes chan time.Time
	waits   atomic.Int64 // for the end of a minute
	ahead   atomic.Int64
}

func newSteeredClock() *steeredClock {
	return &steeredClock{Clock: clock.System(), minutes: make(chan time.Time)}
}

func (c *steeredClock) Wall() time.Time { return time.Now().Add(time.Duration(c.ahead.Load())) }

func (c *steeredClock) NewTimer(d time.Duration) clock.Timer {
	if d != transport.CertificateCheckInterval {
		return c.Clock.NewTimer(d)
	}
	c.waits.Add(1)
	return steeredTimer{c.Clock.NewTimer(time.Hour), c.minutes}
}

type steeredTimer struct {
	clock.Timer
	minutes chan time.Time
}

func (t steeredTimer) C() <-chan time.Time { return t.minutes }

// exchange is two nodes whose certificates change while they run. The second one checks the first, which
// dials.
type exchange struct {
	*trial
	t         *testing.T
	clock     *steeredClock
	ours      *authority
	secB      transport.Security
	logs      *observer.ObservedLogs
	unusable  *counter
	otherNode *authority
	minutes   int64 // that are over
}

type counter struct{ atomic.Int64 }

func (c *counter) Inc() { c.Add(1) }

func newExchange(t *testing.T) *exchange {
	t.Helper()
	e := &exchange{t: t, clock: newSteeredClock(), ours: newAuthority(t), otherNode: newAuthority(t), unusable: &counter{}}
	e.secB = e.ours.security("n2", leaf{uri: "skein://node/n2"})
	e.secB.Name, e.secB.CRLFile, e.secB.Unusable = "n2", e.revoke(), e.unusable
	// The first node trusts both authorities: the second one decides.
	secA := e.ours.security("n1", leaf{uri: "skein://node/n1"})
	secA.TrustedCAFile = e.ours.path("both.crt")
	e.copy(secA.TrustedCAFile, e.ours.path("ca.crt"), e.otherNode.path("ca.crt"))
	e.trial = &trial{t: t, up: make(chan transport.PeerState, 100)}
	a, b := options(1, secA), options(2, e.secB)
	lines, logs := observer.New(zap.InfoLevel)
	e.logs = logs
	b.Logger, b.Clock = zap.New(lines), e.clock
	h := newQUICHarness()
	e.a, e.b = h.new(t, a), h.new(t, b)
	e.a.OnPeer(func(_ keyspace.NodeID, s transport.PeerState) { e.up <- s })
	e.a.SetPeer(2, e.b.Addrs())
	e.b.SetPeer(1, nil)
	for _, q := range []*transport.QUIC{e.a, e.b} {
		if err := q.Start(); err != nil {
			t.Fatal(err)
		}
	}
	e.wantUp()
	e.bothSessions()
	return e
}

func (e *exchange) copy(to string, from ...string) {
	e.t.Helper()
	var all []byte
	for _, f := range from {
		b, err := os.ReadFile(f)
		if err != nil {
			e.t.Fatal(err)
		}
		all = append(all, b...)
	}
	if err := os.WriteFile(to, all, 0o600); err != nil {
		e.t.Fatal(err)
	}
}

// revoke writes the list of what is revoked.
func (e *exchange) revoke(serials ...int64) string {
	e.t.Helper()
	list := &x509.RevocationList{Number: big.NewInt(1), ThisUpdate: time.Now(), NextUpdate: time.Now().Add(time.Hour)}
	for _, n := range serials {
		list.RevokedCertificateEntries = append(list.RevokedCertificateEntries, x509.RevocationListEntry{SerialNumber: big.NewInt(n), RevocationTime: time.Now()})
	}
	der, err := x509.CreateRevocationList(rand.Reader, list, e.ours.cert, e.ours.key)
	if err != nil {
		e.t.Fatal(err)
	}
	return e.ours.write("list.crl", "X509 CRL", der)
}

// serial is that of the first node's certificate.
func (e *exchange) serial() int64 { return e.ours.next - 1 }

// minute has the second node check its sessions once.
func (e *exchange) minute() {
	e.clock.minutes <- time.Time{}
	e.minutes++
	// It waits again once the check is over. One that goes on would see the next change of a file in its middle.
	until(e.t, "the check does not end", func() bool { return e.clock.waits.Load() > e.minutes })
}

// bothSessions waits until the bulk session stands too.
func (e *exchange) bothSessions() []*transport.Session {
	e.t.Helper()
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		if m, b := e.b.MainSession(1), e.b.BulkSession(1); m != nil && b != nil {
			return []*transport.Session{m, b}
		}
		if time.Now().After(deadline) {
			e.t.Fatal("no bulk session")
		}
	}
}

// wantEnded runs a minute and wants both sessions to end for a reason, and no new one.
func (e *exchange) wantEnded(why string) {
	e.t.Helper()
	all := e.bothSessions()
	e.logs.TakeAll()
	e.minute()
	for _, s := range all {
		select {
		case <-s.Done():
		default:
			e.t.Fatal("a session goes on")
		}
		if err := s.Why(); !strings.Contains(err.Error(), why) {
			e.t.Errorf("a session ended by %v, want %q", err, why)
		}
	}
	told := e.logs.FilterMessageSnippet("does not hold any more").FilterField(zap.Stringer("peer", keyspace.NodeID(1)))
	if told.Len() == 0 || !strings.Contains(told.All()[0].ContextMap()["error"].(string), why) {
		e.t.Errorf("the log says %v", told.All())
	}
	if err := e.a.DialNow(2, e.b.Addrs()[0]); err == nil {
		e.t.Error("the node is let in again")
	}
}

// wantGoOn runs some minutes and wants both sessions to go on.
func (e *exchange) wantGoOn() {
	e.t.Helper()
	all := e.bothSessions()
	e.minute()
	for _, s := range all {
		select {
		case <-s.Done():
			e.t.Fatalf("a session ended: %v", s.Why())
		default:
		}
	}
}

// A session ends within a minute when the peer's certificate does not hold any more, also one that was made before
// the files were exchanged.
func TestSessionsAreChecked(t *testing.T) {
	t.Run("revoked", func(t *testing.T) {
		e := newExchange(t)
		e.wantGoOn()
		e.revoke(e.serial())
		e.wantEnded("is revoked")
	})
	t.Run("expired", func(t *testing.T) {
		e := newExchange(t)
		e.clock.ahead.Store(int64(50 * time.Minute))
		e.wantGoOn()
		e.clock.ahead.Store(int64(2 * time.Hour))
		e.wantEnded("has expired")
	})
	t.Run("another authority", func(t *testing.T) {
		e := newExchange(t)
		e.copy(e.secB.TrustedCAFile, e.otherNode.path("ca.crt"))
		e.wantEnded("unknown authority")
		// With a certificate of the new authority it is let in: certificate, key and authority are exchanged on both sides.
		e.otherNode.security("n1", leaf{uri: "skein://node/n1"})
		e.otherNode.security("n2", leaf{uri: "skein://node/n2"})
		for _, f := range []string{"n1.crt", "n1.key", "n2.crt", "n2.key"} {
			e.copy(e.ours.path(f), e.otherNode.path(f))
		}
		e.a.SetPeer(2, e.b.Addrs()) // shortens the long wait after a refusal
		e.wantGoOn()
	})
}

// A file that cannot be taken leaves the last good one in use. Nothing falls open.
func TestBrokenPeerFilesKeepTheLastGoodOnes(t *testing.T) {
	e := newExchange(t)
	e.ours.security("free", leaf{host: "127.0.0.1"}) // has no role
	for _, test := range []struct {
		name   string
		change func()
	}{
		{"list broken", func() { e.ours.write("list.crl", "X509 CRL", []byte("broken")) }},
		{"list gone", func() { _ = os.Remove(e.secB.CRLFile) }},
		{"authority broken", func() { e.ours.write("ca.crt", "CERTIFICATE", []byte("broken")) }},
		{"authority gone", func() { _ = os.Remove(e.secB.TrustedCAFile) }},
		{"key of another certificate", func() { e.copy(e.secB.KeyFile, e.ours.path("n1.key")) }},
		{"certificate of another node", func() { e.copy(e.secB.CertFile, e.ours.path("n1.crt")) }},
		{"certificate without a role", func() {
			e.copy(e.secB.KeyFile, e.ours.path("free.key"))
			e.copy(e.secB.CertFile, e.ours.path("free.crt"))
		}},
		{"certificate gone", func() { _ = os.Remove(e.secB.CertFile) }},
	} {
		e.bothSessions()
		e.unusable.Store(0)
		e.logs.TakeAll()
		test.change()
		e.wantGoOn()
		e.b.EndSession(1, net.ErrClosed)
		e.bothSessions() // new handshakes have the last good files
		e.wantGoOn()
		if n, told := e.unusable.Load(), e.logs.FilterMessageSnippet("stays in use").Len(); n != 1 || told != 1 {
			t.Errorf("%s: counted %d times, told %d times", test.name, n, told)
		}
	}
}

// Trap 96 (GHSA-6vch-q96h-7gc3): TCP handshakes that hang end within a bounded time and hold no peer up.
func TestPeerHandshakesThatHang(t *testing.T) {
	ca := newAuthority(t)
	b := options(2, ca.security("n2", leaf{uri: "skein://node/n2"}))
	b.HandshakeTimeout = 2 * time.Second
	h := newQUICHarness()
	qb := h.new(t, b)
	if err := qb.Start(); err != nil {
		t.Fatal(err)
	}
	var hanging []net.Conn
	for range 20 {
		c, err := net.Dial("tcp", qb.Addrs()[0])
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		if _, err := c.Write([]byte("\x16\x03\x01\x02\x00\x01")); err != nil {
			t.Fatal(err)
		}
		hanging = append(hanging, c)
	}
	qa := h.new(t, options(1, ca.security("n1", leaf{uri: "skein://node/n1"})))
	up := make(chan struct{}, 10)
	qa.OnPeer(func(_ keyspace.NodeID, s transport.PeerState) {
		if s.Up {
			up <- struct{}{}
		}
	})
	qa.SetPeer(2, qb.Addrs())
	qb.SetPeer(1, nil)
	if err := qa.Start(); err != nil {
		t.Fatal(err)
	}
	(&exchange{t: t, trial: &trial{a: qa, b: qb}}).bothSessions()
	<-up
	for _, c := range hanging {
		_ = c.SetReadDeadline(time.Now().Add(20 * time.Second))
		if _, err := c.Read(make([]byte, 1)); err == nil || strings.Contains(err.Error(), "timeout") {
			t.Errorf("a handshake that hangs is not ended: %v", err)
		}
	}
}
