package etcdfile

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"

	"go.etcd.io/bbolt"
	"go.uber.org/goleak"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// rawFile is a database written record by record: bucket, key, value.
type rawFile map[string]map[string]string

func (r rawFile) put(bucket string, key, value []byte) {
	if r[bucket] == nil {
		r[bucket] = map[string]string{}
	}
	r[bucket][string(key)] = string(value)
}

// version puts a version as etcd would.
func (r rawFile) version(v mvcc.Version) {
	r.put(bucketKey, encodeRevision(v.Mod, v.Sub, v.Tombstone), appendKeyValue(nil, &v))
}

// compaction notes a compaction as etcd does, 0 for none.
func (r rawFile) compaction(scheduled, finished keyspace.Revision) {
	if scheduled > 0 {
		r.put(bucketMeta, []byte(keyScheduled), encodeRevision(scheduled, 0, false))
	}
	if finished > 0 {
		r.put(bucketMeta, []byte(keyFinished), encodeRevision(finished, 0, false))
	}
}

// write writes the file by bbolt, without a hash.
func (r rawFile) write(t testing.TB, pageBytes int) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "raw.db")
	db, err := bbolt.Open(path, 0o600, &bbolt.Options{PageSize: pageBytes, NoSync: true, NoFreelistSync: true})
	if err != nil {
		t.Fatal(err)
	}
	err = db.Update(func(tx *bbolt.Tx) error {
		for bucket, records := range r {
			b, err := tx.CreateBucket([]byte(bucket))
			if err != nil {
				return err
			}
			for k, v := range records {
				if err := b.Put([]byte(k), []byte(v)); err != nil {
					return err
				}
			}
		}
		return nil
	})
	if err := errors.Join(err, db.Close()); err != nil {
		t.Fatal(err)
	}
	return path
}

// openRaw opens a file. A hash need not be there.
func openRaw(t testing.TB, path string) *File {
	t.Helper()
	f, err := Open(t.Context(), path, Options{SkipHashCheck: fileSize(t, path)%hashUnit == 0})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

// text shows a version, its earlier writes, and what it attaches.
func text(v *mvcc.Version, attached bool) string {
	s := fmt.Sprintf("%q@%d.%d", v.Key, v.Mod, v.Sub)
	if v.Tombstone {
		s += " tombstone"
	} else {
		s += fmt.Sprintf(" create %d version %d", v.Create, v.Version)
		if v.Lease != 0 {
			s += fmt.Sprintf(" lease %x", int64(v.Lease))
		}
		s += fmt.Sprintf(" %.20q", v.Value)
	}
	if attached {
		s += " attached"
	}
	if v.Earlier != nil {
		s += " after (" + text(v.Earlier, false) + ")"
	}
	return s
}

// readAll returns the versions of a file as texts.
func readAll(t testing.TB, f *File, o ReadOptions) []string {
	t.Helper()
	o.TempDir = t.TempDir()
	vs, err := f.Versions(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	defer vs.Close()
	all := []string{}
	for {
		v, err := vs.Next()
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, text(v, vs.Attached()))
	}
}

func fileSize(t testing.TB, path string) int64 {
	t.Helper()
	s, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	return s.Size()
}
