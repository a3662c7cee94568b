package auth

import (
	"sync"
	"time"

	"github.com/skeindb/skein/clock"
)

// recentID is a digest of what is remembered.
type recentID [16]byte

// recent remembers something about each of many ids for a time. It has two generations. Each note goes to
// the young one. When that is full or too old, it becomes the old one, and the old one is forgotten. By then
// all of the old one has expired, or was not noted while the young one filled. So no timer
// and no list is needed, and what is forgotten early was noted least lately.
type recent[V any] struct {
	keep  time.Duration
	limit int

	mu         sync.Mutex
	began      clock.Time
	young, old map[recentID]noted[V]
}

type noted[V any] struct {
	value V
	at    clock.Time
}

func newRecent[V any](keep time.Duration, limit int) *recent[V] {
	return &recent[V]{keep: keep, limit: limit, young: map[recentID]noted[V]{}}
}

// get returns what was noted last, if that was not longer ago than the time.
func (r *recent[V]) get(id recentID, now clock.Time) (v V, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.lockedGet(id, now)
}

func (r *recent[V]) lockedGet(id recentID, now clock.Time) (v V, ok bool) {
	n, ok := r.young[id]
	if !ok {
		n, ok = r.old[id]
	}
	if !ok || now.Sub(n.at) > r.keep {
		return v, false
	}
	return n.value, true
}

// note changes what is remembered of an id: change gets what get returns.
func (r *recent[V]) note(id recentID, now clock.Time, change func(V) V) {
	r.mu.Lock()
	defer r.mu.Unlock()
	v, _ := r.lockedGet(id, now)
	if now.Sub(r.began) > r.keep || len(r.young) >= r.limit/2 {
		r.old, r.young, r.began = r.young, map[recentID]noted[V]{}, now
	}
	r.young[id] = noted[V]{change(v), now}
}

// len counts what is remembered, ids in both generations twice.
func (r *recent[V]) len() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.young) + len(r.old)
}
