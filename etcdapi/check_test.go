package etcdapi

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
)

// TestCheckStories walks testdata/check: each command is a request in protobuf's text
// form, the output is what the client gets. "passes" means that it goes on to the
// router.
//
//	range|put|delete
//	txn [ops=N]
func TestCheckStories(t *testing.T) {
	datadriven.RunTest(t, "testdata/check", func(t *testing.T, d *datadriven.TestData) string {
		var err error
		switch d.Cmd {
		case "range":
			err = rangeapi.CheckRange(parse(t, d, &pb.RangeRequest{}))
		case "put":
			err = rangeapi.CheckPut(parse(t, d, &pb.PutRequest{}))
		case "delete":
			err = rangeapi.CheckDelete(parse(t, d, &pb.DeleteRangeRequest{}))
		case "txn":
			ops := 128
			d.MaybeScanArgs(t, "ops", &ops)
			err = checkTxn(parse(t, d, &pb.TxnRequest{}), ops)
		default:
			d.Fatalf(t, "unknown command %q", d.Cmd)
		}
		if err == nil {
			return "passes\n"
		}
		return strings.TrimPrefix(kverror.GRPC(err).Error(), "rpc error: ") + "\n"
	})
}

func parse[M proto.Message](t *testing.T, d *datadriven.TestData, m M) M {
	t.Helper()
	if err := prototext.Unmarshal([]byte(d.Input), m); err != nil {
		t.Fatal(err)
	}
	return m
}

// naiveTouched says the same as checkTouched in the plainest way: it compares each put
// with everything before it.
func naiveTouched(ops []*pb.RequestOp) (puts []string, deletes []interval, ok bool) {
	hit := func(k string, dels []interval) bool {
		for _, d := range dels {
			if d.start <= k && k < d.end {
				return true
			}
		}
		return false
	}
	has := func(list []string, k string) bool {
		for _, s := range list {
			if s == k {
				return true
			}
		}
		return false
	}
	for _, op := range ops {
		if d := op.GetRequestDeleteRange(); d != nil {
			deletes = append(deletes, deleteInterval(d))
		}
	}
	for _, op := range ops {
		x := op.GetRequestTxn()
		if x == nil {
			continue
		}
		then, d1, ok1 := naiveTouched(x.Success)
		otherwise, d2, ok2 := naiveTouched(x.Failure)
		if !ok1 || !ok2 {
			return nil, nil, false
		}
		before := puts
		for _, branch := range [][]string{then, otherwise} {
			for _, k := range branch {
				if has(before, k) || hit(k, deletes) {
					return nil, nil, false
				}
				puts = append(puts[:len(puts):len(puts)], k)
			}
		}
		deletes = append(append(deletes, d1...), d2...)
	}
	for _, op := range ops {
		if p := op.GetRequestPut(); p != nil {
			if k := string(p.Key); has(puts, k) || hit(k, deletes) {
				return nil, nil, false
			}
			puts = append(puts, string(p.Key))
		}
	}
	return puts, deletes, true
}

// TestTouchedAgainstNaive compares the two on random transactions over few keys.
func TestTouchedAgainstNaive(t *testing.T) {
	seed := uint64(1)
	r := rand.New(rand.NewPCG(seed, 0))
	refused := 0
	for i := range 100_000 {
		ops := randomOps(r, 3)
		_, _, want := naiveTouched(ops)
		if _, err := checkTouched(ops); (err == nil) != want {
			t.Fatalf("seed %d, transaction %d: got %v, want passes=%v\n%v", seed, i, err, want, ops)
		} else if err != nil {
			refused++
		}
	}
	if refused < 1000 {
		t.Errorf("only %d were refused: the test proves little", refused)
	}
}

func randomOps(r *rand.Rand, depth int) []*pb.RequestOp {
	keys := []string{"a", "ab", "b", "b\x00", "c", "d", "\x00"}
	key := func() []byte { return []byte(keys[r.IntN(len(keys))]) }
	var ops []*pb.RequestOp
	for range r.IntN(4) {
		switch n := r.IntN(5); {
		case n < 2:
			ops = append(ops, &pb.RequestOp{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: key()}}})
		case n == 2:
			d := &pb.DeleteRangeRequest{Key: key()}
			if r.IntN(2) == 0 {
				d.RangeEnd = key()
			}
			ops = append(ops, &pb.RequestOp{Request: &pb.RequestOp_RequestDeleteRange{RequestDeleteRange: d}})
		case n == 3 && depth > 0:
			ops = append(ops, &pb.RequestOp{Request: &pb.RequestOp_RequestTxn{
				RequestTxn: &pb.TxnRequest{Success: randomOps(r, depth-1), Failure: randomOps(r, depth-1)},
			}})
		default:
			ops = append(ops, &pb.RequestOp{Request: &pb.RequestOp_RequestRange{RequestRange: &pb.RangeRequest{Key: key()}}})
		}
	}
	return ops
}

// FuzzTxn: no request from the wire makes a check panic, and what is refused is
// refused with an error of etcd's.
func FuzzTxn(f *testing.F) {
	r := rand.New(rand.NewPCG(2, 0))
	for range 20 {
		b, err := proto.Marshal(&pb.TxnRequest{Success: randomOps(r, 3), Failure: randomOps(r, 2)})
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		x := &pb.TxnRequest{}
		if proto.Unmarshal(b, x) != nil {
			return
		}
		err := checkTxn(x, 128)
		var k kverror.Kind
		if err != nil && !errors.As(err, &k) {
			t.Fatal(err)
		}
		if err == nil {
			_ = readOnly(x)
			if n := sizeAsProposed(x, "", 0); n != proposal(&pb.InternalRaftRequest{Txn: x}, "", 0) {
				t.Fatal(n)
			}
		}
	})
}

// proposal returns the size of etcd's own proposal of a user's change.
func proposal(r *pb.InternalRaftRequest, user string, revision uint64) int {
	r.Header = &pb.RequestHeader{ID: math.MaxUint64, Username: user, AuthRevision: revision}
	return proto.Size(r)
}

func TestSizeAsProposed(t *testing.T) {
	for _, n := range []int{0, 1, 100, 127, 128, 1 << 14, 1 << 21} {
		put := &pb.PutRequest{Key: []byte("k"), Value: make([]byte, n)}
		del := &pb.DeleteRangeRequest{Key: make([]byte, n)}
		for user, revision := range map[string]uint64{"": 0, "u": 1, "no revision": 0, strings.Repeat("u", 100): 128, strings.Repeat("u", 1000): 1 << 40} {
			if got, want := sizeAsProposed(put, user, revision), proposal(&pb.InternalRaftRequest{Put: put}, user, revision); got != want {
				t.Errorf("put of %d bytes by %.10q: %d, want %d", n, user, got, want)
			}
			if got, want := sizeAsProposed(del, user, revision), proposal(&pb.InternalRaftRequest{DeleteRange: del}, user, revision); got != want {
				t.Errorf("delete of %d bytes by %.10q: %d, want %d", n, user, got, want)
			}
		}
	}
}

// BenchmarkCheckTxn checks a transaction of 128 puts beside a delete, the dearest
// that the defaults allow on one level.
func BenchmarkCheckTxn(b *testing.B) {
	x := &pb.TxnRequest{}
	for i := range 127 {
		x.Success = append(x.Success, &pb.RequestOp{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: fmt.Appendf(nil, "key-%03d", i)}}})
	}
	x.Success = append(x.Success, &pb.RequestOp{Request: &pb.RequestOp_RequestDeleteRange{
		RequestDeleteRange: &pb.DeleteRangeRequest{Key: []byte("x"), RangeEnd: []byte("y")},
	}})
	b.ReportAllocs()
	for b.Loop() {
		if err := checkTxn(x, 128); err != nil {
			b.Fatal(err)
		}
	}
}
