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

// A transaction over several ranges is a conversation between a coordinator (router)
// and the ranges: Prepare at each, Commit at the one that holds the anchor, Resolve at
// each, Forget at the anchor. Decide is asked by those who meet a lock and do not hear
// of its coordinator any more. All of them go through the range's pipeline.

// TxnID names a transaction and is its age: the lower one is the older. A transaction
// keeps it however often it starts over.
type TxnID struct {
	// Start is the highest revision that the coordinator had heard of: a clock that all
	// nodes share.
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

// TxnName names one attempt of a transaction. What one attempt has locked, another one
// never commits (trap 73).
type TxnName struct {
	TxnID
	// Attempt is never 0 and never used twice by a coordinator.
	Attempt uint64
}

// IsZero says whether it names nothing.
func (n TxnName) IsZero() bool { return n == TxnName{} }

// String returns the name as logs and stories print it.
func (n TxnName) String() string {
	return fmt.Sprintf("%d.%s.%s.%d/%d", n.Start, n.Node, n.Boot, n.Counter, n.Attempt)
}

// LockID names one lock for ever: the entry that made it and its place in there. A
// split leaves both halves of a lock its id.
type LockID struct {
	// Range is the one that made the lock.
	Range        keyspace.RangeID
	Term, Number uint64
	Index        uint32
}

// String returns the id as logs and stories print it.
func (l LockID) String() string {
	return fmt.Sprintf("%s:%d/%d.%d", l.Range, l.Term, l.Number, l.Index)
}

// LockRef is a lock and where it is.
type LockRef struct {
	ID LockID
	// Span covers all that the lock covers.
	Span keyspace.Span
}

// TxnOp is what a coordinator or a pusher wants of one range: a *Prepare, *Commit,
// *Resolve, *Decide or *Forget; or what is to be done with a lease: *Revoke, *LeaseKeys.
type TxnOp interface{ Kind() TxnKind }

// TxnAnswer answers a TxnOp: a *Prepared to a *Prepare, a *Decided to a *Commit and a
// *Decide, a *Revoked to a *Revoke, an *Attached to a *LeaseKeys, a *Resolved to the
// others.
type TxnAnswer interface{ answers(k TxnKind) bool }

// TxnKind is the number of a TxnOp on the wire.
type TxnKind uint8

// The commands of transactions over several ranges, and of leases.
const (
	TxnPrepare TxnKind = iota + 1
	TxnCommit
	TxnResolve
	TxnDecide
	TxnForget
	// TxnRead is a read on behalf of a transaction, which its own locks do not hold up.
	TxnRead
	TxnRevoke
	TxnLeaseKeys
)

// Want is what a path through the compares demands of a guard.
type Want uint8

// The demands.
const (
	// WantAny: the outcome is only to be told, and to stay.
	WantAny Want = iota
	WantHolds
	WantFails
)

// Guard is a compare, cut to what lies in the range. Its outcome stays as it is for as
// long as the lock is held.
type Guard struct {
	Compare *pb.Compare
	Want    Want
}

// Fact is the outcome of a guard. Holds is true where no key was found.
type Fact struct{ Found, Holds bool }

// Write is one operation of the path, cut to what lies in the range.
type Write struct {
	// Number is the operation's place in the path.
	Number uint32
	// Op is a *PutRequest or a *DeleteRangeRequest.
	Op proto.Message
}

// Prepare locks what the guards look at and what the writes write, all of it or nothing.
// One without guards and writes only keeps the range from removing what Pin needs.
type Prepare struct {
	Name TxnName
	// Anchor is the key at which the transaction is decided. The range that holds it has
	// it among its writes.
	Anchor []byte
	// WaitForOlder says that the transaction holds nothing anywhere, and so may wait for an
	// older one.
	WaitForOlder bool
	Guards       []Guard
	Writes       []Write
	// Pin has the range keep what can be read at the revision PinAt, or at those to come
	// where it is 0.
	Pin   bool
	PinAt keyspace.Revision
	// Revoke, if not 0, is a lease of the incarnation all of whose keys in the range are
	// deleted, and nothing else is done. The lease's attachment is locked even where there is no
	// key.
	Revoke      keyspace.LeaseID
	Incarnation keyspace.LeaseIncarnation
	// Absent are leases that the transaction has found not to be there: a put to one of them
	// that has no attachment is refused.
	Absent []keyspace.LeaseID
}

// Prepared is the answer to a Prepare.
type Prepared struct {
	// Held says that the lock is there. Otherwise a guard had another outcome than the
	// path demands, or the attempt is behind Fence, or there was nothing to lock.
	Held bool
	Lock LockID
	// Fence, if not 0, says that attempts up to it are aborted at this anchor.
	Fence uint64
	Facts []Fact
	// Refused is why a put cannot be carried out, and RefusedAt which one; nil otherwise.
	// The state that refuses it is locked.
	Refused   *kverror.Error
	RefusedAt uint32
	// Changes says that the writes change something.
	Changes bool
	// Results has one for each of the writes, unless one was refused.
	Results []WriteResult
}

// WriteResult is what one of the writes found and did. A revision that is 0 is the
// transaction's own.
type WriteResult struct {
	Number uint32
	// Of a put: the key's new version; Lived says that it was alive before the
	// transaction. Value is the one that was kept by ignore_value.
	Lived   bool
	Version int64
	Create  keyspace.Revision
	Lease   keyspace.LeaseID
	Value   []byte
	// Deleted is how many keys a delete found, unless Swept: then there are too many for
	// one entry and nobody has counted them.
	Deleted int64
	Swept   bool
	// Prevs are the keys as they were, if they were asked for.
	Prevs []*mvccpb.KeyValue
}

// Commit decides that the transaction has happened at the revision. It holds if the
// anchor's lock is still there.
type Commit struct {
	Name       TxnName
	AnchorLock LockID
	Anchor     []byte
	Revision   keyspace.Revision
	// Locks are all locks of the attempt. One that is not among them is aborted.
	Locks []LockRef
}

// Decide asks what became of an attempt, and aborts it where it is not committed.
type Decide struct {
	Name   TxnName
	Anchor []byte
}

// Decided is the answer to Commit and Decide.
type Decided struct {
	// Revision is the transaction's; 0 says that the attempt is aborted.
	Revision keyspace.Revision
	// Locks are those that the record lists.
	Locks []LockRef
}

// Resolve ends a lock of a decided attempt.
type Resolve struct {
	Name TxnName
	// Lock is the lock; the zero LockID is any of the attempt.
	Lock LockID
	// Revision is the transaction's; 0 says that the attempt is aborted.
	Revision keyspace.Revision
	// Detach is a lease that has no key in any range, 0 for none, and Incarnation its own:
	// the attachment goes with the lock, at no revision. Where the lock is gone and the attachment is not,
	// others have aborted the attempt and keys may have been attached since: the answer is a
	// Conflict.
	Detach      keyspace.LeaseID
	Incarnation keyspace.LeaseIncarnation
}

// Forget removes the record of a committed attempt, none of whose locks is left.
type Forget struct {
	Name   TxnName
	Anchor []byte
}

// Resolved is the answer to Resolve and Forget.
type Resolved struct {
	// More says that the range has something left to do: ask again.
	More bool
	// Intact is the answer where the anchor's range ends the anchor's lock of an attempt that is
	// not committed: it was there until now, as it was made. Then no lock of the attempt has
	// ended, since others end one only after the anchor's.
	Intact bool
}

// Kind implements TxnOp.
func (*Prepare) Kind() TxnKind { return TxnPrepare }

// Kind implements TxnOp.
func (*Commit) Kind() TxnKind { return TxnCommit }

// Kind implements TxnOp.
func (*Resolve) Kind() TxnKind { return TxnResolve }

// Kind implements TxnOp.
func (*Decide) Kind() TxnKind { return TxnDecide }

// Kind implements TxnOp.
func (*Forget) Kind() TxnKind { return TxnForget }

// Kind implements TxnOp.
func (*Revoke) Kind() TxnKind { return TxnRevoke }

// Kind implements TxnOp.
func (*LeaseKeys) Kind() TxnKind { return TxnLeaseKeys }

func (*Prepared) answers(k TxnKind) bool { return k == TxnPrepare }
func (*Decided) answers(k TxnKind) bool  { return k == TxnCommit || k == TxnDecide }
func (*Resolved) answers(k TxnKind) bool { return k == TxnResolve || k == TxnForget }
func (*Revoked) answers(k TxnKind) bool  { return k == TxnRevoke }
func (*Attached) answers(k TxnKind) bool { return k == TxnLeaseKeys }

// Keys calls add with every pair (key, range_end) that the op names, and whether it
// writes there.
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
