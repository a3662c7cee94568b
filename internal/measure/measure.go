// Package measure says what a piece of code took of the process: CPU time, and memory
// that it asked for. Benchmarks and fuzz targets use it; nothing that ships does. Both
// figures are the whole process's, so what runs beside the piece counts too.
package measure

import (
	"fmt"
	"runtime/metrics"
	"syscall"
	"testing"
	"time"
)

// CPU returns the CPU time, user and system, that this process has used so far.
func CPU() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		panic(fmt.Sprintf("measure: getrusage: %v", err)) // of the process itself it cannot fail
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// Excess runs a decoder on an input of n bytes. It returns 0 if what was allocated
// goes with what came: the decoder's own structures and some hundred bytes for each
// byte of the input. Otherwise it returns how much was allocated; the decoder believed
// a length that is only claimed. A decoder that seems to exceed runs again, since
// something beside it may have allocated.
func Excess(n int, decode func()) (allocatedBytes int64) {
	limit := int64(1<<18 + 256*n)
	for range 4 {
		if allocatedBytes = allocated(decode); allocatedBytes <= limit {
			return 0
		}
	}
	return allocatedBytes
}

// Claims fails the test where decoding b allocates more than what b brings, see Excess.
func Claims(t testing.TB, b []byte, decode func()) {
	t.Helper()
	if got := Excess(len(b), decode); got != 0 {
		t.Fatalf("%d bytes allocated for %d that came: %x", got, len(b), b)
	}
}

// allocated returns how many bytes f allocates on the heap. Small objects are seen a
// span of some KiB at a time, large ones exactly.
func allocated(f func()) int64 {
	s := []metrics.Sample{{Name: "/gc/heap/allocs:bytes"}}
	metrics.Read(s)
	before := s[0].Value.Uint64()
	f()
	metrics.Read(s)
	return int64(s[0].Value.Uint64() - before)
}
