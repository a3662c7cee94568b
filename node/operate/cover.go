package operate

import (
	"bytes"
	"cmp"
	"slices"
	"sort"

	"github.com/skeindb/skein/keyspace"
)

// present returns the newest descriptor of each range, in the order in which ranges come first.
func present(said []keyspace.Descriptor) []keyspace.Descriptor {
	at := make(map[keyspace.RangeID]int, len(said))
	all := make([]keyspace.Descriptor, 0, len(said))
	for i := range said {
		d := &said[i]
		if j, ok := at[d.Range]; !ok {
			at[d.Range] = len(all)
			all = append(all, *d)
		} else if d.Newer(&all[j]) {
			all[j] = *d
		}
	}
	return all
}

// cover merges the descriptors from placement and from replicas of about one moment. It returns
// the present ranges in key order, and the spans without a known range. For each key generations
// only grow, so a key belongs to the range with the highest known generation. If that range has
// lost a part of its span, the new holder of the part is unknown.
func cover(said []keyspace.Descriptor) (ranges []keyspace.Descriptor, missing []keyspace.Span) {
	all := present(said)
	ranges = make([]keyspace.Descriptor, 0, len(all))
	slices.SortFunc(all, func(a, b keyspace.Descriptor) int {
		return cmp.Or(bytes.Compare(a.Span.Start, b.Span.Start), cmp.Compare(a.Range, b.Range))
	})
	var over []keyspace.Descriptor // those whose spans hold the key at, few
	var run keyspace.Descriptor    // whose keys are those from from to at; range 0 is nobody
	var at, from []byte
	end := func() { // of the run
		switch span := (keyspace.Span{Start: from, End: at}); {
		case run.Range != 0 && run.Span.Equal(span):
			ranges = append(ranges, run)
		case len(missing) > 0 && bytes.Equal(missing[len(missing)-1].End, from) && len(from) > 0:
			missing[len(missing)-1].End = at
		default:
			missing = append(missing, span)
		}
	}
	for first := true; first || len(at) > 0; first = false {
		for len(all) > 0 && bytes.Equal(all[0].Span.Start, at) {
			over, all = append(over, all[0]), all[1:]
		}
		over = slices.DeleteFunc(over, func(d keyspace.Descriptor) bool { return !d.Span.Contains(at) })
		var top keyspace.Descriptor
		for i := range over {
			if top.Range == 0 || over[i].Generation > top.Generation {
				top = over[i]
			}
		}
		if !first && top.Range != run.Range {
			end()
			from = at
		}
		run, at = top, top.Span.End
		if len(all) > 0 && (run.Range == 0 || len(at) == 0 || bytes.Compare(all[0].Span.Start, at) < 0) {
			at = all[0].Span.Start
		}
	}
	end()
	return ranges, missing
}

// coverNear is cover where mapped holds each key once. Only what is near the ranges of newer is covered anew: all others stay as they are.
func coverNear(mapped, newer []keyspace.Descriptor) (ranges []keyspace.Descriptor, missing []keyspace.Span) {
	lo, hi := len(mapped), 0
	ids := map[keyspace.RangeID]bool{}
	for i := range newer {
		ids[newer[i].Range] = true
		span := newer[i].Span
		lo = min(lo, sort.Search(len(mapped), func(k int) bool {
			end := mapped[k].Span.End
			return len(end) == 0 || bytes.Compare(end, span.Start) > 0
		}))
		hi = max(hi, sort.Search(len(mapped), func(k int) bool {
			return len(span.End) > 0 && bytes.Compare(mapped[k].Span.Start, span.End) >= 0
		}))
	}
	for i := range mapped { // a range may have given away keys
		if ids[mapped[i].Range] {
			lo, hi = min(lo, i), max(hi, i+1)
		}
	}
	lo, hi = max(lo-1, 0), min(hi+1, len(mapped)) // with the neighbours, what is missing is not joined to what lies beyond them
	near, missing := cover(append(slices.Clone(mapped[lo:hi]), newer...))
	if lo > 0 {
		missing = missing[1:]
	}
	if hi < len(mapped) {
		missing = missing[:len(missing)-1]
	}
	return slices.Concat(mapped[:lo], near, mapped[hi:]), missing
}

// whole says whether ranges in key order hold each key once.
func whole(ranges []keyspace.Descriptor) bool {
	var at []byte
	for i := range ranges {
		d := &ranges[i]
		last := i == len(ranges)-1
		if d.Range == 0 || !bytes.Equal(d.Span.Start, at) || (len(d.Span.End) == 0) != last || !last && bytes.Compare(at, d.Span.End) >= 0 {
			return false
		}
		at = d.Span.End
	}
	return len(ranges) > 0
}
