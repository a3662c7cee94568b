package transport_test

import (
	"strings"
	"testing"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/transport"
)

// A node that does not know its identity learns from a peer who the others are. A peer
// with nothing to tell refuses, and so does every peer if the certificate is foreign.
func TestAStrangerIsTold(t *testing.T) {
	h := newQUICHarness()
	node := selfMade(1)
	long := strings.Repeat("rows", 100_000)
	node.Tell = func() []byte { return []byte(long) }
	a, b := h.new(t, node), h.new(t, selfMade(2))
	start(t, a, b)
	ask := transport.AskOptions{Clock: clock.System(), Security: transport.Security{SelfMade: true}, HandshakeTimeout: 10 * time.Second}
	got, err := transport.Ask(t.Context(), ask, a.Addrs()[0])
	if err != nil || string(got) != long {
		t.Errorf("told %d bytes, %v", len(got), err)
	}
	if got, err := transport.Ask(t.Context(), ask, b.Addrs()[0]); err == nil || !strings.Contains(err.Error(), "nothing to tell") {
		t.Errorf("told %q, %v", got, err)
	}
	if _, err := transport.Ask(t.Context(), ask, "127.0.0.1"); err == nil {
		t.Error("an address without a port was asked")
	}
}

// With certificates both sides check each other, except for an identity that neither
// knows.
func TestAStrangerWithCertificates(t *testing.T) {
	ours, theirs := newAuthority(t), newAuthority(t)
	h := newQUICHarness()
	node := selfMade(1)
	node.Security = ours.security("a", leaf{host: "127.0.0.1"})
	node.Tell = func() []byte { return []byte("rows") }
	a := h.new(t, node)
	start(t, a)
	ask := transport.AskOptions{Clock: clock.System(), HandshakeTimeout: 10 * time.Second, Security: ours.security("b", leaf{})}
	if got, err := transport.Ask(t.Context(), ask, a.Addrs()[0]); err != nil || string(got) != "rows" {
		t.Errorf("told %q, %v", got, err)
	}
	role := selfMade(2)
	role.Security, role.Tell = ours.security("role", leaf{uri: "skein://node/n2"}), node.Tell
	b := h.new(t, role)
	start(t, b)
	if got, err := transport.Ask(t.Context(), ask, b.Addrs()[0]); err == nil {
		t.Errorf("a stranger without a role was told %q", got)
	}
	ask.Security = ours.security("new", leaf{uri: "skein://node/n3"})
	if got, err := transport.Ask(t.Context(), ask, b.Addrs()[0]); err != nil || string(got) != "rows" {
		t.Errorf("told %q, %v", got, err)
	}
	if got, err := transport.Ask(t.Context(), ask, a.Addrs()[0]); err == nil {
		t.Errorf("a node without a role told %q", got)
	}
	ask.Security = theirs.security("c", leaf{})
	if got, err := transport.Ask(t.Context(), ask, a.Addrs()[0]); err == nil {
		t.Errorf("a node of another authority was told %q", got)
	}
}
