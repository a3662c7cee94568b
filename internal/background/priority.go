package background

import "golang.org/x/sys/unix"

const (
	// lowerBy is by how much the nice value of background threads is above the process's.
	// Where all processors are wanted a thread of them gets a 28th of what others get: with
	// 10 it is a tenth, and ten of them together slow requests as one more usual thread
	// does; 19 spares requests no more, and leaves a copy on a full node less than half.
	lowerBy = 15
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
