package engine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/cockroachdb/pebble/v2/objstorage"
	"github.com/cockroachdb/pebble/v2/sstable"

	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/keyspace"
)

// DefaultTableBytes is the size at which ExportTables begins the next table.
const DefaultTableBytes = 32 << 20

// exportLevel is the level whose settings exported tables get: a new replica ingests them
// into the last level.
const exportLevel = 6

// cancelKeys is how many keys an export writes between two checks of its context.
const cancelKeys = 256

// TableInfo describes one exported table.
type TableInfo struct {
	Span  KeySpan // the span that the table covers
	Keys  int64
	Bytes int64
}

// Export describes what ExportTables wrote.
type Export struct {
	Applied Applied
	Tables  []TableInfo
}

// ErrNoApplied says that an exported group has no applied record.
var ErrNoApplied = errors.New("engine: group has no applied record")

// TableSink returns the writer of the next table; number counts the tables before it.
type TableSink func(number int) (io.WriteCloser, error)

// ExportTables writes the group's applied record and the keys in spans, as the snapshot
// shows them, into sorted tables for IngestTables. The first table has the applied
// record. The tables of each span follow in order; a table never covers two spans. The
// tables of a span that is not versioned also delete what the receiver has there, so such
// a span has at least one table. Spans of the lease index come last and in order. They
// are many and small, so they share tables.
//
// The sink returns the writer of each table. The export closes it when the table is
// complete and also when it fails; only a nil error says that the tables count.
// maxTableBytes is the approximate size of a table; 0 is DefaultTableBytes. It takes the
// memory of one table's index and a block.
func (s *Snapshot) ExportTables(
	ctx context.Context, g keyspace.GroupID, spans []KeySpan, maxTableBytes int64, sink TableSink,
) (Export, error) {
	a, ok, err := ReadApplied(s, g)
	if err == nil && !ok {
		err = ErrNoApplied
	}
	if err != nil {
		return Export{}, fmt.Errorf("engine: export group %s: %w", g, err)
	}
	if maxTableBytes <= 0 {
		maxTableBytes = DefaultTableBytes
	}
	x := &exporter{s: s, sink: sink, max: uint64(maxTableBytes), out: Export{Applied: a}}
	leased := slices.IndexFunc(spans, KeySpan.leased)
	if leased < 0 {
		leased = len(spans)
	}
	for _, span := range append([]KeySpan{appliedSpan(g)}, spans[:leased]...) {
		if err := x.span(ctx, span); err != nil {
			return Export{}, fmt.Errorf("engine: export group %s: %s: %w", g, span, err)
		}
	}
	if err := x.leased(ctx, spans[leased:]); err != nil {
		return Export{}, fmt.Errorf("engine: export group %s: leases: %w", g, err)
	}
	return x.out, nil
}

type exporter struct {
	s    *Snapshot
	sink TableSink
	max  uint64
	out  Export

	// The current table; w is nil between tables.
	w    *sstable.Writer
	file *tableFile
	info TableInfo
}

// span writes the tables of one span.
func (x *exporter) span(ctx context.Context, span KeySpan) (err error) {
	it, err := x.s.NewIter(IterOptions{Lower: span.Lower, Upper: span.Upper})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, it.Close()) }()
	lower := span.Lower
	if found := it.First(); span.Versioned() {
		if !found {
			return it.Error() // a versioned span without keys
		}
		lower = slices.Clone(it.Key())
	}
	for lower != nil {
		if lower, err = x.table(ctx, it, lower, span); err != nil {
			return err
		}
	}
	return nil
}

// table writes the table that begins at lower; the iterator stands on the first key at or
// above it. It returns where the next table begins, or nil after the span's last.
func (x *exporter) table(ctx context.Context, it *Iterator, lower []byte, span KeySpan) (next []byte, err error) {
	if err := x.begin(lower); err != nil {
		return nil, err
	}
	defer func() {
		if x.w != nil {
			err = errors.Join(err, x.abort())
		}
	}()
	n := 0
	for ; it.Valid(); it.Next() {
		if n++; n%cancelKeys == 0 && ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		if x.info.Keys > 0 && x.w.Raw().EstimatedSize() >= x.max {
			next = slices.Clone(it.Key())
			return next, x.finish(next)
		}
		if mutation.Is(mutation.VersionLostInCopy) && span.Versioned() && n == 2 {
			continue
		}
		v, err := it.ValueAndErr()
		if err != nil {
			return nil, err
		}
		if err := x.w.Set(it.Key(), v); err != nil {
			return nil, err
		}
		x.info.Keys++
	}
	if err := it.Error(); err != nil {
		return nil, err
	}
	return nil, x.finish(span.Upper)
}

// leased writes the shared tables of the lease index's spans. Each table deletes what the
// receiver has in its parts of the spans, and nothing between them.
func (x *exporter) leased(ctx context.Context, spans []KeySpan) (err error) {
	defer func() {
		if x.w != nil {
			err = errors.Join(err, x.abort())
		}
	}()
	for _, span := range spans {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err := x.leasedSpan(ctx, span); err != nil {
			return err
		}
	}
	if x.w == nil {
		return nil
	}
	return x.close(spans[len(spans)-1].Upper)
}

func (x *exporter) leasedSpan(ctx context.Context, span KeySpan) (err error) {
	it, err := x.s.NewIter(IterOptions{Lower: span.Lower, Upper: span.Upper})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, it.Close()) }()
	from, n := span.Lower, 0
	for ok := it.First(); ok; ok = it.Next() {
		if n++; n%cancelKeys == 0 && ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if x.w != nil && x.w.Raw().EstimatedSize() >= x.max {
			at := slices.Clone(it.Key())
			if bytes.Compare(from, at) < 0 {
				if err := x.w.DeleteRange(from, at); err != nil {
					return err
				}
			}
			if err := x.close(at); err != nil {
				return err
			}
			from = at
		}
		if x.w == nil {
			if err := x.begin(from); err != nil {
				return err
			}
		}
		v, err := it.ValueAndErr()
		if err != nil {
			return err
		}
		if err := x.w.Set(it.Key(), v); err != nil {
			return err
		}
		x.info.Keys++
	}
	if err := it.Error(); err != nil {
		return err
	}
	if x.w == nil {
		if err := x.begin(from); err != nil {
			return err
		}
	}
	return x.w.DeleteRange(from, span.Upper)
}

// begin begins a table that covers the keys from lower on.
func (x *exporter) begin(lower []byte) error {
	f, err := x.sink(len(x.out.Tables))
	if err != nil {
		return err
	}
	x.file = &tableFile{w: f}
	x.w = sstable.NewWriter(x.file, writerOptions())
	x.info = TableInfo{Span: KeySpan{Lower: lower}}
	return nil
}

// finish ends the table, which covers the keys below upper.
func (x *exporter) finish(upper []byte) error {
	if !x.info.Span.Versioned() {
		// All keys of an ingested table get one sequence number. So its range delete
		// hides the receiver's old keys and not the table's own.
		if err := x.w.DeleteRange(x.info.Span.Lower, upper); err != nil {
			return err
		}
	}
	return x.close(upper)
}

// close ends the table as it is.
func (x *exporter) close(upper []byte) error {
	x.info.Span.Upper = upper
	err := x.w.Close()
	x.w = nil
	if err != nil {
		return err
	}
	x.info.Bytes = x.file.n
	x.out.Tables = append(x.out.Tables, x.info)
	x.s.metrics.exports.Inc()
	x.s.metrics.exportBytes.Add(float64(x.info.Bytes))
	return nil
}

// abort drops the current table. It closes the writer in any case.
func (x *exporter) abort() error {
	x.file.failed = true
	err := x.w.Close()
	x.w = nil
	if errors.Is(err, errAborted) {
		return nil
	}
	return err
}

// errAborted fails the writes of an aborted table.
var errAborted = errors.New("engine: table given up")

// tableFile adapts a table's writer to the table writer.
type tableFile struct {
	w      io.WriteCloser
	n      int64
	failed bool
	closed bool
}

var _ objstorage.Writable = (*tableFile)(nil)

// Write implements objstorage.Writable.
func (f *tableFile) Write(p []byte) error {
	if f.failed {
		return errAborted
	}
	n, err := f.w.Write(p)
	f.n += int64(n)
	return err
}

// Finish implements objstorage.Writable.
func (f *tableFile) Finish() error {
	if f.failed {
		f.Abort()
		return errAborted
	}
	f.closed = true
	return f.w.Close()
}

// Abort implements objstorage.Writable.
func (f *tableFile) Abort() {
	if !f.closed {
		f.closed = true
		_ = f.w.Close() // the export has failed already
	}
}

// writerOptions are those of the store, except that values of older versions stay with
// their keys. Stored apart they would be kept in memory until the table is complete, each
// 4 KiB block in 32 KiB.
func writerOptions() sstable.WriterOptions {
	o := tableOptions.MakeWriterOptions(exportLevel, storeFormat.MaxTableFormat())
	o.DisableValueBlocks = true
	return o
}
