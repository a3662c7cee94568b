package transport

import (
	"encoding/binary"
	"net"

	"golang.org/x/net/ipv4"
	"golang.org/x/sys/unix"
)

// coalesceReads is how many reads one system call makes, each of up to coalesceBytes,
// the largest size that the kernel joins.
const (
	coalesceReads = 8
	coalesceBytes = 1 << 16
	// A size, the type of service and the address of both families take 120 bytes.
	// quic-go reserves as much. A socket option that adds to them needs more room in
	// both.
	coalesceOOB = 128
)

// coalescing is a UDP socket whose kernel joins consecutive packets of one peer
// (UDP_GRO, Linux 5.0); ReadBatch splits them again. So one system call and one pass
// through the kernel's network code serve a dozen packets. quic-go reads by ReadBatch
// where a connection has it, and writes by the socket's own methods (its issue 3838).
type coalescing struct {
	*net.UDPConn
	from *ipv4.PacketConn // the same socket; messages have addresses of both families

	// Joined reads that are not yet split: reads[next:n]. The first continues at offset
	// at.
	reads   []ipv4.Message
	next, n int
	at      int
	size    int // of each packet in that read but the last
}

// coalesce returns the socket with joined reads, or unchanged if the kernel cannot join
// them.
func coalesce(udp *net.UDPConn) net.PacketConn {
	raw, err := udp.SyscallConn()
	if err != nil {
		return udp
	}
	var serr error
	err = raw.Control(func(fd uintptr) { serr = unix.SetsockoptInt(int(fd), unix.IPPROTO_UDP, unix.UDP_GRO, 1) })
	if err != nil || serr != nil {
		return udp
	}
	c := &coalescing{UDPConn: udp, from: ipv4.NewPacketConn(udp), reads: make([]ipv4.Message, coalesceReads)}
	for i := range c.reads {
		c.reads[i].Buffers = [][]byte{make([]byte, coalesceBytes)}
		c.reads[i].OOB = make([]byte, coalesceOOB)
	}
	return c
}

// ReadBatch fills messages with one packet each, and waits for the first. Only one goroutine may
// call it at a time.
func (c *coalescing) ReadBatch(ms []ipv4.Message, flags int) (int, error) {
	if c.next == c.n {
		n, err := c.from.ReadBatch(c.reads, flags)
		if err != nil {
			return 0, err
		}
		c.next, c.n = 0, n
	}
	k := 0
	for ; k < len(ms) && c.next < c.n; k++ {
		read, m := &c.reads[c.next], &ms[k]
		if c.at == 0 {
			c.size = packetBytes(read)
		}
		end := min(c.at+c.size, read.N)
		m.N = copy(m.Buffers[0], read.Buffers[0][c.at:end])
		m.NN = copy(m.OOB, read.OOB[:read.NN])
		m.Flags, m.Addr = read.Flags, read.Addr
		if c.at = end; c.at == read.N {
			c.next, c.at = c.next+1, 0
		}
	}
	return k, nil
}

// packetBytes returns the size of the packets in a read; the last one may be smaller.
func packetBytes(read *ipv4.Message) int {
	for rest := read.OOB[:read.NN]; len(rest) > 0; {
		h, body, next, err := unix.ParseOneSocketControlMessage(rest)
		if err != nil {
			break
		}
		if h.Level == unix.IPPROTO_UDP && h.Type == unix.UDP_GRO && len(body) >= 4 {
			if size := int(int32(binary.NativeEndian.Uint32(body))); size > 0 {
				return size
			}
		}
		rest = next
	}
	return read.N
}
