package recovery_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/internal/simdisk"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/node"
	"github.com/skeindb/skein/node/join"
	"github.com/skeindb/skein/raftgroup/offline"
	"github.com/skeindb/skein/recovery"
)

// keysOf returns keys of each of n spans.
func keysOf(n, each int) (keys []string) {
	for i := range n {
		for j := range each {
			keys = append(keys, fmt.Sprintf("k%04d/%d", i, j))
		}
	}
	return keys
}

func bordersOf(n int) (keys []string) {
	for i := 1; i < n; i++ {
		keys = append(keys, fmt.Sprintf("k%04d", i))
	}
	return keys
}

// Five nodes, three of which are destroyed under load. All that the plan calls safe is there, and no
// revision comes twice.
func TestThreeOfFiveDestroyed(t *testing.T) {
	bubble(t, 5, bordersOf(10), func(r *rig) {
		w := r.write(keysOf(10, 2), r.nodes...)
		time.Sleep(3 * time.Second)
		survivors := r.nodes[:2]
		r.crash(r.nodes...)
		w.stop()
		p := r.plan(r.collect(survivors...), recovery.PlanOptions{Dead: []string{"n3", "n4", "n5"}, AcceptLost: true})
		r.apply(p, survivors...)
		r.start(survivors...)
		r.check(p, w, survivors...)
	})
}

// crashAt is a disk of which a copy is kept, as a power cut would leave it, at each sync.
type crashAt struct {
	vfs.FS
	disk   *simdisk.Disk
	rng    *rand.Rand
	mu     sync.Mutex
	copies []*simdisk.Disk
}

type crashFile struct {
	vfs.File
	d *crashAt
}

func (d *crashAt) keep() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.copies = append(d.copies, d.disk.Crash(50, d.rng))
}

func (d *crashAt) wrap(f vfs.File, err error) (vfs.File, error) {
	if err != nil {
		return nil, err
	}
	return crashFile{f, d}, nil
}

func (d *crashAt) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	return d.wrap(d.FS.Create(name, c))
}

func (d *crashAt) OpenReadWrite(name string, c vfs.DiskWriteCategory, o ...vfs.OpenOption) (vfs.File, error) {
	return d.wrap(d.FS.OpenReadWrite(name, c, o...))
}

func (d *crashAt) ReuseForWrite(from, to string, c vfs.DiskWriteCategory) (vfs.File, error) {
	return d.wrap(d.FS.ReuseForWrite(from, to, c))
}

func (f crashFile) Sync() error {
	f.d.keep()
	return f.File.Sync()
}

func (f crashFile) SyncData() error {
	f.d.keep()
	return f.File.SyncData()
}

// The node that applies a plan loses its power at any moment. It does not start before the plan is
// applied again, and is then as if nothing had happened.
func TestCrashWithinApply(t *testing.T) {
	bubble(t, 3, bordersOf(4), func(r *rig) {
		w := r.write(keysOf(4, 2), r.nodes...)
		time.Sleep(2 * time.Second)
		one := r.nodes[0]
		r.crash(r.nodes...)
		w.stop()
		p := r.plan(r.collect(one), recovery.PlanOptions{Dead: []string{"n2", "n3"}})
		d := &crashAt{FS: one.disk, disk: one.disk, rng: r.rng}
		dir := one.dir()
		dir.FS = d
		if _, err := recovery.Apply(r.t.Context(), dir, p, time.Now()); err != nil {
			t.Fatal(err)
		}
		refused := 0
		for i, disk := range append(d.copies, one.disk) {
			one.disk = disk
			core, err := node.Open(r.t.Context(), r.options(one))
			switch {
			case errors.Is(err, offline.ErrInterrupted):
				refused++
			case err != nil:
				t.Fatalf("copy %d: %v", i, err)
			default:
				core.Crash()
				continue // before the plan has begun, or behind its end
			}
			r.apply(p, one)
			if i%4 == 0 {
				r.start(one)
				r.check(p, &writers{acked: w.acked, tried: w.tried, revisions: maps.Clone(w.revisions)}, one)
				one.core.Crash()
				one.core = nil
			}
		}
		t.Logf("%d syncs, %d starts refused", len(d.copies), refused)
		if refused < 3 {
			t.Errorf("of %d copies %d are half applied", len(d.copies), refused)
		}
		a, err := recovery.Apply(r.t.Context(), one.dir(), p, time.Now())
		if err != nil || !a.Already {
			t.Errorf("applied again: %+v, %v", a, err)
		}
	})
}

// change splits, merges and moves ranges until the nodes crash.
func (r *rig) change(n int, ms ...*machine) {
	var wg sync.WaitGroup
	ctx, cancel := context.WithCancel(r.t.Context())
	r.operators = func() {
		cancel()
		wg.Wait()
	}
	for i, m := range ms {
		rng := rand.New(rand.NewPCG(uint64(i), r.rng.Uint64()))
		admin := m.core.Admin()
		wg.Go(func() {
			for ctx.Err() == nil {
				time.Sleep(time.Duration(rng.IntN(200)) * time.Millisecond)
				key := fmt.Appendf(nil, "k%04d/%d", rng.IntN(n), rng.IntN(2))
				list, err := admin.Ranges(ctx, &adminpb.RangeListRequest{})
				if err != nil || len(list.GetRanges()) == 0 {
					continue
				}
				at := keyspace.RangeID(list.GetRanges()[rng.IntN(len(list.GetRanges()))].GetId())
				switch rng.IntN(3) {
				case 0:
					_, _, _ = admin.SplitRange(ctx, key)
				case 1:
					_, _ = admin.MergeRange(ctx, at)
				default:
					_, _ = admin.MoveRange(ctx, at, fmt.Sprintf("n%d", rng.IntN(5)+1), fmt.Sprintf("n%d", rng.IntN(5)+1))
				}
			}
		})
	}
}

// Ranges are split, merged and moved all the time until the power is cut, so that tails have splits, steps of merges and
// changes of members (trap 126). Each seed takes many seconds of the processor: SKEIN_SIM_SEEDS says how many are run,
// SKEIN_SIM_FIRST which is the first. Even ones leave two survivors, odd ones three.
func TestTailsWithChanges(t *testing.T) {
	usual := uint64(4)
	if testing.Short() {
		usual = 2
	}
	first, n := seedNumber(t, "SKEIN_SIM_FIRST", 0), seedNumber(t, "SKEIN_SIM_SEEDS", usual)
	for seed := first; seed < first+n; seed++ {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			bubble(t, 5, bordersOf(6), func(r *rig) {
				r.rng = rand.New(rand.NewPCG(seed, 1))
				w := r.write(keysOf(6, 2), r.nodes...)
				r.change(6, r.nodes...)
				time.Sleep(4*time.Second + time.Duration(r.rng.IntN(3000))*time.Millisecond)
				r.crash(r.nodes...)
				w.stop()
				survivors, dead := r.nodes[:2], []string{"n3", "n4", "n5"}
				if seed%2 == 1 {
					survivors, dead = []*machine{r.nodes[1], r.nodes[3], r.nodes[4]}, []string{"n1", "n3"}
				}
				in := r.collect(survivors...)
				noteTails(t, in)
				p, err := recovery.MakePlan(in, recovery.PlanOptions{Dead: dead, AcceptLost: true})
				if errors.Is(err, recovery.ErrNothing) {
					return
				} else if err != nil {
					t.Fatal(err)
				}
				r.apply(p, survivors...)
				r.start(survivors...)
				r.check(p, w, survivors...)
			})
		})
	}
}

func seedNumber(t *testing.T, name string, usual uint64) uint64 {
	t.Helper()
	text := os.Getenv(name)
	if text == "" {
		return usual
	}
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return n
}

func noteTails(t *testing.T, in []*recovery.Collected) {
	t.Helper()
	virtual, absorbs, bound, unsettled, tentative, confs := 0, 0, 0, 0, 0, 0
	for _, c := range in {
		for _, x := range c.Copies {
			if x.Made != nil {
				virtual++
			}
			absorbs += len(x.Absorbs)
			if x.End.Merge != 0 {
				bound++
			}
			if x.Unsettled {
				unsettled++
			}
			if x.Tentative {
				tentative++
			}
			if x.Tentative && (!x.Unsettled || x.Commit >= x.Last.Index) {
				t.Errorf("node %x, range %s: a tentative generation, and yet nothing is unsettled: %+v", uint64(c.Node), x.Range, x)
			}
			confs += len(x.InForce) - 1
			if x.Unusable != "" {
				t.Logf("node %x, range %s: %s", uint64(c.Node), x.Range, x.Unusable)
			}
		}
	}
	t.Logf("tails: %d children, %d absorbed, %d bound, %d unsettled, %d of them tentative, %d changes of members", virtual, absorbs, bound, unsettled, tentative, confs)
}

// Three of five survive. Placement makes the missing replicas by itself. The disk of a node that was given up comes
// back (trap 127): the node stops, and nothing changes.
func TestRepairAndADeadNodesDisk(t *testing.T) {
	bubble(t, 5, bordersOf(5), func(r *rig) {
		w := r.write(keysOf(5, 2), r.nodes...)
		time.Sleep(2 * time.Second)
		survivors, back := r.nodes[:3], r.nodes[4]
		r.crash(r.nodes...)
		w.stop()
		p := r.plan(r.collect(survivors...), recovery.PlanOptions{Dead: []string{"n4", "n5"}})
		r.apply(p, survivors...)
		r.start(survivors...)
		r.check(p, w, survivors...)
		three := func() bool {
			m, err := survivors[0].core.Placement().Map(r.t.Context())
			if err != nil {
				return false
			}
			for _, d := range append(m.Descriptors(), m.PlacementGroup()) {
				for _, x := range d.Replicas {
					if x.Node > 3 || x.Role != keyspace.RoleVoter {
						return false
					}
				}
				if len(d.Replicas) != 3 {
					return false
				}
			}
			return true
		}
		r.wait(15*time.Minute, "all ranges have three replicas", three)
		var err error
		back.core, err = node.Open(r.t.Context(), r.options(back))
		if err == nil {
			r.wait(time.Minute, "the node that was given up stops", func() bool { return back.core.Err() != nil })
			err = back.core.Err()
			back.core.Crash()
			back.core = nil
		}
		t.Logf("the node that came back: %v", err)
		if !errors.Is(err, join.ErrRemoved) {
			t.Errorf("the node that came back: %v", err)
		}
		if !three() {
			t.Error("the map has changed")
		}
		r.check(p, &writers{acked: map[string]string{keysOf(5, 2)[0]: "after"}, tried: map[string][]string{keysOf(5, 2)[0]: {"after"}}, revisions: w.revisions}, survivors...)
	})
}

// The node that is forced to be a cluster of its own loses its power at any moment. Forced again, it is as if nothing had
// happened.
func TestCrashWithinForce(t *testing.T) {
	bubble(t, 3, bordersOf(3), func(r *rig) {
		w := r.write(keysOf(3, 2), r.nodes...)
		time.Sleep(2 * time.Second)
		one := r.nodes[0]
		r.crash(r.nodes...)
		w.stop()
		d := &crashAt{FS: one.disk, disk: one.disk, rng: r.rng}
		dir := one.dir()
		dir.FS = d
		p, err := recovery.Force(r.t.Context(), dir, time.Now())
		if err != nil || p == nil {
			t.Fatalf("force: %v, %v", p, err)
		}
		half := 0
		for i, disk := range append(d.copies, one.disk) {
			one.disk = disk
			c := r.collect(one)[0]
			if c.Interrupted != "" {
				half++
			}
			again, err := recovery.Force(r.t.Context(), one.dir(), time.Now())
			switch {
			case err != nil:
				t.Fatalf("copy %d, interrupted %q: %v", i, c.Interrupted, err)
			case again != nil && again.ID != p.ID, again == nil && i < len(d.copies)/2:
				t.Fatalf("copy %d, interrupted %q: plan %+v, at first it was %s", i, c.Interrupted, again, p.ID)
			}
			if again, err = recovery.Force(r.t.Context(), one.dir(), time.Now()); err != nil || again != nil {
				t.Fatalf("copy %d, once more: %+v, %v", i, again, err)
			}
			if i%8 == 0 {
				r.start(one)
				r.check(p, &writers{acked: w.acked, tried: w.tried, revisions: maps.Clone(w.revisions)}, one)
				one.core.Crash()
				one.core = nil
			}
		}
		t.Logf("%d syncs, %d half applied", len(d.copies), half)
		if half < 3 {
			t.Errorf("of %d copies %d are half applied", len(d.copies), half)
		}
	})
}

// A plan of skein recover that was only half applied is not that of --force-new-cluster.
func TestForceRefusesAnotherPlan(t *testing.T) {
	bubble(t, 3, bordersOf(2), func(r *rig) {
		w := r.write(keysOf(2, 1), r.nodes...)
		time.Sleep(2 * time.Second)
		one := r.nodes[0]
		r.crash(r.nodes...)
		w.stop()
		p := r.plan(r.collect(one), recovery.PlanOptions{Dead: []string{"n2", "n3"}, Bump: 5})
		d := &crashAt{FS: one.disk, disk: one.disk, rng: r.rng}
		dir := one.dir()
		dir.FS = d
		if _, err := recovery.Apply(r.t.Context(), dir, p, time.Now()); err != nil {
			t.Fatal(err)
		}
		refused := 0
		for i, disk := range d.copies {
			one.disk = disk
			if r.collect(one)[0].Interrupted == "" {
				continue
			}
			refused++
			_, err := recovery.Force(r.t.Context(), one.dir(), time.Now())
			if err == nil || !strings.Contains(err.Error(), "run skein recover apply with it again") {
				t.Errorf("copy %d: %v", i, err)
			}
			r.apply(p, one)
		}
		if refused == 0 {
			t.Error("no copy is half applied")
		}
	})
}

// A leader that is cut off has a split in its log that is never committed; the others split elsewhere (trap 126). What a
// plan makes of both directories gives no key to the first.
func TestSplitThatWasNeverCommitted(t *testing.T) {
	bubble(t, 3, nil, func(r *rig) {
		w := r.write(keysOf(4, 1), r.nodes...)
		time.Sleep(time.Second)
		w.stop()
		leader := func(ms ...*machine) (led *machine, rng keyspace.RangeID) {
			r.wait(time.Minute, "a leader", func() bool {
				for _, m := range ms {
					list, err := m.core.Ranges().List(r.t.Context(), m.id)
					for _, s := range list {
						if err == nil && s.IsLeader && s.Descriptor.Span.Contains([]byte("k0003")) {
							led, rng = m, s.Descriptor.Range
						}
					}
				}
				return led != nil
			})
			return led, rng
		}
		split := func(m *machine, rng keyspace.RangeID, key string) error {
			ctx, cancel := context.WithTimeout(r.t.Context(), 300*time.Millisecond)
			defer cancel()
			_, err := m.core.Ranges().Split(ctx, m.id, rng, 0, []byte(key))
			return err
		}
		old, rng := leader(r.nodes...)
		if err := split(old, rng, "z"); err != nil { // so that it has ids for more
			t.Fatal(err)
		}
		r.net.Partition(old.id)
		if err := split(old, rng, "k0002"); err == nil {
			t.Fatal("a leader that is cut off has split")
		}
		var others []*machine
		for _, m := range r.nodes {
			if m != old {
				others = append(others, m)
			}
		}
		r.wait(time.Minute, "another leader splits", func() bool {
			m, at := leader(others...)
			return at == rng && split(m, rng, "k0001") == nil
		})
		for _, key := range []string{"k0000/0", "k0003/0"} { // so that the logs say that the split is committed
			for range 2 {
				r.wait(time.Minute, "a write behind the split", func() bool {
					ctx, cancel := context.WithTimeout(r.t.Context(), 5*time.Second)
					defer cancel()
					_, err := others[0].put(ctx, key, "behind")
					return err == nil
				})
			}
		}
		time.Sleep(time.Second)
		r.crash(r.nodes...)
		in := r.collect(old, others[0])
		var phantom *recovery.Copy
		for i := range in[0].Copies {
			c := &in[0].Copies[i]
			if c.Made != nil && string(c.End.Start) == "k0002" {
				phantom = c
			}
			if c.Range == rng && (!c.Tentative || !c.Unsettled) {
				t.Errorf("the copy of the old leader: %+v", c)
			}
		}
		if phantom == nil || phantom.Made.Certain {
			t.Fatalf("the split that was not committed: %+v", phantom)
		}
		o := recovery.PlanOptions{Dead: []string{fmt.Sprintf("n%d", others[1].id)}}
		for i := range in[1].Copies {
			if in[1].Copies[i].Range == 0 { // so that there is something to do
				in[1].Copies[i].Unusable = "by the test"
			}
		}
		p, err := recovery.MakePlan(in, o)
		if err != nil {
			t.Fatal(err)
		}
		for _, v := range p.Groups {
			if v.Range == phantom.Range && v.Verdict != recovery.Covered {
				t.Errorf("the split that was not committed: %+v", v)
			}
		}
		for _, row := range p.Map {
			if (keyspace.Span{Start: row.Start, End: row.End}).Contains([]byte("k0002")) && (string(row.Start) != "k0001" || row.Range == phantom.Range) {
				t.Errorf("%+v has the keys of the committed split", row)
			}
		}
	})
}
