package background

import "golang.org/x/sys/unix"

const (
	// lowerBy is how far the nice value of background threads is above the process's. At
	// 15 such a thread gets a 28th of a normal thread's share when all processors are
	// busy. At 10 it would get a tenth, so ten threads would slow requests like one more
	// normal thread. At 19 requests would gain nothing, and a copy on a busy node would
	// get less than half of this.
	lowerBy = 15
	// niceMax is the lowest priority.
	niceMax = 19
)

// lower gives the calling thread low priority. On Linux each thread has its own priority
// and may lower it. If it may not, as under some seccomp filters, the work runs at normal
// priority.
func lower() {
	if n, err := nice(); err == nil {
		_ = unix.Setpriority(unix.PRIO_PROCESS, 0, min(niceMax, n+lowerBy))
	}
}

// nice returns the nice value of the calling thread.
func nice() (int, error) {
	// The system call shifts the value so that it is never negative.
	p, err := unix.Getpriority(unix.PRIO_PROCESS, 0)
	return 20 - p, err
}
