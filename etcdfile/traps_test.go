package etcdfile

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"go.etcd.io/bbolt"
	"go.etcd.io/etcd/server/v3/lease/leasepb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
)

// putAt is a put that creates its key.
func putAt(key string, rev keyspace.Revision, sub uint32) mvcc.Version {
	return mvcc.Version{Key: []byte(key), Mod: rev, Sub: sub, Create: rev, Version: 1, Value: []byte("v")}
}

func deleteAt(key string, rev keyspace.Revision, sub uint32) mvcc.Version {
	return mvcc.Version{Key: []byte(key), Mod: rev, Sub: sub, Tombstone: true}
}

// TestBumpedRevision is trap 111: etcdutl snapshot restore --bump-revision writes a record
// with an empty key, and schedules a compaction there. It is no key, and its revision counts.
func TestBumpedRevision(t *testing.T) {
	raw := rawFile{}
	raw.version(putAt("a", 2, 0))
	raw.put(bucketKey, encodeRevision(1002, 0, false), nil)
	raw.compaction(1002, 0)
	f := openRaw(t, raw.write(t, 4096))
	if i := f.Info(); i.Revision != 1002 || i.Compacted != 1002 {
		t.Errorf("revision %d, compacted %d", i.Revision, i.Compacted)
	}
	if got := readAll(t, f, ReadOptions{}); !slices.Equal(got, []string{`"a"@2.0 create 2 version 1 "v"`}) {
		t.Errorf("%q", got)
	}
	vs, err := f.Versions(t.Context(), ReadOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer vs.Close()
	if s := vs.Stats(); s.Empty != 1 || s.Records != 1 {
		t.Errorf("%+v", s)
	}
}

// TestGapAtTheEnd is trap 111 in the other direction: a store whose last revisions have no
// writes is written with such a record, so that the next revision is the right one.
func TestGapAtTheEnd(t *testing.T) {
	for _, h := range []Header{{Revision: 50}, {Revision: 50, Compacted: 50}, {Revision: 50, Compacted: 10}, {Revision: 2}, {Revision: 1}} {
		all := []mvcc.Version{putAt("a", 2, 0)}
		if h.Revision == 1 {
			all = nil
		}
		path, _ := write(t, all, h, 0)
		f := openRaw(t, path)
		if i := f.Info(); i.Revision != h.Revision || i.Compacted != h.Compacted {
			t.Errorf("revision %d, compacted %d, want %d, %d", i.Revision, i.Compacted, h.Revision, h.Compacted)
		}
		if got := readAll(t, f, ReadOptions{}); len(got) != len(all) {
			t.Errorf("%+v: %q", h, got)
		}
	}
}

// TestTombstones is trap 112: the key of a tombstone has 18 bytes. A put and a delete of a
// key in one revision are one version with an earlier write, in either order.
func TestTombstones(t *testing.T) {
	raw := rawFile{}
	raw.version(putAt("a", 2, 0))
	raw.version(putAt("b", 2, 1))
	raw.version(deleteAt("a", 3, 0)) // deleted and put
	raw.version(putAt("a", 3, 1))
	raw.version(putAt("c", 4, 0)) // put and deleted
	raw.version(deleteAt("c", 4, 2))
	raw.version(deleteAt("b", 4, 1))
	f := openRaw(t, raw.write(t, 4096))
	want := []string{
		`"a"@3.1 create 3 version 1 "v" after ("a"@3.0 tombstone)`,
		`"a"@2.0 create 2 version 1 "v"`,
		`"b"@4.1 tombstone`,
		`"b"@2.1 create 2 version 1 "v"`,
		`"c"@4.2 tombstone after ("c"@4.0 create 4 version 1 "v")`,
	}
	if got := readAll(t, f, ReadOptions{}); !slices.Equal(got, want) {
		t.Errorf("%s", strings.Join(got, "\n"))
	}
	// At the compacted revision only a tombstone stays, and no earlier write.
	want = []string{`"a"@3.1 create 3 version 1 "v"`, `"b"@4.1 tombstone`, `"c"@4.2 tombstone`}
	if got := readAll(t, f, ReadOptions{Latest: true}); !slices.Equal(got, want) {
		t.Errorf("latest: %s", strings.Join(got, "\n"))
	}
	for _, key := range []string{"", "0123456789abcdef", "01234567_9abcdefgx", "01234567-9abcdefg"} {
		raw := rawFile{}
		raw.put(bucketKey, []byte(key+"#"), []byte("x"))
		if _, err := Open(t.Context(), raw.write(t, 4096), Options{SkipHashCheck: true}); !errors.Is(err, ErrCorrupt) {
			t.Errorf("key %q: %v", key, err)
		}
	}
}

// TestScheduledCompaction is trap 113: what a scheduled compaction has not removed yet is
// not read, and the revision does not fall behind a compaction that removed the last record.
func TestScheduledCompaction(t *testing.T) {
	raw := rawFile{}
	for rev := keyspace.Revision(2); rev <= 6; rev++ {
		v := putAt("a", rev, 0)
		v.Create, v.Version = 2, int64(rev-1)
		raw.version(v)
	}
	raw.version(putAt("b", 2, 1))
	raw.version(deleteAt("b", 4, 1))
	raw.version(putAt("c", 2, 2))
	raw.version(deleteAt("c", 5, 1))
	raw.compaction(5, 3)
	f := openRaw(t, raw.write(t, 4096))
	if i := f.Info(); i.Revision != 6 || i.Compacted != 5 {
		t.Errorf("revision %d, compacted %d", i.Revision, i.Compacted)
	}
	want := []string{`"a"@6.0 create 2 version 5 "v"`, `"a"@5.0 create 2 version 4 "v"`, `"c"@5.1 tombstone`}
	if got := readAll(t, f, ReadOptions{}); !slices.Equal(got, want) {
		t.Errorf("%s", strings.Join(got, "\n"))
	}
	for _, c := range [][2]keyspace.Revision{{9, 0}, {9, 8}, {8, 9}} {
		raw.compaction(c[0], c[1])
		if i := openRaw(t, raw.write(t, 4096)).Info(); i.Revision != 9 || i.Compacted != 9 {
			t.Errorf("%d: revision %d, compacted %d", c, i.Revision, i.Compacted)
		}
	}
}

// TestLeases is trap 114: only the lease of a key's newest version counts, and only if the
// file has its record. What clients see stays.
func TestLeases(t *testing.T) {
	raw := rawFile{}
	leased := func(key string, rev keyspace.Revision, sub uint32, lease keyspace.LeaseID) {
		v := putAt(key, rev, sub)
		v.Create, v.Version, v.Lease = 2, int64(rev-1), lease
		raw.version(v)
	}
	leased("attached", 2, 0, 7)
	leased("detached", 2, 1, 7)
	leased("detached", 3, 0, 0)
	leased("moved", 2, 2, 7)
	leased("moved", 3, 1, -8)
	leased("unknown", 3, 2, 9)
	leased("deleted", 2, 3, 7)
	raw.version(deleteAt("deleted", 3, 3))
	for _, l := range []*leasepb.Lease{{ID: 7, TTL: 60, RemainingTTL: 20}, {ID: -8, TTL: 10}} {
		b, err := proto.Marshal(l)
		if err != nil {
			t.Fatal(err)
		}
		raw.put(bucketLease, leaseKey(keyspace.LeaseID(l.ID)), b)
	}
	f := openRaw(t, raw.write(t, 4096))
	if got := f.Info().Leases; !slices.Equal(got, []Lease{{-8, 10, 0}, {7, 60, 20}}) {
		t.Errorf("%+v", got)
	}
	want := []string{
		`"attached"@2.0 create 2 version 1 lease 7 "v" attached`,
		`"deleted"@3.3 tombstone`,
		`"deleted"@2.3 create 2 version 1 lease 7 "v"`,
		`"detached"@3.0 create 2 version 2 "v"`,
		`"detached"@2.1 create 2 version 1 lease 7 "v"`,
		`"moved"@3.1 create 2 version 2 lease -8 "v" attached`,
		`"moved"@2.2 create 2 version 1 lease 7 "v"`,
		`"unknown"@3.2 create 2 version 2 lease 9 "v"`,
	}
	if got := readAll(t, f, ReadOptions{}); !slices.Equal(got, want) {
		t.Errorf("%s", strings.Join(got, "\n"))
	}
}

// TestTooLarge is trap 115: versions that cannot be taken are named before any is read, but
// for those that would not be read.
func TestTooLarge(t *testing.T) {
	raw := rawFile{}
	large := func(key string, rev keyspace.Revision, size int) {
		v := putAt(key, rev, 0)
		v.Value = make([]byte, size)
		raw.version(v)
	}
	large("a", 2, 100)
	large("b", 3, 101)
	large("b", 4, 10)
	large("c", 5, 500)
	large("d", 6, 200)
	raw.version(deleteAt("c", 7, 0))
	large("fits", 8, 96)
	for _, c := range []struct {
		compacted keyspace.Revision
		latest    bool
		want      []string
	}{
		{0, false, []string{"a@2", "b@3", "c@5", "d@6"}},
		{4, false, []string{"a@2", "c@5", "d@6"}},
		{3, false, []string{"a@2", "b@3", "c@5", "d@6"}},
		{7, false, []string{"a@2", "d@6"}},
		{0, true, []string{"a@2", "d@6"}},
	} {
		raw.compaction(c.compacted, 0)
		f := openRaw(t, raw.write(t, 4096))
		_, err := f.Versions(t.Context(), ReadOptions{MaxVersionBytes: 100, Latest: c.latest})
		var e *TooLargeVersionsError
		if !errors.As(err, &e) {
			t.Fatalf("compacted %d: %v", c.compacted, err)
		}
		var got []string
		for _, v := range e.Versions {
			got = append(got, fmt.Sprintf("%s@%d", v.Key, v.Revision))
			if !strings.Contains(err.Error(), fmt.Sprintf("%q at revision %d", v.Key, v.Revision)) {
				t.Errorf("%v does not name %s", err, v.Key)
			}
		}
		if !slices.Equal(got, c.want) || e.More {
			t.Errorf("compacted %d, latest %t: %q, want %q", c.compacted, c.latest, got, c.want)
		}
		if _, err := f.Versions(t.Context(), ReadOptions{MaxVersionBytes: 501, Latest: c.latest}); err != nil {
			t.Error(err)
		}
	}
}

// TestManyTooLarge: what is named is bounded.
func TestManyTooLarge(t *testing.T) {
	raw := rawFile{}
	for i := range maxTooLarge + 5 {
		raw.version(putAt(fmt.Sprintf("key/%06d", i), 2, uint32(i)))
	}
	_, err := openRaw(t, raw.write(t, 4096)).Versions(t.Context(), ReadOptions{MaxVersionBytes: 5})
	var e *TooLargeVersionsError
	if !errors.As(err, &e) || !e.More || len(err.Error()) > 5000 {
		t.Errorf("%v", err)
	}
}

// TestDeleteMany is trap 116: 100,000 keys that were deleted in one revision, and also where
// all have one operation number, as one DeleteRange of Skein may.
func TestDeleteMany(t *testing.T) {
	const many = 100_000
	var all []mvcc.Version
	for i := range many {
		all = append(all, deleteAt(fmt.Sprintf("key/%06d", i), 7, 3))
	}
	all = append(all, putAt("other", 7, 4))
	path, _ := write(t, all, Header{Revision: 7}, minRunBytes)
	got := readAll(t, openRaw(t, path), ReadOptions{RunBytes: minRunBytes})
	if len(got) != many+1 || got[0] != `"key/000000"@7.3 tombstone` || got[many-1] != fmt.Sprintf(`"key/099999"@7.%d tombstone`, 3+many-1) ||
		got[many] != fmt.Sprintf(`"other"@7.%d create 7 version 1 "v"`, 3+many) {
		t.Errorf("%d versions: %s, %s, %s", len(got), got[0], got[many-1], got[len(got)-1])
	}
}

// TestLaggingMember is trap 125: a file says how far its member was, so that the one that is
// behind can be told.
func TestLaggingMember(t *testing.T) {
	for _, index := range []uint64{1000, 70} {
		raw := rawFile{}
		raw.version(putAt("a", keyspace.Revision(index/10), 0))
		raw.put(bucketMeta, []byte(keyIndex), binary.BigEndian.AppendUint64(nil, index))
		raw.put(bucketMeta, []byte(keyTerm), binary.BigEndian.AppendUint64(nil, 4))
		raw.put(bucketMembers, []byte("91bc3c398fb3c146"), []byte(`{"id":10501334649042878790,"peerURLs":["http://a:2380"],"name":"infra1","clientURLs":["http://a:2379"]}`))
		raw.put(bucketCluster, []byte(keyClusterVersion), []byte("3.6.0"))
		i := openRaw(t, raw.write(t, 4096)).Info()
		if i.ConsistentIndex != index || i.Term != 4 || i.Revision != keyspace.Revision(index/10) || i.ClusterVersion != "3.6.0" {
			t.Errorf("%+v", i)
		}
		if len(i.Members) != 1 || i.Members[0].Name != "infra1" || i.Members[0].ID != 0x91bc3c398fb3c146 {
			t.Errorf("members %+v", i.Members)
		}
	}
}

// TestHash: a file without its hash, or with another one, is refused.
func TestHash(t *testing.T) {
	path, _ := write(t, []mvcc.Version{putAt("a", 2, 0)}, Header{Revision: 2}, 0)
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name string
		data []byte
		skip bool
		want string // "" is no error
	}{
		{"whole", whole, false, ""},
		{"no hash", whole[:len(whole)-32], false, "use --skip-hash-check"},
		{"no hash, skipped", whole[:len(whole)-32], true, ""},
		{"hash skipped", whole, true, ""},
		{"flipped", append(append(slices.Clone(whole[:5000]), whole[5000]^1), whole[5001:]...), false, "take the snapshot again"},
		{"cut", whole[:len(whole)-512], false, "take the snapshot again"},
		{"cut, skipped", whole[:len(whole)-32-4096], true, "it is cut"},
		{"empty", nil, true, "no valid meta page"},
		{"other file", make([]byte, 4096), true, "no valid meta page"},
	} {
		p := filepath.Join(t.TempDir(), "db")
		if err := os.WriteFile(p, c.data, 0o600); err != nil {
			t.Fatal(err)
		}
		f, err := Open(t.Context(), p, Options{SkipHashCheck: c.skip})
		if err == nil {
			f.Close()
		}
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	if _, err := Open(t.Context(), t.TempDir(), Options{}); err == nil || !strings.Contains(err.Error(), "member/snap/db") {
		t.Errorf("a directory: %v", err)
	}
}

// TestRunningEtcd: a database in use is not read.
func TestRunningEtcd(t *testing.T) {
	path := rawFile{}.write(t, 4096)
	db, err := bbolt.Open(path, 0o600, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Open(t.Context(), path, Options{SkipHashCheck: true}); err == nil || !strings.Contains(err.Error(), "etcdctl snapshot save") {
		t.Errorf("%v", err)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestTornMeta: of two meta pages one is enough, and the newer one counts.
func TestTornMeta(t *testing.T) {
	for _, pageBytes := range []int{1024, 4096, 16384} {
		raw := rawFile{}
		raw.version(putAt("a", 2, 0))
		path := raw.write(t, pageBytes)
		whole, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for _, torn := range []int{0, 1} {
			data := slices.Clone(whole)
			data[torn*pageBytes+40] ^= 1
			if err := os.WriteFile(path, data, 0o600); err != nil {
				t.Fatal(err)
			}
			f, err := Open(t.Context(), path, Options{SkipHashCheck: true})
			// bbolt's first transaction has id 2 in page 0; page 1 is the empty state before.
			if torn == 1 && (err != nil || len(readAll(t, f, ReadOptions{})) != 1) || torn == 0 && err == nil {
				t.Errorf("pages of %d bytes, page %d torn: %v", pageBytes, torn, err)
			}
			if err == nil {
				f.Close()
			}
		}
	}
}

// TestRefusedHeaders: Create says what is wrong.
func TestRefusedHeaders(t *testing.T) {
	exists := filepath.Join(t.TempDir(), "exists")
	if err := os.WriteFile(exists, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	begun := filepath.Join(t.TempDir(), "begun")
	w, err := Create(begun, Header{Revision: 5})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		path string
		h    Header
		want string
	}{
		{"", Header{Revision: 0}, "revision 0"},
		{"", Header{Revision: 5, Compacted: 6}, "compacted revision 6"},
		{"", Header{Revision: 5, EtcdVersion: "3.4"}, "3.5, 3.6 and 3.7"},
		{"", Header{Revision: 5, DataBytes: 1001, MaxBytes: 1000}, "at most 1000 are allowed"},
		{exists, Header{Revision: 5}, "it exists"},
		{begun, Header{Revision: 5}, "another one writes it"},
		{filepath.Join(t.TempDir(), "no", "directory"), Header{Revision: 5}, "no such file"},
	} {
		if c.path == "" {
			c.path = filepath.Join(t.TempDir(), "db")
		}
		if _, err := Create(c.path, c.h); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: %v", c.h, err)
		}
	}
	if err := w.Abort(); err != nil {
		t.Error(err)
	}
}

// TestRefusedVersions: Add says what is wrong, and Abort leaves nothing.
func TestRefusedVersions(t *testing.T) {
	earlier := putAt("a", 3, 1)
	earlier.Earlier = &mvcc.Version{Key: earlier.Key, Mod: 3, Tombstone: true}
	for _, c := range []struct {
		all  []mvcc.Version
		want string
	}{
		{[]mvcc.Version{putAt("a", 3, 0), putAt("a", 2, 0)}, "sort by revision first"},
		{[]mvcc.Version{earlier}, "sort by revision first"},
		{[]mvcc.Version{putAt("", 2, 0)}, "empty key"},
		{[]mvcc.Version{putAt("a", 11, 0)}, "not one of 1 to 10"},
		{[]mvcc.Version{{Key: []byte("a"), Mod: 2, Create: 2, Version: 1, Value: make([]byte, 2<<20)}}, "at most 100000 are allowed"},
	} {
		dir := t.TempDir()
		w, err := Create(filepath.Join(dir, "db"), Header{Revision: 10, MaxBytes: 100_000})
		if err != nil {
			t.Fatal(err)
		}
		for i := range c.all {
			if err = w.Add(&c.all[i]); err != nil {
				break
			}
		}
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v, want %s", err, c.want)
		}
		if err := w.Abort(); err != nil {
			t.Error(err)
		}
		if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
			t.Errorf("%v, %v are left", left, err)
		}
	}
}

// TestMaxBytes: no file is larger than allowed, and one as large is written.
func TestMaxBytes(t *testing.T) {
	all := []mvcc.Version{}
	for i := range 2000 {
		all = append(all, putAt(fmt.Sprintf("key/%05d", i), keyspace.Revision(i+2), 0))
	}
	_, stats := write(t, all, Header{Revision: 3000, TransactionBytes: 1 << 10}, 0)
	for _, room := range []int64{0, -1} {
		w, err := Create(filepath.Join(t.TempDir(), "db"), Header{Revision: 3000, TransactionBytes: 1 << 10, MaxBytes: stats.Bytes + room})
		if err != nil {
			t.Fatal(err)
		}
		for i := range all {
			if err == nil {
				err = w.Add(&all[i])
			}
		}
		if err == nil {
			_, err = w.Finish(t.Context())
		}
		var large *TooLargeError
		if (err == nil) != (room == 0) || err != nil && !errors.As(err, &large) {
			t.Errorf("room %d: %v", room, err)
		}
		if err := w.Abort(); err != nil {
			t.Error(err)
		}
	}
}

// TestSorterErrors: two writes at one place, and a temporary directory that is not there.
func TestSorterErrors(t *testing.T) {
	for _, order := range []Order{ByKey, ByRevision} {
		s := NewSorter(SorterOptions{Order: order})
		for range 2 {
			v := putAt("a", 2, 1)
			if err := s.Add(&v); err != nil {
				t.Fatal(err)
			}
		}
		_, err := s.Next()
		if !errors.Is(err, ErrCorrupt) {
			t.Errorf("%v", err)
		}
		s.Close()
	}
	s := NewSorter(SorterOptions{Order: ByKey, TempDir: filepath.Join(t.TempDir(), "none"), RunBytes: minRunBytes})
	defer s.Close()
	var err error
	for i := 0; err == nil && i < 1000; i++ {
		v := putAt("a", keyspace.Revision(i+1), 0)
		v.Value = make([]byte, 1<<16)
		err = s.Add(&v)
	}
	if !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%v", err)
	}
}

// TestRottenRun: a temporary file that changes is found.
func TestRottenRun(t *testing.T) {
	s := NewSorter(SorterOptions{Order: ByKey, TempDir: t.TempDir(), RunBytes: minRunBytes})
	defer s.Close()
	for i := range 100 {
		v := putAt(fmt.Sprintf("key/%05d", i), 2, uint32(i))
		v.Value = make([]byte, 1<<16)
		if err := s.Add(&v); err != nil {
			t.Fatal(err)
		}
	}
	if s.TempBytes() == 0 {
		t.Fatal("nothing is in a file")
	}
	if _, err := s.file.f.WriteAt([]byte{1}, 30_000); err != nil {
		t.Fatal(err)
	}
	for {
		if _, err := s.Next(); err != nil {
			if errors.Is(err, io.EOF) || !strings.Contains(err.Error(), "checksum") {
				t.Errorf("%v", err)
			}
			return
		}
	}
}
