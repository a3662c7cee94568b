package node

import (
	"errors"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// A node that has lost its log, or its store, is not taken for a new one: it refuses to
// start, and says which directory is concerned and what to do.
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
				c.lose(t, n.disk)
				// More than once: a refusal must leave nothing that the next start takes for
				// the whole.
				for range 2 {
					core, err := Open(t.Context(), r.optionsOf(n))
					if err == nil {
						n.core = core
						t.Fatal("the node has started")
					}
					if !errors.Is(err, errLost) {
						t.Fatal(err)
					}
					for _, w := range c.words {
						if !strings.Contains(err.Error(), w) {
							t.Errorf("%q does not say %q", err, w)
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
