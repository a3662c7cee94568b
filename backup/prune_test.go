package backup

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
)

// days makes a full backup and one on top of it on each day of n, and ends a day after.
func days(t *testing.T, n int) (*memTarget, *Repository, *model) {
	t.Helper()
	mem := newMem()
	r := NewRepository(mem, Keys{}, clock.Virtual())
	m := newModel(1)
	for range n {
		mem.now = time.Now()
		m.run(20)
		m.time = time.Now()
		full := write(t, r, "", m, m.cut(Full, 0, m.rev-5))
		time.Sleep(12 * time.Hour)
		m.run(5)
		m.time = time.Now()
		write(t, r, full.Chain, m, m.cut(Versions, full.Revision, full.Compacted))
		time.Sleep(12 * time.Hour)
	}
	return mem, r, m
}

// lastBefore returns a function that says what was the last revision at a time, by the backups of now.
func lastBefore(t *testing.T, r *Repository) func(time.Time) keyspace.Revision {
	t.Helper()
	chains, err := r.List(t.Context(), testCluster)
	if err != nil {
		t.Fatal(err)
	}
	return func(at time.Time) (last keyspace.Revision) {
		for _, c := range chains {
			for _, b := range c.Backups {
				if !b.Manifest.Time.After(at) {
					last = max(last, b.Revision)
				}
			}
		}
		return last
	}
}

func TestPrune(t *testing.T) {
	for _, c := range []struct {
		keep Retention
		left int
	}{
		{Retention{KeepFull: 1}, 1},
		{Retention{KeepFull: 4}, 4},
		{Retention{KeepFull: 100}, 6},
		{Retention{Keep: time.Hour}, 1}, // never the last
		{Retention{Keep: 60 * time.Hour}, 3},
		{Retention{Keep: 59 * time.Hour}, 3}, // the state until the chain after it
		{Retention{Keep: 49 * time.Hour}, 3},
		{Retention{Keep: 47 * time.Hour}, 2},
		{Retention{KeepFull: 2, Keep: 60 * time.Hour}, 3},
		{Retention{KeepFull: 4, Keep: 60 * time.Hour}, 4},
	} {
		t.Run(fmt.Sprint(c.keep), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				mem, r, m := days(t, 6)
				at := lastBefore(t, r)
				before := len(mem.files)
				dry, err := r.Prune(t.Context(), testCluster, c.keep, true)
				if err != nil || len(mem.files) != before {
					t.Fatalf("a dry run has removed %d files, error %v", before-len(mem.files), err)
				}
				p, err := r.Prune(t.Context(), testCluster, c.keep, false)
				if err != nil {
					t.Fatal(err)
				}
				if fmt.Sprint(p) != fmt.Sprint(dry) || len(p.Chains) != 6-c.left || p.Files != before-len(mem.files) {
					t.Errorf("pruned %+v, dry %+v, %d files before, %d now", p, dry, before, len(mem.files))
				}
				chains, err := r.List(t.Context(), testCluster)
				if err != nil || len(chains) != c.left {
					t.Fatalf("%d chains, want %d, error %v", len(chains), c.left, err)
				}
				if report, err := r.Verify(t.Context(), testCluster, "", true); err != nil || len(report.Problems) > 0 {
					t.Errorf("%+v, %v", report, err)
				}
				_, got := restore(t, r, When{}, keyspace.Span{})
				same(t, got, m.at(m.rev, chains[len(chains)-1].Backups[0].Manifest.Compacted))
				border := time.Now().Add(time.Second - c.keep.Keep) // just inside of what is kept
				if p, err := r.Plan(t.Context(), testCluster, When{Time: border}); err != nil || p.Revision != at(border) {
					t.Errorf("restore of %v: %+v, %v, want revision %d", border, p, err, at(border))
				}
			})
		})
	}
}

// A removal that is broken off anywhere leaves chains that are whole, or nothing that counts,
// and the next removal finishes it.
func TestPruneIsBrokenOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		full, r, _ := days(t, 2)
		errCut := errors.New("connection cut")
		for n := 0; ; n++ {
			mem := full.clone()
			at := 0
			mem.fail = func(op, _ string) error {
				if op == "delete" {
					if at++; at > n {
						return errCut
					}
				}
				return nil
			}
			r.target = mem
			_, err := r.Prune(t.Context(), testCluster, Retention{KeepFull: 1}, false)
			if err == nil {
				if n < 10 {
					t.Fatalf("only %d removals", n)
				}
				break
			}
			if !errors.Is(err, errCut) {
				t.Fatal(err)
			}
			if report, err := r.Verify(t.Context(), testCluster, "", true); err != nil || len(report.Problems) > 0 {
				t.Fatalf("after %d removals: %+v, %v", n, report, err)
			}
			mem.fail = nil
			time.Sleep(leftoverAge)
			if _, err := r.Prune(t.Context(), testCluster, Retention{KeepFull: 1}, false); err != nil {
				t.Fatal(err)
			}
			if chains, err := r.List(t.Context(), testCluster); err != nil || len(chains) != 1 {
				t.Fatalf("after %d removals: %+v, %v", n, chains, err)
			}
		}
	})
}

// Leftovers go when nobody can be at work on them any more, and nothing else does.
func TestPruneLeftovers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		mem, r, m := days(t, 1)
		chain, rev, err := r.Latest(t.Context(), testCluster)
		if err != nil {
			t.Fatal(err)
		}
		mem.now = time.Now()
		m.run(30)
		c := m.cut(Versions, rev, 10)
		d, err := r.Begin(t.Context(), testCluster, chain, c, testBorders)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := r.Write(t.Context(), d, &testSource{vs: m.within(c), perBlock: 5, failAfter: 4}, smallOptions); !errors.Is(err, errSource) {
			t.Fatal(err)
		}
		begun := len(mem.names("/000003/"))
		for _, age := range []time.Duration{time.Hour, leftoverAge} {
			time.Sleep(age)
			if _, err := r.Prune(t.Context(), testCluster, Retention{KeepFull: 1}, false); err != nil {
				t.Fatal(err)
			}
			want := begun
			if age == leftoverAge {
				want = 0
			}
			if got := len(mem.names("/000003/")); got != want {
				t.Errorf("%d files after %s, want %d", got, age, want)
			}
		}
		if report, err := r.Verify(t.Context(), testCluster, "", true); err != nil || len(report.Problems) > 0 || report.Backups != 2 {
			t.Errorf("%+v, %v", report, err)
		}
	})
}

// A chain that cannot be read is not removed, and does not stand in for one that can.
func TestPruneLeavesBrokenChains(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		mem, r, _ := days(t, 4)
		chains, err := r.List(t.Context(), testCluster)
		if err != nil {
			t.Fatal(err)
		}
		for _, i := range []int{1, 3} {
			mem.files[chains[i].Folder()+"000001/"+manifestFile] = []byte("damaged")
		}
		p, err := r.Prune(t.Context(), testCluster, Retention{KeepFull: 1}, false)
		if err != nil || len(p.Chains) != 1 || p.Chains[0] != chains[0].Name {
			t.Errorf("%+v, %v", p, err)
		}
		for _, keep := range []Retention{{}, {KeepFull: -1}} {
			if _, err := r.Prune(t.Context(), testCluster, keep, false); err == nil || !strings.Contains(err.Error(), "--keep-full") {
				t.Error(err)
			}
		}
		if _, err := r.Prune(t.Context(), 0, Retention{KeepFull: 1}, false); err == nil {
			t.Error("prune of all clusters: no error")
		}
	})
}
