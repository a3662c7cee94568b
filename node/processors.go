package node

import (
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// processors returns how much processor time the process has used, by the system's word, and on how many
// processors it runs at a time.
func processors() (used time.Duration, most int) {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		return 0, 0 // it cannot fail for the process itself
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano()), runtime.GOMAXPROCS(0)
}
