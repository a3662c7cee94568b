package raftgroup

import (
	"fmt"

	"github.com/skeindb/skein/keyspace"
)

// Group returns the open group, or nil.
func (h *Host) Group(id keyspace.GroupID) *Group {
	h.mu.RLock()
	defer h.mu.RUnlock()
	return h.mu.groups[id]
}

// Groups returns all open groups.
func (h *Host) Groups() []*Group { return h.all() }

func (h *Host) all() []*Group {
	h.mu.RLock()
	defer h.mu.RUnlock()
	all := make([]*Group, 0, len(h.mu.groups))
	for _, g := range h.mu.groups {
		all = append(all, g)
	}
	return all
}

// workerOf returns the worker and applier of a group. System groups have their own.
func (h *Host) workerOf(id keyspace.GroupID) (*worker, *applier) {
	if id.IsSystem() {
		return h.workers[0], h.appliers[0]
	}
	x := mix(uint64(id))
	return h.workers[1+x%uint64(len(h.workers)-1)], h.appliers[1+(x>>32)%uint64(len(h.appliers)-1)]
}

// mix spreads consecutive ids (splitmix64).
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// reserve keeps all others from opening or removing the group until unreserve, or until
// it is open.
func (h *Host) reserve(id keyspace.GroupID) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.mu.groups[id] != nil || h.mu.reserved[id] || h.mu.closing[id] != nil {
		return fmt.Errorf("%w: %s", ErrExists, id)
	}
	h.mu.reserved[id] = true
	return nil
}

func (h *Host) unreserve(id keyspace.GroupID) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.mu.reserved, id)
}
