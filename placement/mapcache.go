package placement

import (
	"context"
	"sync"
	"sync/atomic"

	"github.com/skeindb/skein/placement/fsm"
)

// mapCache is the node's copy of the map.
type mapCache struct {
	newest atomic.Pointer[fsm.Map]

	mu sync.Mutex
	// changed, guarded by mu, is closed when a newer map is stored.
	changed chan struct{}
}

func (m *mapCache) init() { m.changed = make(chan struct{}) }

func (m *mapCache) load() *fsm.Map { return m.newest.Load() }

// store takes over a newer map.
func (m *mapCache) store(next *fsm.Map) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if old := m.newest.Load(); old != nil && old.Version >= next.Version {
		return false
	}
	m.newest.Store(next)
	close(m.changed)
	m.changed = make(chan struct{})
	return true
}

// current returns the newest map, nil if there is none yet, and a channel that is
// closed when there is a newer one.
func (m *mapCache) current() (*fsm.Map, <-chan struct{}) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.newest.Load(), m.changed
}

// await waits until the map has a version, at most until ctx ends, or the node does.
func (m *mapCache) await(ctx, node context.Context, version uint64) {
	for {
		newest, changed := m.current()
		if newest != nil && newest.Version >= version {
			return
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return
		case <-node.Done():
			return
		}
	}
}
