package diff

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"

	"go.uber.org/goleak"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// side is a store in memory at one revision.
type side struct {
	keys   []mvcc.Version // sorted
	leases map[keyspace.LeaseID]int64
	// revision is the one that it is at.
	revision keyspace.Revision
	// largest is the largest page that was asked for, in keys and in bytes of what it gave.
	largest, largestBytes int
	// counted are the keys of all spans that were asked for: an etcd counts them.
	counted int
	fail    error
}

func newSide(keys ...mvcc.Version) *side {
	slices.SortFunc(keys, func(a, b mvcc.Version) int { return bytes.Compare(a.Key, b.Key) })
	return &side{keys: keys, revision: 100, leases: map[keyspace.LeaseID]int64{}}
}

func (s *side) Page(_ context.Context, from, end []byte, revision keyspace.Revision, limit int) (Page, error) {
	if s.fail != nil {
		return Page{}, s.fail
	}
	if revision == 0 {
		revision = s.revision
	}
	p := Page{Revision: revision}
	for _, k := range s.keys {
		if bytes.Compare(k.Key, from) < 0 || end != nil && bytes.Compare(k.Key, end) >= 0 {
			continue
		}
		s.counted++
		if p.More = p.More || len(p.Keys) == limit; !p.More {
			p.Keys = append(p.Keys, k)
		}
	}
	s.largest, s.largestBytes = max(s.largest, len(p.Keys)), max(s.largestBytes, p.bytes())
	return p, nil
}

func (s *side) Count(context.Context, []byte, []byte, keyspace.Revision) (int64, keyspace.Revision, error) {
	return int64(len(s.keys)), s.revision, nil
}

func (s *side) Written(context.Context, [][]byte) ([]keyspace.Revision, error) {
	panic("a comparison looks no keys up")
}

func (s *side) Leases(context.Context) (ids []keyspace.LeaseID, err error) {
	for id := range s.leases {
		ids = append(ids, id)
	}
	return ids, s.fail
}

func (s *side) TTL(_ context.Context, id keyspace.LeaseID) (int64, bool, error) {
	ttl, ok := s.leases[id]
	return ttl, ok, nil
}

func key(name string, change func(*mvcc.Version)) mvcc.Version {
	v := mvcc.Version{Key: []byte(name), Create: 3, Mod: 7, Version: 2, Lease: 5, Value: []byte("value")}
	if change != nil {
		change(&v)
	}
	return v
}

// TestEachFieldCounts: a difference in any field of a key is found, and the text names it.
func TestEachFieldCounts(t *testing.T) {
	for what, change := range map[string]func(*mvcc.Version){
		"create revision 3 and 4":      func(v *mvcc.Version) { v.Create = 4 },
		"mod revision 7 and 8":         func(v *mvcc.Version) { v.Mod = 8 },
		"version 2 and 3":              func(v *mvcc.Version) { v.Version = 3 },
		"lease 5 and 0":                func(v *mvcc.Version) { v.Lease = 0 },
		`value "value" and "va\x00ue"`: func(v *mvcc.Version) { v.Value = []byte("va\x00ue") },
	} {
		a, b := newSide(key("a", nil), key("b", nil), key("c", nil)), newSide(key("a", nil), key("b", change), key("c", nil))
		r, err := Compare(t.Context(), a, b, Options{Show: 10})
		if err != nil {
			t.Fatal(err)
		}
		if len(r.First) != 1 || r.First[0].String() != `key "b": unequal: `+what || r.Differences[Unequal] != 1 || r.KeysA != 3 || r.KeysB != 3 {
			t.Errorf("%s: %+v", what, r)
		}
	}
}

// TestMissingKeys: keys that one side lacks are found at the beginning, in the middle and at the
// end, also across pages; what is shown is bounded and the rest is counted.
func TestMissingKeys(t *testing.T) {
	for n := range 7 {
		var all []mvcc.Version
		for i := range 5000 {
			all = append(all, key(fmt.Sprintf("k%05d", i), nil))
		}
		at := n * 833 // from the first key to the last but one
		without := append(slices.Clone(all[:at]), all[at+1:]...)
		a, b := newSide(all...), newSide(without...)
		r, err := Compare(t.Context(), a, b, Options{Show: 1})
		if err != nil {
			t.Fatal(err)
		}
		if r.Differences[OnlyA] != 1 || len(r.Differences) != 1 || string(r.First[0].Key) != fmt.Sprintf("k%05d", at) || r.KeysA != 5000 || r.KeysB != 4999 {
			t.Errorf("without key %d: %+v", at, r)
		}
		if r, err = Compare(t.Context(), b, a, Options{}); err != nil || r.Differences[OnlyB] != 1 || len(r.First) != 0 {
			t.Errorf("the other way: %+v, %v", r, err)
		}
		if a.largest != PageKeys {
			t.Errorf("pages of %d keys, not %d", a.largest, PageKeys)
		}
	}
}

// TestPagesAreBounded: pages of large values have few keys.
func TestPagesAreBounded(t *testing.T) {
	var all []mvcc.Version
	for i := range 300 {
		all = append(all, key(fmt.Sprintf("k%05d", i), func(v *mvcc.Version) { v.Value = make([]byte, 256<<10) }))
	}
	a, b := newSide(all...), newSide(all...)
	r, err := Compare(t.Context(), a, b, Options{})
	if err != nil || !r.Equal() || r.KeysA != 300 {
		t.Fatalf("%+v, %v", r, err)
	}
	if most := firstLimit * (256<<10 + 256); a.largestBytes > most {
		t.Errorf("a page of %d bytes", a.largestBytes)
	}
}

// TestKeysOfOneSideAreCountedOnce: a comparison costs an etcd as much for each key, however many there are. It is side A.
func TestKeysOfOneSideAreCountedOnce(t *testing.T) {
	const keys = 20 * PageKeys
	var both [2]*side
	for i := range both {
		var all []mvcc.Version
		for n := range keys {
			all = append(all, mvcc.Version{Key: fmt.Appendf(nil, "%06d", n), Mod: 2, Create: 2, Version: 1})
		}
		both[i] = newSide(all...)
	}
	r, err := Compare(t.Context(), both[0], both[1], Options{})
	if err != nil || !r.Equal() || r.KeysA != keys || r.KeysB != keys {
		t.Fatalf("%+v, %v", r, err)
	}
	if n := both[0].counted; n != keys {
		t.Errorf("%d keys were counted, and there are %d", n, keys)
	}
}

func TestLeases(t *testing.T) {
	a, b := newSide(), newSide()
	a.leases = map[keyspace.LeaseID]int64{1: 10, 2: 20, 4: 40, 7: 70}
	b.leases = map[keyspace.LeaseID]int64{2: 20, 3: 30, 4: 41, 9: 90}
	r, err := Compare(t.Context(), a, b, Options{Show: 10})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, d := range r.First {
		got = append(got, d.String())
	}
	want := []string{"lease 1: lease only in A", "lease 3: lease only in B", "lease 7: lease only in A", "lease 9: lease only in B", "lease 4: lease with another TTL: granted 40 s and 41 s"}
	if !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
	b.leases = a.leases
	if r, err = Compare(t.Context(), a, b, Options{}); err != nil || !r.Equal() || r.LeasesA != 4 {
		t.Errorf("equal leases: %+v, %v", r, err)
	}
}

// TestErrorNamesTheSide: a side that cannot be read is no equal one.
func TestErrorNamesTheSide(t *testing.T) {
	a, b := newSide(key("a", nil)), newSide(key("a", nil))
	b.fail = errors.New("no")
	if _, err := Compare(t.Context(), a, b, Options{}); err == nil || err.Error() != "side B: no" {
		t.Errorf("%v", err)
	}
}

func TestPrefixEnd(t *testing.T) {
	for prefix, want := range map[string]string{"a": "b", "a\xff": "b", "\xff\xff": "", "": ""} {
		if got := prefixEnd([]byte(prefix)); string(got) != want {
			t.Errorf("%q: %q", prefix, got)
		}
	}
	a := newSide(key("a", nil), key("p1", nil), key("p2", nil), key("q", nil))
	b := newSide(key("p1", nil), key("p2", nil), key("z", nil))
	if r, err := Compare(t.Context(), a, b, Options{Prefix: []byte("p")}); err != nil || !r.Equal() || r.KeysA != 2 {
		t.Errorf("%+v, %v", r, err)
	}
}
