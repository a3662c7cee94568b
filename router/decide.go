package router

import (
	"context"
	"errors"
	"slices"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
)

// decision is how an attempt has ended: at a revision, or with an error.
type decision struct {
	revision keyspace.Revision
	err      error
}

// decided has the attempt decided. From here on it does not depend on its client any more.
func (a *trial) decided(ctx context.Context) decision {
	r := a.t.r
	ch := make(chan decision, 1)
	a.t.keep()
	started := r.txns.run(func(ctx context.Context) {
		resolved := a.decide(ctx, ch)
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
		return decision{err: ctx.Err()}
	}
}

// finish has the attempt decided and answers it.
func (a *trial) finish(ctx context.Context) (*pb.TxnResponse, error) {
	d := a.decided(ctx)
	if d.err != nil {
		return nil, d.err
	}
	as := &assembly{
		r: a.t.r, plan: a.plan, pieces: a.ps.order, rev: d.revision, changed: true,
		base: moment{at: d.revision, txn: &a.name, held: &a.t.held},
	}
	resp, err := as.run(ctx, a.t.req)
	if err != nil {
		// It has happened, whatever the reads say of themselves. The client's own end is told
		// by whoever knows its context.
		return nil, kverror.New(kverror.Timeout, "transaction %s is committed at %d, its answer is lost: %v", a.name, d.revision, err)
	}
	return resp, nil
}

// decide asks for the revision, decides at the anchor, tells the client, and ends the
// locks, first if it goes to the end. It says whether it has ended those of a committed attempt, whose record is left.
func (a *trial) decide(ctx context.Context, ch chan<- decision) (resolved bool) {
	r := a.t.r
	rev, err := a.sequence()
	if err != nil {
		ch <- decision{err: err}
		a.abort()
		return false
	}
	r.txns.heard(rev)
	switch committed, err := a.commit(ctx, rev); {
	case err != nil:
		// Nobody says any more that somebody is at it: whoever meets the locks decides.
		r.txns.end(a.name)
		ch <- decision{err: err}
	case !committed:
		ch <- decision{err: errStartOver}
		a.abort()
	case a.toTheEnd:
		if resolved = a.resolveAll(ctx, rev); !resolved {
			ch <- decision{err: kverror.New(kverror.LeaderChanged, "transaction %s is committed at %d, and holds locks yet", a.name, rev)}
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
func (a *trial) sequence() (keyspace.Revision, error) {
	req := keyspace.SequenceRequest{Count: 1}
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
	if n.Err == nil {
		return n.First, nil
	}
	// What may have been handed out is used by nobody.
	if e := kverror.Of(n.Err); e.Fate() == kverror.NotApplied && e.Retry() == kverror.RetryClient {
		return 0, e
	}
	return 0, errStartOver
}

// locks are all locks of the attempt, and anchor is the one at its anchor.
func (a *trial) locks() (anchor rangeapi.LockID, all []rangeapi.LockRef) {
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

// commit has the anchor decide, and again, with the same revision, until it has said how.
// An error says that the node stops, or that the fate is not known and will not be.
func (a *trial) commit(ctx context.Context, rev keyspace.Revision) (committed bool, err error) {
	r := a.t.r
	anchor, locks := a.locks()
	op := &rangeapi.Commit{Name: a.name, AnchorLock: anchor, Anchor: a.ps.anchor, Revision: rev, Locks: locks}
	unsure := false
	for pause := firstPause; ; pause = min(2*pause, lastPause) {
		got, err := r.stepFor(ctx, a.ps.anchor, op)
		if err == nil {
			d := got.(*rangeapi.Decided)
			if d.Revision == 0 && unsure {
				// It may have been committed, finished by others and forgotten.
				return false, kverror.New(kverror.LeaderChanged, "transaction %s was decided by others", a.name)
			}
			return d.Revision != 0, nil
		}
		unsure = unsure || kverror.Of(err).Fate() == kverror.Unknown
		if sleep := clock.Sleep(ctx, r.cfg.Clock, pause); sleep != nil {
			return false, kverror.New(kverror.LeaderChanged, "transaction %s: %v", a.name, err)
		}
	}
}

// resolvePatience is how long a coordinator goes on ending the locks of a committed attempt. As
// long as it is at it, the ranges do not look after theirs; where many have no leader, it does
// not come to the others.
const resolvePatience = 10 * time.Second

// resolveAll ends the locks of a committed attempt. What it cannot end, the anchor's range
// does, and the attempt is this node's no more.
func (a *trial) resolveAll(ctx context.Context, rev keyspace.Revision) bool {
	r := a.t.r
	resolving, cancel := clock.WithTimeout(ctx, r.cfg.Clock, resolvePatience)
	defer cancel()
	held := slices.DeleteFunc(slices.Clone(a.all()), func(p *piece) bool { return p.answer == nil || !p.answer.Held })
	err := each(resolving, held, func(ctx context.Context, p *piece) error {
		return r.stepOver(ctx, p.span, &rangeapi.Resolve{Name: a.name, Lock: p.answer.Lock, Revision: rev})
	})
	if err != nil {
		r.leaveRecord(ctx, a.name, err)
		r.txns.end(a.name)
	}
	return err == nil
}

// forgetEvery is how often a node has records forgotten: nobody waits for that, and an
// entry of its own for each would keep the disks from those that somebody waits for. A
// range asks about a record long after this.
const forgetEvery = 20 * time.Millisecond

// forget has the record of an attempt forgotten whose locks have ended, together with
// those of others.
func (r *Router) forget(ctx context.Context, name rangeapi.TxnName, anchor []byte) {
	defer r.txns.end(name)
	if !r.txns.drains() {
		// Where the node stops it is tried all the same.
		_ = clock.Sleep(ctx, r.cfg.Clock, forgetEvery-time.Duration(r.cfg.Clock.Now())%forgetEvery)
	}
	if _, err := r.stepFor(ctx, anchor, &rangeapi.Forget{Name: name, Anchor: anchor}); err != nil {
		r.leaveRecord(ctx, name, err)
	}
}

// leaveRecord says that the anchor's range does what is left.
func (r *Router) leaveRecord(ctx context.Context, name rangeapi.TxnName, err error) {
	if ctx.Err() == nil {
		r.cfg.Logger.Info("end the locks of a transaction", zap.Stringer("txn", name), zap.Error(err))
	}
}

// abort gives up all that the attempt may hold. It does not wait: the name is not used
// again, and what this node does not reach, or has no time for, the ranges push.
func (a *trial) abort() {
	r := a.t.r
	for _, p := range a.all() {
		if p.answer != nil {
			p.answer.Results = nil // nobody needs them any more, and some are large
		}
	}
	sent := slices.DeleteFunc(slices.Clone(a.all()), func(p *piece) bool {
		return !p.sent || !p.locks || p.answer != nil && !p.answer.Held
	})
	r.txns.end(a.name)
	if len(sent) == 0 {
		return
	}
	a.t.keep()
	started := r.txns.runAbort(func(ctx context.Context) {
		defer a.t.release()
		ctx, cancel := clock.WithTimeout(ctx, r.cfg.Clock, abortPatience)
		defer cancel()
		_ = each(ctx, sent, func(ctx context.Context, p *piece) error {
			return r.stepOver(ctx, p.span, &rangeapi.Resolve{Name: a.name})
		})
	})
	if !started {
		a.t.release()
	}
}

// Push implements package shard's TxnPusher: it asks the coordinator's node, and where that does
// not know the attempt or does not live, has the anchor decide.
func (r *Router) Push(ctx context.Context, name rangeapi.TxnName, anchor []byte) (live bool, d *rangeapi.Decided, err error) {
	if live, err = r.coordinated(ctx, name); live || err != nil {
		return live, nil, err
	}
	got, err := r.stepFor(ctx, anchor, &rangeapi.Decide{Name: name, Anchor: anchor})
	if err != nil {
		return false, nil, err
	}
	return false, got.(*rangeapi.Decided), nil
}

// Finish implements package shard's TxnPusher.
func (r *Router) Finish(ctx context.Context, name rangeapi.TxnName, d *rangeapi.Decided) (live bool, err error) {
	if live, err = r.coordinated(ctx, name); live || err != nil {
		return live, err
	}
	for _, l := range d.Locks {
		if err := r.stepOver(ctx, l.Span, &rangeapi.Resolve{Name: name, Lock: l.ID, Revision: d.Revision}); err != nil {
			return false, err
		}
	}
	return false, nil
}

// coordinated says whether a coordinator is at the attempt.
func (r *Router) coordinated(ctx context.Context, name rangeapi.TxnName) (bool, error) {
	if name.Node == r.cfg.Self {
		return r.txns.owns(name), nil
	}
	if !r.cfg.Alive(name.Node) {
		return false, nil
	}
	ctx, cancel := clock.WithTimeout(ctx, r.cfg.Clock, r.cfg.AttemptTimeout)
	defer cancel()
	owned, err := r.ask(ctx, name)
	if err != nil && !errors.Is(err, errNoAnswer) {
		return false, err
	}
	if err != nil && r.cfg.Alive(name.Node) {
		return false, err
	}
	return owned, nil
}
