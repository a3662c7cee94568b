package engine

import (
	"errors"
	"syscall"

	"github.com/cockroachdb/pebble/v2/vfs"
	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
)

// reserveFiles is how many files the store keeps open for what it cannot do without when the
// process may open no more: reads, and a new manifest, without which Pebble gives up.
const reserveFiles = 16

const noFreeFile = "the process can open no more files"

// isNoFiles reports whether the error means that the process, or the machine, has as many files
// open as it may.
func isNoFiles(err error) bool {
	return errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE)
}

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
		if s.giveUpFile() {
			continue
		}
		if clock.Sleep(s.ctx, s.clock, retryPause) != nil {
			return nil, err
		}
	}
}

// giveUpFile closes a file of the reserve, if one is left.
func (s *space) giveUpFile() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := len(s.reserve)
	if n == 0 {
		return false
	}
	s.closeFile(s.reserve[n-1])
	s.reserve = s.reserve[:n-1]
	return true
}

// fillReserve opens what the reserve lacks, and reports whether there are files for it. Any other
// error is for the store itself to meet.
func (s *space) fillReserve() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for len(s.reserve) < reserveFiles {
		f, err := s.fs.OpenDir(s.dir)
		if err != nil {
			return !isNoFiles(err)
		}
		s.reserve = append(s.reserve, f)
	}
	return true
}

// closeReserve closes the whole reserve, at the end.
func (s *space) closeReserve() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, f := range s.reserve {
		s.closeFile(f)
	}
	s.reserve = nil
}

func (s *space) closeFile(f vfs.File) {
	if err := f.Close(); err != nil {
		s.logger.Warn("close a file of the reserve", zap.Error(err))
	}
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
