package fsm

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/skeindb/skein/keyspace"
)

// Recovery is what a lost majority leaves of the cluster: the ranges whose last replicas were found,
// and the nodes that are gone.
type Recovery struct {
	// Ranges replace the map. They cover the keyspace exactly once.
	Ranges []Range
	// Gone are the nodes that never come back.
	Gone []keyspace.NodeID
	// Ceiling is above all revisions that were ever allocated. Up to Compacted history may be
	// incomplete; 0 leaves the compacted revision as it is.
	Ceiling, Compacted keyspace.Revision
	// NextRange and NextReplica are ids that were never given to anybody.
	NextRange   keyspace.RangeID
	NextReplica keyspace.ReplicaID
	Now         UnixMillis
}

// Recover changes the state as no command may, for package recovery: nobody else may call it, since it
// is no entry of the group. The group has one replica then. index is the one of the applied record that
// is written with it. Operations under way are forgotten. Nodes that are gone are removed; those that
// still have replicas in the map are decommissioned and leave, as by etcd's MemberRemove.
func (s *State) Recover(index uint64, r *Recovery) error {
	kept := map[string]bool{}
	for _, g := range s.rowsInOrder() {
		if g.Kept {
			kept[string(g.Descriptor.Span.Start)] = true
		}
		s.remove(g)
		s.dirty.ranges[g.Descriptor.Range] = true
	}
	holds := map[keyspace.NodeID]bool{}
	for i := range r.Ranges {
		g := r.Ranges[i]
		g.Kept, g.Changed = kept[string(g.Descriptor.Span.Start)], index
		for _, m := range g.Descriptor.Replicas {
			holds[m.Node] = true
		}
		s.insert(&g)
	}
	for _, o := range s.operations {
		s.dropOperation(o)
	}
	for _, id := range slices.Sorted(slices.Values(r.Gone)) {
		n, ok := s.nodes[id]
		switch {
		case !ok || n.State == NodeRemoved:
			continue
		case holds[id]:
			n.State, n.Leaves, n.Since = NodeDecommissioned, true, r.Now
		default:
			n = Node{ID: n.ID, Name: n.Name, State: NodeRemoved, Since: r.Now}
			s.endAlarmsOf(index, id)
		}
		s.putNodeRow(index, n)
	}
	s.Ceiling = max(s.Ceiling, r.Ceiling)
	s.Compacted = max(s.Compacted, cmp.Or(r.Compacted, -1))
	s.NextRange, s.NextReplica = max(s.NextRange, r.NextRange), max(s.NextReplica, r.NextReplica)
	s.changedMap(index)
	if err := s.Check(); err != nil {
		return fmt.Errorf("placement: recover: %w", err)
	}
	return nil
}

func (s *State) rowsInOrder() (all []*Range) {
	s.tree.Ascend(func(g *Range) bool {
		all = append(all, g)
		return true
	})
	return all
}
