package process

import (
	"context"
	"os"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/skeindb/skein/clock"
)

// step is so much time of a process that uses its processors evenly.
type step struct {
	looks int
	// cpu is how much of a processor is used. Of waits in each look, some are long, or longer.
	cpu                 float64
	waits, long, longer uint64
}

// usedBy returns what a process of these steps has used by each look. What follows is the last step.
func usedBy(steps ...step) func() usage {
	var u usage
	at := 0
	return func() usage {
		for len(steps) > 1 && at == steps[0].looks {
			steps, at = steps[1:], 0
		}
		s := steps[0]
		at++
		u.cpu += time.Duration(s.cpu * float64(lookEvery))
		u.waits, u.long, u.longer = u.waits+s.waits, u.long+s.long, u.longer+s.longer
		return u
	}
}

const second = int(time.Second / lookEvery)

func TestFollowNeed(t *testing.T) {
	idle, light := step{600 * second, 0.01, 2, 0, 0}, step{600 * second, 0.5, 80, 1, 0}
	for name, test := range map[string]struct {
		steps []step
		// want are the seconds at which one processor is enough, and no longer is, in turn.
		want []float64
	}{
		"idle":  {[]step{idle}, []float64{10}},
		"light": {[]step{light}, []float64{10}},
		"start": {[]step{{30 * second, 1.7, 900, 90, 2}, light}, []float64{40.7}},
		// More than there is, and more than one has left.
		"load grows": {[]step{{20 * second, 0.3, 90, 0, 0}, {10 * second, 0.99, 900, 100, 0}, idle}, []float64{10, 20.3, 50}},
		// A collection of garbage, twice in ten seconds.
		"bursts": {[]step{{20 * second, 0.4, 90, 0, 0}, {1, 1, 90, 2, 0}, {5 * second, 0.4, 90, 0, 0}, {2, 1, 90, 2, 0}, light}, []float64{10}},
		// Work of 8 ms, five times a second: half of it is longer than four.
		"without pauses": {[]step{{20 * second, 0.3, 80, 0, 0}, {10 * second, 0.34, 80, 3, 2}, light}, []float64{10, 20.2, 50.1}},
		// A machine full of other work.
		"waiting": {[]step{{20 * second, 0.3, 80, 0, 0}, {10 * second, 0.3, 80, 24, 0}, light}, []float64{10, 20.3, 50}},
		// Two that waited in vain say little of a node that is at rest.
		"few": {[]step{{20 * second, 0.01, 2, 0, 0}, {1, 0.01, 2, 2, 1}, idle}, []float64{10}},
		// Each time for twice as long, until it has been enough for a while.
		"in vain": {[]step{
			{15 * second, 0.5, 90, 0, 0},
			{2 * second, 1, 90, 2, 0},
			{30 * second, 0.5, 90, 0, 0},
			{2 * second, 1, 90, 2, 0},
			{75 * second, 0.5, 90, 0, 0},
			{2 * second, 1, 90, 2, 0},
			light,
		}, []float64{10, 15.2, 37.4, 47.2, 89.4, 124.2, 136.4}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), 160*time.Second)
				defer cancel()
				var got []float64
				c := clock.Virtual()
				begun, one := c.Now(), false
				followNeed(ctx, c, usedBy(test.steps...), func(now bool) {
					if now == one {
						t.Errorf("told %t again", now)
					}
					one = now
					got = append(got, c.Now().Sub(begun).Seconds())
				})
				t.Log(got)
				if len(got) != len(test.want) {
					t.Fatalf("changed at %.1f, want %.1f", got, test.want)
				}
				for i, at := range got {
					if d := at - test.want[i]; d < -0.25 || d > 0.25 {
						t.Errorf("changed at %.1f, want %.1f", got, test.want)
					}
				}
			})
		})
	}
}

// TestMeter: the system and Go say what a process uses, in the units that this package takes them for.
func TestMeter(t *testing.T) {
	m := newMeter()
	before := m.read()
	done := make(chan struct{})
	for range 2 * runtime.GOMAXPROCS(0) {
		go func() {
			for begun := time.Now(); time.Since(begun) < 100*time.Millisecond; {
			}
			done <- struct{}{}
		}()
	}
	for range 2 * runtime.GOMAXPROCS(0) {
		<-done
	}
	after := m.read()
	if cpu := after.cpu - before.cpu; cpu < 20*time.Millisecond || cpu > time.Hour {
		t.Errorf("%v of a processor", cpu)
	}
	for range 1000 {
		go func() { done <- struct{}{} }()
		<-done
	}
	last := m.read()
	if waits := last.waits - before.waits; waits < 20 || last.longer > last.long || last.long > last.waits {
		t.Errorf("%d waits: %+v", waits, last)
	}
}

// TestUseProcessors: who sets GOMAXPROCS is obeyed.
func TestUseProcessors(t *testing.T) {
	usual := runtime.GOMAXPROCS(0)
	t.Setenv("GOMAXPROCS", "3")
	UseProcessors()()
	if err := os.Unsetenv("GOMAXPROCS"); err != nil {
		t.Fatal(err)
	}
	stop := UseProcessors()
	follows := func() bool {
		stacks := make([]byte, 1<<20)
		return strings.Contains(string(stacks[:runtime.Stack(stacks, true)]), "followNeed")
	}
	for begun := time.Now(); !follows(); time.Sleep(time.Millisecond) {
		if time.Since(begun) > 10*time.Second {
			t.Fatal("nothing follows the need")
		}
	}
	stop()
	if now := runtime.GOMAXPROCS(0); now != usual {
		t.Errorf("%d processors, had %d", now, usual)
	}
}
