package heat

import (
	"context"
	"fmt"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/internal/measure"
	"github.com/skeindb/skein/keyspace"
)

const day = 24 * 60 * 60

// show returns the map of the time until now.
func show(t testing.TB, s *Store, now, from int64) (Query, *Grid) {
	t.Helper()
	q, err := NewQuery(time.Unix(now, 0), Time{From: from}, 0, 0, keyspace.Span{})
	if err != nil {
		t.Fatal(err)
	}
	g, err := s.Grid(t.Context(), q)
	if err != nil {
		t.Fatal(err)
	}
	return q, g
}

// Each minute is in all three resolutions, as long as these reach back, and another Store of the engine finds it.
func TestResolutions(t *testing.T) {
	s, add := newTestStore(t)
	const begun, minutes = 1_000 * day, 7 * 60
	for i := range int64(minutes) {
		add(begun+i*minute, of("k", 1))
	}
	now := int64(begun + minutes*minute)
	again := NewStore(s.engine, zap.NewNop())
	for _, tc := range []struct {
		from   int64
		width  int64
		writes uint64
	}{
		{now - 60*minute, minute, 60},
		{now - 360*minute, minute, 360},
		{now - 361*minute, 10 * minute, 370},
		{now - day, 10 * minute, minutes},
		{now - 5*day, 60 * minute, minutes},
		{now - 27*day, 2 * 60 * minute, minutes},
	} {
		for _, s := range []*Store{s, again} {
			q, g := show(t, s, now, tc.from)
			if sum := total(g); q.Width != tc.width || sum.Writes != tc.writes || sum.Bytes != 10*tc.writes || len(g.Starts) != 1 || string(g.End) != "k\x00" {
				t.Errorf("%d s ago: columns of %d s have %v in %d rows", now-tc.from, q.Width, sum, len(g.Starts))
			}
		}
	}
	add(now, of("k", 1))
	if n := len(s.starts[0]); n != tiers[0].kept {
		t.Errorf("%d minutes are kept", n)
	}
}

// A clock that is set back adds to the columns that are there. One that was ahead for a while leaves the older columns alone, and
// the columns of that while go first. Nothing is counted twice, and no more columns are kept than may be.
func TestClockSteps(t *testing.T) {
	s, add := newTestStore(t)
	const now = 1_000 * day
	for i := range int64(10) {
		add(now+i*minute, of("k", 1))
	}
	for i := range int64(10) { // ten minutes back
		add(now+i*minute, of("l", 1))
	}
	_, g := show(t, s, now+10*minute, now)
	if sum := total(g); sum.Writes != 20 {
		t.Errorf("back: %v", sum)
	}
	for i := range int64(20) { // ten years ahead
		add(now+3650*day+i*minute, of("m", 1))
	}
	_, g = show(t, s, now+10*minute, now)
	if sum := total(g); sum.Writes != 20 {
		t.Errorf("ahead, and back: %v", sum)
	}
	for i := range int64(tiers[0].kept) {
		add(now+(10+i)*minute, of("n", 1))
	}
	for _, start := range s.starts[0] {
		if start > now+day {
			t.Errorf("a minute at %d is kept, of %d", start, len(s.starts[0]))
		}
	}
	if n := len(s.starts[0]); n != tiers[0].kept {
		t.Errorf("%d minutes are kept", n)
	}
	_, g = show(t, s, now+int64(9+tiers[0].kept)*minute, now+10*minute)
	if sum := total(g); sum.Writes != uint64(tiers[0].kept) {
		t.Errorf("behind it: %v", sum)
	}
}

// A column that is damaged is left out, and its minute is written anew.
func TestDamagedColumn(t *testing.T) {
	s, add := newTestStore(t)
	const now = 1_000 * day
	add(now, of("k", 1))
	add(now+minute, of("k", 1))
	b := s.engine.NewBatch()
	if err := b.Set(columnKey(0, now), []byte{columnVersion, 9}); err != nil {
		t.Fatal(err)
	}
	if err := b.Commit(); err != nil {
		t.Fatal(err)
	}
	if _, g := show(t, s, now+minute, now); total(g).Writes != 1 {
		t.Errorf("%v", total(g))
	}
	add(now, of("k", 5))
	if _, g := show(t, s, now+minute, now); total(g).Writes != 6 {
		t.Errorf("written anew: %v", total(g))
	}
}

// A query that waits for another one ends with its context, and one that nobody asks is refused.
func TestQueriesEnd(t *testing.T) {
	s, _ := newTestStore(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	s.reading <- struct{}{}
	if _, err := s.Grid(ctx, Query{Width: minute, Columns: 1, Rows: 1}); err == nil {
		t.Error("it does not wait")
	}
	<-s.reading
	if _, err := s.Grid(t.Context(), Query{Width: minute, Columns: 1}); err == nil {
		t.Error("a map of no rows is made")
	}
}

// Maps of several nodes add up, also where one has nothing.
func TestMerge(t *testing.T) {
	q := Query{Width: minute, Columns: 2, Rows: 3}
	grid := func(start, end string, writes ...uint64) *Grid {
		g := &Grid{Starts: [][]byte{[]byte(start)}, End: []byte(end)}
		for _, w := range writes {
			g.Counts = append(g.Counts, Counts{Writes: w})
		}
		return g
	}
	got := q.Merge(grid("a", "c", 1, 2), &Grid{}, grid("x", "", 3, 4), grid("a", "c", 10, 20))
	if fmt.Sprintf("%q %q %v", got.Starts, got.End, got.Counts) != `["a" "c" "x"] "" [{11 0 0} {22 0 0} {0 0 0} {0 0 0} {3 0 0} {4 0 0}]` {
		t.Errorf("%q %q %v", got.Starts, got.End, got.Counts)
	}
	if got := q.Merge(&Grid{}); len(got.Starts) > 0 || len(got.Counts) > 0 {
		t.Errorf("of nothing: %+v", got)
	}
}

// BenchmarkQuery makes the map of a node that has 10,000 ranges in use, and puts it together with two others'. Minutes differ in
// the keys that were sampled.
func BenchmarkQuery(b *testing.B) {
	s, add := newTestStore(b)
	const now = 1_000 * day
	for m := range int64(360) {
		r := NewRecorder(add)
		r.Turn(time.Unix(now+m*minute, 0))
		for i := range 10_000 {
			key := fmt.Sprintf("/registry/pods/namespace-%06d/", i)
			r.Add(part(keyspace.RangeID(i+1), 1, key, key+"~", Counts{Writes: uint64(i%100) + 1}, sample(fmt.Sprintf("%s%d", key, m*7919%1000), true, 1)))
		}
		r.Flush()
	}
	b.ReportAllocs()
	began := measure.CPU()
	for b.Loop() {
		q, g := show(b, s, now+359*minute, now)
		g = q.Merge(q.Merge(g, g), g)
		if sum := total(g); sum.Writes != 3*360*10_000*101/2 {
			b.Fatal(sum)
		}
	}
	b.ReportMetric(float64(measure.CPU()-began)/float64(b.N)/1e6, "cpu-ms/op")
}
