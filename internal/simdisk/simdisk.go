// Package simdisk is a disk in memory that can lose its power: a [Disk] forgets in a crash
// what was not synced. It does what Pebble's vfs.MemFS does, page by page. A sync costs
// what has changed and not the whole file. A crash shares all synced pages with its result.
package simdisk

import (
	"errors"
	"io"
	"io/fs"
	"maps"
	"math/rand/v2"
	"path"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// Disk is a file system in memory. It implements vfs.FS.
type Disk struct {
	// still keeps all changes away while a clone is made; taken before mu and a node's mu.
	still sync.RWMutex
	mu    sync.Mutex // guards the tree: the children of all directories
	root  *node
	usage vfs.DiskUsage // guarded by mu

	locks sync.Map // by path
}

var _ vfs.FS = (*Disk)(nil)

// node is a file or a directory.
type node struct {
	dir bool
	// children are what is here, kept what a crash leaves for certain. Guarded by Disk.mu.
	children, kept map[string]*node

	mu       sync.Mutex
	contents           // guarded by mu
	synced   contents  // guarded by mu; its own is not used
	fresh    []int     // guarded by mu: pages that synced does not have
	modified time.Time // guarded by mu
}

// New returns an empty disk.
func New() *Disk { return &Disk{root: newDir()} }

func newDir() *node { return &node{dir: true, children: map[string]*node{}} }

// Crash returns the disk as a loss of power at this moment leaves it: with all that was
// synced, and of all other pages and names each with a probability of keepPercent. The disk
// itself goes on. rng may be nil if keepPercent is 0.
func (d *Disk) Crash(keepPercent int, rng *rand.Rand) *Disk {
	d.still.Lock()
	defer d.still.Unlock()
	keep := func() bool { return keepPercent > 0 && rng.IntN(100) < keepPercent }
	// A file may have several names.
	return &Disk{root: d.root.crash(keep, map[*node]*node{})}
}

func (n *node) crash(keep func() bool, done map[*node]*node) *node {
	if c := done[n]; c != nil {
		return c
	}
	c := &node{dir: n.dir, modified: n.modified}
	done[n] = c
	if !n.dir {
		c.crashContents(n, keep)
		return c
	}
	c.children = map[string]*node{}
	maps.Copy(c.children, n.kept)
	for _, name := range slices.Sorted(maps.Keys(n.children)) {
		if keep() {
			c.children[name] = n.children[name]
		}
	}
	for _, name := range slices.Sorted(maps.Keys(c.children)) {
		c.children[name] = c.children[name].crash(keep, done)
	}
	c.kept = maps.Clone(c.children)
	return c
}

func (n *node) crashContents(from *node, keep func() bool) {
	n.size, n.pages = from.synced.size, slices.Clone(from.synced.pages)
	for i := range from.pages {
		if !keep() {
			continue
		}
		for len(n.pages) <= i {
			n.pages = append(n.pages, nil)
		}
		n.pages[i] = from.pages[i]
		if from.own[i] {
			n.pages[i] = copyPage(from.pages[i])
		}
		n.size = max(n.size, min(int64(i+1)*pageSize, from.size))
	}
	n.own = make([]bool, len(n.pages))
	n.synced = contents{size: n.size, pages: slices.Clone(n.pages)}
}

// at calls f with the directory of a path and the path's last element, "" for a path that
// is a directory of its own. It holds mu.
func (d *Disk) at(op, name string, f func(dir *node, last string) error) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	dir := d.root
	last := strings.TrimLeft(name, "/")
	if last == "." {
		last = ""
	}
	for {
		first, rest, more := strings.Cut(last, "/")
		if !more {
			break
		}
		next := dir.children[first]
		switch {
		case next == nil:
			return &fs.PathError{Op: op, Path: name, Err: fs.ErrNotExist}
		case !next.dir:
			return &fs.PathError{Op: op, Path: name, Err: syscall.ENOTDIR}
		}
		dir, last = next, strings.TrimLeft(rest, "/")
	}
	if err := f(dir, last); err != nil {
		return &fs.PathError{Op: op, Path: name, Err: err}
	}
	return nil
}

// change is at for who changes the tree.
func (d *Disk) change(op, name string, f func(dir *node, last string) error) error {
	d.still.RLock()
	defer d.still.RUnlock()
	return d.at(op, name, func(dir *node, last string) error {
		if last == "" {
			return errNoName
		}
		return f(dir, last)
	})
}

var errNoName = errors.New("simdisk: a path without a name at its end")

// Create implements vfs.FS.
func (d *Disk) Create(name string, _ vfs.DiskWriteCategory) (vfs.File, error) {
	var n *node
	err := d.change("create", name, func(dir *node, last string) error {
		if old := dir.children[last]; old != nil && old.dir {
			return syscall.EISDIR
		}
		n = &node{modified: time.Now()}
		dir.children[last] = n
		return nil
	})
	if err != nil {
		return nil, err
	}
	return &file{d: d, n: n, name: path.Base(name), reads: true, writes: true}, nil
}

func (d *Disk) open(op, name string, writes bool) (*file, error) {
	var n *node
	err := d.at(op, name, func(dir *node, last string) error {
		n = dir
		if last != "" {
			n = dir.children[last]
		}
		if n == nil {
			return fs.ErrNotExist
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return &file{d: d, n: n, name: path.Base(name), reads: true, writes: writes}, nil
}

// Open implements vfs.FS.
func (d *Disk) Open(name string, opts ...vfs.OpenOption) (vfs.File, error) {
	f, err := d.open("open", name, false)
	if err != nil {
		return nil, err
	}
	for _, o := range opts {
		o.Apply(f)
	}
	return f, nil
}

// OpenReadWrite implements vfs.FS.
func (d *Disk) OpenReadWrite(name string, c vfs.DiskWriteCategory, opts ...vfs.OpenOption) (vfs.File, error) {
	f, err := d.open("open", name, true)
	if errors.Is(err, fs.ErrNotExist) {
		return d.Create(name, c)
	}
	if err != nil {
		return nil, err
	}
	for _, o := range opts {
		o.Apply(f)
	}
	return f, nil
}

// OpenDir implements vfs.FS.
func (d *Disk) OpenDir(name string) (vfs.File, error) {
	f, err := d.open("open", name, false)
	if err != nil {
		return nil, err
	}
	return f, nil
}

// Link implements vfs.FS.
func (d *Disk) Link(from, to string) error {
	d.still.RLock()
	defer d.still.RUnlock()
	n, err := d.open("link", from, false)
	if err != nil {
		return err
	}
	return d.at("link", to, func(dir *node, last string) error {
		if dir.children[last] != nil {
			return fs.ErrExist
		}
		dir.children[last] = n.n
		return nil
	})
}

// Remove implements vfs.FS.
func (d *Disk) Remove(name string) error {
	return d.change("remove", name, func(dir *node, last string) error {
		n := dir.children[last]
		switch {
		case n == nil:
			return fs.ErrNotExist
		case len(n.children) > 0:
			return syscall.ENOTEMPTY
		}
		delete(dir.children, last)
		return nil
	})
}

// RemoveAll implements vfs.FS.
func (d *Disk) RemoveAll(name string) error {
	err := d.change("remove", name, func(dir *node, last string) error {
		delete(dir.children, last)
		return nil
	})
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// Rename implements vfs.FS.
func (d *Disk) Rename(from, to string) error {
	d.still.RLock()
	defer d.still.RUnlock()
	var n *node
	err := d.at("rename", from, func(dir *node, last string) error {
		if n = dir.children[last]; n == nil {
			return fs.ErrNotExist
		}
		delete(dir.children, last)
		return nil
	})
	if err != nil {
		return err
	}
	return d.at("rename", to, func(dir *node, last string) error {
		if last == "" {
			return errNoName
		}
		dir.children[last] = n
		return nil
	})
}

// ReuseForWrite implements vfs.FS.
func (d *Disk) ReuseForWrite(from, to string, _ vfs.DiskWriteCategory) (vfs.File, error) {
	if err := d.Rename(from, to); err != nil {
		return nil, err
	}
	f, err := d.open("open", to, true)
	if err != nil {
		return nil, err
	}
	f.reads = false
	return f, nil
}

// MkdirAll implements vfs.FS.
func (d *Disk) MkdirAll(name string, _ fs.FileMode) error {
	d.still.RLock()
	defer d.still.RUnlock()
	d.mu.Lock()
	defer d.mu.Unlock()
	dir := d.root
	for part := range strings.SplitSeq(name, "/") {
		if part == "" || part == "." {
			continue
		}
		next := dir.children[part]
		switch {
		case next == nil:
			next = newDir()
			dir.children[part] = next
		case !next.dir:
			return &fs.PathError{Op: "mkdir", Path: name, Err: syscall.ENOTDIR}
		}
		dir = next
	}
	return nil
}

// Lock implements vfs.FS: one lock for each path and [Disk], until it is closed. A crash
// leaves none.
func (d *Disk) Lock(name string) (io.Closer, error) {
	if _, held := d.locks.LoadOrStore(name, true); held {
		return nil, &fs.PathError{Op: "lock", Path: name, Err: syscall.EAGAIN}
	}
	f, err := d.Create(name, vfs.WriteCategoryUnspecified)
	if err != nil {
		d.locks.Delete(name)
		return nil, err
	}
	return &lock{f, d, name}, nil
}

type lock struct {
	vfs.File
	d    *Disk
	name string
}

func (l *lock) Close() error {
	l.d.locks.Delete(l.name)
	return l.File.Close()
}

// List implements vfs.FS.
func (d *Disk) List(name string) ([]string, error) {
	var names []string
	err := d.at("list", strings.TrimRight(name, "/")+"/", func(dir *node, _ string) error {
		names = slices.Sorted(maps.Keys(dir.children))
		return nil
	})
	return names, err
}

// Stat implements vfs.FS.
func (d *Disk) Stat(name string) (vfs.FileInfo, error) {
	f, err := d.open("stat", name, false)
	if err != nil {
		return nil, err
	}
	return f.Stat()
}

// PathBase implements vfs.FS.
func (*Disk) PathBase(p string) string { return path.Base(p) }

// PathJoin implements vfs.FS.
func (*Disk) PathJoin(elem ...string) string { return path.Join(elem...) }

// PathDir implements vfs.FS.
func (*Disk) PathDir(p string) string { return path.Dir(p) }

// SetUsage says what GetDiskUsage answers from now on.
func (d *Disk) SetUsage(u vfs.DiskUsage) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.usage = u
}

// GetDiskUsage implements vfs.FS. Until SetUsage is called it is not supported.
func (d *Disk) GetDiskUsage(string) (vfs.DiskUsage, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.usage == (vfs.DiskUsage{}) {
		return d.usage, vfs.ErrUnsupported
	}
	return d.usage, nil
}

// Unwrap implements vfs.FS.
func (*Disk) Unwrap() vfs.FS { return nil }
