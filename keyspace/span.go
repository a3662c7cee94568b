package keyspace

import (
	"bytes"
	"fmt"
)

// Span is the half-open interval [Start, End) of user keys in byte order. An empty Start
// is the first possible key, an empty End is beyond the last. The zero Span is the whole
// keyspace; there is no empty Span.
type Span struct {
	Start, End []byte
}

// Single returns the span of exactly one key.
func Single(key []byte) Span {
	return Span{Start: key, End: Next(key)}
}

// Next returns the smallest key above key.
func Next(key []byte) []byte {
	return append(key[:len(key):len(key)], 0)
}

// FromEtcd returns the span of etcd's pair (key, range_end). Without range_end it is the
// single key; "\x00" means every key from key on. ok is false if the pair names no key,
// because range_end is at or below key.
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

// IsSingle reports whether the span contains exactly one key.
func (s Span) IsSingle() bool {
	return len(s.End) == len(s.Start)+1 && s.End[len(s.Start)] == 0 && bytes.HasPrefix(s.End, s.Start)
}

// Contains reports whether the key lies in the span.
func (s Span) Contains(key []byte) bool {
	return bytes.Compare(key, s.Start) >= 0 && (len(s.End) == 0 || bytes.Compare(key, s.End) < 0)
}

// Covers reports whether all of o lies in the span.
func (s Span) Covers(o Span) bool {
	return bytes.Compare(o.Start, s.Start) >= 0 && compareEnds(o.End, s.End) <= 0
}

// Overlaps reports whether any possible key lies in both spans.
func (s Span) Overlaps(o Span) bool {
	return startBelowEnd(s.Start, o.End) && startBelowEnd(o.Start, s.End)
}

// Intersect returns the keys that lie in both spans; ok is false if there are none.
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

// Equal reports whether both spans contain the same keys.
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

// compareEnds compares two ends of spans; an empty end is the greatest.
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
