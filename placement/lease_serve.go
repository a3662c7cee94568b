package placement

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/fsm"
)

// LeaseObserver is told of the records on the node that leads; package lease's Timer is
// one. Its methods are called one at a time, in the order in which things were applied,
// and must not block.
type LeaseObserver interface {
	// Lead begins a term: these are all records. ctx ends with the term.
	Lead(ctx context.Context, term uint64, records func(yield func(*fsm.Lease) bool))
	// Changed brings what has changed since, while this node leads in the term.
	Changed(term uint64, changes []fsm.LeaseChange)
}

// LeaseTimes counts the time of leases on the node that leads; package lease's Timer does. If
// this node does not lead in the term, its methods refuse with an error of fate NotApplied.
type LeaseTimes interface {
	// Renew begins the TTL of each live lease anew, and says of each how it is.
	Renew(term uint64, ids []keyspace.LeaseID) ([]LeaseStatus, error)
	// Look says how each lease is.
	Look(term uint64, ids []keyspace.LeaseID) ([]LeaseStatus, error)
	// Wait waits a while for the end of a lease. If the lease has ended, the phase is LeaseGone
	// and the revision that of the deletion of its keys, or 0 if that is not known.
	Wait(ctx context.Context, term uint64, ref fsm.LeaseRef) (LeaseStatus, keyspace.Revision, error)
}

// leasesChanged is called by the machine before anybody is answered from the changes.
func (s *Service) leasesChanged(changes []fsm.LeaseChange) {
	for i := range changes {
		switch l := changes[i].Lease; {
		case changes[i].Gone:
			s.o.Metrics.LeasesRevoked.Inc()
		case !l.Revoking && !changes[i].Kept:
			s.o.Metrics.LeasesGranted.Inc()
			s.o.Metrics.LeaseTTLs.Observe(float64(l.TTL))
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.leadCancel != nil && s.o.LeaseObserver != nil {
		s.o.LeaseObserver.Changed(s.leadTerm, changes)
	}
}

// RevokeLeases decides in the term that leases end. The error's fate says whether that
// may have happened.
func (s *Service) RevokeLeases(ctx context.Context, term uint64, refs []fsm.LeaseRef) error {
	return s.eachLeaseBatch(refs, func(refs []fsm.LeaseRef) error {
		// One that is gone already is what was wanted.
		if err := s.propose(ctx, term, fsm.RevokeLeases{Leases: refs}).Err; kverror.Of(err) != nil && kverror.Of(err).Kind != kverror.LeaseNotFound {
			return err
		}
		return nil
	})
}

// KeepLease takes back in the term the decision that a lease ends, which rests on a check of its keys at a revision.
func (s *Service) KeepLease(ctx context.Context, term uint64, ref fsm.LeaseRef, checked keyspace.Revision) error {
	return s.propose(ctx, term, fsm.KeepLease{Lease: ref, At: checked}).Err
}

// RemoveLeases forgets leases in the term, whose keys and attachments are gone.
func (s *Service) RemoveLeases(ctx context.Context, term uint64, refs []fsm.LeaseRef) error {
	return s.eachLeaseBatch(refs, func(refs []fsm.LeaseRef) error {
		return s.propose(ctx, term, fsm.RemoveLeases{Leases: refs}).Err
	})
}

func (s *Service) eachLeaseBatch(refs []fsm.LeaseRef, f func([]fsm.LeaseRef) error) error {
	for batch := range slices.Chunk(refs, fsm.MaxLeaseBatch) {
		if err := f(batch); err != nil {
			return err
		}
	}
	return nil
}

// LeaseRecord returns the record of a lease as this node's replica knows it, nil where there
// is none. It is the same one for as long as nothing has changed it.
func (s *Service) LeaseRecord(ref fsm.LeaseRef) *fsm.Lease {
	l, ok := s.View().Lease(ref.ID)
	if !ok || l.Incarnation != ref.Incarnation {
		return nil
	}
	return l
}

// serveLease answers a request about leases on the node that leads.
func (s *Service) serveLease(ctx context.Context, q *leaseRequest) (leaseResponse, error) {
	if s.o.LeaseTimes == nil {
		return leaseResponse{}, kverror.New(kverror.BadRequest, "this node keeps no leases")
	}
	switch q.Op {
	case leaseGrant:
		return s.serveLeaseGrant(ctx, q)
	case leaseRevoke:
		return s.serveLeaseChange(ctx, fsm.RevokeLeases{Leases: []fsm.LeaseRef{{ID: q.ID}}})
	case leaseRevokeChecked:
		return s.serveLeaseChange(ctx, fsm.RevokeChecked{Lease: fsm.LeaseRef{ID: q.ID, Incarnation: q.Incarnation}, At: q.Checked})
	case leaseRegister:
		return s.serveLeaseRegister(ctx, q)
	case leaseRegisterAll:
		return s.serveLeaseRegisterAll(ctx, q)
	case leaseRenew, leaseLook, leaseList, leaseWait:
	}
	// The answer is about a moment at which this node led, after the request had arrived.
	// The revision is from before: a lease that is renewed was revoked at a higher one.
	term, last, err := s.sequencer.Confirm(ctx)
	if err != nil {
		return leaseResponse{}, err
	}
	a := leaseResponse{Revision: last}
	switch q.Op {
	case leaseRenew:
		if a.Leases, err = s.o.LeaseTimes.Renew(term, q.IDs); err == nil {
			// The next leader, if there is one already, has begun to count after this.
			_, _, err = s.sequencer.Confirm(ctx)
		}
	case leaseLook:
		return s.serveLeaseLook(term, last, q.ID)
	case leaseList:
		return s.serveLeaseList(term, q.ID)
	default:
		var st LeaseStatus
		var deleted keyspace.Revision
		st, deleted, err = s.o.LeaseTimes.Wait(ctx, term, fsm.LeaseRef{ID: q.ID, Incarnation: q.Incarnation})
		a.Leases = []LeaseStatus{st}
		switch {
		case deleted != 0:
			a.Revision = deleted
		case err == nil && st.Phase == LeaseGone:
			// It ended while this waited, or before: the deletion is at or below the current
			// revision.
			a.Revision, err = s.lastRevision(term)
		}
	}
	return a, err
}

// serveLeaseGrant checks in etcd's order: the TTL, then whether the lease is there.
func (s *Service) serveLeaseGrant(ctx context.Context, q *leaseRequest) (leaseResponse, error) {
	if q.ID == 0 {
		return leaseResponse{}, kverror.LeaseNotFound
	}
	if s.o.Full != nil && s.o.Full() {
		return leaseResponse{}, kverror.New(kverror.NoSpace, "grant lease %x", int64(q.ID))
	}
	ttl := max(q.TTL, s.o.MinLeaseTTL)
	if span, ok := s.usual.get(); ok {
		// A range that was split since would make the end of the lease one of all its parts. A node that led before may have no
		// map any more.
		v := s.View()
		if v.Len() > 0 && v.Map.ClusterVersion >= keyspace.VersionLeases && v.Lookup(span.Start).Descriptor.Span.Equal(span) {
			return s.serveLeaseChange(ctx, fsm.GrantLeaseIn{ID: q.ID, TTL: ttl, Span: span})
		}
	}
	return s.serveLeaseChange(ctx, fsm.GrantLease{ID: q.ID, TTL: ttl})
}

// usualSpan is where the keys of a new lease are expected: in the span that the last registrations were all of. A lease that is
// granted with that span needs no entry of its own for it later. If the guess is wrong, the lease's end asks that range too.
type usualSpan struct {
	mu sync.Mutex
	// Guarded by mu. times is how often the span was registered one after the other.
	span  keyspace.Span
	times int
}

// usualAfter is after how many registrations of a span the next lease is expected to have keys there too.
const usualAfter = 16

func (u *usualSpan) registered(s keyspace.Span) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.times == 0 || !u.span.Equal(s) {
		u.span, u.times = s, 0
	}
	u.times = min(u.times+1, usualAfter)
}

func (u *usualSpan) forget() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.times = 0
}

// get returns the usual span; ok is false where there is none.
func (u *usualSpan) get() (s keyspace.Span, ok bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.span, u.times == usualAfter
}

// serveLeaseChange proposes a change of one lease's record, and answers with the record
// that it found or left.
func (s *Service) serveLeaseChange(ctx context.Context, op fsm.Effect) (leaseResponse, error) {
	ls := s.machine.leaderState()
	if !ls.Ready {
		return leaseResponse{}, s.refusal()
	}
	res := s.propose(ctx, ls.Term, op)
	if res.Err != nil {
		return leaseResponse{}, res.Err
	}
	last, err := s.lastRevision(ls.Term)
	return leaseResponse{Revision: last, Leases: []LeaseStatus{recordStatus(res.Lease)}}, err
}

// serveLeaseRegister registers a span. If the span is registered already, nothing has to be
// committed. But this node must still lead.
func (s *Service) serveLeaseRegister(ctx context.Context, q *leaseRequest) (leaseResponse, error) {
	a, err := s.registerLease(ctx, q)
	if err == nil && a.Leases[0].Phase == LeaseLive {
		s.usual.registered(q.Span)
	}
	return a, err
}

func (s *Service) registerLease(ctx context.Context, q *leaseRequest) (leaseResponse, error) {
	l, ok := s.View().Lease(q.ID)
	if !ok || !l.Closed() && !l.Covers(q.Span) {
		return s.serveLeaseChange(ctx, fsm.RegisterLease{ID: q.ID, Span: q.Span})
	}
	_, last, err := s.sequencer.Confirm(ctx)
	if err != nil {
		return leaseResponse{}, err
	}
	if l, ok = s.View().Lease(q.ID); !ok || !l.Closed() && !l.Covers(q.Span) {
		return s.serveLeaseChange(ctx, fsm.RegisterLease{ID: q.ID, Span: q.Span})
	}
	return leaseResponse{Revision: last, Leases: []LeaseStatus{recordStatus(l)}}, nil
}

// serveLeaseRegisterAll registers spans by one entry, if some of them are not registered yet.
func (s *Service) serveLeaseRegisterAll(ctx context.Context, q *leaseRequest) (a leaseResponse, err error) {
	missing := s.unregistered(q.Registrations)
	if len(missing) == 0 {
		if _, a.Revision, err = s.sequencer.Confirm(ctx); err != nil {
			return leaseResponse{}, err
		}
		missing = s.unregistered(q.Registrations)
	}
	if len(missing) > 0 {
		ls := s.machine.leaderState()
		if !ls.Ready {
			return leaseResponse{}, s.refusal()
		}
		if err = s.propose(ctx, ls.Term, fsm.RegisterLeases{Leases: missing}).Err; err != nil {
			return leaseResponse{}, err
		}
		if a.Revision, err = s.lastRevision(ls.Term); err != nil {
			return leaseResponse{}, err
		}
	}
	v := s.View()
	for _, r := range q.Registrations {
		st := LeaseStatus{LeaseRef: fsm.LeaseRef{ID: r.ID}}
		if l, ok := v.Lease(r.ID); ok {
			if st = recordStatus(l); st.Phase == LeaseLive && !l.Covers(r.Span) {
				st.Phase = LeaseUnregistered
			}
		}
		if st.Phase == LeaseLive {
			s.usual.registered(r.Span)
		}
		a.Leases = append(a.Leases, st)
	}
	return a, nil
}

// unregistered returns those whose leases live and do not list the span.
func (s *Service) unregistered(all []fsm.RegisterLease) (missing []fsm.RegisterLease) {
	v := s.View()
	for _, r := range all {
		if l, ok := v.Lease(r.ID); ok && !l.Closed() && !l.Covers(r.Span) {
			missing = append(missing, r)
		}
	}
	return missing
}

func recordStatus(l *fsm.Lease) LeaseStatus {
	st := LeaseStatus{LeaseRef: l.Ref(), Phase: LeaseLive, TTL: l.TTL}
	if l.Closed() {
		st.Phase = LeaseEnding
	}
	return st
}

func (s *Service) serveLeaseLook(term uint64, last keyspace.Revision, id keyspace.LeaseID) (leaseResponse, error) {
	found, err := s.o.LeaseTimes.Look(term, []keyspace.LeaseID{id})
	if err != nil {
		return leaseResponse{}, err
	}
	a := leaseResponse{Revision: last, Leases: found}
	switch found[0].Phase {
	case LeaseLive:
		if l := s.LeaseRecord(found[0].LeaseRef); l != nil {
			a.Spans = l.Spans
		}
	case LeaseGone:
		a.Revision, err = s.lastRevision(term) // at or above that of its deletion
	case LeaseEnding, LeaseUnregistered:
	}
	return a, err
}

// serveLeaseList lists a page of leases in the order of their ids. A lease that should end may
// still exist with its keys, because a range with some of them does not answer. Nobody can tell
// for how long. It is shown as it was.
func (s *Service) serveLeaseList(term uint64, from keyspace.LeaseID) (leaseResponse, error) {
	var a leaseResponse
	var ids []keyspace.LeaseID
	v := s.View()
	loading := v.Loading.Active() // nobody counts the times of leases yet
	v.Leases(from, func(l *fsm.Lease) bool {
		if a.More = len(ids) == fsm.MaxLeaseBatch; a.More {
			return false
		}
		ids = append(ids, l.ID)
		if loading {
			st := recordStatus(l)
			st.Remaining = time.Duration(l.TTL) * time.Second
			a.Leases = append(a.Leases, st)
		}
		return true
	})
	var err error
	if loading {
		a.Revision, err = s.lastRevision(term)
		return a, err
	}
	if a.Leases, err = s.o.LeaseTimes.Look(term, ids); err != nil {
		return leaseResponse{}, err
	}
	for i := range a.Leases {
		if st := &a.Leases[i]; st.Phase == LeaseEnding && st.Failed {
			st.Phase = LeaseLive
		}
	}
	a.Revision, err = s.lastRevision(term) // at or above those of leases that are not there
	return a, err
}

// lastRevision returns the last revision allocated, while this node is the sequencer of the
// term. An entry that is committed in the term proves that nobody else had allocated any
// revision when it was proposed.
func (s *Service) lastRevision(term uint64) (keyspace.Revision, error) { return s.sequencer.Last(term) }
