package placement

import (
	"context"
	"encoding/binary"
	"fmt"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/transport"
)

// Times of the residence.
const (
	// gcSweep is how often this node's replica is compared with the map: one that was
	// down while it was removed hears of it from nobody.
	gcSweep = 10 * time.Second
	// gcRetry is the pause after a removal that failed.
	gcRetry = time.Second
	// membersTimeout is how long a node may take to say who holds the placement group.
	membersTimeout = time.Second
)

// maxUnknown bounds the messages for replicas that are not here that wait to be looked
// into. More are told of again.
const maxUnknown = 16

// unknownReplica is a replica of the placement group that is not here: from speaks to it.
type unknownReplica struct {
	from keyspace.NodeID
	to   keyspace.ReplicaID
}

// replicaLifecycle is how this node's replica of the placement group comes and goes: an empty
// one is opened when a leader speaks to it, and one that is no member any more is removed
// for good. One goroutine, tend, does both, and owns what is not said to be another's.
type replicaLifecycle struct {
	host    *raftgroup.Host
	unknown chan unknownReplica
	// kick has tend look whether the replica still is a member.
	kick chan struct{}
	// members is the newest that a node said of the group's members when it was asked, and
	// opened what an empty replica was opened by.
	members, opened keyspace.Descriptor
	// collecting says that a replica is being removed, which has the id left; 0 is not known.
	collecting bool
	left       keyspace.ReplicaID
}

func newReplicaLifecycle() replicaLifecycle {
	return replicaLifecycle{unknown: make(chan unknownReplica, maxUnknown), kick: make(chan struct{}, 1)}
}

// Unknown is told that a node speaks to a replica of the placement group that is not open
// here. It does not block.
func (s *Service) Unknown(from keyspace.NodeID, to keyspace.ReplicaID) {
	select {
	case s.lifecycle.unknown <- unknownReplica{from, to}:
	default:
	}
}

// Removed is told that a leader says this node's replica is no member of the placement
// group. It may be the word of one that has not heard of the replica yet, so that it is a
// reason to look and no more. It does not block.
func (s *Service) Removed() { signal(s.lifecycle.kick) }

// HasReplica says whether this node holds a replica of the placement group.
func (s *Service) HasReplica() bool { return s.replica() != nil }

// replica returns this node's replica, nil where there is none.
func (s *Service) replica() Group {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.group
}

// runLifecycle is the residence's goroutine.
func (s *Service) runLifecycle(ctx context.Context) {
	sweep := s.o.Clock.NewTimer(gcSweep)
	defer sweep.Stop()
	for {
		var err error
		select {
		case <-ctx.Done():
			return
		case x := <-s.lifecycle.unknown:
			err = s.openEmpty(ctx, x)
		case <-s.lifecycle.kick:
			err = s.collectReplica(ctx)
		case <-sweep.C():
			err = s.collectReplica(ctx)
			sweep.Reset(gcSweep)
		}
		if err != nil && ctx.Err() == nil {
			s.o.Logger.Warn("this node's replica of the placement group", zap.Error(err))
			sweep.Reset(gcRetry)
		}
	}
}

// openStored opens the replica that the engine holds.
func (s *Service) openStored(h *raftgroup.Host) error {
	s.lifecycle.host = h
	a, ok, err := s.o.Engine.Applied(keyspace.PlacementGroup)
	if err != nil {
		return err
	}
	if !ok {
		// A removal that a crash had cut off may have been done since the state was loaded.
		return s.machine.reload()
	}
	own := keyspace.Descriptor{Replicas: a.Replicas}
	r, member := own.ReplicaOn(s.o.Self)
	if !member {
		// It has applied that it is no member any more, and went down before it was removed.
		left, err := s.hasLeft()
		s.lifecycle.collecting, s.lifecycle.left = true, left
		signal(s.lifecycle.kick)
		return err
	}
	g, err := h.Open(keyspace.PlacementGroup, r.ID, raftgroup.Position{Index: s.machine.index, Term: s.machine.term}, s.machine)
	if err != nil {
		return err
	}
	s.attach(g)
	return nil
}

// UndoBootstrap takes back the founding state that this node has written, which nothing has acted
// on: the group has had other members since. holds is the replica that the group has here,
// 0 for none. It comes before Open. A replica of the founding that began to vote now would
// do so for a leader that does not know yet that the group has gone on without it.
func (s *Service) UndoBootstrap(ctx context.Context, h *raftgroup.Host, holds keyspace.ReplicaID) error {
	own := s.View().PlacementGroup()
	r, member := own.ReplicaOn(s.o.Self)
	if !member {
		return nil
	}
	if r.ID != holds {
		if err := s.noteLeft(ctx, r.ID); err != nil {
			return fmt.Errorf("take the founding state back: %w", err)
		}
	}
	err := h.Remove(ctx, keyspace.PlacementGroup, deleteOwn)
	if err == nil {
		err = s.machine.reload()
	}
	if err != nil {
		return fmt.Errorf("take the founding state back: %w", err)
	}
	s.o.Logger.Info("the placement group has other members than at the founding", zap.Uint64("replica", uint64(holds)))
	return nil
}

// deleteOwn writes the deletion of the group's state.
func deleteOwn(b *engine.Batch) error {
	span := engine.GroupLocalSpan(keyspace.PlacementGroup)
	return b.DeleteRange(span.Lower, span.Upper)
}

// openEmpty opens an empty replica that a node speaks to, if that node has it as a member. A
// snapshot of its leader fills it; until then it votes for nobody.
func (s *Service) openEmpty(ctx context.Context, x unknownReplica) error {
	left, err := s.hasLeft()
	if err != nil || x.to <= left || s.lifecycle.host == nil {
		return err
	}
	if g := s.replica(); g != nil && g.Status().Replica >= x.to {
		return nil
	}
	d, err := s.askMembers(ctx, x.from)
	if err != nil {
		return err
	}
	if d.ConfIndex > s.lifecycle.members.ConfIndex {
		s.lifecycle.members = d
	}
	m, member := d.ReplicaOn(s.o.Self)
	if !member || m.ID != x.to {
		return nil
	}
	// An older replica goes first.
	if err := s.collectReplica(ctx); err != nil || s.replica() != nil {
		return err
	}
	g, err := s.lifecycle.host.Open(keyspace.PlacementGroup, m.ID, raftgroup.Position{}, s.machine)
	if err != nil {
		return fmt.Errorf("open replica %d: %w", m.ID, err)
	}
	s.lifecycle.opened = d
	s.attach(g)
	s.o.Logger.Info("opened an empty replica of the placement group", zap.Uint64("replica", uint64(m.ID)))
	return nil
}

// askMembers asks a node who holds the placement group.
func (s *Service) askMembers(ctx context.Context, node keyspace.NodeID) (keyspace.Descriptor, error) {
	ctx, cancel := clock.WithTimeout(ctx, s.o.Clock, membersTimeout)
	defer cancel()
	q := request{Kind: requestStatus}
	p, err := s.o.Bus.Call(ctx, node, transport.MethodPlacementRequest, q.encode())
	if err == nil {
		var a response
		if a, err = decodeResponse(requestStatus, p); err == nil {
			return keyspace.Descriptor{ConfIndex: a.Status.ConfIndex, Replicas: a.Status.Replicas}, nil
		}
	}
	return keyspace.Descriptor{}, fmt.Errorf("ask node %s who holds the placement group: %w", node, err)
}

// removedReplica says whether this node's replica is certainly no member any more, and its id:
// the configuration that it has applied itself, or a newer one of which this node has
// heard, is without it. Both are committed, and no replica's id is ever used again.
func (s *Service) removedReplica() (keyspace.ReplicaID, bool) {
	g := s.replica()
	if s.lifecycle.collecting || g == nil {
		return s.lifecycle.left, s.lifecycle.collecting
	}
	id := g.Status().Replica
	mine := s.View().PlacementGroup()
	if mine.ConfIndex == 0 {
		mine = s.lifecycle.opened // it waits for its snapshot
	}
	known := s.lifecycle.members
	if m := s.heardMap(); m != nil && m.PlacementGroup().ConfIndex > known.ConfIndex {
		known = m.PlacementGroup()
	}
	if known.ConfIndex < mine.ConfIndex {
		known = mine
	}
	return id, known.ConfIndex > 0 && !hasMember(known.Replicas, id)
}

func hasMember(rs []keyspace.Replica, id keyspace.ReplicaID) bool {
	return slices.ContainsFunc(rs, func(r keyspace.Replica) bool { return r.ID == id })
}

// collectReplica removes this node's replica, its log and its state, if it is no member any more.
// What fails is to be repeated.
func (s *Service) collectReplica(ctx context.Context) error {
	id, gone := s.removedReplica()
	if !gone {
		return nil
	}
	// Before the log goes, which knows what the replica has promised: an id that has left
	// never comes back.
	if err := s.noteLeft(ctx, id); err != nil {
		return err
	}
	s.lifecycle.collecting, s.lifecycle.left = true, id
	s.detach()
	err := s.lifecycle.host.Remove(ctx, keyspace.PlacementGroup, deleteOwn)
	if err == nil {
		s.machine.LeaderChanged(raftgroup.LeaderState{})
		err = s.machine.reload()
	}
	if err != nil {
		return fmt.Errorf("remove replica %d: %w", id, err)
	}
	s.lifecycle.collecting, s.lifecycle.opened = false, keyspace.Descriptor{}
	s.o.Logger.Info("removed this node's replica of the placement group, which is no member any more", zap.Uint64("replica", uint64(id)))
	return nil
}

// attach gives the Service the opened placement group.
func (s *Service) attach(g Group) {
	s.mu.Lock()
	s.group = g
	s.changedLocked()
	s.mu.Unlock()
	s.sequencer.SetGroup(g)
}

// detach takes the placement group away: whoever follows this node's map goes elsewhere.
func (s *Service) detach() {
	s.mu.Lock()
	s.group = nil
	close(s.detached)
	s.detached = make(chan struct{})
	s.changedLocked()
	s.mu.Unlock()
	s.machine.LeaderChanged(raftgroup.LeaderState{})
	s.sequencer.SetGroup(nil)
}

// changedLocked tells those who wait for it that the replica or its leader has changed.
func (s *Service) changedLocked() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// membersApplied is told when a change of the group's members is applied here, or a
// snapshot is installed.
func (s *Service) membersApplied() {
	s.mu.Lock()
	s.changedLocked()
	s.mu.Unlock()
	signal(s.lifecycle.kick)
}

// led says whether this node's replica tells of every change of the map: it has state
// and knows a leader. moved is closed when that may have changed.
func (s *Service) led() (ok bool, moved <-chan struct{}) {
	s.mu.Lock()
	here, moved := s.group != nil, s.changed
	s.mu.Unlock()
	return here && s.machine.leaderState().LeaderNode != 0 && s.View().Version > 0, moved
}

// leftKey is this node's own note of the newest of its replicas that has left the
// placement group.
var leftKey = engine.NodeLocalKey([]byte("placement/left"))

// hasLeft returns the newest replica that has left this node, 0 for none. It and those
// before it never come back: their log is gone, and with it what they have promised. One
// that began anew would vote for a leader that lacks what it has acknowledged, and who
// does not know yet that it was removed would count the vote.
func (s *Service) hasLeft() (keyspace.ReplicaID, error) {
	v, ok, err := s.o.Engine.Get(leftKey)
	if err != nil || !ok {
		return 0, err
	}
	id, w := binary.Uvarint(v)
	if w <= 0 || w != len(v) {
		return 0, fmt.Errorf("placement: %d bytes for the replica that has left", len(v))
	}
	return keyspace.ReplicaID(id), nil
}

// setLeft writes the note that a replica has left.
func setLeft(b *engine.Batch, id keyspace.ReplicaID) error {
	return b.Set(leftKey, binary.AppendUvarint(nil, uint64(id)))
}

// noteLeft makes the note durable.
func (s *Service) noteLeft(ctx context.Context, id keyspace.ReplicaID) error {
	have, err := s.hasLeft()
	if err != nil {
		return err
	}
	b := s.o.Engine.NewBatch()
	defer b.Close()
	if err = setLeft(b, max(id, have)); err == nil {
		err = b.Commit()
	}
	if err == nil {
		err = s.o.Engine.Flush(ctx)
	}
	if err != nil {
		return fmt.Errorf("note that replica %d has left: %w", id, err)
	}
	return nil
}

// leaves is for apply: it notes that this node's replica is no member behind the change
// of the members, in the batch that makes it so.
func (m *machine) leaves(b *engine.Batch, after []keyspace.Replica) error {
	for _, r := range m.state.Members() {
		if r.Node == m.self && !hasMember(after, r.ID) {
			return setLeft(b, r.ID)
		}
	}
	return nil
}

// leaderHint is who leads, as far as this node knows; 0 is nobody. Without a replica that
// knows it, it is who this node's own requests go to, if that node lives and is a member:
// what was heard long ago would go round for ever.
func (s *Service) leaderHint() keyspace.NodeID {
	if l := s.machine.leaderState().LeaderNode; l != 0 {
		return l
	}
	c := s.client.Load()
	if c == nil {
		return 0
	}
	l := c.Leader()
	if l == 0 || l == s.o.Self || !s.o.Alive(l) {
		return 0
	}
	if m := c.maps.load(); m != nil {
		own := m.PlacementGroup()
		if _, member := own.ReplicaOn(l); member {
			return l
		}
	}
	return 0
}

// heardMap returns the newest map that this node has, be it by its own replica or by
// another node; nil is none.
func (s *Service) heardMap() *fsm.Map {
	if c := s.client.Load(); c != nil {
		return c.maps.load()
	}
	return nil
}

// refusal says that this node does not lead, and who does.
func (s *Service) refusal() error {
	return &kverror.Error{Kind: kverror.NotLeader, Leader: s.leaderHint()}
}
