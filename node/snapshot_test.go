package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"

	"go.uber.org/zap"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/dataapi"
	"github.com/skeindb/skein/etcdfile"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/placement"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/rangeapi"
)

// cutStore is a store of which a cut is made, at revision 50 and compacted at 20.
type cutStore struct {
	held     int
	versions []mvcc.Version
	// page is called behind each version.
	page func(n int)
	// late is how many times the hold comes too late for a leader.
	late int
}

func (s *cutStore) PutHold(_ context.Context, o fsm.PutHold) (fsm.Hold, error) {
	if o.Create {
		s.held++
	}
	return fsm.Hold{ID: o.ID, Revision: 20}, nil
}

func (s *cutStore) EndHold(context.Context, fsm.HoldID) error {
	s.held--
	return nil
}

func (s *cutStore) ListLeases(context.Context) ([]placement.LeaseStatus, keyspace.Revision, error) {
	return []placement.LeaseStatus{{LeaseRef: fsm.LeaseRef{ID: 7}, TTL: 600, Remaining: 300e9}, {LeaseRef: fsm.LeaseRef{ID: 5}, TTL: 10, Remaining: -1}}, 50, nil
}

func (s *cutStore) AccessRows(context.Context) ([]fsm.AccessRow, error) { return nil, nil }

func (s *cutStore) RangeMap(context.Context) ([]keyspace.Descriptor, error) { return nil, nil }

func (s *cutStore) Present(context.Context) (current, compacted keyspace.Revision, err error) {
	return 50, 20, nil
}

func (s *cutStore) ReadCut(ctx context.Context, c mvcc.Cut, _ mvcc.VersionCursor, _ []byte, send func(p *rangeapi.VersionsPage, next *mvcc.VersionCursor) error) error {
	if c != (mvcc.Cut{Select: mvcc.SelectKept, At: 50, After: 20}) {
		return fmt.Errorf("a cut %+v", c)
	}
	if s.late > 0 {
		s.late--
		return kverror.New(kverror.HoldEnded, "a test")
	}
	for i := range s.versions {
		v, p := &s.versions[i], &rangeapi.VersionsPage{}
		p.Add(nil, &mvcc.StoredVersion{Key: v.Key, Mod: v.Mod, Value: v.AppendValue(nil)})
		next := c.Behind(v.Key, v.Mod)
		if err := errors.Join(ctx.Err(), send(p, &next)); err != nil {
			return err
		}
		if s.page != nil {
			s.page(i)
		}
	}
	return send(&rangeapi.VersionsPage{}, nil)
}

// snapshotsOf makes files of a store in a directory, to which a crash has left something.
func snapshotsOf(t *testing.T, s *cutStore) *snapshots {
	t.Helper()
	c := &Core{o: Options{DataDir: t.TempDir(), Clock: clock.System(), Self: 1}, log: zap.NewNop()}
	c.cuts = dataapi.NewCutter(dataapi.Options{Cluster: 1, Holds: s, Records: s, Keys: s, Clock: clock.System(), Logger: zap.NewNop()})
	left := filepath.Join(c.o.DataDir, snapshotDirName)
	if err := errors.Join(os.Mkdir(left, 0o700), os.WriteFile(filepath.Join(left, "db.part"), []byte("half"), 0o600)); err != nil {
		t.Fatal(err)
	}
	files, err := newSnapshots(c)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(left); !os.IsNotExist(err) {
		t.Errorf("what a crash has left is there: %v", err)
	}
	files.spare = func(string) (int64, bool) { return 0, false }
	files.estimate = func(context.Context) (int64, error) { return 0, errors.New("nobody answers") }
	return files
}

func someVersions() []mvcc.Version {
	return []mvcc.Version{
		{Key: []byte("a"), Mod: 30, Create: 30, Version: 1, Lease: 7, Value: []byte("v")},
		{Key: []byte("b"), Mod: 41, Create: 40, Version: 2, Lease: 9, Value: []byte("w")},
		{Key: []byte("b"), Mod: 40, Create: 40, Version: 1, Lease: 8, Value: []byte("v")},
		{Key: []byte("c"), Mod: 45, Tombstone: true},
		{Key: []byte("c"), Mod: 20, Create: 20, Version: 1, Lease: 6, Value: []byte("v")},
	}
}

// Trap 119: a key of the cut may be attached to a lease of which nobody knows any more. It gets one of a minute.
// Leases in old versions attach nothing, and get none.
func TestSnapshotLeases(t *testing.T) {
	s := &cutStore{versions: someVersions()}
	f, err := snapshotsOf(t, s).Snapshot(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	path := filepath.Join(t.TempDir(), "db")
	b := make([]byte, f.Size())
	if n, err := f.Read(b); n != len(b) || err != nil {
		t.Fatal(n, err)
	}
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	db, err := etcdfile.Open(t.Context(), path, etcdfile.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	want := "[{5 10 1} {7 600 300} {9 60 60}]"
	if got := fmt.Sprint(db.Info().Leases); got != want || db.Info().Revision != 50 || db.Info().Compacted != 20 || s.held != 0 {
		t.Errorf("%+v, leases %s, want %s; %d holds", db.Info(), got, want, s.held)
	}
}

// largeVersions are 40 versions of a MiB.
func largeVersions() (vs []mvcc.Version) {
	for i := range 40 {
		vs = append(vs, mvcc.Version{Key: fmt.Appendf(nil, "k%02d", i), Mod: 30, Create: 30, Version: 1, Value: make([]byte, 1<<20)})
	}
	return vs
}

// A node at rest must not grow by all the garbage that its budget allows, since a client asks for a snapshot. Garbage is
// collected while versions are read, while the file is written and while it is sent, but only where there is some.
func TestSnapshotCollectsItsGarbage(t *testing.T) {
	for _, garbage := range []uint64{0, snapshotGarbageBytes / 4, snapshotGarbageBytes} {
		heap, collections := 100<<20-garbage, 0
		s := &cutStore{versions: largeVersions()}
		files := snapshotsOf(t, s)
		files.heap = func() uint64 {
			heap += garbage // since the last look
			return heap
		}
		files.collect = func() { heap, collections = 100<<20, collections+1 }
		f, err := files.Snapshot(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		made := collections
		if _, err := io.Copy(io.Discard, f); err != nil {
			t.Fatal(err)
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
		// 40 MiB and more are read, written and sent, and 8 MiB lie between two looks.
		leastMade, leastSent := 0, 0
		switch garbage {
		case 0:
			if collections > 0 {
				t.Errorf("without garbage it was collected %d times", collections)
			}
		case snapshotGarbageBytes / 4:
			leastMade, leastSent = 2, 1
		default:
			leastMade, leastSent = 8, 5
		}
		if made < leastMade || collections-made < leastSent {
			t.Errorf("with %d bytes of garbage between two looks it was collected %d times for the file, and %d times while it was sent; want %d and %d at least",
				garbage, made, collections-made, leastMade, leastSent)
		}
	}
}

// What a collection leaves is no garbage: while a cache fills to 100 MiB, garbage is not collected each time, and then
// not at all.
func TestSnapshotLeavesWhatIsNoGarbage(t *testing.T) {
	const full, step = 100 << 20, snapshotGarbageBytes / 2
	used, collections := uint64(0), 0
	tidy := newTidyHeap(func() uint64 { return used }, func() { collections++ })
	for range 100 {
		used = min(used+step, full)
		tidy.passed(snapshotTidyBytes)
	}
	if want := full / snapshotGarbageBytes; collections != want {
		t.Errorf("without garbage, on a heap that grew by %d bytes, it was collected %d times, want %d", full, collections, want)
	}
}

// A disk without room, and a store that is larger than etcd supports, are refused before the first byte, and leave
// neither a file nor a hold. The node's own reserve is not touched: what is written between two looks fits beside it.
func TestSnapshotWithoutRoom(t *testing.T) {
	const gib = 1 << 30
	spare := int64(64 * gib)
	s := &cutStore{versions: someVersions()}
	files := snapshotsOf(t, s)
	files.spare = func(dir string) (int64, bool) {
		if dir != files.dir {
			t.Errorf("the room of %s is asked for", dir)
		}
		return spare, true
	}
	check := func(when string, want ...string) {
		t.Helper()
		f, err := files.Snapshot(t.Context())
		if f != nil || status.Code(kverror.GRPC(err)) != codes.ResourceExhausted {
			t.Errorf("%s: %v", when, err)
		}
		for _, w := range want {
			if !strings.Contains(fmt.Sprint(kverror.GRPC(err)), w) {
				t.Errorf("%s: %v, want %q", when, err, w)
			}
		}
		if left, err := os.ReadDir(files.dir); len(left) > 0 || err != nil && !os.IsNotExist(err) || s.held != 0 {
			t.Errorf("%s: %v is left, %v, and %d holds", when, left, err, s.held)
		}
	}
	spare = 0
	check("no room, and nobody knows the size", "no room for a snapshot")
	spare, files.estimate = 7*gib, func(context.Context) (int64, error) { return 4 * gib, nil }
	s.page = func(int) { t.Error("versions are read though they do not fit") }
	check("by the estimate", fmt.Sprintf("about %d bytes of the disk of node 1, and %d are free", 8*gib+snapshotStepBytes, spare), "ask another node", "skein export etcd")
	files.estimate = func(context.Context) (int64, error) { return 4 << 10, nil }
	s.versions = largeVersions()
	s.page = func(n int) { spare = int64(gib) - int64(n)*(30<<20) }
	check("less and less while it is read", "no room for a snapshot")
	if spare < 0 {
		t.Errorf("it was read until %d bytes of the reserve were taken", -spare)
	}
	s.page, spare = nil, 60<<20
	check("less than the file, once its size is known", fmt.Sprintf("about %d bytes", 40<<20+40*3+snapshotStepBytes))
	s.versions, spare = someVersions(), 64*gib
	files.maxBytes = 4
	check("too large", "etcd supports 8 GiB")
	files.maxBytes = 20 << 10
	check("too large as a file", "etcd supports 8 GiB")
	ctx, cancel := context.WithCancel(t.Context())
	files.maxBytes = snapshotMaxBytes
	s.page = func(int) { cancel() }
	if f, err := files.Snapshot(ctx); f != nil || !errors.Is(err, context.Canceled) || s.held != 0 {
		t.Errorf("the client has gone: %v, %d holds", err, s.held)
	}
}

// A disk that fills up while the file is written, by others, ends it before the node's reserve is touched.
func TestSnapshotDiskFillsUp(t *testing.T) {
	s := &cutStore{versions: largeVersions()}
	files := snapshotsOf(t, s)
	looks := 0
	files.spare = func(string) (int64, bool) {
		if _, err := os.Stat(filepath.Join(files.dir, "db.part")); err == nil {
			looks++
		}
		return max(0, 200<<20-int64(looks)*(40<<20)), true
	}
	if f, err := files.Snapshot(t.Context()); f != nil || status.Code(err) != codes.ResourceExhausted || looks < 3 || s.held != 0 {
		t.Errorf("%v after %d looks while it is written, %d holds", err, looks, s.held)
	}
	if left, err := os.ReadDir(files.dir); len(left) > 0 || err != nil {
		t.Errorf("%v is left, %v", left, err)
	}
}

// Compactions that come before the hold begin the reading anew, a few times.
func TestSnapshotAmongCompactions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &cutStore{versions: someVersions(), late: 5}
		files := snapshotsOf(t, s)
		f, err := files.Snapshot(t.Context())
		if err != nil || f.Size() == 0 || s.late != 0 || s.held != 0 {
			t.Fatalf("%v, %d more, %d holds", err, s.late, s.held)
		}
		f.Close()
		s.late = 100
		if f, err := files.Snapshot(t.Context()); f != nil || !strings.Contains(fmt.Sprint(kverror.GRPC(err)), "ask again when fewer compactions run") || s.late != 94 || s.held != 0 {
			t.Errorf("%v, %d more, %d holds", err, s.late, s.held)
		}
	})
}
