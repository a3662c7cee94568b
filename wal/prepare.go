package wal

import (
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/cockroachdb/errors/oserror"
	"go.uber.org/zap"
)

// spaceRetry is the interval of retries on a full disk.
const spaceRetry = time.Second

// errRefused says that MayAllocate refused a new file.
var errRefused = errors.New("wal: no space allowed for the log")

// isNoSpace reports whether the error means a full disk or an exhausted quota.
func isNoSpace(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) || errors.Is(err, errRefused)
}

// isNoFiles reports whether the error means that the process, or the machine, has as many files
// open as it may. It passes like a full disk.
func isNoFiles(err error) bool {
	return errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE)
}

// prepareLoop keeps the reserve of prepared segments filled and deletes excess dead
// files.
func (l *Log) prepareLoop() {
	timer := l.clock.NewTimer(spaceRetry)
	defer timer.Stop()
	for {
		for l.prepareOne() {
		}
		l.trim()
		timer.Stop()
		if l.Space() == SpaceFull {
			timer.Reset(spaceRetry)
		}
		select {
		case <-l.prepareSignal:
		case <-timer.C():
		case <-l.stop:
			return
		case <-l.fatal:
			return
		}
	}
}

// prepareOne prepares a segment if the reserve is not full, and reports whether to call
// it again.
func (l *Log) prepareOne() bool {
	l.mu.Lock()
	if l.err != nil || len(l.ready) >= l.opts.SpareSegments {
		l.mu.Unlock()
		return false
	}
	old := l.takeDeadLocked()
	l.mu.Unlock()
	s, err := l.prepare(old)
	if isNoSpace(err) || isNoFiles(err) {
		if l.space.Swap(uint32(SpaceFull)) != uint32(SpaceFull) {
			l.logger.Warn("no space for the wal's next segment", zap.Error(err))
		}
		l.metrics.full.Set(1)
		l.mu.Lock()
		l.work.Signal()
		l.mu.Unlock()
		return false
	}
	if err != nil {
		l.fail(err)
		return false
	}
	l.mu.Lock()
	l.ready = append(l.ready, s)
	enough := len(l.ready) >= l.opts.SpareSegments
	l.work.Signal()
	held := l.rewriteHeld
	l.mu.Unlock()
	if held {
		l.rewriteSignal.Set()
	}
	if enough && l.space.Swap(uint32(SpaceOK)) == uint32(SpaceFull) {
		l.logger.Info("the wal has space again")
	}
	if enough {
		l.metrics.full.Set(0)
	}
	l.gauges()
	return true
}

// prepare makes a segment from a dead one, or from new space if old is nil.
func (l *Log) prepare(old *segment) (*segment, error) {
	if old == nil && l.opts.MayAllocate != nil && !l.opts.MayAllocate(l.opts.SegmentBytes) {
		return nil, errRefused
	}
	l.mu.Lock()
	seq := l.nextSeq
	l.nextSeq++
	l.mu.Unlock()
	return l.dir.prepare(seq, l.opts.SegmentBytes, old)
}

// takeDeadLocked takes a dead segment of the right size that nobody reads, or returns
// nil.
func (l *Log) takeDeadLocked() *segment {
	for i, s := range l.dead {
		if s.size == l.opts.SegmentBytes && s.readers.Load() == 0 {
			l.dead = append(l.dead[:i:i], l.dead[i+1:]...)
			return s
		}
	}
	return nil
}

// trim deletes dead files of another size, and those by which all files together exceed
// the target.
func (l *Log) trim() {
	for {
		l.mu.Lock()
		var victim *segment
		files := int64(len(l.segs) + len(l.ready) + len(l.dead))
		for i, s := range l.dead {
			if s.readers.Load() == 0 && (s.size != l.opts.SegmentBytes || files*l.opts.SegmentBytes > l.opts.TargetBytes) {
				victim = s
				l.dead = append(l.dead[:i:i], l.dead[i+1:]...)
				break
			}
		}
		l.mu.Unlock()
		if victim == nil {
			return
		}
		err := victim.file.Close()
		if rerr := l.dir.fs.Remove(victim.path); err == nil && !oserror.IsNotExist(rerr) {
			err = rerr
		}
		if err != nil {
			// The file holds nothing needed; the next start treats it as dead again.
			l.logger.Warn("could not delete a dead segment", zap.Error(fmt.Errorf("%s: %w", victim.path, err)))
		}
	}
}
