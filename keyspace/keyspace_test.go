package keyspace

import (
	"reflect"
	"testing"
)

func span(start, end string) Span {
	s := Span{}
	if start != "" {
		s.Start = []byte(start)
	}
	if end != "" {
		s.End = []byte(end)
	}
	return s
}

func TestFromEtcd(t *testing.T) {
	for _, c := range []struct {
		key, end string
		want     Span
		ok       bool
	}{
		{"a", "", span("a", "a\x00"), true},
		{"a", "b", span("a", "b"), true},
		{"a", "\x00", span("a", ""), true},
		{"\x00", "\x00", Span{}, true},
		{"b", "a", Span{}, false},
		{"a", "a", Span{}, false},
	} {
		got, ok := FromEtcd([]byte(c.key), []byte(c.end))
		if ok != c.ok || (ok && !got.Equal(c.want)) {
			t.Errorf("FromEtcd(%q, %q) = %v, %v; want %v, %v", c.key, c.end, got, ok, c.want, c.ok)
		}
	}
}

// TestSpanAlgebra checks the algebra of spans against a second implementation: the sets
// of keys of a small universe that the spans contain.
func TestSpanAlgebra(t *testing.T) {
	points := []string{"", "a", "a\x00", "b", "c"}
	var keys [][]byte
	for _, p := range append(points, "aa", "d") {
		keys = append(keys, []byte(p))
	}
	var spans []Span
	for _, s := range points {
		for _, e := range points {
			if e == "" || s < e {
				spans = append(spans, span(s, e))
			}
		}
	}
	set := func(s Span) (m []bool) {
		for _, k := range keys {
			m = append(m, s.Contains(k))
		}
		return m
	}
	for _, a := range spans {
		for _, b := range spans {
			overlap, covers := false, true
			sa, sb := set(a), set(b)
			both := make([]bool, len(keys))
			for i := range keys {
				both[i] = sa[i] && sb[i]
				overlap = overlap || both[i]
				covers = covers && (sa[i] || !sb[i])
			}
			if a.Overlaps(b) != overlap {
				t.Errorf("%v overlaps %v: %v", a, b, a.Overlaps(b))
			}
			if a.Covers(b) != covers {
				t.Errorf("%v covers %v: %v", a, b, a.Covers(b))
			}
			if got, ok := a.Intersect(b); ok != overlap || (ok && !reflect.DeepEqual(set(got), both)) {
				t.Errorf("%v intersect %v = %v, %v", a, b, got, ok)
			}
		}
	}
}

func TestNextDoesNotTouchItsKey(t *testing.T) {
	backing := []byte("abc")
	if got := Next(backing[:2]); string(got) != "ab\x00" || string(backing) != "abc" {
		t.Fatalf("Next = %q, backing array = %q", got, backing)
	}
}

func TestGroupIDs(t *testing.T) {
	if !PlacementGroup.IsSystem() || RangeID(1).Group().IsSystem() || RangeID(5).Group().Range() != 5 {
		t.Fatal("system bit")
	}
	if PlacementGroup.String() != "placement" || RangeID(7).Group().String() != "7" {
		t.Fatal("names")
	}
	defer func() {
		if recover() == nil {
			t.Fatal("a system group passed for a range")
		}
	}()
	PlacementGroup.Range()
}

func TestNewer(t *testing.T) {
	a := Descriptor{Generation: 2, ConfIndex: 1}
	b := Descriptor{Generation: 1, ConfIndex: 9}
	c := Descriptor{Generation: 2, ConfIndex: 2}
	if !a.Newer(&b) || b.Newer(&a) || !c.Newer(&a) || a.Newer(&a) {
		t.Fatal("order of descriptors")
	}
}

func FuzzDecodeDescriptor(f *testing.F) {
	f.Add(AppendDescriptor(nil, &Descriptor{
		Range: 3, Generation: 6, Span: span("a", "m"), ConfIndex: 12,
		Replicas: []Replica{{ID: 1, Node: 2}, {ID: 4, Node: 3, Role: RoleLearner}},
	}))
	f.Fuzz(func(t *testing.T, b []byte) {
		d, rest, err := DecodeDescriptor(b)
		if err != nil {
			return
		}
		again, left, err := DecodeDescriptor(append(AppendDescriptor(nil, &d), rest...))
		if err != nil || len(left) != len(rest) || !reflect.DeepEqual(d, again) {
			t.Fatalf("%+v became %+v (%d of %d bytes left, %v)", d, again, len(left), len(rest), err)
		}
	})
}

// A quorum is a majority of the voters, in both halves of a joint configuration; learners count for nothing.
func TestHasQuorum(t *testing.T) {
	voter, learner, in, out, demoted := RoleVoter, RoleLearner, RoleVoterIncoming, RoleVoterOutgoing, RoleVoterDemoting
	for _, c := range []struct {
		roles []Role
		up    string // one digit for each
		want  bool
	}{
		{nil, "", false},
		{[]Role{voter}, "1", true},
		{[]Role{voter}, "0", false},
		{[]Role{voter, voter}, "10", false},
		{[]Role{voter, voter, voter}, "110", true},
		{[]Role{voter, voter, voter}, "100", false},
		{[]Role{voter, voter, voter, learner}, "1001", false},
		{[]Role{voter, voter, voter, learner}, "1100", true},
		{[]Role{voter, voter, in, out}, "1110", true},
		{[]Role{voter, voter, in, out}, "1001", false}, // the new half has one of three
		{[]Role{voter, voter, in, out}, "1010", false}, // the old half has one of three
		{[]Role{voter, voter, in, demoted}, "0111", true},
		{[]Role{voter, voter, in, demoted}, "0011", false},
	} {
		d := Descriptor{}
		for i, role := range c.roles {
			d.Replicas = append(d.Replicas, Replica{ID: ReplicaID(i), Role: role})
		}
		if got := d.HasQuorum(func(r Replica) bool { return c.up[r.ID] == '1' }); got != c.want {
			t.Errorf("%v with %s up: %v", c.roles, c.up, got)
		}
	}
}
