package loadtest

import (
	"math/bits"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/skeindb/skein/clock"
)

// The alphabet of keys: printable ASCII.
const (
	firstChar = ' '
	lastChar  = '~'
	charCount = lastChar - firstChar + 1
)

// maxDigits is how many characters of a key carry its number: the most whose
// combinations fit into 63 bits.
const maxDigits = 9

// digitsPower returns the number of different keys of so many characters, at most
// charCount^maxDigits.
func digitsPower(chars int) uint64 {
	power := uint64(1)
	for range min(chars, maxDigits) {
		power *= charCount
	}
	return power
}

// keySpace turns the number of a key, 0 to count-1, into the key. Keys have the order
// of their numbers, and they lie at even distances in the space of all printable
// strings behind the prefix.
type keySpace struct {
	prefix   string
	keyBytes int
	count    uint64
	digits   int    // characters that carry the number
	power    uint64 // charCount^digits
}

func newKeySpace(c *Config) keySpace {
	own := c.KeyBytes - len(c.KeyPrefix)
	return keySpace{
		prefix:   c.KeyPrefix,
		keyBytes: c.KeyBytes,
		count:    uint64(c.Keys),
		digits:   min(own, maxDigits),
		power:    digitsPower(own),
	}
}

// appendKey appends key number i to dst. The other characters look random, so that keys
// do not compress better than names would.
func (s *keySpace) appendKey(dst []byte, i uint64) []byte {
	dst = append(dst, s.prefix...)
	// The key is the middle of the i-th of count equal parts of the space: (2i+1)·power
	// / 2·count, with the product in 128 bits.
	hi, lo := bits.Mul64(2*i+1, s.power)
	place, _ := bits.Div64(hi, lo, 2*s.count)
	start := len(dst)
	for range s.digits {
		dst = append(dst, firstChar)
	}
	for at := len(dst) - 1; at >= start; at-- {
		dst[at] += byte(place % charCount)
		place /= charCount
	}
	for x := i; len(dst)-start < s.keyBytes-len(s.prefix); {
		x += 0x9e3779b97f4a7c15 // splitmix64
		z := (x ^ x>>30) * 0xbf58476d1ce4e5b9
		z = (z ^ z>>27) * 0x94d049bb133111eb
		dst = append(dst, firstChar+byte((z^z>>31)%charCount))
	}
	return dst
}

// end is the key behind the last one.
func (s *keySpace) end() []byte { return append(s.appendKey(nil, s.count-1), 0) }

// picker draws the numbers of keys for one client.
type picker interface{ next() uint64 }

// newPicker returns the picker of a client. turn is shared by all clients.
func newPicker(c *Config, rng *rand.Rand, turn *atomic.Uint64) picker {
	n := uint64(c.Keys)
	switch c.Dist {
	case Zipf:
		return &zipfPicker{rng, newZipf(n, c.ZipfSkew), n, stride(n)}
	case Sequential:
		return &sequentialPicker{turn, n}
	case Hot:
		p := &hotPicker{rng: rng, n: n, hot: uint64(c.HotKeys), percent: c.HotPercent, clock: c.Clock, move: c.HotMove}
		if p.move > 0 {
			p.began = p.clock.Now()
		}
		return p
	case Tail:
		return &tailPicker{rng, turn, n}
	default:
		return &uniformPicker{rng, n}
	}
}

type uniformPicker struct {
	rng *rand.Rand
	n   uint64
}

func (p *uniformPicker) next() uint64 { return p.rng.Uint64N(p.n) }

type sequentialPicker struct {
	turn *atomic.Uint64
	n    uint64
}

func (p *sequentialPicker) next() uint64 { return (p.turn.Add(1) - 1) % p.n }

type zipfPicker struct {
	rng       *rand.Rand
	zipf      *zipf
	n, stride uint64
}

// next scatters the ranks, so that the most frequent keys are not neighbours.
func (p *zipfPicker) next() uint64 {
	hi, lo := bits.Mul64(p.zipf.rank(p.rng), p.stride)
	return bits.Rem64(hi, lo, p.n)
}

// hotPicker draws most keys from a span of neighbours, which are hot for a while.
type hotPicker struct {
	rng     *rand.Rand
	n, hot  uint64
	percent int
	clock   clock.Clock
	began   clock.Time
	move    time.Duration
}

func (p *hotPicker) next() uint64 {
	if p.rng.IntN(100) >= p.percent {
		return p.rng.Uint64N(p.n)
	}
	spans := uint64(1)
	if p.move > 0 {
		spans += uint64(p.clock.Now().Sub(p.began) / p.move)
	}
	// As the golden section's multiples do, the spans spread over all keys however many there have been.
	hi, lo := bits.Mul64(spans, stride(p.n))
	return min(bits.Rem64(hi, lo, p.n), p.n-p.hot) + p.rng.Uint64N(p.hot)
}

// tailReads is how many of the last keys are read.
const tailReads = 1000

// tailPicker puts one key behind the other, from the first again once all are there.
type tailPicker struct {
	rng  *rand.Rand
	turn *atomic.Uint64
	n    uint64
}

func (p *tailPicker) next() uint64 { return (p.turn.Add(1) - 1) % p.n }

// read returns one of the last keys, which may be under way.
func (p *tailPicker) read() uint64 {
	made := p.turn.Load()
	if made == 0 {
		return 0
	}
	return (made - 1 - p.rng.Uint64N(min(made, tailReads, p.n))) % p.n
}

// stride returns a number near the golden section of n without a common divisor:
// multiplication by it modulo n is a permutation.
func stride(n uint64) uint64 {
	for s := max(1, uint64(float64(n)*0.6180339887)); ; s++ {
		if gcd(s, n) == 1 {
			return s
		}
	}
}

func gcd(a, b uint64) uint64 {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}
