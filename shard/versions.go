package shard

import (
	"context"
	"fmt"

	"github.com/skeindb/skein/internal/background"
	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/eval"
)

// Versions returns a page of a cut through a range, as this node's replica has it. Each page reads the state of its
// own moment. That makes no difference: see cuttable, which is asked before and after the read.
func (s *Store) Versions(ctx context.Context, q *rangeapi.VersionsRequest) (*rangeapi.VersionsPage, error) {
	if err := q.Check(); err != nil {
		return nil, err
	}
	r, err := s.fed(q.Range)
	if err != nil {
		return nil, err
	}
	rest, installs, err := r.cuttable(q)
	if err != nil {
		return nil, err
	}
	select {
	case s.cutting <- struct{}{}:
		defer func() { <-s.cutting }()
	case <-ctx.Done():
		return nil, kverror.Of(ctx.Err())
	}
	var p *rangeapi.VersionsPage
	background.Run(func() { p, err = eval.CutPage(s.cfg.Engine, q, rest.End) })
	if err != nil {
		return nil, fmt.Errorf("shard: range %s: %s at %d from %q on: %w", r.id, q.Cut.Select, q.Cut.At, q.From.Key, err)
	}
	// Only now is it known that nothing was removed or replaced before the versions were read.
	_, now, err := r.cuttable(q)
	if err == nil && now != installs {
		err = kverror.New(kverror.ReadAgain, "range %s: a snapshot replaced the state meanwhile", r.id)
	}
	return p, err
}

// cutReads bounds the pages of cuts that a node reads at a time, and so their memory.
const cutReads = 2

// cuttable returns what is left of the range and of what is asked for. It fails unless the replica has all that there
// will ever be up to the cut's revision, and has removed nothing that the cut takes. installs is hashable's.
func (r *Replica) cuttable(q *rangeapi.VersionsRequest) (rest keyspace.Span, installs uint64, err error) {
	lowest := q.Cut.Lowest()
	need := rangeapi.HashRequest{
		Range: q.Range, Generation: q.Generation, From: q.From.Key, Revision: q.Cut.At, Compacted: lowest, Position: q.Position,
	}
	if mutation.Is(mutation.CutTooEarly) {
		need.Revision = 0
	}
	if mutation.Is(mutation.CutOfCompacted) {
		need.Compacted = keyspace.MaxRevision
	}
	rest, installs, err = r.hashable(&need)
	if e := kverror.Of(err); e != nil && e.Kind == kverror.Compacted {
		err = kverror.New(kverror.HoldEnded, "range %s has compacted up to revision %d, and this cut needs what is kept at %d", r.id, e.CompactRevision, lowest)
	}
	if err == nil && len(q.End) > 0 && (len(rest.End) == 0 || string(q.End) < string(rest.End)) {
		rest.End = q.End
	}
	return rest, installs, err
}

// handleVersions answers method 27.
func (s *Store) handleVersions(ctx context.Context, _ keyspace.NodeID, payload []byte) ([]byte, error) {
	q, err := rangeapi.DecodeVersionsRequest(payload)
	if err != nil {
		return rangeapi.AppendVersionsPage(nil, nil, rangeapi.BadRequest("%v", err)), nil
	}
	p, err := s.Versions(ctx, q)
	if err != nil {
		return rangeapi.AppendVersionsPage(nil, nil, err), nil
	}
	return rangeapi.AppendVersionsPage(make([]byte, 0, len(p.Body)+64), p, nil), nil
}
