package router

import (
	"bytes"
	"cmp"
	"context"
	"maps"
	"slices"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/rangeapi"
)

// assembly builds the answer of a transaction whose path and revision are known. Its reads see the
// state before it, under the writes of its own operations so far.
type assembly struct {
	r    *Router
	plan *plan
	// rev is the revision that the answer reports. If changed, it is the transaction's own, and
	// the state before is that of the revision before.
	rev     keyspace.Revision
	changed bool
	// base is where the state before is read, and the reservation for it.
	base readPoint

	number int
	// results are those of the ranges that no operation has taken yet, by the number of their operation, then in key order.
	// There are none if the transaction changes nothing.
	results []writeResult
	// wrote says that an operation so far has changed something.
	wrote bool
	own   ownState
	// reads run in parallel, and sums after all of them.
	reads []func(ctx context.Context) error
	sums  []func()
}

// ownState is what the transaction's operations have done so far.
type ownState struct {
	// keys are the keys that it has put and not deleted since.
	keys map[string]*ownKey
	// deleted are the spans that it has deleted.
	deleted []keyspace.Span
}

type ownKey struct {
	kv *mvccpb.KeyValue
	// lived says that the key was alive before the transaction.
	lived bool
}

// in returns the own keys of a span, in order.
func (o *ownState) in(s keyspace.Span) []*ownKey {
	var l []*ownKey
	for k, v := range o.keys {
		if s.Contains([]byte(k)) {
			l = append(l, v)
		}
	}
	slices.SortFunc(l, func(a, b *ownKey) int { return bytes.Compare(a.kv.GetKey(), b.kv.GetKey()) })
	return l
}

// without returns the parts of a span outside the deleted spans.
func (o *ownState) without(s keyspace.Span) []keyspace.Span {
	left := []keyspace.Span{s}
	for _, d := range o.deleted {
		var next []keyspace.Span
		for _, l := range left {
			if !l.Overlaps(d) {
				next = append(next, l)
				continue
			}
			// There is no key below the smallest one. A request could not name a span that ends
			// there either, because etcd's range_end "\x00" is the end of all keys.
			if bytes.Compare(l.Start, d.Start) < 0 && !bytes.Equal(d.Start, []byte{0}) {
				next = append(next, keyspace.Span{Start: l.Start, End: d.Start})
			}
			if len(d.End) > 0 && (len(l.End) == 0 || bytes.Compare(d.End, l.End) < 0) {
				next = append(next, keyspace.Span{Start: d.End, End: l.End})
			}
		}
		left = next
	}
	return left
}

func (o *ownState) delete(s keyspace.Span) {
	o.deleted = append(o.deleted, s)
	maps.DeleteFunc(o.keys, func(k string, _ *ownKey) bool { return s.Contains([]byte(k)) })
}

func (o *ownState) put(kv *mvccpb.KeyValue, lived bool) {
	if o.keys == nil {
		o.keys = map[string]*ownKey{}
	}
	o.keys[string(kv.GetKey())] = &ownKey{kv, lived}
}

// run builds the answer.
func (a *assembly) run(ctx context.Context, req *pb.TxnRequest) (*pb.TxnResponse, error) {
	resp, _ := a.txn(req, a.plan.path)
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(maxParallelParts)
	for _, read := range a.reads {
		g.Go(func() error { return read(ctx) })
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	for _, sum := range a.sums {
		sum()
	}
	resp.Header = header(a.rev)
	return resp, nil
}

func (a *assembly) txn(t *pb.TxnRequest, left path) (*pb.TxnResponse, path) {
	succeeded, left := left[0], left[1:]
	ops := branch(t, succeeded)
	// etcd leaves the header of a nested answer empty.
	resp := &pb.TxnResponse{Header: &pb.ResponseHeader{}, Succeeded: succeeded, Responses: make([]*pb.ResponseOp, len(ops))}
	for i, op := range ops {
		r := &pb.ResponseOp{}
		resp.Responses[i] = r
		switch o := op.GetRequest().(type) {
		case *pb.RequestOp_RequestRange:
			r.Response = &pb.ResponseOp_ResponseRange{ResponseRange: a.read(o.RequestRange)}
		case *pb.RequestOp_RequestPut:
			r.Response = &pb.ResponseOp_ResponsePut{ResponsePut: a.put(o.RequestPut)}
		case *pb.RequestOp_RequestDeleteRange:
			r.Response = &pb.ResponseOp_ResponseDeleteRange{ResponseDeleteRange: a.remove(o.RequestDeleteRange)}
		case *pb.RequestOp_RequestTxn:
			var n *pb.TxnResponse
			n, left = a.txn(o.RequestTxn, left)
			r.Response = &pb.ResponseOp_ResponseTxn{ResponseTxn: n}
		}
	}
	return resp, left
}

// header returns an operation's header. It reports the transaction's revision once something has
// changed.
func (a *assembly) header() *pb.ResponseHeader {
	if a.changed && !a.wrote {
		return header(a.rev - 1)
	}
	return header(a.rev)
}

// writeResult is a range's result of one operation, and the write that it belongs to.
type writeResult struct {
	*rangeapi.WriteResult
	op proto.Message
	at []byte
}

// resultsOf returns the results of all prepared participants, by the number of their operation, then in key order.
func resultsOf(participants []*participant) (all []writeResult) {
	for _, p := range participants {
		for i := range p.answer.Results {
			all = append(all, writeResult{&p.answer.Results[i], p.op.Writes[i].Op, p.rt.desc.Span.Start})
		}
	}
	slices.SortFunc(all, func(x, y writeResult) int { return cmp.Or(cmp.Compare(x.Number, y.Number), bytes.Compare(x.at, y.at)) })
	return all
}

// take takes the results of the current operation.
func (a *assembly) take() (rs []writeResult) {
	for len(a.results) > 0 && int(a.results[0].Number) <= a.number {
		if int(a.results[0].Number) == a.number {
			rs = append(rs, a.results[0])
		}
		a.results = a.results[1:]
	}
	return rs
}

// known fills in the transaction's own revision.
func (a *assembly) known(kv *mvccpb.KeyValue) *mvccpb.KeyValue {
	if kv.GetModRevision() == 0 {
		kv.ModRevision = int64(a.rev)
	}
	if kv.GetCreateRevision() == 0 {
		kv.CreateRevision = int64(a.rev)
	}
	return kv
}

func (a *assembly) put(p *pb.PutRequest) *pb.PutResponse {
	a.number++
	resp := &pb.PutResponse{}
	for _, r := range a.take() {
		a.wrote = true
		kv := &mvccpb.KeyValue{
			Key: p.GetKey(), Value: p.GetValue(), Version: r.Version, CreateRevision: int64(r.Create), Lease: int64(r.Lease),
		}
		if p.GetIgnoreValue() {
			kv.Value = r.Value
		}
		a.own.put(a.known(kv), r.Lived)
		for _, prev := range r.Prevs {
			resp.PrevKv = a.known(prev)
		}
	}
	resp.Header = a.header()
	return resp
}

func (a *assembly) remove(d *pb.DeleteRangeRequest) *pb.DeleteRangeResponse {
	a.number++
	resp := &pb.DeleteRangeResponse{}
	for _, r := range a.take() {
		resp.Deleted += r.Deleted
		for _, prev := range r.Prevs {
			resp.PrevKvs = append(resp.PrevKvs, a.known(prev))
		}
		a.wrote = a.wrote || r.Deleted > 0 || r.Uncounted
		if !r.Uncounted || d.GetPrevKv() {
			continue
		}
		// Nobody has counted these keys yet.
		o := r.op.(*pb.DeleteRangeRequest)
		count := &pb.RangeResponse{}
		a.overlaid(&pb.RangeRequest{Key: o.GetKey(), RangeEnd: o.GetRangeEnd(), CountOnly: true}, count, func() {})
		a.sums = append(a.sums, func() { resp.Deleted += count.GetCount() })
	}
	if s, ok := keyspace.FromEtcd(d.GetKey(), d.GetRangeEnd()); ok {
		a.own.delete(s)
	}
	resp.Header = a.header()
	return resp
}

func (a *assembly) read(q *pb.RangeRequest) *pb.RangeResponse {
	a.number++
	resp := &pb.RangeResponse{}
	h := a.header()
	done := func() { resp.Header = h }
	s, ok := keyspace.FromEtcd(q.GetKey(), q.GetRangeEnd())
	switch {
	case !ok:
		done()
	case q.GetRevision() > 0:
		a.plain(s, q, resp, done)
	default:
		a.overlaid(q, resp, done)
	}
	return resp
}

// atBase returns the request for the state before the transaction.
func (a *assembly) atBase(q *pb.RangeRequest) *pb.RangeRequest {
	q = proto.CloneOf(q)
	if q.Revision = 0; a.changed {
		q.Revision = int64(a.rev - 1)
	}
	return q
}

// plain reads a span that the transaction itself has not changed.
func (a *assembly) plain(s keyspace.Span, q *pb.RangeRequest, resp *pb.RangeResponse, done func()) {
	a.reads = append(a.reads, func(ctx context.Context) error {
		got, err := a.r.readAt(ctx, s, q, a.base)
		if err != nil {
			return err
		}
		resp.Kvs, resp.Count, resp.More = got.GetKvs(), got.GetCount(), got.GetMore()
		done()
		return nil
	})
}

// overlaid reads a span of the state before, under the transaction's own changes so far.
func (a *assembly) overlaid(q *pb.RangeRequest, resp *pb.RangeResponse, done func()) {
	s, ok := keyspace.FromEtcd(q.GetKey(), q.GetRangeEnd())
	if !ok {
		done()
		return
	}
	own, left := a.own.in(s), a.own.without(s)
	if len(own) == 0 && len(left) == 1 && left[0].Equal(s) {
		a.plain(s, a.atBase(q), resp, done)
		return
	}
	a.reads = append(a.reads, func(ctx context.Context) error {
		defer done()
		return a.merge(ctx, q, own, left, resp)
	})
}

// merge reads the remaining spans of the state before and overlays the transaction's own keys.
func (a *assembly) merge(ctx context.Context, q *pb.RangeRequest, own []*ownKey, left []keyspace.Span, resp *pb.RangeResponse) error {
	scan := a.atBase(q)
	scan.SortTarget, scan.SortOrder = pb.RangeRequest_KEY, pb.RangeRequest_NONE
	scan.MinModRevision, scan.MaxModRevision, scan.MinCreateRevision, scan.MaxCreateRevision = 0, 0, 0, 0
	scan.KeysOnly = q.GetKeysOnly() && q.GetSortTarget() != pb.RangeRequest_VALUE
	if scan.Limit = rangeapi.ScanLimit(q); scan.Limit > 0 {
		scan.Limit += int64(len(own))
	}
	mine := map[string]bool{}
	for _, o := range own {
		mine[string(o.kv.GetKey())] = true
	}
	var kvs []*mvccpb.KeyValue
	resp.Count = 0
	for _, s := range left {
		got, err := a.r.readAt(ctx, s, clip(scan, s), a.base)
		if err != nil {
			return err
		}
		resp.Count += got.GetCount()
		for _, kv := range got.GetKvs() {
			if !mine[string(kv.GetKey())] {
				kvs = append(kvs, kv)
			}
		}
	}
	for _, o := range own {
		inBase := slices.ContainsFunc(left, func(s keyspace.Span) bool { return s.Contains(o.kv.GetKey()) })
		if !o.lived || !inBase {
			resp.Count++
		}
		kvs = append(kvs, proto.CloneOf(o.kv))
	}
	if q.GetCountOnly() {
		return nil
	}
	slices.SortFunc(kvs, func(x, y *mvccpb.KeyValue) int { return bytes.Compare(x.GetKey(), y.GetKey()) })
	if limit := rangeapi.ScanLimit(q); limit > 0 && int64(len(kvs)) > limit {
		kvs = kvs[:limit]
	}
	rangeapi.Shape(q, resp, kvs)
	return nil
}
