package engine

import (
	"context"
	"errors"
	"fmt"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/batchrepr"

	"github.com/skeindb/skein/clock"
)

// Iterator is Pebble's iterator. It shows one state of the store for its whole life and
// keeps that state's files, so close it soon. It is for one goroutine. SeekPrefixGE uses
// the bloom filters and then stays within the versions of one user key.
type Iterator = pebble.Iterator

// IterOptions select what an iterator shows.
type IterOptions struct {
	// Lower and Upper bound the keys, [Lower, Upper). An empty bound is open. They must
	// not change while the iterator is open.
	Lower, Upper []byte
	// Revisions lets the iterator skip blocks without a version of these revisions; nil
	// is no filter.
	Revisions *RevisionFilter
	// OnlyDurable shows only what would survive a crash at this moment. A Snapshot does
	// not support it.
	OnlyDurable bool
	// PointReads says that the iterator is for SeekPrefixGE on keys that are probably
	// absent: it then uses the bloom filters of the last level too.
	PointReads bool
}

func (o *IterOptions) pebble() *pebble.IterOptions {
	p := &pebble.IterOptions{
		KeyTypes:                  pebble.IterKeyTypePointsOnly,
		LowerBound:                o.Lower,
		UpperBound:                o.Upper,
		OnlyReadGuaranteedDurable: o.OnlyDurable,
		UseL6Filters:              o.PointReads,
	}
	if o.Revisions != nil {
		p.PointKeyFilters = []pebble.BlockPropertyFilter{o.Revisions.f}
	}
	return p
}

// Reader reads the store. An Engine shows the newest state at each call, a Snapshot one
// state.
type Reader interface {
	// Get returns a copy of the key's value; ok is false if there is none.
	Get(key []byte) (value []byte, ok bool, err error)
	// NewIter returns an iterator that is not positioned yet.
	NewIter(o IterOptions) (*Iterator, error)
}

// Writer accepts writes. Keys and values may be reused after the call.
type Writer interface {
	Set(key, value []byte) error
	Delete(key []byte) error
	// DeleteRange deletes the keys in [lower, upper).
	DeleteRange(lower, upper []byte) error
}

var (
	_ Reader = (*Engine)(nil)
	_ Reader = (*Snapshot)(nil)
	_ Writer = (*Batch)(nil)
)

// Get implements Reader on the newest state.
func (e *Engine) Get(key []byte) ([]byte, bool, error) { return getCopy(e.db, key) }

// NewIter implements Reader on the newest state.
func (e *Engine) NewIter(o IterOptions) (*Iterator, error) {
	it, err := e.db.NewIter(o.pebble())
	if err != nil {
		return nil, fmt.Errorf("engine: new iterator: %w", err)
	}
	return it, nil
}

func getCopy(r pebble.Reader, key []byte) ([]byte, bool, error) {
	v, closer, err := r.Get(key)
	if errors.Is(err, pebble.ErrNotFound) {
		return nil, false, nil
	}
	if err != nil {
		return nil, false, fmt.Errorf("engine: get %s: %w", FormatKey(key), err)
	}
	v = append([]byte(nil), v...)
	if err := closer.Close(); err != nil {
		return nil, false, fmt.Errorf("engine: get %s: %w", FormatKey(key), err)
	}
	return v, true, nil
}

// Batch collects writes that become visible together. It is for one goroutine.
type Batch struct {
	e *Engine
	b *pebble.Batch
}

// NewBatch returns an empty batch, which must be committed or closed.
func (e *Engine) NewBatch() *Batch { return &Batch{e: e, b: e.db.NewBatch()} }

// Set implements Writer.
func (b *Batch) Set(key, value []byte) error {
	if err := b.b.Set(key, value, nil); err != nil {
		return fmt.Errorf("engine: batch: set %s: %w", FormatKey(key), err)
	}
	return nil
}

// Delete implements Writer.
func (b *Batch) Delete(key []byte) error {
	if err := b.b.Delete(key, nil); err != nil {
		return fmt.Errorf("engine: batch: delete %s: %w", FormatKey(key), err)
	}
	return nil
}

// DeleteRange implements Writer. Within a batch it does not touch later writes.
func (b *Batch) DeleteRange(lower, upper []byte) error {
	if err := b.b.DeleteRange(lower, upper, nil); err != nil {
		return fmt.Errorf("engine: batch: delete %s: %w", KeySpan{lower, upper}, err)
	}
	return nil
}

// Savepoint is a point in a batch.
type Savepoint struct {
	bytes  int
	writes uint32
}

// Savepoint returns the point behind all writes so far.
func (b *Batch) Savepoint() Savepoint { return Savepoint{b.b.Len(), b.b.Count()} }

// RollBack takes back all writes behind the point. It reads the whole rest of the batch.
func (b *Batch) RollBack(to Savepoint) error {
	rest := b.b.Repr()[:to.bytes]
	batchrepr.SetCount(rest, to.writes)
	if err := b.b.SetRepr(rest); err != nil {
		return fmt.Errorf("engine: batch: roll back to %d bytes: %w", to.bytes, err)
	}
	return nil
}

// Len returns the size of the batch in bytes.
func (b *Batch) Len() int { return b.b.Len() }

// Empty reports whether nothing was written into the batch.
func (b *Batch) Empty() bool { return b.b.Empty() }

// Commit makes the writes visible, not durable, and frees the batch in any case. Batches
// become durable in the order of their commits. Commit waits while more data than the
// bound is unflushed. An error means that nothing of the batch was applied and that the
// store is unusable.
func (b *Batch) Commit() error {
	watch := clock.StartStopwatch()
	err := b.b.Commit(pebble.NoSync)
	b.e.metrics.commitSeconds.Observe(watch.Elapsed().Seconds())
	b.e.metrics.commitBytes.Add(float64(b.b.Len()))
	if cerr := b.b.Close(); err == nil {
		err = cerr
	}
	b.b = nil
	if err != nil {
		return fmt.Errorf("engine: commit: %w", err)
	}
	return nil
}

// Close drops a batch that is not committed. After Commit it does nothing.
func (b *Batch) Close() error {
	if b.b == nil {
		return nil
	}
	err := b.b.Close()
	b.b = nil
	return err
}

// Snapshot is one state of the store, for reading through many iterators and goroutines.
// A single iterator needs none, because it shows one state by itself.
//
// It is an "eventually file-only" snapshot of Pebble. A plain one would lose the keys
// that an ingest excises. A read that began before a raft snapshot replaced the replica
// would then see a hole instead of the old state.
type Snapshot struct {
	s       *pebble.EventuallyFileOnlySnapshot
	e       *Engine
	metrics *Metrics
}

// wholeStore is the key range that a Snapshot protects: all keys.
var wholeStore = []pebble.KeyRange{{Start: []byte{0x00}, End: []byte{0xff}}}

// NewSnapshot returns a snapshot of the newest state, which must be closed. It waits for
// an ingest that is under way.
func (e *Engine) NewSnapshot() *Snapshot {
	_ = e.excising.Acquire(context.Background(), 1) // its context never ends
	defer e.excising.Release(1)
	return &Snapshot{s: e.db.NewEventuallyFileOnlySnapshot(wholeStore), e: e, metrics: e.metrics}
}

// Get implements Reader.
func (s *Snapshot) Get(key []byte) ([]byte, bool, error) { return getCopy(s.s, key) }

// NewIter implements Reader. It panics where o asks for OnlyDurable.
func (s *Snapshot) NewIter(o IterOptions) (*Iterator, error) {
	it, err := s.s.NewIter(o.pebble())
	if err != nil {
		return nil, fmt.Errorf("engine: new iterator: %w", err)
	}
	return it, nil
}

// Close frees the snapshot. Close iterators made from it first. It waits for an ingest
// that is under way.
func (s *Snapshot) Close() error {
	// Pebble marks a snapshot as closed before it takes it off its list. A flush between the
	// two passes it over, and an ingest behind that flush would panic on it.
	_ = s.e.excising.Acquire(context.Background(), 1) // its context never ends
	defer s.e.excising.Release(1)
	if err := s.s.Close(); err != nil {
		return fmt.Errorf("engine: close snapshot: %w", err)
	}
	return nil
}
