package keyspace

import (
	"bytes"
	"fmt"
)

// Span is the half-open interval [Start, End) of user keys in byte order. An
// empty Start is the first key there can be, an empty End is beyond the last.
// The zero Span is the whole keyspace; there is no empty Span.
type Span struct {
	Start, End []byte
}

// Single returns the span that holds exactly one key.
func Single(key []byte) Span {
	return Span{Start: key, End: Next(key)}
}

// Next returns the smallest key above key.
func Next(key []byte) []byte {
	return append(key[:len(key):len(key)], 0)
}

// FromEtcd returns the span that etcd's pair (key, range_end) means: an absent
// range_end is the single key, "\x00" is every key from key on. ok is false
// where the pair names no key at all (range_end at or below key).
func FromEtcd(key, rangeEnd []byte) (s Span, ok bool) {
	switch {
	case len(rangeEnd) == 0:
		return Single(key), true
	case len(rangeEnd) == 1 && rangeEnd[0] == 0:
		if len(key) == 1 && key[0] == 0 {
			return Span{}, true
		}
		return Span{Start: key}, true
	case bytes.Compare(key, rangeEnd) >= 0:
		return Span{}, false
	default:
		return Span{Start: key, End: rangeEnd}, true
	}
}

// IsSingle says whether the span holds exactly one key.
func (s Span) IsSingle() bool {
	return len(s.End) == len(s.Start)+1 && s.End[len(s.Start)] == 0 && bytes.HasPrefix(s.End, s.Start)
}

// Contains says whether the key lies in the span.
func (s Span) Contains(key []byte) bool {
	return bytes.Compare(key, s.Start) >= 0 && (len(s.End) == 0 || bytes.Compare(key, s.End) < 0)
}

// Covers says whether all of o lies in the span.
func (s Span) Covers(o Span) bool {
	return bytes.Compare(o.Start, s.Start) >= 0 && compareEnds(o.End, s.End) <= 0
}

// Overlaps says whether a key can lie in both spans.
func (s Span) Overlaps(o Span) bool {
	return startBelowEnd(s.Start, o.End) && startBelowEnd(o.Start, s.End)
}

// Intersect returns the keys that lie in both spans; ok is false where there are none.
func (s Span) Intersect(o Span) (_ Span, ok bool) {
	if !s.Overlaps(o) {
		return Span{}, false
	}
	r := s
	if bytes.Compare(o.Start, r.Start) > 0 {
		r.Start = o.Start
	}
	if compareEnds(o.End, r.End) < 0 {
		r.End = o.End
	}
	return r, true
}

// Equal says whether both spans hold the same keys.
func (s Span) Equal(o Span) bool {
	return bytes.Equal(s.Start, o.Start) && bytes.Equal(s.End, o.End)
}

// String returns the span as [start, end) with quoted keys.
func (s Span) String() string {
	if len(s.End) == 0 {
		return fmt.Sprintf("[%q, ∞)", s.Start)
	}
	return fmt.Sprintf("[%q, %q)", s.Start, s.End)
}

// compareEnds compares two ends of spans, of which the empty one is the greatest.
func compareEnds(a, b []byte) int {
	switch {
	case len(a) == 0 && len(b) == 0:
		return 0
	case len(a) == 0:
		return 1
	case len(b) == 0:
		return -1
	}
	return bytes.Compare(a, b)
}

func startBelowEnd(start, end []byte) bool {
	return len(end) == 0 || bytes.Compare(start, end) < 0
}
