package wal

import (
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/cockroachdb/errors/oserror"
	"go.uber.org/zap"
)

// spaceRetry is how often a full disk is tried again.
const spaceRetry = time.Second

// errRefused is why no new file is made where MayTake says no.
var errRefused = errors.New("wal: no room is left to the log")

// isNoSpace says whether the error means a full disk or an exhausted quota.
func isNoSpace(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) || errors.Is(err, errRefused)
}

// prepareLoop keeps the reserve of prepared segments, and deletes dead files that
// are too many.
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
		case <-l.kickPrep:
		case <-timer.C():
		case <-l.stop:
			return
		case <-l.fatal:
			return
		}
	}
}

// prepareOne prepares a segment if the reserve is not full, and returns whether it
// should be called again.
func (l *Log) prepareOne() bool {
	l.mu.Lock()
	if l.err != nil || len(l.ready) >= l.opts.SpareSegments {
		l.mu.Unlock()
		return false
	}
	old := l.takeDeadLocked()
	l.mu.Unlock()
	s, err := l.prepare(old)
	if isNoSpace(err) {
		if l.space.Swap(uint32(SpaceFull)) != uint32(SpaceFull) {
			l.logger.Warn("no room for the next segment of the log", zap.Error(err))
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
	l.mu.Unlock()
	if enough && l.space.Swap(uint32(SpaceOK)) == uint32(SpaceFull) {
		l.logger.Info("there is room for the log again")
	}
	if enough {
		l.metrics.full.Set(0)
	}
	l.gauges()
	return true
}

// prepare makes a segment of a dead one, or where old is nil of new room.
func (l *Log) prepare(old *segment) (*segment, error) {
	if old == nil && l.opts.MayTake != nil && !l.opts.MayTake(l.opts.SegmentBytes) {
		return nil, errRefused
	}
	l.mu.Lock()
	seq := l.nextSeq
	l.nextSeq++
	l.mu.Unlock()
	return l.dir.prepare(seq, l.opts.SegmentBytes, old)
}

// takeDeadLocked takes a dead segment of the right size that nobody reads, or nil.
func (l *Log) takeDeadLocked() *segment {
	for i, s := range l.dead {
		if s.size == l.opts.SegmentBytes && s.readers.Load() == 0 {
			l.dead = append(l.dead[:i:i], l.dead[i+1:]...)
			return s
		}
	}
	return nil
}

// trim deletes dead files: those of another size, and what would make all files
// together longer than the log is meant to be.
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
			// The file holds nothing; it stays a dead one for the next start.
			l.logger.Warn("delete a dead segment", zap.Error(fmt.Errorf("%s: %w", victim.path, err)))
		}
	}
}
