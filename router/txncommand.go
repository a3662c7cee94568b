package router

import (
	"context"
	"errors"
	"sync"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/rangeapi/stages"
)

// TxnCommands reaches the ranges of a transaction; *rangeapi.Client does.
type TxnCommands interface {
	// Txn sends a transaction command to the replica of a range on a node.
	Txn(ctx context.Context, node keyspace.NodeID, id keyspace.RangeID, g keyspace.Generation, op rangeapi.TxnCommand) (rangeapi.TxnAnswer, error)
}

// maxParallelCommands bounds the ranges that a transaction asks at the same time.
const maxParallelCommands = 64

// each calls f for all participants, some at a time. The first error cancels the others and is
// returned.
func each(ctx context.Context, ps []*participant, f func(context.Context, *participant) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var once sync.Once
	var first error
	var wg sync.WaitGroup
	gate := make(chan struct{}, maxParallelCommands)
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

// commandAt sends a command to the leader of a range. It returns errStartOver if the range has
// changed since the route was found; then the command had no effect there.
func (r *Router) commandAt(ctx context.Context, rt *route, op rangeapi.TxnCommand) (rangeapi.TxnAnswer, error) {
	var a retryState
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
			stages.Of(ctx).Silent(rt.desc.Range, node)
			return nil, err
		}
		r.cfg.Metrics.Failed.WithLabelValues(e.Kind.Error()).Inc()
		if e.Kind == kverror.Conflict || e.Retry() != kverror.RetryRouter {
			return nil, err
		}
		err = r.learn(ctx, &a, rt, node, e)
		noteRetry(ctx, rt, node, e)
		if err != nil {
			return nil, err
		}
		now := r.cache.find(rt.desc.Span.Start)
		if now == nil || now.desc.Range != rt.desc.Range || now.desc.Generation != rt.desc.Generation {
			return nil, errStartOver
		}
		rt = now
	}
}

// commandForKey sends a command to the range that holds the key, wherever that is.
func (r *Router) commandForKey(ctx context.Context, key []byte, op rangeapi.TxnCommand) (rangeapi.TxnAnswer, error) {
	for {
		rt, err := r.cover(ctx, keyspace.Single(key))
		if err != nil {
			return nil, err
		}
		got, err := r.commandAt(ctx, rt, op)
		if !errors.Is(err, errStartOver) {
			return got, err
		}
	}
}

// commandForSpan sends a command to every range of a span until all are done. It does not repeat
// the command after a Conflict.
func (r *Router) commandForSpan(ctx context.Context, s keyspace.Span, op rangeapi.TxnCommand) error {
	for {
		routes, err := r.resolve(ctx, s)
		for i := 0; err == nil && i < len(routes); i++ {
			err = r.untilDone(ctx, routes[i], op)
		}
		if err == nil || ctx.Err() != nil || kverror.Of(err).Kind == kverror.Conflict {
			return err
		}
		// After any other error the command may be repeated.
		if err := clock.Sleep(ctx, r.cfg.Clock, firstPause); err != nil {
			return err
		}
	}
}

func (r *Router) untilDone(ctx context.Context, rt *route, op rangeapi.TxnCommand) error {
	for {
		got, err := r.commandAt(ctx, rt, op)
		if err != nil {
			return err
		}
		if d, ok := got.(*rangeapi.Resolved); !ok || !d.More {
			return nil
		}
	}
}
