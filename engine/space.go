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

// SpaceState says whether the store may accept writes.
type SpaceState uint8

// The states of the disk's space.
const (
	// SpaceOK: writes may be proposed.
	SpaceOK SpaceState = iota
	// SpaceFull: no write that adds data may be proposed. Proposals in flight are still
	// applied, and reads and deletes continue.
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

	// spacePoll lies between two checks of the free space. A check is one system call. A
	// disk can fill by 1 GB in a few seconds, so rarer checks could come after the
	// reserve is used up.
	spacePoll  = time.Second
	retryPause = time.Second // between attempts to flush while full

	flushCategory      vfs.DiskWriteCategory = "pebble-memtable-flush"
	compactionCategory vfs.DiskWriteCategory = "pebble-compaction"
)

// space watches the free space of the store's disk.
//
// There are four levels, from the highest. Below low the state is full. Then compactions
// need half of low and flushes an eighth, so that the rest is kept for the manifest,
// whose failed write would be fatal. In addition there is the ballast, a file that is
// deleted at the first ENOSPC before the failed write is retried. The state ends when low
// and a quarter of it is free again and the ballast exists again.
//
// A process that may open no more files is in the same state, with a reserve of open files in the
// place of the ballast.
type space struct {
	ctx     context.Context
	failed  func() error // the engine's fatal error
	fs      vfs.FS       // below gate and ballast: space's own writes use it
	dir     string
	clock   clock.Clock
	logger  *zap.Logger
	metrics *Metrics

	ballastMax, lowMax int64

	state  atomic.Uint32
	why    atomic.Pointer[string] // of the last time that the state was full
	opened atomic.Bool            // Pebble has been opened
	fullAt atomic.Int64           // clock.Time of the last failed write
	writes atomic.Uint64
	pace   *pace

	// mu keeps the ballast from being made and deleted at once. It is held over file
	// operations; only the poller and writes that met a full disk take it.
	mu sync.Mutex

	reserve fileReserve
}

func newSpace(ctx context.Context, failed func() error, o *Options) *space {
	return &space{
		ctx: ctx, failed: failed, fs: o.FS, dir: o.Dir, clock: o.Clock, logger: o.Logger, metrics: o.Metrics,
		ballastMax: max(0, o.BallastBytes), lowMax: max(0, o.LowSpaceBytes),
		reserve: fileReserve{fs: o.FS, dir: o.Dir, logger: o.Logger}, pace: newPace(ctx, o.Clock, o.MemTableBytes),
	}
}

// Space returns the state of the disk's space. It costs one atomic load.
func (e *Engine) Space() SpaceState { return e.space.get() }

// SpaceWhy says what lacks while Space is SpaceFull.
func (e *Engine) SpaceWhy() string {
	if why := e.space.why.Load(); why != nil {
		return *why
	}
	return ""
}

// Progress counts the completed writes and syncs of tables. While a commit waits for
// flushes, a growing count means a slow disk, and a constant one a disk that hangs or is
// full.
func (e *Engine) Progress() uint64 { return e.space.writes.Load() }

func (s *space) get() SpaceState { return SpaceState(s.state.Load()) }

// set changes the state and logs the change.
func (s *space) set(to SpaceState, why string) {
	if to == SpaceFull {
		s.why.Store(&why)
	}
	if SpaceState(s.state.Swap(uint32(to))) == to {
		return
	}
	s.metrics.spaceFull.Set(float64(to))
	level := zap.InfoLevel
	if to == SpaceFull {
		level = zap.ErrorLevel
	}
	s.logger.Log(level, "disk space: "+to.String(), zap.String("why", why), zap.String("dir", s.dir))
}

// noteFull records what failed for lack of space, or of files.
func (s *space) noteFull(why string) {
	s.fullAt.Store(int64(s.clock.Now()))
	s.set(SpaceFull, why)
}

// Why the state is full.
const (
	writeFoundNone = "a write found no space"
	noFreeFile     = "the process can open no more files"
)

// open opens a file that Pebble cannot do without, and so does not fail for want of file
// descriptors: an entry that reads while it is applied cannot be given up. It takes a file of the
// reserve. Beyond that it waits. But a store that is being opened fails.
func (s *space) open(do func() (vfs.File, error)) (vfs.File, error) {
	for {
		f, err := do()
		if !isNoFiles(err) || !s.opened.Load() || s.failed() != nil {
			return f, err
		}
		s.noteFull(noFreeFile)
		if s.reserve.giveUp() {
			continue
		}
		if clock.Sleep(s.ctx, s.clock, retryPause) != nil {
			return nil, err
		}
	}
}

// giveUpBallast frees space for the write that just failed.
func (s *space) giveUpBallast() {
	s.noteFull(writeFoundNone)
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.fs.Remove(s.ballastPath()); err != nil && !isNotExist(err) {
		s.logger.Error("disk space: remove ballast", zap.Error(err))
	}
}

func (s *space) ballastPath() string { return s.fs.PathJoin(s.dir, ballastName) }

// limits are the thresholds for the disk's current size.
type limits struct {
	known               bool // the file system reports its free space
	avail, low, ballast int64
}

func (s *space) limits() limits {
	u, err := s.fs.GetDiskUsage(s.dir)
	if err != nil {
		// Without a report only failed writes show that the disk is full.
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

// LeavesRoom reports whether a new file of that many bytes in dir, outside the store,
// leaves the store what it needs to recover from a full disk: a quarter of low for
// flushes and the manifest, and the ballast's size while there is no ballast. A
// directory on another disk takes nothing from the store. The answer is true if the file
// system does not report its space. The store need not be open.
func (o Options) LeavesRoom(dir string, bytes int64) bool {
	o.setSizes()
	own, err := o.FS.GetDiskUsage(o.Dir)
	if err != nil {
		return true
	}
	// Two disks may have exactly the same size. So the free space is that of the disk on
	// which the file is to be.
	u, err := o.FS.GetDiskUsage(dir)
	if err != nil || u.TotalBytes != own.TotalBytes {
		return true
	}
	s := newSpace(context.Background(), nil, &o)
	l := s.limitsOf(u)
	need := l.low / 4
	if !s.ballastExists() {
		need += l.ballast
	}
	return l.avail-bytes >= need
}

// SpareBytes returns how much may be written to dir, outside the store, before the store counts as full: what is free
// beyond the space below which it does, a quarter of that, and the ballast while there is none. A directory on another
// disk takes nothing from the store. known is false if the file system does not report its space.
func (e *Engine) SpareBytes(dir string) (spare int64, known bool) {
	s := e.space
	own, err := s.fs.GetDiskUsage(s.dir)
	if err != nil {
		return 0, false
	}
	u, err := s.fs.GetDiskUsage(dir)
	if err != nil {
		return 0, false
	}
	l := s.limitsOf(u)
	if u.TotalBytes != own.TotalBytes {
		return l.avail, true
	}
	need := l.low + l.low/4
	if !s.ballastExists() {
		need += l.ballast
	}
	return max(0, l.avail-need), true
}

// loop polls the free space until the engine ends.
func (s *space) loop() {
	t := s.clock.NewTimer(clock.UntilNext(s.clock, spacePoll))
	defer t.Stop()
	for {
		select {
		case <-s.ctx.Done():
			return
		case <-t.C():
			s.poll()
		}
		t.Reset(clock.UntilNext(s.clock, spacePoll))
	}
}

// poll updates the state.
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
	if !s.reserve.fill() {
		s.noteFull(noFreeFile)
		return
	}
	standing := s.ballastExists()
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
	s.set(SpaceOK, "there is space again")
}

func (s *space) ballastExists() bool {
	_, err := s.fs.Stat(s.ballastPath())
	return err == nil
}

// makeBallast first writes the ballast under another name, so that an existing ballast is
// complete.
func (s *space) makeBallast(size int64) (err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	tmp := s.ballastPath() + ".new"
	f, err := s.fs.Create(tmp, vfs.WriteCategoryUnspecified)
	if err != nil {
		return fmt.Errorf("engine: create %s: %w", tmp, err)
	}
	if err = f.Preallocate(0, size); err != nil && !IsNoSpace(err) {
		// The file system cannot preallocate: written zeros take the space as well.
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

// errHeldBack says that a table was not begun, since the disk is full.
var errHeldBack = errors.New("held back")

// admit reports whether a new table may be begun. Pebble retries a failed flush at once,
// so a refusal first waits a moment, which limits the rate of attempts.
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
	return fmt.Errorf("engine: %s %w: %w", category, errHeldBack, syscall.ENOSPC)
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

// wrap returns the file system for Pebble: it retries writes that find the disk full once
// without the ballast, and gates new tables.
func (s *space) wrap(fs vfs.FS) vfs.FS {
	return &gateFS{FS: vfs.OnDiskFull(fs, s.giveUpBallast), space: s}
}

// gateFS is the file system that Pebble sees. After a fatal error it creates no more
// files: what Pebble left unfinished must neither become durable nor be reported durable.
type gateFS struct {
	vfs.FS
	space *space
}

// Create implements vfs.FS.
func (g *gateFS) Create(name string, category vfs.DiskWriteCategory) (vfs.File, error) {
	if err := g.space.failed(); err != nil {
		// Pebble retries a failed flush at once. Until the process ends it must not do so
		// at full speed.
		_ = clock.Sleep(g.space.ctx, g.space.clock, retryPause)
		return nil, err
	}
	if category != flushCategory && category != compactionCategory {
		return g.space.open(func() (vfs.File, error) { return g.FS.Create(name, category) })
	}
	if err := g.space.admit(category); err != nil {
		return nil, err
	}
	f, err := g.FS.Create(name, category)
	if err != nil {
		return nil, err
	}
	t := &tableProgress{File: f, writes: &g.space.writes}
	if category == compactionCategory {
		t.pace = g.space.pace
	}
	return t, nil
}

// Open implements vfs.FS.
func (g *gateFS) Open(name string, opts ...vfs.OpenOption) (vfs.File, error) {
	return g.space.open(func() (vfs.File, error) { return g.FS.Open(name, opts...) })
}

// OpenReadWrite implements vfs.FS.
func (g *gateFS) OpenReadWrite(name string, category vfs.DiskWriteCategory, opts ...vfs.OpenOption) (vfs.File, error) {
	return g.space.open(func() (vfs.File, error) { return g.FS.OpenReadWrite(name, category, opts...) })
}

// OpenDir implements vfs.FS.
func (g *gateFS) OpenDir(name string) (vfs.File, error) {
	return g.space.open(func() (vfs.File, error) { return g.FS.OpenDir(name) })
}

// ReuseForWrite implements vfs.FS.
func (g *gateFS) ReuseForWrite(from, to string, category vfs.DiskWriteCategory) (vfs.File, error) {
	return g.space.open(func() (vfs.File, error) { return g.FS.ReuseForWrite(from, to, category) })
}

// tableProgress counts the operations on a table being written, and paces it if pace is
// not nil.
type tableProgress struct {
	vfs.File
	writes *atomic.Uint64
	pace   *pace
}

// Write implements vfs.File.
func (f *tableProgress) Write(p []byte) (int, error) {
	n, err := f.File.Write(p)
	f.writes.Add(1)
	if f.pace != nil {
		f.pace.wrote(n)
	}
	return n, err
}

// Sync implements vfs.File.
func (f *tableProgress) Sync() error {
	err := f.File.Sync()
	f.writes.Add(1)
	return err
}

// SyncData implements vfs.File.
func (f *tableProgress) SyncData() error {
	err := f.File.SyncData()
	f.writes.Add(1)
	return err
}

// SyncTo implements vfs.File.
func (f *tableProgress) SyncTo(length int64) (fullSync bool, err error) {
	fullSync, err = f.File.SyncTo(length)
	f.writes.Add(1)
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
