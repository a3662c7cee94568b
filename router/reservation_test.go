package router

import (
	"errors"
	"testing"

	"github.com/skeindb/skein/kverror"
)

// Refused bytes are not returned when the answer ends: they were never reserved.
func TestRefusedBytesAreNotGivenBack(t *testing.T) {
	const others = 900
	for _, s := range []struct {
		name  string
		large bool // another answer has the one place for a large one
		holds []int64
		want  []error
	}{
		{"the place for a large one is taken", true, []int64{300, 50, 300, 20}, []error{kverror.TooManyRequests, nil, kverror.TooManyRequests, nil}},
		{"one part is too large, the next is not", true, []int64{20000, 50}, []error{kverror.AnswerTooLarge, nil}},
		{"it becomes the large one", false, []int64{50, 300, 20000, 50}, []error{nil, nil, kverror.AnswerTooLarge, nil}},
	} {
		r := newRouter(newCluster(1))
		r.cfg.ReadBytes, r.cfg.AnswerBytes = 1000, 10000
		r.large.Store(s.large)
		r.reserved.Add(others)
		var h reservation
		for i, bytes := range s.holds {
			if err := r.reserve(&h, bytes); !errors.Is(err, s.want[i]) {
				t.Errorf("%s: hold %d: %v, want %v", s.name, bytes, err, s.want[i])
			}
		}
		r.releaseAll(&h)
		if got := r.reserved.Load(); got != others || r.large.Load() != s.large {
			t.Errorf("%s: %d bytes are held, want %d; large %v, want %v", s.name, got, others, r.large.Load(), s.large)
		}
	}
}
