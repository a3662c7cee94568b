package etcdfile

import (
	"bytes"
	"compress/gzip"
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
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/internal/golden"
	"github.com/skeindb/skein/internal/measure"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
)

// TestFormats: the records are etcd's, byte for byte.
func TestFormats(t *testing.T) {
	put := mvcc.Version{Key: []byte("k"), Mod: 300, Sub: 2, Create: 5, Version: 9, Lease: -8, Value: []byte("value")}
	empty := mvcc.Version{Key: []byte("k"), Mod: 2, Create: 2, Version: 1}
	tombstone := mvcc.Version{Key: []byte("k"), Mod: 301, Tombstone: true}
	formats := map[string][]byte{}
	for name, v := range map[string]*mvcc.Version{"put": &put, "empty": &empty, "tombstone": &tombstone} {
		formats[name+"-key"] = encodeRevision(v.Mod, v.Sub, v.Tombstone)
		formats[name+"-value"] = appendKeyValue(nil, v)
		kv := &mvccpb.KeyValue{Key: v.Key}
		if !v.Tombstone {
			kv = &mvccpb.KeyValue{Key: v.Key, CreateRevision: int64(v.Create), ModRevision: int64(v.Mod), Version: v.Version, Value: v.Value, Lease: int64(v.Lease)}
		}
		want, err := proto.MarshalOptions{Deterministic: true}.Marshal(kv)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(formats[name+"-value"], want) {
			t.Errorf("%s: %x, and etcd writes %x", name, formats[name+"-value"], want)
		}
	}
	golden.Formats(t, formats)
}

// sample returns a snapshot that an etcd wrote (conformance/etcdfiles, TestSamples).
func sample(t testing.TB, version EtcdVersion) []byte {
	t.Helper()
	f, err := os.Open(filepath.Join("testdata", "etcd-"+string(version)+".db.gz"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	r, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// TestSamples reads what etcd 3.5, 3.6 and 3.7 wrote for the same requests.
func TestSamples(t *testing.T) {
	for _, version := range []EtcdVersion{Etcd35, Etcd36, Etcd37} {
		path := filepath.Join(t.TempDir(), "db")
		if err := os.WriteFile(path, sample(t, version), 0o400); err != nil {
			t.Fatal(err)
		}
		f := openRaw(t, path)
		i := f.Info()
		if i.Revision != 9 || i.Compacted != 3 || i.ClusterVersion != string(version)+".0" || i.Term != 2 || i.ConsistentIndex < 20 ||
			len(i.Members) != 1 || i.Members[0].Name != "m" || !slices.Equal(i.Leases, []Lease{{-8, 1000, 0}, {7, 1000, 0}}) || len(i.Alarms) != 0 {
			t.Errorf("etcd %s: %+v", version, i)
		}
		want := []string{
			`"a"@9.0 tombstone`,
			`"a"@3.0 create 2 version 2 lease 7 "2"`,
			`"b"@9.1 tombstone`,
			`"b"@6.0 create 6 version 1 lease -8 "new"`,
			`"b"@5.0 tombstone`,
			`"b"@4.0 create 4 version 1 lease -8 "old"`,
			`"c"@7.2 tombstone after ("c"@7.0 create 7 version 1 "for a moment")`,
			`"d"@7.1 create 7 version 1 ""`,
			`"\xff\x00"@8.0 create 8 version 1 lease 7 "\x00" attached`,
		}
		if got := readAll(t, f, ReadOptions{}); !slices.Equal(got, want) {
			t.Errorf("etcd %s:\n%s", version, strings.Join(got, "\n"))
		}
		state, err := i.Auth.Rights()
		if err != nil {
			t.Fatal(err)
		}
		const accounts = `enabled true, revision 9, enabled since 0, access 0
user "cn" since 0: roles ["some"], no password
user "root" since 0: roles ["root"]
role "root":
role "some": read "a" to "\x00" write "b"
`
		if state.String() != accounts || !strings.HasPrefix(string(state.User("root").Hash), "$2a$") {
			t.Errorf("etcd %s: %s, root's hash %q", version, state, state.User("root").Hash)
		}
	}
}

// TestSamePages: the walk brings what bbolt brings, for pages of all sizes, branches of two
// levels, values over many pages, and files with free pages.
func TestSamePages(t *testing.T) {
	for _, pageBytes := range []int{1024, 4096, 65536} {
		path := filepath.Join(t.TempDir(), "db")
		db, err := bbolt.Open(path, 0o600, &bbolt.Options{PageSize: pageBytes, NoSync: true})
		if err != nil {
			t.Fatal(err)
		}
		for round := range 4 {
			err = errors.Join(err, db.Update(func(tx *bbolt.Tx) error {
				b, err := tx.CreateBucketIfNotExists([]byte("b"))
				for i := range 5000 {
					key := fmt.Appendf(nil, "%05d%050d", i*7_919%5000, 0)
					size := i * round % 70
					if i == 100 {
						size = 300_000
					}
					if i%4 == round {
						err = errors.Join(err, b.Delete(key))
					} else {
						err = errors.Join(err, b.Put(key, bytes.Repeat([]byte{'v'}, size)))
					}
				}
				return err
			}))
		}
		var want []string
		err = errors.Join(err, db.View(func(tx *bbolt.Tx) error {
			return tx.Bucket([]byte("b")).ForEach(func(k, v []byte) error {
				want = append(want, fmt.Sprintf("%s=%s", k, v))
				return nil
			})
		}), db.Close())
		if err != nil {
			t.Fatal(err)
		}
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		p, err := openPages(bytes.NewReader(data), int64(len(data)))
		if err != nil {
			t.Fatal(err)
		}
		b, ok, err := p.bucket("b")
		if err != nil || !ok {
			t.Fatal(ok, err)
		}
		var got []string
		if err := p.walk(b, func(e element) error {
			got = append(got, fmt.Sprintf("%s=%s", e.key, e.value))
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		last, err := p.last(b)
		if !slices.Equal(got, want) || err != nil || !strings.HasPrefix(want[len(want)-1], string(last)) {
			t.Errorf("pages of %d bytes: %d elements to %q, %v, want %d", pageBytes, len(got), last, err, len(want))
		}
	}
}

// FuzzRecord: what etcd's decoder accepts is read as it reads it, and written again as etcd
// writes it.
func FuzzRecord(f *testing.F) {
	f.Add(encodeRevision(300, 2, false), appendKeyValue(nil, &mvcc.Version{Key: []byte("k"), Mod: 300, Create: 5, Version: 9, Lease: -8, Value: []byte("value")}))
	f.Add(encodeRevision(300, 2, true), appendKeyValue(nil, &mvcc.Version{Key: []byte("k"), Tombstone: true}))
	f.Add(encodeRevision(300, 0, false), []byte{})
	f.Add([]byte("12345678_12345678x"), []byte{0x0a, 0xff})
	f.Fuzz(func(t *testing.T, key, value []byte) {
		var v mvcc.Version
		var err error
		measure.Claims(t, append(slices.Clone(key), value...), func() { err = decodeRecord(&v, key, value) })
		var kv mvccpb.KeyValue
		wantErr := proto.Unmarshal(value, &kv)
		if err != nil {
			if !errors.Is(err, ErrCorrupt) {
				t.Fatalf("%v", err)
			}
			return
		}
		if wantErr != nil {
			t.Fatalf("etcd says %v, and %s is read", wantErr, text(&v, false))
		}
		if !bytes.Equal(v.Key, kv.Key) {
			t.Fatalf("key %q, etcd reads %q", v.Key, kv.Key)
		}
		if !v.Tombstone && len(v.Key) > 0 && (!bytes.Equal(v.Value, kv.Value) || int64(v.Mod) != kv.ModRevision || int64(v.Create) != kv.CreateRevision ||
			v.Version != kv.Version || int64(v.Lease) != kv.Lease) {
			t.Fatalf("%s, etcd reads %v", text(&v, false), &kv)
		}
		if again := encodeRevision(v.Mod, v.Sub, v.Tombstone); !bytes.Equal(again, key) {
			t.Fatalf("revision %x is written as %x", key, again)
		}
		var second mvcc.Version
		if err := decodeRecord(&second, key, appendKeyValue(nil, &v)); err != nil || text(&second, false) != text(&v, false) {
			t.Fatalf("%s is read again as %s, %v", text(&v, false), text(&second, false), err)
		}
	})
}

// rot changes bytes of a file, as the fuzzer says: pairs of a place and a byte. The checksums
// of meta pages are made right, since hardly any change would get behind them.
func rot(file, changes []byte) []byte {
	data := slices.Clone(file)
	for ; len(changes) >= 4; changes = changes[4:] {
		data[int(binary.LittleEndian.Uint32(changes)&0xffffff)%len(data)] = changes[3]
	}
	for _, at := range []int{0, 4096} {
		if b := data[at+pageHeaderBytes:]; len(b) >= metaBytes {
			binary.LittleEndian.PutUint64(b[56:], metaChecksum(b))
		}
	}
	return data
}

// FuzzFile: whatever a file's bytes are, it is read or refused; nothing panics, runs for ever
// or takes more memory than the file has.
func FuzzFile(f *testing.F) {
	whole := sample(f, Etcd37)
	f.Add([]byte{})
	for page := range len(whole) / 4096 {
		for _, at := range []int{0, 8, 10, 12, 16, 20, 24, 28, 32, 40, 48} {
			f.Add(append(binary.LittleEndian.AppendUint32(nil, uint32(page*4096+at))[:3], 3))
		}
	}
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, changes []byte) {
		data := rot(whole[:len(whole)-32], changes)
		path := filepath.Join(dir, "db")
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		file, err := Open(t.Context(), path, Options{SkipHashCheck: true})
		if err != nil {
			if !errors.Is(err, ErrCorrupt) {
				t.Fatalf("%v", err)
			}
			return
		}
		defer file.Close()
		if _, err := file.Info().Auth.Rights(); err != nil && strings.Contains(err.Error(), "counted") {
			t.Fatal(err)
		}
		vs, err := file.Versions(t.Context(), ReadOptions{MaxVersionBytes: 1 << 20, RunBytes: minRunBytes})
		for last := keyspace.Revision(0); err == nil; {
			var v *mvcc.Version
			if v, err = vs.Next(); err == nil {
				last = v.Mod
				if last < 1 || last > file.Info().Revision {
					t.Fatalf("revision %d of %d", last, file.Info().Revision)
				}
				_ = v.AppendValue(nil) // panics on a version that violates mvcc's model
			}
		}
		if vs != nil {
			vs.Close()
		}
		var large *TooLargeVersionsError
		if !errors.Is(err, io.EOF) && !errors.Is(err, ErrCorrupt) && !errors.As(err, &large) {
			t.Fatalf("%v", err)
		}
	})
}
