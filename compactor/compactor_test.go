package compactor

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fake is a cluster whose revision is the number of the minute, from 1 on.
type fake struct {
	begun time.Time
	// Guarded by mu.
	mu      sync.Mutex
	follows bool
	silent  bool
	err     error
	said    []string
}

func (f *fake) Current(context.Context) (keyspace.Revision, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.silent {
		return 0, errors.New("nobody tells")
	}
	return 1 + keyspace.Revision(time.Since(f.begun)/time.Minute), nil
}

func (f *fake) Compact(_ context.Context, at keyspace.Revision) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.said = append(f.said, fmt.Sprintf("%v:%d", time.Since(f.begun), at))
	return f.err
}

func (f *fake) Leads() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return !f.follows
}

func (f *fake) set(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

// expect lets time pass and compares the compactions since the last call.
func (f *fake) expect(t *testing.T, d time.Duration, want ...string) {
	t.Helper()
	time.Sleep(d)
	synctest.Wait()
	f.set(func() {
		if !slices.Equal(f.said, want) {
			t.Errorf("after %v: %q, want %q", time.Since(f.begun), f.said, want)
		}
		f.said = nil
	})
}

func run(t *testing.T, o Options, test func(t *testing.T, f *fake)) {
	synctest.Test(t, func(t *testing.T) {
		f := &fake{begun: time.Now()}
		o.Clock, o.Cluster = clock.Virtual(), f
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() { Run(ctx, o) })
		test(t, f)
		cancel()
		wg.Wait()
	})
}

// A short period: nothing during the first one, then once per period at the revision of a period
// and a tenth ago.
func TestPeriodOfTenMinutes(t *testing.T) {
	run(t, Options{Period: 10 * time.Minute}, func(t *testing.T, f *fake) {
		f.expect(t, 10*time.Minute-1)
		f.expect(t, 1, "10m0s:1")
		f.expect(t, 10*time.Minute, "20m0s:10")
		f.expect(t, 20*time.Minute, "30m0s:20", "40m0s:30")
	})
}

// A long one: every hour, at the revision of a period ago.
func TestPeriodOfADay(t *testing.T) {
	run(t, Options{Period: 24 * time.Hour}, func(t *testing.T, f *fake) {
		f.expect(t, 24*time.Hour-1)
		f.expect(t, 1, "24h0m0s:1")
		f.expect(t, 2*time.Hour, "25h0m0s:55", "26h0m0s:115")
	})
}

// A failed compaction is repeated at the next look; an earlier compaction counts as done.
func TestFailuresOfAPeriod(t *testing.T) {
	run(t, Options{Period: 10 * time.Minute}, func(t *testing.T, f *fake) {
		f.set(func() { f.err = errors.New("no quorum") })
		f.expect(t, 12*time.Minute, "10m0s:1", "11m0s:1", "12m0s:2")
		f.set(func() { f.err = kverror.New(kverror.Compacted, "") })
		f.expect(t, time.Minute, "13m0s:3")
		f.set(func() { f.err = nil })
		f.expect(t, 10*time.Minute, "23m0s:13")
	})
}

// A follower notes revisions and compacts none. It goes on where the leader left off. Without
// answers it compacts less, not more.
func TestPeriodOfAFollower(t *testing.T) {
	run(t, Options{Period: 10 * time.Minute}, func(t *testing.T, f *fake) {
		f.set(func() { f.follows = true })
		f.expect(t, 25*time.Minute+time.Second)
		f.set(func() { f.follows, f.silent = false, true })
		f.expect(t, time.Minute, "26m0s:16")
		f.expect(t, 10*time.Minute, "36m0s:26")
		f.expect(t, 30*time.Minute)
		f.set(func() { f.silent = false })
		f.expect(t, 12*time.Minute, "1h18m0s:68")
	})
}

func TestNumberOfRevisions(t *testing.T) {
	run(t, Options{Revisions: 8}, func(t *testing.T, f *fake) {
		f.expect(t, 10*time.Minute-1)
		f.expect(t, 1, "10m0s:3")
		f.set(func() { f.err = errors.New("no quorum") })
		f.expect(t, 5*time.Minute, "15m0s:8")
		f.set(func() { f.err, f.silent = nil, true })
		f.expect(t, 5*time.Minute)
		f.set(func() { f.silent, f.follows = false, true })
		f.expect(t, 5*time.Minute)
		f.set(func() { f.follows = false })
		f.expect(t, 5*time.Minute, "30m0s:23")
	})
}

func TestNothingToKeepIsRefused(t *testing.T) {
	for _, o := range []Options{{}, {Period: time.Hour, Revisions: 1}, {Period: -1}, {Revisions: -1}, {Period: 9}} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%+v was taken", o)
				}
			}()
			Run(t.Context(), o)
		}()
	}
}
