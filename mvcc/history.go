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

// DefaultHistoryBytes is the memory of one call of History.
const DefaultHistoryBytes = 4 << 20

// eventOverhead is what a buffered event takes beside its key and value.
const eventOverhead = 160

// HistoryOptions say which events are wanted.
type HistoryOptions struct {
	Span keyspace.Span
	// From and To are the first and last revision wanted; From is at least the
	// compacted revision, or events are missing.
	From, To keyspace.Revision
	// MaxBytes bounds the memory of the call, 0 is DefaultHistoryBytes. A revision is
	// never divided: one that alone is larger is returned whole, and as much may be
	// buffered beside it.
	MaxBytes int64
	// KeysOnly leaves Value empty.
	KeysOnly bool
}

// History calls fn with the versions of the span from revision From on, puts and
// tombstones, in the order of (revision, operation number, key). A write that a later one
// of the same transaction has replaced is a version of its own here. It returns the
// revision at which to go on: To+1, or less where the memory did not suffice for
// more. It always comes at least one event further, if there is one.
//
// The events lie in the order of keys, so that a call reads the whole span, but for
// the tables and blocks that hold no revision in question: recent history is
// cheap. It buffers the lowest revisions that fit and forgets the others. What fn
// gets is fn's to keep. fn's error ends the call and is returned.
func History(r engine.Reader, o HistoryOptions, fn func(*Version) error) (next keyspace.Revision, err error) {
	if o.From > o.To {
		return o.From, nil
	}
	h := newHistory(o)
	if err := h.give(r, fn); err != nil {
		return 0, err
	}
	return h.to + 1, nil
}

// Pieces is History that may end within a revision: one that alone is larger than half of
// MaxBytes comes in several pieces, each in the order of keys and alone in its call. nextKey
// is not nil then, and says where in revision next to go on: the next call takes both, as
// o.From and fromKey, and ends at the latest with that revision. It does not read again what
// lies before. What one call returns is at most MaxBytes, or the events of one key that
// are larger.
func Pieces(r engine.Reader, o HistoryOptions, fromKey []byte, fn func(*Version) error) (next keyspace.Revision, nextKey []byte, err error) {
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
	if err := h.give(r, fn); err != nil {
		return 0, nil, err
	}
	if h.cut != nil {
		return h.to, append(bytes.Clone(h.cut), 0), nil
	}
	return h.to + 1, nil, nil
}

// give collects events and calls fn with them.
func (h *history) give(r engine.Reader, fn func(*Version) error) error {
	if err := h.collect(r); err != nil {
		return err
	}
	if h.divides {
		h.settle()
	}
	h.part()
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

// part makes events of their own of earlier writes. Until then they are with the one that
// has replaced them: a key is never divided.
func (h *history) part() {
	for i := range h.events {
		// What is appended lies behind the range of this loop, and has none itself.
		for w := h.events[i].Earlier; w != nil; w = w.Earlier {
			one := *w
			one.Earlier = nil
			h.events = append(h.events, one)
		}
		h.events[i].Earlier = nil
	}
}

// heldBytes is what a version takes in the buffer.
func heldBytes(v *Version) (n int64) {
	for ; v != nil; v = v.Earlier {
		n += v.Size() + eventOverhead
	}
	return n
}

// history buffers the events of the lowest revisions.
type history struct {
	o      HistoryOptions
	to     keyspace.Revision // the last revision that is still complete
	filter *engine.RevisionFilter
	events []Version // with their earlier writes
	bytes  int64
	// trimAt is how many bytes are too many; trims counts how often they were.
	trimAt int64
	trims  int

	// divides says that a large revision may be divided, within that the call is within
	// one. cut is then the last key of revision to that is here: events behind it are not.
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

// add buffers the version at which the iterator stands.
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
		// A revision that alone is too large stays whole: what is looked through again must
		// have doubled, or each further event of it would sort all.
		h.trimAt = max(h.o.MaxBytes, 2*h.bytes)
	}
	return nil
}

// trim forgets the highest revisions until at most half of the memory is in use,
// so that it is rare. The lowest revision stays in any case, unless it may be divided.
func (h *history) trim() {
	h.trims++
	slices.SortFunc(h.events, func(a, b Version) int {
		return cmp.Or(cmp.Compare(a.Mod, b.Mod), bytes.Compare(a.Key, b.Key))
	})
	var kept int64 // bytes of events[:n], which are whole revisions
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
	// Revisions between the kept and the forgotten ones may have no event so far,
	// and later keys may still bring some: complete is only what is kept.
	if to := h.events[n-1].Mod; to < h.to && h.events[n].Mod != to {
		h.to, h.cut = to, nil
	}
	clear(h.events[n:])
	h.events, h.bytes = h.events[:n], kept
	h.filter.Narrow(max(h.o.From, 0), h.to)
}

// divide cuts the lowest revision, the first n events, to the lowest keys that fit. The
// keys come in order, so that all that is yet to come of it lies behind them.
func (h *history) divide(n int, kept int64) (int, int64) {
	for n > 1 && kept > h.o.MaxBytes/2 {
		n--
		kept -= heldBytes(&h.events[n])
		h.to, h.cut = h.events[n-1].Mod, h.events[n-1].Key
	}
	return n, kept
}

// settle is called when all is collected: one event may have let in more than fits, and
// lower revisions may have come beside what is left of a divided one.
func (h *history) settle() {
	if h.bytes > h.o.MaxBytes {
		h.trim()
	}
	if h.cut != nil && slices.ContainsFunc(h.events, func(v Version) bool { return v.Mod < h.to }) {
		h.events = slices.DeleteFunc(h.events, func(v Version) bool { return v.Mod == h.to })
		h.to, h.cut = h.to-1, nil
	}
}
