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

// Work runs with low priority, and nothing else does: not who waits for it, and not
// goroutines that begin later.
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

// usualPlaces takes away the places that work of other tests has left behind.
func usualPlaces() int {
	places.Lock()
	begun := places.begun
	places.Unlock()
	restore(begun)
	return runtime.GOMAXPROCS(0)
}

// While work runs there are more places for goroutines, however many pieces there are, and
// a while longer, so that a row of pieces changes it twice in all; then as many as before.
func TestPlaces(t *testing.T) {
	usual := usualPlaces()
	synctest.Test(t, func(t *testing.T) {
		for row := range 3 {
			var wg sync.WaitGroup
			release := make(chan struct{})
			for range 3 {
				begun := make(chan struct{})
				wg.Go(func() {
					Run(func() {
						close(begun)
						<-release
					})
				})
				<-begun
				if got := runtime.GOMAXPROCS(0); got != usual+morePlaces {
					t.Errorf("%d places while work of row %d runs, want %d", got, row, usual+morePlaces)
				}
			}
			close(release)
			wg.Wait()
			time.Sleep(linger * 9 / 10)
			if got := runtime.GOMAXPROCS(0); got != usual+morePlaces {
				t.Errorf("%d places behind row %d, want %d", got, row, usual+morePlaces)
			}
		}
		time.Sleep(linger)
		if got := runtime.GOMAXPROCS(0); got != usual {
			t.Errorf("%d places afterwards, want %d", got, usual)
		}
	})
}

// Who begins after a test whose time ended with it has places, and gives them back.
func TestPlacesOfAnotherTest(t *testing.T) {
	usual := usualPlaces()
	for range 2 {
		synctest.Test(t, func(t *testing.T) {
			Run(func() {
				if got := runtime.GOMAXPROCS(0); got != usual+morePlaces {
					t.Errorf("%d places while work runs, want %d", got, usual+morePlaces)
				}
			})
		})
	}
	synctest.Test(t, func(t *testing.T) {
		Run(func() {})
		time.Sleep(2 * linger)
		if got := runtime.GOMAXPROCS(0); got != usual {
			t.Errorf("%d places afterwards, want %d", got, usual)
		}
	})
}
