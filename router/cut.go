package router

import (
	"context"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/rangeapi"
)

// Cuts asks replicas for the versions of a cut; *rangeapi.Client does.
type Cuts interface {
	// Versions returns a page of a cut through a range, as the node's replica has it.
	Versions(ctx context.Context, node keyspace.NodeID, q *rangeapi.VersionsRequest) (*rangeapi.VersionsPage, error)
}

// cutPageBytes bounds a page of a cut. Versions of some hundred bytes fill one block of package backup/block with it. A
// larger page would hold a processor for longer than a request takes.
const cutPageBytes = 192 << 10

// ReadCut passes the versions of a cut to send, page by page, in the order of keys and those of a key newest
// first, from a place on up to end; an empty end is that of all keys. next is where to go on after a page, nil
// after the last one. Ranges may split, merge and move meanwhile. HoldEnded says that some of the versions may be
// removed: who reads must have held them. The router holds one page at a time, however slow send is.
func (r *Router) ReadCut(ctx context.Context, c mvcc.Cut, from mvcc.VersionCursor, end []byte, send func(p *rangeapi.VersionsPage, next *mvcc.VersionCursor) error) error {
	if err := c.Check(); err != nil {
		return kverror.New(kverror.BadRequest, "%v", err)
	}
	share := r.cfg.Answers.Share()
	defer share.Release()
	if err := r.tooLarge(share.Take(ctx, min(2*cutPageBytes, r.cfg.Answers.Reserve()))); err != nil {
		return err
	}
	share.Complete() // it waits for whoever takes the pages, and nobody has to wait for that
	w := cutWalk{nearby: nearby{r: r, at: c.At}, cut: c, from: from, end: end}
	for !w.done {
		p, err := w.step(ctx)
		if err != nil {
			return err
		}
		next := &w.from
		if w.done {
			next = nil
		}
		if err := send(p, next); err != nil {
			return err
		}
	}
	return nil
}

// cutWalk is how far a cut has been read.
type cutWalk struct {
	nearby
	cut  mvcc.Cut
	from mvcc.VersionCursor
	end  []byte
	done bool
}

// step reads the next page and moves behind it.
func (w *cutWalk) step(ctx context.Context) (*rangeapi.VersionsPage, error) {
	p, span, err := askNearby(ctx, &w.nearby, w.from.Key, func(ctx context.Context, node keyspace.NodeID) (*rangeapi.VersionsPage, error) {
		return w.r.cfg.Cuts.Versions(ctx, node, &rangeapi.VersionsRequest{
			Range: w.of.id, Generation: w.of.g, Cut: w.cut, From: w.from, End: w.end, MaxBytes: cutPageBytes, Position: w.position,
		})
	})
	switch {
	case err != nil:
		return nil, err
	case p.Next != nil:
		w.from = *p.Next
	case len(span.End) == 0 || len(w.end) > 0 && string(w.end) <= string(span.End):
		w.done = true
	default:
		w.from = mvcc.VersionCursor{Key: span.End}
	}
	return p, nil
}

// Present returns the current revision, as of a moment after the call, and the cluster's compacted one, -1 for none.
func (r *Router) Present(ctx context.Context) (current, compacted keyspace.Revision, err error) {
	limit := r.limited(ctx)
	defer limit.End()
	a, err := r.currentOrWait(limit)
	return a.Current, a.Compacted, limit.outcome(err)
}
