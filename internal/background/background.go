// Package background runs work on processors that nothing else wants: a copy of a range
// may arrive later, but a request must not wait behind it.
//
// Both the system and Go schedule such work, and both need to be told. The system's
// scheduler treats all threads alike, so the work gets its own thread with a low
// priority. Go's scheduler lets each of GOMAXPROCS goroutines run until it blocks, for up
// to 10 ms, and polls the network only while one of those processors (a P) is free. A
// low-priority thread that waits for the CPU would hold a P that requests need. So there
// are additional Ps while such work runs.
package background

import (
	"os"
	"runtime"
	"sync"
	"time"
)

// maxExtraProcs bounds the additional Ps. There is one for each piece of work that runs,
// since each thread that waits for the CPU may hold a P. More would cost requests: with
// 8 while a single thread read for a backup, the median of puts was a third longer.
const maxExtraProcs = 8

// linger is how long the additional Ps remain after the last piece of work. Changing
// GOMAXPROCS stops all goroutines, including those of low priority. Without linger a
// sequence of copies would do that twice for each copy.
const linger = time.Second

// procs counts the running pieces of work and remembers the usual GOMAXPROCS.
var procs struct {
	sync.Mutex
	running int
	// begun counts all pieces of work so far.
	begun uint64
	// extra is how many additional Ps there are. one says that one P is enough where there are none of those.
	extra int
	one   bool
	// owned says that OneProcessor was called: then nobody else sets GOMAXPROCS, but for Go.
	owned bool
	usual int
	// byDefault is the GOMAXPROCS that Go has chosen, 0 if somebody else has.
	byDefault int
}

// Run runs f in its own goroutine, on a low-priority thread, and returns when f has
// returned. It costs the creation of a thread. When more pieces of work run than before, and
// one second after the last, all goroutines stop briefly, after a running garbage collection
// has ended.
func Run(f func()) {
	begin()
	defer end()
	done := make(chan struct{})
	go func() {
		defer close(done)
		LowPriority()
		f()
	}()
	<-done
}

// LowPriority gives the calling goroutine its own low-priority thread for the goroutine's
// whole life. The goroutine must not unlock the thread, because a thread cannot raise its
// priority again. The thread ends with the goroutine.
func LowPriority() {
	runtime.LockOSThread()
	lower()
}

// RunBeside runs f in the calling goroutine, with a P more: it holds one for long.
func RunBeside(f func()) {
	begin()
	defer end()
	f()
}

// OneProcessor says whether one P is enough while no work of low priority runs, in place of the usual number. All goroutines
// stop briefly, as in Run. From its first call on, nobody else may set GOMAXPROCS.
func OneProcessor(one bool) {
	procs.Lock()
	defer procs.Unlock()
	procs.owned = true
	set(procs.extra, one)
}

// begin adds a P if more work runs than ever since the last pause.
func begin() {
	procs.Lock()
	defer procs.Unlock()
	procs.running++
	procs.begun++
	set(max(procs.extra, min(procs.running, maxExtraProcs)), procs.one)
}

// end removes the Ps some time after the last piece of work. Nobody owns the timer: the
// next piece of work may belong to another test with its own time.
func end() {
	procs.Lock()
	defer procs.Unlock()
	if procs.running--; procs.running == 0 {
		begun := procs.begun
		time.AfterFunc(linger, func() { restore(begun) }) //nolint:forbidigo // GOMAXPROCS belongs to the process, which has one clock; the simulation does not see it
	}
}

// restore removes the Ps, unless work has begun meanwhile.
func restore(begun uint64) {
	procs.Lock()
	defer procs.Unlock()
	if procs.running == 0 && procs.begun == begun {
		set(0, procs.one)
	}
}

// set changes how many Ps there are. It is called with procs locked.
func set(extra int, one bool) {
	if extra == procs.extra && one == procs.one {
		return
	}
	usually, alone := procs.extra == 0 && !procs.one, procs.extra == 0 && procs.one
	if usually {
		procs.usual = runtime.GOMAXPROCS(0)
	}
	procs.extra, procs.one = extra, one
	if one && extra == 0 {
		runtime.GOMAXPROCS(1)
		return
	}
	// If GOMAXPROCS followed the processors available to the process, it does so again. They may have changed.
	if (alone || extra == 0) && procs.byDefault > 0 && (procs.owned || procs.usual == procs.byDefault) {
		runtime.SetDefaultGOMAXPROCS()
		procs.byDefault = runtime.GOMAXPROCS(0)
		procs.usual = procs.byDefault
	}
	if want := procs.usual + extra; want != runtime.GOMAXPROCS(0) {
		runtime.GOMAXPROCS(want)
	}
}

func init() {
	if os.Getenv("GOMAXPROCS") == "" {
		procs.byDefault = runtime.GOMAXPROCS(0)
	}
}
