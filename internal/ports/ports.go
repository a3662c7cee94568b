// Package ports chooses ports for servers that tests start. They are below those that the kernel
// gives to clients and listeners that ask for any port (ip_local_port_range). One of these could
// take the port of a server that does not listen yet, or is down just now. Nor does another process
// get such a port from this package.
package ports

import (
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"sync"
)

const first, last = 12_000, 31_999

// stock gives each port once before it gives one again. Processes begin at different ports.
var stock = struct {
	mu sync.Mutex
	// Guarded by mu. held are what keeps ports from other processes.
	next int
	held map[int]net.Listener
}{next: first + os.Getpid()*97%(last-first+1), held: map[int]net.Listener{}}

// Unused returns n ports of 127.0.0.1, one after the other, that nobody uses for TCP or UDP.
func Unused(n int) (ports []int, err error) {
	stock.mu.Lock()
	defer stock.mu.Unlock()
	for range last - first + 1 {
		port := stock.next
		stock.next++
		if ports = append(ports, port); !hold(port) || !unused(port) {
			ports = nil
		}
		if len(ports) == n {
			return ports, nil
		}
		if stock.next > last {
			stock.next, ports = first, nil
		}
	}
	return nil, errors.New("ports: none are left")
}

func unused(port int) bool {
	ip := net.IPv4(127, 0, 0, 1)
	t, err := net.ListenTCP("tcp", &net.TCPAddr{IP: ip, Port: port})
	if err != nil {
		return false
	}
	defer t.Close()
	u, err := net.ListenUDP("udp", &net.UDPAddr{IP: ip, Port: port})
	if err != nil {
		return false
	}
	defer u.Close()
	return true
}

// hold keeps a port from the tests of other processes until this one ends, and says whether none of them has it. stock.mu is
// held.
func hold(port int) bool {
	if stock.held[port] != nil || runtime.GOOS != "linux" { // elsewhere a socket's name is a file
		return true
	}
	l, err := net.Listen("unix", nameOf(port))
	if err != nil {
		return false
	}
	stock.held[port] = l
	return true
}

// nameOf is that of a socket without a file, which is gone with its process.
func nameOf(port int) string { return fmt.Sprintf("@skein-port-of-a-test-%d", port) }
