package mvcc

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
)

// fill writes versions of random bytes into a store and flushes them.
func fill(t *testing.T, e *engine.Engine, vs ...Version) {
	t.Helper()
	b := e.NewBatch()
	for i := range vs {
		if err := Put(b, &vs[i]); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(b.Commit(), e.Flush(context.Background())); err != nil {
		t.Fatal(err)
	}
}

func noise(rng *rand.ChaCha8, n int) []byte {
	b := make([]byte, n)
	_, _ = rng.Read(b) // never fails
	return b
}

// TestFindSplitKey: for any kind of keys both parts have about half of the bytes, as far
// as table blocks tell. If one key has nearly all bytes there is no split key.
func TestFindSplitKey(t *testing.T) {
	long := bytes.Repeat([]byte("a"), 900)
	for name, c := range map[string]struct {
		key  func(i int) string
		size func(i int) int
		n    int
		// want is the minimum share of the bytes on each side; 0 means that there is no
		// split key.
		want float64
	}{
		"numbers":  {key: func(i int) string { return fmt.Sprintf("k%06d", i) }, n: 500, want: 0.45},
		"binary":   {key: func(i int) string { return string([]byte{byte(i >> 8), 0, byte(i), 0}) }, n: 500, want: 0.45},
		"long":     {key: func(i int) string { return string(long) + fmt.Sprint(i) }, n: 500, want: 0.45},
		"prefixes": {key: func(i int) string { return string(long[:i+1]) }, n: 500, want: 0.40},
		"heavy right": {
			key: func(i int) string { return fmt.Sprintf("k%06d", i) }, n: 500, want: 0.40,
			size: func(i int) int { return 20 + i*8 },
		},
		"two keys": {key: func(i int) string { return []string{"a", "b"}[i%2] }, n: 200, want: 0.40},
		"one key":  {key: func(int) string { return "only" }, n: 200},
		"one key of many": {
			key: func(i int) string { return fmt.Sprintf("k%03d", max(0, min(i-100, 200))) }, n: 500, want: 0.3,
		},
		"nearly one key": {
			key: func(i int) string { return fmt.Sprintf("k%03d", max(0, i-1450)) }, n: 1500,
			size: func(i int) int { return 2000 - 1980*min(1, max(0, i-1450)) },
		},
		"nearly the last key": {
			key: func(i int) string { return fmt.Sprintf("k%03d", min(i, 50)) }, n: 4000,
			size: func(i int) int { return 20 + 1980*min(1, max(0, i-49)) },
		},
		"nothing": {},
	} {
		t.Run(name, func(t *testing.T) {
			e := openTest(t)
			rng := rand.NewChaCha8([32]byte{1})
			var vs []Version
			for i := range c.n {
				size := 2000
				if c.size != nil {
					size = c.size(i)
				}
				vs = append(vs, Version{Key: []byte(c.key(i)), Mod: keyspace.Revision(i + 2), Create: keyspace.Revision(i + 2), Version: 1, Value: noise(rng, size)})
			}
			// Neighbours, which do not count.
			for i := range 500 {
				k := []string{"\x00\x00", "zz"}[i%2]
				vs = append(vs, Version{Key: []byte(k), Mod: keyspace.Revision(c.n + 2 + i), Create: 2, Version: 1, Value: noise(rng, 2000)})
			}
			slices.SortStableFunc(vs, func(a, b Version) int { return bytes.Compare(a.Key, b.Key) })
			fill(t, e, vs...)
			span := keyspace.Span{Start: []byte{0, 0, 0}, End: []byte("zz")}
			h, err := FindSplitKey(e, span)
			if c.want == 0 {
				if !errors.Is(err, ErrNoSplitKey) {
					t.Fatalf("divided at %q: %+v, %v", h.Key, h, err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			var left, all int
			for i := range vs {
				if span.Contains(vs[i].Key) {
					all += len(vs[i].Key) + len(vs[i].Value)
					if bytes.Compare(vs[i].Key, h.Key) < 0 {
						left += len(vs[i].Key) + len(vs[i].Value)
					}
				}
			}
			if part := float64(left) / float64(all); min(part, 1-part) < c.want || !span.Contains(h.Key) {
				t.Errorf("divided at %q: %.3f of %d bytes are on the left, estimated %+v", h.Key, part, all, h)
			}
		})
	}
}

// TestBetween: a string between two others is found if there is one.
func TestBetween(t *testing.T) {
	bits := rand.NewChaCha8([32]byte{2})
	rng := rand.New(bits)
	for range 2000 {
		lo, hi := noise(bits, rng.IntN(6)), noise(bits, rng.IntN(6))
		if c := bytes.Compare(lo, hi); c > 0 {
			lo, hi = hi, lo
		} else if c == 0 {
			continue
		}
		for steps := 0; ; steps++ {
			at := between(lo, hi)
			if steps == splitSteps {
				break
			}
			if at == nil {
				if !bytes.HasPrefix(hi, lo) || len(bytes.Trim(hi[len(lo):], "\x00")) > 0 {
					t.Fatalf("nothing between %x and %x", lo, hi)
				}
				break
			}
			if bytes.Compare(lo, at) >= 0 || bytes.Compare(at, hi) >= 0 || len(at) > max(len(lo), len(hi))+1 {
				t.Fatalf("%x is not between %x and %x", at, lo, hi)
			}
			if rng.IntN(2) == 0 {
				lo = at
			} else {
				hi = at
			}
		}
	}
}
