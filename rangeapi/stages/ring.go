package stages

import (
	"slices"
	"sync"
)

// ringLength is how many slow requests a node keeps.
const ringLength = 256

// Ring keeps the last slow requests of a node. It may be used from many goroutines. The zero value is empty.
type Ring struct {
	mu sync.Mutex
	// kept has the requests, next is where the next one goes. Guarded by mu.
	kept []Slow
	next int
}

// Add keeps a request, in the place of the oldest one.
func (r *Ring) Add(s Slow) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.kept) < ringLength {
		r.kept = append(r.kept, s)
		return
	}
	r.kept[r.next] = s
	r.next = (r.next + 1) % ringLength
}

// All returns the kept requests, in no order.
func (r *Ring) All() []Slow {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.kept)
}
