package rangeapi

import (
	"bytes"
	"slices"
	"sort"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
)

// plainOrder says whether etcd lets the limit end the scan, because the keys are wanted in scan
// order or in any order.
func plainOrder(r *pb.RangeRequest) bool {
	return r.GetSortOrder() == pb.RangeRequest_NONE ||
		r.GetSortTarget() == pb.RangeRequest_KEY && r.GetSortOrder() == pb.RangeRequest_ASCEND
}

// Filtered says whether the request filters keys by their revisions.
func Filtered(r *pb.RangeRequest) bool {
	return r.GetMinModRevision() != 0 || r.GetMaxModRevision() != 0 ||
		r.GetMinCreateRevision() != 0 || r.GetMaxCreateRevision() != 0
}

// Sorts says whether the answer is sorted after the scan: an order was asked for, or a target other
// than the key, which etcd sorts ascending.
func Sorts(r *pb.RangeRequest) bool {
	return !plainOrder(r) || r.GetSortTarget() != pb.RangeRequest_KEY
}

// Collects says whether all keys are needed before the limit applies.
func Collects(r *pb.RangeRequest) bool {
	// etcd applies the limit to a scan with a sort target and no order, and sorts its result: the
	// smallest keys, sorted by the target.
	return !plainOrder(r) || Filtered(r)
}

// BareKeys says whether etcd answers from its index alone: no values, and the
// lease is 0.
func BareKeys(r *pb.RangeRequest) bool {
	return r.GetKeysOnly() && r.GetSortTarget() != pb.RangeRequest_VALUE
}

// ScanLimit is how many keys a scan has to give before it may stop; 0 is no limit. One key more
// than asked for shows that there are more.
func ScanLimit(r *pb.RangeRequest) int64 {
	if r.GetLimit() <= 0 || Collects(r) {
		return 0
	}
	return r.GetLimit() + 1
}

// Shape applies filter, order and limit to the keys of a range operation as etcd does, and puts the
// result into the response.
func Shape(r *pb.RangeRequest, resp *pb.RangeResponse, kvs []*mvccpb.KeyValue) {
	if Filtered(r) {
		kvs = slices.DeleteFunc(kvs, func(kv *mvccpb.KeyValue) bool { return FilteredOut(r, kv) })
	}
	SortKeys(r, kvs)
	if limit := r.GetLimit(); limit > 0 && int64(len(kvs)) > limit {
		kvs = kvs[:limit]
		resp.More = true
	}
	if r.GetKeysOnly() {
		for _, kv := range kvs {
			kv.Value = nil
			if BareKeys(r) {
				kv.Lease = 0
			}
		}
	}
	resp.Kvs = kvs
}

// FilteredOut says whether the request's revision filters leave the key out.
func FilteredOut(r *pb.RangeRequest, kv *mvccpb.KeyValue) bool {
	return r.GetMaxModRevision() != 0 && kv.GetModRevision() > r.GetMaxModRevision() ||
		r.GetMinModRevision() != 0 && kv.GetModRevision() < r.GetMinModRevision() ||
		r.GetMaxCreateRevision() != 0 && kv.GetCreateRevision() > r.GetMaxCreateRevision() ||
		r.GetMinCreateRevision() != 0 && kv.GetCreateRevision() < r.GetMinCreateRevision()
}

// SortKeys sorts the keys of a range operation, given in key order, as the request asks. Equal keys
// end up where etcd's own sort, which is not stable, leaves them.
func SortKeys(r *pb.RangeRequest, kvs []*mvccpb.KeyValue) {
	if !Sorts(r) {
		return
	}
	order := keyOrder{kvs: kvs, by: lessFunc(r.GetSortTarget())}
	if r.GetSortOrder() == pb.RangeRequest_DESCEND {
		sort.Sort(sort.Reverse(order))
		return
	}
	sort.Sort(order)
}

// keyOrder sorts keys by sort.Interface, because etcd does: clients can see where its algorithm
// leaves equal keys.
type keyOrder struct {
	kvs []*mvccpb.KeyValue
	by  func(a, b *mvccpb.KeyValue) bool
}

func (o keyOrder) Len() int { return len(o.kvs) }

func (o keyOrder) Swap(i, j int) { o.kvs[i], o.kvs[j] = o.kvs[j], o.kvs[i] }

func (o keyOrder) Less(i, j int) bool { return o.by(o.kvs[i], o.kvs[j]) }

func lessFunc(target pb.RangeRequest_SortTarget) func(a, b *mvccpb.KeyValue) bool {
	switch target {
	case pb.RangeRequest_VERSION:
		return func(a, b *mvccpb.KeyValue) bool { return a.GetVersion() < b.GetVersion() }
	case pb.RangeRequest_CREATE:
		return func(a, b *mvccpb.KeyValue) bool { return a.GetCreateRevision() < b.GetCreateRevision() }
	case pb.RangeRequest_MOD:
		return func(a, b *mvccpb.KeyValue) bool { return a.GetModRevision() < b.GetModRevision() }
	case pb.RangeRequest_VALUE:
		return func(a, b *mvccpb.KeyValue) bool { return bytes.Compare(a.GetValue(), b.GetValue()) < 0 }
	default:
		return func(a, b *mvccpb.KeyValue) bool { return bytes.Compare(a.GetKey(), b.GetKey()) < 0 }
	}
}
