// Package background runs what may take the processors that nothing else wants, and no
// others: a copy of a range may come a little later, a request that waits behind it may not.
//
// Two things make work wait in a Go process, and both are needed. The system's scheduler
// treats all threads alike, so the work gets a thread of its own with a low priority. And
// Go's own scheduler lets each of GOMAXPROCS goroutines run until it blocks, for 10 ms at
// most, and asks the network for news only where one of those places is free: a place that
// is held by a thread of low priority, which waits, would be lost for the requests. So
// there are more places while such work runs.
package background

import (
	"os"
	"runtime"
	"sync"
	"time"
)

// morePlaces is how many goroutines more may run at once while background work does. It
// is about how many threads of such work there are at a time: copies come four at a time,
// each with one that makes or writes tables and one at its connection, and any that waits
// for a processor may hold a place.
const morePlaces = 8

// linger is how long the places stay when the last piece of work is over: to change their
// number stops all goroutines, twice for each of a row of copies else, and waits for those
// of low priority to stop.
const linger = time.Second

// places counts the pieces of work, and remembers GOMAXPROCS as it is without them.
var places struct {
	sync.Mutex
	running int
	// begun counts the pieces of work that have ever begun.
	begun uint64
	// more says that there are more places than usual.
	more  bool
	usual int
	// byDefault is what Go has chosen, 0 where somebody else has.
	byDefault int
}

// Run runs f in a goroutine of its own, on a thread that has low priority, and returns when
// f has. It costs the making of a thread; and the first piece of work, and a second behind the last,
// all goroutines stop for a moment, and wait for a collection of garbage that is under way.
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

// LowPriority gives the calling goroutine a thread of its own with low priority, for as long
// as it runs: it must not unlock it, since a thread may not raise its priority again. The
// thread ends with the goroutine.
func LowPriority() {
	runtime.LockOSThread()
	lower()
}

// begin makes places when the first piece of work begins.
func begin() {
	places.Lock()
	defer places.Unlock()
	places.running++
	places.begun++
	if !places.more {
		places.more = true
		places.usual = runtime.GOMAXPROCS(0)
		runtime.GOMAXPROCS(places.usual + morePlaces)
	}
}

// end has them taken away a while after the last one. The timer is nobody's: the next
// piece of work may belong to another test, with a time of its own.
func end() {
	places.Lock()
	defer places.Unlock()
	if places.running--; places.running == 0 {
		begun := places.begun
		time.AfterFunc(linger, func() { restore(begun) }) //nolint:forbidigo // the places are the process's, of which there is one clock; nothing that is simulated sees them
	}
}

// restore takes the places away, unless work has begun meanwhile.
func restore(begun uint64) {
	places.Lock()
	defer places.Unlock()
	if !places.more || places.running > 0 || places.begun != begun {
		return
	}
	places.more = false
	// Where GOMAXPROCS follows the processors that the process may use, it goes on to.
	if places.usual == places.byDefault {
		runtime.SetDefaultGOMAXPROCS()
		places.byDefault = runtime.GOMAXPROCS(0)
	} else {
		runtime.GOMAXPROCS(places.usual)
	}
}

func init() {
	if os.Getenv("GOMAXPROCS") == "" {
		places.byDefault = runtime.GOMAXPROCS(0)
	}
}
