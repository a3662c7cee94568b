package wal

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"

	"github.com/cockroachdb/pebble/v2/vfs"
	"go.uber.org/zap"

	"github.com/skeindb/skein/internal/wake"
	"github.com/skeindb/skein/keyspace"
)

// Open recovers the log in opts.Dir and starts it; it creates the directory if there is
// none. Open cuts a torn tail and returns a *CorruptionError for damage to synced data.
// Everything that the views show after Open is durable.
func Open(opts Options) (*Log, error) { return open(opts, newSalt) }

func open(opts Options, salt func() (uint64, error)) (_ *Log, err error) {
	if opts, err = opts.withDefaults(); err != nil {
		return nil, err
	}
	l := newLog(opts, salt)
	if err := l.recover(); err != nil {
		return nil, errors.Join(err, l.closeFiles())
	}
	l.gauges()
	l.metrics.targetBytes.Set(float64(opts.TargetBytes))
	active := l.segs[len(l.segs)-1]
	w := &writer{l: l, active: active, planned: map[*GroupLog]run{}}
	go w.run()
	l.wait.Go(l.prepareLoop)
	l.wait.Go(l.rewriteLoop)
	return l, nil
}

func newLog(opts Options, salt func() (uint64, error)) *Log {
	l := &Log{
		opts: opts, metrics: opts.Metrics, logger: opts.Logger, clock: opts.Clock,
		dir:   directory{fs: opts.FS, dir: opts.Dir, salt: salt},
		cache: newCache(opts.EntryCacheBytes), groups: map[keyspace.GroupID]*GroupLog{},
		fatal: make(chan struct{}), writerDone: make(chan struct{}), stop: make(chan struct{}),
		prepareSignal: wake.New(), rewriteSignal: wake.New(), nextSeq: 1,
	}
	l.work = sync.NewCond(&l.mu)
	return l
}

func (l *Log) recover() error {
	begin := l.clock.Now()
	files, err := l.list()
	// From here on closeFiles finds all of them.
	l.dead = files
	if err != nil {
		return err
	}
	buf := make([]byte, 0)
	last, found, err := l.findLast(files, &buf)
	if err != nil {
		return err
	}
	if last == nil {
		return l.first()
	}
	chain, err := l.chain(files, last, found)
	if err != nil {
		return err
	}
	l.dead = slices.DeleteFunc(files, func(s *segment) bool { return slices.Contains(chain, s) })
	l.segs = chain
	l.reclaim.announced = found.lastMark.oldest
	var bytes int64
	for i, s := range chain {
		var next uint64
		if i+1 < len(chain) {
			next = chain[i+1].seq
		}
		if err := l.replay(s, &buf, next, s.seq >= last.seq); err != nil {
			return err
		}
		bytes += s.end.Load()
	}
	for id, g := range l.groups {
		if !g.exists && !g.removed {
			delete(l.groups, id)
		} else if err := g.finishRecovery(); err != nil {
			return &CorruptionError{l.opts.Dir, 0, err.Error()}
		}
	}
	l.logger.Info("log recovered", zap.Int("groups", len(l.groups)), zap.Int("segments", len(chain)),
		zap.Int64("bytes", bytes), zap.Duration("took", l.clock.Now().Sub(begin)))
	return nil
}

// list opens all segment files in ascending order and deletes the remains of interrupted
// preparations.
func (l *Log) list() ([]*segment, error) {
	if err := l.opts.FS.MkdirAll(l.opts.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("wal: make directory %s: %w", l.opts.Dir, err)
	}
	// After a crash a new directory may be missing unless its parent was synced.
	parent := directory{fs: l.opts.FS, dir: l.opts.FS.PathDir(l.opts.Dir)}
	if err := parent.sync(); err != nil {
		return nil, err
	}
	var err error
	if l.dir.held, err = l.opts.FS.OpenDir(l.opts.Dir); err != nil {
		return nil, fmt.Errorf("wal: open directory %s: %w", l.opts.Dir, err)
	}
	names, err := l.opts.FS.List(l.opts.Dir)
	if err != nil {
		return nil, fmt.Errorf("wal: list directory %s: %w", l.opts.Dir, err)
	}
	slices.Sort(names)
	var files []*segment
	for _, name := range names {
		path := l.opts.FS.PathJoin(l.opts.Dir, name)
		if strings.HasSuffix(name, tempSuffix) {
			if err := l.opts.FS.Remove(path); err != nil {
				return files, fmt.Errorf("wal: delete %s: %w", path, err)
			}
			continue
		}
		seq, ok := parseSegmentName(name)
		if !ok {
			continue
		}
		s, err := openSegment(l.opts.FS, path, seq)
		if err != nil {
			return files, err
		}
		files = append(files, s)
		l.nextSeq = seq + 1
	}
	return files, nil
}

func openSegment(fs vfs.FS, path string, seq uint64) (_ *segment, err error) {
	f, err := fs.OpenReadWrite(path, vfs.WriteCategoryUnspecified)
	if err != nil {
		return nil, fmt.Errorf("wal: open %s: %w", path, err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.Close())
		}
	}()
	info, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("wal: stat %s: %w", path, err)
	}
	b := make([]byte, min(headerLen, info.Size()))
	if err := readFull(f, b, 0, path); err != nil {
		return nil, err
	}
	h, err := decodeSegmentHeader(b)
	if other := (*keyspace.VersionError)(nil); errors.As(err, &other) {
		return nil, fmt.Errorf("wal: open %s: %w", path, err)
	} else if err != nil {
		return nil, &CorruptionError{path, 0, err.Error()}
	}
	if h.seq != seq {
		return nil, &CorruptionError{path, 0, fmt.Sprintf("sequence number %d, want %d", h.seq, seq)}
	}
	// The file had its size before its name: no crash makes it shorter.
	if size := info.Size(); size < h.size {
		return nil, &CorruptionError{path, size, fmt.Sprintf("end of file; the segment has %d bytes", h.size)}
	}
	return &segment{segmentHeader: h, path: path, file: f}, nil
}

func readFull(f vfs.File, b []byte, off int64, path string) error {
	if len(b) == 0 {
		return nil
	}
	if n, err := f.ReadAt(b, off); err != nil && !(errors.Is(err, io.EOF) && n == len(b)) {
		return fmt.Errorf("wal: read %s at %d: %w", path, off, err)
	}
	return nil
}

// load reads a whole segment into *buf, which it enlarges as needed.
func (s *segment) load(buf *[]byte) error {
	if int64(cap(*buf)) < s.size {
		*buf = make([]byte, s.size)
	}
	*buf = (*buf)[:s.size]
	return readFull(s.file, *buf, 0, s.path)
}

// findLast returns the newest segment that was written to and its contents, or nil if
// there is none. Later segments were only prepared, or were written to without a sync.
func (l *Log) findLast(files []*segment, buf *[]byte) (*segment, scanned, error) {
	for _, s := range slices.Backward(files) {
		if err := s.load(buf); err != nil {
			return nil, scanned{}, err
		}
		found := scan(*buf, s.segmentHeader, s.size)
		proven, _ := provenEnd(*buf, s.segmentHeader)
		if proven > found.end {
			return nil, scanned{}, &CorruptionError{s.path, found.bad, fmt.Sprintf("%v; synced up to %d", found.why, proven)}
		}
		if found.hasMark {
			return s, found, nil
		}
	}
	return nil, scanned{}, nil
}

// first makes the first segment of a log that is new, or whose files are lost.
func (l *Log) first() error {
	l.beganEmpty = true
	// Existing files hold no records.
	s, err := l.dir.prepare(l.nextSeq, l.opts.SegmentBytes, nil)
	if err != nil {
		return err
	}
	l.nextSeq++
	l.segs = []*segment{s}
	l.reclaim.announced = s.seq
	return nil
}

// chain returns the segments of the log in order. It follows what each states about the
// previous one, from the newest back to the oldest that belongs to the log.
func (l *Log) chain(files []*segment, last *segment, found scanned) ([]*segment, error) {
	bySeq := make(map[uint64]*segment, len(files))
	for _, s := range files {
		bySeq[s.seq] = s
	}
	oldest := found.lastMark.oldest
	last.end.Store(found.end)
	last.prevSeq, last.prevEnd = found.firstMark.prevSeq, found.firstMark.prevEnd
	var chain []*segment
	if next := found.lastMark.next; next != 0 {
		// A sealed segment is never the active one. The segment that it names existed
		// before the seal was written, and is still empty.
		active := bySeq[next]
		if active == nil || next <= last.seq {
			return nil, &CorruptionError{
				l.dir.path(next, segmentSuffix), 0, fmt.Sprintf("the segment behind %s is missing, which names it", last.path),
			}
		}
		active.end.Store(headerLen)
		active.prevSeq, active.prevEnd = last.seq, found.end
		chain = append(chain, active)
	}
	chain = append(chain, last)
	for s := last; s.seq > oldest; {
		prev := bySeq[s.prevSeq]
		if prev == nil || prev.seq >= s.seq {
			return nil, &CorruptionError{
				l.dir.path(s.prevSeq, segmentSuffix), 0,
				fmt.Sprintf("the segment before %s is missing; the log begins at segment %d", s.path, oldest),
			}
		}
		prev.end.Store(s.prevEnd)
		if prev.size < s.prevEnd {
			return nil, &CorruptionError{prev.path, prev.size, fmt.Sprintf("end of file; synced up to %d", s.prevEnd)}
		}
		b := make([]byte, min(markLen, prev.size-headerLen))
		if err := readFull(prev.file, b, headerLen, prev.path); err != nil {
			return nil, err
		}
		m, err := firstMark(b, prev.segmentHeader)
		if err != nil {
			return nil, &CorruptionError{prev.path, headerLen, fmt.Sprintf("%v; synced up to %d", err, s.prevEnd)}
		}
		prev.prevSeq, prev.prevEnd = m.prevSeq, m.prevEnd
		chain = append(chain, prev)
		s = prev
	}
	slices.Reverse(chain)
	return chain, nil
}

func firstMark(b []byte, h segmentHeader) (mark, error) {
	r, err := verify(b, h, headerLen)
	if err != nil {
		return mark{}, err
	}
	if kind(r[16]) != kindMark {
		return mark{}, errors.New("segment does not begin with a mark")
	}
	return decodeMark(r, headerLen)
}

// replay verifies a segment up to its end and applies its records. The segment's seal
// has to name next, the segment behind it; next is 0 for the active segment, which has
// no seal. newest says that the segment is not known to be synced.
func (l *Log) replay(s *segment, buf *[]byte, next uint64, newest bool) error {
	if err := s.load(buf); err != nil {
		return err
	}
	end := s.end.Load()
	found := scan(*buf, s.segmentHeader, end)
	if found.end != end {
		return &CorruptionError{s.path, found.bad, fmt.Sprintf("%v; synced up to %d", found.why, end)}
	}
	if found.lastMark.next != next {
		return &CorruptionError{s.path, end, fmt.Sprintf("names segment %d behind it, found %d", found.lastMark.next, next)}
	}
	if next == 0 && end > s.size-markLen {
		return &CorruptionError{s.path, end, "the segment is full and not sealed"}
	}
	err := eachRecord(*buf, end, func(r record) error {
		return l.groupLocked(r.group).replay(&r, s)
	})
	if err != nil {
		return &CorruptionError{s.path, headerLen, err.Error()}
	}
	s.synced = end
	if newest {
		return l.makeTailDurable(s, *buf)
	}
	return nil
}

// makeTailDurable makes the recovered contents of the newest segment durable. Bytes that
// no mark calls synced may be in the page cache only, and clean there after a failed
// fsync; so they are written again before they are synced. It wipes bytes behind the
// end that a later recovery could mistake for a record.
func (l *Log) makeTailDurable(s *segment, b []byte) error {
	proven, saltEnd := provenEnd(b, s.segmentHeader)
	end := s.end.Load()
	var err error
	if from := max(proven, headerLen); from < end {
		_, err = s.file.WriteAt(b[from:end], from)
	}
	if err == nil && saltEnd > end {
		l.logger.Warn("cut a torn tail", zap.String("file", s.path), zap.Int64("end", end))
		err = writeZeros(s.file, end, saltEnd)
	}
	if err == nil {
		err = s.file.Sync()
	}
	if err != nil {
		return fmt.Errorf("wal: make the end of %s durable: %w", s.path, err)
	}
	return nil
}
