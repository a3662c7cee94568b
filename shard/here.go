package shard

import (
	"context"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
)

// resolvedLocked is the range's resolved revision, see advance. It is never below the
// revision of the empty store.
func (r *Replica) resolvedLocked() keyspace.Revision { return max(r.resolved, emptyRevision) }

// emptyRevision is that of the empty store: no change has it.
const emptyRevision keyspace.Revision = 1

// readableLocked says why a request cannot be answered here at a revision, nil if it can.
// A compaction removes only versions that are older than the last one of their key, so a
// read of all that is applied misses none.
func (r *Replica) readableLocked(req *rangeapi.Request, at keyspace.Revision) error {
	switch {
	case r.upkeep.receiving || r.stopped:
		return kverror.New(kverror.Busy, "range %s: a snapshot comes in, or the node stops", r.id)
	case r.doubt != nil:
		return r.doubtedLocked()
	case req.Generation != r.rec.Generation || !rangeapi.HoldsOp(r.rec.Span, req.Op):
		return r.errorLocked(kverror.WrongRange, "the range is another one here")
	case at > r.resolvedLocked():
		return kverror.New(kverror.ReadAgain, "range %s is resolved up to %d here, not %d", r.id, r.resolvedLocked(), at)
	case at < r.rec.Compacted && at < r.rec.LastRevision:
		return &kverror.Error{Kind: kverror.Compacted, CompactRevision: r.rec.Compacted}
	}
	return nil
}

// ResolvedHere returns the lowest and the highest revision at which this node's replica of a
// range can be read. The highest is the range's resolved revision. The lowest is its compacted
// revision, or its last one if that is lower. ok is false if no replica of that generation can
// be read here.
func (s *Store) ResolvedHere(id keyspace.RangeID, g keyspace.Generation) (from, to keyspace.Revision, ok bool) {
	r := s.Replica(id)
	if r == nil {
		return 0, 0, false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.upkeep.receiving || r.stopped || r.doubt != nil || r.rec.Generation != g {
		return 0, 0, false
	}
	return min(r.rec.Compacted, r.rec.LastRevision), r.resolvedLocked(), true
}

// ReadHere answers a RangeRequest or a rangeapi.Page from the applied state of this node's
// replica, whoever leads the range. It reads at the revision that the request names, else at
// ReadRevision, which must be set and becomes the header's. It fails with ReadAgain above the
// replica's resolved revision, and with Compacted if the node has heard of a compaction above
// the revision that the request names.
func (s *Store) ReadHere(ctx context.Context, req *rangeapi.Request) (*rangeapi.Response, error) {
	r := s.Replica(req.Range)
	if r == nil {
		return nil, kverror.New(kverror.RangeNotHere, "range %s on node %s", req.Range, s.cfg.Self)
	}
	if err := rangeapi.CheckRequest(req.Op, s.cfg.Limits.MaxRequestBytes, s.cfg.Limits.MaxTxnOps); err != nil {
		return nil, err
	}
	o, ok := rangeapi.RangeOf(req.Op)
	if !ok || req.ReadRevision == 0 {
		return nil, rangeapi.BadRequest("%T at %d is no read of what is here", req.Op, req.ReadRevision)
	}
	at := req.ReadRevision
	if explicit := keyspace.Revision(o.GetRevision()); explicit > 0 {
		// A revision that is compacted in the cluster cannot be read by name, even if this
		// node has it yet and hears of no quorum.
		if c := s.Compacted(); explicit < c {
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
	budget := s.reads.Budget(ctx)
	defer budget.Release()
	resp, _, err := r.reader.Read(req.Op, req.ReadRevision, at, &budget)
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
	r.countReadHereLocked(req.Op)
	return &rangeapi.Response{Op: resp}, nil
}
