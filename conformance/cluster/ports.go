package cluster

import (
	"errors"
	"net"
	"os"
	"sync"
)

// Ports are given from firstPort to lastPort. The kernel gives clients and listeners that ask
// for any port higher ones (ip_local_port_range), so none of these is taken between the search
// and the server that listens.
const firstPort, lastPort = 22_000, 31_999

// stock gives each port once before it gives one again. Processes begin at different ports.
var stock = struct {
	mu   sync.Mutex
	next int // guarded by mu
}{next: firstPort + os.Getpid()*97%(lastPort-firstPort+1)}

// Ports returns ports of 127.0.0.1 that nobody uses, for TCP and UDP.
func Ports(n int) (ports []int, err error) {
	stock.mu.Lock()
	defer stock.mu.Unlock()
	for range lastPort - firstPort + 1 {
		port := stock.next
		if stock.next++; stock.next > lastPort {
			stock.next = firstPort
		}
		if unused(port) {
			ports = append(ports, port)
		}
		if len(ports) == n {
			return ports, nil
		}
	}
	return nil, errors.New("cluster: no ports are left")
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
