package simdisk

import (
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// TestAgainstMemFS does the same things to a Disk and to Pebble's file system in memory,
// and compares all that can be read, also after crashes.
func TestAgainstMemFS(t *testing.T) {
	for seed := range uint64(12) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 1))
			d, m := New(), vfs.NewCrashableMem()
			for step := range 150 {
				name := fmt.Sprintf("a/f%d", rng.IntN(4))
				other := fmt.Sprintf("a/f%d", rng.IntN(4))
				off, size, sync := rng.Int64N(20000), rng.IntN(9000), rng.IntN(2) == 0
				fill := byte(rng.IntN(3)) // zeros, often
				what := rng.IntN(100)
				errs := [2]error{}
				for i, f := range []vfs.FS{d, m} {
					errs[i] = func() error {
						if err := f.MkdirAll("a/b", 0o755); err != nil {
							return err
						}
						switch {
						case what < 60:
							return writeTo(f, name, off, bytes.Repeat([]byte{fill}, size), sync, what < 30)
						case what < 65:
							return f.Remove(name)
						case what < 70 && name != other && seed%2 == 0:
							return f.Rename(name, other)
						// A crash of MemFS makes two files of one that has two names.
						case what < 75 && seed%2 == 0:
							return f.Link(name, other)
						case what < 77:
							return f.RemoveAll(name)
						case what < 90:
							return syncDir(f, "a")
						case what < 95:
							return syncDir(f, "")
						}
						return nil
					}()
				}
				if (errs[0] == nil) != (errs[1] == nil) {
					t.Fatalf("step %d: %v, and of MemFS %v", step, errs[0], errs[1])
				}
				same(t, d, m)
				if what >= 95 {
					keep := 100 * rng.IntN(2) // what happens by chance cannot be compared
					r := rand.New(rand.NewPCG(seed, 2))
					after := m.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: keep, RNG: r})
					same(t, d.Crash(keep, r), after)
					if seed%2 == 1 {
						d, m = d.Crash(keep, r), after
					}
				}
			}
		})
	}
}

func writeTo(f vfs.FS, name string, off int64, p []byte, sync, create bool) error {
	var file vfs.File
	var err error
	if create {
		file, err = f.Create(name, vfs.WriteCategoryUnspecified)
	} else {
		file, err = f.OpenReadWrite(name, vfs.WriteCategoryUnspecified)
	}
	if err != nil {
		return err
	}
	if create {
		_, err = file.Write(bytes.Clone(p)) // MemFS may change it
	} else {
		_, err = file.WriteAt(p, off)
	}
	if err == nil && sync {
		err = file.Sync()
	}
	return firstError(err, file.Close())
}

func syncDir(f vfs.FS, name string) error {
	dir, err := f.OpenDir(name)
	if err != nil {
		return err
	}
	return firstError(dir.Sync(), dir.Close())
}

func firstError(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

func same(t *testing.T, d *Disk, m *vfs.MemFS) {
	t.Helper()
	for i := range 4 {
		name := fmt.Sprintf("a/f%d", i)
		got, err := all(d, name)
		want, wantErr := all(m, name)
		if (err == nil) != (wantErr == nil) || !bytes.Equal(got, want) {
			t.Fatalf("%s: %d bytes, %v; MemFS has %d, %v", name, len(got), err, len(want), wantErr)
		}
	}
}

func all(f vfs.FS, name string) ([]byte, error) {
	file, err := f.Open(name)
	if err != nil {
		return nil, err
	}
	b, err := io.ReadAll(file)
	return b, firstError(err, file.Close())
}

// TestCrashKeepsPages: of what was not synced a crash keeps some pages and loses others, and
// what was synced stays.
func TestCrashKeepsPages(t *testing.T) {
	d := New()
	must(t, writeTo(d, "f", 0, bytes.Repeat([]byte{1}, 100*pageSize), true, true))
	must(t, syncDir(d, ""))
	must(t, writeTo(d, "f", 50*pageSize, bytes.Repeat([]byte{2}, 100*pageSize), false, false))
	after := d.Crash(50, rand.New(rand.NewPCG(1, 1)))
	b, err := all(after, "f")
	must(t, err)
	counts := map[byte]int{}
	for i := 0; i < len(b); i += pageSize {
		if !bytes.Equal(b[i:i+pageSize], bytes.Repeat(b[i:i+1], pageSize)) {
			t.Fatalf("page %d is torn", i/pageSize)
		}
		counts[b[i]]++
	}
	if counts[1] < 60 || counts[2] < 20 || counts[0] < 10 {
		t.Errorf("pages by content: %v", counts)
	}
	// Neither disk sees what the other writes from now on.
	must(t, writeTo(d, "f", 0, bytes.Repeat([]byte{3}, 150*pageSize), true, false))
	if again, err := all(after, "f"); err != nil || !bytes.Equal(b, again) {
		t.Errorf("the clone has changed (%v)", err)
	}
}

func TestLock(t *testing.T) {
	d := New()
	l, err := d.Lock("lock")
	must(t, err)
	if _, err := d.Lock("lock"); err == nil {
		t.Error("locked twice")
	}
	after, err := d.Crash(0, nil).Lock("lock")
	must(t, err)
	must(t, after.Close())
	must(t, l.Close())
	l, err = d.Lock("lock")
	must(t, err)
	must(t, l.Close())
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
