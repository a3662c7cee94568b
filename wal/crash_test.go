package wal

import (
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/skeindb/skein/internal/simdisk"
)

// seeds extends the random tests; the name of a failed test contains its seed.
var seeds = flag.Uint64("seeds", 3, "seeds of each random test")

// history is what was submitted and what was acknowledged.
type history struct {
	mu sync.Mutex
	// states[i] is the model after i batches.
	states []model
	// texts are the states as they are compared.
	texts []string
	// acked is how many batches are certainly durable: up to the last synced one whose
	// completion was called.
	acked int
	// called counts completions, which arrive in order.
	called int
}

func newHistory(m model) *history {
	return &history{states: []model{m.clone()}, texts: []string{m.String()}}
}

// submit sends one random batch.
func (h *history) submit(tb testing.TB, l *Log, d *driver, sync bool) {
	tb.Helper()
	b := l.NewBatch()
	d.fill(b)
	if b.Bytes() > l.opts.unitBytes() {
		tb.Fatalf("a batch of %d bytes: only those of up to %d are atomic", b.Bytes(), l.opts.unitBytes())
	}
	b.SetSync(sync)
	h.mu.Lock()
	h.states = append(h.states, d.state.clone())
	h.texts = append(h.texts, d.state.String())
	no := len(h.states) - 1
	h.mu.Unlock()
	l.Submit(b, func(err error) {
		h.mu.Lock()
		defer h.mu.Unlock()
		if h.called++; h.called != no {
			tb.Errorf("completion %d came as number %d", no, h.called)
		}
		if err == nil && sync {
			h.acked = no
		}
	})
}

// find returns which prefix of the submitted batches the log contains.
func (h *history) find(l *Log, acked int) (int, error) {
	m, err := observe(l)
	if err != nil {
		return 0, err
	}
	got := m.String()
	for i := len(h.states) - 1; i >= acked; i-- {
		if h.texts[i] == got {
			return i, nil
		}
	}
	for i, s := range h.texts {
		if s == got {
			return 0, fmt.Errorf("recovered %d batches, %d were acknowledged", i, acked)
		}
	}
	return 0, fmt.Errorf("recovered state is no prefix of what was submitted (%d acknowledged of %d):\n%slast:\n%s",
		acked, len(h.states)-1, got, h.states[len(h.states)-1])
}

// crashPoint clones the file system before or after every sync, while the log continues.
type crashPoint struct {
	mem    *simdisk.Disk
	rng    *rand.Rand
	h      *history
	mu     sync.Mutex
	every  int
	seen   int
	clones []crashed
}

type crashed struct {
	fs    *simdisk.Disk
	acked int
	what  string
}

// MaybeError makes the clones; the file system is in the state before the op.
func (c *crashPoint) MaybeError(op errorfs.Op) error {
	switch op.Kind {
	case errorfs.OpFileSync, errorfs.OpFileSyncData, errorfs.OpRename, errorfs.OpCreate, errorfs.OpRemove, errorfs.OpFileWriteAt:
	default:
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.seen++; c.seen%c.every != 0 {
		return nil
	}
	// Acknowledged first: a write acknowledged in between may be lost.
	c.h.mu.Lock()
	acked := c.h.acked
	c.h.mu.Unlock()
	percent := []int{0, 0, 20, 50, 80, 100}[c.rng.IntN(6)]
	c.clones = append(c.clones, crashed{
		fs:    c.mem.Crash(percent, c.rng),
		acked: acked, what: fmt.Sprintf("%v %s, %d%% unsynced", op.Kind, op.Path, percent),
	})
	return nil
}

func (c *crashPoint) String() string { return "crash point" }

// TestCrash crashes at sync points, writes and renames, with any part of the unsynced
// pages surviving, and again during recovery. Recovery returns a prefix of the batches
// with all acknowledged ones. Traps 18 (torn tails and recycled segments), 19 (a hard
// state without its entries), 20 (an overwritten tail), 23 (an interrupted rewrite).
func TestCrash(t *testing.T) {
	for seed := range *seeds {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			d := newDriver(seed, 6)
			d.maxData = 600
			testCrash(t, seed, d, 32<<10, false)
		})
	}
}

// TestCrashInRewrite does the same to a log in which many idle groups are rewritten again
// and again. No rewritten entry, hard state or tombstone wins over a later one, wherever
// the rewrite is interrupted (trap 23).
func TestCrashInRewrite(t *testing.T) {
	rewritten := 0.0
	for seed := range *seeds {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			d := newDriver(seed, 40)
			d.hot, d.maxData = 2, 60
			rewritten += testCrash(t, seed, d, 16<<10, false)
		})
	}
	if t.Logf("%.0f bytes rewritten", rewritten); rewritten < 2000 {
		t.Errorf("only %.0f bytes were rewritten", rewritten)
	}
}

// TestCrashInMove does the same to tails of several segments, which are rewritten in steps,
// while their groups go on to append, overwrite and compact. One group never compacts, so that the
// log always exceeds its target.
func TestCrashInMove(t *testing.T) {
	rewritten := 0.0
	for seed := range *seeds {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			d := newDriver(seed, 4)
			d.maxData, d.keep, d.pinned = 250, 400, 1
			rewritten += testCrash(t, seed, d, 16<<10, true)
		})
	}
	if t.Logf("%.0f bytes rewritten", rewritten); rewritten < 60_000 {
		t.Errorf("only %.0f bytes were rewritten", rewritten)
	}
}

// TestCrashInRotation crashes at every operation of a log that goes through several
// segments. Between the seal, its sync and the first record of the next segment nothing
// is lost, and nothing is reported lost.
func TestCrashInRotation(t *testing.T) {
	sealed := 0
	for seed := range *seeds {
		mem := simdisk.New()
		d := newDriver(seed, 3)
		d.maxData = 280
		h := newHistory(d.state)
		cp := &crashPoint{mem: mem, rng: rand.New(rand.NewPCG(seed, 3)), h: h, every: 1}
		l := mustOpen(t, testOptions(errorfs.Wrap(mem, cp)))
		for range 40 {
			h.submit(t, l, d, true)
			if err := l.Sync(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		mustClose(t, l)
		for _, c := range cp.clones {
			if _, err := c.fs.Stat("wal"); err != nil {
				continue // before the directory existed
			}
			checkCrashed(t, h, c)
			if endsSealed(t, c.fs) {
				sealed++
			}
		}
	}
	if sealed == 0 {
		t.Error("no crash hit a log whose newest records are a seal")
	}
}

// endsSealed reports whether the newest segment with records is sealed.
func endsSealed(t *testing.T, fs *simdisk.Disk) bool {
	t.Helper()
	names, err := fs.List("wal")
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(names)
	for _, n := range slices.Backward(names) {
		b := readFile(t, fs, "wal/"+n)
		h, err := decodeSegmentHeader(b)
		if err != nil {
			continue
		}
		if s := scan(b, h, h.size); s.hasMark {
			return s.lastMark.next != 0
		}
	}
	return false
}

// testCrash returns the number of rewritten bytes. move lets the log rewrite tails of any
// size.
func testCrash(t *testing.T, seed uint64, d *driver, segmentBytes int64, move bool) (rewritten float64) {
	rng := rand.New(rand.NewPCG(seed, 2))
	mem := simdisk.New()
	h := newHistory(d.state)
	for round := range 4 {
		// Every round begins with what the last crash left.
		cp := &crashPoint{mem: mem, rng: rand.New(rand.NewPCG(seed, uint64(round))), h: h, every: 4 + rng.IntN(40)}
		o := testOptions(errorfs.Wrap(mem, cp))
		o.SegmentBytes, o.TargetBytes = segmentBytes, 4*segmentBytes
		reg := prometheus.NewRegistry()
		o.Metrics = NewMetrics(reg)
		l := mustOpen(t, o)
		for range 200 {
			h.submit(t, l, d, rng.IntN(3) > 0)
			for _, id := range l.Groups() {
				if move {
					l.Group(id).Move()
				}
			}
			if rng.IntN(10) == 0 {
				if err := l.Sync(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
		}
		// The log is closed on its own file system; only the clones are examined.
		mustClose(t, l)
		if t.Failed() {
			return rewritten
		}
		rewritten += counter(t, reg, "skein_wal_rewritten_bytes_total")
		var at int
		for i, c := range cp.clones {
			n := checkCrashed(t, h, c)
			if i == len(cp.clones)-1 {
				at, mem = n, c.fs
			}
		}
		if len(cp.clones) == 0 {
			t.Fatalf("round %d: no crash", round)
		}
		// Continue from the last crash.
		d.state = h.states[at].clone()
		h = newHistory(d.state)
	}
	return rewritten
}

func counter(t *testing.T, reg *prometheus.Registry, name string) float64 {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == name {
			return f.GetMetric()[0].GetCounter().GetValue()
		}
	}
	t.Fatalf("no metric %s", name)
	return 0
}

// checkCrashed opens what a crash has left, crashes again at once, and opens it again.
func checkCrashed(t *testing.T, h *history, c crashed) int {
	t.Helper()
	l, err := Open(testOptions(c.fs))
	if err != nil {
		t.Fatalf("crash at %s: %v", c.what, err)
	}
	first, err := h.find(l, c.acked)
	if err != nil {
		t.Fatalf("crash at %s: %v", c.what, err)
	}
	again := c.fs.Crash(0, nil)
	mustClose(t, l)
	l, err = Open(testOptions(again))
	if err != nil {
		t.Fatalf("crash at %s and after recovery: %v", c.what, err)
	}
	m, err := observe(l)
	if err != nil || m.String() != h.texts[first] {
		t.Fatalf("crash at %s: what one recovery showed the next one did not: %v", c.what, err)
	}
	mustClose(t, l)
	return first
}

var errInjected = errors.New("injected")

// TestErrorAtEveryOp fails the n-th file system operation for every n. Open or the log
// fails, nothing acknowledged is lost, all completions arrive in order, and a restart
// works.
func TestErrorAtEveryOp(t *testing.T) {
	for n := 0; ; n++ {
		mem := simdisk.New()
		var ops atomic.Int64
		fired := false
		inj := errorfs.InjectorFunc(func(op errorfs.Op) error {
			if op.Kind == errorfs.OpFileClose || op.Kind == errorfs.OpFileReadAt {
				return nil
			}
			if ops.Add(1) == int64(n+1) {
				fired = true
				return errInjected
			}
			return nil
		})
		d := newDriver(uint64(n), 4)
		d.maxData = 600
		h := newHistory(d.state)
		o := testOptions(errorfs.Wrap(mem, inj))
		o.SegmentBytes, o.TargetBytes = 32<<10, 128<<10
		l, err := Open(o)
		if err != nil {
			if !errors.Is(err, errInjected) {
				t.Fatalf("op %d: open: %v", n, err)
			}
			l = mustOpen(t, testOptions(mem))
			mustClose(t, l)
			continue
		}
		for range 30 {
			h.submit(t, l, d, true)
			_ = l.Sync(t.Context())
		}
		failed := l.Err()
		if err := l.Close(); (err == nil) != (failed == nil) && !errors.Is(err, errInjected) {
			t.Fatalf("op %d: close: %v", n, err)
		}
		if h.called != len(h.states)-1 {
			t.Fatalf("op %d: %d completions of %d", n, h.called, len(h.states)-1)
		}
		after := mustOpen(t, testOptions(mem.Crash(0, nil)))
		if _, err := h.find(after, h.acked); err != nil {
			t.Fatalf("op %d: %v", n, err)
		}
		mustClose(t, after)
		if !fired {
			return
		}
	}
}
