// Package divide finds where to split a range by load, or why not. From a sample of the
// range's requests it finds a key with load on both sides, now and a moment later. It is
// pure: the range's leader splits by it, and placement's simulator uses the same terms.
package divide

import (
	"bytes"
	"slices"
)

// Sample is the load that a range's leader has seen: requests drawn evenly over some
// seconds, in order of arrival.
type Sample struct {
	Requests []Request
}

// Request is one sampled request: a key, or a span of keys where End is not empty.
type Request struct {
	Key, End []byte
}

// Shape says what a sample implies for a split of its range.
type Shape uint8

// The shapes of load.
const (
	// Divides: there is a key with load on both sides.
	Divides Shape = iota
	// TooFew: the sample is too small for a conclusion.
	TooFew
	// HotKey: most of the load is at one key, which stays in one range.
	HotKey
	// Tail: the load moves to ever larger (or smaller) keys. Wherever the range is split,
	// all of the load is soon on one side.
	Tail
	// Spans: most requests are spans that every split would cut.
	Spans
)

var shapeNames = [...]string{
	"it divides", "too few requests are sampled", "one key has most of it",
	"it moves along the keys", "most requests span it",
}

// String returns the shape in words.
func (s Shape) String() string { return shapeNames[s] }

const (
	// minSampled is the smallest sample that allows a conclusion.
	minSampled = 32
	// dividedPart is the minimum share of the load on each side.
	dividedPart = 0.25
	// cutPart is the maximum share of requests that a split may cut: two ranges serve
	// these afterwards.
	cutPart = 0.25
)

// Divide returns the best key at which to divide the load, and whether the load divides
// at all. The earlier half of the sample proposes the key, and the later half must
// confirm it: load that moves along the keys is balanced around a key only in hindsight.
func (s *Sample) Divide() ([]byte, Shape) {
	if len(s.Requests) < minSampled {
		return nil, TooFew
	}
	half := len(s.Requests) / 2
	early, late := s.Requests[:half], s.Requests[half:]
	keys := make([][]byte, len(early))
	spans := 0
	for i := range early {
		keys[i] = early[i].Key
		if len(early[i].End) > 0 {
			spans++
		}
	}
	slices.SortFunc(keys, bytes.Compare)
	at, ok := best(early, keys)
	switch {
	case !ok && part(spans, early) > cutPart:
		return nil, Spans
	case !ok || hottest(keys) > len(keys)/2:
		return nil, HotKey
	}
	l, r, cut := sides(late, at)
	switch {
	case part(cut, late) > cutPart:
		return nil, Spans
	case part(l+cut, late) < dividedPart || part(r+cut, late) < dividedPart:
		return nil, Tail
	}
	return at, Divides
}

// hottest returns how often the most frequent of the sorted keys occurs.
func hottest(keys [][]byte) int {
	most, run := 0, 0
	for i := range keys {
		if i > 0 && bytes.Equal(keys[i], keys[i-1]) {
			run++
		} else {
			run = 1
		}
		most = max(most, run)
	}
	return most
}

// best returns the key that divides the requests most evenly and cuts few.
func best(rs []Request, keys [][]byte) ([]byte, bool) {
	var at []byte
	worst := int(float64(len(rs)) * (1 - dividedPart))
	for i := 1; i < len(keys); i++ {
		if bytes.Equal(keys[i], keys[i-1]) {
			continue
		}
		l, r, cut := sides(rs, keys[i])
		if more := max(l, r) + cut; more <= worst && part(cut, rs) <= cutPart {
			worst, at = more-1, keys[i]
		}
	}
	return at, at != nil
}

// sides counts the requests left of the key, from the key on, and cut by it.
func sides(rs []Request, at []byte) (l, r, cut int) {
	for i := range rs {
		switch {
		case bytes.Compare(rs[i].Key, at) >= 0:
			r++
		case len(rs[i].End) > 0 && bytes.Compare(rs[i].End, at) > 0:
			cut++
		default:
			l++
		}
	}
	return l, r, cut
}

func part(n int, of []Request) float64 { return float64(n) / float64(len(of)) }
