package heat

import (
	"fmt"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"go.uber.org/goleak"
	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/engine"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// openTest opens a small engine in memory and closes it after the test.
func openTest(t testing.TB) *engine.Engine {
	t.Helper()
	e, err := engine.Open(engine.Options{FS: vfs.NewMem(), Dir: "db", Clock: clock.System(), MemTableBytes: 4 << 20, BallastBytes: -1, LowSpaceBytes: -1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return e
}

// newTestStore returns a store and what adds a minute to it.
func newTestStore(t testing.TB) (s *Store, add func(at int64, c Column)) {
	t.Helper()
	s = NewStore(openTest(t), zap.NewNop())
	return s, func(at int64, c Column) {
		t.Helper()
		if err := s.Add(at, c); err != nil {
			t.Fatal(err)
		}
	}
}

// total is what a map has in all.
func total(g *Grid) (sum Counts) {
	for _, c := range g.Counts {
		sum.add(c)
	}
	return sum
}

// of is a column with one cell, which has one key.
func of(key string, writes uint64) Column {
	return Column{{key, Counts{Writes: writes, Bytes: 10 * writes}}, {Start: after(key)}}
}

// manyKeys is a column of so many keys with a request each.
func manyKeys(n int, key func(i int) string) Column {
	var c Column
	for i := range n {
		c = append(c, Cell{key(i), Counts{Reads: 1}})
	}
	return c
}

func numbered(i int) string { return fmt.Sprintf("k%06d", i) }
