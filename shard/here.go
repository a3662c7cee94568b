package shard

import (
	"context"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
)

// completeLocked is up to where the range is complete by what is applied here (advance says
// why), which is never below the empty store's revision.
func (r *Replica) completeLocked() keyspace.Revision { return max(r.complete, emptyRevision) }

// emptyRevision is that of the empty store: no change has it.
const emptyRevision keyspace.Revision = 1

// readableLocked says why a request cannot be answered here at a revision, nil if it can.
// Versions that a compaction has taken away are older than the last one of their key: who
// reads all that is applied misses none.
func (r *Replica) readableLocked(req *rangeapi.Request, at keyspace.Revision) error {
	switch {
	case r.receiving || r.stopped:
		return kverror.New(kverror.Busy, "range %s: a snapshot comes in, or the node stops", r.id)
	case req.Generation != r.rec.Generation || !rangeapi.HoldsOp(r.rec.Span, req.Op):
		return r.errorLocked(kverror.WrongRange, "the range is another one here")
	case at > r.completeLocked():
		return kverror.New(kverror.ReadAgain, "range %s is complete up to %d here, not %d", r.id, r.completeLocked(), at)
	case at < r.rec.Compacted && at < r.rec.LastRevision:
		return &kverror.Error{Kind: kverror.Compacted, CompactRevision: r.rec.Compacted}
	}
	return nil
}

// ResolvedHere returns the revisions at which this node's replica of a range can be read:
// from what its range has compacted, if anything changed above, up to where it is
// complete. ok is false where there is none of that generation that can be read.
func (n *Node) ResolvedHere(id keyspace.RangeID, g keyspace.Generation) (from, to keyspace.Revision, ok bool) {
	r := n.Replica(id)
	if r == nil {
		return 0, 0, false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.receiving || r.stopped || r.rec.Generation != g {
		return 0, 0, false
	}
	return min(r.rec.Compacted, r.rec.LastRevision), r.completeLocked(), true
}

// ReadHere answers a RangeRequest or a rangeapi.Page from what this node's replica has applied,
// whoever leads the range, at the revision that it names or else at ReadRevision, which
// must be set and is the header's. ReadAgain says that the replica is not complete up to
// there, Compacted that the node has heard of a compaction above the revision that the
// request names.
func (n *Node) ReadHere(_ context.Context, req *rangeapi.Request) (*rangeapi.Response, error) {
	r := n.Replica(req.Range)
	if r == nil {
		return nil, kverror.New(kverror.RangeNotHere, "range %s on node %s", req.Range, n.cfg.Self)
	}
	if err := rangeapi.CheckRequest(req.Op, n.cfg.Limits.MaxRequestBytes, n.cfg.Limits.MaxTxnOps); err != nil {
		return nil, err
	}
	o, ok := rangeapi.RangeOf(req.Op)
	if !ok || req.ReadRevision == 0 {
		return nil, rangeapi.BadRequest("%T at %d is no read of what is here", req.Op, req.ReadRevision)
	}
	at := req.ReadRevision
	if explicit := keyspace.Revision(o.GetRevision()); explicit > 0 {
		// What is compacted in the cluster nobody reads who names it, though it may be here
		// yet: not even where no quorum tells that.
		if c := n.Compacted(); explicit < c {
			return nil, &kverror.Error{Kind: kverror.Compacted, CompactRevision: c}
		}
		at = explicit
	}
	r.mu.Lock()
	installs, err := r.installs, r.readableLocked(req, at)
	r.mu.Unlock()
	if err != nil {
		return nil, err
	}
	budget := n.readBudget()
	defer budget.release()
	resp, _, err := r.readStore(req.Op, req.ReadRevision, at, &budget)
	if err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.readableLocked(req, at); err != nil {
		return nil, err
	}
	if r.installs != installs {
		return nil, kverror.New(kverror.ReadAgain, "range %s: a snapshot replaced the state during the read", r.id)
	}
	return &rangeapi.Response{Op: resp}, nil
}
