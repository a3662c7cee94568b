package chaos

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

const (
	// stillLook is the length of the rig's repeated sleeps by which it sees how late it
	// wakes up. stillLeast is the lateness that counts as a standstill of the machine.
	// It means two missed heartbeats, also for a busy node.
	stillLook, stillLeast = 50 * time.Millisecond, 250 * time.Millisecond
	// stillMost is the part of a run, one in so many, that the machine may stand still
	// if the run is to be judged by time. Leases and leaders that a standstill breaks
	// take one or two election timeouts more, which nothing excuses. The bounds of time
	// have room for that if the machine runs most of the time. Beyond that nobody knows
	// what a cluster could have done.
	stillMost = 4
)

// standstills are the times in which the machine stood still for this process, and so
// for the nodes. They are subtracted from every bound of time, because no cluster could
// have used them. What clients were told is judged without them.
type standstills struct {
	began time.Time
	say   func(format string, args ...any)

	mu sync.Mutex
	// Guarded by mu: when the machine was last seen to run, when it stood still, how
	// often that excused something, and when the watch ended.
	last    time.Time
	when    []stretch
	excused int
	ended   time.Time
}

// stretch is the time from one moment until another.
type stretch struct{ from, to time.Time }

// within is how much of a stretch lies in another one.
func (s stretch) within(o stretch) time.Duration {
	if o.from.After(s.from) {
		s.from = o.from
	}
	if o.to.Before(s.to) {
		s.to = o.to
	}
	return max(0, s.to.Sub(s.from))
}

// newStandstills has seen no standstill yet; the watcher calls see.
func newStandstills(say func(format string, args ...any)) *standstills {
	now := time.Now()
	return &standstills{began: now, last: now, say: say}
}

// watch observes the machine until the returned function is called, which may be more
// than once.
func (s *standstills) watch(ctx context.Context) (end func()) {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() {
		for ctx.Err() == nil {
			s.see(time.Now())
			wait(ctx, stillLook)
		}
	})
	return func() { cancel(); wg.Wait(); s.end(time.Now()) }
}

// see records that the machine runs.
func (s *standstills) see(now time.Time) {
	s.mu.Lock()
	still, stood := s.since(now)
	if stood {
		s.when = append(s.when, still)
	}
	s.last = now
	s.mu.Unlock()
	if stood {
		s.say("the machine stood still for %v", still.to.Sub(still.from).Round(time.Millisecond))
	}
}

// since says whether the machine stood still since it was last seen; mu is held.
func (s *standstills) since(now time.Time) (still stretch, stood bool) {
	still = stretch{s.last.Add(stillLook), now}
	return still, s.ended.IsZero() && now.Sub(still.from) >= stillLeast
}

func (s *standstills) end(now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended.IsZero() {
		s.ended = now
	}
}

// stood is how long the machine stood still between two moments. It includes a
// standstill that is not recorded yet: the caller may be awake before the watcher.
func (s *standstills) stood(from, to time.Time) (d time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, w := range s.when {
		d += w.within(stretch{from, to})
	}
	if still, stood := s.since(to); stood {
		d += still.within(stretch{from, to})
	}
	return d
}

// unjudged is an error if the machine stood still for too much of the run to judge it
// by time.
func (s *standstills) unjudged() error {
	s.mu.Lock()
	to := s.ended
	s.mu.Unlock()
	if to.IsZero() {
		to = time.Now()
	}
	stood, all := s.stood(s.began, to), to.Sub(s.began)
	if stood*stillMost <= all {
		return nil
	}
	return fmt.Errorf("not judged by time: the machine stood still for %v of %v", stood.Round(time.Millisecond), all.Round(time.Millisecond))
}

// String is one line of a report.
func (s *standstills) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all, longest time.Duration
	for _, w := range s.when {
		d := w.to.Sub(w.from)
		all, longest = all+d, max(longest, d)
	}
	return fmt.Sprintf("the machine stood still %d times, %v at most, %v in all, which excused %d times that something was late",
		len(s.when), longest.Round(time.Millisecond), all.Round(time.Millisecond), s.excused)
}

// term is how long something may take while the machine runs.
type term struct {
	s       *standstills
	what    string
	start   time.Time
	bound   time.Duration
	excused bool // guarded by s.mu
}

// term begins one.
func (s *standstills) term(bound time.Duration, format string, args ...any) *term {
	return &term{s: s, what: fmt.Sprintf(format, args...), start: time.Now(), bound: bound}
}

// left is how much of the term is left, at most 0 when it is over. If only standstills
// keep it open, that is logged and counted once.
func (t *term) left() time.Duration {
	now := time.Now()
	took, stood := now.Sub(t.start), t.s.stood(t.start, now)
	left := t.bound - (took - stood)
	if left > 0 && took >= t.bound && t.first() {
		t.s.say("excused: %s takes more than %v, for the machine stood still for %v of %v",
			t.what, t.bound, stood.Round(time.Millisecond), took.Round(time.Millisecond))
	}
	return left
}

// first counts an excuse, and says whether the term had none before.
func (t *term) first() bool {
	t.s.mu.Lock()
	defer t.s.mu.Unlock()
	if t.excused {
		return false
	}
	t.excused = true
	t.s.excused++
	return true
}

func (t *term) over() bool { return t.left() <= 0 }

// took is how long the term has lasted, standstills included.
func (t *term) took() time.Duration { return time.Since(t.start).Round(time.Millisecond) }

// context ends with the term.
func (t *term) context(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() {
		for left := t.left(); left > 0 && ctx.Err() == nil; left = t.left() {
			wait(ctx, left)
		}
		cancel()
	})
	return ctx, func() { cancel(); wg.Wait() }
}

// machine is one whose standstills a test makes.
type machine struct {
	*standstills
	saying sync.Mutex
	said   []string // guarded by saying
}

func newMachine() *machine {
	m := &machine{}
	m.standstills = newStandstills(func(format string, args ...any) {
		m.saying.Lock()
		defer m.saying.Unlock()
		m.said = append(m.said, fmt.Sprintf(format, args...))
	})
	return m
}

// told is the log lines and the number of excuses.
func (m *machine) told() (said []string, excused int) {
	m.saying.Lock()
	defer m.saying.Unlock()
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.said), m.excused
}

// runs lets the machine run for a while.
func (m *machine) runs(d time.Duration) {
	for range d / stillLook {
		time.Sleep(stillLook)
		m.see(time.Now())
	}
}

// A late wake-up is a standstill since the moment when it was due. A little lateness is
// none, and a standstill counts before it is recorded.
func TestStandstillsAreSeen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, start := newMachine(), time.Now()
		stood := func(want time.Duration) {
			t.Helper()
			if got := m.stood(start, time.Now()); got != want {
				t.Errorf("stood still for %v, not %v", got, want)
			}
		}
		m.runs(time.Second)
		time.Sleep(stillLook + stillLeast - 1)
		m.see(time.Now())
		stood(0)
		time.Sleep(stillLook + 10*time.Second)
		stood(10 * time.Second)
		m.see(time.Now())
		stood(10 * time.Second)
		m.runs(time.Second)
		time.Sleep(stillLook + stillLeast)
		stood(10*time.Second + stillLeast)
		m.see(time.Now())
		now := time.Now()
		if got := m.stood(start, now.Add(-stillLeast/2)); got != 10*time.Second+stillLeast/2 {
			t.Errorf("stood still for %v when the last standstill was half over", got)
		}
		if got := m.stood(now.Add(-stillLeast/2), now); got != stillLeast/2 {
			t.Errorf("stood still for %v in the second half of the last standstill", got)
		}
		m.end(now)
		time.Sleep(time.Hour) // nobody watches, so nothing is known
		stood(10*time.Second + stillLeast)
		want := []string{"the machine stood still for 10s", "the machine stood still for 250ms"}
		if said, _ := m.told(); !slices.Equal(said, want) {
			t.Errorf("said %q", said)
		}
	})
}

// A term lasts for its bound while the machine runs. Standstills extend it by exactly
// their length; that is logged once.
func TestStandstillsAreTakenOutOfATerm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		strict, excused := m.term(5*time.Second, "the first"), m.term(15*time.Second, "the second")
		ctx, cancel := excused.context(t.Context())
		defer cancel()
		m.runs(5 * time.Second)
		if _, excused := m.told(); !strict.over() || excused != 0 {
			t.Errorf("a term without a standstill is over: %t, with %d excuses", strict.over(), excused)
		}
		time.Sleep(stillLook + 20*time.Second)
		m.see(time.Now())
		m.runs(5 * time.Second)
		synctest.Wait()
		if excused.over() || ctx.Err() != nil {
			t.Errorf("a term of 15s of which the machine ran for 10s is over: %t, its context: %v", excused.over(), ctx.Err())
		}
		m.runs(5 * time.Second)
		synctest.Wait()
		if !excused.over() || ctx.Err() == nil {
			t.Errorf("a term of 15s of which the machine ran for 15s is over: %t, its context: %v", excused.over(), ctx.Err())
		}
		want := []string{"excused: the second takes more than 15s, for the machine stood still for 9.95s of 15s", "the machine stood still for 20s"}
		if said, excused := m.told(); !slices.Equal(said, want) || excused != 1 {
			t.Errorf("%d excuses, said %q", excused, said)
		}
	})
}

// Late events count unless the machine stood still for too much of the run; violations
// always count.
func TestLateIsNotJudgedWhereTheMachineStood(t *testing.T) {
	for _, tc := range []struct {
		still, run time.Duration
		judged     bool
	}{
		{0, time.Minute, true},
		{20 * time.Second, time.Minute, true},
		{21 * time.Second, time.Minute, false},
		{5 * time.Minute, time.Minute, false},
	} {
		synctest.Test(t, func(t *testing.T) {
			m := newMachine()
			c := &cluster{still: m.standstills}
			m.runs(tc.run - stillLook)
			time.Sleep(stillLook + tc.still)
			m.see(time.Now())
			c.blame("a lie")
			c.late("a delay")
			m.end(time.Now())
			time.Sleep(time.Hour) // time of the checkers
			bad, aside, unjudged := c.judged()
			want, wantAside := []string{"a lie", "a delay"}, []string(nil)
			if !tc.judged {
				want, wantAside = want[:1], want[1:]
			}
			if (unjudged == nil) != tc.judged || !slices.Equal(bad, want) || !slices.Equal(aside, wantAside) {
				t.Errorf("still for %v of %v: wrong %q, set aside %q, %v", tc.still, tc.run+tc.still, bad, aside, unjudged)
			}
			if len(c.blames()) != 2 {
				t.Errorf("a run in which something is late goes on: %q", c.blames())
			}
		})
	}
}
