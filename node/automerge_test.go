package node

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/keyspace"
)

// mergeSoon has ranges that are small and cold for so long merged.
const mergeSoon = 40 * time.Second

// borders returns where the ranges begin, but for the first.
func (r *rig) borders() (keys []string) {
	r.t.Helper()
	l, err := r.nodes[0].core.Admin().Ranges(r.t.Context(), &adminpb.RangeListRequest{})
	if err != nil {
		r.t.Fatal(err)
	}
	for _, g := range l.GetRanges()[1:] {
		keys = append(keys, string(g.GetStart()))
	}
	return keys
}

// warm puts keys of a span, so many a second, until it is stopped, which returns the
// revisions of that.
func (r *rig) warm(n *rigNode, prefix string, perSecond int) (stop func() []int64) {
	ctx, cancel := context.WithCancel(r.t.Context())
	var wait sync.WaitGroup
	var revisions []int64
	wait.Go(func() {
		for i := 0; ctx.Err() == nil; i++ {
			revisions = append(revisions, r.mustPut(n, fmt.Sprint(prefix, i%50), "warm"))
			time.Sleep(time.Second / time.Duration(perSecond))
		}
	})
	return func() []int64 {
		cancel()
		wait.Wait()
		return revisions
	}
}

// wantKept fails where operators are not told that these borders stay, and no others.
func (r *rig) wantKept(keys ...string) {
	r.t.Helper()
	a := r.nodes[1].core.Admin()
	l, err := a.Ranges(r.t.Context(), &adminpb.RangeListRequest{})
	if err != nil {
		r.t.Fatal(err)
	}
	var listed, shown []string
	for _, g := range l.Ranges {
		if g.Kept {
			listed = append(listed, string(g.Start))
		}
		if s, err := a.ShowRange(r.t.Context(), keyspace.RangeID(g.Id)); err != nil {
			r.t.Error(err)
		} else if s.Range.Kept {
			shown = append(shown, string(s.Range.Start))
		}
	}
	if !slices.Equal(listed, keys) || !slices.Equal(shown, keys) {
		r.t.Errorf("kept are %q in the list, %q where each is shown; want %q", listed, shown, keys)
	}
}

// Real ranges that are small, cold and old enough become one by themselves; a warm one, a
// large one, and those that an operator has cut do not. What was warm is merged when it has
// been cold for long. Nothing is lost, and no revision left out.
func TestRangesMergeByThemselves(t *testing.T) {
	long(t, "puts 80 keys a second for minutes of virtual time")
	small := func(o *Options) {
		shortLog(o)
		o.RangeMergeAfter, o.RangeMaxBytes, o.RangeSplitLoad = mergeSoon, 16<<20, 120
	}
	bubble(t, 3, nil, small, func(r *rig) {
		revisions := []int64{r.mustPut(r.nodes[0], "a", "v")}
		for _, k := range []string{"b", "d", "f"} {
			r.splitAt(k)
			revisions = append(revisions, r.mustPut(r.nodes[1], k, "v")) // its range is led
		}
		for _, k := range []string{"h", "B"} { // what begins with a capital is small and cold too
			if _, _, err := r.nodes[1].core.Admin().SplitRange(r.t.Context(), []byte(k)); err != nil {
				r.t.Fatal(err)
			}
		}
		time.Sleep(5 * time.Second) // all are measured anew, which what is written now counts upon
		for _, k := range []string{"b1", "c", "e", "g", "h1", "z"} {
			revisions = append(revisions, r.mustPut(r.nodes[0], k, "v"))
		}
		value := make([]byte, 40<<10) // nothing that a table makes smaller
		for i := range 140 {          // a quarter of the bound, and more
			for k := range value {
				value[k] = byte(r.rng.Uint32())
			}
			revisions = append(revisions, r.mustPut(r.nodes[2], fmt.Sprintf("g%03d", i), string(value)))
		}
		cool := r.warm(r.nodes[1], "dd", 80)
		want := func(when string, keys ...string) {
			r.t.Helper()
			if got := r.borders(); !slices.Equal(got, keys) {
				r.t.Errorf("%s: the borders are %q, want %q", when, got, keys)
			}
		}
		time.Sleep(mergeSoon / 2)
		want("young", "B", "b", "d", "f", "h")
		time.Sleep(mergeSoon/2 + 15*time.Second)
		want("old enough", "B", "d", "f", "h")
		time.Sleep(2 * mergeSoon)
		want("warm and large", "B", "d", "f", "h")
		revisions = append(revisions, cool()...)
		time.Sleep(mergeSoon / 2)
		want("cold not long ago", "B", "d", "f", "h")
		// The mean of a load decays, and is reported every ten seconds.
		r.wait(4*mergeSoon, "the cold one is merged", func() bool { return len(r.borders()) == 3 })
		want("cold for long", "B", "f", "h")
		time.Sleep(2 * mergeSoon)
		want("in the end", "B", "f", "h")
		r.wantKept("B", "h")
		for i, k := range []string{"a", "b1", "c", "e", "g", "h1", "z"} {
			r.mustGet(r.nodes[i%3], k, "v")
		}
		if keys, last := r.total(r.nodes[0]); keys != 7+3+140+50 {
			r.t.Errorf("%d keys at revision %d", keys, last)
		}
		r.dense(append(revisions, r.mustPut(r.nodes[1], "last", "v")))
		// It begins there already, and is asked to stay all the same.
		if _, _, err := r.nodes[2].core.Admin().SplitRange(r.t.Context(), []byte("f")); err == nil || !strings.Contains(err.Error(), "already") {
			r.t.Errorf("a second split there: %v", err)
		}
		r.caughtUp(5 * time.Second)
	})
}
