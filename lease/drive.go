package lease

import (
	"context"
	"errors"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/fsm"
)

// idle is how long a term with nothing to do sleeps, tick how long any does: a timer may
// fire a moment before the clock says so.
const (
	idle = time.Hour
	tick = time.Millisecond
)

// drive does what is due until the term is over. It starts the goroutines of the term,
// and takes over what they came to when it is woken.
func (tm *Timer) drive(t *term) {
	timer := tm.o.Clock.NewTimer(0)
	defer timer.Stop()
	for t.ctx.Err() == nil {
		timer.Reset(tm.step(t))
		select {
		case <-timer.C():
		case <-t.wake:
		case <-t.ctx.Done():
		}
	}
	tm.mu.Lock()
	defer tm.mu.Unlock()
	if tm.term == t {
		tm.term = nil
		tm.o.Metrics.Leases.Set(0)
	}
}

// step starts what is due, and returns when the next thing is.
func (tm *Timer) step(t *term) time.Duration {
	tm.mu.Lock()
	defer tm.mu.Unlock()
	now := tm.o.Clock.Now()
	tm.o.Metrics.Leases.Set(float64(len(t.leases)))
	tm.startAttempts(t, now)
	tm.startRemoval(t)
	tm.startDecision(t, now)
	return t.untilNext(now, tm.o.Parallel)
}

// untilNext returns how long nothing is due that no goroutine will bring about.
func (t *term) untilNext(now clock.Time, parallel int) time.Duration {
	d := idle
	if at, ok := t.ends.Next(); ok && t.attempts < parallel {
		d = min(d, at.Sub(now))
	}
	if at, ok := t.retries.Next(); ok && t.attempts < parallel && t.retrying < mostRetries(parallel) {
		d = min(d, at.Sub(now))
	}
	if at, ok := t.expiry.Next(); ok && !t.deciding && t.waiting < maxWaiting {
		d = min(d, max(at, t.nextDecision).Sub(now))
	}
	return max(d, tick)
}

// startAttempts begins to end leases whose end is decided. Those that failed before come
// after the others and never take all places: keys that nobody reaches hold up their own
// leases.
func (tm *Timer) startAttempts(t *term, now clock.Time) {
	start := func(id keyspace.LeaseID) {
		e := t.leases[id]
		t.attempts++
		tm.wait.Go(func() { tm.attempt(t, e) })
	}
	for _, id := range t.ends.TakeDue(now, tm.o.Parallel-t.attempts) {
		start(id)
	}
	room := min(tm.o.Parallel-t.attempts, mostRetries(tm.o.Parallel)-t.retrying)
	for _, id := range t.retries.TakeDue(now, room) {
		t.retrying++
		start(id)
	}
}

// mostRetries is how many attempts may be such of leases that failed before.
func mostRetries(parallel int) int { return (parallel + 1) / 2 }

// attempt tries once to end a lease.
func (tm *Timer) attempt(t *term, e *entry) {
	timeout := tm.o.AttemptTimeout
	again := e.failures > 0 // nobody writes it during the attempt
	if !again {
		timeout = min(timeout, firstAttemptTimeout)
	}
	rev, err := tm.endOrKeep(t, e, timeout)
	tm.mu.Lock()
	defer tm.mu.Unlock()
	t.attempts--
	if again {
		t.retrying--
	}
	t.wake.Set()
	if t.leases[e.ref.ID] != e {
		return // it is gone, or stays
	}
	if err == nil {
		e.revision = rev
		t.ended = append(t.ended, e.ref)
		return
	}
	if t.ctx.Err() != nil {
		return
	}
	if e.failures == 0 {
		t.waiting-- // it holds up nobody any more
	}
	e.failures++
	tm.o.Metrics.Failures.Inc()
	pause := attemptPauseMax
	if e.failures < 10 {
		pause = min(pause, attemptPauseMin<<(e.failures-1))
	}
	t.retries.Set(e.ref.ID, tm.o.Clock.Now().Add(pause))
	tm.o.Logger.Warn("end a lease", zap.Int64("lease", int64(e.ref.ID)), zap.Uint64("term", t.number),
		zap.Int("failures", e.failures), zap.Duration("pause", pause), zap.Error(err))
}

// endOrKeep has the keys of a lease deleted. If one of them is newer than the check on which the decision rests, it has
// the decision taken back. From then on it deletes nothing, because the decision may be taken back already.
func (tm *Timer) endOrKeep(t *term, e *entry, timeout time.Duration) (keyspace.Revision, error) {
	tm.mu.Lock()
	checked := e.refused
	tm.mu.Unlock()
	refusal := kverror.KeysChanged.Error()
	if checked == 0 {
		ctx, cancel := clock.WithTimeout(t.ctx, tm.o.Clock, timeout)
		defer cancel()
		var rev keyspace.Revision
		var err error
		if rev, checked, err = tm.deleteKeys(ctx, t, e); !errors.Is(err, kverror.KeysChanged) {
			return rev, err
		}
		refusal = err.Error()
		tm.mu.Lock()
		e.refused = checked
		tm.mu.Unlock()
	}
	if err := tm.o.Records.KeepLease(t.ctx, t.number, e.ref, checked); err != nil {
		return 0, err
	}
	tm.mu.Lock()
	defer tm.mu.Unlock()
	e.refused = 0
	return 0, kverror.New(kverror.KeysChanged, "%s, and it was decided anew that it ends", refusal)
}

// deleteKeys has the keys of a lease deleted. Where no span was ever registered there can
// be none. Checked is that of the record.
func (tm *Timer) deleteKeys(ctx context.Context, t *term, e *entry) (rev, checked keyspace.Revision, err error) {
	for l := tm.o.Records.LeaseRecord(e.ref); l != nil && len(l.Spans) > 0; {
		if !l.Revoking {
			return 0, 0, kverror.New(kverror.NoLeader, "it is not decided that lease %d ends", e.ref.ID)
		}
		check := keyspace.KeyCheck{At: l.Checked, Term: t.number}
		if rev, err = tm.o.Revoker.RevokeLease(ctx, e.ref.ID, e.ref.Incarnation, l.Spans, check); err != nil {
			return 0, l.Checked, err
		}
		// A merge of ranges meanwhile may have carried the lease's attachment beyond the spans of
		// the request. Or it carried it from a range that still had it back to one that had lost
		// it, and a split then separates it from the lock. A later merge finds no attachment.
		now := tm.o.Records.LeaseRecord(e.ref)
		if now == l {
			break
		}
		l = now
	}
	return rev, 0, nil
}

// startRemoval forgets the records of leases whose keys are gone.
func (tm *Timer) startRemoval(t *term) {
	if t.removing || len(t.ended) == 0 {
		return
	}
	refs := t.ended
	t.ended, t.removing = nil, true
	tm.wait.Go(func() {
		err := tm.o.Records.RemoveLeases(t.ctx, t.number, refs)
		if err != nil {
			tm.pause(t, "forget leases", len(refs), err)
		}
		tm.mu.Lock()
		defer tm.mu.Unlock()
		t.removing = false
		if err != nil {
			t.ended = append(refs, t.ended...)
		}
		t.wake.Set()
	})
}

// startDecision proposes to end leases that have expired.
func (tm *Timer) startDecision(t *term, now clock.Time) {
	if t.deciding || t.waiting >= maxWaiting || now < t.nextDecision {
		return
	}
	ids := t.expiry.TakeDue(now, min(maxDecided, maxWaiting-t.waiting))
	if len(ids) == 0 {
		return
	}
	refs := make([]fsm.LeaseRef, len(ids))
	for i, id := range ids {
		e := t.leases[id]
		e.phase, e.expired = deciding, true
		refs[i] = e.ref
	}
	t.deciding = true
	t.nextDecision = now.Add(time.Duration(len(ids)) * time.Second / time.Duration(tm.o.PerSecond))
	tm.wait.Go(func() {
		err := tm.o.Records.RevokeLeases(t.ctx, t.number, refs)
		if err != nil {
			tm.pause(t, "decide that leases end", len(refs), err)
		}
		tm.mu.Lock()
		defer tm.mu.Unlock()
		t.deciding = false
		if err != nil {
			t.undecide(refs)
		}
		t.wake.Set()
	})
}

// undecide puts back leases that nothing is known to have been decided of. To propose
// the same again is harmless.
func (t *term) undecide(refs []fsm.LeaseRef) {
	for _, ref := range refs {
		if e, ok := t.leases[ref.ID]; ok && e.ref == ref && e.phase == deciding {
			e.phase = live
			t.expiry.Set(ref.ID, e.deadline)
		}
	}
}

// pause lets a while pass after a proposal that failed.
func (tm *Timer) pause(t *term, what string, leases int, err error) {
	tm.o.Logger.Warn(what, zap.Uint64("term", t.number), zap.Int("leases", leases),
		zap.Bool("certainly-not", kverror.Of(err).Fate() == kverror.NotApplied), zap.Error(err))
	_ = clock.Sleep(t.ctx, tm.o.Clock, proposalPause) // the term's end is seen by whoever sent us
}
