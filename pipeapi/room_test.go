package pipeapi

import (
	"testing"
	"testing/synctest"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/api/pipepb"
)

func compareAndPutOf(tag uint64, key string) *pipepb.Operation {
	return &pipepb.Operation{Tag: tag, Request: &pipepb.Operation_CompareAndPut{CompareAndPut: &pipepb.CompareAndPut{Put: &pb.PutRequest{Key: []byte(key)}}}}
}

// TestBurstOfLargeAnswers: operations that were all begun before the first answer was there hold no more of large answers than the
// window, if they have changed nothing. The client gets all of them once it takes them.
func TestBurstOfLargeAnswers(t *testing.T) {
	for name, operation := range map[string]func(uint64, string) *pipepb.Operation{"reads": get, "compares that fail": compareAndPutOf} {
		t.Run(name, func(t *testing.T) {
			bubble(t, nil, func(t *testing.T, r *rig) {
				r.ops.bytes, r.ops.differs = 1<<20, true
				s := r.pipe()
				release := r.ops.hold("slow")
				const all = 24
				var ops []*pipepb.Operation
				for tag := range uint64(all) {
					ops = append(ops, operation(tag, "slow"))
				}
				s.send(t, ops...)
				synctest.Wait()
				if called, _, _ := r.ops.counts(); called != all {
					t.Fatalf("%d operations are under way, want %d", called, all)
				}
				release()
				synctest.Wait()
				// The last one that fits may be larger than the room, and a frame of one is being sent.
				if _, _, lent := r.ops.counts(); lent > 6 {
					t.Errorf("%d answers of a MiB are in memory, and the window has 4 MiB", lent)
				}
				s.answers(t, all)
				if err := s.close(); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// TestChangesThatAnswerMuch: what has changed something is never done again, so few of those with large answers are under way.
func TestChangesThatAnswerMuch(t *testing.T) {
	bubble(t, nil, func(t *testing.T, r *rig) {
		s := r.pipe()
		release := r.ops.hold("slow")
		const all = 60
		var ops []*pipepb.Operation
		for tag := range uint64(all) {
			op := put(tag, "slow")
			op.GetPut().PrevKv = true
			ops = append(ops, op)
		}
		s.send(t, ops...)
		synctest.Wait()
		if called, _, _ := r.ops.counts(); called != mostSingles {
			t.Errorf("%d are under way, want %d", called, mostSingles)
		}
		s.frame(t, &pipepb.ClientFrame{Operations: []*pipepb.Operation{get(all, "k")}})
		if got := s.answers(t, 1); got[all] == nil {
			t.Error("others wait for them")
		}
		release()
		s.answers(t, all)
		if called, _, _ := r.ops.counts(); called != all+1 {
			t.Errorf("%d calls for %d operations", called, all+1)
		}
		if err := s.close(); err != nil {
			t.Error(err)
		}
	})
}

// TestGivenUpWhileItWaitsForRoom: an operation that is to be done again ends by its tag, and gives back what it has.
func TestGivenUpWhileItWaitsForRoom(t *testing.T) {
	bubble(t, nil, func(t *testing.T, r *rig) {
		r.ops.bytes = 1 << 20
		p := newPipe(r.Service, &fakeStream{ctx: t.Context()})
		defer p.end()
		begun, err := p.admitted(put(1, "k"), get(2, "slow"), get(3, "k"))
		if err != nil {
			t.Fatal(err)
		}
		release := r.ops.hold("slow")
		r.begin(begun[1])
		synctest.Wait()
		p.answer(answer{tag: 1, body: mem.BufferSlice{mem.SliceBuffer(make([]byte, r.window.GetBytes()))}})
		release()
		r.begin(begun[2])
		synctest.Wait()
		if called, _, lent := r.ops.counts(); called != 1 || lent != 0 {
			t.Errorf("%d are begun, and %d answers are held", called, lent)
		}
		p.cancelAll([]uint64{2})
		synctest.Wait()
		p.mu.Lock()
		if p.again != 0 || p.reserved != 0 || len(p.answers) != 2 {
			t.Errorf("%d wait, %d bytes are reserved, %d answers", p.again, p.reserved, len(p.answers))
		}
		p.mu.Unlock()
		for n := 0; n < 3; { // and the last one is begun once there is room
			f, more := p.take()
			n += more
			f.free()
			synctest.Wait()
		}
	})
}

// TestGrowth: which operations may be done again, and when.
func TestGrowth(t *testing.T) {
	read := &pb.RequestOp{Request: &pb.RequestOp_RequestRange{RequestRange: &pb.RangeRequest{Key: []byte("k")}}}
	write := &pb.RequestOp{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: []byte("k")}}}
	previous := &pb.RequestOp{Request: &pb.RequestOp_RequestDeleteRange{RequestDeleteRange: &pb.DeleteRangeRequest{Key: []byte("k"), PrevKv: true}}}
	nested := &pb.RequestOp{Request: &pb.RequestOp_RequestTxn{RequestTxn: &pb.TxnRequest{}}}
	ops := func(ops ...*pb.RequestOp) []*pb.RequestOp { return ops }
	for i, c := range []struct {
		request any
		want    growth
		// succeeded and failed say what has changed nothing.
		succeeded, failed bool
	}{
		{&pb.PutRequest{}, small, false, false},
		{&pb.PutRequest{PrevKv: true}, single, false, false},
		{&pb.DeleteRangeRequest{}, small, false, false},
		{&pb.DeleteRangeRequest{PrevKv: true}, single, false, false},
		{&pb.RangeRequest{Key: []byte("k")}, repeatable, true, true},
		{&pb.RangeRequest{Key: []byte("k"), RangeEnd: []byte("l")}, small, true, true},
		{&pb.TxnRequest{Success: ops(write), Failure: ops(write)}, small, false, false},
		{&pb.TxnRequest{Success: ops(write), Failure: ops(read)}, repeatable, false, true},
		{&pb.TxnRequest{Success: ops(read), Failure: ops(write, write)}, repeatable, true, false},
		{&pb.TxnRequest{Success: ops(read, write), Failure: ops(read)}, single, false, true},
		{&pb.TxnRequest{Success: ops(previous)}, single, false, true},
		{&pb.TxnRequest{Failure: ops(nested)}, single, true, false},
		{nil, small, false, false},
	} {
		if got := growthOf(c.request); got != c.want {
			t.Errorf("case %d: %d, want %d", i, got, c.want)
		}
		if _, ok := c.request.(*pb.TxnRequest); !ok {
			continue
		}
		for succeeded, want := range map[bool]bool{true: c.succeeded, false: c.failed} {
			b, err := proto.Marshal(&pb.TxnResponse{Succeeded: succeeded})
			if err != nil {
				t.Fatal(err)
			}
			if got := unchanged(c.request, mem.BufferSlice{mem.SliceBuffer(b)}); got != want {
				t.Errorf("case %d, succeeded %v: unchanged %v", i, succeeded, got)
			}
		}
	}
	if unchanged(&pb.TxnRequest{}, mem.BufferSlice{mem.SliceBuffer("\xff")}) {
		t.Error("an answer that cannot be read is dropped")
	}
}
