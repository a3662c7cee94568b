package judge

import (
	"bytes"
	"cmp"
	"fmt"
	"slices"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/keyspace"
)

// Model is etcd's keyspace at one revision; every answer is compared with it. It is
// written from etcd's documentation and shares no code with the store. A model never
// changes; apply makes the next one.
type Model struct {
	rev  int64
	keys map[string]*mvccpb.KeyValue
	// past holds the models of earlier revisions, for reads at explicit ones; nil if
	// these are not judged.
	past func(rev int64) *Model
}

// NewModel returns an empty keyspace at revision 1.
func NewModel() *Model { return &Model{rev: 1, keys: map[string]*mvccpb.KeyValue{}} }

// apply runs a request at a revision: the one that the change gets, or that of the
// state if nothing changes. It returns etcd's response and the state after it.
func (m *Model) apply(req proto.Message, rev int64) (proto.Message, *Model) {
	resp, next, _ := m.Run(req, rev)
	return resp, next
}

// Run is apply that also returns the watchers' events in their order.
func (m *Model) Run(req proto.Message, rev int64) (resp proto.Message, next *Model, events []Version) {
	t := &modelTxn{base: m, rev: rev, keys: m.keys}
	resp = t.run(req)
	setRevision(resp, rev)
	next = m
	if t.changed {
		next = &Model{rev: rev, keys: t.keys, past: m.past}
	}
	return resp, next, t.events
}

// modelTxn is one request under way.
type modelTxn struct {
	base    *Model
	rev     int64
	keys    map[string]*mvccpb.KeyValue // base's until the first change
	changed bool
	events  []Version
}

func (t *modelTxn) write(key string, kv *mvccpb.KeyValue) {
	if !t.changed {
		next := make(map[string]*mvccpb.KeyValue, len(t.keys)+1)
		for k, v := range t.keys {
			next[k] = v
		}
		t.keys, t.changed = next, true
	}
	if kv == nil {
		delete(t.keys, key)
		t.events = append(t.events, Version{Key: key, Mod: t.rev, Deleted: true})
		return
	}
	t.keys[key] = kv
	t.events = append(t.events, versionOf(kv))
}

func (t *modelTxn) run(req proto.Message) proto.Message {
	switch r := req.(type) {
	case *pb.RangeRequest:
		return t.read(r)
	case *pb.PutRequest:
		return t.put(r)
	case *pb.DeleteRangeRequest:
		return t.remove(r)
	case *pb.TxnRequest:
		return t.txn(r)
	case *pb.CompactionRequest:
		return &pb.CompactionResponse{}
	case *pb.LeaseRevokeRequest:
		return t.end(r)
	}
	panic(fmt.Sprintf("sim: no operation: %T", req))
}

func (t *modelTxn) read(r *pb.RangeRequest) *pb.RangeResponse {
	keys := t.keys
	if at := r.GetRevision(); at > 0 && t.base.past != nil && at < t.rev {
		keys = t.base.past(at).keys
	}
	kvs := inSpan(keys, r.GetKey(), r.GetRangeEnd())
	resp := &pb.RangeResponse{Count: int64(len(kvs))}
	if l := r.GetLimit(); l > 0 && int64(len(kvs)) > l {
		kvs, resp.More = kvs[:l], true
	}
	if r.GetCountOnly() {
		resp.More = false
		return resp
	}
	for _, kv := range kvs {
		if r.GetKeysOnly() {
			kv = proto.CloneOf(kv)
			kv.Value, kv.Lease = nil, 0 // etcd has neither when it keeps keys
		}
		resp.Kvs = append(resp.Kvs, kv)
	}
	return resp
}

func (t *modelTxn) put(r *pb.PutRequest) *pb.PutResponse {
	key := string(r.GetKey())
	kv := &mvccpb.KeyValue{Key: r.GetKey(), Value: r.GetValue(), ModRevision: t.rev, CreateRevision: t.rev, Version: 1, Lease: r.GetLease()}
	resp := &pb.PutResponse{}
	old := t.keys[key]
	if r.GetIgnoreLease() {
		if old == nil {
			return resp // etcd refuses it
		}
		kv.Lease = old.GetLease()
	}
	if old != nil {
		kv.CreateRevision, kv.Version = old.GetCreateRevision(), old.GetVersion()+1
		if r.GetPrevKv() {
			resp.PrevKv = old
		}
	}
	t.write(key, kv)
	return resp
}

// end deletes all keys of a lease.
func (t *modelTxn) end(r *pb.LeaseRevokeRequest) *pb.LeaseRevokeResponse {
	for _, k := range keysOf(&Model{keys: t.keys}, r.GetID()) {
		t.write(k, nil)
	}
	return &pb.LeaseRevokeResponse{}
}

func (t *modelTxn) remove(r *pb.DeleteRangeRequest) *pb.DeleteRangeResponse {
	kvs := inSpan(t.keys, r.GetKey(), r.GetRangeEnd())
	for _, kv := range kvs {
		t.write(string(kv.GetKey()), nil)
	}
	resp := &pb.DeleteRangeResponse{Deleted: int64(len(kvs))}
	if r.GetPrevKv() {
		resp.PrevKvs = kvs
	}
	return resp
}

func (t *modelTxn) txn(r *pb.TxnRequest) *pb.TxnResponse {
	resp := &pb.TxnResponse{Succeeded: true}
	for _, c := range r.GetCompare() {
		resp.Succeeded = resp.Succeeded && t.compare(c)
	}
	ops := r.GetFailure()
	if resp.Succeeded {
		ops = r.GetSuccess()
	}
	for _, op := range ops {
		switch o := op.GetRequest().(type) {
		case *pb.RequestOp_RequestRange:
			resp.Responses = append(resp.Responses, &pb.ResponseOp{Response: &pb.ResponseOp_ResponseRange{ResponseRange: t.read(o.RequestRange)}})
		case *pb.RequestOp_RequestPut:
			resp.Responses = append(resp.Responses, &pb.ResponseOp{Response: &pb.ResponseOp_ResponsePut{ResponsePut: t.put(o.RequestPut)}})
		case *pb.RequestOp_RequestDeleteRange:
			resp.Responses = append(resp.Responses, &pb.ResponseOp{Response: &pb.ResponseOp_ResponseDeleteRange{ResponseDeleteRange: t.remove(o.RequestDeleteRange)}})
		default:
			panic(fmt.Sprintf("sim: no operation: %T", o))
		}
	}
	return resp
}

// compare evaluates one compare of a single key.
func (t *modelTxn) compare(c *pb.Compare) bool {
	kv := t.keys[string(c.GetKey())]
	if kv == nil {
		if c.GetTarget() == pb.Compare_VALUE {
			return false // etcd: no value compares with anything
		}
		kv = &mvccpb.KeyValue{}
	}
	var d int
	switch c.GetTarget() {
	case pb.Compare_VALUE:
		d = bytes.Compare(kv.GetValue(), c.GetValue())
	case pb.Compare_VERSION:
		d = cmp.Compare(kv.GetVersion(), c.GetVersion())
	case pb.Compare_CREATE:
		d = cmp.Compare(kv.GetCreateRevision(), c.GetCreateRevision())
	case pb.Compare_MOD:
		d = cmp.Compare(kv.GetModRevision(), c.GetModRevision())
	default:
		panic(fmt.Sprintf("sim: compare of %v", c.GetTarget()))
	}
	switch c.GetResult() {
	case pb.Compare_EQUAL:
		return d == 0
	case pb.Compare_NOT_EQUAL:
		return d != 0
	case pb.Compare_GREATER:
		return d > 0
	default:
		return d < 0
	}
}

// inSpan returns the keys of etcd's pair (key, range_end) in order.
func inSpan(keys map[string]*mvccpb.KeyValue, key, end []byte) []*mvccpb.KeyValue {
	s, ok := keyspace.FromEtcd(key, end)
	if !ok {
		return nil
	}
	var kvs []*mvccpb.KeyValue
	for k, kv := range keys {
		if s.Contains([]byte(k)) {
			kvs = append(kvs, kv)
		}
	}
	slices.SortFunc(kvs, func(a, b *mvccpb.KeyValue) int { return bytes.Compare(a.GetKey(), b.GetKey()) })
	return kvs
}

func setRevision(m proto.Message, rev int64) {
	h := &pb.ResponseHeader{Revision: rev}
	switch r := m.(type) {
	case *pb.RangeResponse:
		r.Header = h
	case *pb.PutResponse:
		r.Header = h
	case *pb.DeleteRangeResponse:
		r.Header = h
	case *pb.TxnResponse:
		r.Header = h
	case *pb.CompactionResponse:
		r.Header = h
	case *pb.LeaseRevokeResponse:
		r.Header = h
	case *pb.LeaseGrantResponse:
		r.Header = h
	case *pb.LeaseKeepAliveResponse:
		r.Header = h
	case *pb.LeaseTimeToLiveResponse:
		r.Header = h
	}
}

// sameAnswer compares two responses, but not the headers inside transactions or what
// the gateway adds to the outer header beside the revision.
func sameAnswer(a, b proto.Message) bool { return proto.Equal(normal(a), normal(b)) }

func normal(m proto.Message) proto.Message {
	if m == nil {
		return nil
	}
	m = proto.Clone(m)
	setRevision(m, revisionOf(m))
	if t, ok := m.(*pb.TxnResponse); ok {
		for _, o := range t.GetResponses() {
			switch r := o.GetResponse().(type) {
			case *pb.ResponseOp_ResponseRange:
				r.ResponseRange.Header = nil
			case *pb.ResponseOp_ResponsePut:
				r.ResponsePut.Header = nil
			case *pb.ResponseOp_ResponseDeleteRange:
				r.ResponseDeleteRange.Header = nil
			}
		}
	}
	return m
}

// keysOf returns the keys of a lease in order.
func keysOf(m *Model, id int64) (keys []string) {
	for k, kv := range m.keys {
		if kv.GetLease() == id {
			keys = append(keys, k)
		}
	}
	slices.Sort(keys)
	return keys
}
