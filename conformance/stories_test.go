package conformance

import (
	"context"
	"math"
	"strings"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"
)

// Calls that were once answered differently from etcd. They stand here literally,
// because a change of a generator changes what a seed means. They run in this order on
// one store, which begins empty. split stands for a split of the keyspace at the key.
func TestStories(t *testing.T) {
	t.Parallel()
	p := newPair(t, 1)
	for _, s := range stories {
		t.Run(s.name, func(t *testing.T) {
			for i, op := range s.calls {
				switch o := op.(type) {
				case split:
					p.splits.split([]byte(o))
					if err := p.splits.wait(); err != nil {
						t.Fatal(err)
					}
					continue
				case expires:
					if err := p.awaitExpiry(t.Context(), int64(o)); err != nil {
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

// expires stands for the end of a lease, which the test awaits at both stores.
type expires int64

// awaitExpiry asks both stores for the lease until it has expired.
func (p *pair) awaitExpiry(ctx context.Context, id int64) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	return each(2, func(i int) error {
		client := pb.NewLeaseClient([]*store{p.etcd, p.skein}[i].conns[0])
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		for {
			left, err := client.LeaseTimeToLive(ctx, &pb.LeaseTimeToLiveRequest{ID: id})
			if err != nil || left.GetTTL() == -1 && left.GetGrantedTTL() == 0 {
				return err
			}
			<-tick.C // the next question ends with ctx
		}
	})
}

// stream is a read that is streamed.
type stream struct{ *pb.RangeRequest }

// kindOf returns the kind of such requests.
func kindOf(t *testing.T, m proto.Message) *kind {
	t.Helper()
	name := string(m.ProtoReflect().Descriptor().Name())
	if name == "CompactionRequest" {
		return kindNamed(t, "Compact")
	}
	return kindNamed(t, strings.TrimSuffix(name, "Request"))
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

func grant(id, ttl int64) *pb.LeaseGrantRequest { return &pb.LeaseGrantRequest{ID: id, TTL: ttl} }

func revoke(id int64) *pb.LeaseRevokeRequest { return &pb.LeaseRevokeRequest{ID: id} }

func keep(id int64) *pb.LeaseKeepAliveRequest { return &pb.LeaseKeepAliveRequest{ID: id} }

func left(id int64) *pb.LeaseTimeToLiveRequest { return &pb.LeaseTimeToLiveRequest{ID: id, Keys: true} }

func leased(id int64, p *pb.PutRequest) *pb.PutRequest { p.Lease = id; return p }

func keepsLease(p *pb.PutRequest) *pb.PutRequest { p.IgnoreLease = true; return p }

func compact(rev int64) *pb.CompactionRequest { return &pb.CompactionRequest{Revision: rev} }

// fromKey as a range_end means all keys from the key on.
const fromKey = "\x00"

// several returns puts of n keys that share few values, with different versions.
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
	{"leases that are short, long, there already, or not at all", []any{
		grant(21, -1), grant(22, 0), grant(23, 1), grant(24, math.MinInt64), revoke(21), revoke(22), revoke(23), revoke(24),
		grant(21, 9_000_000_000), grant(21, 9_000_000_001), grant(21, 5), grant(-21, 3600), grant(math.MinInt64, 3600),
		keep(21), keep(22), keep(0), keep(-1), left(0), left(22), left(-21), &pb.LeaseTimeToLiveRequest{ID: 21},
		revoke(0), revoke(22), revoke(-21), revoke(-21), keep(-21), left(-21), grant(-21, 60),
		&pb.LeaseLeasesRequest{}, revoke(21), revoke(-21), revoke(math.MinInt64), &pb.LeaseLeasesRequest{},
	}},
	{"keys that come to a lease, change it and leave it", []any{
		grant(31, 3600), grant(-32, 36_000), split("l/k"),
		leased(31, put("l/a", "1")), leased(31, put("l/z", "1")), leased(31, put("l/a", "2")), leased(-32, put("l/b", "1")), left(31), left(-32),
		leased(-32, put("l/a", "3")), left(31), left(-32), keepsLease(put("l/a", "4")), put("l/z", "2"), left(31), left(-32),
		keepsLease(put("l/y", "1")), leased(33, put("l/y", "1")), leased(33, keepsLease(put("l/a", "1"))),
		then(leased(31, put("l/c", "1")), leased(-32, put("l/q", "1"))), then(leased(31, put("l/d", "1")), leased(33, put("l/r", "1"))),
		then(del("l/c", ""), leased(31, put("l/r", "1"))), left(31), del("l/q", ""), left(-32),
		split("l/b"), revoke(-32), get("l/", "l0"), revoke(-32), leased(-32, put("l/a", "5")), left(31),
		grant(-32, 60), left(-32), leased(-32, put("l/a", "6")), left(-32), revoke(31), revoke(-32), get("l/", "l0"), get("l/z", ""),
	}},
	{"a lease that nobody renews", []any{
		split("x/k"), grant(41, 1), grant(42, 3600), leased(41, put("x/a", "1")), leased(42, put("x/b", "1")), leased(41, put("x/z", "1")), keep(41),
		expires(41), get("x/", "x0"), keep(41), left(41), revoke(41), leased(41, put("x/a", "2")), left(42), &pb.LeaseLeasesRequest{},
		at(2, get("x/", "x0")), grant(41, 3600), left(41), leased(41, put("x/a", "3")), revoke(42), revoke(41), get("x/", "x0"),
	}},
	{"keys by values that are not wanted", []any{
		&pb.RangeRequest{Key: []byte("m/"), RangeEnd: []byte("n0"), KeysOnly: true, SortTarget: pb.RangeRequest_VALUE, SortOrder: pb.RangeRequest_DESCEND},
		&pb.RangeRequest{Key: []byte("m/"), RangeEnd: []byte("n0"), KeysOnly: true, SortTarget: pb.RangeRequest_VALUE, Limit: 22},
	}},
}
