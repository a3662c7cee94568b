package load

import (
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/keyspace/divide"
)

const (
	// sampleSize bounds a sample. Three dozen requests say whether load divides into halves
	// (divide wants 32); four times as many leave each half of the sample enough.
	sampleSize = 128
	// sampleKeyBytes bounds what is kept of a key: a prefix divides as well.
	sampleKeyBytes = 256
	// sampleTime is how long requests are sampled before the sample is judged.
	sampleTime = 10 * time.Second
)

// sampler keeps requests drawn evenly from those that came since it began, in their
// order. The owner's lock guards it.
type sampler struct {
	began    clock.Time
	requests []divide.Request
	// stride is the mean number of requests for each one that is taken. When the sample is
	// full, it loses every second request and the stride doubles.
	stride int64
	// random is the state of a generator: a fixed stride would see one key of a load that
	// goes round.
	random uint64
}

// newSampler begins a sample of a load of so many requests a second.
func newSampler(now clock.Time, perSecond float64) *sampler {
	return &sampler{
		began: now, requests: make([]divide.Request, 0, sampleSize),
		stride: max(1, int64(perSecond*sampleTime.Seconds())/(sampleSize*3/4)), random: uint64(now) | 1,
	}
}

// take adds a request and returns how many to pass over until the next.
func (s *sampler) take(span keyspace.Span) int64 {
	if len(s.requests) == sampleSize {
		for i := range sampleSize / 2 {
			s.requests[i] = s.requests[2*i]
		}
		clear(s.requests[sampleSize/2:])
		s.requests = s.requests[:sampleSize/2]
		s.stride *= 2
	}
	s.requests = append(s.requests, request(span))
	// xorshift: the mean of what is returned is stride - 1.
	s.random ^= s.random << 13
	s.random ^= s.random >> 7
	s.random ^= s.random << 17
	return int64(s.random % uint64(2*s.stride-1))
}

// request returns a sampled request, in memory of its own.
func request(s keyspace.Span) divide.Request {
	clip := func(key []byte) []byte { return append([]byte(nil), key[:min(len(key), sampleKeyBytes)]...) }
	r := divide.Request{Key: clip(s.Start)}
	switch {
	case len(s.End) == 0:
		r.End = []byte{0xff} // no key begins so but by intent
	case len(s.End) != len(s.Start)+1 || s.End[len(s.Start)] != 0 || string(s.End[:len(s.Start)]) != string(s.Start):
		r.End = clip(s.End)
	}
	return r
}
