package load

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
)

// host is a node with one range, of which the test is the replica and the store.
type host struct {
	meter *Meter
	r     Range

	mu sync.Mutex
	// Guarded by mu.
	state   State
	refused error
	splits  []string
	stored  int64
	middle  mvcc.Split
	err     error
}

func (h *host) LoadState() State { return h.state }

func (h *host) CanSplit(context.Context) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.refused
}

func (h *host) Split(_ context.Context, g keyspace.Generation, key []byte) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.splits = append(h.splits, fmt.Sprintf("%d at %s", g, key))
	h.state.Generation++
	h.state.Span.End, h.stored = key, h.stored/2
	return nil
}

func (h *host) EstimateSpanBytes(keyspace.Span) (int64, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.stored, nil
}

func (h *host) Flush(context.Context) error { return nil }

func (h *host) Middle(keyspace.Span) (mvcc.Split, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.middle, h.err
}

// made returns how the range was split so far.
func (h *host) made() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return strings.Join(h.splits, ", ")
}

// set changes what the host is.
func (h *host) set(f func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	f()
}

// figures are those of the range.
func (h *host) figures() Figures {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.r.Figures()
}

// read reads keys, so many a second, for a while.
func (h *host) read(perSecond int, during time.Duration, key func(i int) string) {
	pause := time.Second / time.Duration(perSecond)
	for i := range int(during / pause) {
		h.mu.Lock()
		if h.r.Read() {
			h.r.Look(Request{Span: keyspace.Single([]byte(key(i)))})
		}
		h.mu.Unlock()
		time.Sleep(pause)
	}
}

// measured runs a test with a leader of generation 1 of everything.
func measured(t *testing.T, maxBytes, maxLoad int64, test func(t *testing.T, h *host)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		h := &host{state: State{Generation: 1, Leads: true}}
		h.meter = NewMeter(Config{
			Clock: clock.Virtual(), Store: h, MaxBytes: maxBytes, MaxLoad: maxLoad,
			Some: func(int) []*Range { return []*Range{&h.r} }, Metrics: NewMetrics(nil),
		})
		h.r = h.meter.Range(1, &h.mu, h, zap.NewNop())
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() { h.meter.Run(ctx) })
		test(t, h)
		cancel()
		wg.Wait()
	})
}

func evenly(i int) string { return fmt.Sprintf("k%02d", i*37%100) }

// Load above the bound splits a range where it divides, once it has lasted. At rest the
// range is on no list and has no load.
func TestLoadSplitsARange(t *testing.T) {
	measured(t, -1, 9, func(t *testing.T, h *host) {
		h.read(12, splitAfter-5*time.Second, evenly)
		if s := h.made(); s != "" {
			t.Fatalf("split %s too early", s)
		}
		if f := h.figures(); f.ReadsPerSecond < 6 || f.ReadsPerSecond > 13 || f.WritesPerSecond != 0 {
			t.Errorf("%+v", f)
		}
		h.read(12, time.Minute, evenly)
		if s := h.made(); s < "1 at k40" || s > "1 at k60" {
			t.Errorf("split %q", s)
		}
		if n := testutil.ToFloat64(h.meter.cfg.Metrics.Splits.WithLabelValues("load")); n != 1 {
			t.Errorf("%v splits are counted", n)
		}
		h.set(func() { h.state.Leads = false })
		if f := h.figures(); f.Load() != 0 || f.SplitKey != nil {
			t.Errorf("who does not lead has %+v", f)
		}
		h.set(func() { h.state.Leads = true })
		time.Sleep((restTicks + 2) * tick)
		synctest.Wait()
		if f := h.figures(); f.Load() != 0 || len(h.meter.active) != 0 {
			t.Errorf("at rest: %+v, %d are measured", f, len(h.meter.active))
		}
		h.read(12, 5*time.Second, evenly)
		if f := h.figures(); f.Load() == 0 {
			t.Error("it is not measured after a rest")
		}
	})
}

// Load that no split divides stays in one range, which says so.
func TestLoadThatDoesNotDivide(t *testing.T) {
	for name, key := range map[string]func(int) string{
		"hot-key": func(i int) string { return fmt.Sprintf("k%02d", i%10*(i%3/2)) },
		"tail":    func(i int) string { return fmt.Sprintf("k%06d", i) },
	} {
		measured(t, -1, 4, func(t *testing.T, h *host) {
			h.read(6, 100*time.Second, key)
			if f := h.figures(); h.made() != "" || f.Unsplit == "" || f.SplitKey != nil {
				t.Errorf("%s: split %q, %+v", name, h.made(), f)
			}
			if n := testutil.ToFloat64(h.meter.cfg.Metrics.Unsplit.WithLabelValues(name)); n != 1 {
				t.Errorf("%s: counted %v times", name, n)
			}
			h.read(1, time.Minute, key)
			if f := h.figures(); f.Unsplit != "" {
				t.Errorf("%s: a cool range says %q", name, f.Unsplit)
			}
		})
	}
}

// A range beyond its size is split at the middle that the store names. Bytes outside of
// tables count, but not for a new span.
func TestSizeSplitsARange(t *testing.T) {
	measured(t, 1000, -1, func(t *testing.T, h *host) {
		h.set(func() { h.stored, h.middle = 600, mvcc.Split{Key: []byte("m"), Left: 500, Bytes: 1100} })
		h.set(func() { h.r.Applied(300) })
		time.Sleep(5 * time.Second)
		// Bytes that were applied before the first estimate may not be of this span.
		if f := h.figures(); f.Bytes != 600 || h.made() != "" {
			t.Errorf("%d bytes, split %q", f.Bytes, h.made())
		}
		h.set(func() { h.r.Applied(300) })
		if f := h.figures(); f.Bytes != 900 {
			t.Errorf("%d bytes", f.Bytes)
		}
		h.set(func() { h.r.Applied(200) })
		time.Sleep(2 * time.Second)
		if s := h.made(); s != "1 at m" {
			t.Errorf("split %q", s)
		}
		time.Sleep(5 * time.Second)
		if f := h.figures(); f.Bytes != 300 {
			t.Errorf("a half has %d bytes", f.Bytes)
		}
		// The store writes tables, and a range at rest is looked at again.
		time.Sleep((restTicks + 2) * tick)
		h.set(func() { h.stored = 700 })
		h.meter.Flushed()
		time.Sleep(5 * time.Second)
		if f := h.figures(); f.Bytes != 700 {
			t.Errorf("behind a flush it has %d bytes", f.Bytes)
		}
	})
}

// A range that cannot be split says why. It is tried again, ever more rarely.
func TestSplitIsTriedAgain(t *testing.T) {
	for name, c := range map[string]struct {
		spoil  func(h *host)
		first  time.Duration
		reason string
	}{
		"one key has all": {func(h *host) { h.err = mvcc.ErrNoSplitKey }, splitHopeless, reasonOneKey},
		"members change":  {func(h *host) { h.refused = errors.New("busy") }, splitRetry, reasonFailed},
	} {
		measured(t, 1000, -1, func(t *testing.T, h *host) {
			c.spoil(h)
			h.set(func() { h.stored, h.middle = 2000, mvcc.Split{Key: []byte("m"), Bytes: 2000} })
			h.set(h.r.Measure)
			backoff := func() (d time.Duration) {
				h.set(func() { d = h.r.backoff })
				return d
			}
			begin := time.Now()
			for want := c.first; want <= 4*c.first; want *= 2 {
				for backoff() < want {
					if time.Since(begin) > 10*c.first {
						t.Fatalf("%s: the next attempt is %v later", name, backoff())
					}
					time.Sleep(time.Second)
				}
			}
			if d := time.Since(begin); d < 3*c.first-2*time.Second {
				t.Errorf("%s: the third attempt came after %v", name, d)
			}
			if f := h.figures(); f.Unsplit == "" || h.made() != "" {
				t.Errorf("%s: split %q, %+v", name, h.made(), f)
			}
			if n := testutil.ToFloat64(h.meter.cfg.Metrics.Unsplit.WithLabelValues(c.reason)); n != 1 {
				t.Errorf("%s: counted %v times", name, n)
			}
			h.set(func() { h.err, h.refused = nil, nil })
			time.Sleep(8 * c.first)
			if f := h.figures(); h.made() != "1 at m" || f.Unsplit != "" {
				t.Errorf("%s, in the end: split %q, %+v", name, h.made(), f)
			}
		})
	}
}

// Neither a follower nor an empty replica nor one that drains splits its range.
func TestOnlyALeaderSplits(t *testing.T) {
	for name, s := range map[string]State{
		"follower": {Generation: 1}, "empty": {Leads: true}, "draining": {Generation: 1, Leads: true, Draining: true},
		"stopped": {Generation: 1, Leads: true, Stopped: true},
	} {
		measured(t, 1000, 4, func(t *testing.T, h *host) {
			h.set(func() { h.state, h.stored, h.middle = s, 2000, mvcc.Split{Key: []byte("m"), Bytes: 2000} })
			h.read(10, time.Minute, evenly)
			if h.made() != "" {
				t.Errorf("%s: split %q", name, h.made())
			}
		})
	}
}

// However many requests come, a sample keeps few of them, spread over all.
func TestSampleIsBounded(t *testing.T) {
	s := newSampler(1, 1)
	left, taken := int64(0), 0
	for i := range 1_000_000 {
		if left--; left < 0 {
			left = s.take(keyspace.Single(fmt.Appendf(nil, "k%07d", i)))
			taken++
		}
	}
	if len(s.requests) > sampleSize || len(s.requests) < sampleSize/2 {
		t.Fatalf("%d requests are kept", len(s.requests))
	}
	if taken > 20*sampleSize {
		t.Errorf("%d requests were looked at", taken)
	}
	for i, q := range s.requests {
		if len(q.End) != 0 {
			t.Fatalf("%q is a span up to %q", q.Key, q.End)
		}
		if i > 0 && string(q.Key) <= string(s.requests[i-1].Key) {
			t.Errorf("%q comes after %q", q.Key, s.requests[i-1].Key)
		}
	}
	if first, last := string(s.requests[0].Key), string(s.requests[len(s.requests)-1].Key); first > "k0100000" || last < "k0900000" {
		t.Errorf("they are from %s to %s", first, last)
	}
}
