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
)

// memStore is an applied state in which each key has its newest version only. It counts
// the lookups.
type memStore struct {
	versions []mvcc.Version
	gets     int
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
	limit  ReadLimit
	budget Budget
	in     Input
}

func newWorld() *world {
	w := &world{limit: ReadLimit{OneBytes: 1 << 20, AllBytes: 1 << 20}}
	w.store.versions = []mvcc.Version{
		{Key: []byte("a"), Mod: 5, Create: 5, Version: 1, Value: []byte("va")},
		{Key: []byte("b"), Mod: 6, Create: 4, Version: 2, Lease: 7, Value: []byte("vb")},
	}
	w.budget = w.limit.Budget()
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
