package placement

import (
	"context"
	"fmt"
	"sync"

	"go.uber.org/zap"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/raftgroup/lifecycle"
	"github.com/skeindb/skein/transport"
)

// maxUnknown bounds the messages for replicas that are not here that wait to be looked into.
const maxUnknown = 16

// ownReplica is this node's replica of the placement group, as package lifecycle sees it.
type ownReplica struct {
	s    *Service
	host *raftgroup.Host

	mu sync.Mutex
	// Guarded by mu: members is the newest that a node said of the group's members when it was
	// asked; opened is the descriptor by which an empty replica was opened.
	members, opened keyspace.Descriptor
}

func newLifecycle(o *ownReplica) *lifecycle.Lifecycle {
	return lifecycle.New(lifecycle.Config{
		Self: o.s.o.Self, Clock: o.s.o.Clock, Owner: o, Tombstones: tombstones(o.s.o.Engine), MaxUnknown: maxUnknown, Logger: o.s.o.Logger,
	})
}

// Unknown is told that a node speaks to a replica of the placement group that is not open here.
// It does not block.
func (s *Service) Unknown(from keyspace.NodeID, to keyspace.ReplicaID) {
	s.lifecycle.Unknown(lifecycle.Unknown{From: from, Group: keyspace.PlacementGroup, To: to})
}

// Removed is told that a leader says this node's replica is no member of the placement group. It
// does not block.
func (s *Service) Removed() { s.lifecycle.Check(keyspace.PlacementGroup) }

// openStored opens the replica that the engine holds.
func (s *Service) openStored(h *raftgroup.Host) error {
	s.own.host = h
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
		// It has applied that it is no member any more, and the node went down before it was removed.
		s.lifecycle.Continue(keyspace.PlacementGroup)
		return nil
	}
	g, err := h.Open(keyspace.PlacementGroup, r.ID, raftgroup.Position{Index: s.machine.index, Term: s.machine.term}, s.machine)
	if err != nil {
		return err
	}
	s.attach(g)
	return nil
}

// UndoBootstrap deletes the bootstrap state that this node has written. Nothing has acted on it,
// and the group has had other members since. holds is the replica that the group has here, 0 for
// none. UndoBootstrap comes before Open. A replica of the bootstrap that began to vote now could
// elect a leader that does not know the later configurations.
func (s *Service) UndoBootstrap(ctx context.Context, h *raftgroup.Host, holds keyspace.ReplicaID) error {
	own := s.View().PlacementGroup()
	r, member := own.ReplicaOn(s.o.Self)
	if !member {
		return nil
	}
	if r.ID != holds {
		if err := storeLeft(ctx, s.o.Engine, r.ID); err != nil {
			return fmt.Errorf("undo bootstrap: %w", err)
		}
	}
	err := h.Remove(ctx, []keyspace.GroupID{keyspace.PlacementGroup}, deleteOwn)[keyspace.PlacementGroup]
	if err == nil {
		err = s.machine.reload()
	}
	if err != nil {
		return fmt.Errorf("undo bootstrap: %w", err)
	}
	s.o.Logger.Info("the placement group has other members than at bootstrap", zap.Uint64("replica", uint64(holds)))
	return nil
}

// deleteOwn writes the deletion of the group's state.
func deleteOwn(b *engine.Batch, g keyspace.GroupID) error {
	span := engine.GroupLocalSpan(g)
	return b.DeleteRange(span.Lower, span.Upper)
}

// OpenStored implements lifecycle.Opener: what the engine holds is open since the start.
func (o *ownReplica) OpenStored(_ context.Context, u lifecycle.Unknown) (done bool, err error) {
	g := o.s.replica()
	return o.host == nil || g != nil && g.Status().Replica >= u.To, nil
}

// Ask implements lifecycle.Opener.
func (o *ownReplica) Ask(ctx context.Context, u lifecycle.Unknown) (keyspace.Descriptor, error) {
	q := request{Kind: requestStatus}
	p, err := o.s.o.Bus.Call(ctx, u.From, transport.MethodPlacementRequest, q.encode())
	if err != nil {
		return keyspace.Descriptor{}, err
	}
	a, err := decodeResponse(requestStatus, p)
	if err != nil {
		return keyspace.Descriptor{}, err
	}
	d := keyspace.Descriptor{ConfIndex: a.Status.ConfIndex, Replicas: a.Status.Replicas}
	o.mu.Lock()
	defer o.mu.Unlock()
	if d.Newer(&o.members) {
		o.members = d
	}
	return d, nil
}

// OpenEmpty implements lifecycle.Opener. A snapshot of its leader fills the replica; until then
// it votes for nobody.
func (o *ownReplica) OpenEmpty(ctx context.Context, u lifecycle.Unknown, d *keyspace.Descriptor) error {
	// An older replica goes first.
	if err := o.s.lifecycle.Remove(ctx, keyspace.PlacementGroup); err != nil || o.s.replica() != nil {
		return err
	}
	g, err := o.host.Open(keyspace.PlacementGroup, u.To, raftgroup.Position{}, o.s.machine)
	if err != nil {
		return fmt.Errorf("open replica %d: %w", u.To, err)
	}
	o.mu.Lock()
	o.opened = *d
	o.mu.Unlock()
	o.s.attach(g)
	// Messages about the replica that came before attach were dropped.
	o.s.lifecycle.Check(keyspace.PlacementGroup)
	o.s.o.Logger.Info("opened an empty replica of the placement group", zap.Uint64("replica", uint64(u.To)))
	return nil
}

// Suspects implements lifecycle.Remover.
func (o *ownReplica) Suspects() []keyspace.GroupID {
	return []keyspace.GroupID{keyspace.PlacementGroup}
}

// Verdict implements lifecycle.Remover.
func (o *ownReplica) Verdict(keyspace.GroupID) (lifecycle.Verdict, error) {
	g := o.s.replica()
	if g == nil {
		return lifecycle.Stay, nil
	}
	applied := o.s.View().PlacementGroup()
	heard := keyspace.Descriptor{}
	if m := o.s.heardMap(); m != nil {
		heard = m.PlacementGroup()
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if applied.ConfIndex == 0 {
		applied = o.opened // it waits for its snapshot
	}
	if o.members.ConfIndex > heard.ConfIndex {
		heard = o.members
	}
	if lifecycle.Removed(g.Status().Replica, &applied, &heard) {
		return lifecycle.Remove, nil
	}
	return lifecycle.Stay, nil
}

// End implements lifecycle.Remover. The tombstone comes before the log goes, which knows what the
// replica has promised. Of a replica that is not open the tombstone is stored.
func (o *ownReplica) End(ctx context.Context, _ []keyspace.GroupID) (failed map[keyspace.GroupID]error) {
	open := o.s.replica()
	if open == nil {
		return nil
	}
	if err := storeLeft(ctx, o.s.o.Engine, open.Status().Replica); err != nil {
		return map[keyspace.GroupID]error{keyspace.PlacementGroup: err}
	}
	o.s.detach()
	return nil
}

// Destroy implements lifecycle.Remover.
func (o *ownReplica) Destroy(ctx context.Context, gs []keyspace.GroupID) (failed map[keyspace.GroupID]error) {
	return o.host.Remove(ctx, gs, deleteOwn)
}

// Gone implements lifecycle.Remover.
func (o *ownReplica) Gone(keyspace.GroupID) error {
	o.s.machine.LeaderChanged(raftgroup.LeaderState{})
	if err := o.s.machine.reload(); err != nil {
		return err
	}
	o.mu.Lock()
	o.opened = keyspace.Descriptor{}
	o.mu.Unlock()
	o.s.o.Logger.Info("removed this node's replica of the placement group, which is no member any more")
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

// membersApplied is told when a change of the group's members is applied here, or a
// snapshot is installed.
func (s *Service) membersApplied() {
	s.mu.Lock()
	s.changedLocked()
	s.mu.Unlock()
	s.lifecycle.Check(keyspace.PlacementGroup)
}
