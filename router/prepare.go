package router

import (
	"context"
	"errors"
	"slices"
	"sync"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
)

// Steps reaches the ranges of a transaction; *rangeapi.Client does.
type Steps interface {
	// Txn sends a step to the replica of a range on a node.
	Txn(ctx context.Context, node keyspace.NodeID, id keyspace.RangeID, g keyspace.Generation, op rangeapi.TxnOp) (rangeapi.TxnAnswer, error)
}

// maxParallelSteps bounds the ranges that a transaction speaks to at the same time.
const maxParallelSteps = 64

// prepareAll has every range prepare its piece. The range where the transaction gave way
// last goes first: while it holds nothing it may wait there for whomever it meets.
func (a *trial) prepareAll(ctx context.Context) error {
	rest := a.ps.order
	if i := slices.IndexFunc(rest, a.t.metAt); i >= 0 {
		rest[i].op.Patient = len(a.earlier) == 0
		if err := a.prepare(ctx, rest[i]); err != nil {
			return a.failed(ctx, err)
		}
		rest = slices.Concat(rest[:i], rest[i+1:])
	}
	if len(rest) == 1 {
		return a.failed(ctx, a.prepare(ctx, rest[0]))
	}
	return a.failed(ctx, each(ctx, rest, a.prepare))
}

// each calls f for all pieces, some at a time, and returns the first error. What waits is
// ended with it.
func each(ctx context.Context, ps []*piece, f func(context.Context, *piece) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var once sync.Once
	var first error
	var wg sync.WaitGroup
	gate := make(chan struct{}, maxParallelSteps)
	for _, p := range ps {
		gate <- struct{}{}
		wg.Go(func() {
			defer func() { <-gate }()
			if err := f(ctx, p); err != nil {
				once.Do(func() { first = err })
				cancel()
			}
		})
	}
	wg.Wait()
	return first
}

// metAt says whether the piece is of the range where the transaction gave way last.
func (t *txn) metAt(p *piece) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.met != nil && p.locks && p.rt.desc.Span.Contains(t.met)
}

// prepare has one range prepare its piece.
func (a *trial) prepare(ctx context.Context, p *piece) error {
	p.sent = true
	got, err := a.t.r.stepAt(ctx, p.rt, p.op)
	if err != nil {
		if errors.Is(err, kverror.Conflict) {
			a.t.gaveWay(p.span.Start)
		}
		return err
	}
	p.answer = got.(*rangeapi.Prepared)
	if err := a.t.r.hold(&a.t.held, told(p.answer)); err != nil {
		return err
	}
	a.t.noteAbsent(p)
	switch {
	case p.answer.Fence != 0:
		a.t.r.txns.beyond(p.answer.Fence)
		return errStartOver
	case p.locks && !p.answer.Held:
		return errMissed
	}
	return nil
}

// noteAbsent remembers a lease that the range has found not to be there: a later attempt
// need not have the range wait for that again.
func (t *txn) noteAbsent(p *piece) {
	if p.answer.Refused == nil || p.answer.Refused.Kind != kverror.LeaseNotFound {
		return
	}
	for i := range p.op.Writes {
		put, ok := p.op.Writes[i].Op.(*pb.PutRequest)
		if lease := keyspace.LeaseID(put.GetLease()); ok && p.op.Writes[i].Number == p.answer.RefusedAt {
			t.mu.Lock()
			if !slices.Contains(t.absent, lease) {
				t.absent = append(t.absent, lease)
			}
			t.mu.Unlock()
		}
	}
}

// told is what an answer tells of the keys as they were.
func told(p *rangeapi.Prepared) (bytes int64) {
	for i := range p.Results {
		bytes += int64(len(p.Results[i].Value))
		for _, kv := range p.Results[i].Prevs {
			bytes += int64(proto.Size(kv))
		}
	}
	return bytes
}

// gaveWay notes where the transaction met an older one.
func (t *txn) gaveWay(at []byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(at) == 0 {
		at = []byte{0}
	}
	t.met = at
	t.yields++
}

// failed says what becomes of an attempt of which a prepare has ended so. Nothing has
// been decided, and what may have been locked is aborted: the name is never used again.
func (a *trial) failed(ctx context.Context, err error) error {
	if err == nil || errors.Is(err, errStartOver) || errors.Is(err, errMissed) {
		return err
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	switch e := kverror.Of(err); {
	case e.Kind == kverror.Conflict:
		return errStartOver
	case e.Kind == kverror.Compacted:
		a.t.unpinned = true
		return errStartOver
	case e.Kind == kverror.Corrupt || e.Kind == kverror.Internal:
		return err
	case e.Retry() == kverror.RetryRouter || e.Fate() == kverror.Unknown:
		if clock.Sleep(ctx, a.t.r.cfg.Clock, firstPause) != nil {
			return ctx.Err()
		}
		return errStartOver
	}
	return err
}

// stepAt sends a step to one range, as it was when the route was found, and again where
// its leader was somebody else. Where the range has changed it returns errStartOver: the
// step was not taken there.
func (r *Router) stepAt(ctx context.Context, rt *route, op rangeapi.TxnOp) (rangeapi.TxnAnswer, error) {
	var a attempt
	for {
		node := a.choose(rt, r.cfg.Self, r.cfg.Alive)
		got, err := r.cfg.Txns.Txn(ctx, node, rt.desc.Range, rt.desc.Generation, op)
		if err == nil {
			if led := rt.leader(); led != node {
				r.cache.setLeader(rt.desc.Range, node, led)
			}
			return got, nil
		}
		e := kverror.Of(err)
		if ctx.Err() != nil {
			return nil, err
		}
		r.cfg.Metrics.Failed.WithLabelValues(e.Kind.Error()).Inc()
		if e.Kind == kverror.Conflict || e.Retry() != kverror.RetryRouter {
			return nil, err
		}
		if err := r.learn(ctx, &a, rt, node, e); err != nil {
			return nil, err
		}
		now := r.cache.find(rt.desc.Span.Start)
		if now == nil || now.desc.Range != rt.desc.Range || now.desc.Generation != rt.desc.Generation {
			return nil, errStartOver
		}
		rt = now
	}
}

// stepFor sends a step to the range that holds the key, wherever that is.
func (r *Router) stepFor(ctx context.Context, key []byte, op rangeapi.TxnOp) (rangeapi.TxnAnswer, error) {
	for {
		rt, err := r.cover(ctx, keyspace.Single(key))
		if err != nil {
			return nil, err
		}
		got, err := r.stepAt(ctx, rt, op)
		if !errors.Is(err, errStartOver) {
			return got, err
		}
	}
}

// stepOver sends a step to every range of a span until none has anything left to do. A
// Conflict is the answer that it does not repeat the step after.
func (r *Router) stepOver(ctx context.Context, s keyspace.Span, op rangeapi.TxnOp) error {
	for {
		routes, err := r.resolve(ctx, s)
		for i := 0; err == nil && i < len(routes); i++ {
			err = r.untilDone(ctx, routes[i], op)
		}
		if err == nil || ctx.Err() != nil || kverror.Of(err).Kind == kverror.Conflict {
			return err
		}
		// Whatever else it was, the step may be repeated.
		if err := clock.Sleep(ctx, r.cfg.Clock, firstPause); err != nil {
			return err
		}
	}
}

func (r *Router) untilDone(ctx context.Context, rt *route, op rangeapi.TxnOp) error {
	for {
		got, err := r.stepAt(ctx, rt, op)
		if err != nil {
			return err
		}
		if d, ok := got.(*rangeapi.Resolved); !ok || !d.More {
			return nil
		}
	}
}
