package placement

import (
	"encoding/binary"
	"math/rand/v2"
	"testing"

	"github.com/skeindb/skein/internal/measure"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/fsm"
)

// feedOf returns a receiver that has a map of so many ranges, and the rows of it.
func feedOf(tb testing.TB, ranges int) (*feedReceiver, []*fsm.Range) {
	tb.Helper()
	border := func(i int) []byte {
		if i == 0 || i == ranges {
			return nil
		}
		return binary.BigEndian.AppendUint32([]byte("a key of some length/"), uint32(i))
	}
	rows := make([]*fsm.Range, ranges)
	for i := range rows {
		rows[i] = &fsm.Range{Changed: 1, Descriptor: keyspace.Descriptor{
			Range: keyspace.RangeID(i + 1), Generation: 1, ConfIndex: 1, Replicas: sampleDescriptor.Replicas,
			Span: keyspace.Span{Start: border(i), End: border(i + 1)},
		}}
	}
	f := &feedReceiver{}
	for i := 0; i < ranges; i += feedRows {
		part := feedPart{Version: 1, Full: i == 0, Last: i+feedRows >= ranges, Rows: rows[i:min(i+feedRows, ranges)]}
		if _, err := f.receive(part.encode()); err != nil {
			tb.Fatal(err)
		}
	}
	if f.base.Len() != ranges {
		tb.Fatalf("%d ranges, want %d", f.base.Len(), ranges)
	}
	return f, rows
}

// BenchmarkFeedChange: one of 100,000 ranges has changed, and a node hears of it.
func BenchmarkFeedChange(b *testing.B) {
	f, rows := feedOf(b, 100_000)
	version := uint64(1)
	b.ReportAllocs()
	for b.Loop() {
		version++
		g := *rows[int(version)*7919%len(rows)]
		g.Changed, g.Descriptor.ConfIndex = version, version
		part := feedPart{Version: version, Last: true, Rows: []*fsm.Range{&g}}
		if _, err := f.receive(part.encode()); err != nil {
			b.Fatal(err)
		}
	}
}

// TestFeedKeepsTheKeyspaceCovered: rows that leave a hole or an overlap in the map are refused,
// and all others are taken. A walk over the whole map is the reference.
func TestFeedKeepsTheKeyspaceCovered(t *testing.T) {
	taken, refused := 0, 0
	for seed := range uint64(4000) {
		rng := rand.New(rand.NewPCG(seed, 1))
		base, rows := feedOf(t, 8)
		border := func() []byte { // of nothing often enough
			if i := rng.IntN(len(rows) + 1); i < len(rows) {
				return rows[i].Descriptor.Span.Start
			}
			return nil
		}
		var changed []*fsm.Range
		for i := range 1 + rng.IntN(3) {
			g := *rows[rng.IntN(len(rows))]
			g.Changed, g.Descriptor.Range = 2, g.Descriptor.Range+keyspace.RangeID(10*i)
			if rng.IntN(3) > 0 {
				g.Descriptor.Span.End = border()
			}
			if rng.IntN(3) == 0 {
				g.Descriptor.Span.Start = border()
			}
			if changed = append(changed, &g); rng.IntN(2) == 0 { // the rest of what it covers
				rest := g
				rest.Descriptor.Range += 100
				rest.Descriptor.Span = keyspace.Span{Start: g.Descriptor.Span.End, End: border()}
				changed = append(changed, &rest)
			}
		}
		whole := base.base.With(2, changed, nil, keyspace.Descriptor{}).Check()
		_, err := base.receive((&feedPart{Version: 2, Last: true, Rows: changed}).encode())
		if (err == nil) != (whole == nil) {
			t.Fatalf("seed %d: %v, and a walk over all says %v", seed, err, whole)
		}
		if err == nil {
			taken++
		} else {
			refused++
		}
	}
	if taken < 100 || refused < 100 {
		t.Errorf("%d were taken and %d refused: too few to show anything", taken, refused)
	}
}

// TestAChangeIsCheckedAlone: what one change of a large map costs does not grow with the map.
func TestAChangeIsCheckedAlone(t *testing.T) {
	f, rows := feedOf(t, 20_000)
	g := *rows[7919]
	g.Changed, g.Descriptor.ConfIndex = 2, 2
	part := (&feedPart{Version: 2, Last: true, Rows: []*fsm.Range{&g}}).encode()
	if got := measure.Excess(len(part), func() {
		if _, err := f.receive(part); err != nil {
			t.Fatal(err)
		}
	}); got != 0 {
		t.Errorf("%d bytes beyond what came", got)
	}
}
