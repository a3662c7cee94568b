package recovery_test

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/skeindb/skein/internal/simdisk"
	"github.com/skeindb/skein/node"
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
	copies []*simdisk.Disk
}

type crashFile struct {
	vfs.File
	d *crashAt
}

func (d *crashAt) keep() { d.copies = append(d.copies, d.disk.Crash(50, d.rng)) }

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
				c := *w
				c.revisions = maps.Clone(w.revisions)
				r.check(p, &c, one)
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
