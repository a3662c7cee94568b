package router

import (
	"context"
	"slices"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/rangeapi/stages"
)

// decision is how an attempt has ended: at a revision, or with an error.
type decision struct {
	revision keyspace.Revision
	err      error
}

// awaitDecision has the attempt decided. From now on it does not depend on its client.
func (a *txnAttempt) awaitDecision(ctx context.Context) decision {
	r, call, watch := a.t.r, stages.Of(ctx), clock.StartStopwatch()
	ch := make(chan decision, 1)
	a.t.retain()
	started := r.coordinator.run(func(ctx context.Context) {
		resolved := a.decide(call.In(ctx), ch)
		a.t.release()
		if resolved {
			r.forget(ctx, a.name, a.ps.anchor)
		}
	})
	if !started {
		a.t.release()
		a.abort()
		return decision{err: kverror.New(kverror.Stopped, "node %s stops", r.cfg.Self)}
	}
	select {
	case d := <-ch:
		return d
	case <-ctx.Done():
		if !a.sequenced.Load() {
			noteUnanswered(call, watch.Elapsed())
		}
		return decision{err: ctx.Err()}
	}
}

// finish has the attempt decided and answers it.
func (a *txnAttempt) finish(ctx context.Context) (*pb.TxnResponse, error) {
	d := a.awaitDecision(ctx)
	if d.err != nil {
		return nil, d.err
	}
	as := &assembly{
		r: a.t.r, plan: a.plan, results: resultsOf(a.ps.order), rev: d.revision, changed: true,
		base: readPoint{rev: d.revision, txn: &a.name, reserved: &a.t.answer},
	}
	resp, err := as.run(ctx, a.t.req)
	if err != nil {
		// The transaction has happened, even if its reads fail. The caller reports the end of the
		// client's context.
		return nil, kverror.New(kverror.Timeout, "transaction %s is committed at %d, but its answer failed: %v", a.name, d.revision, err)
	}
	return resp, nil
}

// decide asks for the revision, decides at the anchor, tells the client, and ends the locks. With
// awaitResolve it ends the locks first. It returns true if it has ended all locks of a committed
// attempt, so that the record can go.
func (a *txnAttempt) decide(ctx context.Context, ch chan<- decision) (resolved bool) {
	r := a.t.r
	rev, err := a.sequence(stages.Of(ctx))
	if err == nil && a.floor() >= rev {
		// It comes from a sequencer that has a successor: a range has served a revision above it.
		err = errStartOver
	}
	if err != nil {
		ch <- decision{err: err}
		a.abort()
		return false
	}
	r.coordinator.observe(rev)
	switch committed, err := a.commit(ctx, rev); {
	case err != nil && kverror.Of(err).Fate() == kverror.NotApplied:
		ch <- decision{err: err}
		a.abort()
	case err != nil:
		// This node no longer claims the attempt: whoever meets its locks decides.
		r.coordinator.end(a.name)
		ch <- decision{err: err}
	case !committed:
		ch <- decision{err: errStartOver}
		a.abort()
	case a.awaitResolve:
		if resolved = a.resolveAll(ctx, rev); !resolved {
			ch <- decision{err: kverror.New(kverror.LeaderChanged, "transaction %s is committed at %d, but still holds locks", a.name, rev)}
			return false
		}
		ch <- decision{revision: rev}
		return true
	default:
		ch <- decision{revision: rev}
		return a.resolveAll(ctx, rev)
	}
	return false
}

// sequence gets one revision for all ranges that the attempt writes.
func (a *txnAttempt) sequence(call *stages.Call) (keyspace.Revision, error) {
	req := keyspace.SequenceRequest{Count: 1, Permit: a.t.permit}
	for _, p := range a.ps.order {
		switch at := (keyspace.RangeAt{Range: p.rt.desc.Range, Generation: p.rt.desc.Generation}); {
		case !p.changes():
		case req.Range == 0:
			req.Range, req.Generation = at.Range, at.Generation
		default:
			req.Also = append(req.Also, at)
		}
	}
	got := make(chan keyspace.SequenceAnswer, 1)
	a.t.r.cfg.Sequencer.Sequence(req, func(n keyspace.SequenceAnswer) { got <- n })
	n := <-got
	a.sequenced.Store(true)
	if n.Took > noteWait {
		call.Waited(n.Took, n.Err)
	}
	if n.Err == nil {
		a.term = n.Term
		return n.First, nil
	}
	// Nobody uses a revision that may have been allocated.
	if e := kverror.Of(n.Err); e.Fate() == kverror.NotApplied && e.Retry() == kverror.RetryClient {
		return 0, e
	}
	return 0, errStartOver
}

// floor is the highest floor of the attempt's locks.
func (a *txnAttempt) floor() (floor keyspace.Revision) {
	for _, p := range a.all() {
		if p.answer != nil {
			floor = max(floor, p.answer.Floor)
		}
	}
	return floor
}

// locks returns all locks of the attempt, and the one at its anchor.
func (a *txnAttempt) locks() (anchor rangeapi.LockID, all []rangeapi.LockRef) {
	for _, p := range a.all() {
		if p.answer == nil || !p.answer.Held {
			continue
		}
		all = append(all, rangeapi.LockRef{ID: p.answer.Lock, Span: p.span})
		if anchor == (rangeapi.LockID{}) && p.rt.desc.Span.Contains(p.op.Anchor) {
			anchor = p.answer.Lock
		}
	}
	return anchor, all
}

// commit has the anchor decide. It repeats the command with the same revision until there is an
// answer that no repetition changes. After an error without an effect the attempt was not committed
// and will not be. After any other error its fate stays unknown here.
func (a *txnAttempt) commit(ctx context.Context, rev keyspace.Revision) (committed bool, err error) {
	r := a.t.r
	anchor, locks := a.locks()
	op := &rangeapi.Commit{Name: a.name, AnchorLock: anchor, Anchor: a.ps.anchor, Revision: rev, Term: a.term, Locks: locks}
	unsure := false
	for pause := firstPause; ; pause = min(2*pause, lastPause) {
		got, err := r.commandForKey(ctx, a.ps.anchor, op)
		if err == nil {
			d := got.(*rangeapi.Decided)
			if d.Revision == 0 && unsure {
				// It may have been committed, and resolved and forgotten by others.
				return false, kverror.New(kverror.LeaderChanged, "transaction %s was decided by others", a.name)
			}
			return d.Revision != 0, nil
		}
		e := kverror.Of(err)
		if !mayPass(e) && e.Fate() == kverror.NotApplied && unsure && !mutation.Is(mutation.CommitForEver) {
			return false, kverror.New(kverror.LeaderChanged, "transaction %s may be committed, and its commit is refused now: %v", a.name, e)
		}
		if !mayPass(e) && !mutation.Is(mutation.CommitForEver) {
			return false, e
		}
		unsure = unsure || e.Fate() == kverror.Unknown
		if sleep := clock.Sleep(ctx, r.cfg.Clock, pause); sleep != nil {
			return false, kverror.New(kverror.LeaderChanged, "transaction %s: %v", a.name, err)
		}
	}
}

// mayPass says whether a repeated commit may get another answer. While a commit is repeated, the
// attempt's locks stand.
func mayPass(e *kverror.Error) bool {
	if e.Fate() == kverror.Unknown {
		return e.Kind != kverror.Corrupt && e.Kind != kverror.Internal
	}
	return e.Retry() != kverror.RetryNever
}

// resolveTimeout bounds how long a coordinator ends the locks of a committed attempt. Ranges leave
// the locks to it meanwhile. If many ranges have no leader, it does not get to the others.
const resolveTimeout = 10 * time.Second

// resolveAll ends the locks of a committed attempt. The anchor's range ends those that are left,
// and this node no longer claims the attempt.
func (a *txnAttempt) resolveAll(ctx context.Context, rev keyspace.Revision) bool {
	r := a.t.r
	resolving, cancel := clock.WithTimeout(ctx, r.cfg.Clock, resolveTimeout)
	defer cancel()
	held := slices.DeleteFunc(slices.Clone(a.all()), func(p *participant) bool { return p.answer == nil || !p.answer.Held })
	err := each(resolving, held, func(ctx context.Context, p *participant) error {
		return r.commandForSpan(ctx, p.span, &rangeapi.Resolve{Name: a.name, Lock: p.answer.Lock, Revision: rev, Term: a.term})
	})
	if err != nil {
		r.logLeftover(ctx, a.name, err)
		r.coordinator.end(a.name)
	}
	return err == nil
}

// forgetEvery is how often a node forgets records. Nobody waits for that, and an entry for each
// record would delay entries that somebody waits for. A range asks about a record much later.
const forgetEvery = 20 * time.Millisecond

// forget forgets the record of an attempt without locks, together with those of others.
func (r *Router) forget(ctx context.Context, name rangeapi.TxnName, anchor []byte) {
	defer r.coordinator.end(name)
	if !r.coordinator.drains() {
		// A node that stops tries it all the same.
		_ = clock.Sleep(ctx, r.cfg.Clock, forgetEvery-time.Duration(r.cfg.Clock.Now())%forgetEvery)
	}
	if _, err := r.commandForKey(ctx, anchor, &rangeapi.Forget{Name: name, Anchor: anchor}); err != nil {
		r.logLeftover(ctx, name, err)
	}
}

// logLeftover logs that the anchor's range has to do the rest.
func (r *Router) logLeftover(ctx context.Context, name rangeapi.TxnName, err error) {
	if ctx.Err() == nil {
		r.cfg.Logger.Info("leave the locks or the record of a transaction to its ranges", zap.Stringer("txn", name), zap.Error(err))
	}
}

// abort gives up all that the attempt may hold. It does not wait. The name is never used again, and
// the ranges push the locks that this node does not end.
func (a *txnAttempt) abort() {
	r := a.t.r
	for _, p := range a.all() {
		if p.answer != nil {
			p.answer.Results = nil // nobody needs them any more, and some are large
		}
	}
	sent := slices.DeleteFunc(slices.Clone(a.all()), func(p *participant) bool {
		return !p.sent || !p.locks || p.answer != nil && !p.answer.Held
	})
	r.coordinator.end(a.name)
	if len(sent) == 0 {
		return
	}
	a.t.retain()
	started := r.coordinator.runAbort(func(ctx context.Context) {
		defer a.t.release()
		ctx, cancel := clock.WithTimeout(ctx, r.cfg.Clock, abortTimeout)
		defer cancel()
		_ = each(ctx, sent, func(ctx context.Context, p *participant) error {
			return r.commandForSpan(ctx, p.span, &rangeapi.Resolve{Name: a.name})
		})
	})
	if !started {
		a.t.release()
	}
}
