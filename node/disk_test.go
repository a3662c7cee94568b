package node

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/skeindb/skein/internal/simdisk"
)

// memDisk is a memory disk of a fixed size: it forgets in a crash what was not synced,
// can be filled by somebody else, and can hang. A sync takes no time. Pebble may hold a
// mutex during one, as it does in Open, and a goroutine that waits for a mutex is not
// durably blocked: the time of the bubble would stop.
type memDisk struct {
	vfs.FS
	mem *simdisk.Disk
	// hang holds all syncs while it is set, until its channel is closed.
	hang atomic.Pointer[chan struct{}]

	mu sync.Mutex
	// Guarded by mu. used is what the node's files take, foreign what others' do;
	// open files of removed names still count, as they do on a real disk. reserved is
	// room that neither takes, nor may take.
	files                   map[string]*memInode
	used, foreign, reserved int64
}

// memInode is the size of a file under all its names.
type memInode struct {
	size  int64
	links int
}

const diskBytes = 1 << 30

func newMemDisk(mem *simdisk.Disk) *memDisk {
	d := &memDisk{FS: mem, mem: mem, files: map[string]*memInode{}}
	d.adopt("")
	return d
}

// adopt counts the files that are there already.
func (d *memDisk) adopt(dir string) {
	names, _ := d.mem.List(dir)
	for _, n := range names {
		path := d.mem.PathJoin(dir, n)
		st, err := d.mem.Stat(path)
		switch {
		case err != nil:
		case st.IsDir():
			d.adopt(path)
		default:
			d.files[path] = &memInode{size: st.Size(), links: 1}
			d.used += st.Size()
		}
	}
}

// crash returns the disk after a power cut. It keeps the given percentage of the blocks
// that were not synced.
func (d *memDisk) crash(keepPercent int, rng *rand.Rand) *memDisk {
	return newMemDisk(d.mem.Crash(keepPercent, rng))
}

// fill takes all the room that is left, but for so many bytes.
func (d *memDisk) fill(but int64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.foreign = diskBytes - d.used - but
}

// free gives back what fill took.
func (d *memDisk) free() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.foreign = 0
}

// reserve keeps so many bytes of the room that is left from everybody.
func (d *memDisk) reserve(bytes int64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.reserved = bytes
}

// stall holds all syncs until the returned function is called.
func (d *memDisk) stall() (release func()) {
	ch := make(chan struct{})
	d.hang.Store(&ch)
	return sync.OnceFunc(func() {
		d.hang.Store(nil)
		close(ch)
	})
}

func (d *memDisk) beforeSync() {
	if ch := d.hang.Load(); ch != nil {
		<-*ch
	}
}

// grow gives a file the room for size bytes.
func (d *memDisk) grow(i *memInode, size int64) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if size <= i.size {
		return nil
	}
	if d.used+d.foreign+size-i.size > diskBytes {
		return fmt.Errorf("memory disk: %w", syscall.ENOSPC)
	}
	d.used += size - i.size
	i.size = size
	return nil
}

// inode returns the file of a name, made anew where fresh is set or it has none.
func (d *memDisk) inode(name string, fresh bool) *memInode {
	d.mu.Lock()
	defer d.mu.Unlock()
	if i := d.files[name]; i != nil && !fresh {
		return i
	}
	d.unlinkLocked(name)
	i := &memInode{links: 1}
	d.files[name] = i
	return i
}

func (d *memDisk) unlinkLocked(name string) {
	if i := d.files[name]; i != nil {
		delete(d.files, name)
		if i.links--; i.links == 0 {
			d.used -= i.size
		}
	}
}

// Create implements vfs.FS.
func (d *memDisk) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	f, err := d.FS.Create(name, c)
	if err != nil {
		return nil, err
	}
	return &memFile{File: f, d: d, inode: d.inode(name, true)}, nil
}

// OpenReadWrite implements vfs.FS.
func (d *memDisk) OpenReadWrite(name string, c vfs.DiskWriteCategory, opts ...vfs.OpenOption) (vfs.File, error) {
	f, err := d.FS.OpenReadWrite(name, c, opts...)
	if err != nil {
		return nil, err
	}
	return &memFile{File: f, d: d, inode: d.inode(name, false)}, nil
}

// ReuseForWrite implements vfs.FS.
func (d *memDisk) ReuseForWrite(from, to string, c vfs.DiskWriteCategory) (vfs.File, error) {
	f, err := d.FS.ReuseForWrite(from, to, c)
	if err != nil {
		return nil, err
	}
	d.moved(from, to)
	return &memFile{File: f, d: d, inode: d.inode(to, false)}, nil
}

// OpenDir implements vfs.FS.
func (d *memDisk) OpenDir(name string) (vfs.File, error) {
	f, err := d.FS.OpenDir(name)
	if err != nil {
		return nil, err
	}
	return &memFile{File: f, d: d, inode: &memInode{}}, nil
}

// Link implements vfs.FS.
func (d *memDisk) Link(from, to string) error {
	if err := d.FS.Link(from, to); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if i := d.files[from]; i != nil {
		i.links++
		d.files[to] = i
	}
	return nil
}

// Rename implements vfs.FS.
func (d *memDisk) Rename(from, to string) error {
	if err := d.FS.Rename(from, to); err != nil {
		return err
	}
	d.moved(from, to)
	return nil
}

func (d *memDisk) moved(from, to string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if i := d.files[from]; i != nil && from != to {
		d.unlinkLocked(to)
		delete(d.files, from)
		d.files[to] = i
	}
}

// Remove implements vfs.FS.
func (d *memDisk) Remove(name string) error {
	if err := d.FS.Remove(name); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.unlinkLocked(name)
	return nil
}

// GetDiskUsage implements vfs.FS.
func (d *memDisk) GetDiskUsage(string) (vfs.DiskUsage, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	used := uint64(d.used + d.foreign)
	return vfs.DiskUsage{TotalBytes: diskBytes, UsedBytes: used, AvailBytes: diskBytes - min(diskBytes, used+uint64(d.reserved))}, nil
}

// Unwrap implements vfs.FS.
func (d *memDisk) Unwrap() vfs.FS { return d.FS }

// memFile is an open file of a memDisk. Only one goroutine writes it.
type memFile struct {
	vfs.File
	d     *memDisk
	inode *memInode
	at    int64
}

// Write implements vfs.File.
func (f *memFile) Write(p []byte) (int, error) {
	if err := f.d.grow(f.inode, f.at+int64(len(p))); err != nil {
		return 0, err
	}
	n, err := f.File.Write(p)
	f.at += int64(n)
	return n, err
}

// WriteAt implements vfs.File.
func (f *memFile) WriteAt(p []byte, at int64) (int, error) {
	if err := f.d.grow(f.inode, at+int64(len(p))); err != nil {
		return 0, err
	}
	return f.File.WriteAt(p, at)
}

// Preallocate implements vfs.File.
func (f *memFile) Preallocate(offset, length int64) error {
	return f.d.grow(f.inode, offset+length)
}

// Sync implements vfs.File.
func (f *memFile) Sync() error {
	f.d.beforeSync()
	return f.File.Sync()
}

// SyncData implements vfs.File.
func (f *memFile) SyncData() error {
	f.d.beforeSync()
	return f.File.SyncData()
}

// SyncTo implements vfs.File.
func (f *memFile) SyncTo(length int64) (bool, error) {
	f.d.beforeSync()
	return f.File.SyncTo(length)
}
