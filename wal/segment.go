package wal

import (
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"strconv"
	"strings"
	"sync/atomic"

	"github.com/cockroachdb/pebble/v2/vfs"
)

const (
	segmentSuffix = ".wal"
	// tempSuffix marks a file that is being prepared and means nothing yet.
	tempSuffix = ".tmp"
)

// segment is one file of the log.
type segment struct {
	segmentHeader
	path string
	file vfs.File

	// end is where the next write goes; only the writer moves it. synced is how much of
	// the file is known to be on the disk.
	end    atomic.Int64
	synced int64
	// prevSeq and prevEnd are what the segment's marks state about the previous one.
	prevSeq uint64
	prevEnd int64
	// readers counts the reads under way. None begins once no group needs the segment, so
	// a dead one without readers may be overwritten.
	readers atomic.Int32
	// pinned is guarded by Log.pins.
	pinned pinList
}

func segmentName(seq uint64, suffix string) string { return fmt.Sprintf("%016x%s", seq, suffix) }

// parseSegmentName returns the sequence number in the name of a segment file.
func parseSegmentName(name string) (seq uint64, ok bool) {
	digits, ok := strings.CutSuffix(name, segmentSuffix)
	if !ok || len(digits) != 16 {
		return 0, false
	}
	seq, err := strconv.ParseUint(digits, 16, 64)
	return seq, err == nil
}

// newSalt draws a salt that is not zero, because unused space is zeros.
func newSalt() (uint64, error) {
	for {
		var b [8]byte
		if _, err := rand.Read(b[:]); err != nil {
			return 0, fmt.Errorf("wal: draw a segment's salt: %w", err)
		}
		if s := binary.LittleEndian.Uint64(b[:]); s != 0 {
			return s, nil
		}
	}
}

// directory is the directory in which segments are made.
type directory struct {
	fs  vfs.FS
	dir string
	// salt is newSalt, except in tests that compare bytes.
	salt func() (uint64, error)
	// held is the directory, kept open: a segment that is used again takes no new file. It is nil
	// where nothing keeps it open.
	held vfs.File
}

func (d *directory) path(seq uint64, suffix string) string {
	return d.fs.PathJoin(d.dir, segmentName(seq, suffix))
}

func (d *directory) sync() error {
	if d.held != nil {
		if err := d.held.Sync(); err != nil {
			return fmt.Errorf("wal: sync directory %s: %w", d.dir, err)
		}
		return nil
	}
	f, err := d.fs.OpenDir(d.dir)
	if err != nil {
		return fmt.Errorf("wal: open directory %s: %w", d.dir, err)
	}
	err = f.Sync()
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return fmt.Errorf("wal: sync directory %s: %w", d.dir, err)
	}
	return nil
}

// prepare makes a segment that is ready for writing: it has its final name, is synced,
// and contains nothing that verifies. old is a dead segment of the same size whose file
// is reused, or nil. After a crash in prepare the file has its old name and contents,
// or has a name that recovery ignores, or is ready.
func (d *directory) prepare(seq uint64, size int64, old *segment) (_ *segment, err error) {
	s := &segment{path: d.path(seq, segmentSuffix)}
	s.seq, s.size = seq, size
	if s.salt, err = d.salt(); err != nil {
		return nil, err
	}
	temp := d.path(seq, tempSuffix)
	if old != nil {
		s.file = old.file
		if err = d.fs.Rename(old.path, temp); err == nil {
			// The old name must be gone for good before the old header is overwritten.
			err = d.sync()
		}
	} else if s.file, err = d.fs.OpenReadWrite(temp, vfs.WriteCategoryUnspecified); err == nil {
		err = writeZeros(s.file, headerLen, size)
	}
	if err == nil {
		_, err = s.file.WriteAt(s.encode(), 0)
	}
	if err == nil {
		err = s.file.Sync()
	}
	if err == nil {
		err = d.fs.Rename(temp, s.path)
	}
	if err == nil {
		err = d.sync()
	}
	if err != nil {
		if s.file != nil {
			_ = s.file.Close()
		}
		// The remains take space and mean nothing.
		_ = d.fs.Remove(temp)
		_ = d.fs.Remove(s.path)
		return nil, fmt.Errorf("wal: prepare segment %s: %w", s.path, err)
	}
	s.end.Store(headerLen)
	s.synced = headerLen
	return s, nil
}

// writeZeros fills [from, to). Unwritten or missing blocks would make every fsync of the
// log a file system transaction, which could fail on a full disk.
func writeZeros(f vfs.File, from, to int64) error {
	zeros := make([]byte, min(to-from, 1<<20))
	for at := from; at < to; at += int64(len(zeros)) {
		if _, err := f.WriteAt(zeros[:min(int64(len(zeros)), to-at)], at); err != nil {
			return err
		}
	}
	return nil
}
