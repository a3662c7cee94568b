package mvcc

import (
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"go.uber.org/goleak"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/engine"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// openTest opens a small store in memory and closes it after the test.
func openTest(t testing.TB) *engine.Engine {
	t.Helper()
	e, err := engine.Open(engine.Options{
		FS: vfs.NewMem(), Dir: "db", Clock: clock.System(),
		CacheBytes: 256 << 20, MemTableBytes: 4 << 20, BallastBytes: -1, LowSpaceBytes: -1,
	})
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
