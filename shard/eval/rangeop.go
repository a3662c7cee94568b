package eval

import (
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/rangeapi"
)

// found is one key of a range operation with its revisions, which may still be
// unknown.
type found struct {
	kv          *mvccpb.KeyValue
	mod, create Ref
}

// rangeDraft is the answer of a range operation before the filter, the order and
// the limit are applied.
type rangeDraft struct {
	req  *pb.RangeRequest
	resp *pb.RangeResponse
	kvs  []found
}

// open says whether a revision is unknown on which filter or order depend.
func (d *rangeDraft) open() bool {
	target := d.req.GetSortTarget()
	byRevision := rangeapi.Sorts(d.req) && (target == pb.RangeRequest_MOD || target == pb.RangeRequest_CREATE)
	if !byRevision && !rangeapi.Filtered(d.req) {
		return false
	}
	for i := range d.kvs {
		if _, ok := d.kvs[i].mod.known(); !ok {
			return true
		}
		if _, ok := d.kvs[i].create.known(); !ok {
			return true
		}
	}
	return false
}

// finish fills the response. Every revision that filter and order need is known.
func (d *rangeDraft) finish() {
	kvs := make([]*mvccpb.KeyValue, 0, len(d.kvs))
	for i := range d.kvs {
		f := &d.kvs[i]
		if rev, ok := f.mod.known(); ok {
			f.kv.ModRevision = int64(rev)
		}
		if rev, ok := f.create.known(); ok {
			f.kv.CreateRevision = int64(rev)
		}
		kvs = append(kvs, f.kv)
	}
	rangeapi.Shape(d.req, d.resp, kvs)
}

// collectRange runs a range operation on the view at the revision and returns its
// draft with the count filled in.
func collectRange(w *view, r *pb.RangeRequest, at keyspace.Revision) (*rangeDraft, error) {
	d := &rangeDraft{req: r, resp: &pb.RangeResponse{Header: &pb.ResponseHeader{}}}
	s, ok := keyspace.FromEtcd(r.GetKey(), r.GetRangeEnd())
	if !ok {
		return d, nil
	}
	l, err := w.layer(s, at)
	if err != nil {
		return nil, err
	}
	if r.GetCountOnly() && l.counted {
		d.resp.Count = l.count
		return d, nil
	}
	limit := rangeapi.ScanLimit(r)
	needValues := !r.GetCountOnly() && (!r.GetKeysOnly() || r.GetSortTarget() == pb.RangeRequest_VALUE)
	counted := false
	err = w.scanUnder(l.versions, s, at, !needValues, func(it *item) error {
		if r.GetCountOnly() || limit > 0 && int64(len(d.kvs)) >= limit {
			counted = true
			if l.counted {
				d.resp.Count = l.count
				return ErrStop
			}
			d.resp.Count++
			return nil
		}
		d.resp.Count++
		if err := w.retain(it); err != nil {
			return err
		}
		d.kvs = append(d.kvs, found{kv: it.kv(), mod: it.mod, create: it.create})
		return nil
	})
	if err == nil && counted && !l.counted {
		w.counted(&l, s, d.resp.Count)
	}
	return d, err
}
