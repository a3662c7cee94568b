package heat

import "math/bits"

// Counts are what some keys had within some time.
type Counts struct {
	// Writes and Reads are requests; a transaction counts once. Bytes is what the writes brought.
	Writes, Reads, Bytes uint64
}

// maxCount bounds each count: one cell has no more than that many bytes in an hour. What is above it in a form that
// is decoded is damage.
const maxCount = 1 << 48

func (c *Counts) add(o Counts) {
	c.Writes = min(c.Writes+o.Writes, maxCount)
	c.Reads = min(c.Reads+o.Reads, maxCount)
	c.Bytes = min(c.Bytes+o.Bytes, maxCount)
}

// part returns the parts from the a-th to before the b-th of n even ones. The parts add up to the whole.
func (c Counts) part(a, b, n int) Counts {
	between := func(v uint64) uint64 { return upTo(v, a, n) - upTo(v, b, n) }
	return Counts{Writes: between(c.Writes), Reads: between(c.Reads), Bytes: between(c.Bytes)}
}

// upTo is what is left of v from its a-th of n even parts on: what cannot be divided goes to the first parts.
func upTo(v uint64, a, n int) uint64 {
	hi, lo := bits.Mul64(v, uint64(n-a))
	q, _ := bits.Div64(hi, lo, uint64(n)) // hi < n, since v and n-a are at most 2^48 and n
	return q
}

// weight says how hot the counts are: how much they resist being joined with neighbours. Only nothing at all
// has none. The sum of a quarter of a million weights fits.
func (c Counts) weight() uint64 {
	if c == (Counts{}) {
		return 0
	}
	return min(c.Writes+c.Reads, 1<<40)<<4 | 1
}
