package engine

import (
	"os"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"go.uber.org/goleak"

	"github.com/skeindb/skein/clock"
)

// childEnv is set in the processes that tests start.
const childEnv = "SKEIN_ENGINE_TEST_CHILD"

func TestMain(m *testing.M) {
	if os.Getenv(childEnv) != "" {
		os.Exit(m.Run())
	}
	goleak.VerifyTestMain(m)
}

// openTest opens a small store in dir "db" of fs and closes it after the test.
func openTest(t testing.TB, fs vfs.FS) *Engine {
	t.Helper()
	return openWith(t, testOptions(fs))
}

// openWith opens a store and closes it after the test.
func openWith(t testing.TB, o Options) *Engine {
	t.Helper()
	e, err := Open(o)
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

// openAt opens a small store that the caller closes.
func openAt(t testing.TB, fs vfs.FS) *Engine {
	t.Helper()
	e, err := Open(testOptions(fs))
	if err != nil {
		t.Fatal(err)
	}
	return e
}

func testOptions(fs vfs.FS) Options {
	return Options{
		FS: fs, Dir: "db", Clock: clock.System(),
		CacheBytes: 8 << 20, MemTableBytes: 1 << 20, BallastBytes: 4 << 10, LowSpaceBytes: -1,
	}
}
