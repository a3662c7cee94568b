package fsm

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/skeindb/skein/keyspace"
)

// Bootstrap is what every founder of a cluster knows alike: its configuration.
type Bootstrap struct {
	Cluster keyspace.ClusterID
	// Nodes are all founders, with ids, names and peer URLs, in any order.
	Nodes []Node
	// SplitKeys are the borders between the first ranges, in any order; none means
	// one range.
	SplitKeys [][]byte
	// PlacementReplicas and RangeReplicas are how many replicas the placement group
	// and each range get, at most as many as there are nodes; 0 is the default (see
	// PlacementVoters; 3 for ranges).
	PlacementReplicas, RangeReplicas int
}

// rangeReplicasDefault is how many replicas a range has where there are as many
// nodes.
const rangeReplicasDefault = 3

// Validate returns an error for a Bootstrap that founds nothing.
func (f *Bootstrap) Validate() error {
	if f.Cluster == 0 {
		return errors.New("found cluster: the cluster id is 0")
	}
	if len(f.Nodes) == 0 {
		return errors.New("found cluster: no node")
	}
	seen := map[keyspace.NodeID]bool{}
	for i := range f.Nodes {
		n := &f.Nodes[i]
		if n.ID == 0 || seen[n.ID] {
			return fmt.Errorf("found cluster: node id %s of %q is 0 or given twice", n.ID, n.Name)
		}
		seen[n.ID] = true
		if err := n.Validate(); err != nil {
			return fmt.Errorf("found cluster: %w", err)
		}
	}
	for _, k := range f.SplitKeys {
		if len(k) == 0 {
			return errors.New("found cluster: the empty key is no border between ranges")
		}
	}
	if f.PlacementReplicas < 0 || f.RangeReplicas < 0 {
		return fmt.Errorf("found cluster: %d and %d replicas", f.PlacementReplicas, f.RangeReplicas)
	}
	return nil
}

// nodeIDs returns the founders' ids, ascending: the order of everything that the
// founding spreads over the nodes.
func (f *Bootstrap) nodeIDs() []keyspace.NodeID {
	ids := make([]keyspace.NodeID, len(f.Nodes))
	for i := range f.Nodes {
		ids[i] = f.Nodes[i].ID
	}
	slices.Sort(ids)
	return ids
}

// PlacementVoters returns the placement group's first replicas. Its loss stops all writes. So
// it has five replicas if there are five nodes, and otherwise three, or as many as there are
// nodes. It takes the nodes with the lowest ids, which are as good as random.
func (f *Bootstrap) PlacementVoters() []keyspace.Replica {
	ids := f.nodeIDs()
	n := f.PlacementReplicas
	if n == 0 {
		n = 3
		if len(ids) >= 5 {
			n = 5
		}
	}
	var rs []keyspace.Replica
	for i, id := range ids[:min(n, len(ids))] {
		rs = append(rs, keyspace.Replica{ID: keyspace.ReplicaID(i + 1), Node: id})
	}
	return rs
}

// Ranges returns the first ranges: ids from 1 in key order, generation 1. Range i has its
// replicas on the nodes i, i+1, … in the order of the ids. So replicas and leaders are spread
// evenly: a descriptor's first replica is on the node of its preferred leader.
func (f *Bootstrap) Ranges() []keyspace.Descriptor {
	keys := slices.Clone(f.SplitKeys)
	slices.SortFunc(keys, bytes.Compare)
	keys = slices.CompactFunc(keys, bytes.Equal)
	ids := f.nodeIDs()
	replicas := min(cmp.Or(f.RangeReplicas, rangeReplicasDefault), len(ids))
	ds := make([]keyspace.Descriptor, len(keys)+1)
	for i := range ds {
		d := &ds[i]
		d.Range, d.Generation = keyspace.RangeID(i+1), 1
		if i > 0 {
			d.Span.Start = keys[i-1]
		}
		if i < len(keys) {
			d.Span.End = keys[i]
		}
		for j := range replicas {
			d.Replicas = append(d.Replicas, keyspace.Replica{
				ID:   keyspace.ReplicaID(j + 1),
				Node: ids[(i+j)%len(ids)],
			})
		}
	}
	return ds
}

// FirstState returns the state that every founder writes: the same bytes from the same
// Bootstrap, whatever the order of its lists. index is the first index of the group: the
// founding stands for the entry there.
func (f *Bootstrap) FirstState(index uint64) *State {
	s := NewState()
	ds := f.Ranges()
	s.meta = meta{
		Cluster: f.Cluster,
		// The empty store is at revision 1: it counts as allocated.
		Ceiling:     1,
		Compacted:   -1,
		NextRange:   keyspace.RangeID(len(ds) + 1),
		NextReplica: 1,
		Changed:     index, NodesChanged: index,
	}
	s.dirty.meta = true
	for _, r := range f.PlacementVoters() {
		s.NextReplica = max(s.NextReplica, r.ID+1)
	}
	for _, d := range ds {
		for _, r := range d.Replicas {
			s.NextReplica = max(s.NextReplica, r.ID+1)
		}
		s.insert(&Range{Descriptor: d, Preferred: d.Replicas[0].Node, Kept: len(d.Span.Start) > 0, Changed: index})
	}
	for _, n := range f.Nodes {
		n.State, n.Since = NodeServing, 0 // ranges are theirs from the start
		s.nodes[n.ID] = n
		s.dirty.nodes[n.ID] = true
	}
	return s
}
