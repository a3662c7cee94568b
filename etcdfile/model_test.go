package etcdfile

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"testing"

	"go.etcd.io/bbolt"
	"go.etcd.io/etcd/api/v3/authpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
)

// history makes writes as transactions make them: by revision and operation, each with its
// earlier write of the same revision.
func history(rng *rand.Rand, revisions, keys, maxValue int) []mvcc.Version {
	type state struct {
		create  keyspace.Revision
		version int64
	}
	alive := map[string]state{}
	var all []mvcc.Version
	for rev := keyspace.Revision(2); rev < keyspace.Revision(revisions+2); rev++ {
		byKey := map[string]*mvcc.Version{}
		for sub := range uint32(1 + rng.IntN(4)) {
			key := fmt.Sprintf("key/%04d", rng.IntN(keys))
			v := mvcc.Version{Key: []byte(key), Mod: rev, Sub: sub, Earlier: byKey[key]}
			s, lives := alive[key]
			switch {
			case lives && rng.IntN(3) == 0:
				v.Tombstone = true
				delete(alive, key)
			case lives && v.Earlier != nil:
				continue // etcd refuses two puts
			default:
				if !lives {
					s = state{create: rev}
				}
				s.version++
				alive[key] = s
				v.Create, v.Version, v.Lease = s.create, s.version, keyspace.LeaseID(rng.IntN(3))
				v.Value = make([]byte, rng.IntN(maxValue))
				for i := range v.Value {
					v.Value[i] = byte(rng.Uint32())
				}
			}
			c := v.Clone()
			byKey[key] = &c
		}
		for _, v := range byKey {
			all = append(all, *v)
		}
	}
	return all
}

// expected is what the compaction rule leaves, by key.
func expected(all []mvcc.Version, compacted keyspace.Revision) []string {
	all = slices.Clone(all)
	slices.SortFunc(all, func(a, b mvcc.Version) int {
		return ByKey.compare(&place{a.Key, a.Mod, a.Sub}, &place{b.Key, b.Mod, b.Sub})
	})
	texts := []string{}
	settled := ""
	for _, v := range all {
		if settled == string(v.Key) {
			continue
		}
		if v.Mod <= compacted {
			settled, v.Earlier = string(v.Key), nil
			if v.Tombstone && v.Mod < compacted {
				continue
			}
		}
		texts = append(texts, text(&v, false))
	}
	return texts
}

// write writes versions, in any order, to a file with a hash.
func write(t testing.TB, all []mvcc.Version, h Header, runBytes int64) (string, Stats) {
	t.Helper()
	s := NewSorter(SorterOptions{Order: ByRevision, TempDir: t.TempDir(), RunBytes: runBytes, Compacted: h.Compacted})
	defer s.Close()
	for i := range all {
		if err := s.Add(&all[i]); err != nil {
			t.Fatal(err)
		}
	}
	path := filepath.Join(t.TempDir(), "written.db")
	w, err := Create(path, h)
	if err != nil {
		t.Fatal(err)
	}
	if err := w.AddAll(t.Context(), s); err != nil {
		t.Fatal(errors.Join(err, w.Abort()))
	}
	stats, err := w.Finish(t.Context())
	if err != nil {
		t.Fatal(errors.Join(err, w.Abort()))
	}
	return path, stats
}

// TestWriteAndRead: what was written in the order of revisions is read by key, with runs in
// memory and in a file, and bbolt finds nothing wrong with the file.
func TestWriteAndRead(t *testing.T) {
	for _, c := range []struct {
		name                      string
		revisions, keys, maxValue int
		compacted                 keyspace.Revision
		transaction               int64
	}{
		{"small", 60, 10, 20, 0, 0},
		{"compacted", 60, 10, 20, 30, 0},
		{"in runs", 3000, 200, 4000, 1000, 1 << 20},
		{"empty", 0, 1, 1, 0, 0},
		{"values in a block of their own", 20, 5, 600_000, 10, 1 << 20},
	} {
		t.Run(c.name, func(t *testing.T) {
			all := history(rand.New(rand.NewPCG(1, uint64(c.revisions))), c.revisions, c.keys, c.maxValue)
			last := keyspace.Revision(c.revisions + 1)
			h := Header{Revision: last + 5, Compacted: c.compacted, EtcdVersion: Etcd37, TransactionBytes: c.transaction}
			if c.revisions == 0 {
				h.Revision = 1
			}
			path, stats := write(t, all, h, minRunBytes)
			if size := fileSize(t, path); size != stats.Bytes || size%hashUnit != 32 {
				t.Errorf("%d bytes, and %d were said", size, stats.Bytes)
			}
			checkByBolt(t, path)
			f, err := Open(t.Context(), path, Options{})
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			if i := f.Info(); i.Revision != h.Revision || i.Compacted != c.compacted || i.ClusterVersion != "3.7.0" || i.StorageVersion != "3.7.0" {
				t.Errorf("info %+v", i)
			}
			for _, run := range []int64{minRunBytes, DefaultRunBytes} {
				if got, want := readAll(t, f, ReadOptions{RunBytes: run}), expected(all, c.compacted); !slices.Equal(got, want) {
					t.Errorf("runs of %d bytes: %d versions, want %d", run, len(got), len(want))
					for i := range min(len(got), len(want)) {
						if got[i] != want[i] {
							t.Fatalf("version %d: %s\nwant %s", i, got[i], want[i])
						}
					}
				}
			}
			if got, want := readAll(t, f, ReadOptions{Latest: true}), expected(all, h.Revision); !slices.Equal(got, want) {
				t.Errorf("latest: %d versions, want %d", len(got), len(want))
			}
		})
	}
}

// checkByBolt has bbolt check all pages.
func checkByBolt(t testing.TB, path string) {
	t.Helper()
	db, err := bbolt.Open(path, 0o400, &bbolt.Options{ReadOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	if err := db.View(func(tx *bbolt.Tx) error {
		for err := range tx.Check() {
			t.Errorf("bbolt: %v", err)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}

// TestWriteAgain: a file that was read and is written again has the same records.
func TestWriteAgain(t *testing.T) {
	all := history(rand.New(rand.NewPCG(2, 2)), 500, 50, 300)
	h := Header{Revision: 501, Compacted: 200, EtcdVersion: Etcd36}
	h.Leases = []Lease{{ID: -5, TTLSeconds: 10}, {ID: 1, TTLSeconds: 60, RemainingSeconds: 30}}
	h.Auth = Auth{
		Enabled: true, Revision: 7,
		Users: []*authpb.User{{Name: []byte("root"), Password: []byte("hash"), Roles: []string{"root"}, Options: &authpb.UserAddOptions{NoPassword: true}}},
		Roles: []*authpb.Role{{Name: []byte("r"), KeyPermission: []*authpb.Permission{{PermType: authpb.READWRITE, Key: []byte("k"), RangeEnd: []byte{0}}}}, {Name: []byte("root")}},
	}
	path, _ := write(t, all, h, 0)
	first := records(t, path)
	f, err := Open(t.Context(), path, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	vs, err := f.Versions(t.Context(), ReadOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer vs.Close()
	var read []mvcc.Version
	for v, err := vs.Next(); ; v, err = vs.Next() {
		if errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		read = append(read, v.Clone())
	}
	i := f.Info()
	rs, err := i.Auth.Rights()
	if err != nil {
		t.Fatal(err)
	}
	again, _ := write(t, read, Header{Revision: i.Revision, Compacted: vs.Compacted(), EtcdVersion: Etcd36, Leases: i.Leases, Auth: AuthOf(rs)}, 0)
	second := records(t, again)
	// The first one has what a compaction removes.
	kept := map[string]bool{}
	for _, v := range read {
		for w := &v; w != nil; w = w.Earlier {
			kept[bucketKey+string(encodeRevision(w.Mod, w.Sub, w.Tombstone))] = true
		}
	}
	for k := range first {
		if len(k) > 10 && k[:3] == bucketKey && !kept[k] {
			delete(first, k)
		}
	}
	if len(first) != len(second) {
		t.Errorf("%d records, and %d in the second file", len(first), len(second))
	}
	for k, v := range first {
		if second[k] != v {
			t.Errorf("%q: %q, and %q in the second file", k, v, second[k])
		}
	}
}

// records returns all records by bucket and key.
func records(t *testing.T, path string) map[string]string {
	t.Helper()
	db, err := bbolt.Open(path, 0o400, &bbolt.Options{ReadOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	all := map[string]string{}
	if err := db.View(func(tx *bbolt.Tx) error {
		return tx.ForEach(func(name []byte, b *bbolt.Bucket) error {
			return b.ForEach(func(k, v []byte) error {
				all[string(name)+string(k)] = string(v)
				if string(name) == bucketUsers { // an empty message and none are one
					var u authpb.User
					if err := proto.Unmarshal(v, &u); err != nil {
						return err
					}
					all[string(name)+string(k)] = u.String()
				}
				return nil
			})
		})
	}); err != nil {
		t.Fatal(err)
	}
	return all
}
