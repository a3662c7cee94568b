package engine

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/cockroachdb/pebble/v2"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/wake"
	"github.com/skeindb/skein/keyspace"
)

// Corruption is a table that cannot be read as it was written.
type Corruption struct {
	Path string
	// Bounds hold every key that the table may hold, and all versions of each: which of them are lost
	// is not known.
	Bounds KeySpan
	Err    error
}

func (c *Corruption) String() string {
	return fmt.Sprintf("corruption in %s, keys %s: %v", c.Path, c.Bounds, c.Err)
}

// corruptions are tables on their way to the listener.
type corruptions struct {
	mu    sync.Mutex
	queue []Corruption          // guarded by mu: one for each table
	met   map[string]clock.Time // guarded by mu: when each bad table was met last, by its path
	wake  wake.Signal
}

// OnCorruption has f called, from one goroutine, when a read or a compaction meets a bad table
// which holds data of ranges alone, and for those that were met before the call. It is reported
// again whenever it is met. There is one listener.
func (e *Engine) OnCorruption(f func(Corruption)) {
	e.tasks.Go(func() {
		for {
			select {
			case <-e.corrupt.wake:
			case <-e.ctx.Done():
				return
			}
			e.corrupt.mu.Lock()
			queue := e.corrupt.queue
			e.corrupt.queue = nil
			e.corrupt.mu.Unlock()
			for i := range queue {
				f(queue[i])
			}
		}
	})
}

// dataCorruption decides what a bad table ends. The node's own records, the applied records and those
// of system groups cannot be given to one replica of a range. Without them the node does not know
// what it has applied.
func (e *Engine) dataCorruption(i pebble.DataCorruptionInfo) {
	first, last := i.Bounds.Start, i.Bounds.End
	c := Corruption{Path: i.Path, Bounds: KeySpan{Lower: bytes.Clone(first[:splitKey(first)]), Upper: bytes.Clone(last.Key)}, Err: i.Details}
	if last.IsUpperBoundFor(bytes.Compare, last.Key) || splitKey(last.Key) < len(last.Key) {
		c.Bounds.Upper = immediateSuccessor(nil, last.Key[:splitKey(last.Key)])
	}
	if !e.noteCorruption(&c) {
		return
	}
	// Pebble begins a compaction of level 0 that has failed anew at once. It holds no lock then,
	// and who reads a bad table has time. But an excise reads with the lock of the whole store: it
	// runs in an ingest, or in the flush that comes to the ingest.
	if !e.placing.Load() && e.excising.TryAcquire(1) {
		e.excising.Release(1)
		_ = clock.Sleep(e.ctx, e.clock, retryPause)
	}
}

// noteCorruption notes a bad table, and says whether it was met just before.
func (e *Engine) noteCorruption(c *Corruption) (again bool) {
	if c.Bounds.ownRecords() {
		e.fail(fmt.Errorf("engine: corruption in %s, keys %s: %w", c.Path, c.Bounds, c.Err))
		return false
	}
	e.corrupt.mu.Lock()
	defer e.corrupt.mu.Unlock()
	now := e.clock.Now()
	last, known := e.corrupt.met[c.Path]
	again = known && now.Sub(last) < retryPause
	if e.corrupt.met == nil {
		e.corrupt.met = make(map[string]clock.Time)
	}
	e.corrupt.met[c.Path] = now
	for j := range e.corrupt.queue {
		// Parts of one file are tables of their own.
		if q := &e.corrupt.queue[j]; q.Path == c.Path && bytes.Equal(q.Bounds.Lower, c.Bounds.Lower) {
			return again
		}
	}
	e.corrupt.queue = append(e.corrupt.queue, *c)
	e.corrupt.wake.Set()
	return again
}

// MayHold says whether the table may hold data of a group whose replica has the span.
func (c *Corruption) MayHold(g keyspace.GroupID, s keyspace.Span) bool {
	if c.Bounds.Overlaps(VersionedSpan(s)) || c.Bounds.Overlaps(GroupLocalSpan(g)) {
		return true
	}
	// The index of leases is the node's and divided by leases, not by ranges.
	first, _, err1 := DecodeLeaseKey(c.Bounds.Lower)
	last, _, err2 := DecodeLeaseKey(c.Bounds.Upper)
	if err1 != nil || err2 != nil {
		return c.Bounds.Overlaps(LeaseIndexSpan())
	}
	return first != last || c.Bounds.Overlaps(LeaseSpan(first, s))
}

// Drop removes everything within a bad table's bounds without reading it, and with it the table. Open
// snapshots lose it too, open iterators do not. The caller makes sure that nothing needs it and that
// nobody writes there meanwhile.
func (e *Engine) Drop(ctx context.Context, c *Corruption) error {
	if c.Bounds.ownRecords() {
		panic(fmt.Sprintf("engine: drop %s, which holds the node's own records", c.Bounds))
	}
	if err := e.excising.Acquire(ctx, excisingAll); err != nil {
		return fmt.Errorf("engine: drop %s: %w", c.Path, err)
	}
	defer e.excising.Release(excisingAll)
	if err := e.db.Excise(ctx, pebble.KeyRange{Start: c.Bounds.Lower, End: c.Bounds.Upper}); err != nil {
		return fmt.Errorf("engine: drop %s: %w", c.Path, err)
	}
	return nil
}

// IsCorruption says whether an error is that of a damaged file of the store.
func IsCorruption(err error) bool { return pebble.IsCorruptionError(err) }

// reported says whether the error of a compaction is that of a table which dataCorruption has
// given to the listener. Below level 0 Pebble leaves such a table alone for 5 minutes.
func reported(err error) bool {
	return IsCorruption(err) && pebble.ExtractDataCorruptionInfo(err) != nil
}

// ownRecords says whether the span touches what belongs to the node rather than to a range.
func (s KeySpan) ownRecords() bool {
	system := GroupLocalSpan(keyspace.PlacementGroup)
	return len(s.Lower) == 0 || s.Lower[0] < prefixGroupLocal || s.Overlaps(system)
}

// Overlaps says whether the spans have a key in common.
func (s KeySpan) Overlaps(o KeySpan) bool {
	return bytes.Compare(s.Lower, o.Upper) < 0 && bytes.Compare(o.Lower, s.Upper) < 0
}

// tableBorders are keys that no table has on both sides. So a bad table of user data is never
// one of the node's own records too.
var tableBorders = [][]byte{
	{prefixGroupLocal}, GroupLocalKey(keyspace.PlacementGroup, nil), {prefixVersioned}, {prefixLease},
}

// maxParts bounds into how many parts CutTables cuts the tables of versions, and those of records. Each
// flush may write a table for each part.
const maxParts = 32

// CutTables has tables end where ranges do, so that a bad table costs few ranges a replica. groups are the
// node's ranges, by their starts. If there are more than maxParts, several of them share a part. Tables
// that are there already stay as they are until a compaction writes them anew.
func (e *Engine) CutTables(groups []keyspace.GroupID, starts [][]byte) {
	borders := slices.Clone(tableBorders)
	for _, i := range thinned(len(starts)) {
		borders = append(borders, VersionedSpan(keyspace.Span{Start: starts[i]}).Lower)
	}
	groups = slices.Sorted(slices.Values(groups))
	for _, i := range thinned(len(groups)) {
		borders = append(borders, GroupLocalSpan(groups[i]).Lower)
	}
	slices.SortFunc(borders, bytes.Compare)
	borders = slices.CompactFunc(borders, bytes.Equal)
	e.borders.Store(&borders)
}

// thinned returns at most maxParts-1 of the numbers below n, evenly spread.
func thinned(n int) (some []int) {
	parts := min(n, maxParts)
	for p := 1; p < parts; p++ {
		some = append(some, p*n/parts)
	}
	return some
}

// bordered ends each table at the next border.
func (e *Engine) bordered(start []byte) (pebble.SpanPolicy, []byte, error) {
	borders := tableBorders
	if b := e.borders.Load(); b != nil {
		borders = *b
	}
	i, at := slices.BinarySearchFunc(borders, start, bytes.Compare)
	if at {
		i++
	}
	if i == len(borders) {
		return pebble.SpanPolicy{}, nil, nil
	}
	return pebble.SpanPolicy{}, borders[i], nil
}
