package operate

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/shard"
)

// rangeOf is a descriptor of [start, end), in which "-" is no end.
func rangeOf(id keyspace.RangeID, g keyspace.Generation, start, end string) keyspace.Descriptor {
	d := keyspace.Descriptor{Range: id, Generation: g, Span: keyspace.Span{Start: []byte(start), End: []byte(end)}}
	if end == "-" {
		d.Span.End = nil
	}
	return d
}

// covered writes what cover has found, as "range@generation[start,end)" and "?[start,end)".
func covered(ranges []keyspace.Descriptor, missing []keyspace.Span) string {
	var all []string
	for _, d := range ranges {
		all = append(all, fmt.Sprintf("%d@%d[%s,%s)", d.Range, d.Generation, d.Span.Start, d.Span.End))
	}
	for _, m := range missing {
		all = append(all, fmt.Sprintf("?[%s,%s)", m.Start, m.End))
	}
	return strings.Join(all, " ")
}

func TestCover(t *testing.T) {
	for _, tc := range []struct {
		what string
		said []keyspace.Descriptor
		want string
	}{
		{"nothing was said", nil, "?[,)"},
		{"the map alone", []keyspace.Descriptor{rangeOf(1, 1, "", "m"), rangeOf(2, 1, "m", "-")}, "1@1[,m) 2@1[m,)"},
		{"a split that the map has not", []keyspace.Descriptor{rangeOf(1, 1, "", "-"), rangeOf(1, 2, "", "m"), rangeOf(9, 2, "m", "-")}, "1@2[,m) 9@2[m,)"},
		{"of a split only the left one was heard of", []keyspace.Descriptor{rangeOf(1, 1, "", "p"), rangeOf(2, 1, "p", "-"), rangeOf(1, 2, "", "m")}, "1@2[,m) 2@1[p,) ?[m,p)"},
		{"of a split only the right one was heard of", []keyspace.Descriptor{rangeOf(1, 1, "", "-"), rangeOf(9, 2, "m", "-")}, "9@2[m,) ?[,m)"},
		{"a part in the middle", []keyspace.Descriptor{rangeOf(1, 1, "", "-"), rangeOf(9, 3, "f", "m")}, "9@3[f,m) ?[,f) ?[m,)"},
		{"a merge that the map has not", []keyspace.Descriptor{rangeOf(1, 1, "", "m"), rangeOf(2, 4, "m", "-"), rangeOf(1, 5, "", "-")}, "1@5[,)"},
		{"a merge, and a replica that was left behind", []keyspace.Descriptor{rangeOf(1, 5, "", "-"), rangeOf(2, 4, "m", "-")}, "1@5[,)"},
		{"split elsewhere since the merge", []keyspace.Descriptor{rangeOf(1, 6, "", "c"), rangeOf(2, 4, "m", "-"), rangeOf(3, 5, "c", "-")}, "1@6[,c) 3@5[c,)"},
		{"what was absorbed by what was split since is nobody's", []keyspace.Descriptor{rangeOf(7, 6, "", "m"), rangeOf(5, 5, "", "-"), rangeOf(3, 3, "m", "-")}, "7@6[,m) ?[m,)"},
		{"two in a row were not heard of", []keyspace.Descriptor{rangeOf(1, 2, "", "c"), rangeOf(4, 1, "x", "-")}, "1@2[,c) 4@1[x,) ?[c,x)"},
	} {
		for range 4 { // in any order
			rand.Shuffle(len(tc.said), func(i, j int) { tc.said[i], tc.said[j] = tc.said[j], tc.said[i] })
			if got := covered(cover(tc.said)); got != tc.want {
				t.Errorf("%s: %s, want %s", tc.what, got, tc.want)
			}
		}
	}
}

// TestCoverOfHistories: whatever was heard of a history of splits and merges, each key is in
// one range or missing; and nothing is missing where what there is now was heard of.
func TestCoverOfHistories(t *testing.T) {
	for seed := range uint64(300) {
		rng := rand.New(rand.NewPCG(seed, 1))
		now, past, next := []keyspace.Descriptor{rangeOf(1, 1, "", "-")}, []keyspace.Descriptor(nil), keyspace.RangeID(2)
		for range 12 {
			past = append(past, now...)
			i := rng.IntN(len(now))
			d := &now[i]
			if rng.IntN(3) > 0 {
				key := fmt.Appendf(nil, "%02d", rng.IntN(100))
				if !d.Span.Contains(key) || bytes.Equal(d.Span.Start, key) {
					continue
				}
				right := *d
				right.Range, right.Generation, right.Span.Start = next, d.Generation+1, key
				d.Generation, d.Span.End, next = d.Generation+1, key, next+1
				now = slices.Insert(now, i+1, right)
			} else if i+1 < len(now) {
				d.Generation, d.Span.End = max(d.Generation, now[i+1].Generation)+1, now[i+1].Span.End
				now = slices.Delete(now, i+1, i+2)
			}
		}
		some := slices.DeleteFunc(append(slices.Clone(past), now...), func(keyspace.Descriptor) bool { return rng.IntN(2) == 0 })
		ranges, missing := cover(some)
		if bad := untiled(ranges, missing); bad != "" {
			t.Fatalf("seed %d: %s of %s", seed, bad, covered(ranges, missing))
		}
		if ranges, missing := cover(append(some, now...)); covered(ranges, missing) != covered(now, nil) {
			t.Fatalf("seed %d: %s, want %s", seed, covered(ranges, missing), covered(now, nil))
		}
	}
}

// untiled says where ranges and missing spans do not cover each key exactly once.
func untiled(ranges []keyspace.Descriptor, missing []keyspace.Span) string {
	spans := slices.Clone(missing)
	for _, d := range ranges {
		spans = append(spans, d.Span)
	}
	slices.SortFunc(spans, func(a, b keyspace.Span) int { return bytes.Compare(a.Start, b.Start) })
	var at []byte
	for i, s := range spans {
		if !bytes.Equal(s.Start, at) || (len(s.End) == 0) != (i == len(spans)-1) {
			return fmt.Sprintf("%s behind %q", s, at)
		}
		at = s.End
	}
	return ""
}

// TestAskedAgainForWhatIsMissing: until nothing is, or the time is over; a view that its
// time has cut short does not count.
func TestAskedAgainForWhatIsMissing(t *testing.T) {
	hole := []keyspace.Span{{Start: []byte("m")}}
	for _, tc := range []struct {
		what    string
		full    int // the look that has everything
		given   time.Duration
		err     error
		looks   int
		missing int
		answers int // from which look on one node answers that did at first
	}{
		{what: "at the third look, as fewer answer the second one", full: 2, answers: 3, given: time.Minute, looks: 3},
		{what: "at the third look", full: 3, given: time.Minute, looks: 3},
		{what: "never", full: 1 << 30, given: time.Minute, looks: 9, missing: 1},                                // within completeTimeout, less and less often
		{what: "within the command's time", full: 1 << 30, given: 200 * time.Millisecond, looks: 2, missing: 1}, // half of it
		{what: "nobody answers", err: errors.New("no map"), given: time.Minute, looks: 1, missing: 1},
	} {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), tc.given)
			defer cancel()
			looks := 0
			v := (&clusterView{missing: hole, lists: map[keyspace.NodeID][]shard.Summary{1: nil}}).complete(ctx, clock.Virtual(), func(ctx context.Context) (*clusterView, error) {
				looks++
				if clock.Sleep(ctx, clock.Virtual(), 10*time.Millisecond) != nil {
					return &clusterView{}, nil // it has asked nobody
				}
				again := &clusterView{missing: hole, lists: map[keyspace.NodeID][]shard.Summary{1: nil}}
				if looks >= tc.full {
					again.missing = nil
				}
				if looks < tc.answers {
					again.lists, again.missing = nil, nil
				}
				return again, tc.err
			})
			if len(v.missing) != tc.missing || looks < tc.looks || looks > tc.looks+1 {
				t.Errorf("%s: %d missing after %d looks, want %d after %d", tc.what, len(v.missing), looks, tc.missing, tc.looks)
			}
		})
	}
}
