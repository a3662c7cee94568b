package mirror

import (
	"context"
	"errors"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mirror/diff"
)

const (
	defaultVerifyBytes = 16 << 20
	// verifyPause is the pause after a whole comparison.
	verifyPause = 5 * time.Second
	// verifyStretch is how long pages are compared at one position. A store that counts the keys behind a page, as an answer
	// to Range says it, counts them once for all pages of a revision: 1,000,000 keys take longer than the page.
	verifyStretch = 10 * time.Second
	// verifyYield is how many times slower pages are compared while the target is behind by more than a batch.
	verifyYield = 10
	// pauseLeast is the pause after a page, so that a small store is not read all the time.
	pauseLeast = time.Millisecond
)

// verify compares source and target page by page, again and again, each page at a position of the last seconds. The pages are the target's, and the source is asked for the keys between their ends: an etcd
// counts all keys of the span that it is asked for, whatever the limit.
func (m *Mirror) verify(ctx context.Context) error {
	for pass := int64(1); ; pass++ {
		began := m.position()
		err := m.pass(ctx)
		if errors.Is(err, rpctypes.ErrUserEmpty) && m.isFrozen(ctx) {
			return nil // the target checks users by now, before it serves
		}
		if err == nil {
			err = m.retry(ctx, "note the comparison", func() error { return m.noteCompared(ctx) })
		}
		if errors.Is(err, errDone) {
			return nil
		}
		if err != nil {
			return err
		}
		m.mu.Lock()
		m.status.VerifiedFrom, m.status.Passes = began, pass
		m.mu.Unlock()
		if err := clock.Sleep(ctx, m.o.Clock, verifyPause); err != nil {
			return err
		}
	}
}

// pass compares all keys once.
func (m *Mirror) pass(ctx context.Context) error {
	var at stretch // a pass shows nothing that is older than it
	var keys int64
	err := m.retry(ctx, "count the target's keys", func() (err error) {
		keys, _, err = m.o.TargetData.Count(ctx, nil, nil, at.of(m))
		return err
	})
	if err != nil {
		return err
	}
	m.mu.Lock()
	m.status.PassKeys, m.status.PassOf = 0, keys
	m.mu.Unlock()
	for from := []byte(nil); ; {
		next, size, err := m.verifyPage(ctx, &at, from)
		if err != nil {
			return err
		}
		pause := max(pauseLeast, time.Duration(size)*time.Second/time.Duration(m.o.VerifyBytesPerSecond))
		if m.isBehind() {
			pause *= verifyYield
		}
		if err := clock.Sleep(ctx, m.o.Clock, pause); err != nil {
			return err
		}
		if from = next; from == nil {
			return nil
		}
	}
}

// noteCompared notes that a whole comparison has ended. The error is errDone if the target is being opened.
func (m *Mirror) noteCompared(ctx context.Context) error {
	if err := m.bringing(ctx); err != nil {
		return err
	}
	defer m.follow.unlock()
	if m.state.Compared {
		return nil
	}
	next := m.state
	next.Compared = true
	if err := writeJSON(m.o.FS, m.o.Dir, stateName, next); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.state.Compared, m.status.Compared = true, true
	return nil
}

// isBehind says whether more than a batch waits in the spool.
func (m *Mirror) isBehind() bool { return m.spool.Last()-m.position() > batchRevisions }

// stretch is the position of some pages, one after the other.
type stretch struct {
	position keyspace.Revision
	since    clock.Time
}

// of returns the position of the next page.
func (s *stretch) of(m *Mirror) keyspace.Revision {
	if now := m.o.Clock.Now(); s.position == 0 || now.Sub(s.since) >= verifyStretch {
		*s = stretch{m.position(), now}
	}
	return s.position
}

// verifyPage compares a page from a key on. It returns where the next one begins, nil behind
// the last, and the bytes that were compared.
func (m *Mirror) verifyPage(ctx context.Context, at *stretch, from []byte) (next []byte, size int, err error) {
	err = m.retry(ctx, "compare source and target", func() error {
		pos := at.of(m)
		page, err := m.o.TargetData.Page(ctx, from, nil, pos, diff.PageKeys)
		if err != nil {
			return err
		}
		if next, size = nil, 0; page.More && len(page.Keys) > 0 {
			next = append(append([]byte{}, page.Keys[len(page.Keys)-1].Key...), 0)
		}
		if size, err = m.comparePage(ctx, page, from, next, pos); errors.Is(err, diff.ErrCompacted) {
			at.position = 0
			return errBehindCompaction
		}
		return err
	})
	return next, size, err
}

// comparePage compares a page of the target, all of [from, end), with the source.
func (m *Mirror) comparePage(ctx context.Context, page diff.Page, from, end []byte, pos keyspace.Revision) (size int, err error) {
	c := diff.NewCursor(m.o.SourceData, from, end, pos)
	c.Expect(len(page.Keys))
	for i := range page.Keys {
		t := &page.Keys[i]
		k, err := c.Key(ctx)
		if err != nil {
			return 0, err
		}
		if d, equal := diff.Keys(k, t); !equal {
			return 0, different(d, pos)
		}
		c.Advance()
		size += len(t.Key) + len(t.Value) + eventBytes
	}
	k, err := c.Key(ctx)
	if err != nil {
		return 0, err
	}
	if k != nil {
		d, _ := diff.Keys(k, nil)
		return 0, different(d, pos)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.status.VerifiedKeys += int64(len(page.Keys))
	m.status.PassKeys += int64(len(page.Keys))
	m.status.VerifiedPages++
	return size, nil
}

// different is the error of a difference. A is the source, B the target.
func different(d diff.Difference, pos keyspace.Revision) error {
	return stopf("at revision %d source (A) and target (B) differ: %s", pos, d)
}
