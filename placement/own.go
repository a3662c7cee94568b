package placement

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/raftgroup"
)

// OwnGroup stands for the placement group itself where an Operation names a range: no
// range has this id.
const OwnGroup keyspace.RangeID = 0

// groupName says for people which group an operation is on.
func groupName(id keyspace.RangeID) string {
	if id == OwnGroup {
		return "the placement group"
	}
	return "range " + id.String()
}

// PlacementGroup returns who holds the placement group, as of the map's version: its
// ConfIndex is 0 where that is not known. Range and span mean nothing.
func (m *Map) PlacementGroup() keyspace.Descriptor { return m.own }

// own is the placement group's descriptor. Who its members are is raft's matter, and
// stands in the applied record: the state shows it and stores it nowhere.
func (s *state) own() keyspace.Descriptor {
	return keyspace.Descriptor{Range: OwnGroup, ConfIndex: s.membersIndex, Replicas: s.members}
}

// applyMembers takes over a change of the group's own members. It is a change of the map,
// so that every node hears of it.
func (s *state) applyMembers(index uint64, after []keyspace.Replica) {
	s.members, s.membersIndex = slices.Clone(after), index
	s.changedMap(index)
}

// descriptor returns what operations on a range, or on the placement group, go by.
func (s *state) descriptor(id keyspace.RangeID) (keyspace.Descriptor, bool) {
	if id == OwnGroup {
		return s.own(), s.membersIndex > 0
	}
	row, ok := s.ranges[id]
	if !ok {
		return keyspace.Descriptor{}, false
	}
	return row.Descriptor, true
}

// descriptor is as the state's.
func (m *Map) descriptor(id keyspace.RangeID) (keyspace.Descriptor, bool) {
	if id == OwnGroup {
		return m.own, m.own.ConfIndex > 0
	}
	row, ok := m.byID(id)
	return row.Descriptor, ok
}

// ownMover carries out operations on the placement group itself: its leader is the node
// that carries out operations.
type ownMover struct {
	s    *Service
	term uint64
}

// Look implements Mover.
func (m ownMover) Look(context.Context, keyspace.NodeID, keyspace.RangeID) (keyspace.Descriptor, keyspace.NodeID, error) {
	return m.s.View().PlacementGroup(), m.s.o.Self, nil
}

// ChangeMembers implements Mover. Nobody else changes this configuration in this term, and
// raft refuses a change on top of one that is not applied: what was decided by is there yet.
func (m ownMover) ChangeMembers(ctx context.Context, _ keyspace.NodeID, _ keyspace.RangeID, confIndex uint64, changes []raftgroup.ConfChange) error {
	g := m.s.replica()
	if g == nil {
		return m.s.refusal()
	}
	if now := m.s.View().PlacementGroup().ConfIndex; now != confIndex {
		return kverror.New(kverror.WrongRange, "the members of the placement group are those of index %d, not %d", now, confIndex)
	}
	if who := m.s.stoppingNow(ctx); who != 0 {
		// Whoever was told to go counts on those that stay.
		return kverror.New(kverror.Busy, "node %s is stopping", who)
	}
	if err := g.ChangeConf(ctx, m.term, changes, nil); err != nil {
		return fmt.Errorf("change the members of the placement group: %w", err)
	}
	return nil
}

// TransferTo implements Mover: the hand-outs end first, and the ceiling is lowered, so
// that no revision is left out.
func (m ownMover) TransferTo(ctx context.Context, _ keyspace.NodeID, _ keyspace.RangeID, to keyspace.NodeID) error {
	g := m.s.replica()
	if g == nil {
		return m.s.refusal()
	}
	var target keyspace.Replica // raft chooses
	if to != 0 {
		own, ok := m.s.View().PlacementGroup(), false
		if target, ok = own.ReplicaOn(to); !ok {
			return kverror.New(kverror.BadRequest, "node %s has no replica of the placement group", to)
		}
	}
	return m.s.transfer(ctx, g, target)
}

// stoppingNow returns a node that lives and stops, 0 if there is none that is known. Those
// that have said so are asked again: they may have come back since.
func (s *Service) stoppingNow(ctx context.Context) keyspace.NodeID {
	s.mu.Lock()
	phase, noted := s.phase, slices.Collect(maps.Keys(s.stops.nodes))
	s.mu.Unlock()
	if phase != staying {
		return s.o.Self
	}
	for _, n := range noted {
		if n == s.o.Self || !s.o.Alive(n) {
			continue
		}
		if is, err := s.askStanding(ctx, n); err != nil || !s.heard(n, is) {
			return n
		}
	}
	return 0
}

// electorate is who votes in a configuration. Of a joint one the first half is who votes
// afterwards and the second who did before, and each must agree; else there is no second.
type electorate [2][]keyspace.NodeID

func electorateOf(replicas []keyspace.Replica) electorate {
	var e electorate
	both := false
	for _, r := range replicas {
		switch r.Role {
		case keyspace.RoleVoter:
			e[0], e[1] = append(e[0], r.Node), append(e[1], r.Node)
		case keyspace.RoleVoterIncoming:
			e[0], both = append(e[0], r.Node), true
		case keyspace.RoleVoterOutgoing, keyspace.RoleVoterDemoting:
			e[1], both = append(e[1], r.Node), true
		case keyspace.RoleLearner:
		}
	}
	if !both {
		e[1] = nil
	}
	return e
}

// all returns everybody who votes, each once.
func (e electorate) all() []keyspace.NodeID {
	all := slices.Concat(e[0], e[1])
	slices.Sort(all)
	return slices.Compact(all)
}

// agree says whether the nodes are a quorum.
func (e electorate) agree(nodes []keyspace.NodeID) bool {
	for _, half := range e {
		n := 0
		for _, v := range half {
			if slices.Contains(nodes, v) {
				n++
			}
		}
		if len(half) > 0 && n <= len(half)/2 {
			return false
		}
	}
	return len(e[0]) > 0
}
