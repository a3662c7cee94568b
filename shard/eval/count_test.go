package eval

import (
	"math/rand/v2"
	"slices"
	"testing"
	"unsafe"

	"github.com/skeindb/skein/keyspace"
)

// Remembered pages have a bound in bytes, however long the keys are. Other spans are other
// pages.
func TestPagesHaveABoundInBytes(t *testing.T) {
	base := PageOf(1, 2, 3, keyspace.Span{Start: []byte("ab"), End: []byte("c")})
	for name, other := range map[string]PageKey{
		"range":      PageOf(2, 2, 3, keyspace.Span{Start: []byte("ab"), End: []byte("c")}),
		"generation": PageOf(1, 3, 3, keyspace.Span{Start: []byte("ab"), End: []byte("c")}),
		"revision":   PageOf(1, 2, 4, keyspace.Span{Start: []byte("ab"), End: []byte("c")}),
		"border":     PageOf(1, 2, 3, keyspace.Span{Start: []byte("a"), End: []byte("bc")}),
		"end":        PageOf(1, 2, 3, keyspace.Span{Start: []byte("ab")}),
	} {
		if other == base {
			t.Errorf("one page for two that differ in their %s", name)
		}
	}
	p := NewPageCounts(4)
	long := make([]byte, 3<<19)
	for i := range 10 {
		long[0] = byte(i)
		p.Put(PageOf(1, 2, 3, keyspace.Span{Start: long}), int64(i))
	}
	if len(p.counts) != 4 || unsafe.Sizeof(base) > 64 {
		t.Fatalf("%d pages of %d bytes", len(p.counts), unsafe.Sizeof(base))
	}
	if n, ok := p.Get(PageOf(1, 2, 3, keyspace.Span{Start: long})); !ok || n != 9 {
		t.Fatalf("the last page has %d, %t", n, ok)
	}
}

// Changes of the live-key count that come late are counted at the revision that they
// have.
func TestLateChangesOfTheCount(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	var l LiveCounts
	changes := map[keyspace.Revision]int64{}
	var late []CountChange
	var live int64
	rev := keyspace.Revision(1)
	for step := range 8000 {
		var d []CountChange
		for range rng.IntN(3) {
			rev++
			d = append(d, CountChange{rev, rng.Int64N(5) - 2})
			if rng.IntN(4) == 0 {
				late = append(late, d[len(d)-1])
				d = d[:len(d)-1]
			}
		}
		if len(late) > 0 && rng.IntN(3) == 0 {
			i := rng.IntN(len(late))
			d = append(d, late[i])
			late = slices.Delete(late, i, i+1)
		}
		for _, x := range d {
			changes[x.Rev] += x.N
			live += x.N
		}
		l.Apply(d)
		if step%16 != 0 {
			continue
		}
		at := max(1, rev-keyspace.Revision(rng.IntN(2000)))
		got, ok := l.At(at, live)
		want := int64(0)
		for r, n := range changes {
			if r <= at {
				want += n
			}
		}
		if ok && got != want {
			t.Fatalf("step %d: %d at %d, want %d", step, got, at, want)
		}
	}
	if len(l.deltas) > MaxCountChanges {
		t.Fatalf("%d changes are kept", len(l.deltas))
	}
}
