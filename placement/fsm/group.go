package fsm

import (
	"slices"

	"github.com/skeindb/skein/keyspace"
)

// OwnGroup stands for the placement group itself where an Operation names a range: no
// range has this id.
const OwnGroup keyspace.RangeID = 0

// GroupName says for people which group an operation is on.
func GroupName(id keyspace.RangeID) string {
	if id == OwnGroup {
		return "the placement group"
	}
	return "range " + id.String()
}

// PlacementGroup returns the members of the placement group, as of the map's version. Its
// ConfIndex is 0 if they are not known. Range and span mean nothing.
func (m *Map) PlacementGroup() keyspace.Descriptor { return m.own }

// own is the placement group's descriptor. Raft decides the members, and the applied record has
// them. The state shows them and does not store them.
func (s *State) own() keyspace.Descriptor {
	return keyspace.Descriptor{Range: OwnGroup, ConfIndex: s.membersIndex, Replicas: s.members}
}

// SetMembers says who holds the group, as the applied record has it.
func (s *State) SetMembers(index uint64, members []keyspace.Replica) {
	s.members, s.membersIndex = members, index
}

// Members returns who holds the group, as of the entries applied. The list must not be changed.
func (s *State) Members() []keyspace.Replica { return s.members }

// ApplyMembers takes over a change of the group's own members. It is a change of the map,
// so that every node hears of it.
func (s *State) ApplyMembers(index uint64, after []keyspace.Replica) {
	s.members, s.membersIndex = slices.Clone(after), index
	s.changedMap(index)
}

// descriptor returns what operations on a range, or on the placement group, go by.
func (s *State) descriptor(id keyspace.RangeID) (keyspace.Descriptor, bool) {
	if id == OwnGroup {
		return s.own(), s.membersIndex > 0
	}
	row := s.row(id)
	if row == nil {
		return keyspace.Descriptor{}, false
	}
	return row.Descriptor, true
}

// Of is as the state's.
func (m *Map) Of(id keyspace.RangeID) (keyspace.Descriptor, bool) {
	if id == OwnGroup {
		return m.own, m.own.ConfIndex > 0
	}
	row, ok := m.ByID(id)
	return row.Descriptor, ok
}
