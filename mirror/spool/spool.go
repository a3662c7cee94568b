package spool

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"sync"
	"syscall"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
)

const (
	// defaultSegmentBytes is the size at which the next segment begins.
	defaultSegmentBytes = 64 << 20
	// bufferBytes is how much is written at a time.
	bufferBytes = 1 << 20
	writes      = vfs.WriteCategoryUnspecified
	lockName    = "LOCK"
)

// Options say where a spool is.
type Options struct {
	FS  vfs.FS
	Dir string
	// Source is the cluster id of the source. A spool of another one is refused.
	Source uint64
	// After is the revision before the first one of a new spool. A spool that is there
	// already keeps its own.
	After keyspace.Revision
	// SegmentBytes is the size of a segment; 0 for 64 MiB.
	SegmentBytes int64
}

// segment is a file of the spool.
type segment struct {
	header
	// end is where its synced, whole part ends, last the revision that ends there.
	end  int64
	last keyspace.Revision
}

// Spool is an open spool. Append, End, Sync, Rollback and Close belong to one goroutine,
// the writer. All else may be called from any.
type Spool struct {
	o    Options
	lock io.Closer

	// Of the writer. Drop changes the list of segments beside it.
	f       vfs.File
	seq     uint64 // of the segment that is written to
	synced  int64  // where its synced, whole part ends
	buf     []byte
	written int64 // bytes of the segment that are in the file
	next    keyspace.Revision
	events  int // of the revision that is being written
	midway  bool
	failed  error // of a write; only Rollback helps
	whole   int64 // where the last whole revision ends in the segment

	mu       sync.Mutex
	segments []segment // the last one is written to
	changed  chan struct{}
	closed   bool
}

// ErrClosed is returned by readers of a spool that was closed.
var ErrClosed = errors.New("the spool is closed")

// IsNoSpace says that a write failed for lack of room on the disk. It succeeds once there
// is room and Rollback was called.
func IsNoSpace(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT)
}

// Open opens the spool in a directory, or makes it. It cuts what is not whole.
func Open(o Options) (*Spool, error) {
	if o.SegmentBytes == 0 {
		o.SegmentBytes = defaultSegmentBytes
	}
	if err := o.FS.MkdirAll(o.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("spool %s: %w", o.Dir, err)
	}
	if err := syncDir(o.FS, o.FS.PathDir(o.Dir)); err != nil {
		return nil, fmt.Errorf("spool %s: sync the directory that it is in: %w", o.Dir, err)
	}
	lock, err := o.FS.Lock(o.FS.PathJoin(o.Dir, lockName))
	if err != nil {
		return nil, fmt.Errorf("spool %s: another process uses it: %w", o.Dir, err)
	}
	s := &Spool{o: o, lock: lock, changed: make(chan struct{})}
	if err = s.recover(); err == nil {
		err = s.Rollback()
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("spool %s: %w", o.Dir, err), s.Close())
	}
	return s, nil
}

// errUnmade says that a segment's header was never synced, so nothing behind it was written.
var errUnmade = errors.New("the segment was not made to its end")

// recover finds the segments and where the last one ends.
func (s *Spool) recover() error {
	names, err := s.o.FS.List(s.o.Dir)
	if err != nil {
		return err
	}
	var seqs []uint64
	for _, name := range names {
		if seq, ok := parseName(name); ok {
			seqs = append(seqs, seq)
		}
	}
	slices.Sort(seqs)
	for i, seq := range seqs {
		err := s.recoverSegment(seq)
		if errors.Is(err, errUnmade) && i == len(seqs)-1 {
			return s.o.FS.Remove(s.path(seq))
		}
		if err != nil {
			return fmt.Errorf("%s: %w", segmentName(seq), err)
		}
	}
	return nil
}

// recoverSegment reads a segment and closes the one before it at the end that it states.
func (s *Spool) recoverSegment(seq uint64) error {
	h, size, err := s.readHeader(seq)
	if err != nil {
		return err
	}
	if h.seq != seq {
		return fmt.Errorf("it says that it is number %x", h.seq)
	}
	if h.source != s.o.Source {
		return fmt.Errorf("it was filled from cluster %x, and the source is cluster %x: give another --spool, or the endpoints of that source", h.source, s.o.Source)
	}
	if n := len(s.segments); n > 0 {
		p := &s.segments[n-1]
		if p.seq+1 != seq || p.end < h.prevEnd || p.last < h.after {
			return fmt.Errorf("segment %x is whole up to offset %d and revision %d; the next one says offset %d and revision %d", p.seq, p.end, p.last, h.prevEnd, h.after)
		}
		p.end, p.last = h.prevEnd, h.after
	}
	f, err := s.o.FS.Open(s.path(seq))
	if err != nil {
		return err
	}
	defer f.Close()
	sc := &scan{f: f, seq: seq, size: size, at: headerBytes}
	end, last, err := sc.wholeUpTo(h.after)
	if err != nil {
		return err
	}
	s.segments = append(s.segments, segment{header: h, end: end, last: last})
	return nil
}

func (s *Spool) readHeader(seq uint64) (header, int64, error) {
	f, err := s.o.FS.Open(s.path(seq))
	if err != nil {
		return header{}, 0, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return header{}, 0, err
	}
	b := make([]byte, headerBytes)
	if _, err := f.ReadAt(b, 0); err != nil && !errors.Is(err, io.EOF) {
		return header{}, 0, err
	}
	h, err := decodeHeader(b)
	switch {
	case errors.Is(err, errTorn) && info.Size() <= headerBytes:
		err = errUnmade
	case err != nil:
		err = fmt.Errorf("its header: %w", err)
	}
	return h, info.Size(), err
}

func (s *Spool) path(seq uint64) string { return s.o.FS.PathJoin(s.o.Dir, segmentName(seq)) }

// Last is the last revision that is synced as a whole.
func (s *Spool) Last() keyspace.Revision {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.segments[len(s.segments)-1].last
}

// First is the lowest revision that the spool may still hold.
func (s *Spool) First() keyspace.Revision {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.segments[0].after + 1
}

// Bytes is the size of all segments.
func (s *Spool) Bytes() (n int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, g := range s.segments {
		n += g.end
	}
	return n
}

// Append adds a piece of the next revision: events in order, each with its Mod and Sub.
// It keeps nothing of them.
func (s *Spool) Append(events []mvcc.Version) error {
	if s.failed != nil {
		return s.failed
	}
	rev := events[0].Mod
	if rev != s.next {
		return fmt.Errorf("spool %s: revision %d where revision %d is next", s.o.Dir, rev, s.next)
	}
	for i := range events {
		if e := &events[i]; e.Mod != rev || e.Sub != uint32(s.events+i) {
			panic(fmt.Sprintf("spool: event %d of revision %d among those of revision %d from number %d", e.Sub, e.Mod, rev, s.events))
		}
	}
	s.events += len(events)
	s.midway = true
	return s.add(Record{Revision: rev, Events: events})
}

// End ends the revision that was appended.
func (s *Spool) End() error {
	if s.failed != nil {
		return s.failed
	}
	if !s.midway {
		panic(fmt.Sprintf("spool: the end of revision %d without an event", s.next))
	}
	err := s.add(Record{Revision: s.next, End: true, Total: s.events})
	s.next, s.events, s.midway = s.next+1, 0, false
	s.whole = s.written + int64(len(s.buf))
	return err
}

// Skip adds revisions that the source has left out, from the next one up to upTo. None may have begun. However many they
// are, they take one record.
func (s *Spool) Skip(upTo keyspace.Revision) error {
	if s.midway {
		panic(fmt.Sprintf("spool: revision %d is skipped and has begun", s.next))
	}
	if s.failed != nil || s.next > upTo {
		return s.failed
	}
	err := s.add(Record{Revision: upTo, Gap: s.next, End: true})
	s.next = upTo + 1
	s.whole = s.written + int64(len(s.buf))
	return err
}

// Midway says that a revision has begun and not ended.
func (s *Spool) Midway() bool { return s.midway }

func (s *Spool) add(r Record) error {
	s.buf = appendRecord(s.buf, s.seq, s.written+int64(len(s.buf)), r)
	if len(s.buf) >= bufferBytes {
		return s.flush()
	}
	return nil
}

func (s *Spool) flush() error {
	n, err := s.f.Write(s.buf)
	s.written += int64(n)
	s.buf = s.buf[:0]
	if err != nil {
		s.failed = fmt.Errorf("spool %s: write %s: %w", s.o.Dir, segmentName(s.seq), err)
	}
	return s.failed
}

// Sync makes all whole revisions durable and shows them to readers. One that has begun goes
// on behind them.
func (s *Spool) Sync() error {
	if s.failed != nil || s.whole == s.synced {
		return s.failed
	}
	if err := s.flush(); err != nil {
		return err
	}
	if err := s.f.Sync(); err != nil {
		s.failed = fmt.Errorf("spool %s: sync %s: %w", s.o.Dir, segmentName(s.seq), err)
		return s.failed
	}
	s.mu.Lock()
	c := &s.segments[len(s.segments)-1]
	c.end, c.last = s.whole, s.next-1
	s.synced = s.whole
	s.wakeLocked()
	full := c.end >= s.o.SegmentBytes && !s.midway
	s.mu.Unlock()
	if full {
		return s.Rollback() // there is nothing to drop: it only begins the next segment
	}
	return nil
}

func (s *Spool) wakeLocked() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// Rollback drops everything behind Last and begins a new segment. It is the way on after
// an error and after a revision that broke off. If it fails it may be called again.
func (s *Spool) Rollback() error {
	h := header{seq: 1, source: s.o.Source, after: s.o.After}
	s.mu.Lock()
	if n := len(s.segments); n > 0 {
		c := s.segments[n-1]
		h = header{seq: c.seq + 1, source: s.o.Source, after: c.last, prevEnd: c.end}
	}
	s.mu.Unlock()
	s.failed = fmt.Errorf("spool %s: a rollback has failed", s.o.Dir)
	if s.f != nil {
		_ = s.f.Close() // what counts of it is synced
		s.f = nil
	}
	f, err := s.create(h)
	if err != nil {
		s.failed = fmt.Errorf("spool %s: make %s: %w", s.o.Dir, segmentName(h.seq), err)
		return s.failed
	}
	s.f, s.buf, s.written, s.next, s.events = f, s.buf[:0], headerBytes, h.after+1, 0
	s.midway, s.whole, s.failed = false, headerBytes, nil
	s.seq, s.synced = h.seq, headerBytes
	s.mu.Lock()
	s.segments = append(s.segments, segment{header: h, end: headerBytes, last: h.after})
	s.wakeLocked()
	s.mu.Unlock()
	return nil
}

// create makes the file of a segment, with its header and its name on the disk. On an error
// no part of it is left.
func (s *Spool) create(h header) (vfs.File, error) {
	f, err := s.o.FS.Create(s.path(h.seq), writes)
	if err != nil {
		return nil, err
	}
	_, err = f.Write(h.append(nil))
	if err == nil {
		err = f.Sync()
	}
	if err == nil {
		err = syncDir(s.o.FS, s.o.Dir)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close(), s.o.FS.Remove(s.path(h.seq)))
	}
	return f, nil
}

func syncDir(fs vfs.FS, dir string) error {
	d, err := fs.OpenDir(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// Drop removes segments that hold nothing above a revision.
func (s *Spool) Drop(upTo keyspace.Revision) error {
	for {
		s.mu.Lock()
		if len(s.segments) < 2 || s.segments[0].last > upTo {
			s.mu.Unlock()
			return nil
		}
		seq := s.segments[0].seq
		s.segments = slices.Clone(s.segments[1:])
		s.mu.Unlock()
		if err := s.o.FS.Remove(s.path(seq)); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("spool %s: remove %s: %w", s.o.Dir, segmentName(seq), err)
		}
	}
}

// Close releases the directory. What is not synced is lost.
func (s *Spool) Close() error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil
	}
	s.closed = true
	s.wakeLocked()
	s.mu.Unlock()
	var err error
	if s.f != nil {
		err = s.f.Close()
	}
	return errors.Join(err, s.lock.Close())
}

// Events is the number of events of the revision that has begun, 0 if none has.
func (s *Spool) Events() int { return s.events }

// Dirty says that something is not synced, or failed to be written, so that Rollback would
// change something.
func (s *Spool) Dirty() bool { return s.whole != s.synced || s.midway || s.failed != nil }
