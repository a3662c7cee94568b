package transport

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net"
	"testing"
	"time"

	"golang.org/x/net/ipv4"
	"golang.org/x/sys/unix"
)

// listenUDP opens a socket on loopback that is closed with the test.
func listenUDP(t *testing.T, addr string) *net.UDPConn {
	t.Helper()
	ua, err := net.ResolveUDPAddr("udp", addr)
	if err != nil {
		t.Fatal(err)
	}
	c, err := net.ListenUDP("udp", ua)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	if err := c.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	return c
}

// control returns one control message.
func control(level, kind int32, body []byte) []byte {
	b := make([]byte, unix.CmsgSpace(len(body)))
	binary.NativeEndian.PutUint64(b, uint64(unix.CmsgLen(len(body))))
	binary.NativeEndian.PutUint32(b[8:], uint32(level))
	binary.NativeEndian.PutUint32(b[12:], uint32(kind))
	copy(b[unix.CmsgLen(0):], body)
	return b
}

// segmented returns the control message that makes the kernel send a write in packets
// of size, marked as quic-go marks them.
func segmented(size uint16, ecn byte) []byte {
	return append(control(unix.IPPROTO_UDP, unix.UDP_SEGMENT, binary.NativeEndian.AppendUint16(nil, size)),
		control(unix.IPPROTO_IP, unix.IP_TOS, []byte{ecn})...)
}

// batches returns messages as quic-go allocates them.
func batches(n int) []ipv4.Message {
	ms := make([]ipv4.Message, n)
	for i := range ms {
		ms[i].Buffers, ms[i].OOB = [][]byte{make([]byte, 1452)}, make([]byte, 128)
	}
	return ms
}

// Joined packets come out as they were sent: in order, each with its sender and its
// congestion mark, however many of them one call has room for.
func TestCoalescedPacketsComeApart(t *testing.T) {
	udp := listenUDP(t, "127.0.0.1:0")
	c, ok := coalesce(udp).(*coalescing)
	if !ok {
		t.Skip("the kernel does not put packets together")
	}
	raw, err := udp.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var serr error
	err = raw.Control(func(fd uintptr) { serr = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_RECVTOS, 1) })
	if err != nil || serr != nil {
		t.Fatal(err, serr)
	}
	type packet struct {
		from *net.UDPConn
		data []byte
		ecn  byte
	}
	var want []packet
	next := byte(0)
	send := func(from *net.UDPConn, bytes int, size uint16, ecn byte) {
		t.Helper()
		data := make([]byte, bytes)
		for i := range data {
			if i%int(size) == 0 {
				next++
			}
			data[i] = next
		}
		if _, _, err := from.WriteMsgUDP(data, segmented(size, ecn), udp.LocalAddr().(*net.UDPAddr)); err != nil {
			t.Fatal(err)
		}
		for rest := data; len(rest) > 0; rest = rest[min(int(size), len(rest)):] {
			want = append(want, packet{from, rest[:min(int(size), len(rest))], ecn})
		}
	}
	x, y := listenUDP(t, "127.0.0.1:0"), listenUDP(t, "127.0.0.1:0")
	send(x, 20*1200+300, 1200, 2)
	send(y, 700, 1452, 2)
	send(x, 14*1452, 1452, 3)
	if _, err := y.WriteToUDP(nil, udp.LocalAddr().(*net.UDPAddr)); err != nil {
		t.Fatal(err)
	}
	want = append(want, packet{from: y})
	send(y, 2*1000, 1000, 1)
	send(x, 33, 1452, 2)

	for _, room := range []int{8, 1, 3, 50} {
		if room != 8 { // the same again, with calls that have room for more or fewer
			for _, p := range want {
				if _, _, err := p.from.WriteMsgUDP(p.data, segmented(1452, p.ecn), udp.LocalAddr().(*net.UDPAddr)); err != nil {
					t.Fatal(err)
				}
			}
		}
		together := false
		for i := 0; i < len(want); {
			ms := batches(room)
			n, err := c.ReadBatch(ms, 0)
			if err != nil || n == 0 || i+n > len(want) {
				t.Fatalf("room for %d: %d packets behind %d of %d: %v", room, n, i, len(want), err)
			}
			together = together || c.size > 0 && c.next < c.n && c.reads[c.next].N > c.size
			for _, m := range ms[:n] {
				p := want[i]
				if !bytes.Equal(m.Buffers[0][:m.N], p.data) || m.Addr.String() != p.from.LocalAddr().String() {
					t.Fatalf("packet %d: %d bytes from %s, want %d from %s", i, m.N, m.Addr, len(p.data), p.from.LocalAddr())
				}
				if ecn := markOf(t, m.OOB[:m.NN]); ecn != p.ecn {
					t.Fatalf("packet %d is marked %d, want %d", i, ecn, p.ecn)
				}
				i++
			}
		}
		if room == 8 && !together {
			t.Error("the kernel put nothing together: the test shows nothing")
		}
	}
	if err := udp.Close(); err != nil {
		t.Fatal(err)
	}
	if n, err := c.ReadBatch(batches(8), 0); n != 0 || !errors.Is(err, net.ErrClosed) {
		t.Errorf("%d packets from a closed socket: %v", n, err)
	}
}

// markOf returns the congestion mark in control messages.
func markOf(t *testing.T, oob []byte) byte {
	t.Helper()
	all, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range all {
		if m.Header.Level == unix.IPPROTO_IP && m.Header.Type == unix.IP_TOS {
			return m.Data[0] & 3
		}
	}
	t.Fatal("no mark of congestion")
	return 0
}

// A packet that is larger than its buffer is truncated, as the kernel would.
func TestCoalescedPacketsAreCut(t *testing.T) {
	udp := listenUDP(t, "127.0.0.1:0")
	c, ok := coalesce(udp).(*coalescing)
	if !ok {
		t.Skip("the kernel does not put packets together")
	}
	from := listenUDP(t, "127.0.0.1:0")
	for _, n := range []int{3000, 5} {
		if _, err := from.WriteToUDP(bytes.Repeat([]byte{byte(n)}, n), udp.LocalAddr().(*net.UDPAddr)); err != nil {
			t.Fatal(err)
		}
	}
	for _, want := range []int{1452, 5} {
		ms := batches(1)
		if n, err := c.ReadBatch(ms, 0); n != 1 || err != nil || ms[0].N != want {
			t.Errorf("%d packets, %d bytes, want %d: %v", n, ms[0].N, want, err)
		}
	}
}

func TestPacketBytes(t *testing.T) {
	size := func(n int32) []byte {
		return control(unix.IPPROTO_UDP, unix.UDP_GRO, binary.NativeEndian.AppendUint32(nil, uint32(n)))
	}
	tos := control(unix.IPPROTO_IP, unix.IP_TOS, []byte{2})
	for _, test := range []struct {
		name string
		oob  []byte
		want int
	}{
		{"nothing said", nil, 5000},
		{"a size", size(1200), 1200},
		{"behind others", append(bytes.Clone(tos), size(1200)...), 1200},
		{"others alone", tos, 5000},
		{"no size", size(0), 5000},
		{"less than nothing", size(-7), 5000},
		{"another protocol's", control(unix.IPPROTO_IP, unix.UDP_GRO, []byte{1, 0, 0, 0}), 5000},
		{"cut", size(1200)[:10], 5000},
		{"too short", control(unix.IPPROTO_UDP, unix.UDP_GRO, []byte{1, 2}), 5000},
	} {
		if got := packetBytes(&ipv4.Message{OOB: test.oob, NN: len(test.oob), N: 5000}); got != test.want {
			t.Errorf("%s: packets of %d bytes, want %d", test.name, got, test.want)
		}
	}
}
