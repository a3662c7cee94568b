package mirror

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mirror/spool"
)

const (
	// queuedParts are answers of the source that wait for the disk. The source waits too
	// if there are more.
	queuedParts = 16
	// syncParts is the largest number of answers in one fsync.
	syncParts = 128
	// watchAgainMost is the longest pause before the next watch: the source goes on meanwhile.
	watchAgainMost = time.Second
	// pieceBytes is the size of a record of the spool, if no event is larger.
	pieceBytes = 1 << 20
)

// receive keeps a watch open and writes what it brings to the spool.
func (m *Mirror) receive(ctx context.Context) error {
	pause := retryFirst
	for {
		before := m.spool.Last()
		err := m.receiveOnce(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		var c *CompactedError
		if errors.As(err, &c) {
			return stopf("the source has compacted revision %d, and the copy has everything up to revision %d only", c.Compacted, m.spool.Last())
		}
		if !transient(err) {
			return err
		}
		m.wait(fmt.Sprintf("watch the source: %v", err))
		if m.spool.Last() > before {
			pause = retryFirst
		}
		if err := clock.Sleep(ctx, m.o.Clock, pause); err != nil {
			return err
		}
		pause = min(2*pause, watchAgainMost)
		if !m.spool.Dirty() {
			continue
		}
		// A revision broke off, or the disk is or was full.
		if err := m.spool.Rollback(); err != nil && !spool.IsNoSpace(err) {
			return err
		}
	}
}

// receiveOnce follows one watch to its end. What came is in the spool then, as far as it was
// whole.
func (m *Mirror) receiveOnce(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	parts, ended := make(chan Part, queuedParts), make(chan error, 1)
	go func() {
		err := m.o.Source.Watch(ctx, m.spool.Last()+1, parts)
		close(parts)
		ended <- err
	}()
	next := m.spool.Last() + 1
	unsynced := 0
	var err error
	first := true
	for p := range parts {
		if err != nil {
			continue // until Watch has seen that it is cancelled
		}
		if first {
			first = false
			m.wait("")
		}
		if next, err = m.take(next, p); err == nil {
			unsynced++
			if len(parts) == 0 || unsynced >= syncParts {
				unsynced = 0
				err = m.spool.Sync()
			}
		}
		if err != nil {
			cancel()
		}
	}
	watch := <-ended
	if err != nil {
		return err
	}
	if err := m.spool.Sync(); err != nil {
		return err
	}
	return watch
}

// take writes an answer's events. It returns the revision that comes next.
func (m *Mirror) take(next keyspace.Revision, p Part) (keyspace.Revision, error) {
	if p.Cluster != m.state.Source {
		return next, elsewhere(p.Cluster, m.state.Source)
	}
	m.saw(p.Revision)
	sub := m.spool.Events()
	for at := 0; at < len(p.Events); {
		rev := p.Events[at].Mod
		if m.spool.Midway() && rev > next {
			if err := m.spool.End(); err != nil {
				return next, err
			}
			next, sub = next+1, 0
		}
		if p.Sparse && rev > next {
			if err := m.spool.Skip(rev - 1); err != nil {
				return next, err
			}
			next = rev
		}
		if rev != next {
			return next, stopf("the source's watch went on with revision %d where revision %d is next; it has lost a part of its history or was restored", rev, next)
		}
		end, size := at, 0
		for ; end < len(p.Events) && p.Events[end].Mod == rev && size < pieceBytes; end++ {
			e := &p.Events[end]
			e.Sub = uint32(sub)
			sub++
			size += len(e.Key) + len(e.Value)
		}
		if err := m.spool.Append(p.Events[at:end]); err != nil {
			return next, err
		}
		at = end
	}
	if !p.More && m.spool.Midway() {
		if err := m.spool.End(); err != nil {
			return next, err
		}
		next++
	}
	if p.Through >= next && !m.spool.Midway() {
		return p.Through + 1, m.spool.Skip(p.Through)
	}
	return next, nil
}
