package rangeapi

import (
	"cmp"
	"fmt"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
)

// A coordinator (router) runs a transaction over several ranges by commands: Prepare at each range,
// Commit at the one with the anchor, Resolve at each, Forget at the anchor. A range that meets a
// lock and no longer hears of its coordinator sends Decide. All commands pass the range's pipeline.

// TxnID names a transaction and is its age: the lower one is older. A transaction keeps it when it
// starts over.
type TxnID struct {
	// Start is the highest revision that the coordinator had heard of: a clock that all nodes
	// share.
	Start   keyspace.Revision
	Node    keyspace.NodeID
	Boot    keyspace.BootID
	Counter uint64
}

// Compare orders transactions by age, the oldest first.
func (t TxnID) Compare(o TxnID) int {
	return cmp.Or(cmp.Compare(t.Start, o.Start), cmp.Compare(t.Node, o.Node),
		cmp.Compare(t.Boot, o.Boot), cmp.Compare(t.Counter, o.Counter))
}

// TxnName names one attempt of a transaction. An attempt never commits the locks of another one
// (trap 73).
type TxnName struct {
	TxnID
	// Attempt is never 0, and a coordinator never reuses one.
	Attempt uint64
}

// IsZero says whether it names nothing.
func (n TxnName) IsZero() bool { return n == TxnName{} }

// String returns the name as logs and stories print it.
func (n TxnName) String() string {
	return fmt.Sprintf("%d.%s.%s.%d/%d", n.Start, n.Node, n.Boot, n.Counter, n.Attempt)
}

// LockID names one lock for ever: the entry that made it, and its place there. After a split both
// halves of a lock have its id.
type LockID struct {
	// Range is the range that made the lock.
	Range        keyspace.RangeID
	Term, Number uint64
	Index        uint32
}

// String returns the id as logs and stories print it.
func (l LockID) String() string {
	return fmt.Sprintf("%s:%d/%d.%d", l.Range, l.Term, l.Number, l.Index)
}

// LockRef is a lock and its place.
type LockRef struct {
	ID LockID
	// Span covers everything that the lock covers.
	Span keyspace.Span
}

// TxnCommand is a transaction command, from a coordinator or a pusher to one range: *Prepare, *Commit,
// *Resolve, *Decide, *Forget; or a command about a lease: *Revoke, *LeaseKeys.
type TxnCommand interface{ Kind() TxnKind }

// TxnAnswer answers a TxnCommand: *Prepared a *Prepare, *Decided a *Commit or *Decide, *Revoked a
// *Revoke, *Attached a *LeaseKeys, and *Resolved the others.
type TxnAnswer interface{ answers(k TxnKind) bool }

// TxnKind is the number of a TxnCommand on the wire.
type TxnKind uint8

// The commands of transactions over several ranges, and of leases.
const (
	TxnPrepare TxnKind = iota + 1
	TxnCommit
	TxnResolve
	TxnDecide
	TxnForget
	// TxnRead is a read on behalf of a transaction, whose own locks do not block it.
	TxnRead
	TxnRevoke
	TxnLeaseKeys
	// TxnRevokeChecked is a Revoke with a check.
	TxnRevokeChecked
)

// Want is the outcome that a path through the compares needs of a guard.
type Want uint8

// The wanted outcomes.
const (
	// WantAny: the outcome has to be told and to stay.
	WantAny Want = iota
	WantHolds
	WantFails
)

// Guard is a compare, cut to the range. Its outcome does not change while the lock is held.
type Guard struct {
	Compare *pb.Compare
	Want    Want
}

// Fact is the outcome of a guard. Holds is true if no key was found.
type Fact struct{ Found, Holds bool }

// Write is one operation of the path, cut to the range.
type Write struct {
	// Number is the operation's place in the path.
	Number uint32
	// Op is a *PutRequest or a *DeleteRangeRequest.
	Op proto.Message
}

// Prepare locks the keys of the guards and the writes, all or nothing. Without guards and writes it
// only has the range keep what Pin needs.
type Prepare struct {
	Name TxnName
	// Anchor is the key at which the transaction is decided. The range that holds it has it among
	// its writes.
	Anchor []byte
	// WaitForOlder says that the transaction holds no lock anywhere, so that it may wait for an
	// older one.
	WaitForOlder bool
	Guards       []Guard
	Writes       []Write
	// Pin has the range keep revision PinAt readable, or all later ones if it is 0.
	Pin   bool
	PinAt keyspace.Revision
	// Revoke, if not 0, is a lease of that incarnation. All its keys in the range are deleted, and
	// nothing else is done. The lease's attachment is locked even without keys.
	Revoke      keyspace.LeaseID
	Incarnation keyspace.LeaseIncarnation
	// Checked is as in Revoke. It is zero without one.
	Checked keyspace.KeyCheck
	// Absent are leases that do not exist, as the transaction has found. A put to one of them
	// without an attachment is refused.
	Absent []keyspace.LeaseID
}

// Prepared answers a Prepare.
type Prepared struct {
	// Held says that the lock is there. Otherwise a guard had another outcome than wanted, or the
	// attempt is behind Fence, or there was nothing to lock.
	Held bool
	Lock LockID
	// Floor, of a lock that is held, is a revision above which the transaction's own lies.
	Floor keyspace.Revision
	// Fence, if not 0, says that attempts up to it are aborted at this anchor.
	Fence uint64
	Facts []Fact
	// Refused is why a put cannot be executed, or nil; RefusedAt is its number. The state that
	// refuses it is locked.
	Refused   *kverror.Error
	RefusedAt uint32
	// Changes says that the writes change something.
	Changes bool
	// Results has one result per write, unless a write was refused.
	Results []WriteResult
}

// WriteResult is what one write found and did. Revision 0 is the transaction's own.
type WriteResult struct {
	Number uint32
	// Of a put: the key's new version. Lived says that it was alive before the transaction. Value
	// is the one that ignore_value kept.
	Lived   bool
	Version int64
	Create  keyspace.Revision
	Lease   keyspace.LeaseID
	Value   []byte
	// Deleted is how many keys a delete found. If Uncounted, there are too many for one entry, and
	// nobody has counted them.
	Deleted   int64
	Uncounted bool
	// Prevs are the previous versions of the keys, if asked for.
	Prevs []*mvccpb.KeyValue
}

// Commit decides that the transaction happens at the revision, if the anchor's lock is still there.
type Commit struct {
	Name       TxnName
	AnchorLock LockID
	Anchor     []byte
	Revision   keyspace.Revision
	// Term is that of the sequencer that allocated Revision, 0 is unknown.
	Term uint64
	// Locks are all locks of the attempt. Any other one is aborted.
	Locks []LockRef
}

// Decide asks what became of an attempt, and aborts it unless it is committed.
type Decide struct {
	Name   TxnName
	Anchor []byte
}

// Decided answers Commit and Decide.
type Decided struct {
	// Revision is the transaction's; 0 says that the attempt is aborted.
	Revision keyspace.Revision
	// Locks are those in the record.
	Locks []LockRef
}

// Resolve ends a lock of a decided attempt.
type Resolve struct {
	Name TxnName
	// Lock is the lock; the zero LockID means any of the attempt.
	Lock LockID
	// Revision is the transaction's; 0 says that the attempt is aborted. Term is that of the
	// sequencer that allocated it, 0 is unknown.
	Revision keyspace.Revision
	Term     uint64
	// Detach, if not 0, is a lease of that incarnation without a key in any range. Its attachment
	// goes with the lock, at no revision. If the lock is gone and the attachment is not, others
	// have aborted the attempt, and keys may have been attached since. Then the answer is a
	// Conflict.
	Detach      keyspace.LeaseID
	Incarnation keyspace.LeaseIncarnation
}

// Forget removes the record of a committed attempt that has no locks left.
type Forget struct {
	Name   TxnName
	Anchor []byte
}

// Resolved answers Resolve and Forget.
type Resolved struct {
	// More says that the range has more to do: ask again.
	More bool
	// Intact answers a Resolve that ends the anchor's lock of an attempt that is not committed. It
	// says that the lock was there unchanged until now. Then no lock of the attempt has ended,
	// because others end the anchor's first.
	Intact bool
}

// Kind implements TxnCommand.
func (*Prepare) Kind() TxnKind { return TxnPrepare }

// Kind implements TxnCommand.
func (*Commit) Kind() TxnKind { return TxnCommit }

// Kind implements TxnCommand.
func (*Resolve) Kind() TxnKind { return TxnResolve }

// Kind implements TxnCommand.
func (*Decide) Kind() TxnKind { return TxnDecide }

// Kind implements TxnCommand.
func (*Forget) Kind() TxnKind { return TxnForget }

// Kind implements TxnCommand.
func (r *Revoke) Kind() TxnKind {
	if r.Checked.At != 0 {
		return TxnRevokeChecked
	}
	return TxnRevoke
}

// Kind implements TxnCommand.
func (*LeaseKeys) Kind() TxnKind { return TxnLeaseKeys }

func (*Prepared) answers(k TxnKind) bool { return k == TxnPrepare }
func (*Decided) answers(k TxnKind) bool  { return k == TxnCommit || k == TxnDecide }
func (*Resolved) answers(k TxnKind) bool { return k == TxnResolve || k == TxnForget }
func (*Revoked) answers(k TxnKind) bool  { return k == TxnRevoke || k == TxnRevokeChecked }
func (*Attached) answers(k TxnKind) bool { return k == TxnLeaseKeys }

// Keys calls add with every pair (key, range_end) of the command, and whether it writes there.
func (p *Prepare) Keys(add func(key, end []byte, writes bool)) {
	for i := range p.Guards {
		add(p.Guards[i].Compare.GetKey(), p.Guards[i].Compare.GetRangeEnd(), false)
	}
	for i := range p.Writes {
		switch o := p.Writes[i].Op.(type) {
		case *pb.PutRequest:
			add(o.GetKey(), nil, true)
		case *pb.DeleteRangeRequest:
			add(o.GetKey(), o.GetRangeEnd(), true)
		}
	}
}
