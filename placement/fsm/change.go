package fsm

import (
	"bytes"

	"github.com/skeindb/skein/keyspace"
)

// replace puts a component's descriptors in the place of its rows.
func (s *State) replace(index uint64, c component) {
	for _, g := range c.Old {
		s.remove(g)
		s.dirty.ranges[g.Descriptor.Range] = true
	}
	for _, d := range c.New {
		// A child inherits its parent's preferred leader: the row in whose span it was. A range
		// keeps the border at its start if the range before it there was kept.
		parent := c.Old[0]
		kept := false
		for _, g := range c.Old {
			if g.Descriptor.Span.Contains(d.Span.Start) {
				parent = g
			}
			kept = kept || g.Kept && bytes.Equal(g.Descriptor.Span.Start, d.Span.Start)
		}
		s.insert(&Range{Descriptor: d, Preferred: preferredFor(&d, parent.Preferred), Created: true, Kept: kept, Changed: index})
	}
	s.changedMap(index)
}

// preferredFor returns want where it has a replica, else the first replica's node.
func preferredFor(d *keyspace.Descriptor, want keyspace.NodeID) keyspace.NodeID {
	if _, ok := d.ReplicaOn(want); ok {
		return want
	}
	return d.Replicas[0].Node
}

// insert puts a row into the map, in the place of the one with its start key and id if there is
// one.
func (s *State) insert(g *Range) {
	s.put(g)
	s.dirty.ranges[g.Descriptor.Range] = true
}

func (s *State) changedMap(index uint64) {
	s.Changed = index
	s.dirty.meta = true
}
