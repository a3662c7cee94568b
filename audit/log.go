package audit

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
)

const (
	// maxQueued is how many entries wait at most, and maxBatch how many share a write and an fsync.
	maxQueued = 4096
	maxBatch  = 256
	// retryEvery is the pause after a failed write, and tellEvery how often the node's log is told of those.
	retryEvery = time.Second
	tellEvery  = 10 * time.Second
)

// Options configure a Log. All are required but Registry.
type Options struct {
	// Path is the file. It may be moved away at any time: then a new one is begun.
	Path string
	// Node is the name of the node.
	Node     string
	Clock    clock.Clock
	Logger   *zap.Logger
	Registry prometheus.Registerer
}

// Log writes entries to a file. A nil Log takes entries and writes nothing. All methods may be called from many
// goroutines, and none but Close waits for the disk.
type Log struct {
	o       Options
	queue   chan timed
	denied  sampler
	stop    chan struct{}
	done    chan struct{}
	stopped atomic.Bool
	// unsaid is how many entries were lost since an entry has said so.
	unsaid              atomic.Uint64
	lines, lost, failed prometheus.Counter
	open                func(path string) (file, error)

	// What follows belongs to Open, and then to the goroutine of run.
	f    file
	size int64  // of the file before the write under way
	prev string // the hash of the last line
	torn bool   // the last line was cut short, and a start has to follow
	told clock.Time
}

// file is what the log needs of an *os.File.
type file interface {
	io.Writer
	io.ReaderAt
	io.Closer
	Stat() (os.FileInfo, error)
	Sync() error
	Truncate(size int64) error
}

type timed struct {
	at time.Time
	e  Entry
}

// Open opens the file, makes it if it is not there, and goes on behind its last line.
func Open(o Options) (*Log, error) {
	return open(o, func(path string) (file, error) {
		return os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o600)
	})
}

func open(o Options, opener func(path string) (file, error)) (*Log, error) {
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	l := &Log{
		o: o, queue: make(chan timed, maxQueued), stop: make(chan struct{}), done: make(chan struct{}), open: opener,
		lines:  counter("skein_audit_lines_total", "Lines written to the audit log."),
		lost:   counter("skein_audit_lost_total", "Entries of the audit log that were lost: the disk was full or too slow for long."),
		failed: counter("skein_audit_write_errors_total", "Writes to the audit log that have failed; they are repeated."),
	}
	if o.Registry != nil {
		o.Registry.MustRegister(l.lines, l.lost, l.failed)
	}
	if err := l.reopen(); err != nil {
		return nil, fmt.Errorf("audit log: %w", err)
	}
	if err := l.write([]timed{{o.Clock.Wall(), Entry{Method: methodStart}}}); err != nil {
		_ = l.f.Close()
		return nil, fmt.Errorf("audit log %s: %w", o.Path, err)
	}
	go l.run()
	return l, nil
}

// Note takes an entry.
func (l *Log) Note(e *Entry) {
	if l == nil {
		return
	}
	if !l.stopped.Load() {
		select {
		case l.queue <- timed{l.o.Clock.Wall(), *e}:
			return
		default:
		}
	}
	l.lose(1)
}

// Deny takes an entry of a denial, unless that user has too many. An address stands for a user who is not known.
// What is left out is counted in an entry.
func (l *Log) Deny(e *Entry) {
	if l == nil {
		return
	}
	who := e.User
	if who == "" {
		who = e.From
	}
	if l.denied.take(clip(who), l.o.Clock.Now()) {
		l.Note(e)
	}
}

func (l *Log) lose(n int) {
	l.lost.Add(float64(n))
	l.unsaid.Add(uint64(n))
}

// Close writes what waits, and returns when that is done or ctx ends.
func (l *Log) Close(ctx context.Context) error {
	if l == nil {
		return nil
	}
	if !l.stopped.Swap(true) {
		close(l.stop)
	}
	select {
	case <-l.done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("audit log %s: %d entries are not written yet: %w", l.o.Path, len(l.queue), ctx.Err())
	}
}

func (l *Log) run() {
	defer close(l.done)
	defer func() {
		if l.f != nil {
			_ = l.f.Close()
		}
	}()
	tick := l.o.Clock.NewTimer(denialWindow)
	defer tick.Stop()
	for {
		var batch []timed
		stopping := false
		select {
		case e := <-l.queue:
			batch = append(batch, e)
		case <-tick.C():
			tick.Reset(denialWindow)
		case <-l.stop:
			stopping = true
		}
		for len(batch) < maxBatch || stopping {
			select {
			case e := <-l.queue:
				batch = append(batch, e)
				continue
			default:
			}
			break
		}
		for _, e := range l.denied.leftOut(l.o.Clock.Now(), stopping) {
			batch = append(batch, timed{l.o.Clock.Wall(), e})
		}
		l.keep(batch)
		if stopping {
			return
		}
	}
}

// keep writes a batch, again and again until it is written or the log is closed.
func (l *Log) keep(batch []timed) {
	for {
		lost := l.unsaid.Load()
		all := batch
		if lost > 0 {
			all = append(batch[:len(batch):len(batch)], timed{l.o.Clock.Wall(), Entry{Method: methodLost, What: fmt.Sprintf("count=%d", lost)}})
		}
		if len(all) == 0 {
			return
		}
		err := l.write(all)
		if err == nil {
			l.unsaid.Add(-lost)
			return
		}
		l.failed.Inc()
		if now := l.o.Clock.Now(); l.told == 0 || now.Sub(l.told) >= tellEvery {
			l.told = now
			l.o.Logger.Error("the audit log cannot be written: entries wait, and are lost once too many do; make room, or move the file",
				zap.String("file", l.o.Path), zap.Int("waiting", len(l.queue)+len(batch)), zap.Uint64("lost", lost), zap.Error(err))
		}
		retry := l.o.Clock.NewTimer(retryEvery)
		select {
		case <-retry.C():
		case <-l.stop:
			retry.Stop()
			// Once more, because it is the last time.
			if l.write(batch) != nil {
				l.lose(len(batch))
			}
			return
		}
	}
}

// write appends a batch and syncs it. A batch that fails is not in the file, unless it can neither be cut off.
func (l *Log) write(batch []timed) error {
	if l.f != nil && l.moved() {
		_ = l.f.Close()
		l.f = nil
	}
	if l.f == nil {
		if err := l.reopen(); err != nil {
			return err
		}
	}
	fi, err := l.f.Stat()
	if err != nil {
		return l.fail(err)
	}
	l.size = fi.Size() // less than before where it was copied and cut
	if l.torn && batch[0].e.Method != methodStart {
		batch = append([]timed{{l.o.Clock.Wall(), Entry{Method: methodStart}}}, batch...)
	}
	var buf bytes.Buffer
	prev := l.prev
	for i := range batch {
		text := encode(batch[i].at, l.o.Node, &batch[i].e, prev)
		prev = hashOf(text)
		buf.Write(text)
		buf.WriteByte('\n')
	}
	if _, err := l.f.Write(buf.Bytes()); err != nil {
		return l.fail(errors.Join(err, l.f.Truncate(l.size)))
	}
	if err := l.f.Sync(); err != nil {
		return l.fail(errors.Join(err, l.f.Truncate(l.size)))
	}
	l.prev, l.torn = prev, false
	l.lines.Add(float64(len(batch)))
	return nil
}

// fail closes the file: the next write opens it anew, and looks at how it ends.
func (l *Log) fail(err error) error {
	_ = l.f.Close()
	l.f = nil
	return err
}

// moved says whether the path does not lead to the open file any more.
func (l *Log) moved() bool {
	at, err := os.Stat(l.o.Path)
	if err != nil {
		return true
	}
	ours, err := l.f.Stat()
	return err != nil || !os.SameFile(at, ours)
}

// reopen opens the file, and takes the hash of its last line. An empty file goes on with the one before.
func (l *Log) reopen() error {
	f, err := l.open(l.o.Path)
	if err != nil {
		return err
	}
	if err := l.resume(f); err != nil {
		_ = f.Close()
		return fmt.Errorf("%s: %w", l.o.Path, err)
	}
	l.f = f
	return nil
}

// resume finds the last line of a file. A crash or a disk may have cut it short: then it is ended, and stays.
func (l *Log) resume(f file) error {
	fi, err := f.Stat()
	if err != nil || fi.Size() == 0 {
		return err
	}
	tail := make([]byte, min(fi.Size(), 2*maxLine))
	if _, err := f.ReadAt(tail, fi.Size()-int64(len(tail))); err != nil {
		return err
	}
	whole := tail[len(tail)-1] == '\n'
	if whole {
		tail = tail[:len(tail)-1]
	} else if _, err := f.Write([]byte{'\n'}); err != nil {
		return errors.Join(err, f.Truncate(fi.Size()))
	}
	last := tail[bytes.LastIndexByte(tail, '\n')+1:]
	if len(last) == len(tail) && int64(len(tail)) < fi.Size()-1 {
		return fmt.Errorf("its last line has more than %d bytes: it is no audit log", len(tail))
	}
	l.prev, l.torn = hashOf(last), l.torn || !whole
	return nil
}
