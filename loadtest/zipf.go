package loadtest

import (
	"math"
	"math/rand/v2"
)

// zipf draws ranks 0 to n-1, where rank k has weight (k+1)^-skew. math/rand's Zipf needs an exponent above 1, and
// YCSB's is 0.99.
//
// The method is rejection-inversion (Hörmann and Derflinger, 1996): it works for all exponents above 0, needs no table
// and no sum over all ranks, and draws little more than once. Weights are the function k^-skew over the positive
// numbers, of which area is the integral. A point drawn evenly below its curve falls into the bar of a rank; the small
// part of a bar that lies outside is drawn again.
type zipf struct {
	n, skew     float64
	first, last float64 // the area at the begin of rank 1's bar, and at the end of rank n's
	sure        float64 // a point so near to its rank lies inside for certain
}

func newZipf(n uint64, skew float64) *zipf {
	z := &zipf{n: float64(n), skew: skew}
	z.first, z.last = z.area(1.5)-1, z.area(z.n+0.5)
	z.sure = 2 - z.inverse(z.area(2.5)-z.weight(2))
	return z
}

func (z *zipf) rank(rng *rand.Rand) uint64 {
	for {
		u := z.last + rng.Float64()*(z.first-z.last)
		x := z.inverse(u)
		k := min(max(math.Floor(x+0.5), 1), z.n)
		if k-x <= z.sure || u >= z.area(k+0.5)-z.weight(k) {
			return uint64(k) - 1
		}
	}
}

func (z *zipf) weight(x float64) float64 { return math.Exp(-z.skew * math.Log(x)) }

// area is the integral of weight from 1 to x: (x^(1-skew) - 1) / (1-skew), and log x for an exponent of 1. Near that
// the quotient has no digits left, but its series has.
func (z *zipf) area(x float64) float64 {
	log := math.Log(x)
	t := (1 - z.skew) * log
	if math.Abs(t) > seriesBelow {
		return math.Expm1(t) / t * log
	}
	return (1 + t/2*(1+t/3*(1+t/4))) * log
}

// inverse returns the x whose area is a.
func (z *zipf) inverse(a float64) float64 {
	t := max((1-z.skew)*a, -1) // rounding may take it below
	if math.Abs(t) > seriesBelow {
		return math.Exp(math.Log1p(t) / t * a)
	}
	return math.Exp((1 - t*(1.0/2-t*(1.0/3-t/4))) * a)
}

// seriesBelow is where series take the place of quotients.
const seriesBelow = 1e-8
