package sim

import (
	"context"
	"errors"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/simdisk"
)

// disk is a node's memory disk. A crash drops unsynced data, and a sync takes time, so
// that there is something to drop.
type disk struct {
	vfs.FS
	mem   *simdisk.Disk
	clock clock.Clock
	// stalls is not nil while the disk hangs.
	stalls atomic.Pointer[standstill]
	// failing makes syncs of the wal fail. Their data stay unsynced.
	failing atomic.Bool
	// slowStore is the extra time of each sync of a table, in nanoseconds: the store is
	// on another disk than the wal.
	slowStore atomic.Int64
	// lies is a mutation: all syncs of a wal file after its first only take their time.
	lies bool

	mu  sync.Mutex
	rng *rand.Rand // guarded by mu
}

// standstill is a time in which no sync of a disk returns.
type standstill struct {
	// waits is closed when the first sync waits, over when all may go on.
	waits, over chan struct{}
	once        sync.Once
}

// The directories of a node.
const (
	walDir  = "wal"
	dataDir = "data"
)

// The usual and the occasional time of a sync.
const (
	syncMin  = 50 * time.Microsecond
	syncMax  = time.Millisecond
	syncSlow = 30 * time.Millisecond
)

func newDisk(mem *simdisk.Disk, c clock.Clock, rng *rand.Rand) *disk {
	return &disk{FS: mem, mem: mem, clock: c, rng: rng}
}

// crash returns the disk for the next node: everything synced, and each other block
// with a probability of keep percent.
func (d *disk) crash(keepPercent int) *disk {
	d.mu.Lock()
	defer d.mu.Unlock()
	// Waiters for the old disk must not wait for ever.
	if s := d.stalls.Swap(nil); s != nil {
		defer close(s.over)
	}
	if d.lies {
		keepPercent = 0
	}
	mem := d.mem.Crash(keepPercent, d.rng)
	next := newDisk(mem, d.clock, rand.New(rand.NewPCG(d.rng.Uint64(), 1)))
	next.lies = d.lies
	return next
}

// stall holds all syncs until release is called, also by an earlier stall. waits is
// closed as soon as a sync waits.
func (d *disk) stall() (waits <-chan struct{}, release func()) {
	s := &standstill{waits: make(chan struct{}), over: make(chan struct{})}
	if !d.stalls.CompareAndSwap(nil, s) {
		close(s.waits)
		return s.waits, func() {}
	}
	return s.waits, func() {
		if d.stalls.CompareAndSwap(s, nil) {
			close(s.over)
		}
	}
}

// beforeSync waits the time of a sync, and says whether the sync fails.
func (d *disk) beforeSync(wal bool) error {
	d.mu.Lock()
	wait := syncMin + time.Duration(d.rng.Int64N(int64(syncMax-syncMin)))
	if d.rng.IntN(100) == 0 {
		wait = syncSlow
	}
	d.mu.Unlock()
	if !wal {
		wait += time.Duration(d.slowStore.Load())
	}
	// No context: a sync cannot be cancelled, and this one ends soon.
	_ = clock.Sleep(context.Background(), d.clock, wait)
	if s := d.stalls.Load(); s != nil {
		s.once.Do(func() { close(s.waits) })
		<-s.over
	}
	if wal && d.failing.Load() {
		return errSync
	}
	return nil
}

var errSync = errors.New("sim: the disk failed to sync")

// file is an open file whose syncs take time. Those of Pebble's log of versions and
// of directories take none: Pebble holds a lock over some of them, and who waits
// for a lock does not let virtual time go on.
type file struct {
	vfs.File
	d      *disk
	wal    bool
	synced atomic.Bool
}

// Sync implements vfs.File.
func (f *file) Sync() error {
	if err := f.d.beforeSync(f.wal); err != nil {
		return err
	}
	return f.File.Sync()
}

// SyncData implements vfs.File.
func (f *file) SyncData() error {
	if err := f.d.beforeSync(f.wal); err != nil {
		return err
	}
	if f.d.lies && f.wal && f.synced.Swap(true) {
		return nil
	}
	return f.File.SyncData()
}

func (d *disk) wrap(name string, f vfs.File, err error) (vfs.File, error) {
	wal := strings.HasPrefix(name, walDir)
	if err != nil || !wal && !strings.HasSuffix(name, ".sst") {
		return f, err
	}
	return &file{File: f, d: d, wal: wal}, nil
}

// Create implements vfs.FS.
func (d *disk) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	f, err := d.FS.Create(name, c)
	return d.wrap(name, f, err)
}

// OpenReadWrite implements vfs.FS.
func (d *disk) OpenReadWrite(name string, c vfs.DiskWriteCategory, opts ...vfs.OpenOption) (vfs.File, error) {
	f, err := d.FS.OpenReadWrite(name, c, opts...)
	return d.wrap(name, f, err)
}

// ReuseForWrite implements vfs.FS.
func (d *disk) ReuseForWrite(from, to string, c vfs.DiskWriteCategory) (vfs.File, error) {
	f, err := d.FS.ReuseForWrite(from, to, c)
	return d.wrap(to, f, err)
}
