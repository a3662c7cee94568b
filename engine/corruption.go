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
	// Bounds hold every key that the table may hold: which of them are lost is not known.
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
	// The upper bound may be one of the keys.
	upper := append(bytes.Clone(i.Bounds.End.Key), 0)
	c := Corruption{Path: i.Path, Bounds: KeySpan{Lower: bytes.Clone(i.Bounds.Start), Upper: upper}, Err: i.Details}
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

// UserSpan returns the span of the user keys of which the table may hold versions, and whether it
// holds nothing else.
func (c *Corruption) UserSpan() (span keyspace.Span, only bool) {
	if !c.Bounds.Versioned() {
		return span, false
	}
	first, _, err := DecodeVersionedKey(c.Bounds.Lower)
	if err != nil {
		first = nil
	}
	span.Start = first
	// The upper bound is a key of the table, or the end of all versions, with a 0 behind it.
	if last, _, err := DecodeVersionedKey(c.Bounds.Upper[:len(c.Bounds.Upper)-1]); err == nil {
		span.End = append(last, 0)
	}
	return span, true
}

// DropVersions removes all versions of the span's keys without reading them, and with them the
// tables that hold nothing else. Open snapshots lose them too, open iterators do not. The caller
// makes sure that nothing needs them and that nobody writes there meanwhile.
func (e *Engine) DropVersions(ctx context.Context, s keyspace.Span) error {
	if err := e.excising.Acquire(ctx, excisingAll); err != nil {
		return fmt.Errorf("engine: drop %s: %w", s, err)
	}
	defer e.excising.Release(excisingAll)
	v := VersionedSpan(s)
	if err := e.db.Excise(ctx, pebble.KeyRange{Start: v.Lower, End: v.Upper}); err != nil {
		return fmt.Errorf("engine: drop %s: %w", s, err)
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
