package raftgroup

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/quorum"
	pb "go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/internal/wire"
	"github.com/skeindb/skein/keyspace"
)

// The change's context carries what raft's own fields cannot: a version, a number by
// which the proposer recognizes its change, the nodes of added replicas, and the caller's
// payload.
const confContextVersion = 1

// addedBytesMin is the minimum size of an added replica in that context.
const addedBytesMin = 2

var errConfEntry = errors.New("raftgroup: malformed configuration change")

// appliedConf is one applied configuration change.
type appliedConf struct {
	cc      *pb.ConfChangeV2
	number  uint64
	nodes   map[keyspace.ReplicaID]keyspace.NodeID
	payload []byte
	// after is the configuration behind the change, index the index of its entry.
	after []keyspace.Replica
	index uint64
}

// changeState is the worker's side of configuration changes and transfers.
type changeState struct {
	// pending is the index of the newest change that this leader knows to be in the log,
	// or the end of the log when it began to lead.
	pending uint64
	waiters []confWaiter
	// transfer is called when leadership has moved to transferTo, or when that failed.
	transfer   func(error)
	transferTo keyspace.ReplicaID
	ticks      int // since the transfer began
}

type confWaiter struct {
	number uint64
	seen   bool
	done   func(error)
}

// configurationOf derives all forms from the list of replicas. The list alone says
// whether the configuration is joint: ChangeConf refuses joint changes that leave the
// voters as they are.
func configurationOf(replicas []keyspace.Replica, index uint64) configuration {
	c := configuration{replicas: replicas, index: index}
	in, out := quorum.MajorityConfig{}, quorum.MajorityConfig{}
	for _, r := range replicas {
		switch r.Role {
		case keyspace.RoleVoter:
			in[uint64(r.ID)], out[uint64(r.ID)] = struct{}{}, struct{}{}
		case keyspace.RoleVoterIncoming:
			in[uint64(r.ID)], c.joint = struct{}{}, true
		case keyspace.RoleVoterOutgoing, keyspace.RoleVoterDemoting:
			out[uint64(r.ID)], c.joint = struct{}{}, true
		default: // a learner decides nothing
		}
	}
	if c.voters[0] = in; c.joint {
		c.voters[1] = out
	}
	return c
}

// soleVoter reports whether the replica is the only voter.
func (c *configuration) soleVoter(id keyspace.ReplicaID) bool {
	_, in := c.voters[0][uint64(id)]
	return in && len(c.voters[0]) == 1 && !c.joint
}

func (c *configuration) votes(id keyspace.ReplicaID) bool {
	_, in := c.voters[0][uint64(id)]
	_, out := c.voters[1][uint64(id)]
	return in || out
}

func (c *configuration) find(id keyspace.ReplicaID) (keyspace.Replica, bool) {
	for _, r := range c.replicas {
		if r.ID == id {
			return r, true
		}
	}
	return keyspace.Replica{}, false
}

// confStateOf returns raft's form of a configuration.
func confStateOf(replicas []keyspace.Replica) *pb.ConfState {
	cs, joint := &pb.ConfState{}, configurationOf(replicas, 0).joint
	for _, r := range replicas {
		id := uint64(r.ID)
		switch r.Role {
		case keyspace.RoleVoter:
			cs.Voters = append(cs.Voters, id)
			if joint {
				cs.VotersOutgoing = append(cs.VotersOutgoing, id)
			}
		case keyspace.RoleVoterIncoming:
			cs.Voters = append(cs.Voters, id)
		case keyspace.RoleVoterOutgoing:
			cs.VotersOutgoing = append(cs.VotersOutgoing, id)
		case keyspace.RoleVoterDemoting:
			cs.VotersOutgoing = append(cs.VotersOutgoing, id)
			cs.LearnersNext = append(cs.LearnersNext, id)
		case keyspace.RoleLearner:
			cs.Learners = append(cs.Learners, id)
		}
	}
	return cs
}

// snapshotAt returns raft's form of a snapshot's position.
func snapshotAt(index, term uint64, replicas []keyspace.Replica) *pb.Snapshot {
	return &pb.Snapshot{Metadata: &pb.SnapshotMetadata{
		Index: &index, Term: &term, ConfState: confStateOf(replicas),
	}}
}

// encodeConf builds raft's change from a validated list of changes.
func encodeConf(number uint64, changes []ConfChange, payload []byte) *pb.ConfChangeV2 {
	cc := &pb.ConfChangeV2{}
	ctx := append([]byte(nil), confContextVersion)
	ctx = binary.LittleEndian.AppendUint64(ctx, number)
	var nodes []byte
	added := 0
	for _, c := range changes {
		var t pb.ConfChangeType
		switch c.Type {
		case AddLearner, Demote:
			t = pb.ConfChangeAddLearnerNode
		case Promote:
			t = pb.ConfChangeAddNode
		case RemoveReplica:
			t = pb.ConfChangeRemoveNode
		}
		id := uint64(c.Replica)
		cc.Changes = append(cc.Changes, &pb.ConfChangeSingle{Type: t.Enum(), NodeId: &id})
		if c.Type == AddLearner {
			nodes = binary.AppendUvarint(nodes, id)
			nodes = binary.AppendUvarint(nodes, uint64(c.Node))
			added++
		}
	}
	explicitly(cc)
	ctx = binary.AppendUvarint(ctx, uint64(added))
	cc.Context = append(append(ctx, nodes...), payload...)
	return cc
}

// explicitly keeps raft from leaving a joint configuration by itself: raft would do so
// even under a leader that the change removes or demotes. See leaveJoint.
func explicitly(cc *pb.ConfChangeV2) {
	if len(cc.GetChanges()) > 1 {
		cc.Transition = pb.ConfChangeTransition_ConfChangeTransitionJointExplicit.Enum()
	}
}

// decodeConfEntry decodes an entry that changes the configuration. An entry without data
// leaves a joint configuration.
func decodeConfEntry(e *pb.Entry) (appliedConf, error) {
	c := appliedConf{cc: &pb.ConfChangeV2{}}
	if e.GetType() != pb.EntryConfChangeV2 {
		return c, fmt.Errorf("%w: type %s", errConfEntry, e.GetType())
	}
	if err := proto.Unmarshal(e.GetData(), c.cc); err != nil {
		return c, fmt.Errorf("%w: %w", errConfEntry, err)
	}
	if t := c.cc.GetTransition(); pb.ConfChangeTransition_name[int32(t)] == "" {
		return c, fmt.Errorf("%w: transition %d", errConfEntry, t) // raft would panic
	}
	if len(c.cc.GetContext()) == 0 {
		if !c.cc.LeaveJoint() {
			return c, fmt.Errorf("%w: no context", errConfEntry)
		}
		return c, nil
	}
	r := wire.NewReader(c.cc.GetContext())
	if err := keyspace.CheckVersion("configuration change", uint64(r.Byte()), confContextVersion); err != nil {
		return c, fmt.Errorf("%w: %w", errConfEntry, err)
	}
	c.number = r.Uint64LE()
	n := r.Count(addedBytesMin)
	c.nodes = make(map[keyspace.ReplicaID]keyspace.NodeID, n)
	for range n {
		id := keyspace.ReplicaID(r.Uvarint())
		c.nodes[id] = keyspace.NodeID(r.Uvarint())
	}
	if err := r.Err(); err != nil {
		return c, fmt.Errorf("%w: %w", errConfEntry, err)
	}
	if r.Len() > 0 {
		c.payload = r.Rest()
	}
	explicitly(c.cc) // builds of an older version proposed without it
	return c, nil
}

// apply returns the replicas behind the change. It depends on its inputs alone, so every
// replica computes the same. Raft computes its own view from the same change; applyConf
// compares the two.
func (c *appliedConf) apply(before []keyspace.Replica) []keyspace.Replica {
	after := make([]keyspace.Replica, 0, len(before)+len(c.cc.GetChanges()))
	if c.cc.LeaveJoint() {
		for _, r := range before {
			switch r.Role {
			case keyspace.RoleVoterOutgoing:
				continue
			case keyspace.RoleVoterIncoming:
				r.Role = keyspace.RoleVoter
			case keyspace.RoleVoterDemoting:
				r.Role = keyspace.RoleLearner
			default: // as it was
			}
			after = append(after, r)
		}
		return after
	}
	_, joint := c.cc.EnterJoint()
	after = append(after, before...)
	for _, s := range c.cc.GetChanges() {
		after = c.applyOne(after, s, joint)
	}
	return after
}

func (c *appliedConf) applyOne(rs []keyspace.Replica, s *pb.ConfChangeSingle, joint bool) []keyspace.Replica {
	id := keyspace.ReplicaID(s.GetNodeId())
	i := slices.IndexFunc(rs, func(r keyspace.Replica) bool { return r.ID == id })
	role := func(simple, inJoint keyspace.Role) {
		if rs[i].Role = simple; joint {
			rs[i].Role = inJoint
		}
	}
	switch s.GetType() {
	case pb.ConfChangeAddLearnerNode:
		if i < 0 {
			return append(rs, keyspace.Replica{ID: id, Node: c.nodes[id], Role: keyspace.RoleLearner})
		}
		if rs[i].Role == keyspace.RoleVoter {
			role(keyspace.RoleLearner, keyspace.RoleVoterDemoting)
		}
	case pb.ConfChangeAddNode:
		if i >= 0 && rs[i].Role == keyspace.RoleLearner {
			role(keyspace.RoleVoter, keyspace.RoleVoterIncoming)
		}
	case pb.ConfChangeRemoveNode:
		if i < 0 {
			return rs
		}
		if rs[i].Role == keyspace.RoleVoter && joint {
			rs[i].Role = keyspace.RoleVoterOutgoing
			return rs
		}
		return slices.Delete(rs, i, i+1)
	default: // nothing else is ever proposed
	}
	return rs
}

// ChangeConf changes the group's members. It returns nil once the final configuration is
// applied here. Several changes pass through a joint configuration, which the group
// leaves by itself. The change is proposed only if the group leads here in that term.
// Several changes at once must change the voters and may name each replica once. A
// replica is added as a learner and promoted when it is caught up. payload, which may be
// nil, becomes the Data of the entry.
//
// ErrUnknownFate says that leadership or ctx ended while the change was under way. After
// any other error nothing was changed.
func (g *Group) ChangeConf(ctx context.Context, term uint64, changes []ConfChange, payload []byte) error {
	ch := make(chan error, 1)
	finish := func(err error) { ch <- err }
	if !g.w.call(g, func() { g.proposeConf(term, changes, payload, finish) }) {
		return ErrStopped
	}
	select {
	case err := <-ch:
		return err
	case <-ctx.Done():
		return fmt.Errorf("%w: %w", ErrUnknownFate, context.Cause(ctx))
	}
}

func (g *Group) proposeConf(term uint64, changes []ConfChange, payload []byte, done func(error)) {
	if err := g.checkConf(term, changes); err != nil {
		done(err)
		return
	}
	g.wake()
	number := g.h.readNonce ^ g.h.readNumber.Add(1)
	typ, data, err := pb.MarshalConfChange(encodeConf(number, changes, payload))
	if err != nil {
		done(fmt.Errorf("%w: %w", ErrConfInvalid, err))
		return
	}
	m := &pb.Message{
		Type: pb.MsgProp.Enum(), From: ptr(uint64(g.self)),
		Entries: []*pb.Entry{{Type: typ.Enum(), Data: data}},
	}
	if err := g.rn.Step(m); err != nil {
		done(ErrDropped)
		return
	}
	if m.GetEntries()[0].GetType() == pb.EntryNormal {
		done(ErrConfPending) // raft has replaced it by an empty entry
		return
	}
	g.changes.waiters = append(g.changes.waiters, confWaiter{number: number, done: done})
}

// checkConf refuses changes that raft would turn into an empty entry or, worse, that
// would make raft panic when they are applied.
func (g *Group) checkConf(term uint64, changes []ConfChange) error {
	switch st := g.rn.BasicStatus(); {
	case g.closed:
		return ErrClosed
	case st.RaftState != raft.StateLeader || st.GetTerm() != term:
		return ErrNotLeader
	case !g.lease.ready || g.conf.joint || g.changes.pending > g.applied || len(g.changes.waiters) > 0:
		return ErrConfPending
	case st.LeadTransferee != raft.None:
		return ErrDropped
	case len(changes) == 0:
		return fmt.Errorf("%w: no change", ErrConfInvalid)
	}
	voters, touched := 0, false
	for i, c := range changes {
		if slices.ContainsFunc(changes[:i], func(o ConfChange) bool { return o.Replica == c.Replica }) {
			return fmt.Errorf("%w: replica %d named twice", ErrConfInvalid, c.Replica)
		}
		changed, err := g.checkChange(c)
		if err != nil {
			return err
		}
		touched = touched || changed
	}
	if len(changes) > 1 && !touched {
		return fmt.Errorf("%w: several changes that leave the voters as they are", ErrConfInvalid)
	}
	c := appliedConf{cc: encodeConf(0, changes, nil)}
	for _, r := range c.apply(g.conf.replicas) {
		voters += boolInt(r.Role == keyspace.RoleVoter || r.Role == keyspace.RoleVoterIncoming)
	}
	if voters == 0 {
		return fmt.Errorf("%w: no voter left", ErrConfInvalid)
	}
	return nil
}

// checkChange checks one change and reports whether it changes the voters.
func (g *Group) checkChange(c ConfChange) (voters bool, err error) {
	r, member := g.conf.find(c.Replica)
	switch c.Type {
	case AddLearner:
		if member || c.Replica == 0 || c.Node == 0 || uint64(c.Replica) >= localTargetMin {
			return false, fmt.Errorf("%w: add %d on node %s", ErrConfInvalid, c.Replica, c.Node)
		}
		for _, o := range g.conf.replicas {
			if o.Node == c.Node {
				return false, fmt.Errorf("%w: node %s has replica %d already", ErrConfInvalid, c.Node, o.ID)
			}
		}
		return false, nil
	case Promote:
		if !member || r.Role != keyspace.RoleLearner {
			return false, fmt.Errorf("%w: promote %d", ErrConfInvalid, c.Replica)
		}
		return true, g.checkCaughtUp(r)
	case Demote, RemoveReplica:
		if !member || c.Type == Demote && r.Role != keyspace.RoleVoter {
			return false, fmt.Errorf("%w: demote or remove %d", ErrConfInvalid, c.Replica)
		}
		if c.Replica == g.self {
			return false, ErrRemovesLeader
		}
		return r.Role == keyspace.RoleVoter, nil
	}
	return false, fmt.Errorf("%w: type %d", ErrConfInvalid, c.Type)
}

// promoteLagMax is how many entries a replica may lag when it becomes a voter.
const promoteLagMax = 1024

func (g *Group) checkCaughtUp(r keyspace.Replica) error {
	ps, err := g.progress()
	if err != nil {
		return err
	}
	for _, p := range ps {
		if p.Replica.ID == r.ID && p.Active && p.Replicating && p.Match+promoteLagMax >= g.commit {
			return nil
		}
	}
	return fmt.Errorf("%w: replica %d", ErrNotCaughtUp, r.ID)
}

// applyConf tells raft of a change that the applier has applied.
func (g *Group) applyConf(c *appliedConf) {
	cs := g.rn.ApplyConfChange(c.cc)
	g.setConf(c.after, c.index)
	if want := confStateOf(c.after); want.Equivalent(cs) != nil {
		panic(fmt.Sprintf("raftgroup: group %s: configuration at %d: raft has %v, the applied record %v", g.id, c.index, cs, want))
	}
	for i := range g.changes.waiters {
		w := &g.changes.waiters[i]
		w.seen = w.seen || c.number != 0 && w.number == c.number
	}
	if g.isLeader {
		// The round under way may now be complete, or may have no voter left to answer
		// it.
		g.retryReads()
		g.issueReads()
	}
	if g.conf.joint {
		return
	}
	g.changes.waiters = slices.DeleteFunc(g.changes.waiters, func(w confWaiter) bool {
		if w.seen {
			w.done(nil)
		}
		return w.seen
	})
}

// setConf installs a configuration as the group's own.
func (g *Group) setConf(replicas []keyspace.Replica, index uint64) {
	g.h.peers.change(g.conf.replicas, replicas)
	g.conf = configurationOf(replicas, index)
	g.public.replicas.Store(&replicas)
	g.learned = slices.DeleteFunc(g.learned, func(r route) bool {
		_, known := g.conf.find(r.id)
		return known
	})
	g.lease.dirty = true
}

// leaveJoint proposes the end of a joint configuration, whoever began it. A leader that
// this would remove or demote hands leadership over first. Otherwise it would drop
// accepted proposals and leave the group without a leader for an election timeout.
func (g *Group) leaveJoint() {
	if !g.conf.joint || !g.lease.ready || g.changes.pending > g.applied || g.changes.transfer != nil {
		return
	}
	if _, stays := g.conf.voters[0][uint64(g.self)]; !stays {
		// If no replica can take over yet, the next tick tries again.
		g.beginTransfer(0, func(error) {})
		return
	}
	typ := pb.EntryConfChangeV2
	m := &pb.Message{
		Type: pb.MsgProp.Enum(), From: ptr(uint64(g.self)),
		Entries: []*pb.Entry{{Type: typ.Enum()}},
	}
	// A refusal does no harm: the next tick tries again.
	_ = g.rn.Step(m)
}

// failChanges fails the waiting changes when leadership ends.
func (g *Group) failChanges(err error) {
	for _, w := range g.changes.waiters {
		w.done(err)
	}
	g.changes.waiters = nil
}

// Transfer moves leadership to another voter; 0 chooses the best. It first gives the
// lease up for the rest of the term, even if the transfer fails. Raft drops proposals
// while the transfer is under way. Transfer returns nil once this replica no longer
// leads.
func (g *Group) Transfer(ctx context.Context, to keyspace.ReplicaID) error {
	ch := make(chan error, 1)
	if !g.w.call(g, func() { g.beginTransfer(to, func(err error) { ch <- err }) }) {
		return ErrStopped
	}
	select {
	case err := <-ch:
		return err
	case <-ctx.Done():
		return fmt.Errorf("%w: %w", ErrUnknownFate, context.Cause(ctx))
	}
}

// CanTransfer returns nil if Transfer to the replica, or to any for 0, would begin now.
// Otherwise it returns ErrNotLeader, or ErrNotCaughtUp if no eligible voter follows the
// log. It changes nothing, so a caller that must first end something can ask before.
func (g *Group) CanTransfer(ctx context.Context, to keyspace.ReplicaID) error {
	ch := make(chan error, 1)
	ask := func() {
		switch {
		case g.closed:
			ch <- ErrClosed
		case g.rn.BasicStatus().RaftState != raft.StateLeader:
			ch <- ErrNotLeader
		default:
			_, err := g.transferTarget(to)
			ch <- err
		}
	}
	if !g.w.call(g, ask) {
		return ErrStopped
	}
	select {
	case err := <-ch:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (g *Group) beginTransfer(to keyspace.ReplicaID, done func(error)) {
	switch {
	case g.closed:
		done(ErrClosed)
		return
	case g.rn.BasicStatus().RaftState != raft.StateLeader:
		done(ErrNotLeader)
		return
	case g.changes.transfer != nil:
		done(ErrDropped)
		return
	}
	target, err := g.transferTarget(to)
	if err != nil {
		done(err)
		return
	}
	// Before raft sends MsgTimeoutNow, and for the rest of this term: the message may
	// arrive long after, and its vote respects no promise.
	g.giveUpLease()
	g.wake()
	g.changes.transfer, g.changes.transferTo, g.changes.ticks = done, target, 0
	g.rn.TransferLeader(uint64(target))
}

func (g *Group) transferTarget(to keyspace.ReplicaID) (keyspace.ReplicaID, error) {
	ps, err := g.progress()
	if err != nil {
		return 0, err
	}
	best, match := keyspace.ReplicaID(0), uint64(0)
	for _, p := range ps {
		if p.Replica.ID == g.self || (to != 0 && p.Replica.ID != to) || !p.Replicating || !p.NodeAlive && !p.Active ||
			p.Replica.Role != keyspace.RoleVoter && p.Replica.Role != keyspace.RoleVoterIncoming {
			continue
		}
		if best == 0 || p.Match > match {
			best, match = p.Replica.ID, p.Match
		}
	}
	if best == 0 {
		return 0, fmt.Errorf("%w: transfer to %d", ErrNotCaughtUp, to)
	}
	return best, nil
}

// tickTransfer ends a transfer that raft has given up by now.
func (g *Group) tickTransfer() {
	if g.changes.transfer == nil {
		return
	}
	if g.changes.ticks++; g.changes.ticks > g.h.cfg.electionTicks()+1 {
		g.endTransfer(ErrTransferFailed)
	}
}

func (g *Group) endTransfer(err error) {
	if done := g.changes.transfer; done != nil {
		g.changes.transfer = nil
		done(err)
	}
}

func ptr[T any](v T) *T { return &v }

func boolInt(b bool) int { return int(wire.Flag(b, 1)) }
