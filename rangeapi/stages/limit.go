package stages

import (
	"sync"
	"time"

	"github.com/skeindb/skein/clock"
)

// PerSecond is how many records a leader makes in one second of requests that are not traced, and how many a gateway puts
// on its list: where all requests are slow, to say so must not make them slower.
const PerSecond = 200

// Limit lets a number through in each second of a clock. It may be used from many goroutines. The zero value has let
// nothing through.
type Limit struct {
	mu sync.Mutex
	// Guarded by mu. second is the present one, which has let so many through; left are those left out since the last one.
	second        int64
	through, left int
}

// Take says whether one more of at most so many in a second goes through, and how many were left out since the last one.
func (l *Limit) Take(now clock.Time, most int) (ok bool, left int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if second := int64(now) / int64(time.Second); second != l.second {
		l.second, l.through = second, 0
	}
	if l.through >= most {
		l.left++
		return false, 0
	}
	l.through++
	left, l.left = l.left, 0
	return true, left
}
