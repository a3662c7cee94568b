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

// Validate returns an error if b cannot bootstrap a cluster.
func (b *Bootstrap) Validate() error {
	if b.Cluster == 0 {
		return errors.New("bootstrap cluster: the cluster id is 0")
	}
	if len(b.Nodes) == 0 {
		return errors.New("bootstrap cluster: no node")
	}
	seen := map[keyspace.NodeID]bool{}
	for i := range b.Nodes {
		n := &b.Nodes[i]
		if n.ID == 0 || seen[n.ID] {
			return fmt.Errorf("bootstrap cluster: node id %s of %q is 0 or given twice", n.ID, n.Name)
		}
		seen[n.ID] = true
		if err := n.Validate(); err != nil {
			return fmt.Errorf("bootstrap cluster: %w", err)
		}
	}
	for _, k := range b.SplitKeys {
		if len(k) == 0 {
			return errors.New("bootstrap cluster: the empty key is no border between ranges")
		}
	}
	if b.PlacementReplicas < 0 || b.RangeReplicas < 0 {
		return fmt.Errorf("bootstrap cluster: %d and %d replicas", b.PlacementReplicas, b.RangeReplicas)
	}
	return nil
}

// nodeIDs returns the founders' ids, ascending: the order of everything that the
// bootstrap spreads over the nodes.
func (b *Bootstrap) nodeIDs() []keyspace.NodeID {
	ids := make([]keyspace.NodeID, len(b.Nodes))
	for i := range b.Nodes {
		ids[i] = b.Nodes[i].ID
	}
	slices.Sort(ids)
	return ids
}

// PlacementVotersFor returns how many voters the placement group is to have in a cluster of so
// many nodes. Its loss stops all writes. So it has five from five nodes on, and otherwise three.
func PlacementVotersFor(nodes int) int {
	if nodes >= 5 {
		return 5
	}
	return 3
}

// PlacementVoters returns the placement group's first replicas, on as many nodes as there are. It
// takes the nodes with the lowest ids, which are as good as random.
func (b *Bootstrap) PlacementVoters() []keyspace.Replica {
	ids := b.nodeIDs()
	n := cmp.Or(b.PlacementReplicas, PlacementVotersFor(len(ids)))
	var rs []keyspace.Replica
	for i, id := range ids[:min(n, len(ids))] {
		rs = append(rs, keyspace.Replica{ID: keyspace.ReplicaID(i + 1), Node: id})
	}
	return rs
}

// Ranges returns the first ranges: ids from 1 in key order, generation 1. Range i has its
// replicas on the nodes i, i+1, … in the order of the ids. So replicas and leaders are spread
// evenly: a descriptor's first replica is on the node of its preferred leader.
func (b *Bootstrap) Ranges() []keyspace.Descriptor {
	keys := slices.Clone(b.SplitKeys)
	slices.SortFunc(keys, bytes.Compare)
	keys = slices.CompactFunc(keys, bytes.Equal)
	ids := b.nodeIDs()
	replicas := min(cmp.Or(b.RangeReplicas, rangeReplicasDefault), len(ids))
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
// bootstrap stands for the entry there.
func (b *Bootstrap) FirstState(index uint64) *State {
	s := NewState()
	ds := b.Ranges()
	s.meta = meta{
		Cluster: b.Cluster,
		// The empty store is at revision 1: it counts as allocated.
		Ceiling:     1,
		Compacted:   -1,
		NextRange:   keyspace.RangeID(len(ds) + 1),
		NextReplica: 1,
		Changed:     index, NodesChanged: index,
	}
	s.dirty.meta = true
	for _, r := range b.PlacementVoters() {
		s.NextReplica = max(s.NextReplica, r.ID+1)
	}
	for _, d := range ds {
		for _, r := range d.Replicas {
			s.NextReplica = max(s.NextReplica, r.ID+1)
		}
		s.insert(&Range{Descriptor: d, Preferred: d.Replicas[0].Node, Kept: len(d.Span.Start) > 0, Changed: index})
	}
	for _, n := range b.Nodes {
		n.State, n.Since = NodeServing, 0 // ranges are theirs from the start
		s.nodes[n.ID] = n
		s.dirty.nodes[n.ID] = true
	}
	return s
}
