package eval

import (
	"sync/atomic"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
)

// Trap 38: a pass keeps its iterator while nothing is applied, and not beyond.
func TestPassStoreKeepsItsIterator(t *testing.T) {
	e, err := engine.Open(engine.Options{FS: vfs.NewMem(), Dir: "data", Clock: clock.System(), BallastBytes: -1, LowSpaceBytes: -1})
	if err != nil {
		t.Fatal(err)
	}
	var applied atomic.Uint64
	s := NewPassStore(NewEngineStore(e), &applied)
	defer func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	}()
	for want := int64(1); want <= 3; want++ {
		b := e.NewBatch()
		v := mvcc.Version{Key: []byte("k"), Mod: keyspace.Revision(want + 1), Create: 2, Version: want}
		if err := mvcc.Put(b, &v); err != nil {
			t.Fatal(err)
		}
		if err := b.Commit(); err != nil {
			t.Fatal(err)
		}
		applied.Add(1)
		v, ok, err := s.Get([]byte("k"), Newest)
		if err != nil || !ok || v.Version != want {
			t.Fatalf("version %d after %d puts (%v, %v)", v.Version, want, ok, err)
		}
		kept := s.getter
		if _, _, err := s.Get([]byte("k"), Newest); err != nil || s.getter != kept {
			t.Fatalf("the iterator was not kept, though nothing was applied: %v", err)
		}
	}
}
