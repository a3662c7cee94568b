package eval

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"testing"

	"github.com/skeindb/skein/keyspace"
)

// TestVersionCacheModel compares the cache with a map: what it knows is true, it stays
// within its bound, and a new epoch knows nothing.
func TestVersionCacheModel(t *testing.T) {
	const bound = 256 << 10
	h := NewVersionCache(bound)
	rng := rand.New(rand.NewPCG(1, 2))
	type name struct {
		e   KeyEpoch
		key string
	}
	model := make(map[name]CachedVersion)
	epochs := []KeyEpoch{h.begin(), h.begin(), h.begin()}
	hits := 0
	for i := range 200_000 {
		k := fmt.Appendf(nil, "%0*d", 1+rng.IntN(200), rng.IntN(300))
		at := rng.IntN(len(epochs))
		n := name{epochs[at], string(k)}
		switch op := rng.IntN(1000); {
		case op == 0:
			epochs[at] = h.begin()
		case op < 400:
			v := CachedVersion{Alive: op%2 == 0, Mod: keyspace.Revision(i), Version: int64(op)}
			if v.Alive {
				v.Value = make([]byte, rng.IntN(2*MaxCachedValueBytes))
			}
			h.Put(n.e, k, v)
			model[n] = v.keep()
		default:
			got, ok := h.Get(n.e, k)
			want, stored := model[n]
			if ok && (!stored || !reflect.DeepEqual(got, want)) {
				t.Fatalf("%q of epoch %d is %+v, put was %+v (%v)", k, n.e, got, want, stored)
			}
			if ok {
				hits++
			}
		}
	}
	if hits == 0 {
		t.Error("nothing was ever found")
	}
	total := int64(0)
	for i := range h.parts {
		p := &h.parts[i]
		bytes := int64(0)
		for i := range p.slots {
			if s := &p.slots[i]; s.key != "" {
				if p.findLocked(s.hash, []byte(s.key)) != s {
					t.Fatalf("%q is in slot %d, and not in the index", s.key, i)
				}
				bytes += s.bytes()
			}
		}
		if bytes != p.bytes || p.bytes > p.max {
			t.Errorf("part %d holds %d bytes, counts %d, may hold %d", i, bytes, p.bytes, p.max)
		}
		if free := len(p.slots) - p.index.n; free != len(p.free) {
			t.Errorf("part %d has %d free slots, lists %d", i, free, len(p.free))
		}
		total += bytes
	}
	if total < bound/4 {
		t.Errorf("%d bytes are used of %d", total, bound)
	}
	h.Put(1, make([]byte, bound), CachedVersion{})
	if _, ok := h.Get(1, make([]byte, bound)); ok {
		t.Error("a key larger than the cache is in it")
	}
}

// TestVersionCacheTakesInWhatIsUsedNow: a cache full of what nobody uses any more, be it of an
// ended epoch, gives way to what is used.
func TestVersionCacheTakesInWhatIsUsedNow(t *testing.T) {
	for _, ended := range []bool{false, true} {
		h := NewVersionCache(1 << 20)
		r := h.begin()
		value := make([]byte, 256)
		for i := range 20_000 {
			h.Put(r, fmt.Appendf(nil, "cold%d", i), CachedVersion{Alive: true, Value: value})
		}
		if ended {
			r = h.begin()
		}
		hits := 0
		for i := range 10_000 {
			k := fmt.Appendf(nil, "used%d", i%500)
			if _, ok := h.Get(r, k); ok {
				hits++
				continue
			}
			h.Put(r, k, CachedVersion{Alive: true, Value: value})
		}
		if hits < 9_000 {
			t.Errorf("epoch ended %v: %d of 10000 lookups of 500 keys hit", ended, hits)
		}
	}
}

// Each key belongs to one epoch, and those of two ranges that become one stay apart.
func TestKeyEpochs(t *testing.T) {
	h := NewVersionCache(1 << 20)
	begin := func() (es KeyEpochs) {
		es.End(h)
		return es
	}
	es, right := begin(), begin()
	a, m := es.Of([]byte("a")), right.Of([]byte("m"))
	es.Absorb(h, []byte("m"), right)
	third := begin()
	third.Absorb(h, []byte("x"), nil)
	s, x := third.Of([]byte("s")), third.Of([]byte("x"))
	es.Absorb(h, []byte("s"), third)
	want := map[string]KeyEpoch{"": a, "a": a, "lzz": a, "m": m, "rzz": m, "s": s, "wzz": s, "x": x, "zz": x}
	seen := map[KeyEpoch]bool{}
	for k, w := range want {
		if got := es.Of([]byte(k)); got != w {
			t.Errorf("%q is of epoch %d, want %d", k, got, w)
		}
		seen[w] = true
	}
	if len(seen) != 4 {
		t.Errorf("%d epochs, want 4", len(seen))
	}
	for i := range 2 * MaxKeyEpochs {
		es.Absorb(h, fmt.Appendf(nil, "zz%02d", i), nil)
		if len(es) > MaxKeyEpochs {
			t.Fatalf("%d epochs, at most %d", len(es), MaxKeyEpochs)
		}
	}
	es.End(h)
	if len(es) != 1 || seen[es.Of([]byte("a"))] || es.Of([]byte("a")) != es.Of([]byte("z")) {
		t.Errorf("behind the end: %v", es)
	}
}
