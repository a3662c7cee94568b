package loadtest

import (
	"bytes"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/skeindb/skein/clock"
)

func testSpace(keys, keyBytes int, prefix string) keySpace {
	return newKeySpace(&Config{Keys: keys, KeyBytes: keyBytes, KeyPrefix: prefix})
}

// TestKeysAreSpreadInOrder: keys are distinct, of the right size, printable, in the
// order of their numbers, and at even distances.
func TestKeysAreSpreadInOrder(t *testing.T) {
	for _, c := range []struct {
		keys, size int
		prefix     string
	}{
		{1, 1, ""},
		{95, 1, ""},
		{94, 1, "k/"},
		{95 * 95, 2, ""},
		{1000, 8, ""},
		{1000, 64, "prefix/"},
		{100_000, 32, ""},
		{7, 300, ""},
	} {
		t.Run(fmt.Sprintf("%d keys of %d", c.keys, c.size), func(t *testing.T) {
			size := c.size + len(c.prefix)
			s := testSpace(c.keys, size, c.prefix)
			var last []byte
			perChar := map[byte]int{}
			for i := range uint64(c.keys) {
				key := s.appendKey(nil, i)
				if len(key) != size || !strings.HasPrefix(string(key), c.prefix) {
					t.Fatalf("key %d is %q: not %d bytes with prefix %q", i, key, size, c.prefix)
				}
				if bytes.Compare(last, key) >= 0 {
					t.Fatalf("key %d %q is not above %q", i, key, last)
				}
				for _, b := range key {
					if b < firstChar || b > lastChar {
						t.Fatalf("key %d %q is not printable", i, key)
					}
				}
				if again := s.appendKey([]byte("x"), i); string(again) != "x"+string(key) {
					t.Fatalf("key %d is %q, and then %q", i, key, again)
				}
				last = key
				perChar[key[len(c.prefix)]]++
			}
			for b := byte(firstChar); b <= lastChar; b++ {
				if even := c.keys / charCount; perChar[b] < even-1 || perChar[b] > even+2 {
					t.Fatalf("%d keys begin with %q; evenly it would be %d", perChar[b], b, even)
				}
			}
		})
	}
}

// TestLargestKeySpace: the arithmetic holds at its bounds.
func TestLargestKeySpace(t *testing.T) {
	s := testSpace(maxKeys, 32, "")
	first, last := s.appendKey(nil, 0), s.appendKey(nil, maxKeys-1)
	if first[0] != firstChar || last[0] != lastChar || bytes.Compare(s.appendKey(nil, maxKeys-2), last) >= 0 {
		t.Errorf("keys go from %q to %q", first, last)
	}
}

func TestPickers(t *testing.T) {
	const keys, draws = 1000, 200_000
	count := func(d Dist) (counts [keys]int) {
		cfg := &Config{Keys: keys, Dist: d, ZipfSkew: 0.99}
		p := newPicker(cfg, rand.New(rand.NewPCG(1, 1)), new(atomic.Uint64))
		for range draws {
			counts[p.next()]++ // panics outside the keys
		}
		return counts
	}
	uniform := count(Uniform)
	for i, n := range uniform {
		if n < draws/keys/2 || n > draws/keys*2 {
			t.Errorf("uniform: key %d drawn %d times", i, n)
		}
	}
	for i, n := range count(Sequential) {
		if n != draws/keys {
			t.Errorf("sequential: key %d drawn %d times", i, n)
		}
	}
	zipf := count(Zipf)
	top, second := 0, 1
	for i, n := range zipf {
		if n > zipf[top] {
			top, second = i, top
		} else if i != top && n > zipf[second] {
			second = i
		}
	}
	if zipf[top] < draws/10 {
		t.Errorf("zipf: the most frequent key was drawn %d times of %d", zipf[top], draws)
	}
	if d := top - second; d*d < 100*100 {
		t.Errorf("zipf: the most frequent keys %d and %d are neighbours", top, second)
	}
}

// TestHot: the hot keys are neighbours, get their share, and move as long as they shall.
func TestHot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const keys, draws = 1000, 10_000
		cfg := &Config{Keys: keys, Dist: Hot, HotKeys: 10, HotPercent: 80, HotMove: time.Minute, Clock: clock.Virtual()}
		p := newPicker(cfg, rand.New(rand.NewPCG(1, 1)), new(atomic.Uint64))
		hottest := func() uint64 {
			var counts [keys]int
			for range draws {
				counts[p.next()]++ // panics outside the keys
			}
			best, most := 0, 0
			for start := range keys - 9 {
				n := 0
				for _, c := range counts[start : start+10] {
					n += c
				}
				if n > most {
					best, most = start, n
				}
			}
			if most < draws*78/100 || most > draws*83/100 {
				t.Errorf("the hottest neighbours got %d of %d draws", most, draws)
			}
			return uint64(best)
		}
		seen := map[uint64]bool{}
		for i := range 20 {
			at := hottest()
			if again := hottest(); again != at {
				t.Errorf("step %d: moved from %d to %d at once", i, at, again)
			}
			seen[at] = true
			time.Sleep(time.Minute)
		}
		if len(seen) != 20 {
			t.Errorf("%d places were hot", len(seen))
		}
		for _, all := range []Config{{Keys: 1, HotKeys: 1}, {Keys: 5, HotKeys: 5}, {Keys: 2, HotKeys: 1, HotPercent: 100}} {
			all.Dist = Hot
			p = newPicker(&all, rand.New(rand.NewPCG(1, 1)), new(atomic.Uint64))
			for range 100 {
				if key := p.next(); key >= uint64(all.Keys) {
					t.Errorf("key %d of %d", key, all.Keys)
				}
			}
		}
	})
}

// TestTail: keys are put one behind the other by all clients together, and read near the end.
func TestTail(t *testing.T) {
	cfg, turn := &Config{Keys: 5000, Dist: Tail}, new(atomic.Uint64)
	one := newPicker(cfg, rand.New(rand.NewPCG(1, 1)), turn).(*tailPicker)
	other := newPicker(cfg, rand.New(rand.NewPCG(1, 2)), turn)
	if key := one.read(); key != 0 {
		t.Errorf("key %d is read before any is put", key)
	}
	for i := uint64(0); i < 4000; i += 2 {
		if a, b := one.next(), other.next(); a != i || b != i+1 {
			t.Fatalf("%d and %d are put after %d", a, b, i)
		}
		if key := one.read(); key > i+1 || key+tailReads < i+2 {
			t.Fatalf("key %d is read while %d is the last", key, i+1)
		}
	}
	for range 1001 {
		other.next()
	}
	if key := one.read(); key != 0 && key < 4001 {
		t.Errorf("behind the last key the first follows: %d", key)
	}
}

// TestZipf: ranks have the frequencies that the exponent says, below 1, at 1 and above it, also where there are few or
// very many.
func TestZipf(t *testing.T) {
	const draws = 100_000
	for _, n := range []uint64{1, 2, 10, 1000, maxKeys} {
		for _, skew := range []float64{0.01, 0.5, 0.99, 1, 1 + 1e-12, 1.1, 3, 10} {
			z, rng := newZipf(n, skew), rand.New(rand.NewPCG(1, n))
			var counts [10]float64
			for range draws {
				rank := z.rank(rng)
				if rank >= n {
					t.Fatalf("rank %d of %d", rank, n)
				}
				if rank < uint64(len(counts)) {
					counts[rank]++
				}
			}
			// Frequencies are compared among the first ranks: the sum over all of many is not to be had.
			var all, weights float64
			first := min(n, 10)
			for k := range first {
				all, weights = all+counts[k], weights+math.Pow(float64(k+1), -skew)
			}
			if n <= 10 && all != draws {
				t.Errorf("%d ranks, exponent %g: %g of %d draws", n, skew, all, draws)
			}
			for k := range first {
				want := all * math.Pow(float64(k+1), -skew) / weights
				if d := counts[k] - want; d*d > 36*want+25 { // six standard deviations
					t.Errorf("%d ranks, exponent %g: rank %d was drawn %g times in place of %g", n, skew, k, counts[k], want)
				}
			}
		}
	}
	// Half of 1,000 ranks by YCSB's exponent: the sum of weights says how many draws they get.
	z, rng, low := newZipf(1000, 0.99), rand.New(rand.NewPCG(1, 1)), 0.0
	for range draws {
		if z.rank(rng) < 500 {
			low++
		}
	}
	var half, whole float64
	for k := range 1000 {
		whole += math.Pow(float64(k+1), -0.99)
		if k < 500 {
			half = whole
		}
	}
	if got, want := low/draws, half/whole; math.Abs(got-want) > 0.01 {
		t.Errorf("the first half of the ranks got %.4f of the draws in place of %.4f", got, want)
	}
}

// TestStrideIsAPermutation: every key can be drawn by zipf.
func TestStrideIsAPermutation(t *testing.T) {
	for n := uint64(1); n < 300; n++ {
		seen := make([]bool, n)
		for i := range n {
			seen[i*stride(n)%n] = true
		}
		for i, ok := range seen {
			if !ok {
				t.Fatalf("%d keys: key %d is never drawn", n, i)
			}
		}
	}
}

// TestSameSeedSameOperations: the seed determines the operations of a client.
func TestSameSeedSameOperations(t *testing.T) {
	draw := func(seed uint64, id int) string {
		cfg := DefaultConfig()
		cfg.Seed = seed
		s := newKeySpace(&cfg)
		c := newClient(id, &cfg, nil, &s, newValues(1, 16), nil, new(atomic.Uint64))
		return fmt.Sprint(c.picker.next(), c.picker.next(), c.picker.next())
	}
	first := draw(1, 1)
	if again := draw(1, 1); again != first || draw(2, 1) == first || draw(1, 2) == first {
		t.Error("operations do not follow from seed and client")
	}
}

func TestValues(t *testing.T) {
	for _, size := range []int{stampBytes, stampBytes + 1, 256, 5000} {
		v := newValues(7, size)
		value := make([]byte, size)
		for _, op := range []opID{makeOpID(0, 1), makeOpID(3, 1<<39), makeOpID(maxClients, 5)} {
			v.put(value, op)
			if got, ours, intact := v.recognise(value); got != op || !ours || !intact {
				t.Fatalf("value of %x: recognised as %x, ours %v, intact %v", op, got, ours, intact)
			}
			if _, ours, _ := newValues(8, size).recognise(value); ours {
				t.Fatal("another run's value was recognised")
			}
			if size > stampBytes {
				value[size-1] ^= 1
				if _, _, intact := v.recognise(value); intact {
					t.Fatal("a changed value passed as intact")
				}
			}
			if _, _, intact := v.recognise(value[:stampBytes]); size > stampBytes && intact {
				t.Fatal("a truncated value passed as intact")
			}
		}
	}
	if _, ours, _ := newValues(7, 4).recognise([]byte("1234")); ours {
		t.Error("a value without a stamp was recognised")
	}
}

// FuzzRecognise: no value from a server makes the check panic.
func FuzzRecognise(f *testing.F) {
	v := newValues(7, 32)
	good := make([]byte, 32)
	v.put(good, makeOpID(1, 1))
	f.Add(good)
	f.Add([]byte{})
	f.Add(good[:20])
	f.Fuzz(func(t *testing.T, value []byte) {
		op, ours, intact := v.recognise(value)
		if !intact {
			return
		}
		want := make([]byte, 32)
		v.put(want, op)
		if !ours || !bytes.Equal(want, value) {
			t.Errorf("%x passes as the value of %x, which is %x", value, op, want)
		}
	})
}
