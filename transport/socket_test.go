package transport

import (
	"net/netip"
	"testing"

	"github.com/quic-go/quic-go"
	"go.uber.org/zap"
)

func TestReaches(t *testing.T) {
	for _, test := range []struct {
		local, to string
		want      bool
	}{
		{"127.0.0.1", "127.0.0.1", true},
		{"127.0.0.1", "127.0.0.9", true},
		{"127.0.0.1", "10.0.0.1", false},
		{"127.0.0.1", "::1", false},
		{"10.0.0.1", "10.0.0.2", true},
		{"10.0.0.1", "fd00::1", false},
		{"0.0.0.0", "10.0.0.1", true},
		{"0.0.0.0", "::1", false},
		{"::", "10.0.0.1", true},
		{"::", "fd00::1", true},
		{"::1", "fd00::1", false},
		{"::1", "::1", true},
		{"::ffff:10.0.0.1", "10.0.0.2", true},
	} {
		if got := reaches(netip.MustParseAddr(test.local), netip.MustParseAddr(test.to)); got != test.want {
			t.Errorf("a socket on %s reaches %s: %t", test.local, test.to, got)
		}
	}
}

// TestExtraSocket: one extra socket serves all targets that no listening socket
// reaches.
func TestExtraSocket(t *testing.T) {
	ss, err := openSockets([]string{"127.0.0.1:0"}, &quic.StatelessResetKey{}, func(string, string, ...zap.Field) {})
	if err != nil {
		t.Fatal(err)
	}
	near, err := ss.forTarget(netip.MustParseAddr("127.0.0.1"))
	if err != nil || near != ss.listen[0].transport {
		t.Errorf("loopback by another socket: %v", err)
	}
	far, err := ss.forTarget(netip.MustParseAddr("192.0.2.1"))
	again, err2 := ss.forTarget(netip.MustParseAddr("192.0.2.2"))
	if err != nil || err2 != nil || far == near || far != again {
		t.Errorf("others: %v, %v", err, err2)
	}
	if err := ss.close(); err != nil {
		t.Error(err)
	}
	if _, err := ss.forTarget(netip.MustParseAddr("192.0.2.1")); err == nil {
		t.Error("a closed socket dials")
	}
}

func TestResolve(t *testing.T) {
	host, targets, err := resolve(t.Context(), "127.0.0.1:2380")
	if err != nil || host != "127.0.0.1" || len(targets) != 1 || targets[0].String() != "127.0.0.1:2380" {
		t.Errorf("%s, %v, %v", host, targets, err)
	}
	if _, targets, err = resolve(t.Context(), "localhost:2380"); err != nil || !targets[0].Addr().Is4() {
		t.Errorf("localhost: %v, %v", targets, err)
	}
	for _, bad := range []string{"", "127.0.0.1", "127.0.0.1:none", "[::1"} {
		if _, _, err := resolve(t.Context(), bad); err == nil {
			t.Errorf("%q is an address", bad)
		}
	}
}
