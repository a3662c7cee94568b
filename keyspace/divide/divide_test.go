package divide

import (
	"fmt"
	"testing"
)

// Load divides where a quarter of it is on each side of a key, now and a moment later, and a
// split cuts few requests.
func TestDivide(t *testing.T) {
	key := func(i int) []byte { return fmt.Appendf(nil, "k%02d", i) }
	const sampled = 64
	for name, c := range map[string]struct {
		request func(i int) Request
		sampled int
		shape   Shape
		at      string
	}{
		"even":             {func(i int) Request { return Request{Key: key(i * 37 % sampled)} }, sampled, Divides, "k33"},
		"spans of a half":  {func(i int) Request { return Request{Key: key(i % 2 * 50), End: key(i%2*50 + 49)} }, sampled, Divides, "k50"},
		"few":              {func(i int) Request { return Request{Key: key(i)} }, minSampled - 1, TooFew, ""},
		"one key has most": {func(i int) Request { return Request{Key: key(i * 37 % sampled * (i % 3 / 2))} }, sampled, HotKey, ""},
		"ever larger keys": {func(i int) Request { return Request{Key: key(i)} }, sampled, Tail, ""},
		"ever lower keys":  {func(i int) Request { return Request{Key: key(sampled - i)} }, sampled, Tail, ""},
		"spans of all":     {func(int) Request { return Request{Key: key(0), End: key(99)} }, sampled, Spans, ""},
	} {
		s := Sample{}
		for i := range c.sampled {
			s.Requests = append(s.Requests, c.request(i))
		}
		if at, shape := s.Divide(); shape != c.shape || string(at) != c.at {
			t.Errorf("%s: at %q, %s", name, at, shape)
		}
	}
}
