package engine

import (
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2"

	"github.com/skeindb/skein/clock"
)

// waitingDB is a store whose compactions wait for grants. Like Pebble it calls Done without its lock.
type waitingDB struct {
	mu      sync.Mutex
	allowed int
	waiting int
	refuses bool // does not take what it is granted
	asked   int
	granted []pebble.CompactionGrantHandle
}

func (d *waitingDB) GetAllowedWithoutPermission() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.allowed
}

func (d *waitingDB) GetWaitingCompaction() (bool, pebble.WaitingCompaction) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.asked++
	return d.waiting > 0, pebble.WaitingCompaction{}
}

func (d *waitingDB) Schedule(h pebble.CompactionGrantHandle) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.waiting == 0 || d.refuses {
		return false
	}
	d.waiting--
	d.granted = append(d.granted, h)
	return true
}

func (d *waitingDB) set(allowed, waiting int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.allowed, d.waiting = allowed, waiting
}

func (d *waitingDB) counts() (granted, asked int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.granted), d.asked
}

func inGrants(t *testing.T, test func(t *testing.T, g *grants, d *waitingDB)) {
	synctest.Test(t, func(t *testing.T) {
		g, d := newGrants(clock.Virtual()), &waitingDB{allowed: 1}
		g.Register(2, d)
		defer g.Unregister()
		test(t, g, d)
	})
}

func mustGrant(t *testing.T, g *grants, want bool) pebble.CompactionGrantHandle {
	t.Helper()
	got, h := g.TrySchedule()
	if got != want {
		t.Fatalf("granted: %v, want %v", got, want)
	}
	return h
}

// A compaction that was refused runs when the one before it has ended, and when more are allowed, also if
// nobody says so.
func TestGrantsWhatWaits(t *testing.T) {
	for name, allow := range map[string]func(g *grants, d *waitingDB, first pebble.CompactionGrantHandle){
		"the first has ended": func(_ *grants, _ *waitingDB, first pebble.CompactionGrantHandle) { first.Done() },
		"more are allowed": func(g *grants, d *waitingDB, _ pebble.CompactionGrantHandle) {
			d.set(2, 1)
			g.UpdateGetAllowedWithoutPermission()
		},
		"more are allowed, unsaid": func(_ *grants, d *waitingDB, _ pebble.CompactionGrantHandle) {
			d.set(2, 1)
			time.Sleep(grantAgain)
		},
	} {
		t.Run(name, func(t *testing.T) {
			inGrants(t, func(t *testing.T, g *grants, d *waitingDB) {
				first := mustGrant(t, g, true)
				mustGrant(t, g, false)
				d.set(1, 1)
				time.Sleep(10 * grantAgain)
				synctest.Wait()
				if n, _ := d.counts(); n != 0 {
					t.Fatalf("%d compactions beside the only one that is allowed", n)
				}
				allow(g, d, first)
				synctest.Wait()
				if n, _ := d.counts(); n != 1 {
					t.Fatalf("%d of one waiting compaction granted", n)
				}
			})
		})
	}
}

// A store without waiting compactions is not looked at: an idle process sleeps.
func TestGrantsRest(t *testing.T) {
	inGrants(t, func(t *testing.T, g *grants, d *waitingDB) {
		first := mustGrant(t, g, true)
		mustGrant(t, g, false)
		d.set(1, 1)
		first.Done()
		synctest.Wait()
		d.granted[0].Done()
		time.Sleep(2 * grantAgain)
		synctest.Wait()
		_, before := d.counts()
		time.Sleep(time.Hour)
		synctest.Wait()
		if _, after := d.counts(); after != before {
			t.Fatalf("asked %d times in an hour of rest", after-before)
		}
		g.mu.Lock()
		defer g.mu.Unlock()
		if g.running != 0 || g.again != nil {
			t.Fatalf("%d running, and looks again: %v", g.running, g.again != nil)
		}
	})
}

// A grant that Pebble does not take counts as none.
func TestGrantsNotTaken(t *testing.T) {
	inGrants(t, func(t *testing.T, g *grants, d *waitingDB) {
		first := mustGrant(t, g, true)
		mustGrant(t, g, false)
		d.set(1, 1)
		d.refuses = true
		first.Done()
		synctest.Wait()
		mustGrant(t, g, true)
	})
}

// After Unregister Pebble is not called any more, whatever waits.
func TestGrantsEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, d := newGrants(clock.Virtual()), &waitingDB{allowed: 1}
		g.Register(2, d)
		first := mustGrant(t, g, true)
		mustGrant(t, g, false)
		d.set(2, 1)
		g.Unregister()
		first.Done()
		time.Sleep(10 * grantAgain)
		synctest.Wait()
		if n, asked := d.counts(); n != 0 || asked != 0 {
			t.Fatalf("%d granted, asked %d times", n, asked)
		}
		mustGrant(t, g, false)
	})
}
