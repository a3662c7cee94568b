package eval

import (
	"bytes"
	"slices"

	"github.com/skeindb/skein/keyspace"
)

const (
	// maxSpanCounts is how many spans of a range are counted on.
	maxSpanCounts = 8
	// spanCountFrom is how many keys a span has at least that is worth it.
	spanCountFrom = 128
)

// SpanCounts knows how many living applied keys some spans of a range have: those that
// transactions have counted. A queue of jobs looks at its first key and at how many follow, again
// and again. Only the first look scans; later each applied version changes the count. As with the
// version cache, a count is true during a [KeyEpoch]. The replica's mu guards it.
type SpanCounts struct {
	// spans are in the order of their last use.
	spans []spanCount
	// forgotten counts how often everything was forgotten.
	forgotten uint64
}

type spanCount struct {
	span  keyspace.Span
	epoch KeyEpoch
	n     int64
}

// get returns the number of living applied keys of the span.
func (c *SpanCounts) get(e KeyEpochs, s keyspace.Span) (n int64, ok bool) {
	epoch, ok := e.only()
	i := slices.IndexFunc(c.spans, func(x spanCount) bool {
		return bytes.Equal(x.span.Start, s.Start) && bytes.Equal(x.span.End, s.End)
	})
	if i < 0 {
		return 0, false
	}
	x := c.spans[i]
	c.spans = slices.Delete(c.spans, i, i+1)
	if !ok || x.epoch != epoch {
		return 0, false
	}
	c.spans = append(c.spans, x)
	return x.n, true
}

// put remembers the number of living applied keys of a span of which get knows nothing.
func (c *SpanCounts) put(e KeyEpochs, s keyspace.Span, n int64) {
	epoch, ok := e.only()
	if !ok || n < spanCountFrom || len(s.Start)+len(s.End) > maxCachedKeyBytes {
		return
	}
	if len(c.spans) == maxSpanCounts {
		c.spans = slices.Delete(c.spans, 0, 1)
	}
	c.spans = append(c.spans, spanCount{keyspace.Span{Start: bytes.Clone(s.Start), End: bytes.Clone(s.End)}, epoch, n})
}

// Applied counts a version that is applied and leaves the overlay.
func (c *SpanCounts) Applied(v *PendingVersion) {
	for i := range c.spans {
		if x := &c.spans[i]; !v.replaced && x.span.Contains(v.Key) {
			x.n += liveChange(v.Lived, v)
		}
	}
}

// Forget forgets everything: something was applied that was not in the overlay.
func (c *SpanCounts) Forget() { c.spans, c.forgotten = nil, c.forgotten+1 }
