package recovery_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/skeindb/skein/recovery"
)

// keysOf returns keys of each of n spans.
func keysOf(n, each int) (keys []string) {
	for i := range n {
		for j := range each {
			keys = append(keys, fmt.Sprintf("k%04d/%d", i, j))
		}
	}
	return keys
}

func bordersOf(n int) (keys []string) {
	for i := 1; i < n; i++ {
		keys = append(keys, fmt.Sprintf("k%04d", i))
	}
	return keys
}

// Five nodes, three of which are destroyed under load. All that the plan calls safe is there, and no
// revision comes twice.
func TestThreeOfFiveDestroyed(t *testing.T) {
	bubble(t, 5, bordersOf(10), func(r *rig) {
		w := r.write(keysOf(10, 2), r.nodes...)
		time.Sleep(3 * time.Second)
		survivors := r.nodes[:2]
		r.crash(r.nodes...)
		w.stop()
		p := r.plan(r.collect(survivors...), recovery.PlanOptions{Dead: []string{"n3", "n4", "n5"}, AcceptLost: true})
		r.apply(p, survivors...)
		r.start(survivors...)
		r.check(p, w, survivors...)
	})
}
