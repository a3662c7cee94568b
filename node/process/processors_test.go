package process

import (
	"cmp"
	"runtime"
	"testing"
	"testing/fstest"
	"testing/synctest"
	"time"

	"github.com/skeindb/skein/clock"
)

// step is some time in which a process uses its processors evenly.
type step struct {
	lasts time.Duration
	// cpu is how much of a processor is used. Goroutines wait for one, waits of them a second, and long ones of those.
	cpu, waits, long float64
	// crowded is whether the machine is full.
	crowded bool
	// heldEvery is which looks meet something that holds the processor, for 8 ms or for heldFor; 0 is none.
	heldEvery int
	heldFor   time.Duration
	// A collection of garbage takes so much processor time, once a second.
	marks time.Duration
}

// steppedClock is the clock of a process of these steps. The last one goes on.
type steppedClock struct {
	clock.Clock
	begun clock.Time
	steps []step
	looks int
	// base is what was used before it began.
	base usage
}

// now returns the present step, and what was used before it began and since.
func (c *steppedClock) now() (step, usage) {
	var cpu, waits, long float64
	var marking time.Duration
	var collections uint64
	left := c.Now().Sub(c.begun)
	for i, s := range c.steps {
		d := min(left, s.lasts)
		last := d == left || i == len(c.steps)-1
		if last {
			d = left
		}
		cpu, waits, long = cpu+s.cpu*d.Seconds(), waits+s.waits*d.Seconds(), long+s.long*d.Seconds()
		n := d / time.Second
		collections, marking = collections+uint64(n), marking+n*s.marks
		if left -= d; last {
			return s, usage{time.Duration(cpu * float64(time.Second)), marking, collections, uint64(waits), uint64(long)}
		}
	}
	panic("no steps")
}

func (c *steppedClock) read() usage {
	_, u := c.now()
	u.marking, u.collections = u.marking+c.base.marking, u.collections+c.base.collections
	return u
}

// NewTimer is that of a process whose only processor may be held when the timer is due.
func (c *steppedClock) NewTimer(d time.Duration) clock.Timer {
	c.looks++
	if s, _ := c.now(); s.heldEvery > 0 && c.looks%s.heldEvery == 0 {
		d += cmp.Or(s.heldFor, 8*time.Millisecond)
	}
	return c.Clock.NewTimer(d)
}

func TestFollowNeed(t *testing.T) {
	const s = time.Second
	idle := step{cpu: 0.01, waits: 20, lasts: 60 * s}
	light := step{cpu: 0.5, waits: 800, long: 10, lasts: 60 * s}
	busy := func(d time.Duration) step { return step{cpu: 1, waits: 900, long: 20, lasts: d} }
	lightFor := func(d time.Duration) step { l := light; l.lasts = d; return l }
	for name, test := range map[string]struct {
		steps []step
		base  usage
		// want are the seconds at which one processor is enough, and no longer is, in turn.
		want []float64
	}{
		"idle":  {steps: []step{idle}, want: []float64{10}},
		"light": {steps: []step{light}, want: []float64{10}},
		"start": {steps: []step{{cpu: 1.7, waits: 9000, long: 900, lasts: 30 * s}, light}, want: []float64{41}},
		// The machine has more processors, and after that none to spare.
		"load grows": {steps: []step{lightFor(45 * s), busy(10 * s), idle}, want: []float64{10, 45.3, 65.3}},
		"from rest":  {steps: []step{{cpu: 0.01, waits: 20, lasts: 45 * s}, busy(10 * s), idle}, want: []float64{10, 45.6, 65.2}},
		"full machine": {
			steps: []step{lightFor(45 * s), {cpu: 0.3, waits: 800, long: 240, lasts: 10 * s}, light},
			want:  []float64{10, 45.5, 65.2},
		},
		// Collections of garbage, of a tenth of a second.
		"bursts": {steps: []step{lightFor(20 * s), busy(s / 10), lightFor(4 * s), busy(s / 10), light}, want: []float64{10}},
		// Work of 8 ms, eight times a second: one look in thirty comes more than 4 ms late for it.
		"work that does not pause": {steps: []step{lightFor(45 * s), {cpu: 0.4, waits: 800, heldEvery: 30, lasts: 20 * s}, light}, want: []float64{10, 48.7, 77.6}},
		// Or other programs do.
		"crowded machine":  {steps: []step{lightFor(45 * s), {cpu: 0.4, waits: 800, long: 40, crowded: true, heldEvery: 10, lasts: 20 * s}, light}, want: []float64{10}},
		"starved":          {steps: []step{lightFor(45 * s), {cpu: 0.4, waits: 800, long: 80, crowded: true, heldEvery: 3, lasts: 20 * s}, light}, want: []float64{10, 49.6, 77.5}},
		"stood still":      {steps: []step{lightFor(5 * s), {cpu: 0.4, waits: 800, heldEvery: 1, heldFor: 20 * s, lasts: s / 45}, light}, want: []float64{35}},
		"one such work":    {steps: []step{lightFor(45 * s), {cpu: 0.4, waits: 800, heldEvery: 1, lasts: s / 50}, light}, want: []float64{10}},
		"long collections": {steps: []step{lightFor(45 * s), {cpu: 0.2, waits: 800, marks: s / 5, lasts: 20 * s}, light}, want: []float64{10, 46, 76}},
		// The next one is after a second, and short.
		"long collections until now": {steps: []step{light}, base: usage{collections: 2, marking: s}, want: []float64{11}},
		// Two that waited say little of a node that is at rest.
		"few":      {steps: []step{idle, {cpu: 0.01, waits: 20, long: 20, lasts: s / 10}, idle}, want: []float64{10}},
		"two held": {steps: []step{{cpu: 0.01, waits: 20, lasts: 45 * s}, {cpu: 0.01, waits: 20, heldEvery: 1, lasts: s / 5}, idle}, want: []float64{10}},
		// All stay for twice as long each time, until one has been enough for a while.
		"in vain": {
			steps: []step{lightFor(15 * s), busy(2 * s), lightFor(30 * s), busy(2 * s), lightFor(75 * s), busy(2 * s), light},
			want:  []float64{10, 15.3, 37.4, 47.3, 89.4, 124.3, 146.4},
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := &steppedClock{Clock: clock.Virtual(), steps: test.steps, base: test.base}
				c.begun = c.Now()
				var got []float64
				one := false
				stop := useProcessors(c, c.read, func() bool {
					s, _ := c.now()
					return s.crowded
				}, func(now bool) {
					if now == one {
						return // at the end
					}
					one = now
					got = append(got, c.Now().Sub(c.begun).Seconds())
				})
				time.Sleep(160 * time.Second)
				synctest.Wait()
				right := len(got) == len(test.want)
				for i := 0; right && i < len(got); i++ {
					right = got[i] > test.want[i]-0.25 && got[i] < test.want[i]+0.25
				}
				if !right {
					t.Errorf("changed at %.2f, want %.1f", got, test.want)
				}
				if stop(); one {
					t.Error("one processor is left behind")
				}
			})
		})
	}
}

// TestCrowded reads what Linux writes, and takes nothing for granted that it does not.
func TestCrowded(t *testing.T) {
	for _, test := range []struct {
		average, online string
		want            bool
	}{
		{"0.93 2.07 2.99 3/1294 31415\n", "0-1\n", true},
		{"9.93 2.07 2.99 2/1294 31415\n", "0-1\n", false},
		{"0.00 0.00 0.00 6/1294 31415\n", "0-3,8\n", true},
		{"0.00 0.00 0.00 5/1294 31415\n", "0-3,8\n", false},
		{"0.00 0.00 0.00 2/1294 31415\n", "0\n", true},
		{"0.00 0.00 0.00 5000/9000 1\n", "", false},
		{"0.00 0.00 0.00 5000/9000 1\n", "3-", false},
		{"0.00 0.00 0.00\n", "0", false},
		{"", "0", false},
	} {
		files := fstest.MapFS{"proc/loadavg": {Data: []byte(test.average)}, "sys/devices/system/cpu/online": {Data: []byte(test.online)}}
		if got := crowded(files); got != test.want {
			t.Errorf("%q with processors %q: %t", test.average, test.online, got)
		}
	}
	if crowded(fstest.MapFS{}) {
		t.Error("crowded by no files")
	}
}

// TestMeterOfCollections: a collection of garbage shows once it has ended.
func TestMeterOfCollections(t *testing.T) {
	m := newMeter()
	before := m.read()
	live := make([]*[64]byte, 100_000)
	for i := range live {
		live[i] = new([64]byte)
	}
	runtime.GC()
	after := m.read()
	runtime.KeepAlive(live)
	if n, took := after.collections-before.collections, after.marking-before.marking; n == 0 || took <= 0 || took > time.Minute {
		t.Errorf("%d collections took %v of processors", n, took)
	}
}

// TestMeter: the system and Go say what a process uses, in the units that this package takes them for.
func TestMeter(t *testing.T) {
	m := newMeter()
	before := m.read()
	for begun := time.Now(); m.read().cpu-before.cpu < 10*time.Millisecond; {
		if time.Since(begun) > 10*time.Second {
			t.Fatalf("%v of a processor after 10 s", m.read().cpu-before.cpu)
		}
	}
	// All processors are held for a while, again and again, and many others wait. Go measures one of eight.
	done := make(chan struct{})
	for begun := time.Now(); ; {
		for range runtime.GOMAXPROCS(0) {
			go func() {
				for begun := time.Now(); time.Since(begun) < 5*time.Millisecond; {
				}
				done <- struct{}{}
			}()
		}
		for range 100 {
			go func() { done <- struct{}{} }()
		}
		for range 100 + runtime.GOMAXPROCS(0) {
			<-done
		}
		u := m.read()
		if u.long > before.long && u.waits-before.waits > u.long-before.long {
			break
		}
		if time.Since(begun) > 10*time.Second {
			t.Fatalf("after 10 s %+v", u)
		}
	}
}

// TestUseProcessors: who sets GOMAXPROCS is obeyed, and nobody else loses any for good.
func TestUseProcessors(t *testing.T) {
	usual, goroutines := runtime.GOMAXPROCS(0), runtime.NumGoroutine()
	first := UseProcessors()
	first()
	t.Setenv("GOMAXPROCS", "3")
	stop := UseProcessors()
	defer stop()
	if now := runtime.GOMAXPROCS(0); now != usual {
		t.Errorf("%d processors, had %d", now, usual)
	}
	for begun := time.Now(); runtime.NumGoroutine() > goroutines; time.Sleep(time.Millisecond) {
		if time.Since(begun) > 10*time.Second {
			t.Fatalf("%d goroutines, had %d", runtime.NumGoroutine(), goroutines)
		}
	}
}
