package pipeapi

import (
	"bytes"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/mem"
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

const parts = 1000 // of a large transaction, with itself

// large returns a transaction with so many times parts, on a key.
func large(tag uint64, key string, times int) *pipepb.Operation {
	return &pipepb.Operation{Tag: tag, Request: &pipepb.Operation_Txn{Txn: &pb.TxnRequest{
		Compare: []*pb.Compare{{Key: []byte(key)}}, Success: slices.Repeat([]*pb.RequestOp{{}}, parts*times-2),
	}}}
}

// roomFor gives a service room for so many large transactions.
func roomFor(times int64) func(*Options) {
	return func(o *Options) { o.PartBytes = times * parts * messageBytes }
}

// called waits until nothing happens, and fails unless so many operations were done or are.
func (r *rig) called(want int) {
	r.t.Helper()
	synctest.Wait()
	if called, _, _ := r.ops.counts(); called != want {
		r.t.Errorf("%d operations are begun, want %d", called, want)
	}
}

// nothingTaken fails if something that is not under way has room for its parts.
func (r *rig) nothingTaken() {
	r.t.Helper()
	if taken := testutil.ToFloat64(r.o.Metrics.Parts); taken != 0 {
		r.t.Errorf("%v bytes are taken, and nothing is under way", taken)
	}
	if !r.parts.TryAcquire(r.o.PartBytes) {
		r.t.Error("there is not all room")
	}
}

// refused fails unless answers are those of transactions that found no room.
func refused(t *testing.T, answers map[uint64]*pipepb.Answer) {
	t.Helper()
	for tag, a := range answers {
		if e := a.GetError(); status.Code(rpctypes.ErrGRPCRequestTooManyRequests) != codes.Code(e.GetCode()) || e.GetMessage() != rpctypes.ErrorDesc(rpctypes.ErrGRPCRequestTooManyRequests) {
			t.Errorf("the transaction %d is answered %v", tag, a)
		}
	}
}

// TestLargeTransactions: the parts of transactions have a bound over all pipes. One pipe leaves room for others, what finds none waits and holds up nothing else,
// and what waits for too long is refused and changes nothing. What is answered gives its room back.
func TestLargeTransactions(t *testing.T) {
	bubble(t, roomFor(4), func(t *testing.T, r *rig) {
		first, greedy, third := r.pipe(), r.pipe(), r.pipe()
		release := r.ops.hold("slow")
		first.send(t, large(1, "slow", 1))
		r.called(1)
		greedy.send(t, large(1, "slow", 1), large(2, "slow", 1), large(3, "slow", 1), large(4, "slow", 1), put(5, "k")) // two have room
		r.called(4)
		if got := greedy.answers(t, 1); got[5].GetPut() == nil {
			t.Error(got)
		}
		third.send(t, large(1, "slow", 1))
		r.called(5)
		time.Sleep(r.o.PartWait)
		refused(t, greedy.answers(t, 2))
		r.called(5)
		if n := testutil.ToFloat64(r.o.Metrics.Refused); n != 2 {
			t.Errorf("%v are counted as refused", n)
		}
		release()
		first.answers(t, 1)
		greedy.answers(t, 2)
		third.answers(t, 1)
		greedy.send(t, large(1, "k", 1), large(2, "k", 1))
		for _, a := range greedy.answers(t, 2) {
			if a.GetTxn() == nil {
				t.Errorf("there is room, and a transaction is answered %v", a)
			}
		}
		first.send(t, large(1, "k", 1), large(2, "k", 1), large(3, "k", 1), put(2, "k")) // the tag 2 twice: what is refused gives its room back
		if err := <-first.ended; status.Code(err) != codes.InvalidArgument {
			t.Error(err)
		}
		for _, s := range []*fakeStream{greedy, third} {
			if err := s.close(); err != nil {
				t.Error(err)
			}
		}
		r.nothingTaken()
	})
}

// TestTransactionsWaitForRoom: a window full of transactions that has far more parts than there is room for is served, whether the room
// is lent to others or not.
func TestTransactionsWaitForRoom(t *testing.T) {
	bubble(t, roomFor(4), func(t *testing.T, r *rig) {
		other, s := r.pipe(), r.pipe()
		release := r.ops.hold("slow")
		other.send(t, large(1, "slow", 2))
		r.called(1)
		var ops []*pipepb.Operation
		for tag := range uint64(300) {
			op := large(tag, "slow", 1)
			op.Locate = true
			ops = append(ops, op)
		}
		r.ops.places = map[string]*pipepb.Place{"slow": {Node: 5}}
		s.send(t, ops...)
		r.called(3)
		release()
		for tag, a := range s.answers(t, len(ops)) {
			if a.GetTxn() == nil || a.GetPlace().GetNode() != 5 {
				t.Errorf("the transaction %d is answered %v", tag, a)
			}
		}
		other.answers(t, 1)
		r.called(301)
		for _, s := range []*fakeStream{other, s} {
			if err := s.close(); err != nil {
				t.Error(err)
			}
		}
		r.nothingTaken()
	})
}

// TestLargestTransaction: one that needs all the room there is gets it, though others go on sending small ones.
func TestLargestTransaction(t *testing.T) {
	bubble(t, roomFor(4), func(t *testing.T, r *rig) {
		busy, s := r.pipe(), r.pipe()
		first, second, largest := r.ops.hold("first"), r.ops.hold("second"), r.ops.hold("largest")
		busy.send(t, large(1, "first", 1))
		r.called(1)
		s.send(t, large(1, "largest", 4))
		r.called(1)
		busy.send(t, large(2, "second", 1)) // there is room for it, and the other one has come before
		r.called(1)
		first()
		busy.answers(t, 1)
		r.called(2)
		largest()
		if a := s.answers(t, 1)[1]; a.GetTxn() == nil {
			t.Error(a)
		}
		r.called(3)
		second()
		busy.answers(t, 1)
		for _, s := range []*fakeStream{busy, s} {
			if err := s.close(); err != nil {
				t.Error(err)
			}
		}
		r.nothingTaken()
	})
}

// TestGivenUpWhileItWaitsForParts: a transaction that waits for room ends by its tag, by its time and with its pipe, without having been begun.
func TestGivenUpWhileItWaitsForParts(t *testing.T) {
	bubble(t, roomFor(4), func(t *testing.T, r *rig) {
		other, s := r.pipe(), r.pipe()
		release := r.ops.hold("slow")
		other.send(t, large(1, "slow", 4))
		r.called(1)
		timed := large(1, "k", 1)
		timed.TimeoutMs = 1500
		begin := time.Now()
		s.send(t, timed, large(2, "k", 1), large(3, "k", 1))
		s.frame(t, &pipepb.ClientFrame{Cancels: []uint64{2}})
		if got := s.answers(t, 1); codes.Code(got[2].GetError().GetCode()) != codes.Canceled || time.Since(begin) != 0 {
			t.Error(got, time.Since(begin))
		}
		if got := s.answers(t, 1); codes.Code(got[1].GetError().GetCode()) != codes.DeadlineExceeded || time.Since(begin) != 1500*time.Millisecond {
			t.Error(got, time.Since(begin))
		}
		s.cancel()
		if err := <-s.ended; err == nil {
			t.Error("the pipe ended well")
		}
		r.called(1)
		release()
		other.answers(t, 1)
		if err := other.close(); err != nil {
			t.Error(err)
		}
		r.nothingTaken()
	})
}

// TestRoomOfASlowClient: who takes no answers keeps room from others for no longer than one who waits and is served.
func TestRoomOfASlowClient(t *testing.T) {
	bubble(t, roomFor(4), func(t *testing.T, r *rig) {
		p := newPipe(r.Service, &fakeStream{ctx: t.Context()})
		defer p.end()
		begun, err := p.admitted(put(1, "k"), large(2, "k", 4))
		if err != nil {
			t.Fatal(err)
		}
		p.answer(answer{tag: 1, body: mem.BufferSlice{mem.SliceBuffer(make([]byte, r.window.GetBytes()))}})
		begun[1].begin()
		synctest.Wait()
		if r.parts.TryAcquire(1) {
			t.Error("it has no room")
		}
		time.Sleep(2 * r.o.PartWait)
		synctest.Wait()
		r.nothingTaken()
	})
}

// TestLateIsNoOperation: what cannot be decoded is answered with an error if it has waited, as others of its frame are served.
func TestLateIsNoOperation(t *testing.T) {
	bubble(t, roomFor(1), func(t *testing.T, r *rig) {
		other, s := r.pipe(), r.pipe()
		release := r.ops.hold("slow")
		other.send(t, large(1, "slow", 1))
		r.called(1)
		bad := within(2, within(2, []byte{0xff})) // a put
		txn := within(6, append(bytes.Repeat([]byte{2<<3 | 2, 0}, parts-3), bad...))
		good, err := proto.Marshal(&pipepb.ClientFrame{Operations: []*pipepb.Operation{put(2, "k")}})
		if err != nil {
			t.Fatal(err)
		}
		s.in <- append(within(1, append([]byte{1 << 3, 1}, txn...)), good...)
		if got := s.answers(t, 1); got[2].GetPut() == nil {
			t.Error(got)
		}
		release()
		if e := s.answers(t, 1)[1].GetError(); codes.Code(e.GetCode()) != codes.Internal || !strings.Contains(e.GetMessage(), "the operation 1 is no Operation") {
			t.Error(e)
		}
		other.answers(t, 1)
		for _, s := range []*fakeStream{other, s} {
			if err := s.close(); err != nil {
				t.Error(err)
			}
		}
		r.nothingTaken()
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
