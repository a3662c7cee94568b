package placement

import (
	"testing"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/sequencer"
)

// A batch is bounded also in the further ranges of its revisions, and what is left goes
// with the next ones, in order.
func TestBatchesOfManyRangesAreBounded(t *testing.T) {
	var q sequenceQueue
	const asked = 30
	for i := range asked {
		q.waiting = append(q.waiting, queued{age: clock.StartStopwatch(), item: sequencer.Item{Range: keyspace.RangeID(i + 1), Count: 1, Also: make([]keyspace.RangeAt, keyspace.MaxRevisionRanges-1)}})
	}
	next := keyspace.RangeID(1)
	for q.take(time.Hour) {
		b := sequencer.Batch{Boot: 1, Number: 1, Items: q.items}
		if len(b.Items) != sequencer.MaxAlso/(keyspace.MaxRevisionRanges-1) && next+keyspace.RangeID(len(b.Items)) <= asked {
			t.Fatalf("%d requests in a batch", len(b.Items))
		}
		if _, err := sequencer.DecodeBatch(b.Encode()); err != nil {
			t.Fatal(err)
		}
		for _, it := range b.Items {
			if it.Range != next {
				t.Fatalf("request %d follows %d", it.Range, next)
			}
			next++
		}
	}
	if next != asked+1 {
		t.Fatalf("%d requests are left", asked+1-int(next))
	}
	b := sequencer.Batch{Boot: 1, Number: 1}
	for range sequencer.MaxAlso/(keyspace.MaxRevisionRanges-1) + 1 {
		b.Items = append(b.Items, sequencer.Item{Range: 1, Count: 1, Also: make([]keyspace.RangeAt, keyspace.MaxRevisionRanges-1)})
	}
	if _, err := sequencer.DecodeBatch(b.Encode()); err == nil {
		t.Fatal("a larger batch was taken")
	}
}
