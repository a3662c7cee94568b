package transport

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"syscall"

	"github.com/quic-go/quic-go"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"
)

// socketBufferBytes is the wanted size of a UDP socket's buffers. All peers share them;
// packets that do not fit are lost, which looks like a slow network.
const socketBufferBytes = 7 << 20

// sockets are the UDP sockets of a node: one per listen address, also used for
// dialling, and one more for peers that none of them can reach.
type sockets struct {
	key    *quic.StatelessResetKey
	warn   func(key, msg string, fields ...zap.Field)
	listen []*socket

	mu     sync.Mutex // guards what follows
	extra  *socket
	closed bool
}

type socket struct {
	udp       *net.UDPConn
	tcp       net.Listener // nil where nobody dials it
	transport *quic.Transport
	listener  *quic.Listener
}

func openSockets(addrs []string, key *quic.StatelessResetKey, warn func(key, msg string, fields ...zap.Field)) (*sockets, error) {
	// quic-go complains by package log of what growBuffers reports better. This variable
	// is its only switch.
	_ = os.Setenv("QUIC_GO_DISABLE_RECEIVE_BUFFER_WARNING", "true")
	ss := &sockets{key: key, warn: warn}
	for _, a := range addrs {
		udp, tcp, err := listenBoth(a)
		if err != nil {
			_ = ss.close()
			return nil, err
		}
		s := ss.of(udp)
		s.tcp = tcp
		ss.listen = append(ss.listen, s)
	}
	return ss, nil
}

func (ss *sockets) of(udp *net.UDPConn) *socket {
	ss.growBuffers(udp)
	return &socket{udp: udp, transport: &quic.Transport{Conn: coalesce(udp), StatelessResetKey: ss.key}}
}

// growBuffers asks for larger buffers, beyond the system's limit if the process may. It
// warns once if they stay small.
func (ss *sockets) growBuffers(udp *net.UDPConn) {
	raw, err := udp.SyscallConn()
	if err != nil {
		return
	}
	for _, b := range []struct {
		name             string
		set, force, read int
	}{
		{"receive", unix.SO_RCVBUF, unix.SO_RCVBUFFORCE, unix.SO_RCVBUF},
		{"send", unix.SO_SNDBUF, unix.SO_SNDBUFFORCE, unix.SO_SNDBUF},
	} {
		got := 0
		err := raw.Control(func(fd uintptr) {
			if unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, b.force, socketBufferBytes) != nil {
				_ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, b.set, socketBufferBytes)
			}
			got, _ = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, b.read)
		})
		// The kernel reports twice the size it was asked for: it counts its own overhead.
		if err == nil && got < 2*socketBufferBytes {
			ss.warn("buffer", "the UDP socket buffers are small: bursts will be lost; raise net.core.rmem_max and net.core.wmem_max",
				zap.String("buffer", b.name), zap.Int("bytes", got/2), zap.Int("wanted_bytes", socketBufferBytes))
		}
	}
}

// serve begins to listen on the i-th socket.
func (ss *sockets) serve(i int, creds *credentials, config *quic.Config) (*quic.Listener, error) {
	s := ss.listen[i]
	ln, err := s.transport.Listen(&tls.Config{
		MinVersion: tls.VersionTLS13,
		NextProtos: []string{ALPN},
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
			return creds.accepting(), nil
		},
	}, config)
	ss.mu.Lock()
	defer ss.mu.Unlock()
	s.listener = ln
	if err == nil && ss.closed {
		_ = ln.Close()
		err = ErrClosed
	}
	return ln, err
}

func (ss *sockets) addrs() []string {
	var out []string
	for _, s := range ss.listen {
		out = append(out, s.udp.LocalAddr().String())
	}
	return out
}

// forTarget returns the transport that can reach an address.
func (ss *sockets) forTarget(to netip.Addr) (*quic.Transport, error) {
	for _, s := range ss.listen {
		local := s.udp.LocalAddr().(*net.UDPAddr).AddrPort().Addr()
		if reaches(local, to) {
			return s.transport, nil
		}
	}
	ss.mu.Lock()
	defer ss.mu.Unlock()
	if ss.closed {
		return nil, ErrClosed
	}
	if ss.extra == nil {
		udp, err := net.ListenUDP("udp", nil)
		if err != nil {
			return nil, fmt.Errorf("transport: a socket for dialling: %w", err)
		}
		ss.extra = ss.of(udp)
	}
	return ss.extra.transport, nil
}

// dialFrom returns the local address for a TCP connection to a peer, or nil for any. QUIC's
// socket for the peer has the same one, so the peer sees both come from one address.
func (ss *sockets) dialFrom(to netip.Addr) net.Addr {
	for _, s := range ss.listen {
		local := s.udp.LocalAddr().(*net.UDPAddr).AddrPort().Addr()
		if !reaches(local, to) {
			continue
		}
		if local.IsUnspecified() {
			return nil
		}
		return net.TCPAddrFromAddrPort(netip.AddrPortFrom(local, 0))
	}
	return nil
}

// reaches says whether a socket bound to local can send to an address. An IPv6 wildcard
// takes both families; a loopback address reaches loopback only.
func reaches(local, to netip.Addr) bool {
	to = to.Unmap()
	switch {
	case local.IsUnspecified():
		return !local.Is4() || to.Is4()
	case local.Unmap().Is4() != to.Is4():
		return false
	}
	return !local.Unmap().IsLoopback() || to.IsLoopback()
}

// close ends listeners, transports and sockets. Connections that must send a farewell
// are closed before.
func (ss *sockets) close() error {
	ss.mu.Lock()
	ss.closed = true
	all := ss.listen
	if ss.extra != nil {
		all = append(all, ss.extra)
	}
	ss.mu.Unlock()
	var errs []error
	for _, s := range all {
		if s.listener != nil {
			_ = s.listener.Close()
		}
		// A transport that neither listened nor dialled has nothing to close.
		_ = s.transport.Close()
		if s.tcp != nil {
			errs = append(errs, s.tcp.Close())
		}
		errs = append(errs, s.udp.Close())
	}
	return errors.Join(errs...)
}

// resolve returns the host of a host:port pair and its addresses, at least one, IPv4
// first. A name like localhost has both families, and few servers listen on both.
func resolve(ctx context.Context, addr string) (host string, targets []netip.AddrPort, err error) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return "", nil, fmt.Errorf("peer address %q: %w", addr, err)
	}
	n, err := net.DefaultResolver.LookupPort(ctx, "udp", port)
	if err != nil {
		return "", nil, fmt.Errorf("peer address %q: %w", addr, err)
	}
	ips, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	if err != nil {
		return "", nil, fmt.Errorf("peer address %q: %w", addr, err)
	}
	for i := range ips {
		ips[i] = ips[i].Unmap()
	}
	slices.SortStableFunc(ips, func(a, b netip.Addr) int { return a.BitLen() - b.BitLen() })
	for _, ip := range ips {
		targets = append(targets, netip.AddrPortFrom(ip, uint16(n)))
	}
	return host, targets, nil
}

// tcpListenTries is how many ports are tried if the system chooses one: it must be free
// for UDP and for TCP.
const tcpListenTries = 32

// listenBoth listens on the UDP and the TCP port of an address.
func listenBoth(addr string) (*net.UDPConn, net.Listener, error) {
	ua, err := net.ResolveUDPAddr("udp", addr)
	if err != nil {
		return nil, nil, fmt.Errorf("transport: listen address %q: %w", addr, err)
	}
	for try := 1; ; try++ {
		udp, err := net.ListenUDP("udp", ua)
		if err != nil {
			return nil, nil, fmt.Errorf("transport: listen on %q: %w", addr, err)
		}
		ta := net.TCPAddrFromAddrPort(udp.LocalAddr().(*net.UDPAddr).AddrPort())
		tcp, err := net.ListenTCP("tcp", ta)
		if err == nil {
			return udp, tcp, nil
		}
		err = errors.Join(err, udp.Close())
		if ua.Port != 0 || try == tcpListenTries || !errors.Is(err, syscall.EADDRINUSE) {
			return nil, nil, fmt.Errorf("transport: listen on %q, which takes the port for TCP as well as UDP: %w", addr, err)
		}
	}
}
