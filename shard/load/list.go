package load

import (
	"sync"

	"github.com/skeindb/skein/internal/wake"
)

// list has the ranges that have come into use since the meter last looked.
type list struct {
	wake wake.Signal

	mu sync.Mutex
	// noted is guarded by mu.
	noted []*Range
}

// add puts a range on the list and wakes the meter.
func (l *list) add(r *Range) {
	l.mu.Lock()
	l.noted = append(l.noted, r)
	l.mu.Unlock()
	l.wake.Set()
}

// take empties the list.
func (l *list) take() []*Range {
	l.mu.Lock()
	defer l.mu.Unlock()
	noted := l.noted
	l.noted = nil
	return noted
}
