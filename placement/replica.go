package placement

import (
	"context"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/placement/sequencer"
)

// Log returns the allocation log of this node's sequencer.
func (s *Service) Log() *sequencer.AllocationLog { return s.sequencer.Log() }

// View returns the newest state of this node's replica.
func (s *Service) View() *fsm.View { return s.machine.View() }

// propose proposes an effect in the term and waits for its result.
func (s *Service) propose(ctx context.Context, term uint64, op fsm.Effect) fsm.Result {
	s.mu.Lock()
	g := s.group
	s.mu.Unlock()
	if g == nil {
		return fsm.Result{Err: s.refusal()}
	}
	if p, _ := keyspace.PermitOf(ctx); p != 0 && s.View().Map.ClusterVersion >= keyspace.VersionAccess {
		op = fsm.Guarded{Permit: p, Op: op}
	}
	ch := make(chan fsm.Result, 1)
	s.machine.Propose(g, term, op, func(r fsm.Result) { ch <- r })
	select {
	case r := <-ch:
		return r
	case <-ctx.Done():
		return fsm.Result{Err: kverror.New(kverror.Timeout, "placement proposal in term %d: %v", term, ctx.Err())}
	}
}

// wall is the time that goes into rows of nodes.
func (s *Service) wall() fsm.UnixMillis {
	return fsm.UnixMillis(min(max(s.o.Clock.Wall().UnixMilli(), 0), fsm.MaxMillis))
}

// HasReplica says whether this node holds a replica of the placement group.
func (s *Service) HasReplica() bool { return s.replica() != nil }

// replica returns this node's replica, nil where there is none.
func (s *Service) replica() Group {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.group
}

// changedLocked tells those who wait for it that the replica or its leader has changed.
func (s *Service) changedLocked() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// led says whether this node's replica tells of every change of the map: it has state
// and knows a leader. moved is closed when that may have changed.
func (s *Service) led() (ok bool, moved <-chan struct{}) {
	s.mu.Lock()
	here, moved := s.group != nil, s.changed
	s.mu.Unlock()
	return here && s.machine.leaderState().LeaderNode != 0 && s.View().Version > 0, moved
}

// leaderHint is who leads, as far as this node knows; 0 is nobody. Without a replica that knows
// it, it is the node that this node's own requests go to, if that node lives and is a member.
// Otherwise old hints would circulate for ever.
func (s *Service) leaderHint() keyspace.NodeID {
	if l := s.machine.leaderState().LeaderNode; l != 0 {
		return l
	}
	c := s.client.Load()
	if c == nil {
		return 0
	}
	l := c.leader()
	if l == 0 || l == s.o.Self || !s.o.Alive(l) {
		return 0
	}
	if m := c.newest(); m != nil {
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
		return c.newest()
	}
	return nil
}

// refusal says that this node does not lead, and who does.
func (s *Service) refusal() error {
	return &kverror.Error{Kind: kverror.NotLeader, Leader: s.leaderHint()}
}

// knowsAccess refuses what needs the cluster version with users and alarms. A new cluster has none for a moment after it
// serves: who asks then repeats it.
func (s *Service) knowsAccess(what string) error { return s.knows(keyspace.VersionAccess, what) }

// knows refuses what needs a cluster version, as knowsAccess does.
func (s *Service) knows(version keyspace.Version, what string) error {
	at := s.View().Map.ClusterVersion
	if at >= version {
		return nil
	}
	kind := kverror.BadRequest
	if at == 0 {
		kind = kverror.Busy
	}
	return kverror.New(kind, "%s need cluster version %d, and it is %d: skein upgrade status says what is missing", what, version, at)
}
