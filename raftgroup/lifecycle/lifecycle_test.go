package lifecycle

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/internal/simdisk"
	"github.com/skeindb/skein/keyspace"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const self, peer, silent keyspace.NodeID = 1, 2, 3

var errFull = errors.New("the disk is full")

// world is an owner whose replicas are entries of maps, on a disk that can crash.
type world struct {
	t     *testing.T
	fs    *simdisk.Disk
	e     *engine.Engine
	l     *Lifecycle
	begin time.Time
	stop  func()

	mu sync.Mutex
	// Guarded by mu: open are the replicas, listed the answers of peers, verdicts and fails the
	// answers of the owner, trace the calls.
	open     map[keyspace.GroupID]keyspace.ReplicaID
	listed   map[keyspace.GroupID]keyspace.ReplicaID
	verdicts map[keyspace.GroupID]Verdict
	fails    map[string]int
	trace    []string
	// meanwhile is what happens while a peer is asked.
	meanwhile func()
	// slow is how long the disk takes to destroy something.
	slow time.Duration
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{
		t: t, fs: simdisk.New(), begin: time.Now(), open: map[keyspace.GroupID]keyspace.ReplicaID{},
		listed: map[keyspace.GroupID]keyspace.ReplicaID{}, verdicts: map[keyspace.GroupID]Verdict{}, fails: map[string]int{},
	}
	w.start()
	return w
}

func (w *world) start() {
	e, err := engine.Open(engine.Options{FS: w.fs, Dir: "data", Clock: clock.Virtual(), BallastBytes: -1, LowSpaceBytes: -1})
	if err != nil {
		w.t.Fatal(err)
	}
	w.e = e
	w.l = New(Config{
		Self: self, Clock: clock.Virtual(), Owner: w, MaxUnknown: 8, Logger: zap.NewNop(),
		Tombstones: Tombstones{Engine: e, Key: func(g keyspace.GroupID) []byte {
			return engine.NodeLocalKey(binary.BigEndian.AppendUint64([]byte("left/"), uint64(g)))
		}},
	})
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { w.l.RunOpener(ctx) })
	wg.Go(func() { w.l.RunGC(ctx) })
	w.stop = func() {
		cancel()
		wg.Wait()
		if err := e.Close(); err != nil {
			w.t.Error(err)
		}
	}
}

// did notes a call and says whether it fails.
func (w *world) did(what string) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.trace = append(w.trace, fmt.Sprintf("%s %s", time.Since(w.begin).Round(time.Millisecond), what))
	if w.fails[what] > 0 {
		w.fails[what]--
		return errFull
	}
	return nil
}

func (w *world) OpenStored(_ context.Context, u Unknown) (bool, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.open[u.Group] >= u.To, nil
}

func (w *world) Ask(ctx context.Context, u Unknown) (d keyspace.Descriptor, err error) {
	if err := w.did(fmt.Sprintf("ask %d of %d", u.From, u.Group)); err != nil {
		return d, err
	}
	if u.From == silent {
		<-ctx.Done()
		return d, ctx.Err()
	}
	if w.meanwhile != nil {
		w.meanwhile()
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if id := w.listed[u.Group]; id != 0 {
		d.Replicas = []keyspace.Replica{{ID: id, Node: self}}
	}
	return d, nil
}

func (w *world) OpenEmpty(_ context.Context, u Unknown, _ *keyspace.Descriptor) error {
	if err := w.did(fmt.Sprintf("open %d", u.Group)); err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.open[u.Group] = u.To
	return nil
}

func (w *world) Suspects() (gs []keyspace.GroupID) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for g, v := range w.verdicts {
		if v != Stay {
			gs = append(gs, g)
		}
	}
	slices.Sort(gs)
	return gs
}

func (w *world) Verdict(g keyspace.GroupID) (Verdict, error) {
	err := w.did(fmt.Sprintf("verdict on %d", g))
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.verdicts[g], err
}

// each notes a step for all groups and returns those for which it fails.
func (w *world) each(step string, gs []keyspace.GroupID, do func(g keyspace.GroupID) error) map[keyspace.GroupID]error {
	failed := map[keyspace.GroupID]error{}
	for _, g := range gs {
		err := w.did(fmt.Sprintf("%s %d", step, g))
		if err == nil {
			err = do(g)
		}
		if err != nil {
			failed[g] = err
		}
	}
	return failed
}

func (w *world) End(ctx context.Context, gs []keyspace.GroupID) map[keyspace.GroupID]error {
	left := map[keyspace.GroupID]keyspace.ReplicaID{}
	failed := w.each("end", gs, func(g keyspace.GroupID) error {
		w.mu.Lock()
		defer w.mu.Unlock()
		left[g] = w.open[g]
		return nil
	})
	if err := w.l.cfg.Tombstones.Store(ctx, left); err != nil {
		w.t.Error(err)
	}
	return failed
}

func (w *world) Destroy(_ context.Context, gs []keyspace.GroupID) map[keyspace.GroupID]error {
	time.Sleep(w.slow)
	return w.each("destroy", gs, func(g keyspace.GroupID) error {
		left, err := w.l.cfg.Tombstones.Left(g)
		w.mu.Lock()
		defer w.mu.Unlock()
		if err != nil || left < w.open[g] {
			w.t.Errorf("group %d is destroyed without a tombstone: %d, %v", g, left, err)
		}
		return nil
	})
}

func (w *world) Gone(g keyspace.GroupID) error {
	if err := w.did(fmt.Sprintf("gone %d", g)); err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.open, g)
	delete(w.verdicts, g)
	return nil
}

// saw compares the calls since the last comparison.
func (w *world) saw(want ...string) {
	w.t.Helper()
	synctest.Wait()
	w.mu.Lock()
	defer w.mu.Unlock()
	if !slices.Equal(w.trace, want) {
		w.t.Errorf("got  %q\nwant %q", w.trace, want)
	}
	w.trace = nil
}

func (w *world) judge(g keyspace.GroupID, v Verdict) {
	w.mu.Lock()
	w.verdicts[g] = v
	w.mu.Unlock()
}

func in(t *testing.T, test func(w *world)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		defer func() { w.stop() }()
		test(w)
	})
}

// A replica is opened if the peer lists it, and no other one.
func TestOpensWhatThePeerLists(t *testing.T) {
	in(t, func(w *world) {
		w.listed[7] = 5
		w.l.Unknown(Unknown{peer, 7, 4})
		w.saw("0s ask 2 of 7")
		w.l.Unknown(Unknown{peer, 8, 1})
		w.saw("0s ask 2 of 8")
		w.l.Unknown(Unknown{peer, 7, 5})
		w.saw("0s ask 2 of 7", "0s open 7")
		w.l.Unknown(Unknown{peer, 7, 5})
		w.saw()
	})
}

// A peer that does not answer delays others by one timeout, however much it says.
func TestOthersWaitOnceForASilentPeer(t *testing.T) {
	in(t, func(w *world) {
		w.listed[9] = 1
		for g := range keyspace.GroupID(4) {
			w.l.Unknown(Unknown{silent, 10 + g, 1})
		}
		w.l.Unknown(Unknown{peer, 9, 1})
		time.Sleep(5 * time.Second)
		w.saw("0s ask 3 of 10", "1s ask 2 of 9", "1s open 9")
	})
}

// No more questions wait than MaxUnknown. They wait here for a peer that does not answer.
func TestQuestionsAreBounded(t *testing.T) {
	in(t, func(w *world) {
		w.l.Unknown(Unknown{silent, 9, 1})
		synctest.Wait()
		for range 3 {
			for g := range keyspace.GroupID(20) {
				w.l.Unknown(Unknown{peer, 10 + g, 1})
			}
		}
		time.Sleep(5 * time.Second)
		w.mu.Lock()
		defer w.mu.Unlock()
		if n := len(w.trace); n != 1+8 {
			w.t.Errorf("%d questions", n)
		}
	})
}

// While a peer is asked for it, a replica comes by a split and is removed again. The peer's late
// answer does not open it a second time: the log with its votes is gone.
func TestRemovedWhileThePeerIsAsked(t *testing.T) {
	in(t, func(w *world) {
		w.listed[7] = 5
		w.meanwhile = func() {
			w.mu.Lock()
			w.open[7], w.verdicts[7] = 5, Remove
			w.mu.Unlock()
			if err := w.l.Remove(w.t.Context(), 7); err != nil {
				w.t.Error(err)
			}
		}
		w.l.Unknown(Unknown{peer, 7, 5})
		w.saw("0s ask 2 of 7", "0s verdict on 7", "0s end 7", "0s destroy 7", "0s gone 7")
	})
}

// A replica that has left is not opened again, also after a crash.
func TestTombstoneOutlivesACrash(t *testing.T) {
	in(t, func(w *world) {
		w.open[7], w.listed[7] = 5, 5
		w.judge(7, Remove)
		w.l.Check(7)
		w.saw("0s verdict on 7", "0s end 7", "0s destroy 7", "0s gone 7")
		w.fs = w.fs.Crash(0, nil)
		w.stop()
		w.start()
		w.l.Unknown(Unknown{peer, 7, 5})
		w.l.Unknown(Unknown{peer, 7, 4})
		w.saw()
		w.listed[7] = 6
		w.l.Unknown(Unknown{peer, 7, 6})
		w.saw("0s ask 2 of 7", "0s open 7")
	})
}

// Every step that fails is repeated after a pause, and no verdict is asked for again.
func TestFailedRemovalIsRepeated(t *testing.T) {
	for _, step := range []string{"end 7", "destroy 7", "gone 7"} {
		in(t, func(w *world) {
			w.open[7], w.fails[step] = 5, 2
			w.judge(7, Remove)
			w.l.Check(7)
			time.Sleep(5 * time.Second / 2)
			w.mu.Lock()
			n, open := len(w.trace), w.open[7]
			last := w.trace[n-1]
			judged := slices.ContainsFunc(w.trace[1:], func(s string) bool { return strings.HasSuffix(s, "verdict on 7") })
			w.mu.Unlock()
			if open != 0 || last != "2s gone 7" || judged {
				w.t.Errorf("after %s failed twice: %q", step, w.trace)
			}
		})
	}
}

// Who waits for another removal waits until its context ends. The group is removed nevertheless.
func TestRemovalBehindAnother(t *testing.T) {
	in(t, func(w *world) {
		w.open[7], w.open[8], w.slow = 5, 5, 3*time.Second
		w.judge(7, Remove)
		w.judge(8, Remove)
		var first sync.WaitGroup
		first.Go(func() {
			if err := w.l.Remove(w.t.Context(), 7); err != nil {
				w.t.Error(err)
			}
		})
		synctest.Wait()
		ctx, cancel := context.WithTimeout(w.t.Context(), time.Second)
		defer cancel()
		if err := w.l.Remove(ctx, 8); !errors.Is(err, context.DeadlineExceeded) || time.Since(w.begin) != time.Second {
			w.t.Errorf("after %v: %v", time.Since(w.begin), err)
		}
		first.Wait()
		time.Sleep(4 * time.Second)
		w.saw("0s verdict on 7", "0s end 7", "3s destroy 7", "3s gone 7", "3s verdict on 8", "3s end 8", "6s destroy 8", "6s gone 8")
	})
}

// Replicas that leave at once are removed step by step together, and share each flush. One that
// fails is repeated alone, and does not keep the others. No batch is larger than MaxTogether.
func TestRemovedTogether(t *testing.T) {
	in(t, func(w *world) {
		leave := func(first, n keyspace.GroupID) {
			w.mu.Lock()
			defer w.mu.Unlock()
			for g := range n {
				w.open[first+g], w.verdicts[first+g] = 5, Remove
			}
		}
		leave(7, 3)
		w.mu.Lock()
		w.fails["end 8"] = 1
		w.mu.Unlock()
		time.Sleep(SweepEvery + RetryAfter/2)
		w.saw("10s verdict on 7", "10s verdict on 8", "10s verdict on 9", "10s end 7", "10s end 8", "10s end 9",
			"10s destroy 7", "10s destroy 9", "10s gone 7", "10s gone 9")
		time.Sleep(RetryAfter)
		w.saw("11s end 8", "11s destroy 8", "11s gone 8")
		leave(100, 2*MaxTogether+1)
		time.Sleep(SweepEvery)
		w.mu.Lock()
		defer w.mu.Unlock()
		var last string
		steps := 0
		for _, s := range w.trace {
			if step := strings.Fields(s)[1]; step != last {
				last, steps = step, steps+1
			}
		}
		if len(w.trace) != 4*(2*MaxTogether+1) || steps != 3*4 {
			w.t.Errorf("%d calls in %d steps", len(w.trace), steps)
		}
	})
}

// A replica that cannot be removed yet is looked at again, and others are not delayed by it.
func TestWaitingReplica(t *testing.T) {
	in(t, func(w *world) {
		w.open[7], w.open[8] = 5, 1
		w.judge(7, Wait)
		w.l.Check(7)
		w.saw("0s verdict on 7")
		time.Sleep(time.Second / 2)
		w.judge(8, Remove)
		w.l.Check(8)
		w.saw("500ms verdict on 8", "500ms end 8", "500ms destroy 8", "500ms gone 8")
		w.judge(7, Remove)
		time.Sleep(time.Second)
		w.saw("1s verdict on 7", "1s end 7", "1s destroy 7", "1s gone 7")
	})
}

// A replica of whose removal nobody has told is found by the sweep.
func TestSweepFindsARemovedReplica(t *testing.T) {
	in(t, func(w *world) {
		w.open[7] = 5
		w.judge(7, Remove)
		time.Sleep(SweepEvery - time.Second)
		w.saw()
		time.Sleep(time.Second)
		w.saw("10s verdict on 7", "10s end 7", "10s destroy 7", "10s gone 7")
	})
}

// What was begun before a crash is completed without a verdict.
func TestContinue(t *testing.T) {
	in(t, func(w *world) {
		w.l.Continue(7)
		w.saw("0s end 7", "0s destroy 7", "0s gone 7")
		w.l.Check(7)
		w.saw("0s verdict on 7")
	})
}

// A node's replica leaves with the change that is without it, and with no other one.
func TestSetDeparted(t *testing.T) {
	in(t, func(w *world) {
		before := []keyspace.Replica{{ID: 4, Node: self}, {ID: 5, Node: peer}}
		for _, c := range []struct {
			after []keyspace.Replica
			want  keyspace.ReplicaID
		}{
			{before, 0},
			{before[:1], 0},
			{before[1:], 4},
			{[]keyspace.Replica{{ID: 6, Node: self}, before[1]}, 4},
		} {
			b := w.e.NewBatch()
			if err := errors.Join(w.l.cfg.Tombstones.SetDeparted(b, 9, self, before, c.after), b.Commit()); err != nil {
				w.t.Fatal(err)
			}
			if left, err := w.l.cfg.Tombstones.Left(9); left != c.want || err != nil {
				w.t.Errorf("after %v: %d has left, want %d: %v", c.after, left, c.want, err)
			}
		}
	})
}

func TestRemoved(t *testing.T) {
	members := func(conf uint64, ids ...keyspace.ReplicaID) *keyspace.Descriptor {
		d := &keyspace.Descriptor{ConfIndex: conf}
		for _, id := range ids {
			d.Replicas = append(d.Replicas, keyspace.Replica{ID: id})
		}
		return d
	}
	for _, c := range []struct {
		name           string
		applied, heard *keyspace.Descriptor
		want           bool
	}{
		{"nothing is known", members(0), members(0), false},
		{"it has applied that it left", members(12, 1), members(0), true},
		{"it is a member", members(12, 1, 2), members(0), false},
		{"it is heard to have left", members(12, 1, 2), members(14, 1), true},
		{"it is heard not to have come", members(12, 1, 2), members(10, 1), false},
		{"it has nothing, and left", members(0), members(14, 1), true},
	} {
		if got := Removed(2, c.applied, c.heard); got != c.want {
			t.Errorf("%s: removed %t", c.name, got)
		}
	}
}
