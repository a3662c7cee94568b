package mirror

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/simdisk"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mirror/diff"
	"github.com/skeindb/skein/mvcc"
)

// options are those of a mirror on a disk.
func options(s *source, d *target, disk *simdisk.Disk) Options {
	d.fs = disk
	return Options{
		FS: disk, Dir: "m", Clock: clock.Virtual(), Source: s, Target: d, SourceData: s, TargetData: d, Nonce: "n1",
		SnapshotRevision: func(path string) (keyspace.Revision, error) {
			db, err := readDatabase(disk, path)
			return db.Revision, err
		},
	}
}

// start runs a mirror. The channel gets its error.
func start(ctx context.Context, o Options) chan error {
	ended := make(chan error, 1)
	go func() { ended <- Run(ctx, o) }()
	return ended
}

// finished checks a target behind a cut-over.
func finished(t *testing.T, s *source, d *target) {
	t.Helper()
	if d.phase != TargetServing || d.finish.Revision != s.present() || d.present() != s.present() {
		t.Fatalf("the target is %s at %d, finished at %d, and the source at %d", d.phase, d.present(), d.finish.Revision, s.present())
	}
	if !maps.Equal(d.finish.Leases, s.leases) || d.finish.Compacted > s.compacted {
		t.Fatalf("leases %v, not %v; compacted %d, not %d", d.finish.Leases, s.leases, d.finish.Compacted, s.compacted)
	}
	sameHistory(t, s, d, 0)
	for k, rev := range d.loose {
		if v := d.get(k, d.rev); v != nil && v.Mod == rev && d.leases[v.Lease] != 0 {
			t.Errorf("key %q of revision %d is not attached to lease %x, which lives", k, rev, int64(v.Lease))
		}
	}
}

// TestMirror: a source that is written to, whose watch breaks off, is mirrored and cut over, with
// every version, and within the time quiet.
func TestMirror(t *testing.T) {
	for seed := range uint64(10) {
		synctest.Test(t, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 1))
			s, d, disk := newSource(seed), newTarget(), simdisk.New()
			s.breaks, s.lagging = 3, 2
			s.work(rng, 100, time.Millisecond)
			o := options(s, d, disk)
			ended := start(t.Context(), o)
			s.work(rng, 2000, 3*time.Millisecond)
			st, err := ReadStatus(disk, "m")
			if err != nil || !st.Running || st.Step != Following {
				t.Fatalf("%+v, %v", st, err)
			}
			cutOver(t, disk)
			s.work(rng, 300, 10*time.Millisecond)
			began := time.Now()
			if err := <-ended; err != nil {
				t.Fatal(err)
			}
			if took := time.Since(began); took > 5*time.Second+verifyPause {
				t.Errorf("seed %d: the cut-over took %v", seed, took)
			}
			finished(t, s, d)
			if s.compacted == 0 {
				t.Error("nothing was compacted")
			}
			if st, err = ReadStatus(disk, "m"); err != nil || st.Step != Done || st.Running || st.Warning != "" || st.Passes == 0 {
				t.Errorf("%+v, %v", st, err)
			}
			if st.FreezeSeconds < 2 || st.FreezeSeconds > 5 {
				t.Errorf("the source had to stand still for %v s", st.FreezeSeconds)
			}
			if err := Run(t.Context(), o); err != nil {
				t.Errorf("a mirror that is done is started again: %v", err)
			}
			if err := RequestCutover(disk, "m"); err == nil || !strings.Contains(err.Error(), "has ended: it is done") {
				t.Errorf("%v", err)
			}
		})
	}
}

// counting is a source that counts the keys of the spans that it is asked for, as an etcd does.
type counting struct {
	*source
	counted atomic.Int64
}

func (c *counting) Page(ctx context.Context, from, end []byte, rev keyspace.Revision, limit int) (diff.Page, error) {
	n, _, err := c.source.Count(ctx, from, end, rev)
	if err != nil {
		return diff.Page{}, err
	}
	c.counted.Add(n)
	return c.source.Page(ctx, from, end, rev, limit)
}

// TestComparisonCountsKeysOnce: a whole comparison costs the source as much for each key, however many there are.
func TestComparisonCountsKeysOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const keys = 10 * diff.PageKeys
		s, d, disk := newSource(1), newTarget(), simdisk.New()
		for i := range keys {
			s.txn(op{fmt.Sprintf("key-%05d", i), "v", 0})
		}
		o, c := options(s, d, disk), &counting{source: s}
		o.SourceData = c
		ctx, cancel := context.WithCancel(t.Context())
		ended := start(ctx, o)
		for {
			time.Sleep(time.Second)
			st, err := ReadStatus(disk, "m")
			if err != nil {
				t.Fatal(err)
			}
			if st.Passes > 0 {
				break
			}
		}
		if n := c.counted.Load(); n < keys || n > 2*keys {
			t.Errorf("the source has counted %d keys, and has %d", n, keys)
		}
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
}

// TestKilledAtEachStep: whatever the mirror does when it is killed and its machine loses power,
// the next one goes on (trap 123: it is the same loader).
func TestKilledAtEachStep(t *testing.T) {
	for at := 1; ; at += 1 + at/12 {
		reached := false
		synctest.Test(t, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(uint64(at), 1))
			s, d, disk := newSource(uint64(at)), newTarget(), simdisk.New()
			s.breaks, s.keeps = 5, true
			s.work(rng, 50, time.Millisecond)
			ctx, kill := context.WithCancel(t.Context())
			var mu sync.Mutex
			var crashed *simdisk.Disk
			calls := 0
			call := func(string) error {
				mu.Lock()
				defer mu.Unlock()
				if calls++; calls == at {
					crashed = disk.Crash(rng.IntN(101), rng)
					kill()
				}
				return ctx.Err()
			}
			s.onCall(call)
			d.onCall(call)
			ended := start(ctx, options(s, d, disk))
			go s.work(rand.New(rand.NewPCG(uint64(at), 3)), 300, 20*time.Millisecond)
			time.Sleep(3 * time.Second)
			for RequestCutover(disk, "m") != nil && len(ended) == 0 { // there may be no mirror yet
				time.Sleep(100 * time.Millisecond)
			}
			if err := <-ended; err == nil {
				reached = true
				kill()
				finished(t, s, d)
				return
			}
			kill()
			time.Sleep(10 * time.Second) // the work is over
			alive := func(string) error { return nil }
			s.onCall(alive)
			d.onCall(alive)
			ended = start(t.Context(), options(s, d, crashed))
			time.Sleep(2 * time.Second)
			for ; len(ended) == 0; time.Sleep(100 * time.Millisecond) {
				err := RequestCutover(crashed, "m")
				if err == nil {
					break
				}
				if refusal := (*Refusal)(nil); !errors.As(err, &refusal) && !strings.Contains(err.Error(), "has ended") {
					t.Fatal(err)
				}
			}
			if err := <-ended; err != nil {
				t.Fatalf("killed at call %d: %v", at, err)
			}
			finished(t, s, d)
		})
		if reached {
			if at < 100 {
				t.Fatalf("only %d calls", at)
			}
			return
		}
	}
}

// following starts a mirror and waits until it follows.
func following(t *testing.T, s *source, d *target, o Options) chan error {
	t.Helper()
	ended := start(t.Context(), o)
	for range 100 {
		time.Sleep(100 * time.Millisecond)
		if st, err := ReadStatus(o.FS, o.Dir); err == nil && st.Step == Following && d.present() == s.present() {
			return ended
		}
	}
	select {
	case err := <-ended:
		t.Fatal(err)
	default:
		t.Fatal("it does not follow")
	}
	return nil
}

// cutOver requests a cut-over, as soon as all keys were compared once.
func cutOver(t *testing.T, fs vfs.FS) {
	t.Helper()
	var err error
	for range 600 {
		if err = RequestCutover(fs, "m"); err == nil {
			return
		}
		if refusal := (*Refusal)(nil); !errors.As(err, &refusal) {
			break
		}
		time.Sleep(100 * time.Millisecond)
	}
	t.Fatal(err)
}

// caughtUp waits until the target has everything.
func caughtUp(t *testing.T, s *source, d *target, ended chan error) {
	t.Helper()
	for range 600 {
		select {
		case err := <-ended:
			t.Fatal(err)
		default:
		}
		if time.Sleep(100 * time.Millisecond); d.present() == s.present() {
			return
		}
	}
	t.Fatalf("the target is at revision %d, the source at %d", d.present(), s.present())
}

// stopped checks that a mirror stops for good, and that it says so again when it is started again.
func stopped(t *testing.T, err error, o Options, want string) {
	t.Helper()
	var stop *Stop
	if !errors.As(err, &stop) || !strings.Contains(err.Error(), want) {
		t.Fatalf("%v", err)
	}
	if again := Run(t.Context(), o); again == nil || !strings.Contains(again.Error(), want) {
		t.Fatalf("started again: %v", again)
	}
	st, err := ReadStatus(o.FS, o.Dir)
	if err != nil || st.Step != Failed || !strings.Contains(st.String(), want) {
		t.Fatalf("%+v, %v", st, err)
	}
}

// TestCompactedBelowThePosition (trap 124): a mirror that was away for too long says so, and what
// to do.
func TestCompactedBelowThePosition(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, d, disk := newSource(1), newTarget(), simdisk.New()
		s.txn(op{"a", "1", 0})
		o := options(s, d, disk)
		ctx, kill := context.WithCancel(t.Context())
		ended := start(ctx, o)
		time.Sleep(3 * time.Second)
		kill()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
		for range 10 {
			s.txn(op{"a", "2", 0})
		}
		s.compacted = s.present() - 1
		stopped(t, Run(t.Context(), o), o, "the source has compacted revision 11, and the copy has everything up to revision 2 only: begin anew")
	})
}

// TestDifferences: what is not at the target as it is at the source stops the mirror, by the next
// write of the key or by the comparison, and the text names the key.
func TestDifferences(t *testing.T) {
	for name, c := range map[string]struct {
		spoil func(*target)
		write []op
		want  string
	}{
		"value":  {func(d *target) { d.keys["a"][0].Value = []byte("x") }, nil, `differ: key "a": unequal: value "1" and "x"`},
		"lease":  {func(d *target) { d.keys["a"][0].Lease = 4 }, nil, `differ: key "a": unequal: lease 0 and 4`},
		"lost":   {func(d *target) { delete(d.keys, "a") }, nil, `differ: key "a": only in A`},
		"extra":  {func(d *target) { d.keys["z"] = []mvcc.Version{{Key: []byte("z"), Mod: 2, Create: 2, Version: 1}} }, nil, `differ: key "z": only in B`},
		"put":    {func(d *target) { d.keys["a"][0].Version = 9 }, []op{{"a", "2", 0}}, `key "a": revision 3 is version 2, and would be version 10`},
		"new":    {func(d *target) { d.keys["b"] = d.keys["a"] }, []op{{"b", "2", 0}}, `key "b": revision 3 is version 1, and would be version 2`},
		"delete": {func(d *target) { delete(d.keys, "a") }, []op{{key: "a"}}, `key "a": revision 3 deletes it, and there is no such key`},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s, d := newSource(1), newTarget()
				s.txn(op{"a", "1", 0})
				o := options(s, d, simdisk.New())
				ended := following(t, s, d, o)
				d.mu.Lock()
				c.spoil(d)
				d.mu.Unlock()
				if c.write != nil {
					s.txn(c.write...)
				}
				stopped(t, <-ended, o, c.want)
			})
		})
	}
}

// TestLargeRevision (trap 116): a delete of 100,000 keys in one revision comes in parts and is
// visible as a whole, also where the revision writes some keys again.
func TestLargeRevision(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, d, disk := newSource(1), newTarget(), simdisk.New()
		const keys = 100_000
		var puts, deletes []op
		for i := range keys {
			k := fmt.Sprintf("key-%06d", i)
			puts, deletes = append(puts, op{k, "value", 0}), append(deletes, op{key: k})
		}
		// The first key is deleted, written and deleted; the last one is written at the end.
		deletes = append(deletes, op{"key-000000", "again", 0}, op{key: "key-000000"}, op{"key-099999", "again", 0})
		s.txn(puts...)
		o := options(s, d, disk)
		ended := following(t, s, d, o)
		if rev := s.txn(deletes...); rev != 3 {
			t.Fatal(rev)
		}
		s.txn(op{"key-000001", "new", 0})
		caughtUp(t, s, d, ended)
		if d.batches < 20 || d.largest > batchKeys {
			t.Errorf("%d batches, the largest with %d versions", d.batches, d.largest)
		}
		if d.largestHeld < keys-batchKeys {
			t.Errorf("the revision was visible in parts: %d were held", d.largestHeld)
		}
		cutOver(t, disk)
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
		finished(t, s, d)
	})
}

// TestFullDisk (trap 122): a mirror whose disk is full waits for room and loses nothing.
func TestFullDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, d, disk := newSource(1), newTarget(), simdisk.New()
		s.txn(op{"a", "1", 0})
		full := &fullDisk{Disk: disk}
		o := options(s, d, disk)
		o.FS = full
		ended := following(t, s, d, o)
		full.set(true)
		for i := range 100 {
			s.txn(op{"a", fmt.Sprint(i), 0})
			time.Sleep(100 * time.Millisecond)
		}
		if d.present() == s.present() {
			t.Fatal("the disk was not full")
		}
		full.set(false)
		caughtUp(t, s, d, ended)
		cutOver(t, disk)
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
		finished(t, s, d)
	})
}

// TestAbandon: a mirror that runs, and one that has failed, can be abandoned.
func TestAbandon(t *testing.T) {
	for _, failed := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			s, d, disk := newSource(1), newTarget(), simdisk.New()
			s.txn(op{"a", "1", 0})
			o := options(s, d, disk)
			ended := following(t, s, d, o)
			if failed {
				d.mu.Lock()
				delete(d.keys, "a")
				d.mu.Unlock()
				stopped(t, <-ended, o, "only in A")
			}
			if err := RequestAbandon(disk, "m"); err != nil {
				t.Fatal(err)
			}
			if failed {
				ended = start(t.Context(), o)
			}
			if err := <-ended; err == nil || !strings.Contains(err.Error(), "the mirror is abandoned") {
				t.Fatal(err)
			}
			if d.phase != TargetAbandoned {
				t.Errorf("the target is %s", d.phase)
			}
			names, err := disk.List("m")
			if err != nil || strings.Contains(strings.Join(names, " "), "snapshot") {
				t.Errorf("%v %v", names, err)
			}
		})
	}
}

// TestOthers (traps 121, 123): a second process in the directory, another source and another
// loader of the target are refused.
func TestOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, d, disk := newSource(1), newTarget(), simdisk.New()
		s.txn(op{"a", "1", 0})
		o := options(s, d, disk)
		ctx, kill := context.WithCancel(t.Context())
		ended := start(ctx, o)
		time.Sleep(3 * time.Second)
		if err := Run(t.Context(), o); err == nil || !strings.Contains(err.Error(), "another process uses it") {
			t.Errorf("a second process: %v", err)
		}
		other := o
		other.Dir, other.Nonce = "m2", "n2"
		if err := Run(t.Context(), other); err == nil || !strings.Contains(err.Error(), "the cluster is loaded by n1") {
			t.Errorf("a second loader: %v", err)
		}
		kill()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
		s.cluster = 8
		if err := Run(t.Context(), o); err == nil || !strings.Contains(err.Error(), "it follows cluster 7, and the source is cluster 8") {
			t.Errorf("another source: %v", err)
		}
	})
}

// TestRefused: a cut-over that cannot be done is called off, and the status says why.
// The mirror goes on, and the next request is met once what hindered it is over. A refused request is not met later.
func TestRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, d, disk := newSource(1), newTarget(), simdisk.New()
		s.txn(op{"a", "1", 0})
		o := options(s, d, disk)
		hinders, calls := &Refusal{Reason: "node n2 does not answer", Next: "start it"}, 0
		o.Prepare = func(context.Context) error {
			// The third request is refused at the last moment.
			if calls++; hinders != nil && calls != 3 {
				return fmt.Errorf("look at the target: %w", hinders)
			}
			return nil
		}
		ended := following(t, s, d, o)
		for i := range 3 {
			cutOver(t, disk)
			for stands := true; stands; time.Sleep(10 * time.Millisecond) {
				var err error
				if stands, err = CutoverRequested(disk, "m"); err != nil {
					t.Fatal(err)
				}
			}
			st, err := ReadStatus(disk, "m")
			if err != nil || st.Refused == nil || *st.Refused != *hinders || st.Step != Following || st.Cutover != "" {
				t.Fatalf("%+v, %v", st, err)
			}
			if want := "the cut-over was refused: node n2 does not answer: start it"; !strings.Contains(st.String(), want) {
				t.Errorf("%q is missing in %s", want, st)
			}
			s.txn(op{"a", fmt.Sprint(i), 0})
			caughtUp(t, s, d, ended)
		}
		hinders = nil
		time.Sleep(time.Minute)
		if d.phase != TargetLoading {
			t.Fatalf("the target is %s, and nobody has asked for it again", d.phase)
		}
		cutOver(t, disk)
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
		finished(t, s, d)
		if st, err := ReadStatus(disk, "m"); err != nil || st.Step != Done || st.Refused != nil {
			t.Errorf("%+v, %v", st, err)
		}
	})
}

// TestLateWrites: a client that still writes to the source behind the cut-over is not overlooked.
func TestLateWrites(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, d, disk := newSource(1), newTarget(), simdisk.New()
		s.txn(op{"a", "1", 0})
		o := options(s, d, disk)
		ended := following(t, s, d, o)
		d.onCall(func(what string) error {
			if what == "finish" {
				s.txn(op{"late", "1", 0})
			}
			return nil
		})
		cutOver(t, disk)
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
		st, err := ReadStatus(disk, "m")
		if err != nil || !strings.Contains(st.Warning, "somebody still writes to the source: it is at revision 3, and the target was opened at revision 2") {
			t.Errorf("%+v, %v", st, err)
		}
	})
}

// TestLag: the lag counts from the first revision that the target lacks, and ends when it has all.
func TestLag(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, d, disk := newSource(1), newTarget(), simdisk.New()
		s.txn(op{"a", "1", 0})
		var mu sync.Mutex
		var last Status
		o := options(s, d, disk)
		o.Progress = func(st Status) {
			mu.Lock()
			defer mu.Unlock()
			last = st
		}
		status := func() Status {
			mu.Lock()
			defer mu.Unlock()
			return last
		}
		ctx, kill := context.WithCancel(t.Context())
		defer kill()
		ended := start(ctx, o)
		time.Sleep(5 * time.Second)
		away := true
		d.onCall(func(what string) error {
			if mu.Lock(); what == "follow" && away {
				mu.Unlock()
				return rpctypes.ErrNoLeader
			}
			mu.Unlock()
			return nil
		})
		for range 10 {
			s.txn(op{"a", "2", 0})
			time.Sleep(time.Second)
		}
		if st := status(); st.LagSeconds < 8 || st.LagSeconds > 11 || st.Source-st.Position < 9 || !strings.Contains(st.String(), "bring a batch to the target") {
			t.Errorf("%v", st)
		}
		mu.Lock()
		away = false
		mu.Unlock()
		time.Sleep(10 * time.Second)
		if st := status(); st.LagSeconds != 0 || st.Source != st.Position || st.Waiting != "" {
			t.Errorf("%v", st)
		}
		kill()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
}

// TestHistoryThatIsNoHistory: a source that leaves out a revision, or sends one again, stops the
// mirror.
func TestHistoryThatIsNoHistory(t *testing.T) {
	for name, spoil := range map[string]func(*source){
		"left out": func(s *source) { delete(s.events, 3) },
		"again":    func(s *source) { s.events[4] = s.events[3] },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s, d := newSource(1), newTarget()
				s.txn(op{"a", "1", 0})
				o := options(s, d, simdisk.New())
				ended := following(t, s, d, o)
				for range 5 {
					s.txn(op{"a", "2", 0})
					if s.present() == 4 {
						s.mu.Lock()
						spoil(s)
						s.mu.Unlock()
					}
				}
				stopped(t, <-ended, o, "the source's watch went on with revision")
			})
		})
	}
}

var errFull = syscall.ENOSPC

// TestLossIsFound: an old version that the target loses while no mirror runs is in no comparison of keys, and the
// target is not opened all the same: the sum is the source's.
func TestLossIsFound(t *testing.T) {
	for _, lost := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(1, 1))
			s, d, disk := newSource(1), newTarget(), simdisk.New()
			s.keeps = true
			s.work(rng, 50, time.Millisecond)
			ctx, kill := context.WithCancel(t.Context())
			ended := start(ctx, options(s, d, disk))
			s.work(rng, 500, 3*time.Millisecond)
			time.Sleep(3 * time.Second)
			kill()
			if err := <-ended; !errors.Is(err, context.Canceled) {
				t.Fatal(err)
			}
			s.work(rng, 50, time.Millisecond)
			if lost {
				for k, versions := range d.keys {
					if len(versions) > 3 {
						d.keys[k] = versions[1:]
						break
					}
				}
			}
			ended = start(t.Context(), options(s, d, disk))
			time.Sleep(3 * time.Second)
			cutOver(t, disk)
			err := <-ended
			if !lost && err != nil || lost && (err == nil || !strings.Contains(err.Error(), "finished with the sum")) {
				t.Errorf("lost %t: %v", lost, err)
			}
		})
	}
}

// TestEndedLeases: leases that end at the source are taken back while it is followed, and never one with keys. Ids are
// granted again with other TTLs, both sides answer late, and the mirror is started anew on the way.
func TestEndedLeases(t *testing.T) {
	for seed := range uint64(5) {
		synctest.Test(t, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 1))
			s, d, disk := newSource(seed), newTarget(), simdisk.New()
			s.keeps = true
			s.txn(op{"a", "1", 0})
			const ids = 120 // of which about 40 live at a time
			slow := func(what string) error {
				if what == "follow" || what == "now" {
					time.Sleep(time.Duration(rand.IntN(4000)) * time.Millisecond)
				}
				return nil
			}
			s.onCall(slow)
			d.onCall(slow)
			ctx, kill := context.WithCancel(t.Context())
			ended := start(ctx, options(s, d, disk))
			granted := 0
			work := func(times int) {
				for range times {
					id := keyspace.LeaseID(1 + rng.IntN(ids))
					s.revoke(id) // the id may come again
					s.grant(id, 60+rng.Int64N(5))
					granted++
					for range rng.IntN(3) {
						s.txn(op{fmt.Sprint("k", rng.IntN(50)), "v", id})
					}
					if s.mu.Lock(); len(s.leases) > 40 {
						one := slices.Sorted(maps.Keys(s.leases))[rng.IntN(len(s.leases))]
						s.mu.Unlock()
						s.revoke(one)
					} else {
						s.mu.Unlock()
					}
					time.Sleep(time.Duration(rng.IntN(600)) * time.Millisecond)
				}
			}
			work(1000)
			kill()
			if err := <-ended; !errors.Is(err, context.Canceled) {
				t.Fatal(err)
			}
			work(100)
			ended = start(t.Context(), options(s, d, disk))
			work(1000)
			time.Sleep(3 * sweepEvery)
			d.mu.Lock()
			for id := range d.leases {
				if s.leases[id] == 0 {
					t.Errorf("lease %x has ended and was not taken back", int64(id))
				}
			}
			d.mu.Unlock()
			cutOver(t, disk)
			if err := <-ended; err != nil {
				t.Fatal(err)
			}
			finished(t, s, d)
			if len(d.attached) > 0 {
				t.Errorf("leases %x were taken back with keys", d.attached)
			}
			if granted < 2000 || d.taken < 200 {
				t.Errorf("of %d leases %d were taken back", granted, d.taken)
			}
		})
	}
}

// forgetful is a source that denies a living lease at times, as an etcd does whose leader has just been started.
type forgetful struct{ *source }

func (f forgetful) TTL(ctx context.Context, id keyspace.LeaseID) (int64, bool, error) {
	if f.chance(30) {
		return 0, false, nil
	}
	return f.source.TTL(ctx, id)
}

// TestLeaseThatIsSaidToHaveEnded: a key is attached to its lease at the target, also where the source has said before that there is no
// such lease. Other leases have ended when their keys are followed.
func TestLeaseThatIsSaidToHaveEnded(t *testing.T) {
	for seed := range uint64(5) {
		synctest.Test(t, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 1))
			s, d, disk := newSource(seed), newTarget(), simdisk.New()
			s.keeps = true
			s.txn(op{"a", "1", 0})
			d.onCall(func(what string) error {
				if what == "follow" {
					time.Sleep(time.Duration(rand.IntN(200)) * time.Millisecond)
				}
				return nil
			})
			o := options(s, d, disk)
			o.SourceData = forgetful{s}
			ended := following(t, s, d, o)
			for id := keyspace.LeaseID(1); id <= 300; id++ {
				s.grant(id, 60)
				for range 1 + rng.IntN(3) {
					s.txn(op{fmt.Sprint("k", rng.IntN(500)), "v", id})
				}
				if rng.IntN(2) == 0 {
					s.revoke(id)
				}
				time.Sleep(time.Duration(rng.IntN(50)) * time.Millisecond)
			}
			cutOver(t, disk)
			if err := <-ended; err != nil {
				t.Fatal(err)
			}
			finished(t, s, d)
			if len(d.loose) == 0 || len(d.leases) < 100 {
				t.Errorf("%d keys of leases that had ended, %d leases that live", len(d.loose), len(d.leases))
			}
		})
	}
}

// TestKeysOfLeasesThatEnded: of however many keys, one that is at the source as a version has it shows that the version's lease lives.
// One that is gone, or was written again, does not.
func TestKeysOfLeasesThatEnded(t *testing.T) {
	const keys = 2*diff.LookupKeys + 50
	for _, stays := range []int{-1, 0, diff.LookupKeys - 1, diff.LookupKeys, keys - 1} {
		s := newSource(1)
		var versions []mvcc.Version
		for i := range keys {
			key := fmt.Sprintf("k%03d", i)
			for range 2 {
				versions = append(versions, *s.get(key, s.txn(op{key, "v", keyspace.LeaseID(i + 1)})))
			}
			switch {
			case i == stays:
			case i%2 == 0:
				s.txn(op{key, "", 0})
			default:
				s.txn(op{key, "again", 0})
			}
		}
		m := &Mirror{o: Options{SourceData: s}}
		err := m.checkEnded(t.Context(), versions, map[keyspace.LeaseID]int64{})
		if errors.Is(err, errLeaseLives) != (stays >= 0) || stays >= 0 && !strings.Contains(err.Error(), fmt.Sprintf("key %q", fmt.Sprintf("k%03d", stays))) {
			t.Errorf("key %d stays: %v", stays, err)
		}
		if err := m.checkEnded(t.Context(), versions, map[keyspace.LeaseID]int64{keyspace.LeaseID(stays + 1): 60}); err != nil {
			t.Errorf("key %d stays and its lease lives: %v", stays, err)
		}
	}
}

// TestSweepBesideCutover: the target checks users before the answer to the cut-over has come, and leases are to be taken back
// just then.
func TestSweepBesideCutover(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, d, disk := newSource(1), newTarget(), simdisk.New()
		s.txn(op{"a", "1", 0})
		var serving, asked atomic.Bool
		d.onCall(func(what string) error {
			switch {
			case what == "finish":
				serving.Store(true)
				time.Sleep(sweepEvery + 5*time.Second)
			case serving.Load() && (what == "leases" || what == "page"):
				asked.Store(asked.Load() || what == "leases")
				return rpctypes.ErrUserEmpty
			}
			return nil
		})
		ended := start(t.Context(), options(s, d, disk))
		time.Sleep(10 * time.Second)
		cutOver(t, disk)
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
		finished(t, s, d)
		if st, err := ReadStatus(disk, "m"); err != nil || st.Step != Done || st.Warning != "" {
			t.Errorf("%+v, %v", st, err)
		}
		if !asked.Load() {
			t.Error("nobody asked for leases beside the cut-over")
		}
	})
}

// TestSweepFails: a target that does not list its leases for a while is followed all the same. The status says what fails.
func TestSweepFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, d, disk := newSource(1), newTarget(), simdisk.New()
		s.grant(7, 60)
		s.txn(op{"a", "1", 0})
		var fails atomic.Bool
		fails.Store(true)
		d.onCall(func(what string) error {
			if what == "leases" && fails.Load() {
				return errors.New("too many holds")
			}
			return nil
		})
		ended := following(t, s, d, options(s, d, disk))
		s.txn(op{"a", "2", 7})
		caughtUp(t, s, d, ended)
		s.revoke(7)
		time.Sleep(2 * sweepEvery)
		if st, err := ReadStatus(disk, "m"); err != nil || st.Step != Following || !strings.Contains(st.Waiting, "too many holds") {
			t.Fatalf("%+v, %v", st, err)
		}
		fails.Store(false)
		time.Sleep(2 * sweepEvery)
		if st, err := ReadStatus(disk, "m"); err != nil || st.Waiting != "" || d.taken != 1 {
			t.Fatalf("%d leases were taken back; %+v, %v", d.taken, st, err)
		}
		caughtUp(t, s, d, ended)
		cutOver(t, disk)
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
		finished(t, s, d)
	})
}

// TestSparse: a source that leaves revisions out, as a Skein does behind a crash, is followed to its end. It also leaves
// out the last ones, and the mirror is started again on the way.
func TestSparse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rng := rand.New(rand.NewPCG(1, 1))
		s, d, disk := newSource(1), newTarget(), simdisk.New()
		s.sparse, s.keeps, s.breaks, d.gaps = true, true, 5, true
		s.txn(op{"a", "1", 0})
		s.leaveOut(100)
		for range 3 {
			ctx, kill := context.WithCancel(t.Context())
			ended := start(ctx, options(s, d, disk))
			for range 20 {
				s.work(rng, 10, 10*time.Millisecond)
				s.leaveOut(1 + keyspace.Revision(rng.IntN(3000))<<rng.IntN(30))
			}
			caughtUp(t, s, d, ended)
			kill()
			if err := <-ended; !errors.Is(err, context.Canceled) {
				t.Fatal(err)
			}
		}
		s.leaveOut(10)
		ended := start(t.Context(), options(s, d, disk))
		cutOver(t, disk)
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
		finished(t, s, d)
	})
}
