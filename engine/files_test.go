package engine

import (
	"errors"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/skeindb/skein/internal/simdisk"
)

// fewFiles is a file system of a process that may have so many files open.
type fewFiles struct {
	vfs.FS
	open, limit atomic.Int64
	refused     atomic.Int64
}

func newFewFiles(fs vfs.FS) *fewFiles {
	f := &fewFiles{FS: fs}
	f.limit.Store(1 << 30)
	return f
}

func (f *fewFiles) take(open func() (vfs.File, error)) (vfs.File, error) {
	if f.open.Add(1) > f.limit.Load() {
		f.open.Add(-1)
		f.refused.Add(1)
		return nil, &fsError{syscall.EMFILE}
	}
	file, err := open()
	if err != nil {
		f.open.Add(-1)
		return nil, err
	}
	return &counted{File: file, open: &f.open}, nil
}

type fsError struct{ err error }

func (e *fsError) Error() string { return "open: " + e.err.Error() }
func (e *fsError) Unwrap() error { return e.err }

type counted struct {
	vfs.File
	open *atomic.Int64
	once sync.Once
}

func (c *counted) Close() error {
	c.once.Do(func() { c.open.Add(-1) })
	return c.File.Close()
}

func (f *fewFiles) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	return f.take(func() (vfs.File, error) { return f.FS.Create(name, c) })
}

func (f *fewFiles) Open(name string, opts ...vfs.OpenOption) (vfs.File, error) {
	return f.take(func() (vfs.File, error) { return f.FS.Open(name, opts...) })
}

func (f *fewFiles) OpenReadWrite(name string, c vfs.DiskWriteCategory, opts ...vfs.OpenOption) (vfs.File, error) {
	return f.take(func() (vfs.File, error) { return f.FS.OpenReadWrite(name, c, opts...) })
}

func (f *fewFiles) OpenDir(name string) (vfs.File, error) {
	return f.take(func() (vfs.File, error) { return f.FS.OpenDir(name) })
}

func (f *fewFiles) ReuseForWrite(from, to string, c vfs.DiskWriteCategory) (vfs.File, error) {
	return f.take(func() (vfs.File, error) { return f.FS.ReuseForWrite(from, to, c) })
}

// TestNoFilesLeft: a process that may open no more files is one with a full disk. Writes are
// refused, reads and commits go on, a flush waits, nothing fails, and it mends itself. What Pebble
// needs, and gives up without, gets the files of the reserve.
func TestNoFilesLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fs := newFewFiles(simdisk.New())
		e := openVirtual(t, fs, -1)
		put(t, e, "k", 2, "v")
		if err := e.Flush(t.Context()); err != nil {
			t.Fatal(err)
		}
		expectSpace(t, e, SpaceOK)
		fs.limit.Store(fs.open.Load()) // somebody else has taken all the others
		put(t, e, "l", 3, "v")
		begin := time.Now()
		done := make(chan error, 1)
		go func() { done <- e.Flush(t.Context()) }()
		time.Sleep(30 * time.Second)
		expectSpace(t, e, SpaceFull)
		if n := fs.refused.Load(); n > 200 {
			t.Errorf("%d attempts in 30 s", n)
		}
		// The first table was not read yet.
		if _, ok, err := e.Get(AppendVersionedKey(nil, []byte("k"), 2)); !ok || err != nil {
			t.Errorf("read of a table that is not open: %t, %v", ok, err)
		}
		gate := e.space.wrap(fs)
		var held []vfs.File
		for range reserveFiles - 1 { // as a new manifest is
			f, err := gate.Create("db/x", vfs.WriteCategoryUnspecified)
			if err != nil {
				t.Fatal(err)
			}
			held = append(held, f)
		}
		waits := make(chan error, 1)
		go func() {
			f, err := gate.Create("db/y", vfs.WriteCategoryUnspecified)
			if err == nil {
				err = f.Close()
			}
			waits <- err
		}()
		time.Sleep(30 * time.Second)
		select {
		case err := <-waits:
			t.Fatalf("beyond the reserve: %v", err)
		default:
		}
		expectSpace(t, e, SpaceFull)
		for _, f := range held {
			if err := f.Close(); err != nil {
				t.Error(err)
			}
		}
		fs.limit.Add(reserveFiles)
		if err := <-waits; err != nil {
			t.Error(err)
		}
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		if d := time.Since(begin); d < 60*time.Second || d > 64*time.Second {
			t.Errorf("the flush ended after %v", d)
		}
		fs.limit.Store(1 << 30)
		time.Sleep(3 * time.Second)
		expectSpace(t, e, SpaceOK)
		if err := e.Err(); err != nil {
			t.Fatal(err)
		}
		if err := e.Close(); err != nil {
			t.Fatal(err)
		}
		if n := fs.open.Load(); n != 0 {
			t.Errorf("%d files are open after Close", n)
		}
	})
}

// TestNoFilesForTheReserve: without files for its reserve the store refuses writes before one fails.
func TestNoFilesForTheReserve(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fs := newFewFiles(simdisk.New())
		e := openVirtual(t, fs, -1)
		expectSpace(t, e, SpaceOK)
		fs.limit.Store(fs.open.Load())
		f, err := e.space.wrap(fs).OpenDir("db")
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Second)
		expectSpace(t, e, SpaceFull)
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(3 * time.Second)
		expectSpace(t, e, SpaceOK)
		if err := e.Close(); err != nil {
			t.Fatal(err)
		}
	})
}

// TestCloseWithoutFiles ends what waits for a file.
func TestCloseWithoutFiles(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fs := newFewFiles(simdisk.New())
		e := openVirtual(t, fs, -1)
		put(t, e, "k", 2, "v")
		if err := e.Flush(t.Context()); err != nil {
			t.Fatal(err)
		}
		fs.limit.Store(0)
		read := make(chan error, 1)
		go func() {
			_, _, err := e.Get(AppendVersionedKey(nil, []byte("k"), 2))
			read <- err
		}()
		time.Sleep(10 * time.Second)
		e.stop()
		if err := <-read; err == nil {
			t.Error("a read without a file succeeded")
		}
		if err := e.Abort(); err != nil {
			t.Error(err)
		}
	})
}

// TestOpenWithoutFiles: a store that cannot be opened says so, and does not wait.
func TestOpenWithoutFiles(t *testing.T) {
	for limit := range int64(3) {
		fs := newFewFiles(simdisk.New())
		fs.limit.Store(limit)
		if _, err := Open(testOptions(fs)); !errors.Is(err, syscall.EMFILE) {
			t.Errorf("with %d files: %v", limit, err)
		}
	}
}
