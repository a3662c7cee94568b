package driver

import (
	"maps"
	"testing"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
)

// TestSeat: who has asked for most revisions for a while gets the seat, and nobody else.
func TestSeat(t *testing.T) {
	for _, tc := range []struct {
		what string
		// rates are the revisions a second of nodes 1 to 3, for a minute each.
		rates [][3]uint64
		want  keyspace.NodeID
	}{
		{what: "nobody asks", rates: [][3]uint64{{0, 0, 0}}},
		{what: "one node asks", rates: [][3]uint64{{0, 100, 0}}, want: 2},
		{what: "one node asks for most", rates: [][3]uint64{{30, 100, 10}}, want: 2},
		{what: "two ask for as much", rates: [][3]uint64{{100, 100, 0}}},
		{what: "all ask for as much", rates: [][3]uint64{{100, 110, 90}}},
		{what: "hardly anything is asked for", rates: [][3]uint64{{0, 9, 0}}},
		{what: "it has asked before", rates: [][3]uint64{{0, 100, 0}, {0, 100, 90}}},
		{what: "another one asks since", rates: [][3]uint64{{0, 100, 0}, {0, 1, 100}}, want: 3},
	} {
		var s seat
		asked, now, got := map[keyspace.NodeID]uint64{}, clock.Time(1), keyspace.NodeID(0)
		for _, rates := range tc.rates {
			for second := range 60 {
				to := s.look(maps.Clone(asked), now)
				switch {
				case second == 30:
					got = 0 // what came until then counts for the minute before
				case to != 0:
					got = to
				}
				now = now.Add(time.Second)
				for i, n := range rates {
					asked[keyspace.NodeID(i+1)] += n
				}
			}
		}
		if got != tc.want {
			t.Errorf("%s: the seat goes to node %s, want %s", tc.what, got, tc.want)
		}
	}
}

// TestSeatPauses: attempts that fail come ever more rarely, and a node whose counts are unknown gets nothing.
func TestSeatPauses(t *testing.T) {
	var s seat
	asked, now, tries := map[keyspace.NodeID]uint64{}, clock.Time(1), 0
	for range 3600 {
		if s.look(maps.Clone(asked), now) == 2 {
			tries++
			s.failed(now)
		}
		if s.look(nil, now) != 0 {
			t.Fatal("the seat goes to somebody by unknown counts")
		}
		now = now.Add(time.Second)
		asked[2] += 100
	}
	if tries != 7 { // after 45 s, then after pauses of 1, 2, 4, 8, 16 and 16 minutes
		t.Errorf("%d attempts in an hour, want 7", tries)
	}
}
