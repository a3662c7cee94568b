package etcdfile

import (
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/skeindb/skein/keyspace"
)

// limitFiles has every write beyond a size of a file fail, as one on a full disk does.
func limitFiles(t *testing.T, bytes uint64) (restore func()) {
	t.Helper()
	var before unix.Rlimit
	if err := unix.Prlimit(0, unix.RLIMIT_FSIZE, nil, &before); err != nil {
		t.Fatal(err)
	}
	set := func(l unix.Rlimit) {
		if err := unix.Prlimit(0, unix.RLIMIT_FSIZE, &l, nil); err != nil {
			t.Fatal(err)
		}
	}
	signal.Ignore(syscall.SIGXFSZ)
	set(unix.Rlimit{Cur: bytes, Max: before.Max})
	return func() { set(before) }
}

// TestNoRoom: wherever the room ends, a file is written or an error says so, and nothing is
// left.
func TestNoRoom(t *testing.T) {
	const versions = 3000
	failed, written := 0, 0
	for limit := uint64(0); written == 0; limit += 64 << 10 {
		dir := t.TempDir()
		restore := limitFiles(t, limit)
		err := func() (err error) {
			w, err := Create(filepath.Join(dir, "db"), Header{Revision: versions + 1, TransactionBytes: 128 << 10})
			if err != nil {
				return err
			}
			defer func() { err = errors.Join(err, w.Abort()) }()
			for i := range versions {
				v := putAt(fmt.Sprintf("key/%05d", i), keyspace.Revision(i+2), 0)
				v.Value = make([]byte, 500)
				if err := w.Add(&v); err != nil {
					return err
				}
			}
			_, err = w.Finish(t.Context())
			return err
		}()
		restore()
		left, errDir := os.ReadDir(dir)
		if errDir != nil {
			t.Fatal(errDir)
		}
		switch {
		case err == nil:
			written++
			if len(readAll(t, openRaw(t, filepath.Join(dir, "db")), ReadOptions{})) != versions {
				t.Error("versions are missing")
			}
		case !errors.Is(err, unix.EFBIG) || len(left) != 0:
			t.Fatalf("at %d bytes: %v; %v are left", limit, err, left)
		default:
			failed++
		}
		if limit > 64<<20 {
			t.Fatal("it never succeeds")
		}
	}
	if failed < 10 {
		t.Errorf("%d failures only", failed)
	}
	t.Logf("%d times there was no room", failed)
}

// TestNoRoomToSort: the error says where there is no room, and how much is needed.
func TestNoRoomToSort(t *testing.T) {
	dir := t.TempDir()
	s := NewSorter(SorterOptions{Order: ByKey, TempDir: dir, RunBytes: minRunBytes})
	defer s.Close()
	restore := limitFiles(t, 1<<20)
	defer restore()
	var err error
	for i := 0; err == nil && i < 1000; i++ {
		v := putAt("a", keyspace.Revision(i+1), 0)
		v.Value = make([]byte, 1<<16)
		err = s.Add(&v)
	}
	if !errors.Is(err, unix.EFBIG) || !strings.Contains(err.Error(), dir) {
		t.Errorf("%v", err)
	}
}
