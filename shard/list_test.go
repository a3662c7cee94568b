package shard

import (
	"fmt"
	"testing"

	"github.com/skeindb/skein/keyspace"
)

// A list comes in parts that hold each range once, however small they are.
func TestListComesInParts(t *testing.T) {
	var all []Summary
	for i := range 10 {
		s := Summary{}
		s.Descriptor.Range = keyspace.RangeID(i + 1)
		if i > 0 {
			s.Descriptor.Span.Start = fmt.Appendf(nil, "k%d", i/2) // two replicas of one start: one waits for a split
		}
		all = append(all, s)
	}
	for _, size := range []int{0, 1, summaryBytes + 100, 3 * (summaryBytes + 100), 1 << 20} {
		parts := 0
		got, err := listAll(func(start []byte, id keyspace.RangeID) ([]Summary, bool, error) {
			l, more := listPage(all, start, id, size)
			if parts++; len(l) == 0 || parts > len(all) {
				return nil, false, fmt.Errorf("part %d has %d ranges", parts, len(l))
			}
			return l, more, nil
		})
		if err != nil {
			t.Fatalf("with %d bytes: %v", size, err)
		}
		if fmt.Sprint(got) != fmt.Sprint(all) {
			t.Errorf("with %d bytes: %v, want %v", size, got, all)
		}
		if want := map[int]int{0: 10, 1: 10, summaryBytes + 100: 10, 1 << 20: 1}[size]; want != 0 && parts != want {
			t.Errorf("with %d bytes it came in %d parts, want %d", size, parts, want)
		}
	}
	if l, more := listPage(nil, nil, 0, 1); len(l) > 0 || more {
		t.Errorf("of nothing: %v, %t", l, more)
	}
}
