package engine

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2/record"
	"github.com/cockroachdb/pebble/v2/vfs"
)

// Pebble finds its tables by some files of its own. If a byte of one is flipped, the store does not open,
// or it has everything that was durable.
func TestRotInPebblesOwnFiles(t *testing.T) {
	const keys = 40
	key := func(i int) []byte { return AppendVersionedKey(nil, fmt.Appendf(nil, "k%04d", i), 7) }
	value := func(i int) []byte { return fmt.Appendf(nil, "v%d", i) }
	for _, file := range []string{"MANIFEST", "marker.manifest", "marker.format-version", "OPTIONS"} {
		t.Run(file, func(t *testing.T) {
			mem := vfs.NewMem()
			e := openAt(t, mem)
			for i := range keys {
				commit(t, e, func(b *Batch) error { return b.Set(key(i), value(i)) })
				if i%10 == 9 {
					commit(t, e, func(b *Batch) error { return b.SetApplied(1, Applied{Index: uint64(i), Term: 1}) })
					if err := e.Flush(t.Context()); err != nil {
						t.Fatal(err)
					}
				}
			}
			if err := e.Close(); err != nil {
				t.Fatal(err)
			}
			names, err := mem.List("db")
			if err != nil {
				t.Fatal(err)
			}
			refused, opened, torn, files := 0, 0, 0, 0
			for _, name := range names {
				if !strings.HasPrefix(name, file) {
					continue
				}
				files++
				whole := readAll(t, mem, "db/"+name)
				for off := range whole {
					if len(whole) > 400 && off%(len(whole)/200) != 0 {
						continue
					}
					rotten := bytes.Clone(whole)
					rotten[off] ^= 1 << (off % 8)
					copied := vfs.NewMem()
					if _, err := vfs.Clone(mem, copied, "db", "db"); err != nil {
						t.Fatal(err)
					}
					if err := vfsWrite(copied, "db/"+name, rotten); err != nil {
						t.Fatal(err)
					}
					if err := openedWhole(copied, keys, key, value); err == nil {
						opened++
					} else if strings.HasPrefix(err.Error(), "lost: ") && off >= lastChunk(whole) {
						torn++ // as a crash may leave it: the log and the applied records do not fit then
					} else if strings.HasPrefix(err.Error(), "lost: ") {
						t.Errorf("byte %d of %s: %v", off, name, err)
					} else {
						refused++
					}
				}
			}
			t.Logf("%d files: %d refused, %d opened whole, %d are torn ends", files, refused, opened, torn)
			if files == 0 {
				t.Error("there is no such file")
			}
		})
	}
}

// A crash may keep the last chunk of the last record and not its first one, for they lie in pages of
// their own. That is a torn end.
func TestLargeRecordsTearInTheMiddle(t *testing.T) {
	var b bytes.Buffer
	w := record.NewWriter(&b)
	write := func(size int) {
		t.Helper()
		if _, err := w.WriteRecord(bytes.Repeat([]byte{7}, size)); err != nil {
			t.Fatal(err)
		}
	}
	check := func() error {
		t.Helper()
		if err := w.Flush(); err != nil {
			t.Fatal(err)
		}
		whole := bytes.Clone(b.Bytes())
		clear(whole[200:300])
		mem := vfs.NewMem()
		if err := errors.Join(mem.MkdirAll("db", 0o755), vfsWrite(mem, "db/MANIFEST-000001", whole), vfsWrite(mem, "db/marker.manifest.000001.MANIFEST-000001", nil)); err != nil {
			t.Fatal(err)
		}
		return checkManifest(mem, "db")
	}
	write(100)
	write(3 * manifestBlock)
	if err := check(); err != nil {
		t.Errorf("a torn end: %v", err)
	}
	write(1)
	if err := check(); err == nil || !strings.Contains(err.Error(), "is damaged at offset 107") || !IsCorruption(err) {
		t.Errorf("another record follows: %v", err)
	}
}

// lastChunk returns where the last chunk of a manifest begins.
func lastChunk(whole []byte) (last int) {
	for at := range whole {
		if n := manifestChunk(whole, at); n > 0 && at+n == len(whole) {
			last = at
		}
	}
	return last
}

// openedWhole opens the store. An error that begins with "lost: " says that it has opened and lacks
// something.
func openedWhole(fs vfs.FS, keys int, key, value func(int) []byte) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v", p)
		}
	}()
	e, err := Open(testOptions(fs))
	if err != nil {
		return err
	}
	defer func() { _ = e.Abort() }()
	a, ok, err := e.Applied(1)
	if err != nil {
		return err
	}
	if !ok || a.Index != uint64(keys-1) {
		return fmt.Errorf("lost: applied record %+v %t", a, ok)
	}
	for i := range keys {
		v, ok, err := e.Get(key(i))
		if err != nil {
			return err
		}
		if !ok || !bytes.Equal(v, value(i)) {
			return fmt.Errorf("lost: key %d is %q %t", i, v, ok)
		}
	}
	return nil
}
