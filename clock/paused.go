//go:build invariants

package clock

import (
	"fmt"
	"os"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// paused is how many nanoseconds Now lags behind the machine's clock. A test shares it with the nodes
// that it starts. It stops a process, and writes here before it lets the process run on. That looks
// like a hypervisor that has paused its virtual machine.
var paused = sharedPause()

// pausedFor returns it.
func pausedFor() int64 { return paused.Load() }

func sharedPause() *atomic.Int64 {
	name := os.Getenv("SKEIN_CLOCK_PAUSED")
	if name == "" {
		return new(atomic.Int64)
	}
	f, err := os.OpenFile(name, os.O_RDWR, 0)
	if err != nil {
		panic(fmt.Sprintf("clock: %v", err))
	}
	defer f.Close()
	b, err := unix.Mmap(int(f.Fd()), 0, 8, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		panic(fmt.Sprintf("clock: map %s: %v", name, err))
	}
	return (*atomic.Int64)(unsafe.Pointer(unsafe.SliceData(b)))
}
