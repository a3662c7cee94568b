package pipeline

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/shard/eval"
)

// TestCountsOfSpans: transactions look again and again at the first key of a span and at how many
// follow. The count is that of a scan, also when writes are pending, applied, discarded or lost
// meanwhile. Most looks do not scan.
func TestCountsOfSpans(t *testing.T) {
	// What may happen during a scan.
	meanwhile := []func(*world){
		func(w *world) { w.apply(true) },
		func(w *world) {
			e := w.log[len(w.log)-1]
			w.log = w.log[:len(w.log)-1]
			e.dropped(raftgroup.ErrDropped)
		},
		func(w *world) {
			w.lose()
			w.apply(true)
		},
	}
	known, looks := 0, 0
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 1))
		w := newWorld(t)
		for i := range 200 {
			key := fmt.Sprintf("k%03d", i)
			w.store[key] = mvcc.Version{Key: []byte(key), Mod: 1, Create: 1, Version: 1}
		}
		w.rec.Live = 200
		term := w.p.Term()
		key := func() []byte { return fmt.Appendf(nil, "%c%03d", 'j'+rune(rng.IntN(3)), rng.IntN(250)) }
		op := func() *pb.RequestOp {
			if rng.IntN(2) == 0 {
				return &pb.RequestOp{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: key()}}}
			}
			k := key()
			r := &pb.DeleteRangeRequest{Key: k}
			if rng.IntN(3) == 0 {
				r.RangeEnd = append(slices.Clone(k[:3]), 0xff)
			}
			return &pb.RequestOp{Request: &pb.RequestOp_RequestDeleteRange{RequestDeleteRange: r}}
		}
		spans := [][2]string{{"k", "l"}, {"k1", "k2"}, {"j", "l"}, {"\x00", "\x00"}}
		for range 400 {
			switch n := rng.IntN(20); {
			case !w.p.Leads():
				for len(w.log) > 0 && rng.IntN(2) == 0 {
					w.apply(true)
				}
				w.log = nil
				term += 2
				w.become(term)
			case n < 8:
				s := spans[rng.IntN(len(spans))]
				look := &pb.RequestOp{Request: &pb.RequestOp_RequestRange{RequestRange: &pb.RangeRequest{
					Key: []byte(s[0]), RangeEnd: []byte(s[1]), Limit: int64(rng.IntN(3)), CountOnly: rng.IntN(3) == 0,
				}}}
				first, last := op(), op()
				if rng.IntN(3) == 0 {
					k := key()
					first = &pb.RequestOp{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: k}}}
					last = &pb.RequestOp{Request: &pb.RequestOp_RequestDeleteRange{RequestDeleteRange: &pb.DeleteRangeRequest{Key: k}}}
				}
				txn := &pb.TxnRequest{Success: []*pb.RequestOp{first, look, last}}
				w.pass()
				want := w.scanned(txn)
				visited, disturbed := 0, false
				disturb := rng.IntN(4) == 0
				w.visit = func() {
					if visited++; disturb && visited == 30 && len(w.log) > 0 {
						disturbed = true
						meanwhile[rng.IntN(len(meanwhile))](w)
					}
				}
				c := w.send(txn)
				w.pass()
				w.visit = nil
				if disturbed || c.place != placeBatch {
					continue
				}
				if got := countIn(c.draft.Op); got != want {
					t.Fatalf("seed %d: %d keys in [%q, %q), a scan says %d", seed, got, s[0], s[1], want)
				}
				if looks++; want > 100 && visited < 50 {
					known++
				}
			case n < 12:
				w.send(&pb.TxnRequest{Success: []*pb.RequestOp{op()}})
				w.pass()
			case n < 15 && len(w.asks) > 0:
				var err error
				if rng.IntN(8) == 0 {
					err = errors.New("no majority")
				}
				w.settle(err)
			case n < 18 && len(w.log) > 0:
				w.apply(true)
			case n == 18 && len(w.log) > 0 && rng.IntN(4) == 0:
				e := w.log[len(w.log)-1]
				w.log = w.log[:len(w.log)-1]
				e.dropped(raftgroup.ErrDropped)
			case n == 19 && rng.IntN(4) == 0:
				w.lose()
			}
		}
	}
	if t.Logf("%d of %d counts were known", known, looks); known < looks/3 {
		t.Errorf("only %d of %d counts were known", known, looks)
	}
}

func countIn(op proto.Message) int64 {
	return op.(*pb.TxnResponse).Responses[1].GetResponseRange().GetCount() //nolint:forcetypeassert // it is one
}

// scanned is the count that the transaction would get now by a scan.
func (w *world) scanned(txn *pb.TxnRequest) int64 {
	w.t.Helper()
	pass := &Pass{}
	in := w.Input(pass)
	pass.Budget = w.shared.Reads.AtOnce()
	defer pass.Budget.Release()
	in.Base, in.Guard, in.Overlay, in.Epochs = eval.Newest, &w.mu, w.p.overlay, &w.epochs
	in.MaxWriteBytes, in.Budget = 1<<20, &pass.Budget
	var e eval.Evaluation
	e.Reset(in)
	if err := e.Run(txn); err != nil {
		w.t.Fatal(err)
	}
	d := e.Draft()
	return countIn(d.Op)
}
