package mvcc

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
)

// DefaultHistoryBytes is the default memory bound of one call of History.
const DefaultHistoryBytes = 4 << 20

// eventOverhead is the memory of a buffered event beyond its key and value.
const eventOverhead = 160

// HistoryOptions select events.
type HistoryOptions struct {
	Span keyspace.Span
	// From and To are the first and last revision. If From is below the compacted
	// revision, events are missing.
	From, To keyspace.Revision
	// MaxBytes bounds the memory of the call; 0 is DefaultHistoryBytes. A revision is
	// never divided. A single larger revision is returned completely, and as much may be
	// buffered in addition.
	MaxBytes int64
	// KeysOnly leaves Value empty.
	KeysOnly bool
}

// History calls fn with the versions of the span from revision From on, puts and
// tombstones, in the order of (revision, operation number, key). A write that a later one
// of the same transaction replaced is a version of its own here. It returns the revision
// at which to continue: To+1, or less if the memory was not sufficient. Each call
// delivers at least one event, if there is one.
//
// Events are stored in the order of keys, so a call reads the whole span, except tables
// and blocks without a revision in question. Recent history is therefore cheap. The call
// buffers the lowest revisions that fit and drops the others. fn may keep what it gets.
// An error of fn ends the call and is returned.
func History(r engine.Reader, o HistoryOptions, fn func(*Version) error) (next keyspace.Revision, err error) {
	if o.From > o.To {
		return o.From, nil
	}
	h := newHistory(o)
	if err := h.emit(r, fn); err != nil {
		return 0, err
	}
	return h.to + 1, nil
}

// HistoryPages is History, but may end within a revision. A single revision larger than
// half of MaxBytes comes in several pages, each alone in its call and in the order of
// keys. nextKey is then not nil and says where in revision next to continue. The next
// call takes both as o.From and fromKey, and ends with that revision at the latest. It
// does not read again what lies before. A page has at most MaxBytes, or the events of one
// key if they are larger.
func HistoryPages(r engine.Reader, o HistoryOptions, fromKey []byte, fn func(*Version) error) (next keyspace.Revision, nextKey []byte, err error) {
	if o.From > o.To {
		return o.From, nil, nil
	}
	if fromKey != nil {
		o.To = o.From
		if bytes.Compare(o.Span.Start, fromKey) < 0 {
			o.Span.Start = fromKey
		}
	}
	h := newHistory(o)
	h.divides, h.within = true, fromKey != nil
	if err := h.emit(r, fn); err != nil {
		return 0, nil, err
	}
	if h.cut != nil {
		return h.to, append(bytes.Clone(h.cut), 0), nil
	}
	return h.to + 1, nil, nil
}

// emit collects events and calls fn with them.
func (h *history) emit(r engine.Reader, fn func(*Version) error) error {
	if err := h.collect(r); err != nil {
		return err
	}
	if h.divides {
		h.settle()
	}
	h.separate()
	slices.SortFunc(h.events, func(a, b Version) int {
		return cmp.Or(cmp.Compare(a.Mod, b.Mod), cmp.Compare(a.Sub, b.Sub), bytes.Compare(a.Key, b.Key))
	})
	for i := range h.events {
		if err := fn(&h.events[i]); err != nil {
			return err
		}
	}
	return nil
}

// separate turns earlier writes into events of their own. Until then they stay with the
// write that replaced them, so a key is never divided.
func (h *history) separate() {
	for i := range h.events {
		// Appended events lie beyond this loop's range, and have no earlier writes.
		for w := h.events[i].Earlier; w != nil; w = w.Earlier {
			one := *w
			one.Earlier = nil
			h.events = append(h.events, one)
		}
		h.events[i].Earlier = nil
	}
}

// heldBytes is the memory of a buffered version.
func heldBytes(v *Version) (n int64) {
	for ; v != nil; v = v.Earlier {
		n += v.Size() + eventOverhead
	}
	return n
}

// history buffers the events of the lowest revisions.
type history struct {
	o      HistoryOptions
	to     keyspace.Revision // the last revision that is complete so far
	filter *engine.RevisionFilter
	events []Version // with their earlier writes
	bytes  int64
	// trimAt is the size at which to trim; trims counts how often that happened.
	trimAt int64
	trims  int

	// divides says that a large revision may be divided. within says that this call
	// continues inside one. cut is then the last buffered key of revision to.
	divides, within bool
	cut             []byte
}

func newHistory(o HistoryOptions) *history {
	h := &history{o: o, to: o.To, filter: engine.NewRevisionFilter(max(o.From, 0), o.To)}
	if h.o.MaxBytes <= 0 {
		h.o.MaxBytes = DefaultHistoryBytes
	}
	h.trimAt = h.o.MaxBytes
	return h
}

func (h *history) collect(r engine.Reader) (err error) {
	b := engine.VersionedSpan(h.o.Span)
	it, err := r.NewIter(engine.IterOptions{Lower: b.Lower, Upper: b.Upper, Revisions: h.filter})
	if err != nil {
		return fmt.Errorf("mvcc: history of %s: %w", h.o.Span, err)
	}
	defer func() { err = errors.Join(err, it.Close()) }()
	for valid := it.First(); valid; {
		prefix, rev, err := engine.SplitVersionedKey(it.Key())
		if err != nil {
			return fmt.Errorf("%w: %w", ErrCorrupt, err)
		}
		if rev < h.o.From {
			// The versions behind it are older still.
			valid = it.NextPrefix()
			continue
		}
		if rev < h.to || rev == h.to && h.cut == nil {
			if err := h.add(it, prefix, rev); err != nil {
				return err
			}
			if h.within && h.cut != nil {
				return nil // no lower revision is wanted
			}
		}
		valid = it.Next()
	}
	if err := it.Error(); err != nil {
		return fmt.Errorf("mvcc: history of %s: %w", h.o.Span, err)
	}
	return nil
}

// add buffers the version at the iterator's position.
func (h *history) add(it *engine.Iterator, prefix []byte, rev keyspace.Revision) error {
	value, err := it.ValueAndErr()
	if err != nil {
		return fmt.Errorf("mvcc: history of %s: %w", h.o.Span, err)
	}
	v := Version{Mod: rev}
	if v.Key, err = engine.AppendUserKey(make([]byte, 0, len(prefix)-3), prefix); err != nil {
		return fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	if err := v.DecodeValue(value); err != nil {
		return err
	}
	for w := &v; w != nil; w = w.Earlier {
		if h.o.KeysOnly {
			w.Value = nil
		} else {
			w.Value = bytes.Clone(w.Value)
		}
	}
	h.events = append(h.events, v)
	h.bytes += heldBytes(&v)
	if h.bytes > h.trimAt {
		h.trim()
		// A single revision that is too large stays complete. The buffer must double
		// before it is trimmed again, or each further event of that revision would sort
		// everything.
		h.trimAt = max(h.o.MaxBytes, 2*h.bytes)
	}
	return nil
}

// trim drops the highest revisions until at most half of the memory is in use, so that it
// runs rarely. It keeps the lowest revision unless that may be divided.
func (h *history) trim() {
	h.trims++
	slices.SortFunc(h.events, func(a, b Version) int {
		return cmp.Or(cmp.Compare(a.Mod, b.Mod), bytes.Compare(a.Key, b.Key))
	})
	var kept int64 // size of events[:n], which are complete revisions
	n := 0
	for n < len(h.events) {
		end, size := n, int64(0)
		for ; end < len(h.events) && h.events[end].Mod == h.events[n].Mod; end++ {
			size += heldBytes(&h.events[end])
		}
		if n > 0 && kept+size > h.o.MaxBytes/2 {
			break
		}
		n, kept = end, kept+size
	}
	if h.divides && kept > h.o.MaxBytes/2 {
		n, kept = h.divide(n, kept)
	}
	if n == len(h.events) {
		return // one large revision
	}
	// Revisions between the kept and the dropped ones may have no event so far, and later
	// keys may still bring some. So only the kept ones are complete.
	if to := h.events[n-1].Mod; to < h.to && h.events[n].Mod != to {
		h.to, h.cut = to, nil
	}
	clear(h.events[n:])
	h.events, h.bytes = h.events[:n], kept
	h.filter.Narrow(max(h.o.From, 0), h.to)
}

// divide cuts the lowest revision, the first n events, to the lowest keys that fit. Keys
// arrive in order, so all its later events lie behind them.
func (h *history) divide(n int, kept int64) (int, int64) {
	for n > 1 && kept > h.o.MaxBytes/2 {
		n--
		kept -= heldBytes(&h.events[n])
		h.to, h.cut = h.events[n-1].Mod, h.events[n-1].Key
	}
	return n, kept
}

// settle runs when all events are collected. One event may have exceeded the bound, and
// lower revisions may have arrived beside the rest of a divided one.
func (h *history) settle() {
	if h.bytes > h.o.MaxBytes {
		h.trim()
	}
	if h.cut != nil && slices.ContainsFunc(h.events, func(v Version) bool { return v.Mod < h.to }) {
		h.events = slices.DeleteFunc(h.events, func(v Version) bool { return v.Mod == h.to })
		h.to, h.cut = h.to-1, nil
	}
}
