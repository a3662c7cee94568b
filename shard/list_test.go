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
		var got []Summary
		var start []byte
		var id keyspace.RangeID
		parts := 0
		for more := true; more; parts++ {
			var l []Summary
			if l, more = listPage(all, start, id, size); len(l) == 0 {
				t.Fatalf("with %d bytes a part is empty, behind %d ranges", size, len(got))
			}
			got = append(got, l...)
			start, id = l[len(l)-1].Descriptor.Span.Start, l[len(l)-1].Descriptor.Range
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
