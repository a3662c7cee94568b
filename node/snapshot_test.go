package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

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

func (s *cutStore) Settings(context.Context) ([]fsm.Setting, keyspace.Revision, error) {
	return nil, 0, nil
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
func snapshotsOf(t *testing.T, s *cutStore, full func() bool) *snapshots {
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
	files.full = full
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
	f, err := snapshotsOf(t, s, func() bool { return false }).Snapshot(t.Context())
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

// A disk without room, and a store that is larger than etcd supports, are refused before the first byte, and leave
// neither a file nor a hold.
func TestSnapshotWithoutRoom(t *testing.T) {
	full := false
	s := &cutStore{versions: someVersions()}
	files := snapshotsOf(t, s, func() bool { return full })
	check := func(when, want string, code codes.Code) {
		t.Helper()
		f, err := files.Snapshot(t.Context())
		if f != nil || status.Code(kverror.GRPC(err)) != code || !strings.Contains(fmt.Sprint(err), want) {
			t.Errorf("%s: %v", when, err)
		}
		if left, err := os.ReadDir(files.dir); len(left) > 0 || err != nil && !os.IsNotExist(err) || s.held != 0 {
			t.Errorf("%s: %v is left, %v, and %d holds", when, left, err, s.held)
		}
	}
	full = true
	check("full before", "no room for a snapshot", codes.ResourceExhausted)
	full = false
	s.page = func(n int) { full = n == 2 }
	check("full in the middle", "no room for a snapshot", codes.ResourceExhausted)
	s.page, full = nil, false
	files.maxBytes = 4
	check("too large", "etcd supports 8 GiB", codes.ResourceExhausted)
	files.maxBytes = 20 << 10
	check("too large as a file", "etcd supports 8 GiB", codes.ResourceExhausted)
	ctx, cancel := context.WithCancel(t.Context())
	files.maxBytes = snapshotMaxBytes
	s.page = func(int) { cancel() }
	if f, err := files.Snapshot(ctx); f != nil || !errors.Is(err, context.Canceled) || s.held != 0 {
		t.Errorf("the client has gone: %v, %d holds", err, s.held)
	}
}
