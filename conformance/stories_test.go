package conformance

import (
	"math"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"
)

// Calls that were once answered otherwise than by etcd, by themselves: a change of a
// generator changes what a seed means, but not these. They run in this order on one
// store, which begins empty; split stands for a split of the keyspace at the key.
func TestStories(t *testing.T) {
	p := newPair(t, 1)
	for _, s := range stories {
		t.Run(s.name, func(t *testing.T) {
			for i, op := range s.calls {
				if key, ok := op.(split); ok {
					p.splits.split([]byte(key))
					if err := p.splits.wait(); err != nil {
						t.Fatal(err)
					}
					continue
				}
				c := &call{}
				if r, ok := op.(stream); ok {
					c.kind, c.request = kindNamed(t, "RangeStream"), r.RangeRequest
				} else {
					c.kind, c.request = kindOf(t, op.(proto.Message)), op.(proto.Message)
				}
				if err := p.step(t.Context(), c, i%skeinNodes); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

type split string

// stream is a read that is streamed.
type stream struct{ *pb.RangeRequest }

// kindOf returns the kind that makes such requests.
func kindOf(t *testing.T, m proto.Message) *kind {
	t.Helper()
	names := map[string]string{
		"RangeRequest": "Range", "PutRequest": "Put", "DeleteRangeRequest": "DeleteRange", "TxnRequest": "Txn", "CompactionRequest": "Compact",
	}
	return kindNamed(t, names[string(m.ProtoReflect().Descriptor().Name())])
}

func kindNamed(t *testing.T, name string) *kind {
	t.Helper()
	for _, k := range kinds {
		if k.name == name {
			return k
		}
	}
	t.Fatalf("no kind has the name %q", name)
	return nil
}

func get(key, end string) *pb.RangeRequest {
	return &pb.RangeRequest{Key: []byte(key), RangeEnd: []byte(end)}
}

func at(rev int64, r *pb.RangeRequest) *pb.RangeRequest { r.Revision = rev; return r }

func sorted(r *pb.RangeRequest, by pb.RangeRequest_SortTarget, order pb.RangeRequest_SortOrder, limit int64) *pb.RangeRequest {
	r.SortTarget, r.SortOrder, r.Limit = by, order, limit
	return r
}

func put(key, value string) *pb.PutRequest {
	return &pb.PutRequest{Key: []byte(key), Value: []byte(value)}
}

func del(key, end string) *pb.DeleteRangeRequest {
	return &pb.DeleteRangeRequest{Key: []byte(key), RangeEnd: []byte(end)}
}

// then returns a transaction without a condition.
func then(ops ...proto.Message) *pb.TxnRequest {
	t := &pb.TxnRequest{}
	for _, op := range ops {
		r := &pb.RequestOp{}
		switch o := op.(type) {
		case *pb.RangeRequest:
			r.Request = &pb.RequestOp_RequestRange{RequestRange: o}
		case *pb.PutRequest:
			r.Request = &pb.RequestOp_RequestPut{RequestPut: o}
		case *pb.DeleteRangeRequest:
			r.Request = &pb.RequestOp_RequestDeleteRange{RequestDeleteRange: o}
		case *pb.TxnRequest:
			r.Request = &pb.RequestOp_RequestTxn{RequestTxn: o}
		}
		t.Success = append(t.Success, r)
	}
	return t
}

func compact(rev int64) *pb.CompactionRequest { return &pb.CompactionRequest{Revision: rev} }

// fromKey as a range_end means all keys from the key on.
const fromKey = "\x00"

// several returns puts of n keys that share few values, with other versions.
func several(prefix string, n int) (calls []any) {
	for i := range n {
		k := prefix + string(rune('a'+i*7%n))
		calls = append(calls, put(k, string(rune('x'+i%3))))
		if i%4 == 0 {
			calls = append(calls, put(k, "x"))
		}
	}
	return calls
}

var stories = []struct {
	name  string
	calls []any
}{
	{"a transaction at -1, before and behind a compaction at 0", []any{
		then(at(-1, get("a", "")), put("a", "1")), then(at(-1, get("a", ""))), then(at(-2, get("a", ""))),
		compact(-1), compact(0), compact(0),
		then(at(-1, get("a", "")), put("a", "1")), then(at(-1, get("a", ""))), at(-1, get("a", "")),
	}},
	{"a transaction without keys holds another", []any{
		then(), then(then()), then(then(), then(then())), then(then(&pb.TxnRequest{Failure: then(put("a", "")).Success})),
	}},
	{"a put beside a delete from its key on", []any{
		put("k1", "1"), put("k2", "1"), then(del("k1", fromKey), put("k1", "2")), get("\x00", fromKey),
		then(put("k3", "1"), del("k3", fromKey)), &pb.RangeRequest{Key: []byte{0}, RangeEnd: []byte{0}, CountOnly: true},
		then(del("k1", "k2"), put("k1", "2")), then(then(put("k1", "2")), then(del("k1", ""))),
		&pb.RangeRequest{Key: []byte{0}, RangeEnd: []byte{0}, CountOnly: true},
	}},
	{"keys that compare equal", append(append(append(several("m/", 20), split("m/k")), several("n/", 20)...),
		sorted(get("m/", "m0"), pb.RangeRequest_VERSION, pb.RangeRequest_ASCEND, 0),
		sorted(get("m/", "n0"), pb.RangeRequest_VERSION, pb.RangeRequest_DESCEND, 7),
		sorted(get("n/", "n0"), pb.RangeRequest_VALUE, pb.RangeRequest_DESCEND, 0),
		sorted(get("m/", "n0"), pb.RangeRequest_VALUE, pb.RangeRequest_ASCEND, 15),
		sorted(get("m/", "n0"), pb.RangeRequest_VERSION, pb.RangeRequest_NONE, 25),
		sorted(get("m/", "n0"), pb.RangeRequest_KEY, pb.RangeRequest_DESCEND, math.MaxInt64),
	)},
	{"streams over several ranges", []any{
		split("n/d"), split("n/k"),
		stream{get("m/", "n0")},
		stream{at(20, get("m/", "n0"))},
		stream{get("m/a", "")},
		stream{get("m/", fromKey)},
		stream{get("z", "a")},
		stream{sorted(get("m/", "n0"), pb.RangeRequest_KEY, pb.RangeRequest_ASCEND, 25)},
		stream{sorted(get("m/", "n0"), pb.RangeRequest_KEY, pb.RangeRequest_NONE, 40)},
		stream{sorted(get("m/", "n0"), pb.RangeRequest_KEY, pb.RangeRequest_NONE, -3)},
		stream{&pb.RangeRequest{Key: []byte("m/"), RangeEnd: []byte("n0"), KeysOnly: true, Limit: 1}},
		stream{&pb.RangeRequest{Key: []byte("m/"), RangeEnd: []byte("n0"), CountOnly: true, Limit: 1}},
		stream{sorted(get("m/", "n0"), pb.RangeRequest_KEY, pb.RangeRequest_DESCEND, 0)},
		stream{&pb.RangeRequest{Key: []byte("m/"), RangeEnd: []byte("n0"), MinModRevision: 3}},
		stream{at(1<<40, get("m/", "n0"))},
		stream{get("", "n0")},
	}},
	{"streams with a target and no order", []any{
		stream{sorted(get("m/", "n0"), pb.RangeRequest_VALUE, pb.RangeRequest_NONE, 0)},
		stream{sorted(get("m/", "n0"), pb.RangeRequest_VALUE, pb.RangeRequest_NONE, 25)},
		stream{sorted(get("m/", "n/q\x00"), pb.RangeRequest_VERSION, pb.RangeRequest_NONE, 0)},
		stream{sorted(get("m/", fromKey), pb.RangeRequest_MOD, pb.RangeRequest_NONE, -1)},
	}},
	{"all keys are read behind a delete of the smallest", []any{
		put("\x00", "1"), put("\x00a", "1"), put("z", "1"),
		then(del("\x00", "\x01"), get("\x00", fromKey)),
		put("\x00", "2"), then(del("\x00", ""), sorted(get("\x00", fromKey), pb.RangeRequest_MOD, pb.RangeRequest_DESCEND, 0)),
		then(put("\x00", "3"), del("m/a", ""), get("\x00", fromKey)), then(del("\x00", fromKey), get("\x00", fromKey)),
	}},
	{"keys by values that are not wanted", []any{
		&pb.RangeRequest{Key: []byte("m/"), RangeEnd: []byte("n0"), KeysOnly: true, SortTarget: pb.RangeRequest_VALUE, SortOrder: pb.RangeRequest_DESCEND},
		&pb.RangeRequest{Key: []byte("m/"), RangeEnd: []byte("n0"), KeysOnly: true, SortTarget: pb.RangeRequest_VALUE, Limit: 22},
	}},
}
