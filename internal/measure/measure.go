// Package measure says what a piece of code took of the process: CPU time, and memory
// that it asked for. Benchmarks and fuzz targets use it; nothing that ships does. Both
// figures are the whole process's, so what runs beside the piece counts too.
package measure

import (
	"fmt"
	"runtime/metrics"
	"syscall"
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

// Allocated returns how many bytes f allocates on the heap. Small objects are seen a
// span of a few KiB at a time, large ones exactly: it tells whether a decoder believes
// a length that is only claimed, not what an object costs.
func Allocated(f func()) int64 {
	s := []metrics.Sample{{Name: "/gc/heap/allocs:bytes"}}
	metrics.Read(s)
	before := s[0].Value.Uint64()
	f()
	metrics.Read(s)
	return int64(s[0].Value.Uint64() - before)
}

// ClaimLimit is what a decoder may allocate for an input of n bytes: its own structures
// and some hundred bytes for each that came, however many the input claims.
func ClaimLimit(n int) int64 { return 1<<18 + 256*int64(n) }
