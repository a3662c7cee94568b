package placement

import (
	"encoding/binary"
	"fmt"
	"slices"
	"strings"

	"github.com/skeindb/skein/internal/wire"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/decide"
	"github.com/skeindb/skein/raftgroup"
)

// OperationKind is what an Operation does to the replicas of a range; the numbers are
// stored.
type OperationKind byte

// The kinds of operations.
const (
	// OperationMove puts a voter on To in the place of the replica on From.
	OperationMove OperationKind = iota + 1
	// OperationAdd makes a voter on To.
	OperationAdd
	// OperationRemove takes the replica on From away.
	OperationRemove
	// OperationTidy takes the replica on From away if it is a learner yet.
	OperationTidy
	// OperationTransfer has To lead in the place of From.
	OperationTransfer
	// OperationMerge lets the range absorb its right neighbour, Right.
	OperationMerge
)

// String returns the kind's name.
func (k OperationKind) String() string {
	switch k {
	case OperationMove:
		return "move"
	case OperationAdd:
		return "add"
	case OperationRemove:
		return "remove"
	case OperationTidy:
		return "tidy"
	case OperationTransfer:
		return "transfer"
	case OperationMerge:
		return "merge"
	}
	return fmt.Sprintf("operation kind %d", byte(k))
}

func (k OperationKind) known() bool { return k >= OperationMove && k <= OperationMerge }

// adds says whether an operation of the kind makes a replica, takes whether it takes one
// away.
func (k OperationKind) adds() bool { return k == OperationMove || k == OperationAdd }

func (k OperationKind) takes() bool {
	return k != OperationAdd && k != OperationTransfer && k != OperationMerge
}

// Operation is a change of a range's replicas that placement carries out, step by step.
// A range has one at a time. The record is all there is of it beside the range's own
// descriptor: whoever leads placement goes on from there.
type Operation struct {
	// ID is the index of the entry that began it.
	ID uint64
	// Range is the range, or OwnGroup for the placement group itself.
	Range keyspace.RangeID
	Kind  OperationKind
	// From and To are nodes; 0 where the kind has none.
	From, To keyspace.NodeID
	// Lead is who leads the range afterwards, if From or somebody else does before; 0
	// leaves it to the range.
	Lead keyspace.NodeID
	// Replica is the id of the replica on To, which nobody ever had, or that of a learner
	// that was left behind there. 0 where there is none.
	Replica keyspace.ReplicaID
	// Leaving is the id of the replica on From; 0 where there is none. A later one there is
	// none of the operation's business.
	Leaving keyspace.ReplicaID
	// Reason is why placement has decided it, None where somebody has asked for it.
	Reason decide.Reason
	// Why says for the operator what it is for, in at most maxNameBytes bytes.
	Why string
	// Right is the range that a merge ends, and Phase how far the merge is. Its From, To,
	// Replica and Leaving are those of the move of Right that is under way, if one is.
	Right keyspace.RangeID
	Phase MergePhase
}

// ReasonWord says in one word why the operation is, as metrics and the log have it for what
// placement decides, and "command" for what somebody has asked for.
func (o *Operation) ReasonWord() string {
	if o.Reason == decide.None {
		return "command"
	}
	return o.Reason.String()
}

// maxOperations bounds the operations of the cluster at a time.
const maxOperations = 1 << 16

func appendOperation(dst []byte, o *Operation) []byte {
	dst = binary.AppendUvarint(dst, o.ID)
	dst = binary.AppendUvarint(dst, uint64(o.Range))
	dst = append(dst, byte(o.Kind))
	dst = binary.AppendUvarint(dst, uint64(o.From))
	dst = binary.AppendUvarint(dst, uint64(o.To))
	dst = binary.AppendUvarint(dst, uint64(o.Lead))
	dst = binary.AppendUvarint(dst, uint64(o.Replica))
	dst = binary.AppendUvarint(dst, uint64(o.Leaving))
	dst = append(dst, byte(o.Reason))
	dst = appendString(dst, o.Why)
	dst = binary.AppendUvarint(dst, uint64(o.Right))
	return append(dst, byte(o.Phase))
}

func (r *reader) operation() Operation {
	o := Operation{
		ID: r.Uvarint(), Range: keyspace.RangeID(r.Uvarint()), Kind: OperationKind(r.Byte()),
		From: keyspace.NodeID(r.Uvarint()), To: keyspace.NodeID(r.Uvarint()), Lead: keyspace.NodeID(r.Uvarint()),
		Replica: keyspace.ReplicaID(r.Uvarint()), Leaving: keyspace.ReplicaID(r.Uvarint()),
		Reason: decide.Reason(r.Byte()), Why: r.string(maxNameBytes),
		Right: keyspace.RangeID(r.Uvarint()), Phase: MergePhase(r.Byte()),
	}
	if !o.Reason.Known() {
		r.Failf("unknown reason %d of operation", byte(o.Reason))
	}
	if !o.Kind.known() || o.Phase > MergeAborted {
		r.Failf("unknown kind %d of operation, phase %d", byte(o.Kind), byte(o.Phase))
	}
	return o
}

func decodeOperation(b []byte) (Operation, error) {
	r := reader{wire.NewReader(b)}
	r.version()
	o := r.operation()
	if err := r.end(); err != nil {
		return Operation{}, fmt.Errorf("decode placement operation record: %w", err)
	}
	return o, nil
}

// beginOperation begins an operation on a range as it was when that was decided.
type beginOperation struct {
	Generation keyspace.Generation
	ConfIndex  uint64
	// Right is what the other range of a merge was then; where it is 0 any will do.
	Right rangeVersion
	// Operation is without ID and Replica, which are given when it is applied.
	Operation Operation
}

// endOperation ends an operation, whatever came of it.
type endOperation struct {
	Range keyspace.RangeID
	ID    uint64
}

func (beginOperation) kind() opKind { return opBeginOperation }
func (endOperation) kind() opKind   { return opEndOperation }

func (o beginOperation) append(dst []byte) []byte {
	dst = binary.AppendUvarint(dst, uint64(o.Generation))
	dst = binary.AppendUvarint(dst, o.ConfIndex)
	return appendOperation(o.Right.append(dst), &o.Operation)
}

func (o endOperation) append(dst []byte) []byte {
	return binary.AppendUvarint(binary.AppendUvarint(dst, uint64(o.Range)), o.ID)
}

// applyBeginOperation takes an operation in if the range still is what it was decided
// for. What cannot be carried out at all was refused before: see checkOperation.
func (s *state) applyBeginOperation(index uint64, o beginOperation) result {
	op := o.Operation
	d, ok := s.descriptor(op.Range)
	if !ok {
		return result{Err: kverror.New(kverror.WrongRange, "there is no range %s", op.Range)}
	}
	if have, busy := s.operationOn(op.Range); busy {
		return result{Err: kverror.New(kverror.BadRequest, "%s has operation %d under way: %s", groupName(op.Range), have.ID, have.String())}
	}
	if d.Generation != o.Generation || d.ConfIndex != o.ConfIndex {
		return result{Err: kverror.New(kverror.Busy, "%s has changed meanwhile", groupName(op.Range))}
	}
	if len(s.operations) >= maxOperations {
		return result{Err: kverror.New(kverror.TooManyRequests, "%d operations are under way", len(s.operations))}
	}
	if op.Kind == OperationMerge {
		return s.beginMerge(index, o, &d)
	}
	if err := checkOperation(&op, &d, s.nodes); err != nil {
		return result{Err: err}
	}
	op.ID, op.Replica, op.Leaving, op.Right, op.Phase = index, 0, 0, 0, 0
	if to, left := d.ReplicaOn(op.To); op.Kind.adds() && left {
		op.Replica = to.ID
	} else if op.Kind.adds() {
		op.Replica = s.NextReplica
		s.NextReplica++
		s.dirty.meta = true
	}
	if op.Kind.takes() {
		from, _ := d.ReplicaOn(op.From)
		op.Leaving = from.ID
	}
	s.setOperation(op)
	return result{Operation: op}
}

func (s *state) applyEndOperation(o endOperation) {
	have, ok := s.operations[o.Range]
	if !ok || have.ID != o.ID || have.Kind == OperationMerge && have.Phase.undecided() {
		return // nothing is known of a merge that is not decided
	}
	s.dropOperation(have)
}

func (s *state) dropOperation(op Operation) {
	delete(s.operations, op.Range)
	delete(s.absorbing, op.Right)
	s.operated(op.Range)
}

func (s *state) setOperation(op Operation) {
	s.operations[op.Range] = op
	if op.Kind == OperationMerge {
		s.absorbing[op.Right] = op.Range
	}
	s.operated(op.Range)
}

// operationOn returns the operation that a range has, be it that of the neighbour that is to
// absorb it.
func (s *state) operationOn(id keyspace.RangeID) (Operation, bool) {
	if left, ok := s.absorbing[id]; ok {
		id = left
	}
	o, ok := s.operations[id]
	return o, ok
}

// operated notes that the range's operation has begun or ended.
func (s *state) operated(id keyspace.RangeID) {
	s.dirty.operations[id] = true
	s.operationsChanged++
}

// checkOperation says why an operation makes no sense for a range.
func checkOperation(o *Operation, d *keyspace.Descriptor, nodes map[keyspace.NodeID]Node) error {
	refuse := func(format string, args ...any) error {
		return kverror.New(kverror.BadRequest, "%s %s: %s", o.Kind, groupName(o.Range), fmt.Sprintf(format, args...))
	}
	to, hasTo := d.ReplicaOn(o.To)
	from, hasFrom := d.ReplicaOn(o.From)
	taker, known := nodes[o.To]
	transfer := o.Kind == OperationTransfer
	voters := 0
	for _, m := range d.Replicas {
		if m.Role == keyspace.RoleVoter {
			voters++
		}
	}
	switch {
	case !o.Kind.known():
		return refuse("no such operation")
	case joint(d):
		return kverror.New(kverror.Busy, "the members of %s are being changed", groupName(o.Range))
	case o.Kind.takes() && !hasFrom:
		return refuse("node %s holds no replica of it", o.From)
	case o.Kind == OperationMove && from.Role != keyspace.RoleVoter:
		// To would be a voter more. Whoever made the learner, or tidy, takes it away.
		return refuse("the replica on node %s does not vote yet", o.From)
	case o.Kind == OperationTidy && from.Role != keyspace.RoleLearner:
		return refuse("the replica on node %s votes", o.From)
	case transfer && (!hasTo || to.Role != keyspace.RoleVoter || !hasFrom || o.From == o.To):
		return refuse("from node %s to node %s, which is to have another voter of it", o.From, o.To)
	case !transfer && (!o.Kind.adds() && o.To != 0 || !o.Kind.takes() && o.From != 0):
		return refuse("from node %s and to node %s", o.From, o.To)
	case o.Kind.adds() && !known:
		return refuse("there is no node %s", o.To)
	case o.Kind.adds() && taker.State != NodeServing:
		return refuse("node %s is %s", o.To, taker.State)
	case o.Kind.adds() && hasTo && to.Role != keyspace.RoleLearner:
		return refuse("node %s holds a replica of it", o.To)
	case o.Kind == OperationRemove && from.Role == keyspace.RoleVoter && voters < 2:
		return refuse("it has %d voters", voters)
	}
	return nil
}

// joint says whether the range is between two configurations.
func joint(d *keyspace.Descriptor) bool {
	return slices.ContainsFunc(d.Replicas, func(m keyspace.Replica) bool {
		return m.Role != keyspace.RoleVoter && m.Role != keyspace.RoleLearner
	})
}

// String says what the operation does.
func (o *Operation) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s", o.Kind)
	if o.Right != 0 {
		fmt.Fprintf(&b, " with range %s (%s)", o.Right, o.Phase)
	}
	if o.From != 0 {
		fmt.Fprintf(&b, " from node %s", o.From)
	}
	if o.To != 0 {
		fmt.Fprintf(&b, " to node %s", o.To)
	}
	return b.String()
}

// step is what is to be done next for an operation. Of the fields one is set.
type step struct {
	// done says that the operation is over.
	done bool
	// transfer says that another one is to lead before the next step: leader, or 0 for whom
	// the range's raft group takes for the best.
	transfer bool
	leader   keyspace.NodeID
	change   []raftgroup.ConfChange
	// stuck says why nothing can be done now.
	stuck string
}

// next returns the next step of the operation for a range as its leader has it. It is a
// function of what it is given alone, so that any leader of placement goes on where the
// last one was; steps that are repeated are refused by the range, whose configuration has
// changed.
func (o *Operation) next(d *keyspace.Descriptor, leader keyspace.NodeID, alive func(keyspace.NodeID) bool) step {
	if joint(d) {
		return step{stuck: "its members are being changed"}
	}
	if o.Kind == OperationTransfer {
		return o.nextTransfer(d, leader, alive)
	}
	to, hasTo := d.ReplicaOn(o.To)
	from, hasFrom := d.ReplicaOn(o.From)
	hasFrom = hasFrom && from.ID == o.Leaving
	promote := raftgroup.ConfChange{Type: raftgroup.Promote, Replica: to.ID}
	remove := raftgroup.ConfChange{Type: raftgroup.RemoveReplica, Replica: from.ID}
	living, all := votersBeside(d, o.From, alive)
	switch {
	case o.Kind == OperationTidy && hasFrom && from.Role != keyspace.RoleLearner:
		return step{done: true} // it was one when the map last heard of it
	case o.To != 0 && !hasTo && !hasFrom && o.From != 0:
		return step{done: true} // somebody else has moved it on
	case o.To != 0 && !hasTo:
		return step{change: []raftgroup.ConfChange{{Type: raftgroup.AddLearner, Replica: o.Replica, Node: o.To}}}
	case o.To != 0 && to.Role == keyspace.RoleLearner && (!hasFrom || from.Role != keyspace.RoleVoter):
		return step{change: []raftgroup.ConfChange{promote}}
	case o.To != 0 && to.Role == keyspace.RoleLearner && leader != o.From:
		return step{change: []raftgroup.ConfChange{promote, remove}}
	case o.To != 0 && to.Role == keyspace.RoleLearner && living > 0:
		return step{transfer: true, leader: o.heir(d, alive)}
	case o.To != 0 && to.Role == keyspace.RoleLearner && all > 0:
		// Not a voter more meanwhile: a split would leave it with its child for good.
		return step{stuck: "no other voter lives"}
	case o.To != 0 && to.Role == keyspace.RoleLearner:
		// From votes alone: To does beside it first, and leads then.
		return step{change: []raftgroup.ConfChange{promote}}
	case !hasFrom && o.Lead == o.To && hasTo && leader != o.To && o.heir(d, alive) == o.To:
		return step{transfer: true, leader: o.To} // the lead goes along
	case !hasFrom:
		return step{done: true}
	case from.Role == keyspace.RoleVoter && 2*living <= all:
		return step{stuck: "without this replica no quorum of the range lives"}
	case leader == o.From && o.To != 0:
		return step{transfer: true, leader: o.To}
	case leader == o.From:
		return step{transfer: true, leader: o.heir(d, alive)}
	}
	return step{change: []raftgroup.ConfChange{remove}}
}

// nextTransfer is next for a transfer: it is over as soon as somebody else leads.
func (o *Operation) nextTransfer(d *keyspace.Descriptor, leader keyspace.NodeID, alive func(keyspace.NodeID) bool) step {
	to, ok := d.ReplicaOn(o.To)
	switch {
	case leader != o.From || !ok || to.Role != keyspace.RoleVoter:
		return step{done: true}
	case !alive(o.To):
		return step{stuck: "the node that is to lead does not live"}
	}
	return step{transfer: true, leader: o.To}
}

// leaves says that it matters more that the leader does not lead any more than who does then: it
// may not reach the one that was chosen.
func (o *Operation) leaves(leader keyspace.NodeID) bool {
	return leader == o.From && (o.Kind != OperationTransfer || o.Reason == decide.Drain)
}

// heir returns Lead if it can take the lead over, else 0: whom the range takes for the best.
func (o *Operation) heir(d *keyspace.Descriptor, alive func(keyspace.NodeID) bool) keyspace.NodeID {
	m, ok := d.ReplicaOn(o.Lead)
	if !ok || m.Role != keyspace.RoleVoter || o.Lead == o.From || !alive(o.Lead) {
		return 0
	}
	return o.Lead
}

// votersBeside counts the voters on other nodes, and those of them that live.
func votersBeside(d *keyspace.Descriptor, node keyspace.NodeID, alive func(keyspace.NodeID) bool) (living, all int) {
	for _, m := range d.Replicas {
		if m.Role != keyspace.RoleVoter || m.Node == node {
			continue
		}
		all++
		if alive(m.Node) {
			living++
		}
	}
	return living, all
}
