package fsm

import (
	"fmt"
	"iter"
	"maps"
	"slices"

	"github.com/skeindb/skein/keyspace"
)

// Map is an unchanging copy of the range map, the node table and the placement group's
// members. It may be read by
// many goroutines; what it returns must not be changed.
type Map struct {
	// Version is the placement group's index at which the map last changed. Of two
	// maps the one with the higher Version is newer.
	Version uint64
	// ClusterVersion is the one in which all nodes write, 0 while that is not known.
	ClusterVersion keyspace.Version
	// Access is the users and roles, nil before the first change of them.
	Access *Access
	// Alarms are those raised, nil before the first change of them.
	Alarms *Alarms
	// Holds are those in force, nil before the first one.
	Holds *Holds
	// Loading is the load of the cluster, nil if there was none.
	Loading *Loading
	rows
	nodes map[keyspace.NodeID]Node
	own   keyspace.Descriptor
}

// Len returns the number of ranges.
func (m *Map) Len() int { return m.tree.Len() }

// Lookup returns the row of the range in whose span the key lies.
func (m *Map) Lookup(key []byte) Range { return *rowOf(m.tree, key) }

// All calls f with each row in key order until f returns false.
func (m *Map) All(f func(*Range) bool) { m.tree.Ascend(f) }

// Descriptors returns all ranges in key order.
func (m *Map) Descriptors() []keyspace.Descriptor {
	ds := make([]keyspace.Descriptor, 0, m.tree.Len())
	m.tree.Ascend(func(g *Range) bool {
		ds = append(ds, g.Descriptor)
		return true
	})
	return ds
}

// DescriptorsSince returns the ranges whose rows have changed after a version of the map. For
// version 0 it returns all of them, in key order.
func (m *Map) DescriptorsSince(version uint64) []keyspace.Descriptor {
	if version == 0 {
		return m.Descriptors()
	}
	rows := m.RowsSince(version)
	ds := make([]keyspace.Descriptor, len(rows))
	for i, g := range rows {
		ds[i] = g.Descriptor
	}
	return ds
}

// Nodes returns the node table, ascending by id, without those that were removed.
func (m *Map) Nodes() []Node {
	return slices.DeleteFunc(m.NodeTable(), func(n Node) bool { return n.State == NodeRemoved })
}

// NodeTable returns the whole node table, ascending by id, with those that were removed.
func (m *Map) NodeTable() []Node {
	ns := make([]Node, 0, len(m.nodes))
	for _, n := range m.nodes {
		ns = append(ns, n)
	}
	slices.SortFunc(ns, func(a, b Node) int {
		if a.ID < b.ID {
			return -1
		}
		return 1
	})
	return ns
}

// NodeRows walks the node table, with those that were removed, in no order.
func (m *Map) NodeRows() iter.Seq2[keyspace.NodeID, Node] { return maps.All(m.nodes) }

// Outrun says whether another range has come to hold a key of the descriptor's after it.
func (m *Map) Outrun(d *keyspace.Descriptor) bool { return outrun(m.tree, d) }

// Node returns one row of the node table, also of a node that was removed.
func (m *Map) Node(id keyspace.NodeID) (Node, bool) {
	n, ok := m.nodes[id]
	return n, ok
}

// RowsSince returns the rows that changed after a version. Put over a map of that
// version they give this map: a row goes only when others that tile its span come.
func (m *Map) RowsSince(version uint64) []*Range {
	var rows []*Range
	m.recent.AscendGreaterOrEqual(&Range{Changed: version + 1}, func(g *Range) bool {
		rows = append(rows, g)
		return true
	})
	return rows
}

// With returns the map with rows put over it: those that they overlap go. Nodes,
// where there are any, replace the node table, and own the placement group's descriptor
// unless its ConfIndex is 0.
func (m *Map) With(version uint64, rows []*Range, nodes []Node, own keyspace.Descriptor) *Map {
	next := &Map{Version: version, ClusterVersion: m.ClusterVersion, Access: m.Access, Alarms: m.Alarms, Holds: m.Holds, Loading: m.Loading, nodes: m.nodes, own: m.own}
	if m.tree == nil {
		next.rows = newRows()
	} else {
		next.rows = m.clone()
	}
	if len(nodes) > 0 {
		next.nodes = make(map[keyspace.NodeID]Node, len(nodes))
		for _, n := range nodes {
			next.nodes[n.ID] = n
		}
	}
	if own.ConfIndex > 0 {
		next.own = own
	}
	var gone []*Range
	if next.tree.Len() > 0 {
		for _, g := range rows {
			gone = append(gone, overlapping(next.tree, g.Descriptor.Span)...)
		}
	}
	for _, g := range gone {
		next.remove(g)
	}
	for _, g := range rows {
		next.put(g)
	}
	return next
}

// Check returns an error where the map does not cover the keyspace exactly once.
func (m *Map) Check() error {
	if ds := m.Descriptors(); !tiles(ds, keyspace.Span{}) {
		return fmt.Errorf("placement: map version %d: its %d ranges do not cover the keyspace exactly once", m.Version, len(ds))
	}
	return nil
}

// CheckAround is Check of a map whose rows were put over one that covers the keyspace exactly
// once. Each old row lay under a new one, so holes and overlaps can only be beside the new
// rows. A change of a large map therefore costs no walk over all of it.
func (m *Map) CheckAround(rows []*Range) error {
	for _, g := range rows {
		var around []keyspace.Descriptor // the row before, the row itself, and the one behind
		var span keyspace.Span
		m.tree.DescendLessOrEqual(g, func(o *Range) bool {
			around = append(around, o.Descriptor)
			return len(around) < 2
		})
		if slices.Reverse(around); len(around) == 2 {
			span.Start = around[0].Span.Start
		}
		seen := 0
		m.tree.AscendGreaterOrEqual(g, func(o *Range) bool {
			if seen++; seen == 2 {
				around, span.End = append(around, o.Descriptor), o.Descriptor.Span.End
			}
			return seen < 2
		})
		if !tiles(around, span) {
			return fmt.Errorf("placement: map version %d: range %s of %s leaves a hole beside it, or an overlap", m.Version, g.Descriptor.Range, g.Descriptor.Span)
		}
	}
	return nil
}

// ByID returns the row of a range.
func (m *Map) ByID(id keyspace.RangeID) (Range, bool) {
	if g := m.row(id); g != nil {
		return *g, true
	}
	return Range{}, false
}
