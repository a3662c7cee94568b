package background

import "golang.org/x/sys/unix"

const (
	// lowerBy is by how much the nice value of background threads is above the process's:
	// where all processors are wanted a thread of them gets a tenth of what others get.
	lowerBy = 10
	// niceMax is the lowest priority.
	niceMax = 19
)

// lower gives the calling thread low priority. Linux has one for each thread, and lets each
// lower its own; if it does not (a seccomp filter may forbid it), work goes on as it did.
func lower() {
	if n, err := nice(); err == nil {
		_ = unix.Setpriority(unix.PRIO_PROCESS, 0, min(niceMax, n+lowerBy))
	}
}

// nice is the nice value of the calling thread.
func nice() (int, error) {
	// The system call tells it so that it is never negative.
	p, err := unix.Getpriority(unix.PRIO_PROCESS, 0)
	return 20 - p, err
}
