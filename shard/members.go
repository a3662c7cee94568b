package shard

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/raftgroup/lifecycle"
	"github.com/skeindb/skein/shard/command"
)

// changer changes a group's members.
type changer interface {
	// Replica is the id of this node's replica.
	Replica() keyspace.ReplicaID
	// ChangeConf is as raftgroup.Group.ChangeConf.
	ChangeConf(ctx context.Context, term uint64, changes []raftgroup.ConfChange, payload []byte) error
}

// ChangeMembers changes who holds the range: one change, or several through a joint
// configuration, see raftgroup.ConfChange. It returns the descriptor after the change, once
// this replica has applied it. The replica must lead and remain a member. confIndex must be the
// index of the configuration on which the caller decided: of two changes of one configuration,
// one is refused. Errors are of package kverror; with LeaderChanged the change may yet happen.
func (r *Replica) ChangeMembers(ctx context.Context, confIndex uint64, changes []raftgroup.ConfChange) (keyspace.Descriptor, error) {
	term, err := r.checkMembers(confIndex)
	if err != nil {
		return keyspace.Descriptor{}, err
	}
	done := make(chan error, 1)
	// The change goes on where the caller gives up, and what became of it is known in the end.
	if !r.store.begin(func() {
		err := r.group.ChangeConf(r.store.ctx, term, changes, nil)
		r.altered(term, err)
		done <- err
	}) {
		return keyspace.Descriptor{}, r.membersError(raftgroup.ErrStopped)
	}
	err, late := clock.Await(ctx, done)
	if late != nil {
		err = fmt.Errorf("%w: %w", raftgroup.ErrUnknownFate, late)
	}
	if err != nil {
		return keyspace.Descriptor{}, r.membersError(err)
	}
	return r.Descriptor(), nil
}

// checkMembers says whether the members can be changed, and in which term.
func (r *Replica) checkMembers(confIndex uint64) (term uint64, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case !r.pipe.Leads():
		return 0, r.errorLocked(kverror.NotLeader, "")
	case confIndex != r.confIndex:
		return 0, r.errorLocked(kverror.WrongRange, fmt.Sprintf("the members are those of index %d, not %d", r.confIndex, confIndex))
	case r.pipe.Draining():
		return 0, r.errorLocked(kverror.Busy, "the node stops")
	case r.change != nil:
		return 0, r.errorLocked(kverror.Busy, "a split is under way")
	case r.rec.Merge.Role != command.MergeNone:
		return 0, r.errorLocked(kverror.Busy, "the range is being merged")
	}
	r.altering++
	return r.pipe.Term(), nil
}

// altered notes that a change of the members that was checked in the term has ended. Its fate
// is unknown only where the leadership or the node has ended, and the count with it.
func (r *Replica) altered(term uint64, err error) {
	if errors.Is(err, raftgroup.ErrUnknownFate) {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.pipe.Term() == term {
		r.altering--
	}
}

// membersError is what raft says of a change, as a kverror.
func (r *Replica) membersError(err error) error {
	kind := kverror.Busy
	switch {
	case errors.Is(err, raftgroup.ErrUnknownFate):
		kind = kverror.LeaderChanged
	case errors.Is(err, raftgroup.ErrNotLeader), errors.Is(err, raftgroup.ErrDropped):
		kind = kverror.NotLeader
	case errors.Is(err, raftgroup.ErrConfInvalid), errors.Is(err, raftgroup.ErrRemovesLeader):
		kind = kverror.BadRequest
	case errors.Is(err, raftgroup.ErrClosed), errors.Is(err, raftgroup.ErrStopped):
		kind = kverror.Stopped
	}
	return kverror.New(kind, "change the members of range %s: %v", r.id, err)
}

// TransferTo hands the leadership to the voter on the node, or with 0 to the best voter. It first
// finishes the requests that are under way. Later ones are repeated at the new leader, so no
// request fails. It returns once this replica leads no more. Errors are of package kverror;
// the leadership may then have moved all the same.
func (r *Replica) TransferTo(ctx context.Context, to keyspace.NodeID) error {
	r.mu.Lock()
	term := r.pipe.Term()
	notLeader := r.errorLocked(kverror.NotLeader, "")
	var target keyspace.Replica
	for _, m := range r.replicas {
		if m.Node == to {
			target = m
		}
	}
	r.mu.Unlock()
	switch {
	case term == 0:
		return notLeader
	case to == r.store.cfg.Self:
		return nil
	case to == 0: // raft chooses
	case target.ID == 0 || target.Role != keyspace.RoleVoter && target.Role != keyspace.RoleVoterIncoming:
		return kverror.New(kverror.BadRequest, "node %s holds no voter of range %s", to, r.id)
	}
	// Before the pipeline is closed: without a target the range would stand still for nothing.
	if err := r.group.CanTransfer(ctx, target.ID); err != nil {
		return kverror.New(kverror.Busy, "hand range %s over to node %s: %v", r.id, to, err)
	}
	defer r.reopen()
	closing, cancel := clock.WithTimeout(ctx, r.store.cfg.Clock, drainClose)
	err := r.closePipeline(closing)
	cancel()
	if err != nil {
		return kverror.New(kverror.Busy, "hand range %s over: %v", r.id, err)
	}
	// Raft ends the attempt by itself, after an election timeout and a tick. Until then it
	// drops proposals, and the pipeline stays closed.
	moving, cancel := clock.WithTimeout(ctx, r.store.cfg.Clock, transferPatience)
	defer cancel()
	if err := r.group.Transfer(moving, target.ID); err != nil {
		return kverror.New(kverror.Busy, "hand range %s over to node %s: %v", r.id, to, err)
	}
	r.awaitLoss(moving, term)
	return nil
}

// awaitLoss waits until this replica knows that it leads no more: the group knows first. Between
// the two revisions would be asked for that nobody uses.
func (r *Replica) awaitLoss(ctx context.Context, term uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for r.pipe.Term() == term && !r.stopped {
		wait := r.changedLocked()
		r.mu.Unlock()
		_, err := clock.Await(ctx, wait)
		r.mu.Lock()
		if err != nil {
			return
		}
	}
}

// transferPatience is for a raft that does not end a transfer by itself, since its worker
// stands still.
const transferPatience = 30 * time.Second

// membersChanged is told when a change of the members is applied here.
func (r *Replica) membersChanged(leads bool) {
	r.mu.Lock()
	d, g := r.descriptorLocked(), r.group
	r.mu.Unlock()
	if leads {
		r.store.cfg.Reporter.ReportDescriptors(d)
	}
	if g != nil && !lifecycle.Has(d.Replicas, g.Replica()) {
		r.store.lifecycle.Check(r.id)
	}
}

// ChangeMembers changes who holds a range that the node leads, see
// Replica.ChangeMembers.
func (c *AdminClient) ChangeMembers(
	ctx context.Context, node keyspace.NodeID, id keyspace.RangeID, confIndex uint64, changes []raftgroup.ConfChange,
) (keyspace.Descriptor, error) {
	a, err := c.ask(ctx, node, &adminRequest{Op: adminMembers, Range: id, ConfIndex: confIndex, Changes: changes}, true)
	if err != nil {
		return keyspace.Descriptor{}, err
	}
	if len(a.Descriptors) != 1 {
		return keyspace.Descriptor{}, fmt.Errorf("shard: node %s answered %d descriptors of range %s", node, len(a.Descriptors), id)
	}
	return a.Descriptors[0], nil
}

// TransferTo hands the leadership of a range that the node leads to another node, see
// Replica.TransferTo.
func (c *AdminClient) TransferTo(ctx context.Context, node keyspace.NodeID, id keyspace.RangeID, to keyspace.NodeID) error {
	_, err := c.ask(ctx, node, &adminRequest{Op: adminTransfer, Range: id, To: to}, true)
	return err
}
