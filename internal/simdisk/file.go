package simdisk

import (
	"errors"
	"io"
	"io/fs"
	"maps"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// file is an open file or directory. One goroutine at a time reads or writes at its
// position; all else may be called beside each other.
type file struct {
	d             *Disk
	n             *node
	name          string
	at            int64
	reads, writes bool
}

var _ vfs.File = (*file)(nil)

var (
	errNotForReading = errors.New("simdisk: the file was not opened for reading")
	errNotForWriting = errors.New("simdisk: the file was not opened for writing")
)

// Close implements vfs.File. The file must not be used again: it panics.
func (f *file) Close() error {
	if f.n == nil {
		panic("simdisk: " + f.name + " is closed twice")
	}
	f.n = nil
	return nil
}

// Read implements vfs.File.
func (f *file) Read(p []byte) (int, error) {
	n, err := f.readAt(p, f.at)
	f.at += int64(n)
	if n > 0 {
		err = nil
	}
	return n, err
}

// ReadAt implements vfs.File.
func (f *file) ReadAt(p []byte, off int64) (int, error) { return f.readAt(p, off) }

func (f *file) readAt(p []byte, off int64) (n int, err error) {
	if !f.reads || f.n.dir {
		return 0, errNotForReading
	}
	filled(p)
	f.n.mu.Lock()
	defer f.n.mu.Unlock()
	if off < f.n.size {
		n = f.n.read(p, off)
	}
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

// Write implements vfs.File.
func (f *file) Write(p []byte) (int, error) {
	n, err := f.WriteAt(p, f.at)
	f.at += int64(n)
	return n, err
}

// WriteAt implements vfs.File. Between the file's end and off there are zeros.
func (f *file) WriteAt(p []byte, off int64) (int, error) {
	if !f.writes || f.n.dir {
		return 0, errNotForWriting
	}
	_ = given(p)
	f.d.still.RLock()
	defer f.d.still.RUnlock()
	f.n.mu.Lock()
	defer f.n.mu.Unlock()
	f.n.fresh = append(f.n.fresh, f.n.write(p, off)...)
	f.n.modified = time.Now()
	return len(p), nil
}

// Sync implements vfs.File.
func (f *file) Sync() error {
	f.d.still.RLock()
	defer f.d.still.RUnlock()
	n := f.n
	if n.dir {
		f.d.mu.Lock()
		defer f.d.mu.Unlock()
		n.kept = maps.Clone(n.children)
		return nil
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.synced.size = n.size
	for len(n.synced.pages) < len(n.pages) {
		n.synced.pages = append(n.synced.pages, nil)
	}
	for _, i := range n.fresh {
		n.synced.pages[i], n.own[i] = n.pages[i], false
	}
	n.fresh = n.fresh[:0]
	return nil
}

// SyncData implements vfs.File.
func (f *file) SyncData() error { return f.Sync() }

// SyncTo implements vfs.File. It promises nothing and does nothing, to find who relies on it.
func (f *file) SyncTo(int64) (fullSync bool, err error) { return false, nil }

// Preallocate implements vfs.File.
func (f *file) Preallocate(int64, int64) error { return nil }

// Prefetch implements vfs.File.
func (f *file) Prefetch(int64, int64) error { return nil }

// Fd implements vfs.File.
func (f *file) Fd() uintptr { return vfs.InvalidFd }

// Stat implements vfs.File.
func (f *file) Stat() (vfs.FileInfo, error) {
	f.n.mu.Lock()
	defer f.n.mu.Unlock()
	return info{f.name, f.n.size, f.n.modified, f.n.dir}, nil
}

type info struct {
	name     string
	size     int64
	modified time.Time
	dir      bool
}

func (i info) Name() string           { return i.name }
func (i info) Size() int64            { return i.size }
func (i info) ModTime() time.Time     { return i.modified }
func (i info) IsDir() bool            { return i.dir }
func (i info) Sys() any               { return nil }
func (i info) DeviceID() vfs.DeviceID { return vfs.DeviceID{} }

func (i info) Mode() fs.FileMode {
	if i.dir {
		return fs.ModeDir | 0o755
	}
	return 0o755
}
