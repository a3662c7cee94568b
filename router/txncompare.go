package router

import (
	"context"
	"sync"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"golang.org/x/sync/errgroup"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
)

// evaluateCompares evaluates all compares of a transaction at one revision, in parallel.
func (r *Router) evaluateCompares(ctx context.Context, t *pb.TxnRequest, now keyspace.SequenceAnswer) (outcomes, error) {
	out := outcomes{}
	type asked struct {
		c    *pb.Compare
		part *pb.Compare
	}
	parts := map[keyspace.RangeID][]asked{}
	for _, c := range allCompares(t, nil) {
		s, ok := keyspace.FromEtcd(c.GetKey(), c.GetRangeEnd())
		if !ok {
			out[c] = rangeapi.CompareAbsent(c)
			continue
		}
		over, err := r.resolve(ctx, s)
		if err != nil {
			return nil, err
		}
		for _, rt := range over {
			overlap, ok := rt.desc.Span.Intersect(s)
			if !ok {
				continue
			}
			part := &pb.Compare{Key: c.GetKey(), Result: c.GetResult(), Target: c.GetTarget(), TargetUnion: c.GetTargetUnion()}
			if len(c.GetRangeEnd()) > 0 {
				part.Key, part.RangeEnd = spanPair(overlap)
			}
			parts[rt.desc.Range] = append(parts[rt.desc.Range], asked{c, part})
		}
	}
	facts := map[*pb.Compare][]rangeapi.Fact{}
	var mu sync.Mutex // guards facts
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(maxParallelParts)
	for _, list := range parts {
		for len(list) > 0 {
			n := min(len(list), rangeapi.MaxReadOnlyCompares)
			chunk := list[:n]
			list = list[n:]
			ask := make([]*pb.Compare, n)
			for i := range chunk {
				ask[i] = chunk[i].part
			}
			g.Go(func() error {
				got, err := r.comparesAt(gctx, ask, now)
				if err != nil {
					return err
				}
				mu.Lock()
				defer mu.Unlock()
				for i := range chunk {
					facts[chunk[i].c] = append(facts[chunk[i].c], got[i])
				}
				return nil
			})
		}
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	for c, f := range facts {
		out[c] = outcome(c, f)
	}
	return out, nil
}

// comparesAt evaluates compares at one range by a transaction that only reads. Each compare is a
// nested transaction, which also counts the keys of its span to tell whether there is one.
func (r *Router) comparesAt(ctx context.Context, cs []*pb.Compare, now keyspace.SequenceAnswer) ([]rangeapi.Fact, error) {
	t := &pb.TxnRequest{}
	for _, c := range cs {
		count := []*pb.RequestOp{{Request: &pb.RequestOp_RequestRange{RequestRange: &pb.RangeRequest{
			Key: c.GetKey(), RangeEnd: c.GetRangeEnd(), CountOnly: true,
		}}}}
		t.Success = append(t.Success, &pb.RequestOp{Request: &pb.RequestOp_RequestTxn{RequestTxn: &pb.TxnRequest{
			Compare: []*pb.Compare{c}, Success: count, Failure: count,
		}}})
	}
	span, _ := rangeapi.Bounds(t)
	got, err := r.single(ctx, span, func(rt *route) *rangeapi.Request {
		return &rangeapi.Request{Range: rt.desc.Range, Generation: rt.desc.Generation, ReadRevision: now.Current, ReadTerm: now.Term, Op: t}
	}, true, nil)
	if err != nil {
		return nil, err
	}
	resp, ok := got.(*pb.TxnResponse)
	if !ok || len(resp.GetResponses()) != len(cs) {
		return nil, kverror.New(kverror.Internal, "a range answered compares with %T", got)
	}
	facts := make([]rangeapi.Fact, len(cs))
	for i := range cs {
		n := resp.GetResponses()[i].GetResponseTxn()
		facts[i].Holds = n.GetSucceeded()
		if len(n.GetResponses()) == 1 {
			facts[i].Found = n.GetResponses()[0].GetResponseRange().GetCount() > 0
		}
		if len(cs[i].GetRangeEnd()) > 0 && !facts[i].Found {
			facts[i].Holds = true // no key, so the compare is not refuted
		}
	}
	return facts, nil
}
