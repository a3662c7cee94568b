package rangefeed

import (
	"bytes"
	"cmp"
	"fmt"
	"math"
	"slices"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/rangeapi"
)

// maxHistoryBytes bounds what a page of history may be asked to hold.
const maxHistoryBytes = 16 << 20

// History returns a page of events from the store. Any replica can answer that has applied
// as much as the asker has seen. The replica's lock is not held.
func (fs *Feeds) History(q *rangeapi.HistoryRequest) (*rangeapi.HistoryPage, error) {
	fs.mu.Lock()
	v, err := fs.src.View(q.Generation, q.From)
	fs.mu.Unlock()
	switch {
	case err != nil:
		return nil, err
	case !v.Span.Covers(q.Span):
		return nil, kverror.New(kverror.WrongRange, "history of %s, range %s is %s", q.Span, fs.id, v.Span)
	case !v.Position.Reaches(q.Seen):
		return nil, kverror.New(kverror.Busy, "range %s is at %v here, not at %v", fs.id, v.Position, q.Seen)
	}
	p := &rangeapi.HistoryPage{}
	o := mvcc.HistoryOptions{Span: q.Span, From: q.From, To: q.To, MaxBytes: min(q.MaxBytes, maxHistoryBytes)}
	var next place
	p.Events, next, err = fs.history(q.Generation, o, pageOptions{fromKey: q.FromKey, prev: q.Prev, compacted: q.Compacted})
	p.Next, p.NextKey = next.rev, next.key
	return p, err
}

// pageOptions say what a page of history is to hold beyond mvcc.HistoryOptions.
type pageOptions struct {
	// fromKey, if not nil, is where the page begins within revision From.
	fromKey []byte
	// prev asks for the version before each event, unless the revision before is below
	// compacted.
	prev      bool
	compacted keyspace.Revision
}

// history reads a page of events from the store, in the order of revisions, and returns
// where the next one begins. The page ends at o.MaxBytes, versions before the events
// included. It ends within a revision only if it holds no other one. It fails if the range
// has changed, or if events were removed meanwhile.
func (fs *Feeds) history(g keyspace.Generation, o mvcc.HistoryOptions, p pageOptions) (events []rangeapi.Event, next place, err error) {
	next.rev, next.key, err = mvcc.HistoryPages(fs.s.cfg.Engine, o, p.fromKey, func(v *mvcc.Version) error {
		events = append(events, rangeapi.Event{Version: *v})
		return nil
	})
	if err == nil && p.prev {
		events, next, err = fs.withBefore(g, events, next, o.MaxBytes, p.compacted)
	}
	if err != nil {
		return nil, place{}, fmt.Errorf("rangefeed: range %s: %w", fs.id, err)
	}
	fs.s.cfg.Metrics.read.Add(float64(len(events)))
	return events, next, fs.src.StillShows(g, o.From)
}

// withBefore finds the versions before the events of a page. If these make it too large,
// the page ends earlier.
func (fs *Feeds) withBefore(g keyspace.Generation, events []rangeapi.Event, next place, maxBytes int64, compacted keyspace.Revision) ([]rangeapi.Event, place, error) {
	slices.SortFunc(events, func(a, b rangeapi.Event) int {
		return cmp.Or(cmp.Compare(a.Mod, b.Mod), bytes.Compare(a.Key, b.Key))
	})
	n, err := fs.lookBefore(g, events, compacted, maxBytes)
	if err == nil && n < len(events) {
		n, err = fs.wholeKey(g, events, n, compacted)
	}
	if err != nil || n == len(events) {
		return events, next, err
	}
	next = place{rev: events[n].Mod, key: events[n].Key}
	if events[0].Mod != next.rev {
		n = slices.IndexFunc(events, func(e rangeapi.Event) bool { return e.Mod == next.rev })
		next.key = nil
	}
	return events[:n:n], next, nil
}

// wholeKey moves the end of a page away from between events of one key and revision, since
// pages go on at a key. n is the number of events on the page. The page ends before those
// events, or behind them if they are its first.
func (fs *Feeds) wholeKey(g keyspace.Generation, events []rangeapi.Event, n int, compacted keyspace.Revision) (int, error) {
	one := func(a, b *rangeapi.Event) bool { return a.Mod == b.Mod && bytes.Equal(a.Key, b.Key) }
	start := n
	for start > 0 && one(&events[start-1], &events[n]) {
		start--
	}
	if start > 0 {
		return start, nil
	}
	end := n
	for end < len(events) && one(&events[0], &events[end]) {
		end++
	}
	_, err := fs.lookBefore(g, events[n:end], compacted, math.MaxInt64)
	return end, err
}

// lookBefore finds the version before each of the first n events, as etcd does. It fails if the
// range is not of the generation any more: a child that was split off, or a compaction of its
// own, may have taken the versions from the store. An event that creates its key has none. An event whose revision before is below the compacted
// revision gets none; that is the higher of the given one and the one known here. The n
// events take at most maxBytes with those versions, or n is 1.
func (fs *Feeds) lookBefore(gen keyspace.Generation, events []rangeapi.Event, known keyspace.Revision, maxBytes int64) (n int, err error) {
	compacted, err := fs.src.Compacted(gen)
	if err != nil {
		return 0, err
	}
	g, err := mvcc.NewGetter(fs.s.cfg.Engine)
	if err != nil {
		return 0, err
	}
	size := int64(0)
	for ; n < len(events); n++ {
		e := &events[n]
		if err := before(g, e, max(known, compacted)); err != nil {
			_ = g.Close() // the first error says more
			return 0, err
		}
		if size += e.Bytes(); size > maxBytes && n > 0 {
			e.Looked, e.Prev = false, nil
			break
		}
	}
	// If a compaction came meanwhile, an older version may have been found instead of one
	// that it removed.
	if compacted, err = fs.src.Compacted(gen); err != nil {
		_ = g.Close() // the first error says more
		return 0, err
	}
	for i := range events[:n] {
		if events[i].Mod-1 < max(known, compacted) {
			events[i].Prev = nil
		}
	}
	return n, g.Close()
}

// before finds the version before an event.
func before(g *mvcc.Getter, e *rangeapi.Event, compacted keyspace.Revision) error {
	e.Looked = true
	if !e.Tombstone && e.Create == e.Mod || e.Mod-1 < compacted {
		return nil
	}
	v, ok, err := g.Get(e.Key, e.Mod-1)
	if ok && err == nil && !v.Tombstone {
		prev := v.Clone()
		e.Prev = &prev
	}
	return err
}
