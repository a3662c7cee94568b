package node

import (
	"errors"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
)

// A node that has lost its log or its store is not taken for a new one. It refuses to
// start, names the directory and says what to do.
func TestLostStorageIsRefused(t *testing.T) {
	for _, c := range []struct {
		what  string
		lose  func(t *testing.T, fs vfs.FS)
		words []string
	}{
		{"wal", func(t *testing.T, fs vfs.FS) { removeSuffix(t, fs, "wal", ".wal") }, []string{"wal directory wal holds no log", "restore"}},
		{"store", func(t *testing.T, fs vfs.FS) {
			t.Helper()
			if err := fs.RemoveAll("data/engine"); err != nil {
				t.Fatal(err)
			}
		}, []string{"data/engine is empty", "raft groups", "restore"}},
	} {
		t.Run(c.what, func(t *testing.T) {
			bubble(t, 3, borders(1), nil, func(r *rig) {
				n := r.nodes[2]
				r.mustPut(n, keyOf(0), "acknowledged")
				r.crash(n)
				c.lose(r.t, n.disk)
				// More than once: a refusal must leave nothing that the next start takes for
				// the whole.
				for range 2 {
					core, err := Open(r.t.Context(), r.optionsOf(n))
					if err == nil {
						n.core = core
						r.t.Fatal("the node has started")
					}
					if !errors.Is(err, errLost) {
						r.t.Fatal(err)
					}
					for _, w := range c.words {
						if !strings.Contains(err.Error(), w) {
							r.t.Errorf("%q does not say %q", err, w)
						}
					}
				}
			})
		})
	}
}

func removeSuffix(t *testing.T, fs vfs.FS, dir, suffix string) {
	t.Helper()
	names, err := fs.List(dir)
	if err != nil {
		t.Fatal(err)
	}
	removed := 0
	for _, name := range names {
		if strings.HasSuffix(name, suffix) {
			if err := fs.Remove(fs.PathJoin(dir, name)); err != nil {
				t.Fatal(err)
			}
			removed++
		}
	}
	if removed == 0 {
		t.Fatalf("%s: no *%s among %v", dir, suffix, names)
	}
}

// A node whose first start ends at any moment starts again.
func TestCrashInFirstStart(t *testing.T) {
	bubble(t, 3, borders(1), nil, func(r *rig) {
		for range 3 {
			r.crash(r.nodes...)
			r.start(r.nodes...)
		}
		r.mustPut(r.nodes[0], keyOf(0), "v")
		r.stop(r.nodes...)
	})
}

// A crash within the removal of a replica does not keep the node from starting: the
// removal is repeated, and nothing of the replica is left.
func TestCrashInRemoval(t *testing.T) {
	bubble(t, 1, borders(3), nil, func(r *rig) {
		n := r.nodes[0]
		var ids []keyspace.RangeID
		var gs []keyspace.GroupID
		for i, what := range []string{"gone", "gone", "stays"} {
			r.mustPut(n, keyOf(i), what)
			for _, s := range n.summaries() {
				if what == "gone" && s.Descriptor.Span.Contains([]byte(keyOf(i))) {
					ids, gs = append(ids, s.Descriptor.Range), append(gs, s.Descriptor.Range.Group())
				}
			}
		}
		if err := n.core.engine.Flush(r.t.Context()); err != nil {
			r.t.Fatal(err)
		}
		cut := errors.New("cut off")
		failed := n.core.host.Remove(r.t.Context(), gs, func(*engine.Batch, keyspace.GroupID) error { return cut })
		for _, g := range gs {
			if !errors.Is(failed[g], cut) {
				r.t.Fatal(failed)
			}
		}
		r.crash(n)
		r.start(n)
		for i, id := range ids {
			if n.core.shards.Replica(id) != nil || len(n.core.host.Removed()) != 0 {
				r.t.Errorf("replica %v, removed %v", n.core.shards.Replica(id), n.core.host.Removed())
			}
			if _, ok, err := n.core.engine.Applied(id.Group()); ok || err != nil {
				r.t.Errorf("applied record: %v %v", ok, err)
			}
			if _, ok, err := mvcc.Get(n.core.engine, []byte(keyOf(i)), 1<<40); ok || err != nil {
				r.t.Errorf("a key of the replica: %v %v", ok, err)
			}
		}
		r.mustGet(n, keyOf(2), "stays")
		// What the log has forgotten need not be repeated.
		r.crash(n)
		r.start(n)
		r.mustGet(n, keyOf(2), "stays")
	})
}
