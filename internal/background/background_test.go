package background

import (
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// niceHere is the nice value of the calling thread.
func niceHere(t *testing.T) int {
	t.Helper()
	n, err := nice()
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// TestRunLowersItsOwnThread: only the work itself runs with low priority, not its waiting
// caller and not goroutines that begin later.
func TestRunLowersItsOwnThread(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	usual := niceHere(t)
	got := usual
	Run(func() { got = niceHere(t) })
	if want := min(niceMax, usual+lowerBy); got != want || got == usual && usual < niceMax {
		t.Errorf("background work has nice value %d, want %d", got, want)
	}
	if now := niceHere(t); now != usual {
		t.Errorf("who waited for it has nice value %d, had %d", now, usual)
	}
	for range 100 {
		after := make(chan int)
		go func() { after <- niceHere(t) }()
		if n := <-after; n != usual {
			t.Fatalf("a goroutine that began later has nice value %d, want %d", n, usual)
		}
	}
}

// usualProcs removes the additional Ps that other tests' work has left.
func usualProcs() int {
	procs.Lock()
	begun := procs.begun
	procs.Unlock()
	restore(begun)
	return runtime.GOMAXPROCS(0)
}

// TestExtraProcs: while work runs, and for a while after, there are as many additional Ps
// as pieces of it ran at once, up to a bound. Afterwards there are as many as before.
func TestExtraProcs(t *testing.T) {
	usual := usualProcs()
	synctest.Test(t, func(t *testing.T) {
		for row := range 3 {
			var wg sync.WaitGroup
			release := make(chan struct{})
			for n := range maxExtraProcs + 2 {
				begun := make(chan struct{})
				wg.Go(func() {
					Run(func() {
						close(begun)
						<-release
					})
				})
				<-begun
				want := usual + min(n+1, maxExtraProcs)
				if row > 0 {
					want = usual + maxExtraProcs
				}
				if got := runtime.GOMAXPROCS(0); got != want {
					t.Errorf("%d Ps while %d pieces of row %d run, want %d", got, n+1, row, want)
				}
			}
			close(release)
			wg.Wait()
			time.Sleep(linger * 9 / 10)
			if got := runtime.GOMAXPROCS(0); got != usual+maxExtraProcs {
				t.Errorf("%d Ps behind row %d, want %d", got, row, usual+maxExtraProcs)
			}
		}
		time.Sleep(linger)
		if got := runtime.GOMAXPROCS(0); got != usual {
			t.Errorf("%d Ps afterwards, want %d", got, usual)
		}
	})
}

// TestExtraProcsOfAnotherTest: work after a test whose time has ended gets additional Ps
// and releases them.
func TestExtraProcsOfAnotherTest(t *testing.T) {
	usual := usualProcs()
	for range 2 {
		synctest.Test(t, func(t *testing.T) {
			Run(func() {
				if got := runtime.GOMAXPROCS(0); got != usual+1 {
					t.Errorf("%d Ps while work runs, want %d", got, usual+1)
				}
			})
		})
	}
	synctest.Test(t, func(t *testing.T) {
		Run(func() {})
		time.Sleep(2 * linger)
		if got := runtime.GOMAXPROCS(0); got != usual {
			t.Errorf("%d Ps afterwards, want %d", got, usual)
		}
	})
}

// TestOneProcessor: one P while no other work runs, and the usual and additional ones while it does.
func TestOneProcessor(t *testing.T) {
	usual := usualProcs()
	want := func(when string, n int) {
		t.Helper()
		if got := runtime.GOMAXPROCS(0); got != n {
			t.Errorf("%s: %d Ps, want %d", when, got, n)
		}
	}
	synctest.Test(t, func(t *testing.T) {
		defer OneProcessor(false)
		OneProcessor(true)
		want("one", 1)
		Run(func() { want("one, and work", usual+1) })
		want("one, and work a moment ago", usual+1)
		time.Sleep(2 * linger)
		want("one after work", 1)
		RunBeside(func() {
			want("one, and work", usual+1)
			OneProcessor(false)
			want("all, and work", usual+1)
			OneProcessor(true)
			want("one and the same work", usual+1)
		})
		OneProcessor(false)
		want("all, and work a moment ago", usual+1)
		time.Sleep(2 * linger)
		want("all after work", usual)
	})
}

// TestOwnProcessors: who sets GOMAXPROCS while no work runs has it again afterwards.
func TestOwnProcessors(t *testing.T) {
	usual := usualProcs()
	defer runtime.GOMAXPROCS(usual)
	owned := procs.owned
	procs.owned = false
	defer func() { procs.owned = owned }()
	for _, own := range []int{usual + 3, 1} {
		runtime.GOMAXPROCS(own)
		RunBeside(func() {
			if now := runtime.GOMAXPROCS(0); now != own+1 {
				t.Errorf("%d Ps while work runs, want %d", now, own+1)
			}
		})
		if now := usualProcs(); now != own {
			t.Errorf("%d Ps, had %d", now, own)
		}
	}
}

// TestDefaultProcessors: what Go has chosen is Go's again, so that it follows the processors that there are. It may have
// followed them while no work ran.
func TestDefaultProcessors(t *testing.T) {
	usual := usualProcs()
	defer runtime.SetDefaultGOMAXPROCS()
	runtime.SetDefaultGOMAXPROCS()
	for _, known := range []int{usual, usual + 1} {
		procs.byDefault = known
		OneProcessor(true)
		OneProcessor(false)
		if now := runtime.GOMAXPROCS(0); now != usual || procs.byDefault != usual {
			t.Errorf("%d Ps, by default %d, want %d", now, procs.byDefault, usual)
		}
	}
}
