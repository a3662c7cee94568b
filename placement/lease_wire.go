package placement

import (
	"encoding/binary"
	"fmt"
	"time"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/fsm"
)

// leaseOp is what a request of requestLease is about; the numbers are on the wire.
type leaseOp byte

const (
	// leaseGrant grants ID for TTL seconds.
	leaseGrant leaseOp = iota + 1
	// leaseRegister registers Span with ID.
	leaseRegister
	// leaseRenew renews all of IDs.
	leaseRenew
	// leaseLook tells of ID, with its spans.
	leaseLook
	// leaseList lists leases from ID on.
	leaseList
	// leaseRevoke decides that ID ends.
	leaseRevoke
	// leaseWait waits a while until the lease ID of Incarnation has ended.
	leaseWait
	// leaseRevokeChecked decides that the lease ID of Incarnation ends, unless a key of it was written after
	// Checked.
	leaseRevokeChecked
	// leaseRegisterAll registers spans with several leases.
	leaseRegisterAll
)

// leaseRequest is one request about leases. Which fields count depends on Op.
type leaseRequest struct {
	Op          leaseOp
	ID          keyspace.LeaseID
	TTL         int64
	Span        keyspace.Span
	Incarnation keyspace.LeaseIncarnation
	IDs         []keyspace.LeaseID
	Checked     keyspace.Revision
	// Registrations are at most fsm.MaxLeaseBatch.
	Registrations []fsm.RegisterLease
}

// LeasePhase is how far a lease is.
type LeasePhase byte

// The phases of a lease. An overdue lease without a decision is live for readers, and ending
// for those that renew it.
const (
	LeaseGone LeasePhase = iota
	LeaseLive
	LeaseEnding
	// LeaseUnregistered is a lease whose record could not list the span: whoever asks for that one alone learns why.
	LeaseUnregistered
)

// LeaseStatus is what the leader says of a lease.
type LeaseStatus struct {
	fsm.LeaseRef
	Phase LeasePhase
	// TTL is what was granted, in seconds; Remaining is the rest of it, below 0 for an overdue
	// lease.
	TTL       int64
	Remaining time.Duration
	// Failed says of one that ends that an attempt to delete its keys has failed. It stays
	// on the node that leads.
	Failed bool
}

// leaseResponse is the answer to a leaseRequest.
type leaseResponse struct {
	// Revision is the current revision: at a moment after the request arrived where it changed
	// something, and else at the moment that the rest of the answer is about. For leaseWait it
	// is the revision of the deletion, if known.
	Revision keyspace.Revision
	// More says that there are leases beyond the last one (leaseList).
	More   bool
	Leases []LeaseStatus
	Spans  []keyspace.Span
}

func (q *leaseRequest) append(dst []byte) []byte {
	dst = append(dst, byte(q.Op))
	switch q.Op {
	case leaseGrant:
		return binary.AppendUvarint(fsm.AppendLeaseID(dst, q.ID), uint64(q.TTL))
	case leaseRegister:
		return fsm.AppendSpan(fsm.AppendLeaseID(dst, q.ID), q.Span)
	case leaseRenew:
		dst = binary.AppendUvarint(dst, uint64(len(q.IDs)))
		for _, id := range q.IDs {
			dst = fsm.AppendLeaseID(dst, id)
		}
		return dst
	case leaseLook, leaseList, leaseRevoke:
		return fsm.AppendLeaseID(dst, q.ID)
	case leaseWait:
		return binary.AppendUvarint(fsm.AppendLeaseID(dst, q.ID), uint64(q.Incarnation))
	case leaseRevokeChecked:
		return fsm.AppendRevision(binary.AppendUvarint(fsm.AppendLeaseID(dst, q.ID), uint64(q.Incarnation)), q.Checked)
	case leaseRegisterAll:
		return fsm.AppendRegistrations(dst, q.Registrations)
	}
	panic(fmt.Sprintf("placement: encode request %d about leases", q.Op))
}

func readLeaseRequest(r *fsm.Reader) leaseRequest {
	q := leaseRequest{Op: leaseOp(r.Byte())}
	switch q.Op {
	case leaseGrant:
		q.ID, q.TTL = r.LeaseID(), r.LeaseTTL()
	case leaseRegister:
		q.ID, q.Span = r.LeaseID(), r.Span()
	case leaseRenew:
		n := r.CountUpTo(fsm.MaxLeaseBatch, 8)
		for range n {
			q.IDs = append(q.IDs, r.LeaseID())
		}
	case leaseLook, leaseList, leaseRevoke:
		q.ID = r.LeaseID()
	case leaseWait:
		q.ID, q.Incarnation = r.LeaseID(), keyspace.LeaseIncarnation(r.Uvarint())
	case leaseRevokeChecked:
		q.ID, q.Incarnation, q.Checked = r.LeaseID(), keyspace.LeaseIncarnation(r.Uvarint()), r.Revision()
		if q.Checked == 0 {
			r.Failf("keys of a lease checked at revision 0")
		}
	case leaseRegisterAll:
		q.Registrations = r.Registrations()
	default:
		r.Failf("unknown request %d about leases", q.Op)
	}
	return q
}

func (a *leaseResponse) append(dst []byte) []byte {
	dst = fsm.AppendRevision(dst, a.Revision)
	dst = fsm.AppendBool(dst, a.More)
	dst = binary.AppendUvarint(dst, uint64(len(a.Leases)))
	for i := range a.Leases {
		l := &a.Leases[i]
		dst = binary.AppendUvarint(fsm.AppendLeaseID(dst, l.ID), uint64(l.Incarnation))
		dst = append(dst, byte(l.Phase))
		dst = binary.AppendUvarint(dst, uint64(l.TTL))
		dst = binary.AppendVarint(dst, int64(l.Remaining))
	}
	return fsm.AppendSpans(dst, a.Spans)
}

func readLeaseResponse(r *fsm.Reader) leaseResponse {
	a := leaseResponse{Revision: r.Revision(), More: r.Bool()}
	n := r.CountUpTo(fsm.MaxLeaseBatch, 12)
	for range n {
		l := LeaseStatus{LeaseRef: fsm.LeaseRef{ID: r.LeaseID(), Incarnation: keyspace.LeaseIncarnation(r.Uvarint())}}
		if l.Phase = LeasePhase(r.Byte()); l.Phase > LeaseUnregistered {
			r.Failf("phase %d of a lease", l.Phase)
		}
		l.TTL, l.Remaining = r.LeaseTTL(), time.Duration(r.Varint())
		a.Leases = append(a.Leases, l)
	}
	a.Spans = r.Spans()
	return a
}
