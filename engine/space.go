package engine

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
)

// SpaceState says whether the store may take writes.
type SpaceState uint8

// The states of the disk's space.
const (
	// SpaceOK: writes may be proposed.
	SpaceOK SpaceState = iota
	// SpaceFull: no write that adds data may be proposed. What was proposed is
	// still applied, reads and deletes go on.
	SpaceFull
)

// String returns the state in words.
func (s SpaceState) String() string {
	if s == SpaceFull {
		return "full"
	}
	return "ok"
}

const (
	ballastName = "ballast"

	// spacePoll lies between looks at the free space. A look is one system call; a
	// disk fills by a GB in a few seconds, so that a rarer one would find what low
	// keeps free used up.
	spacePoll  = time.Second
	retryPause = time.Second // between attempts to flush while full

	flushCategory      vfs.DiskWriteCategory = "pebble-memtable-flush"
	compactionCategory vfs.DiskWriteCategory = "pebble-compaction"
)

// space watches the free space of the store's disk.
//
// Four levels, from above: below low the state is full. While it is full,
// compactions need half of low and flushes an eighth, so that what is left belongs
// to the manifest, whose failed write would be fatal. Beside that there is the
// ballast, a file that is given up at the first ENOSPC, before the failed write is
// tried again. The state ends when low and a quarter is free again and the
// ballast stands again.
type space struct {
	ctx     context.Context
	failed  func() error // the engine's fatal error
	fs      vfs.FS       // below gate and ballast: what space itself writes with
	dir     string
	clock   clock.Clock
	logger  *zap.Logger
	metrics *Metrics

	ballastMax, lowMax int64

	state  atomic.Uint32
	fullAt atomic.Int64 // clock.Time of the last failed write
	moved  atomic.Uint64
	pace   *pace

	// mu keeps the ballast from being made and given up at once. It is held over
	// file operations; only pollers and writes that met a full disk take it.
	mu sync.Mutex
}

func newSpace(ctx context.Context, failed func() error, o *Options) *space {
	return &space{
		ctx: ctx, failed: failed, fs: o.FS, dir: o.Dir, clock: o.Clock, logger: o.Logger, metrics: o.Metrics,
		ballastMax: max(0, o.BallastBytes), lowMax: max(0, o.LowSpaceBytes), pace: newPace(ctx, o.Clock, o.MemTableBytes),
	}
}

// Space returns the state of the disk's space. It costs one atomic load.
func (e *Engine) Space() SpaceState { return e.space.get() }

// Progress counts the writes and syncs of tables that have ended. Where a commit waits
// for flushes it tells a slow disk, on which this grows, from one that hangs or that
// is full.
func (e *Engine) Progress() uint64 { return e.space.moved.Load() }

func (s *space) get() SpaceState { return SpaceState(s.state.Load()) }

// set changes the state and logs the change.
func (s *space) set(to SpaceState, why string) {
	if SpaceState(s.state.Swap(uint32(to))) == to {
		return
	}
	s.metrics.spaceFull.Set(float64(to))
	s.logger.Warn("disk space: "+to.String(), zap.String("why", why), zap.String("dir", s.dir))
}

// sawFull notes a write that failed for want of space.
func (s *space) sawFull() {
	s.fullAt.Store(int64(s.clock.Now()))
	s.set(SpaceFull, "a write found no room")
}

// giveUpBallast makes room for the write that just failed.
func (s *space) giveUpBallast() {
	s.sawFull()
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.fs.Remove(s.ballastPath()); err != nil && !isNotExist(err) {
		s.logger.Error("disk space: remove ballast", zap.Error(err))
	}
}

func (s *space) ballastPath() string { return s.fs.PathJoin(s.dir, ballastName) }

// limits are the sizes for the disk as it is.
type limits struct {
	known               bool // the file system tells its free space
	avail, low, ballast int64
}

func (s *space) limits() limits {
	u, err := s.fs.GetDiskUsage(s.dir)
	if err != nil {
		// Without knowledge only failed writes say that the disk is full.
		return limits{ballast: s.ballastMax}
	}
	return s.limitsOf(u)
}

func (s *space) limitsOf(u vfs.DiskUsage) limits {
	return limits{
		known:   true,
		avail:   int64(min(u.AvailBytes, 1<<62)),
		low:     min(s.lowMax, int64(u.TotalBytes/20)),
		ballast: min(s.ballastMax, int64(u.TotalBytes/50)),
	}
}

// LeavesRoom says whether a new file of so many bytes in dir, which is not the
// store's, leaves the store of these options what it needs to get out of a full disk:
// a quarter of low, for its flushes and its manifest, and the ballast's room while
// that is given up. A directory on another disk takes nothing from the store. Where
// the file system tells nothing about its space the answer is yes. It needs no open
// store.
func (o Options) LeavesRoom(dir string, bytes int64) bool {
	o.setSizes()
	own, err := o.FS.GetDiskUsage(o.Dir)
	if err != nil {
		return true
	}
	// That two disks are of one size to the byte proves nothing: what is free counts
	// where the file is to be.
	u, err := o.FS.GetDiskUsage(dir)
	if err != nil || u.TotalBytes != own.TotalBytes {
		return true
	}
	s := newSpace(context.Background(), nil, &o)
	l := s.limitsOf(u)
	need := l.low / 4
	if !s.ballastStands() {
		need += l.ballast
	}
	return l.avail-bytes >= need
}

// loop looks at the free space until the engine ends.
func (s *space) loop() {
	t := s.clock.NewTimer(spacePoll)
	defer t.Stop()
	for {
		select {
		case <-s.ctx.Done():
			return
		case <-t.C():
			s.poll()
		}
		t.Reset(spacePoll)
	}
}

// poll brings the state up to date.
func (s *space) poll() {
	l := s.limits()
	if l.known {
		s.metrics.availBytes.Set(float64(l.avail))
	}
	if s.get() == SpaceOK && l.known && l.avail < l.low {
		s.set(SpaceFull, fmt.Sprintf("%d bytes are free, %d wanted", l.avail, l.low))
		return
	}
	rested := s.clock.Now().Sub(clock.Time(s.fullAt.Load())) >= retryPause
	if s.get() == SpaceFull && !rested {
		return
	}
	standing := s.ballastStands()
	need := l.low + l.low/4
	if !standing {
		need += l.ballast
	}
	if l.known && l.avail < need && (s.get() == SpaceFull || !standing) {
		return
	}
	if !standing && l.ballast > 0 {
		if err := s.makeBallast(l.ballast); err != nil {
			s.logger.Warn("disk space: make ballast", zap.Int64("bytes", l.ballast), zap.Error(err))
			return
		}
	}
	s.set(SpaceOK, "there is room again")
}

func (s *space) ballastStands() bool {
	_, err := s.fs.Stat(s.ballastPath())
	return err == nil
}

// makeBallast writes the ballast under another name first, so that a ballast
// which stands is whole.
func (s *space) makeBallast(size int64) (err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	tmp := s.ballastPath() + ".new"
	f, err := s.fs.Create(tmp, vfs.WriteCategoryUnspecified)
	if err != nil {
		return fmt.Errorf("engine: create %s: %w", tmp, err)
	}
	if err = f.Preallocate(0, size); err != nil && !isNoSpace(err) {
		// The file system cannot reserve: written zeros take the room as well.
		zeros := make([]byte, 1<<20)
		for n := int64(0); n < size && (err == nil || n == 0); n += int64(len(zeros)) {
			_, err = f.Write(zeros[:min(size-n, int64(len(zeros)))])
		}
	}
	if err == nil {
		err = f.Sync()
	}
	err = errors.Join(err, f.Close())
	if err == nil {
		err = s.fs.Rename(tmp, s.ballastPath())
	}
	if err != nil {
		return errors.Join(fmt.Errorf("engine: write %s: %w", tmp, err), s.fs.Remove(tmp))
	}
	return nil
}

// admit says whether a new table may be begun. Pebble repeats a failed flush at
// once, so that a refusal waits a moment first: this paces the attempts.
func (s *space) admit(category vfs.DiskWriteCategory) error {
	if s.get() == SpaceOK {
		return nil
	}
	if s.hasRoom(category) {
		return nil
	}
	if err := clock.Sleep(s.ctx, s.clock, retryPause); err == nil && s.hasRoom(category) {
		return nil
	}
	return fmt.Errorf("engine: %s held back: %w", category, syscall.ENOSPC)
}

func (s *space) hasRoom(category vfs.DiskWriteCategory) bool {
	l := s.limits()
	rested := s.clock.Now().Sub(clock.Time(s.fullAt.Load())) >= retryPause
	if !rested || !l.known {
		return rested
	}
	if category == compactionCategory {
		return l.avail >= l.low/2
	}
	return l.avail >= l.low/8
}

// wrap returns the file system that Pebble gets: writes that find the disk full
// are tried once more without the ballast, and tables are admitted.
func (s *space) wrap(fs vfs.FS) vfs.FS {
	return &gateFS{FS: vfs.OnDiskFull(fs, s.giveUpBallast), space: s}
}

// gateFS is the file system as Pebble sees it. After a fatal error it makes no
// more files: what Pebble left half done then must not become durable, or be
// called so.
type gateFS struct {
	vfs.FS
	space *space
}

// Create implements vfs.FS.
func (g *gateFS) Create(name string, category vfs.DiskWriteCategory) (vfs.File, error) {
	if err := g.space.failed(); err != nil {
		// Pebble tries a failed flush again at once; until the process ends it shall
		// not do so at full speed.
		_ = clock.Sleep(g.space.ctx, g.space.clock, retryPause)
		return nil, err
	}
	if category != flushCategory && category != compactionCategory {
		return g.FS.Create(name, category)
	}
	if err := g.space.admit(category); err != nil {
		return nil, err
	}
	f, err := g.FS.Create(name, category)
	if err != nil {
		return nil, err
	}
	t := &tableProgress{File: f, moved: &g.space.moved}
	if category == compactionCategory {
		t.pace = g.space.pace
	}
	return t, nil
}

// tableProgress counts what is done to a table that is being written, and paces it
// where pace is not nil.
type tableProgress struct {
	vfs.File
	moved *atomic.Uint64
	pace  *pace
}

// Write implements vfs.File.
func (f *tableProgress) Write(p []byte) (int, error) {
	n, err := f.File.Write(p)
	f.moved.Add(1)
	if f.pace != nil {
		f.pace.wrote(n)
	}
	return n, err
}

// Sync implements vfs.File.
func (f *tableProgress) Sync() error {
	err := f.File.Sync()
	f.moved.Add(1)
	return err
}

// SyncData implements vfs.File.
func (f *tableProgress) SyncData() error {
	err := f.File.SyncData()
	f.moved.Add(1)
	return err
}

// SyncTo implements vfs.File.
func (f *tableProgress) SyncTo(length int64) (fullSync bool, err error) {
	fullSync, err = f.File.SyncTo(length)
	f.moved.Add(1)
	return fullSync, err
}

// Link implements vfs.FS.
func (g *gateFS) Link(oldname, newname string) error {
	if err := g.space.failed(); err != nil {
		return err
	}
	return g.FS.Link(oldname, newname)
}

// Unwrap implements vfs.FS.
func (g *gateFS) Unwrap() vfs.FS { return g.FS }
