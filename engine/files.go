package engine

import (
	"errors"
	"sync"
	"syscall"

	"github.com/cockroachdb/pebble/v2/vfs"
	"go.uber.org/zap"
)

// reserveFiles is how many files the store keeps open for what it cannot do without when the
// process may open no more: reads, and a new manifest, without which Pebble gives up.
const reserveFiles = 16

// isNoFiles reports whether the error means that the process, or the machine, has as many files
// open as it may.
func isNoFiles(err error) bool {
	return errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE)
}

// IsNoRoom reports whether the error may pass by itself: the disk is full, or the process may open no more
// files.
func IsNoRoom(err error) bool { return IsNoSpace(err) || isNoFiles(err) }

// fileReserve are open files, to be given up when the process can open no more.
type fileReserve struct {
	fs     vfs.FS
	dir    string
	logger *zap.Logger

	// mu is held over file operations, and nothing else is taken under it.
	mu    sync.Mutex
	files []vfs.File
}

// giveUp closes a file, if one is left.
func (r *fileReserve) giveUp() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := len(r.files)
	if n == 0 {
		return false
	}
	r.closeOne(r.files[n-1])
	r.files = r.files[:n-1]
	return true
}

// fill opens what is lacking, and reports whether there are files for it. Any other error is for
// the store itself to meet.
func (r *fileReserve) fill() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	for len(r.files) < reserveFiles {
		f, err := r.fs.OpenDir(r.dir)
		if err != nil {
			return !isNoFiles(err)
		}
		r.files = append(r.files, f)
	}
	return true
}

// close gives up all of them, at the end.
func (r *fileReserve) close() {
	for r.giveUp() {
	}
}

func (r *fileReserve) closeOne(f vfs.File) {
	if err := f.Close(); err != nil {
		r.logger.Warn("close a file of the reserve", zap.Error(err))
	}
}
