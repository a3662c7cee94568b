package pipeapi

import (
	"bytes"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/api/pipepb"
)

// allocated returns how many bytes of memory are asked for while f runs.
func allocated(f func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

// within returns a message that has another one in a field.
func within(field protowire.Number, b []byte) []byte {
	return protowire.AppendBytes(protowire.AppendTag(nil, field, protowire.BytesType), b)
}

// TestHostileFrames: what a frame takes of memory is bounded by the window, whatever its bytes are. A frame of 2 MiB can have a
// million operations, cancels or parts of a transaction.
func TestHostileFrames(t *testing.T) {
	const size = 2 << 20
	empty := func(field byte) []byte { return bytes.Repeat([]byte{field<<3 | 2, 0}, size/2) }
	var apart []byte // operations with a tag of their own each
	for tag := range uint64(200_000) {
		apart = append(apart, within(1, protowire.AppendVarint([]byte{1 << 3}, tag))...)
	}
	for name, c := range map[string]struct {
		frame []byte
		// code and text are what the pipe ends with, answer what its operations are answered.
		code    codes.Code
		text    string
		answers int
		answer  codes.Code
	}{
		"operations":        {empty(1), codes.ResourceExhausted, "ignores the window", 0, 0},
		"operations apart":  {apart, codes.ResourceExhausted, "ignores the window", 0, 0},
		"cancels":           {bytes.Repeat([]byte{2 << 3, 7}, size/2), codes.ResourceExhausted, "cancels", 0, 0},
		"packed cancels":    {within(2, bytes.Repeat([]byte{7}, size)), codes.ResourceExhausted, "cancels", 0, 0},
		"a transaction":     {within(1, within(6, empty(2))), codes.OK, "", 1, codes.InvalidArgument},
		"one of two kinds":  {within(1, bytes.Repeat([]byte{3<<3 | 2, 0, 4<<3 | 2, 0}, size/4)), codes.OK, "", 1, codes.InvalidArgument},
		"nested":            {within(1, nested(20_000)), codes.Internal, "no ClientFrame", 0, 0},
		"not a ClientFrame": {bytes.Repeat([]byte{0xff}, size), codes.Internal, "no ClientFrame", 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, nil)
			defer r.stop()
			other, s := r.pipe(), r.pipe()
			var answers []*pipepb.Answer
			var err error
			got := allocated(func() {
				s.in <- c.frame
				answers, err = s.rest()
			})
			if status.Code(err) != c.code || c.text != "" && !strings.Contains(err.Error(), c.text) {
				t.Errorf("the pipe ends with %v", err)
			}
			if len(answers) != c.answers {
				t.Errorf("%d answers, want %d", len(answers), c.answers)
			}
			for _, a := range answers {
				if got := codes.Code(a.GetError().GetCode()); got != c.answer {
					t.Errorf("the operation is answered %v, want %v", got, c.answer)
				}
			}
			if got > size {
				t.Errorf("a frame of %d bytes takes %d bytes more", len(c.frame), got)
			}
			other.send(t, put(1, "k"))
			other.answers(t, 1)
			if err := other.close(); err != nil {
				t.Error(err)
			}
		})
	}
}

// rest closes the client's side, and takes all until the end.
func (s *fakeStream) rest() (answers []*pipepb.Answer, err error) {
	close(s.in)
	for {
		select {
		case f := <-s.out:
			answers = append(answers, f.GetAnswers()...)
		case err := <-s.ended:
			return answers, err
		}
	}
}

// TestLargeTransactions: the parts of transactions have a bound over all pipes. What does not fit is refused and changes nothing, one pipe leaves
// room for others, and what is answered gives its room back.
func TestLargeTransactions(t *testing.T) {
	const parts = 1000 // of a transaction, with itself
	txn := func(tag uint64) *pipepb.Operation {
		return &pipepb.Operation{Tag: tag, Request: &pipepb.Operation_Txn{Txn: &pb.TxnRequest{Success: slices.Repeat([]*pb.RequestOp{{}}, parts-1)}}}
	}
	bubble(t, func(o *Options) { o.PartBytes = 4 * parts * messageBytes }, func(t *testing.T, r *rig) {
		first, greedy, third := r.pipe(), r.pipe(), r.pipe()
		release := r.ops.hold("txn")
		begun := func(want int) {
			t.Helper()
			synctest.Wait()
			if called, _, _ := r.ops.counts(); called != want {
				t.Errorf("%d operations are begun, want %d", called, want)
			}
		}
		first.send(t, txn(1))
		begun(1)
		greedy.send(t, txn(1), txn(2), txn(3), txn(4), put(5, "k")) // it has two, and one is left
		begun(4)
		third.send(t, txn(1))
		begun(5)
		got := greedy.answers(t, 3)
		for tag := uint64(3); tag < 5; tag++ {
			if e := got[tag].GetError(); status.Code(rpctypes.ErrGRPCRequestTooManyRequests) != codes.Code(e.GetCode()) || e.GetMessage() != rpctypes.ErrorDesc(rpctypes.ErrGRPCRequestTooManyRequests) {
				t.Errorf("the transaction %d is answered %v", tag, got[tag])
			}
		}
		release()
		first.answers(t, 1)
		greedy.answers(t, 2)
		third.answers(t, 1)
		greedy.send(t, txn(1), txn(2))
		for _, a := range greedy.answers(t, 2) {
			if a.GetTxn() == nil {
				t.Errorf("there is room, and a transaction is answered %v", a)
			}
		}
		first.send(t, txn(1), txn(2), put(2, "k")) // the tag 2 twice: what is refused gives its room back
		if err := <-first.ended; status.Code(err) != codes.InvalidArgument {
			t.Error(err)
		}
		for _, s := range []*fakeStream{greedy, third} {
			if err := s.close(); err != nil {
				t.Error(err)
			}
		}
		if left := r.parts.Load(); left != 0 {
			t.Errorf("%d bytes are taken, and nothing is under way", left)
		}
	})
}

// TestMessageBytes: no message within an operation takes more memory than it counts.
func TestMessageBytes(t *testing.T) {
	const n = 10_000
	key := []byte("k")
	for name, op := range map[string]*pb.RequestOp{
		"none":   {},
		"range":  {Request: &pb.RequestOp_RequestRange{RequestRange: &pb.RangeRequest{Key: key, RangeEnd: key}}},
		"put":    {Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: key, Value: key}}},
		"delete": {Request: &pb.RequestOp_RequestDeleteRange{RequestDeleteRange: &pb.DeleteRangeRequest{Key: key, RangeEnd: key}}},
		"txn":    {Request: &pb.RequestOp_RequestTxn{RequestTxn: &pb.TxnRequest{}}},
		"compare": {Request: &pb.RequestOp_RequestTxn{RequestTxn: &pb.TxnRequest{Compare: []*pb.Compare{
			{Key: key, RangeEnd: key, TargetUnion: &pb.Compare_Value{Value: key}},
		}}}},
	} {
		b, err := proto.Marshal(&pipepb.Operation{Request: &pipepb.Operation_Txn{Txn: &pb.TxnRequest{Success: slices.Repeat([]*pb.RequestOp{op}, n)}}})
		if err != nil {
			t.Fatal(err)
		}
		messages, err := operationShape.messages(b, protowire.DefaultRecursionLimit)
		if err != nil || messages < n {
			t.Fatalf("%s: %d messages, %v", name, messages, err)
		}
		got := allocated(func() {
			if err := proto.Unmarshal(b, &pipepb.Operation{}); err != nil {
				t.Error(err)
			}
		})
		if each := got / uint64(messages); each > messageBytes || each < messageBytes/8 {
			t.Errorf("%s: %d bytes for each of %d messages", name, each, messages)
		}
	}
}

// nested returns an operation whose transaction has so many transactions in one another.
func nested(depth int) []byte {
	txns, ops := make([]int, depth+1), make([]int, depth) // sizes, from the innermost one outwards
	for i := range depth {
		ops[i] = protowire.SizeTag(4) + protowire.SizeBytes(txns[i])
		txns[i+1] = protowire.SizeTag(2) + protowire.SizeBytes(ops[i])
	}
	header := func(b []byte, field protowire.Number, size int) []byte {
		return protowire.AppendVarint(protowire.AppendTag(b, field, protowire.BytesType), uint64(size))
	}
	b := header(nil, 6, txns[depth])
	for i := depth - 1; i >= 0; i-- {
		b = header(header(b, 2, ops[i]), 4, txns[i])
	}
	return b
}
