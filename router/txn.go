package router

import (
	"context"
	"errors"
	"slices"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
)

// maxMisses is the number of wrong paths after which a transaction locks all compared keys before
// it chooses its path.
const maxMisses = 3

// runTxn runs a transaction over several ranges, or one that changes more than fits into one entry.
// ctx ends with the router's timeout.
func (r *Router) runTxn(ctx context.Context, req *pb.TxnRequest) (*pb.TxnResponse, error) {
	t, err := r.newTxn(ctx, req, int64(proto.Size(req)))
	if err != nil {
		return nil, err
	}
	r.cfg.Metrics.Txns.Inc()
	defer t.release()
	r.coordinator.addReader(t)
	defer r.coordinator.removeReader(t)
	for {
		resp, err := t.try(ctx)
		if errors.Is(err, errMissed) {
			t.misses++
			t.wrong = true
			err = errStartOver
		}
		if !errors.Is(err, errStartOver) {
			return resp, err
		}
		r.cfg.Metrics.Restarts.Inc()
		t.forgetAnswer()
		if err := clock.Sleep(ctx, r.cfg.Clock, t.pause()); err != nil {
			return nil, kverror.Of(err)
		}
	}
}

// try makes one attempt. The first attempt assumes that all compares hold, which spares most
// transactions an evaluation.
func (t *txn) try(ctx context.Context) (*pb.TxnResponse, error) {
	if t.misses >= maxMisses {
		return t.lockAndChoose(ctx)
	}
	if p := newPlan(t.req, t.seen); p.writes() && !t.wrong {
		return t.write(ctx, p)
	}
	now, err := t.r.currentOrWait(ctx)
	if err != nil {
		return nil, err
	}
	seen, err := t.r.evaluateCompares(ctx, t.req, now)
	if needsNewRevision(err) {
		return nil, errStartOver
	}
	if err != nil {
		return nil, err
	}
	t.seen, t.wrong = seen, false
	p := newPlan(t.req, seen)
	if p.writes() {
		return t.write(ctx, p)
	}
	// A path without writes is a read of the state that leads to it.
	if _, err := p.badRevision(now); err != nil {
		return nil, err
	}
	return t.answerAt(ctx, p, now)
}

// answerAt answers a path without changes by the state at the present revision.
func (t *txn) answerAt(ctx context.Context, p *plan, now keyspace.SequenceAnswer) (*pb.TxnResponse, error) {
	a := &assembly{r: t.r, plan: p, rev: now.Current, base: readPoint{rev: now.Current, term: now.Term, reserved: &t.answer}}
	resp, err := a.run(ctx, t.req)
	if needsNewRevision(err) || errors.Is(err, kverror.Compacted) && !p.explicit() {
		return nil, errStartOver
	}
	return resp, err
}

// divide finds the ranges of a plan and gives each its part.
func (t *txn) divide(ctx context.Context, p *plan, name rangeapi.TxnName, anchor []byte) (*participants, error) {
	ps := &participants{name: name, anchor: anchor, of: map[keyspace.RangeID]*participant{}}
	for i, g := range p.guards {
		s, ok := keyspace.FromEtcd(g.compare.GetKey(), g.compare.GetRangeEnd())
		if !ok {
			continue // its outcome is constant
		}
		routes, err := t.r.resolve(ctx, s)
		if err != nil {
			return nil, err
		}
		ps.guard(i, g, s, routes)
	}
	for i, op := range p.ops {
		s, ok := writtenSpan(op)
		q, reads := op.(*pb.RangeRequest)
		if reads {
			s, ok = keyspace.FromEtcd(q.GetKey(), q.GetRangeEnd())
		}
		if !ok {
			continue
		}
		routes, err := t.r.resolve(ctx, s)
		if err != nil {
			return nil, err
		}
		switch {
		case !reads:
			ps.write(i+1, op, s, routes)
		case !t.unpinned:
			ps.pin(q.GetRevision(), routes)
		}
	}
	if n := len(ps.order); n > keyspace.MaxRevisionRanges {
		return nil, kverror.New(kverror.TooManyRanges, "%d ranges are written, read or compared, at most %d", n, keyspace.MaxRevisionRanges)
	}
	t.mu.Lock()
	absent := slices.Clone(t.absent)
	t.mu.Unlock()
	for _, participant := range ps.order {
		participant.op.Absent = absent
	}
	return ps, nil
}

// write makes an attempt on a path with writes.
func (t *txn) write(ctx context.Context, p *plan) (*pb.TxnResponse, error) {
	a := &txnAttempt{t: t, name: t.r.coordinator.begin(t.id), plan: p}
	return a.execute(ctx, p.anchor())
}

// execute prepares the plan and goes on as far as possible.
func (a *txnAttempt) execute(ctx context.Context, anchor []byte) (*pb.TxnResponse, error) {
	var err error
	if a.ps, err = a.t.divide(ctx, a.plan, a.name, anchor); err == nil {
		if err = a.prepareAll(ctx); err == nil {
			return a.settle(ctx)
		}
	}
	a.abort()
	return nil, err
}

// lockAndChoose locks all compared keys, chooses the path under these locks, and executes it under
// the same name. The locks keep the path right.
func (t *txn) lockAndChoose(ctx context.Context) (*pb.TxnResponse, error) {
	a := &txnAttempt{t: t, name: t.r.coordinator.begin(t.id), plan: &plan{}}
	var anchor []byte
	for _, c := range allCompares(t.req, nil) {
		a.plan.guards = append(a.plan.guards, guard{compare: c, any: true})
		if s, ok := keyspace.FromEtcd(c.GetKey(), c.GetRangeEnd()); ok {
			anchor = lower(anchor, s)
		}
	}
	var err error
	if a.ps, err = t.divide(ctx, a.plan, a.name, anchor); err == nil {
		err = a.prepareAll(ctx)
	}
	if err != nil {
		a.abort()
		return nil, err
	}
	a.plan = newPlan(t.req, a.outcomes())
	a.earlier, a.ps = a.ps.order, nil
	if !a.plan.writes() {
		return a.answerUnchanged(ctx)
	}
	return a.execute(ctx, anchor)
}

// answerUnchanged answers a path without changes. Its compared keys stay locked until the revision
// is known. The read at that revision needs no lock. It must not hold one either, because it may
// wait for locks of others.
func (a *txnAttempt) answerUnchanged(ctx context.Context) (*pb.TxnResponse, error) {
	now, err := a.t.r.currentOrWait(ctx)
	if err == nil {
		err = a.stillHeld(ctx)
	}
	a.abort()
	if err == nil {
		_, err = a.plan.badRevision(now)
	}
	if err != nil {
		return nil, err
	}
	return a.t.answerAt(ctx, a.plan, now)
}

// stillHeld ends the anchor's lock of an attempt that will not be committed, and returns an error
// if the lock was gone. Without a commit nothing else proves that the facts of several ranges
// belong to one moment: whoever took this node for dead may have ended locks between two prepares.
func (a *txnAttempt) stillHeld(ctx context.Context) error {
	lock, all := a.locks()
	if len(all) == 0 {
		return nil
	}
	got, err := a.t.r.commandForKey(ctx, a.all()[0].op.Anchor, &rangeapi.Resolve{Name: a.name, Lock: lock})
	if err != nil {
		return a.failed(ctx, err)
	}
	if !got.(*rangeapi.Resolved).Intact {
		return errStartOver
	}
	return nil
}

// settle goes on with a prepared attempt. All its facts hold at one moment, which is now.
func (a *txnAttempt) settle(ctx context.Context) (*pb.TxnResponse, error) {
	seen := a.outcomes()
	for _, g := range a.plan.guards {
		if seen[g.compare] != g.holds {
			a.abort()
			return nil, errMissed
		}
	}
	if err := a.refusal(ctx); err != nil {
		if gone := a.stillHeld(ctx); gone != nil {
			err = gone
		}
		a.abort()
		return nil, err
	}
	changes := func(p *participant) bool { return p.answer.Changes }
	if !slices.ContainsFunc(a.ps.order, changes) {
		return a.answerUnchanged(ctx)
	}
	if err := ctx.Err(); err != nil {
		a.abort()
		return nil, err
	}
	return a.finish(ctx)
}

// refusal returns the error of the path's first operation that has one.
func (a *txnAttempt) refusal(ctx context.Context) error {
	if !a.plan.explicit() {
		return a.refusedBefore(len(a.plan.ops)+1, nil)
	}
	now, err := a.t.r.currentOrWait(ctx)
	if err != nil {
		return err
	}
	number, err := a.plan.badRevision(now)
	if err == nil {
		number = len(a.plan.ops) + 1
	}
	return a.refusedBefore(number, err)
}

// refusedBefore returns the error of the first put before operation number that is refused, or err.
func (a *txnAttempt) refusedBefore(number int, err error) error {
	for _, p := range a.ps.order {
		if p.answer.Refused != nil && int(p.answer.RefusedAt) < number {
			number, err = int(p.answer.RefusedAt), p.answer.Refused
		}
	}
	return err
}
