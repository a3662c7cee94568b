package engine

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/sstable"
	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/keyspace"
)

// stagingName is the directory within the store's in which the tables of raft snapshots
// arrive.
const stagingName = "staging"

// ErrBadTables says that tables are not a complete export of the group and the spans.
var ErrBadTables = errors.New("engine: tables are no export of this group")

// ErrNoSpace refuses additional data while the disk is full.
var ErrNoSpace = errors.New("engine: disk space is low")

// Ingest is a set of tables that replaces the store's data of a group.
type Ingest struct {
	Group keyspace.GroupID
	// Spans are the exported spans, at most one of them versioned, without those of the
	// lease index. The tables may contain any part of the lease index whose user keys are
	// in the versioned span. Together with the applied record these spans are replaced as
	// a whole.
	Spans []KeySpan
	// Paths are the tables in the engine's file system, preferably in StagingDir.
	// IngestTables removes those that it has taken.
	Paths []string
}

// FS returns the file system of the store, for files in StagingDir.
func (e *Engine) FS() vfs.FS { return e.fs }

// StagingDir returns the directory for tables to be ingested. Open empties it.
func (e *Engine) StagingDir() string { return e.fs.PathJoin(e.dir, stagingName) }

func (e *Engine) emptyStaging() error {
	dir := e.StagingDir()
	if err := e.fs.RemoveAll(dir); err != nil {
		return fmt.Errorf("engine: empty %s: %w", dir, err)
	}
	return makeDir(e.fs, dir)
}

// VerifyTables reads all tables completely and checks that they are an export of this
// group and these spans. It returns their applied record. When ctx ends it stops at the
// next table.
func (e *Engine) VerifyTables(ctx context.Context, in Ingest) (Applied, error) {
	return e.verify(ctx, &in, true)
}

// excisingAll is all shares of Engine.excising.
const excisingAll = math.MaxInt64

// exciseFor ingests the tables in place of what the span contains.
func (e *Engine) exciseFor(ctx context.Context, paths []string, span pebble.KeyRange) (pebble.IngestOperationStats, error) {
	if err := e.excising.Acquire(ctx, excisingAll); err != nil {
		return pebble.IngestOperationStats{}, err
	}
	defer e.excising.Release(excisingAll)
	return e.db.IngestAndExcise(ctx, paths, nil, nil, span)
}

// IngestTables atomically replaces the store's data of the group and the spans by the
// tables, and returns the applied record in them. It returns without error only when all
// this is durable. (An ingest that overlaps a memtable is not durable by itself, since
// the store has no WAL.) Open snapshots and iterators keep their state.
//
// After an error the ingest has happened completely or not at all; Applied tells which.
// ctx ends the wait for the flush. The caller makes sure that nothing else writes the
// group meanwhile.
func (e *Engine) IngestTables(ctx context.Context, in Ingest) (Applied, error) {
	if e.Space() == SpaceFull {
		return Applied{}, fmt.Errorf("engine: ingest group %s: %w", in.Group, ErrNoSpace)
	}
	start := e.clock.Now()
	a, err := e.verify(ctx, &in, false)
	if err != nil {
		return Applied{}, err
	}
	excise := pebble.KeyRange{}
	for _, s := range in.Spans {
		if s.Versioned() {
			excise = pebble.KeyRange{Start: s.Lower, End: s.Upper}
		}
	}
	var stats pebble.IngestOperationStats
	if excise.Valid() {
		stats, err = e.exciseFor(ctx, in.Paths, excise)
	} else {
		stats, err = e.db.IngestWithStats(ctx, in.Paths)
	}
	if err != nil {
		return Applied{}, fmt.Errorf("engine: ingest group %s: %w", in.Group, err)
	}
	if mutation.Is(mutation.SnapshotNotDurable) {
		return a, nil
	}
	if err := e.awaitDurable(ctx, in.Group, &a); err != nil {
		return Applied{}, fmt.Errorf("engine: ingest group %s: until durable: %w", in.Group, err)
	}
	e.metrics.ingests.Inc()
	e.metrics.ingestBytes.Add(float64(stats.Bytes))
	e.metrics.ingestSeconds.Observe(e.clock.Now().Sub(start).Seconds())
	return a, nil
}

// awaitDurable flushes until the group's applied record is durable. An ingest that met no
// memtable is durable at once and needs no flush.
func (e *Engine) awaitDurable(ctx context.Context, g keyspace.GroupID, want *Applied) error {
	for flushed := false; ; flushed = true {
		d, ok, err := e.DurableApplied(g)
		if err != nil {
			return err
		}
		if ok && d.Index == want.Index && d.Term == want.Term {
			return nil
		}
		if flushed {
			panic(fmt.Sprintf("engine: group %s: applied record %d/%d is durable after the flush, ingested was %d/%d",
				g, d.Term, d.Index, want.Term, want.Index))
		}
		if err := e.Flush(ctx); err != nil {
			return err
		}
	}
}

// verifier collects what the tables of one Ingest cover.
type verifier struct {
	in      *Ingest
	applied *Applied
	deletes []KeySpan // range deletes, as found
	tables  []tableBounds
}

// tableBounds is what a table covers, by Pebble's rules for an ingest.
type tableBounds struct {
	path         string
	lower, upper []byte // nil in an empty table
	exclusive    bool   // upper is the end of a range delete and not a key
	deletes      int    // the number of range deletes before the table's
}

// cover extends the bounds by [lower, upper], or by [lower, upper) if exclusive is set.
func (t *tableBounds) cover(lower, upper []byte, exclusive bool) {
	if t.lower == nil || bytes.Compare(lower, t.lower) < 0 {
		t.lower = slices.Clone(lower)
	}
	if c := bytes.Compare(upper, t.upper); t.upper == nil || c > 0 || c == 0 && !exclusive {
		t.upper, t.exclusive = slices.Clone(upper), exclusive
	}
}

// within reports whether everything that the table covers lies in the span.
func (t *tableBounds) within(s KeySpan) bool {
	c := bytes.Compare(t.upper, s.Upper)
	return bytes.Compare(t.lower, s.Lower) >= 0 && (c < 0 || c == 0 && t.exclusive)
}

// disjoint checks that no two tables overlap. The store would refuse such tables, and an
// install that raft relies on cannot be given up.
func (v *verifier) disjoint() error {
	slices.SortFunc(v.tables, func(a, b tableBounds) int { return bytes.Compare(a.lower, b.lower) })
	for i := 1; i < len(v.tables); i++ {
		a, b := &v.tables[i-1], &v.tables[i]
		if c := bytes.Compare(a.upper, b.lower); c > 0 || c == 0 && !a.exclusive {
			return fmt.Errorf("%w: table %s up to %s and table %s from %s overlap",
				ErrBadTables, a.path, FormatKey(a.upper), b.path, FormatKey(b.lower))
		}
	}
	return nil
}

func (e *Engine) verify(ctx context.Context, in *Ingest, whole bool) (Applied, error) {
	v := &verifier{in: in}
	versioned := 0
	for _, s := range in.Spans {
		if s.Versioned() {
			versioned++
		}
	}
	if versioned > 1 {
		return Applied{}, fmt.Errorf("engine: ingest group %s: %d versioned spans, bound 1", in.Group, versioned)
	}
	for _, path := range in.Paths {
		if err := ctx.Err(); err != nil {
			return Applied{}, fmt.Errorf("engine: ingest group %s: %w", in.Group, err)
		}
		if err := e.verifyTable(ctx, v, path, whole); err != nil {
			return Applied{}, fmt.Errorf("engine: ingest group %s: table %s: %w", in.Group, path, err)
		}
	}
	if v.applied == nil {
		return Applied{}, fmt.Errorf("engine: ingest group %s: %w: no applied record", in.Group, ErrBadTables)
	}
	if err := v.disjoint(); err != nil {
		return Applied{}, fmt.Errorf("engine: ingest group %s: %w", in.Group, err)
	}
	for _, s := range append([]KeySpan{appliedSpan(in.Group)}, in.Spans...) {
		if !s.Versioned() && !v.cleared(s) {
			return Applied{}, fmt.Errorf("engine: ingest group %s: %w: %s is not cleared", in.Group, ErrBadTables, s)
		}
	}
	return *v.applied, nil
}

// cleared reports whether the range deletes cover the span without a gap.
func (v *verifier) cleared(s KeySpan) bool {
	slices.SortFunc(v.deletes, func(a, b KeySpan) int { return bytes.Compare(a.Lower, b.Lower) })
	at := s.Lower
	for _, d := range v.deletes {
		if bytes.Compare(d.Lower, at) <= 0 && bytes.Compare(d.Upper, at) > 0 {
			at = d.Upper
		}
	}
	return bytes.Compare(at, s.Upper) >= 0
}

// owner returns the span of the ingest that contains the key.
func (v *verifier) owner(key []byte) (KeySpan, bool) {
	if s := appliedSpan(v.in.Group); s.Contains(key) {
		return s, true
	}
	for _, s := range v.in.Spans {
		if s.Contains(key) {
			return s, true
		}
	}
	return KeySpan{}, false
}

// foreignAttributes are attributes of tables that no export writes.
const foreignAttributes = sstable.AttributeRangeKeySets | sstable.AttributeRangeKeyUnsets |
	sstable.AttributeRangeKeyDels | sstable.AttributeBlobValues

func (e *Engine) verifyTable(ctx context.Context, v *verifier, path string, whole bool) (err error) {
	f, err := e.fs.Open(path)
	if err != nil {
		return err
	}
	// The tables came over a network. They must be on the disk before the manifest names
	// them, and Pebble does not sync tables that it links.
	if err := f.Sync(); err != nil {
		return errors.Join(err, f.Close())
	}
	readable, err := sstable.NewSimpleReadable(f)
	if err != nil {
		return errors.Join(err, f.Close())
	}
	r, err := sstable.NewReader(ctx, readable, tableOptions.MakeReaderOptions())
	if err != nil {
		return errors.Join(fmt.Errorf("%w: %w", ErrBadTables, err), readable.Close())
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	if whole {
		if err := r.ValidateBlockChecksums(); err != nil {
			return fmt.Errorf("%w: %w", ErrBadTables, err)
		}
	}
	if r.Attributes.Intersects(foreignAttributes) {
		return fmt.Errorf("%w: attributes %s", ErrBadTables, r.Attributes)
	}
	t := tableBounds{path: path, deletes: len(v.deletes)}
	if err := v.points(r, &t); err != nil {
		return err
	}
	if err := v.rangeDeletes(ctx, r, &t); err != nil {
		return err
	}
	if t.lower == nil {
		return nil // the store skips it
	}
	if (KeySpan{Lower: t.lower}).leased() {
		if err := v.leases(r, &t); err != nil {
			return err
		}
		v.tables = append(v.tables, t)
		return nil
	}
	// As a whole: otherwise it would also cover what lies between two spans.
	if span, ok := v.owner(t.lower); !ok || !t.within(span) {
		return fmt.Errorf("%w: from %s to %s is in no span", ErrBadTables, FormatKey(t.lower), FormatKey(t.upper))
	}
	v.tables = append(v.tables, t)
	return nil
}

// points records the table's first and last key, and extracts the applied record.
func (v *verifier) points(r *sstable.Reader, t *tableBounds) (err error) {
	it, err := r.NewIter(sstable.NoTransforms, nil, nil, sstable.AssertNoBlobHandles)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrBadTables, err)
	}
	defer func() { err = errors.Join(err, it.Close()) }()
	first := it.First()
	if first == nil {
		return it.Error()
	}
	if first.K.SeqNum() != 0 {
		return fmt.Errorf("%w: key %s has sequence number %d", ErrBadTables, FormatKey(first.K.UserKey), first.K.SeqNum())
	}
	lower := slices.Clone(first.K.UserKey)
	if g, err := decodeAppliedKey(first.K.UserKey); err == nil {
		value, _, err := first.Value(nil)
		if err != nil {
			return err
		}
		a, err := DecodeApplied(value)
		if err != nil {
			return err
		}
		if g != v.in.Group || v.applied != nil {
			return fmt.Errorf("%w: a second applied record, of group %s", ErrBadTables, g)
		}
		v.applied = &a
	}
	last := it.Last()
	if last == nil {
		return it.Error()
	}
	if last.K.SeqNum() != 0 {
		return fmt.Errorf("%w: key %s has sequence number %d", ErrBadTables, FormatKey(last.K.UserKey), last.K.SeqNum())
	}
	t.cover(lower, last.K.UserKey, false)
	return nil
}

// leases checks that a table of the lease index concerns only user keys of the versioned
// span. Such a table spans other ranges' keys but touches none of them.
func (v *verifier) leases(r *sstable.Reader, t *tableBounds) (err error) {
	within := func(s KeySpan) bool {
		return slices.ContainsFunc(v.in.Spans, func(o KeySpan) bool { return o.Versioned() && o.coversLeased(s) })
	}
	for _, d := range v.deletes[t.deletes:] {
		if !within(d) {
			return fmt.Errorf("%w: %s of the index of leases is cleared", ErrBadTables, d)
		}
	}
	it, err := r.NewIter(sstable.NoTransforms, nil, nil, sstable.AssertNoBlobHandles)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrBadTables, err)
	}
	defer func() { err = errors.Join(err, it.Close()) }()
	for kv := it.First(); kv != nil; kv = it.Next() {
		key := kv.K.UserKey
		if !within(KeySpan{Lower: key, Upper: append(slices.Clone(key), 0)}) {
			return fmt.Errorf("%w: %s of the index of leases", ErrBadTables, FormatKey(key))
		}
	}
	return it.Error()
}

// coversLeased reports whether the versioned span contains all user keys of a lease index
// span, which belongs to one lease.
func (s KeySpan) coversLeased(o KeySpan) bool {
	if len(o.Lower) < leaseHeadBytes || !o.leased() {
		return false
	}
	lease, from := o.Lower[:leaseHeadBytes], o.Lower[leaseHeadBytes:]
	if bytes.Compare(appendBound(from), s.Lower) < 0 {
		return false
	}
	if bytes.HasPrefix(o.Upper, lease) {
		return bytes.Compare(appendBound(o.Upper[leaseHeadBytes:]), s.Upper) <= 0
	}
	next := LeaseSpan(keyspace.LeaseID(binary.BigEndian.Uint64(lease[1:])), keyspace.Span{}).Upper
	return bytes.Equal(o.Upper, next) && bytes.Equal(s.Upper, VersionedSpan(keyspace.Span{}).Upper)
}

// rangeDeletes records what the table clears.
func (v *verifier) rangeDeletes(ctx context.Context, r *sstable.Reader, t *tableBounds) error {
	it, err := r.NewRawRangeDelIter(ctx, sstable.NoFragmentTransforms, sstable.NoReadEnv)
	if err != nil || it == nil {
		return err
	}
	defer it.Close()
	for s, err := it.First(); s != nil || err != nil; s, err = it.Next() {
		if err != nil {
			return fmt.Errorf("%w: %w", ErrBadTables, err)
		}
		if seq := s.LargestSeqNum(); seq != 0 {
			return fmt.Errorf("%w: a range delete from %s has sequence number %d", ErrBadTables, FormatKey(s.Start), seq)
		}
		t.cover(s.Start, s.End, true)
		v.deletes = append(v.deletes, KeySpan{Lower: slices.Clone(s.Start), Upper: slices.Clone(s.End)})
	}
	return nil
}
