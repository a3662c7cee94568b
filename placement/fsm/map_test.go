package fsm

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"testing"

	"github.com/skeindb/skein/keyspace"
)

// scan returns the row of a range by a look at all rows.
func (m *Map) scan(id keyspace.RangeID) (found Range, ok bool) {
	m.All(func(g *Range) bool {
		if g.Descriptor.Range == id {
			found, ok = *g, true
		}
		return !ok
	})
	return found, ok
}

// checkIDs compares the index by range with a scan, for all ids that were ever given out.
func checkIDs(m *Map, next keyspace.RangeID) error {
	errs := []error{m.check()}
	for id := range next + 1 {
		got, ok := m.ByID(id)
		want, there := m.scan(id)
		if ok != there || !reflect.DeepEqual(got, want) {
			errs = append(errs, fmt.Errorf("range %s is %+v, %t by the index, and %+v, %t by a scan", id, got, ok, want, there))
		}
	}
	return errors.Join(errs...)
}

// The index by range has the rows that a scan finds, whatever is done to the map. That holds for each
// view, for the state loaded again, and for maps made of deltas. Old views stay as they were.
func TestByIDIsWhatAScanFinds(t *testing.T) {
	merges := 0
	for seed := range uint64(60) {
		rng := rand.New(rand.NewPCG(seed, 3))
		f := Bootstrap{Cluster: 1, Nodes: []Node{{ID: 1}, {ID: 2}, {ID: 3}}}
		s := f.FirstState(firstIndex)
		truth := map[keyspace.RangeID]keyspace.Descriptor{}
		for _, d := range f.Ranges() {
			truth[d.Range] = d
		}
		v := s.View(firstIndex, 1, nil)
		delta, rs := v.With(v.Version, nil, nil, keyspace.Descriptor{}), records{}
		old, oldDescriptors := v, v.Descriptors()
		for index := uint64(20); index < 80; index++ {
			d := v.Descriptors()[rng.IntN(v.Len())]
			switch n := rng.IntN(10); {
			case n < 4:
				s.Apply(index, Report{Descriptors: splitTruth(rng, s, truth)})
			case n < 5:
				s.Apply(index, MarkCreated{Ranges: []keyspace.RangeID{d.Range, 1000}})
			case n < 6:
				s.Apply(index, KeepBorder{Key: d.Span.Start})
			default:
				if mergeTruth(s, index, d, truth) {
					merges++
				}
			}
			if rng.IntN(3) == 0 {
				continue // the next view has the changes of several commands
			}
			v = s.View(index, 1, v)
			delta = delta.With(v.Version, v.RowsSince(delta.Version), nil, keyspace.Descriptor{})
			if err := s.Flush(rs); err != nil {
				t.Fatal(err)
			}
			again := rs.reload(t).View(index, 1, nil)
			for name, m := range map[string]*Map{"view": &v.Map, "delta": delta, "loaded": &again.Map, "old view": &old.Map} {
				if err := checkIDs(m, s.NextRange); err != nil {
					t.Fatalf("seed %d, index %d, %s: %v", seed, index, name, err)
				}
			}
			if !reflect.DeepEqual(delta.Descriptors(), v.Descriptors()) || !reflect.DeepEqual(old.Descriptors(), oldDescriptors) {
				t.Fatalf("seed %d, index %d: the delta gives %v, the view is %v", seed, index, delta.Descriptors(), v.Descriptors())
			}
			if rng.IntN(8) == 0 {
				old, oldDescriptors = v, v.Descriptors()
			}
		}
	}
	if merges < 100 {
		t.Errorf("only %d merges", merges)
	}
}

// mergeTruth has a range absorb its right neighbour, if that may be.
func mergeTruth(s *State, index uint64, d keyspace.Descriptor, truth map[keyspace.RangeID]keyspace.Descriptor) bool {
	res := s.Apply(index, BeginOperation{
		Generation: d.Generation, ConfIndex: d.ConfIndex, Operation: Operation{Range: d.Range, Kind: OperationMerge, Why: "test"},
	})
	if res.Err != nil {
		return false
	}
	ref := MergeRef{Range: d.Range, ID: res.Operation.ID}
	left, right := s.row(d.Range), s.row(res.Operation.Right)
	bound := s.Apply(index, BindMerge{Merge: ref})
	res = s.Apply(index, CommitMerge{Merge: ref, Left: VersionOf(&left.Descriptor), Right: VersionOf(&right.Descriptor)})
	s.Apply(index, EndOperation(ref))
	if bound.Err != nil || res.Err != nil {
		return false
	}
	delete(truth, right.Descriptor.Range)
	truth[d.Range] = s.row(d.Range).Descriptor
	return true
}

// BenchmarkByID looks ranges up in a map of 100,000.
func BenchmarkByID(b *testing.B) {
	const n = 100_000
	var all []*Range
	for i := range keyspace.RangeID(n) {
		d := keyspace.Descriptor{Range: i + 1, Generation: 1, Span: keyspace.Span{Start: fmt.Appendf(nil, "%08d", i), End: fmt.Appendf(nil, "%08d", i+1)}}
		if i == 0 {
			d.Span.Start = nil
		}
		if i == n-1 {
			d.Span.End = nil
		}
		all = append(all, &Range{Descriptor: d})
	}
	m := (&Map{}).With(1, all, nil, keyspace.Descriptor{})
	id := keyspace.RangeID(0)
	for b.Loop() {
		id = (id + 31_337) % n
		if _, ok := m.ByID(id + 1); !ok {
			b.Fatalf("no range %s", id+1)
		}
	}
}
