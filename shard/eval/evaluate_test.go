package eval

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/shard/command"
)

// memStore is an applied state in which each key has its newest version only. It counts
// the lookups, and the keys that scans visit.
type memStore struct {
	versions []mvcc.Version
	gets     int
	visited  int // by scans
}

func (s *memStore) Get(key []byte, _ keyspace.Revision) (mvcc.Version, bool, error) {
	s.gets++
	for _, v := range s.versions {
		if bytes.Equal(v.Key, key) {
			return v, true, nil
		}
	}
	return mvcc.Version{}, false, nil
}

func (s *memStore) Scan(span keyspace.Span, _ keyspace.Revision, _ bool, fn func(v *mvcc.Version) error) error {
	for _, v := range s.versions {
		if span.Contains(v.Key) {
			s.visited++
			if err := fn(&v); err != nil {
				return err
			}
		}
	}
	return nil
}

func (s *memStore) Attached(lease keyspace.LeaseID, span keyspace.Span, fn func(key []byte) error) error {
	return s.Scan(span, Newest, true, func(v *mvcc.Version) error {
		if v.Lease != lease {
			return nil
		}
		return fn(v.Key)
	})
}

// attachable are the leases to which keys may be attached.
type attachable []keyspace.LeaseID

func (a attachable) Attachable(lease keyspace.LeaseID) bool { return slices.Contains(a, lease) }

// world is what a leader has: the keys a, at revision 5, and b, at 6 with lease 7, are applied.
// The floor is 8, and the range has heard of 8.
type world struct {
	store  memStore
	guard  sync.Mutex
	limit  *ReadLimit
	budget Budget
	in     Input
}

func newWorld() *world {
	w := &world{limit: NewReadLimit(1<<20, 1<<20)}
	w.store.versions = []mvcc.Version{
		{Key: []byte("a"), Mod: 5, Create: 5, Version: 1, Value: []byte("va")},
		{Key: []byte("b"), Mod: 6, Create: 4, Version: 2, Lease: 7, Value: []byte("vb")},
	}
	w.budget = w.limit.AtOnce()
	cache := NewVersionCache(1 << 20)
	epochs := NewKeyEpochs(cache)
	w.in = Input{
		Store: &w.store, Base: Newest, Overlay: NewOverlay(), Guard: &w.guard, Cache: cache, Epochs: &epochs,
		Leases: attachable{7}, Lacks: 9, Floor: 8, Current: 8, Compacted: 3, MaxWriteBytes: 1 << 10, Budget: &w.budget,
	}
	return w
}

// run evaluates a request and says what becomes of it.
func (w *world) run(op proto.Message) string {
	var e Evaluation
	e.Reset(w.in)
	err := e.Run(op)
	var s []string
	for _, v := range e.Writes() {
		if v.Tombstone {
			s = append(s, fmt.Sprintf("-%s", v.Key))
		} else {
			s = append(s, fmt.Sprintf("%s=%.7s/%d", v.Key, v.value, v.version))
		}
	}
	if e.Seen() != nil {
		s = append(s, fmt.Sprintf("saw batch %d", e.Seen().Order()))
	}
	var wait WaitError
	var future FutureError
	var lease NeedsLease
	var refused Refusal
	switch {
	case errors.As(err, &wait):
		s = append(s, "waits")
	case errors.As(err, &future):
		s = append(s, fmt.Sprintf("future %d", future.Revision))
	case errors.As(err, &lease):
		s = append(s, fmt.Sprintf("needs lease %d", lease.Lease))
	case errors.As(err, &refused):
		s = append(s, "held back: "+kverror.Of(refused.Err).Kind.Error())
	case err != nil:
		s = append(s, "refused: "+kverror.Of(err).Kind.Error())
	}
	return strings.Join(s, ", ")
}

// pend puts a version on the overlay that batch 3 brings.
func (w *world) pend(v *PendingVersion) {
	b := NewBatch(3, nil)
	v.Txn = &PendingTxn{Batch: &b, Floor: 7}
	v.create = Ref{txn: v.Txn}
	w.in.Overlay.Add(v)
}

func put(key string, more ...func(*pb.PutRequest)) *pb.PutRequest {
	p := &pb.PutRequest{Key: []byte(key), Value: []byte("new")}
	for _, f := range more {
		f(p)
	}
	return p
}

func ifMod(key string, result pb.Compare_CompareResult, rev int64) *pb.TxnRequest {
	return &pb.TxnRequest{
		Compare: []*pb.Compare{{Key: []byte(key), Target: pb.Compare_MOD, Result: result, TargetUnion: &pb.Compare_ModRevision{ModRevision: rev}}},
		Success: []*pb.RequestOp{{Request: &pb.RequestOp_RequestPut{RequestPut: put("yes")}}},
		Failure: []*pb.RequestOp{{Request: &pb.RequestOp_RequestPut{RequestPut: put("no")}}},
	}
}

func readAt(rev int64) *pb.TxnRequest {
	r := &pb.RangeRequest{Key: []byte("a"), Revision: rev}
	return &pb.TxnRequest{Success: []*pb.RequestOp{{Request: &pb.RequestOp_RequestRange{RequestRange: r}}}}
}

// TestEvaluate: what a request does follows from its input alone. c is pending with an
// unknown revision above 7, b is deleted by the same batch.
func TestEvaluate(t *testing.T) {
	lease := func(id int64) func(*pb.PutRequest) { return func(p *pb.PutRequest) { p.Lease = id } }
	ignore := func(p *pb.PutRequest) { p.IgnoreValue, p.Value = true, nil }
	for _, c := range []struct {
		name string
		op   proto.Message
		want string
	}{
		{"a new key", put("x"), "x=new/1"},
		{"an applied key", put("a"), "a=new/2"},
		{"a pending key", put("c"), "c=new/5, saw batch 3"},
		{"a key that is about to go", put("b"), "b=new/1, saw batch 3"},
		{"the value of a pending key", put("c", ignore), "c=pending/5, saw batch 3"},
		{"the value of no key", put("x", ignore), "held back: key not found"},
		{"a lease that is there", put("x", lease(7)), "x=new/1"},
		{"a lease of which nobody knows", put("x", lease(8)), "needs lease 8"},
		{"a lease that is not there", put("x", lease(9)), "refused: lease not found"},
		{"too much", put("x", func(p *pb.PutRequest) { p.Value = bytes.Repeat([]byte("v"), 2<<10) }), "x=vvvvvvv/1, refused: request too large"},
		{"a delete of a span", &pb.DeleteRangeRequest{Key: []byte("a"), RangeEnd: []byte("z")}, "-a, -c, saw batch 3"},
		{"a delete of nothing", &pb.DeleteRangeRequest{Key: []byte("b")}, "saw batch 3"},
		{"S4: a number at the floor", ifMod("c", pb.Compare_GREATER, 7), "yes=new/1, saw batch 3"},
		{"S4: a number above the floor", ifMod("c", pb.Compare_GREATER, 8), "saw batch 3, waits"},
		{"a compare with what is applied", ifMod("a", pb.Compare_EQUAL, 4), "no=new/1"},
		{"an explicit revision", readAt(8), ""},
		{"one that the range has not heard of", readAt(9), "future 9"},
		{"one that is compacted", readAt(2), "held back: compacted"},
	} {
		w := newWorld()
		w.pend(&PendingVersion{Key: []byte("c"), value: []byte("pending"), version: 4})
		w.pend(&PendingVersion{Key: []byte("b"), Tombstone: true, Lived: true})
		if got := w.run(c.op); got != c.want {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
}

// TestEvaluateByTheCache: a key that the version cache knows costs no lookup.
func TestEvaluateByTheCache(t *testing.T) {
	w := newWorld()
	w.in.Cache.Put(w.in.Epochs.Of([]byte("a")), []byte("a"), CachedVersion{Alive: true, Version: 1, Mod: 5, Create: 5, Value: []byte("va")})
	w.in.Cache.Put(w.in.Epochs.Of([]byte("x")), []byte("x"), CachedVersion{})
	for _, key := range []string{"a", "x"} {
		if w.run(put(key)); w.store.gets != 0 {
			t.Errorf("%s was looked up", key)
		}
	}
	w.in.Epochs.End(w.in.Cache)
	if w.run(put("a")); w.store.gets != 1 {
		t.Errorf("%d lookups in a new epoch", w.store.gets)
	}
}

// TestSettle: the answer's revisions are filled in when they are known, its own and those of
// what it saw.
func TestSettle(t *testing.T) {
	w := newWorld()
	v := &PendingVersion{Key: []byte("c"), value: []byte("pending"), version: 1}
	w.pend(v)
	var e Evaluation
	e.Reset(w.in)
	if err := e.Run(put("c", func(p *pb.PutRequest) { p.PrevKv = true })); err != nil {
		t.Fatal(err)
	}
	v.Txn.SetRevision(9)
	e.Txn().SetRevision(10)
	d := e.Draft()
	d.Settle(10, true)
	resp, ok := d.Op.(*pb.PutResponse)
	if !ok || resp.GetHeader().GetRevision() != 10 || resp.GetPrevKv().GetModRevision() != 9 || resp.GetPrevKv().GetCreateRevision() != 9 {
		t.Errorf("%v", d.Op)
	}
	if s := e.Writes()[0].Stored(0); s.Mod != 10 || s.Create != 9 || s.Version != 2 {
		t.Errorf("stored %+v", s)
	}
}

// TestCountInTxn: a range operation of a transaction knows how many keys the whole range has. It
// looks at no more of them than it returns, whatever is pending or was done by the operations
// before it.
func TestCountInTxn(t *testing.T) {
	get := func(limit int64, more ...func(*pb.RangeRequest)) *pb.RequestOp {
		r := &pb.RangeRequest{Key: []byte{0}, RangeEnd: []byte{0}, Limit: limit}
		for _, f := range more {
			f(r)
		}
		return &pb.RequestOp{Request: &pb.RequestOp_RequestRange{RequestRange: r}}
	}
	countOnly := func(r *pb.RangeRequest) { r.CountOnly = true }
	puts := func(key string) *pb.RequestOp {
		return &pb.RequestOp{Request: &pb.RequestOp_RequestPut{RequestPut: put(key)}}
	}
	del := func(key, end string) *pb.RequestOp {
		return &pb.RequestOp{Request: &pb.RequestOp_RequestDeleteRange{RequestDeleteRange: &pb.DeleteRangeRequest{Key: []byte(key), RangeEnd: []byte(end)}}}
	}
	for _, c := range []struct {
		name    string
		ops     []*pb.RequestOp
		counted bool
		visited int
	}{
		{"a page", []*pb.RequestOp{get(1)}, true, 3},
		{"a page of a range that is not counted", []*pb.RequestOp{get(1)}, false, 1000},
		{"the count alone", []*pb.RequestOp{get(0, countOnly)}, true, 0},
		{"all keys", []*pb.RequestOp{get(0)}, true, 1000},
		{"behind a put of a new key", []*pb.RequestOp{puts("k0500x"), get(1)}, true, 3},
		{"behind a put of a key that is there", []*pb.RequestOp{puts("k0500"), get(2)}, true, 4},
		{"behind two puts", []*pb.RequestOp{puts("x1"), puts("x2"), get(1)}, true, 3},
		{"behind a delete", []*pb.RequestOp{del("k0000", ""), get(1)}, true, 4},
		{"behind a delete of what was put", []*pb.RequestOp{puts("x"), del("x", ""), get(1)}, true, 3},
		{"behind a delete of what is pending", []*pb.RequestOp{del("new", ""), get(1)}, true, 3},
		{"behind a put of what is about to go", []*pb.RequestOp{puts("k0007"), get(1)}, true, 3},
	} {
		run := func(counted bool) (*pb.RangeResponse, int) {
			w := newWorld()
			w.store.versions = nil
			for i := range 1000 {
				w.store.versions = append(w.store.versions, mvcc.Version{Key: fmt.Appendf(nil, "k%04d", i), Mod: 3, Create: 3, Version: 1, Value: []byte("v")})
			}
			w.in.MaxWriteBytes = 1 << 20
			w.in.Record = &command.Record{Counted: counted, Live: 1000}
			for _, v := range []*PendingVersion{
				{Key: []byte("new"), version: 1},
				{Key: []byte("k0003"), version: 2, Lived: true},
				{Key: []byte("k0007"), Tombstone: true, Lived: true},
				{Key: []byte("k0009"), Tombstone: true, Lived: true},
				{Key: []byte("k0009"), version: 1},
			} {
				w.pend(v)
				v.Txn.SetRevision(8)
			}
			var e Evaluation
			e.Reset(w.in)
			if err := e.Run(&pb.TxnRequest{Success: append(c.ops, puts("last"))}); err != nil {
				t.Fatalf("%s: %v", c.name, err)
			}
			e.Txn().SetRevision(10)
			d := e.Draft()
			d.Settle(10, true)
			resp := d.Op.(*pb.TxnResponse).Responses //nolint:forcetypeassert // it is one
			return resp[len(c.ops)-1].GetResponseRange(), w.store.visited
		}
		got, visited := run(c.counted)
		want, _ := run(false)
		if !proto.Equal(got, want) {
			t.Errorf("%s: count %d, more %t; a scan says %d, %t", c.name, got.GetCount(), got.GetMore(), want.GetCount(), want.GetMore())
		}
		if visited > c.visited+1 || visited < c.visited {
			t.Errorf("%s: %d keys were visited, want %d", c.name, visited, c.visited)
		}
	}
}
