package lease

import (
	"context"
	"math"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/wake"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement"
	"github.com/skeindb/skein/placement/fsm"
)

// Records decides about leases in the placement group; *placement.Service does. An error
// of fate NotApplied says that nothing was decided and nothing will be.
type Records interface {
	// RevokeLeases decides in the term that leases end. Those that are gone are left out.
	RevokeLeases(ctx context.Context, term uint64, refs []fsm.LeaseRef) error
	// KeepLease takes back the decision that a lease ends, which rests on a check of its keys at a revision. A
	// later decision stays.
	KeepLease(ctx context.Context, term uint64, ref fsm.LeaseRef, checked keyspace.Revision) error
	// RemoveLeases forgets leases whose keys and attachments are gone.
	RemoveLeases(ctx context.Context, term uint64, refs []fsm.LeaseRef) error
	// LeaseRecord returns the lease's record as it is now, nil if it is gone. It is the same
	// one for as long as nothing has changed it.
	LeaseRecord(ref fsm.LeaseRef) *fsm.Lease
}

// Revoker knows the keys of leases; the router does. Spans are those of the lease's
// record.
type Revoker interface {
	// RevokeLease deletes all keys of the lease at one revision, which it returns, and
	// everything that lets further ones be attached. Without a key it uses no revision
	// and returns the current one. It is idempotent. Checked, if its At is not 0, says as of when the keys were
	// checked: the error is KeysChanged if one of them was written later.
	RevokeLease(
		ctx context.Context, lease keyspace.LeaseID, incarnation keyspace.LeaseIncarnation, spans []keyspace.Span, checked keyspace.KeyCheck,
	) (keyspace.Revision, error)
	// LeaseKeys returns the keys of the lease in key order, as of the returned revision,
	// which is the current one.
	LeaseKeys(ctx context.Context, lease keyspace.LeaseID, spans []keyspace.Span) ([][]byte, keyspace.Revision, error)
}

// Options are what a Timer is made of. Clock, Records and Revoker are required.
type Options struct {
	Clock   clock.Clock
	Records Records
	Revoker Revoker
	// Extend is what every lease gets beside its TTL when another node begins to lead: its
	// holder could renew nothing during the election. It is the election timeout.
	Extend time.Duration
	// PerSecond bounds the decisions on expired leases per second, to leave room for writes. 0
	// means 1,000, which is etcd's.
	PerSecond int
	// Parallel bounds the leases that are being ended at a time. 0 means 16.
	Parallel int
	// AttemptTimeout bounds one attempt to end a lease; the first one of each is given a
	// second at most. 0 means 10 s.
	AttemptTimeout time.Duration
	// Logger and Metrics may be nil for none.
	Logger  *zap.Logger
	Metrics *Metrics
}

// Pauses of a Timer.
const (
	// waitBound is how long Wait waits: less than a node that asks takes for the loss of
	// the one that it asked.
	waitBound = 400 * time.Millisecond
	// proposalPause is how long a decision that was not taken in waits.
	proposalPause = 100 * time.Millisecond
	// firstAttemptTimeout is short: until its first attempt has ended a lease may hold up
	// others.
	firstAttemptTimeout = time.Second
	// attemptPauseMin and attemptPauseMax are between two attempts to end a lease.
	attemptPauseMin = 50 * time.Millisecond
	attemptPauseMax = 10 * time.Second
	// maxDecided bounds the leases of one decision, maxWaiting the decided ones that wait
	// for their first attempt to end.
	maxDecided = 100
	maxWaiting = 256
)

// Timer counts the time of leases while its node leads the placement group, and ends
// those that have expired or are revoked. It implements placement.LeaseObserver and
// placement.LeaseTimes. Its goroutines are those of the term; Stop waits for them.
type Timer struct {
	o    Options
	wait sync.WaitGroup

	mu sync.Mutex
	// Guarded by mu, as is what it points to. term is nil while the node does not lead.
	term    *term
	stopped bool
	mutated mutationState //nolint:unused // has fields with the build tag planted
}

// term is what a Timer knows in the time of one leadership.
type term struct {
	number uint64
	ctx    context.Context
	cancel context.CancelFunc
	wake   wake.Signal

	leases map[keyspace.LeaseID]*entry
	// expiry has the live leases, ends those whose end is decided, retries those of them with
	// an attempt that failed: when to make the next one. Those that an attempt or a decision
	// is under way for are in none.
	expiry, ends, retries Deadlines
	// nextDecision is when leases may be decided upon again.
	nextDecision clock.Time
	// deciding and removing say that such a proposal is under way.
	deciding, removing bool
	// attempts are under way, and retrying of them had one before that failed; waiting are
	// decided and have had no attempt that failed.
	attempts, retrying, waiting int
	// ended are leases whose keys are gone, and their records not yet.
	ended []fsm.LeaseRef
}

// phase is how far a lease is.
type phase uint8

const (
	live phase = iota
	// deciding: it has expired, and is proposed to end.
	deciding
	// ending: that is decided.
	ending
)

// entry is one lease in a term.
type entry struct {
	ref fsm.LeaseRef
	// ttl is in seconds.
	ttl      int64
	phase    phase
	deadline clock.Time
	// expired says that the clock has ended it.
	expired  bool
	failures int
	// refused is the check that a key has turned out to be newer than, 0 for none. Nothing is deleted any more then,
	// until the decision is taken back or made without a check.
	refused keyspace.Revision
	// revision is that of the deletion of its keys, 0 while there was none.
	revision keyspace.Revision
	// gone is closed when the record is gone; nil while nobody waits.
	gone chan struct{}
}

// New returns a Timer.
func New(o Options) *Timer {
	if o.PerSecond == 0 {
		o.PerSecond = 1000
	}
	if o.Parallel == 0 {
		o.Parallel = 16
	}
	if o.AttemptTimeout == 0 {
		o.AttemptTimeout = 10 * time.Second
	}
	if o.Logger == nil {
		o.Logger = zap.NewNop()
	}
	if o.Metrics == nil {
		o.Metrics = NewMetrics(nil)
	}
	return &Timer{o: o}
}

// Stop ends what the Timer does and waits for it.
func (tm *Timer) Stop() {
	tm.mu.Lock()
	tm.stopped = true
	if tm.term != nil {
		tm.term.cancel()
	}
	tm.mu.Unlock()
	tm.wait.Wait()
}

// Lead implements placement.LeaseObserver.
func (tm *Timer) Lead(ctx context.Context, number uint64, records func(yield func(*fsm.Lease) bool)) {
	tm.mu.Lock()
	defer tm.mu.Unlock()
	if tm.stopped {
		return
	}
	t := &term{number: number, leases: map[keyspace.LeaseID]*entry{}, wake: wake.New()}
	t.ctx, t.cancel = context.WithCancel(ctx)
	now := tm.o.Clock.Now()
	for l := range records {
		e := &entry{ref: l.Ref(), ttl: l.TTL}
		t.leases[l.ID] = e
		t.renew(e, now, tm.o.Extend)
		if l.Revoking {
			t.end(e, now)
		}
	}
	if tm.term != nil {
		tm.term.cancel()
	}
	tm.term = t
	tm.mutateDeadlines(t)
	tm.o.Logger.Info("leases are counted here",
		zap.Uint64("term", number), zap.Int("leases", len(t.leases)), zap.Int("ending", t.waiting))
	tm.wait.Go(func() { tm.drive(t) })
}

// Changed implements placement.LeaseObserver.
func (tm *Timer) Changed(number uint64, changes []fsm.LeaseChange) {
	tm.mu.Lock()
	defer tm.mu.Unlock()
	t := tm.term
	if t == nil || t.number != number {
		return
	}
	now := tm.o.Clock.Now()
	for i := range changes {
		l := changes[i].Lease
		e, known := t.leases[l.ID]
		switch {
		case changes[i].Gone && known:
			tm.forget(t, e)
		case changes[i].Gone:
		case !known:
			e = &entry{ref: l.Ref(), ttl: l.TTL}
			t.leases[l.ID] = e
			t.renew(e, now, 0)
		case changes[i].Kept:
			// A new one: what is under way about the old one does not concern it.
			tm.leave(t, e)
			kept := &entry{ref: e.ref, ttl: e.ttl, deadline: e.deadline}
			t.leases[l.ID] = kept
			t.expiry.Set(l.ID, kept.deadline)
		case l.Revoking && e.phase == ending:
			e.refused = 0 // whoever decided now needs no check
		case l.Revoking:
			at := now
			if !e.expired {
				at = 1 // a client waits: before those that have expired
			}
			t.end(e, at)
		}
	}
	t.wake.Set()
}

// renew begins the TTL anew.
func (t *term) renew(e *entry, now clock.Time, extend time.Duration) {
	e.deadline = after(now, e.ttl, extend)
	t.expiry.Set(e.ref.ID, e.deadline)
}

// after is ttl seconds and extend after now, or as late as there can be.
func after(now clock.Time, ttl int64, extend time.Duration) clock.Time {
	if ttl >= (math.MaxInt64-int64(now)-int64(extend))/int64(time.Second) {
		return math.MaxInt64
	}
	return now.Add(time.Duration(ttl)*time.Second + extend)
}

// end takes up a lease whose end is decided; at is its place among those that wait.
func (t *term) end(e *entry, at clock.Time) {
	e.phase = ending
	t.expiry.Remove(e.ref.ID)
	t.waiting++
	t.ends.Set(e.ref.ID, at)
}

func (tm *Timer) forget(t *term, e *entry) {
	tm.leave(t, e)
	if e.expired {
		tm.o.Metrics.Expired.Inc()
	}
}

// leave takes a lease out of the term, and has those look again who wait for its end.
func (tm *Timer) leave(t *term, e *entry) {
	delete(t.leases, e.ref.ID)
	t.expiry.Remove(e.ref.ID)
	t.ends.Remove(e.ref.ID)
	t.retries.Remove(e.ref.ID)
	if e.phase == ending && e.failures == 0 {
		t.waiting--
	}
	if e.gone != nil {
		close(e.gone)
	}
}

// inTerm returns the term with the number, if the node is in it.
func (tm *Timer) inTerm(number uint64) (*term, error) {
	switch t := tm.term; {
	case t == nil || t.number < number:
		return nil, kverror.New(kverror.Busy, "the clocks of term %d do not run yet", number)
	case t.number > number || t.ctx.Err() != nil:
		return nil, kverror.New(kverror.NotLeader, "term %d is over", number)
	default:
		return t, nil
	}
}

// status is how a lease is for who looks.
func (t *term) status(id keyspace.LeaseID, now clock.Time) placement.LeaseStatus {
	e, ok := t.leases[id]
	if !ok {
		return placement.LeaseStatus{LeaseRef: fsm.LeaseRef{ID: id}}
	}
	st := placement.LeaseStatus{LeaseRef: e.ref, Phase: placement.LeaseLive, TTL: e.ttl, Remaining: e.deadline.Sub(now)}
	if e.phase == ending {
		st.Phase, st.Failed = placement.LeaseEnding, e.failures > 0
	}
	return st
}

// Renew implements placement.LeaseTimes.
func (tm *Timer) Renew(number uint64, ids []keyspace.LeaseID) ([]placement.LeaseStatus, error) {
	tm.mu.Lock()
	defer tm.mu.Unlock()
	t, err := tm.inTerm(number)
	if err != nil {
		return nil, err
	}
	now := tm.o.Clock.Now()
	out := make([]placement.LeaseStatus, len(ids))
	for i, id := range ids {
		if e, ok := t.leases[id]; ok && e.renewable(now) {
			t.renew(e, now, 0)
			tm.o.Metrics.Renewed.Inc()
		}
		if out[i] = t.status(id, now); out[i].Phase == placement.LeaseLive && out[i].Remaining <= 0 {
			// As in etcd, one that has expired is waited for, also while it waits for its turn.
			out[i].Phase = placement.LeaseEnding
		}
	}
	return out, nil
}

func (e *entry) renewable(now clock.Time) bool { return e.phase == live && now < e.deadline }

// Look implements placement.LeaseTimes.
func (tm *Timer) Look(number uint64, ids []keyspace.LeaseID) ([]placement.LeaseStatus, error) {
	tm.mu.Lock()
	defer tm.mu.Unlock()
	t, err := tm.inTerm(number)
	if err != nil {
		return nil, err
	}
	now := tm.o.Clock.Now()
	out := make([]placement.LeaseStatus, len(ids))
	for i, id := range ids {
		out[i] = t.status(id, now)
	}
	return out, nil
}

// Wait implements placement.LeaseTimes.
func (tm *Timer) Wait(ctx context.Context, number uint64, ref fsm.LeaseRef) (placement.LeaseStatus, keyspace.Revision, error) {
	gone := placement.LeaseStatus{LeaseRef: ref}
	tm.mu.Lock()
	t, err := tm.inTerm(number)
	if err != nil {
		tm.mu.Unlock()
		return gone, 0, err
	}
	now := tm.o.Clock.Now()
	e, ok := t.leases[ref.ID]
	if !ok || e.ref != ref {
		tm.mu.Unlock()
		return gone, 0, nil
	}
	if e.renewable(now) {
		st := t.status(ref.ID, now)
		tm.mu.Unlock()
		return st, 0, nil
	}
	if e.gone == nil {
		e.gone = make(chan struct{})
	}
	ch := e.gone
	tm.mu.Unlock()
	timer := tm.o.Clock.NewTimer(waitBound)
	defer timer.Stop()
	select {
	case <-ch:
		tm.mu.Lock()
		defer tm.mu.Unlock()
		if now, ok := t.leases[ref.ID]; ok && now.ref == ref {
			return t.status(ref.ID, tm.o.Clock.Now()), 0, nil // the decision was taken back
		}
		return gone, e.revision, nil // nobody writes it any more
	case <-timer.C():
		return placement.LeaseStatus{LeaseRef: ref, Phase: placement.LeaseEnding, TTL: e.ttl}, 0, nil
	case <-t.ctx.Done():
		return gone, 0, kverror.New(kverror.NotLeader, "term %d ended while a lease did", number)
	case <-ctx.Done():
		return gone, 0, ctx.Err()
	}
}
