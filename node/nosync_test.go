package node

import (
	"path/filepath"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// syncs counts what reaches the disk.
type syncs struct {
	vfs.FS
	n *int
}

type syncsFile struct {
	vfs.File
	n *int
}

func (f syncsFile) Sync() error                  { *f.n++; return f.File.Sync() }
func (f syncsFile) SyncData() error              { *f.n++; return f.File.SyncData() }
func (f syncsFile) SyncTo(n int64) (bool, error) { *f.n++; return f.File.SyncTo(n) }
func (s syncs) OpenDir(name string) (vfs.File, error) {
	f, err := s.FS.OpenDir(name)
	return syncsFile{f, s.n}, err
}

func (s syncs) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	f, err := s.FS.Create(name, c)
	return syncsFile{f, s.n}, err
}

func (s syncs) OpenReadWrite(name string, c vfs.DiskWriteCategory, o ...vfs.OpenOption) (vfs.File, error) {
	f, err := s.FS.OpenReadWrite(name, c, o...)
	return syncsFile{f, s.n}, err
}

func (s syncs) ReuseForWrite(from, to string, c vfs.DiskWriteCategory) (vfs.File, error) {
	f, err := s.FS.ReuseForWrite(from, to, c)
	return syncsFile{f, s.n}, err
}

// With --unsafe-no-fsync no file of any kind reaches the disk by a sync, and all else is as ever.
func TestNoFsync(t *testing.T) {
	for _, unsafe := range []bool{false, true} {
		n, dir := 0, t.TempDir()
		fs := vfs.FS(syncs{vfs.Default, &n})
		if unsafe {
			fs = noSync{fs}
		}
		open := map[string]func(string) (vfs.File, error){
			"create": func(name string) (vfs.File, error) { return fs.Create(name, vfs.WriteCategoryUnspecified) },
			"write":  func(name string) (vfs.File, error) { return fs.OpenReadWrite(name, vfs.WriteCategoryUnspecified) },
			"reuse": func(name string) (vfs.File, error) {
				return fs.ReuseForWrite(filepath.Join(dir, "create"), name, vfs.WriteCategoryUnspecified)
			},
		}
		for _, kind := range []string{"create", "write", "reuse"} {
			f, err := open[kind](filepath.Join(dir, kind))
			if err != nil {
				t.Fatal(kind, err)
			}
			if _, err := f.Write([]byte("x")); err != nil {
				t.Fatal(err)
			}
			_, serr := f.SyncTo(1)
			for _, err := range []error{serr, f.SyncData(), f.Sync(), f.Close()} {
				if err != nil {
					t.Error(kind, err)
				}
			}
		}
		d, err := fs.OpenDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		if err := d.Sync(); err != nil {
			t.Error(err)
		}
		_ = d.Close()
		if _, err := fs.OpenDir(filepath.Join(dir, "nothing")); err == nil {
			t.Error("a directory that is not there is opened")
		}
		if want := map[bool]int{false: 10, true: 0}[unsafe]; n != want {
			t.Errorf("unsafe %t: %d syncs, not %d", unsafe, n, want)
		}
	}
}
