package transport

import (
	"testing"
	"time"
)

// A peer that is down is dialled again before a lone founder that has come back without its disk believes
// that nobody knows it.
func TestDialsOfAPeerThatIsDownFollowClosely(t *testing.T) {
	for _, took := range []time.Duration{0, time.Millisecond, 600 * time.Millisecond, time.Second, time.Minute} {
		for range 1000 {
			if next := took + afterFailure(took, backoffMax); next > max(backoffMax+time.Millisecond, took+backoffMin) {
				t.Fatalf("an attempt that took %v is followed after %v", took, next)
			}
		}
	}
}
