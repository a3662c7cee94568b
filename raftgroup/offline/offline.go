// Package offline reads and changes the log of a group on a node that does not run. Package recovery
// uses it where a group has lost its majority for good. Nothing here checks whether that is so.
//
// A replica becomes its group's only voter by entries alone, which count as committed:
//
//	[ applied record ][ tail, all of it ][ the caller's commands ][ changes of the members ]
//	                                                                                  commit ─┘
//
// At its next start the node applies them as it applies any others. So what the tail holds (a split, a
// step of a merge, a change of the members) has the effect that it would have had, and nothing of the
// group's state is written but by its own state machine.
//
// A replica that goes may have to apply a part of its tail first, because a split there makes another
// range's replica. Leave ends the tail behind it with the change that takes the replica out of its group.
//
// One kind of entry cannot stay: a change that takes the replica itself out of its group. It and all
// changes of the members behind it become empty.
//
// The wal makes each change durable as a whole or not at all, and a change that was made is recognized
// by the term of the last entry: SoleVoter may be repeated.
package offline

import (
	"context"
	"errors"
	"fmt"

	pb "go.etcd.io/raft/v3/raftpb"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/raftgroup/confentry"
	"github.com/skeindb/skein/wal"
)

// readBytes is how much of a tail is read at a time.
const readBytes = 1 << 20

var (
	// ErrGap says that entries between the applied record and the log are lost.
	ErrGap = errors.New("offline: the log begins behind the applied record")
	// ErrLeft says that a replica is no member of its group.
	ErrLeft = errors.New("offline: the replica has left its group")
)

// Log is what the wal has of a group.
type Log struct {
	// Exists says that there is something; Removed that the group has a tombstone.
	Exists, Removed bool
	// Term, Vote and Commit are the hard state.
	Term, Vote, Commit uint64
	// Base is the index behind which the entries begin; Last and LastTerm are those of the last one.
	Base, Last, LastTerm uint64
}

// Read returns what the wal has of a group.
func Read(w *wal.Log, id keyspace.GroupID) (Log, error) {
	g := w.Group(id)
	l := Log{Exists: g.Exists(), Removed: g.Removed(), Last: g.LastIndex()}
	l.Base, l.LastTerm = g.Base()
	if h := g.HardState(); h != nil {
		l.Term, l.Vote, l.Commit = h.GetTerm(), h.GetVote(), h.GetCommit()
	}
	if l.Last > l.Base {
		var err error
		if l.LastTerm, err = g.Term(l.Last); err != nil {
			return l, fmt.Errorf("offline: group %s: term of entry %d: %w", id, l.Last, err)
		}
	}
	return l, nil
}

// Replica is one node's copy of a group.
type Replica struct {
	Group keyspace.GroupID
	Self  keyspace.ReplicaID
	// Applied is the record behind which the tail begins. Its payload is not used.
	Applied engine.Applied
}

// Entry is one entry of a tail.
type Entry struct {
	Index, Term uint64
	// Data is the state machine's; nil if the entry changes the members.
	Data []byte
	// Members are those behind a change of the members, nil for other entries.
	Members []keyspace.Replica
}

// tail says where a replica's tail is in the wal. It ends before it begins where the log does not
// continue the record: a snapshot or a split has made the record durable first.
type tail struct {
	first, last uint64
	// reset says that the log has to begin anew behind the record.
	reset bool
}

func (r *Replica) tail(w *wal.Log) (tail, error) {
	g, at := w.Group(r.Group), r.Applied.Index
	base, _ := g.Base()
	if g.Exists() && base > at {
		return tail{}, fmt.Errorf("%w: group %s: applied %d, log behind %d", ErrGap, r.Group, at, base)
	}
	none := tail{first: at + 1, last: at, reset: true}
	if !g.Exists() || at > g.LastIndex() {
		return none, nil
	}
	term, err := g.Term(at)
	if err != nil {
		return tail{}, fmt.Errorf("offline: group %s: term of entry %d: %w", r.Group, at, err)
	}
	if term != r.Applied.Term {
		return none, nil
	}
	return tail{first: at + 1, last: g.LastIndex()}, nil
}

// Visit calls visit with each entry of the replica's tail as it will be applied once the replica is
// the only voter: changes that would take it out of the group are empty. Refused changes are too.
func (r *Replica) Visit(w *wal.Log, visit func(*Entry) error) error {
	t, err := r.tail(w)
	if err != nil {
		return err
	}
	empty, err := r.departure(w, t)
	if err != nil {
		return err
	}
	members := r.Applied.Replicas
	return r.read(w, t.first, t.last, func(e *pb.Entry) error {
		x := Entry{Index: e.GetIndex(), Term: e.GetTerm()}
		if e.GetType() == pb.EntryNormal {
			x.Data = e.GetData()
		} else if c, err := confentry.Decode(e); err == nil && (empty == 0 || e.GetIndex() < empty) {
			members = c.Apply(members)
			x.Members = members
		}
		return visit(&x)
	})
}

// departure returns the index of the first change of the members by which the replica leaves, 0 for
// none.
func (r *Replica) departure(w *wal.Log, t tail) (at uint64, err error) {
	members := r.Applied.Replicas
	if !has(members, r.Self) {
		return 0, fmt.Errorf("%w: replica %d of group %s", ErrLeft, r.Self, r.Group)
	}
	err = r.read(w, t.first, t.last, func(e *pb.Entry) error {
		if e.GetType() == pb.EntryNormal || at > 0 {
			return nil
		}
		c, err := confentry.Decode(e)
		if err != nil {
			return nil //nolint:nilerr // the state machine refuses the entry: it does nothing
		}
		if members = c.Apply(members); !has(members, r.Self) {
			at = e.GetIndex()
		}
		return nil
	})
	return at, err
}

// has says whether the replica is among the members and stays there.
func has(members []keyspace.Replica, id keyspace.ReplicaID) bool {
	for _, m := range members {
		if m.ID == id {
			return m.Role != keyspace.RoleVoterOutgoing
		}
	}
	return false
}

func (r *Replica) read(w *wal.Log, first, last uint64, visit func(*pb.Entry) error) error {
	g := w.Group(r.Group)
	for lo := first; lo <= last; {
		ents, err := g.Entries(lo, last+1, readBytes)
		if err != nil {
			return fmt.Errorf("offline: group %s: entries from %d: %w", r.Group, lo, err)
		}
		for _, e := range ents {
			if err := visit(e); err != nil {
				return err
			}
		}
		lo += uint64(len(ents))
	}
	return nil
}

// Steps returns the changes of the members that leave self as the only voter, one entry each, and the
// members behind them. The first is nil where the members leave a joint configuration first.
func Steps(members []keyspace.Replica, self keyspace.ReplicaID) (steps []*confentry.Change, after []keyspace.Replica) {
	after = members
	if joint(members) {
		steps = append(steps, nil)
		leave := confentry.Entry{CC: &pb.ConfChangeV2{}}
		after = leave.Apply(members)
	}
	for _, m := range after {
		if m.ID == self && m.Role == keyspace.RoleLearner {
			steps = append(steps, &confentry.Change{Type: confentry.Promote, Replica: self})
		}
	}
	for _, m := range after {
		if m.ID != self {
			steps = append(steps, &confentry.Change{Type: confentry.RemoveReplica, Replica: m.ID})
		}
	}
	for _, m := range after {
		if m.ID == self {
			m.Role = keyspace.RoleVoter
			return steps, []keyspace.Replica{m}
		}
	}
	return steps, nil
}

// SoleVoter makes the replica its group's only voter, behind its tail and the commands. All of it
// counts as committed. term is that of the new entries; it must be above all terms of the log. It returns when
// the change is durable.
func (r *Replica) SoleVoter(ctx context.Context, w *wal.Log, term uint64, commands [][]byte) error {
	l, err := Read(w, r.Group)
	if err != nil {
		return err
	}
	t, err := r.tail(w)
	if err != nil {
		return err
	}
	empty, err := r.departure(w, t)
	if err != nil {
		return err
	}
	if term <= max(l.Term, l.LastTerm, r.Applied.Term) {
		return fmt.Errorf("offline: group %s: new entries of term %d, and the log knows term %d", r.Group, term, max(l.Term, l.LastTerm, r.Applied.Term))
	}
	members := r.Applied.Replicas
	if err := r.Visit(w, func(e *Entry) error {
		if e.Members != nil {
			members = e.Members
		}
		return nil
	}); err != nil {
		return err
	}
	ents, err := r.rewritten(w, t, empty)
	if err != nil {
		return err
	}
	added, err := r.added(t.last, term, commands, members)
	if err != nil {
		return err
	}
	ents = append(ents, added...)
	b := w.NewBatch()
	if t.reset {
		b.Reset(r.Group, r.Applied.Index, r.Applied.Term, hardState(term, r.Applied.Index))
	}
	b.Append(r.Group, hardState(term, t.last+uint64(len(added))), ents)
	if b.Bytes() > w.MaxEntryBytes() {
		return fmt.Errorf("offline: group %s: a change of %d bytes behind entry %d, in which replica %d leaves: at most %d are written as a whole; name another survivor",
			r.Group, b.Bytes(), empty, r.Self, w.MaxEntryBytes())
	}
	return submit(ctx, w, b)
}

// Leave ends the replica's tail behind the entry at an index, and takes the replica out of its group
// there. All of it counts as committed. term is as for SoleVoter.
func (r *Replica) Leave(ctx context.Context, w *wal.Log, term, through uint64) error {
	l, err := Read(w, r.Group)
	if err != nil {
		return err
	}
	t, err := r.tail(w)
	if err != nil {
		return err
	}
	if through < t.first || through > t.last {
		return fmt.Errorf("offline: group %s: entry %d is not in the tail from %d to %d", r.Group, through, t.first, t.last)
	}
	if term <= max(l.Term, l.LastTerm) {
		return fmt.Errorf("offline: group %s: new entries of term %d, and the log knows term %d", r.Group, term, max(l.Term, l.LastTerm))
	}
	members := r.Applied.Replicas
	if err := r.Visit(w, func(e *Entry) error {
		if e.Members != nil && e.Index <= through {
			members = e.Members
		}
		return nil
	}); err != nil {
		return err
	}
	steps := []*confentry.Change{{Type: confentry.RemoveReplica, Replica: r.Self}}
	if joint(members) {
		steps = append([]*confentry.Change{nil}, steps...)
	}
	ents, err := r.confEntries(through, term, steps)
	if err != nil {
		return err
	}
	b := w.NewBatch()
	b.Append(r.Group, hardState(term, through+uint64(len(ents))), ents)
	return submit(ctx, w, b)
}

func joint(members []keyspace.Replica) bool {
	for _, m := range members {
		if m.Role != keyspace.RoleVoter && m.Role != keyspace.RoleLearner {
			return true
		}
	}
	return false
}

// rewritten returns the entries from the one on by which the replica would leave, without the changes
// of the members.
func (r *Replica) rewritten(w *wal.Log, t tail, empty uint64) (ents []*pb.Entry, err error) {
	if empty == 0 {
		return nil, nil
	}
	err = r.read(w, empty, t.last, func(e *pb.Entry) error {
		x := &pb.Entry{Index: ptr(e.GetIndex()), Term: ptr(e.GetTerm()), Type: pb.EntryNormal.Enum()}
		if e.GetType() == pb.EntryNormal {
			x.Data = e.GetData()
		}
		ents = append(ents, x)
		return nil
	})
	return ents, err
}

// added returns the new entries.
func (r *Replica) added(last, term uint64, commands [][]byte, members []keyspace.Replica) (ents []*pb.Entry, err error) {
	for _, c := range commands {
		last++
		ents = append(ents, &pb.Entry{Index: ptr(last), Term: ptr(term), Type: pb.EntryNormal.Enum(), Data: c})
	}
	steps, after := Steps(members, r.Self)
	if len(after) != 1 {
		return nil, fmt.Errorf("%w: replica %d of group %s", ErrLeft, r.Self, r.Group)
	}
	confs, err := r.confEntries(last, term, steps)
	return append(ents, confs...), err
}

// confEntries are entries that change the members step by step.
func (r *Replica) confEntries(last, term uint64, steps []*confentry.Change) (ents []*pb.Entry, err error) {
	for _, s := range steps {
		last++
		e := &pb.Entry{Index: ptr(last), Term: ptr(term), Type: pb.EntryConfChangeV2.Enum()}
		if s != nil {
			kind, data, err := pb.MarshalConfChange(confentry.Encode(0, []confentry.Change{*s}, nil))
			if err != nil {
				return nil, fmt.Errorf("offline: group %s: %w", r.Group, err)
			}
			e.Type, e.Data = kind.Enum(), data
		}
		ents = append(ents, e)
	}
	return ents, nil
}

// Reset makes it durable that the group's log is empty behind a position of a new term.
func Reset(ctx context.Context, w *wal.Log, id keyspace.GroupID, index, term uint64) error {
	b := w.NewBatch()
	b.Reset(id, index, term, hardState(term, index))
	return submit(ctx, w, b)
}

// Forget removes the group's log for good. The caller has made it durable that the replica has left.
func Forget(ctx context.Context, w *wal.Log, id keyspace.GroupID) error {
	b := w.NewBatch()
	b.Remove(id)
	b.Forget(id)
	return submit(ctx, w, b)
}

func submit(ctx context.Context, w *wal.Log, b *wal.Batch) error {
	done := make(chan error, 1)
	w.Submit(b, func(err error) { done <- err })
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func hardState(term, commit uint64) *pb.HardState {
	return &pb.HardState{Term: ptr(term), Vote: ptr(uint64(0)), Commit: ptr(commit)}
}

func ptr[T any](v T) *T { return &v }
