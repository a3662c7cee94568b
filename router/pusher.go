package router

import (
	"context"
	"errors"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/rangeapi"
)

// Push implements shard's TxnPusher. It asks the coordinator's node. If that node is dead or does
// not know the attempt, the anchor decides.
func (r *Router) Push(ctx context.Context, name rangeapi.TxnName, anchor []byte) (live bool, d *rangeapi.Decided, err error) {
	if live, err = r.coordinated(ctx, name); live || err != nil {
		return live, nil, err
	}
	got, err := r.commandForKey(ctx, anchor, &rangeapi.Decide{Name: name, Anchor: anchor})
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
		if err := r.commandForSpan(ctx, l.Span, &rangeapi.Resolve{Name: name, Lock: l.ID, Revision: d.Revision}); err != nil {
			return false, err
		}
	}
	return false, nil
}

// coordinated says whether the coordinator still claims the attempt.
func (r *Router) coordinated(ctx context.Context, name rangeapi.TxnName) (bool, error) {
	if name.Node == r.cfg.Self {
		return r.coordinator.owns(name), nil
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
