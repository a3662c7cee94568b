package node

import (
	"time"

	"golang.org/x/sys/unix"

	"github.com/skeindb/skein/internal/limits"
)

// processors returns how much processor time the process has used, by the system's word, and how many processors' time
// it may use. GOMAXPROCS is no measure of that: it is more while copies run, and never below two under a cgroup's limit.
func processors() (used time.Duration, most float64) {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		return 0, 0 // it cannot fail for the process itself
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano()), limits.Processors()
}
