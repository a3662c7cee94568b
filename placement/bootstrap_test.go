package placement

import (
	"context"
	"reflect"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/internal/simdisk"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/raftgroup"
)

// TestBootstrapSurvivesErrors fails the n-th operation of the file system, for every n,
// while a founder writes the first state, and then cuts the power. WriteBootstrap either
// succeeded, and all of the state is there, or it did not, and the next start
// writes all of it: nothing between.
func TestBootstrapSurvivesErrors(t *testing.T) {
	bootstrap := &fsm.Bootstrap{Cluster: 0xc1, Nodes: []fsm.Node{{ID: 1, Name: "n1"}, {ID: 2}, {ID: 3}}, SplitKeys: [][]byte{[]byte("m")}}
	want := shown(bootstrap.FirstState(raftgroup.InitIndex))
	for n := int32(0); ; n++ {
		if n > 500 {
			t.Fatal("500 operations, and none was the last one")
		}
		injected := false
		virtually(t, func(t *testing.T) {
			disk := simdisk.New()
			err := bootstrapOn(t, disk, n, &injected, bootstrap)
			after := disk.Crash(0, nil)
			e := openOn(t, after)
			defer closeEngine(t, e)
			_, there, aerr := e.Applied(keyspace.PlacementGroup)
			if aerr != nil || err == nil && !there {
				t.Fatalf("operation %d failed: the bootstrap returned %v, and after the crash %v, %v", n, err, there, aerr)
			}
			if err := WriteBootstrap(t.Context(), e, noHost, bootstrap, 2); err != nil {
				t.Fatalf("operation %d failed: bootstrap again: %v", n, err)
			}
			m, merr := newMachine(e, 1, zap.NewNop())
			if merr != nil {
				t.Fatalf("operation %d failed: %v", n, merr)
			}
			if is := shown(m.state); m.index != raftgroup.InitIndex || !reflect.DeepEqual(is, want) {
				t.Fatalf("operation %d failed: the state is %+v", n, is)
			}
		})
		if !injected {
			t.Logf("%d operations", n)
			return
		}
	}
}

// shown is all that a bootstrap state holds.
func shown(s *fsm.State) (all []any) {
	v := s.View(0, 0, nil)
	all = append(all, v.NodeTable(), v.Cluster, v.Ceiling, v.Compacted, v.SettingsRevision(), v.NextRange, v.NextReplica, v.Changed, v.NodesChanged)
	v.All(func(g *fsm.Range) bool {
		all = append(all, *g)
		return true
	})
	return all
}

// noHost is enough of a host for Bootstrap, which only writes.
var noHost *raftgroup.Host

// bootstrapOn opens an engine, bootstraps with the n-th operation failing, and ends the
// engine without a flush. It returns what WriteBootstrap returned.
func bootstrapOn(t *testing.T, disk vfs.FS, n int32, injected *bool, bootstrap *fsm.Bootstrap) error {
	t.Helper()
	var ops atomic.Int32
	var armed, hit atomic.Bool
	e := openOn(t, errorfs.Wrap(disk, errorfs.InjectorFunc(func(op errorfs.Op) error {
		// A manifest that cannot be written ends the process: package engine tests that.
		manifest := strings.Contains(op.Path, "MANIFEST")
		if armed.Load() && !manifest && op.Kind.ReadOrWrite() == errorfs.OpIsWrite && ops.Add(1) == n+1 {
			hit.Store(true)
			return errorfs.ErrInjected
		}
		return nil
	})))
	armed.Store(true)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	err := WriteBootstrap(ctx, e, noHost, bootstrap, 2)
	armed.Store(false)
	*injected = hit.Load()
	_ = e.Abort()
	return err
}

func engineOptions(fs vfs.FS) engine.Options {
	return engine.Options{FS: fs, Dir: "data", Clock: clock.Virtual(), BallastBytes: -1, LowSpaceBytes: -1}
}

func openOn(t *testing.T, fs vfs.FS) *engine.Engine {
	t.Helper()
	e, err := engine.Open(engineOptions(fs))
	if err != nil {
		t.Fatal(err)
	}
	return e
}

func closeEngine(t *testing.T, e *engine.Engine) {
	t.Helper()
	if err := e.Close(); err != nil {
		t.Error(err)
	}
}
