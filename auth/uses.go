package auth

import (
	"sync"
	"time"

	"github.com/skeindb/skein/clock"
)

// useID is what tells tokens apart: the beginning of the MAC.
type useID [16]byte

// uses remembers when tokens were used last. It has two generations. Each use goes to the young one. That
// becomes the old one when it is a TTL old or has half of the limit, and the old one is forgotten: by
// then all of it has expired, or was not used for as long as it took to fill the young one. So no timer
// and no list is needed, and what is forgotten early was used least lately.
type uses struct {
	ttl   time.Duration
	limit int

	mu         sync.Mutex
	began      clock.Time
	young, old map[useID]clock.Time
}

func newUses(ttl time.Duration, limit int) *uses {
	return &uses{ttl: ttl, limit: limit, young: map[useID]clock.Time{}}
}

// lately says whether the token was used within the TTL.
func (u *uses) lately(id useID, now clock.Time) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	at, ok := u.young[id]
	if !ok {
		at, ok = u.old[id]
	}
	return ok && now.Sub(at) <= u.ttl
}

// note notes a use.
func (u *uses) note(id useID, now clock.Time) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if now.Sub(u.began) > u.ttl || len(u.young) >= u.limit/2 {
		u.old, u.young, u.began = u.young, map[useID]clock.Time{}, now
	}
	u.young[id] = now
}

// len counts what is remembered, tokens in both generations twice.
func (u *uses) len() int {
	u.mu.Lock()
	defer u.mu.Unlock()
	return len(u.young) + len(u.old)
}
