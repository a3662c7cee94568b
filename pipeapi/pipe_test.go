package pipeapi

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/api/pipepb"
)

// bubble runs f with a service in virtual time.
func bubble(t *testing.T, change func(*Options), f func(t *testing.T, r *rig)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, change)
		defer r.stop()
		f(t, r)
	})
}

// close closes the client's side, and returns what the pipe ends with.
func (s *fakeStream) close() error {
	close(s.in)
	return <-s.ended
}

// TestEachKind: each kind of operation has the answer of etcd's call, with its tag, errors among them. What this node does not
// know is refused alone.
func TestEachKind(t *testing.T) {
	bubble(t, nil, func(t *testing.T, r *rig) {
		s := r.pipe()
		s.send(t, put(0, "k"), get(1, "k"),
			&pipepb.Operation{Tag: 2, Request: &pipepb.Operation_DeleteRange{DeleteRange: &pb.DeleteRangeRequest{Key: []byte("k")}}},
			&pipepb.Operation{Tag: 3, Request: &pipepb.Operation_Txn{Txn: &pb.TxnRequest{}}},
			&pipepb.Operation{Tag: 1 << 63, Request: &pipepb.Operation_CompareAndPut{CompareAndPut: &pipepb.CompareAndPut{Put: &pb.PutRequest{Key: []byte("k")}}}},
			put(5, ""), &pipepb.Operation{Tag: 6})
		got := s.answers(t, 7)
		if got[0].GetPut().GetHeader().GetRevision() != 7 || len(got[1].GetRange().GetKvs()) != 1 || got[2].GetDeleteRange().GetDeleted() != 1 ||
			!got[3].GetTxn().GetSucceeded() || !got[1<<63].GetTxn().GetSucceeded() {
			t.Error(got)
		}
		if e := got[5].GetError(); codes.Code(e.GetCode()) != codes.InvalidArgument || e.GetMessage() != "etcdserver: key is not provided" {
			t.Error(e)
		}
		if e := got[6].GetError(); codes.Code(e.GetCode()) != codes.Unimplemented || !strings.Contains(e.GetMessage(), "newer") {
			t.Error(e)
		}
		if err := s.close(); err != nil {
			t.Error(err)
		}
	})
}

// TestCompareAndPut: it is the transaction that the proto says, also if there is nothing to put.
func TestCompareAndPut(t *testing.T) {
	got := compareAndPut(&pipepb.CompareAndPut{ModRevision: 5, Put: &pb.PutRequest{Key: []byte("k"), Value: []byte("v"), Lease: 3}})
	want := &pb.TxnRequest{
		Compare: []*pb.Compare{{Key: []byte("k"), Target: pb.Compare_MOD, TargetUnion: &pb.Compare_ModRevision{ModRevision: 5}}},
		Success: []*pb.RequestOp{{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: []byte("k"), Value: []byte("v"), Lease: 3}}}},
		Failure: []*pb.RequestOp{{Request: &pb.RequestOp_RequestRange{RequestRange: &pb.RangeRequest{Key: []byte("k")}}}},
	}
	if !proto.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	if none := compareAndPut(&pipepb.CompareAndPut{}); len(none.GetSuccess()) != 1 {
		t.Error(none)
	}
}

// TestPlaces: who asks where a key is led is told, if another node leads it and the operation has succeeded.
func TestPlaces(t *testing.T) {
	bubble(t, nil, func(t *testing.T, r *rig) {
		k := &pipepb.Place{Node: 5, ClientUrls: []string{"http://a:1", "http://b:1"}, Key: []byte("j"), RangeEnd: []byte("l")}
		r.ops.places = map[string]*pipepb.Place{"k": k, "bad": {Node: 5, ClientUrls: []string{"\xff"}}, "far": {Node: 5, Key: []byte("far"), RangeEnd: make([]byte, mostPlaceBytes)}}
		r.ops.bytes = 100 << 10 // some answers are not copied
		s := r.pipe()
		asking := []*pipepb.Operation{
			put(0, "k"), get(1, "k"), compareAndPutOf(2, "k"),
			{Tag: 3, Request: &pipepb.Operation_DeleteRange{DeleteRange: &pb.DeleteRangeRequest{Key: []byte("k")}}},
			{Tag: 4, Request: &pipepb.Operation_Txn{Txn: &pb.TxnRequest{Success: []*pb.RequestOp{{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: []byte("k")}}}}}}},
			put(5, "here"), put(6, "bad"), put(7, ""),
			{Tag: 8},
			{Tag: 9, Request: &pipepb.Operation_Txn{Txn: &pb.TxnRequest{}}},
			put(10, "far"),
		}
		for _, op := range asking {
			op.Locate = true
		}
		s.send(t, append(asking, put(11, "k"), get(12, "k"))...)
		got := s.answers(t, 13)
		for tag := range uint64(13) {
			want := k
			if tag > 4 {
				want = nil
			}
			if a := got[tag]; !proto.Equal(a.GetPlace(), want) || (a.GetAnswer() == nil) {
				t.Errorf("answer %d: %.200v", tag, a)
			}
		}
		if kvs := got[1].GetRange().GetKvs(); len(kvs) != 1 || len(kvs[0].GetValue()) != 100<<10 {
			t.Error("a large answer is spoilt by its place")
		}
		if r.ops.located != 8 {
			t.Errorf("%d questions", r.ops.located)
		}
		if err := s.close(); err != nil {
			t.Error(err)
		}
	})
}

// TestNodeIsTold: the window has the id of the node.
func TestNodeIsTold(t *testing.T) {
	r := newRig(t, func(o *Options) { o.Node = 7 })
	defer r.stop()
	if got := r.window.GetNode(); got != 7 {
		t.Errorf("node %d", got)
	}
}

// TestAnyOrder: an operation that waits keeps no other one's answer.
func TestAnyOrder(t *testing.T) {
	bubble(t, nil, func(t *testing.T, r *rig) {
		s := r.pipe()
		release := r.ops.hold("slow")
		s.send(t, put(1, "slow"), put(2, "k"))
		if got := s.answers(t, 1); got[2] == nil {
			t.Error(got)
		}
		release()
		if got := s.answers(t, 1); got[1] == nil {
			t.Error(got)
		}
		if err := s.close(); err != nil {
			t.Error(err)
		}
	})
}

// TestFramesGrow: answers that come while a frame is under way share the next one.
func TestFramesGrow(t *testing.T) {
	bubble(t, nil, func(t *testing.T, r *rig) {
		s := r.pipe()
		for tag := range uint64(100) {
			s.send(t, put(tag, "k"))
		}
		synctest.Wait() // all are done, and the client has taken nothing
		frames, answers := 0, 0
		for answers < 100 {
			f := <-s.out
			frames, answers = frames+1, answers+len(f.GetAnswers())
		}
		if frames > 2 {
			t.Errorf("100 answers come in %d frames", frames)
		}
		if err := s.close(); err != nil {
			t.Error(err)
		}
	})
}

// TestWindow: a client that sends more than the window, by number or by bytes, loses its pipe, is told why, and nothing of that frame
// happens. Others are served on.
func TestWindow(t *testing.T) {
	big := put(3, "k")
	big.GetPut().Value = make([]byte, 5<<20)
	for name, more := range map[string]*pipepb.Operation{"operations": put(3, "k"), "bytes": big} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(o *Options) { o.WindowOperations = 3 }, func(t *testing.T, r *rig) {
				other, s := r.pipe(), r.pipe()
				release := r.ops.hold("slow")
				defer release()
				s.send(t, put(1, "slow"), put(2, "slow"))
				if name == "operations" {
					s.send(t, put(4, "slow"))
				}
				synctest.Wait()
				before, _, _ := r.ops.counts()
				s.send(t, more)
				err := <-s.ended
				if status.Code(err) != codes.ResourceExhausted || !strings.Contains(err.Error(), "ignores the window") || !strings.Contains(err.Error(), "at most 3") {
					t.Error(err)
				}
				if now, _, _ := r.ops.counts(); now != before {
					t.Errorf("%d operations of the refused frame were begun", now-before)
				}
				other.send(t, put(1, "k"))
				other.answers(t, 1)
				if err := other.close(); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// TestObedientClient: who waits for answers is never refused, however often the window is full.
func TestObedientClient(t *testing.T) {
	r := newRig(t, func(o *Options) { o.WindowOperations = 2 })
	defer r.stop()
	s := r.pipe()
	s.send(t, put(0, "k"), put(1, "k"))
	for tag := uint64(2); tag < 2000; {
		got := len(s.answers(t, 1)) // one or both
		for range got {
			s.send(t, put(tag, "k"))
			tag++
		}
	}
	s.answers(t, 2)
	if err := s.close(); err != nil {
		t.Error(err)
	}
	if _, most, _ := r.ops.counts(); most > 2 {
		t.Errorf("%d operations at the same time", most)
	}
}

// TestTagTwice: a tag is of one operation at a time, in one frame and over several.
func TestTagTwice(t *testing.T) {
	bubble(t, nil, func(t *testing.T, r *rig) {
		release := r.ops.hold("slow")
		defer release()
		one, two := r.pipe(), r.pipe()
		one.send(t, put(1, "slow"), put(1, "slow"))
		two.send(t, put(1, "slow"))
		two.send(t, put(1, "slow"))
		for _, s := range []*fakeStream{one, two} {
			if err := <-s.ended; status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), "tag 1") {
				t.Error(err)
			}
		}
	})
}

// TestCancel: an operation ends by its tag or by its time, and is answered all the same. A tag that is not under way is passed over.
func TestCancel(t *testing.T) {
	bubble(t, nil, func(t *testing.T, r *rig) {
		s := r.pipe()
		release := r.ops.hold("slow")
		s.send(t, put(1, "slow"), put(2, "slow"))
		s.frame(t, &pipepb.ClientFrame{Cancels: []uint64{1, 77}})
		if got := s.answers(t, 1); codes.Code(got[1].GetError().GetCode()) != codes.Canceled {
			t.Error(got)
		}
		timed := put(3, "slow")
		timed.TimeoutMs = 1500
		begin := time.Now()
		s.send(t, timed)
		if got := s.answers(t, 1); codes.Code(got[3].GetError().GetCode()) != codes.DeadlineExceeded || time.Since(begin) != 1500*time.Millisecond {
			t.Error(got, time.Since(begin))
		}
		release()
		if got := s.answers(t, 1); got[2].GetPut() == nil {
			t.Error(got)
		}
		if err := s.close(); err != nil {
			t.Error(err)
		}
	})
}

// TestClosedSide: a client that closes its side gets all answers, and then the end.
func TestClosedSide(t *testing.T) {
	bubble(t, nil, func(t *testing.T, r *rig) {
		s := r.pipe()
		release := r.ops.hold("slow")
		s.send(t, put(1, "slow"), put(2, "slow"))
		close(s.in)
		synctest.Wait()
		select {
		case err := <-s.ended:
			t.Errorf("it has ended before the answers: %v", err)
		default:
		}
		release()
		s.answers(t, 2)
		if err := <-s.ended; err != nil {
			t.Error(err)
		}
	})
}

// TestClientGone: with the client its operations end, and nothing is left of them.
func TestClientGone(t *testing.T) {
	bubble(t, nil, func(t *testing.T, r *rig) {
		r.ops.bytes = 100 << 10
		s := r.pipe()
		release := r.ops.hold("slow")
		defer release()
		s.send(t, put(1, "slow"), get(2, "k"), get(3, "k")) // the answers of the reads are large, and not taken
		synctest.Wait()
		s.cancel()
		if err := <-s.ended; !errors.Is(err, context.Canceled) && status.Code(err) != codes.Canceled {
			t.Error(err)
		}
	})
}

// TestClosing: a node that stops says so, answers what comes for a moment, and then ends the pipes with etcd's error, but none before
// what is under way is answered.
func TestClosing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, nil)
		s, leaves := r.pipe(), r.pipe()
		release := r.ops.hold("slow")
		s.send(t, put(1, "slow"))
		close(r.ops.closing)
		for _, p := range []*fakeStream{s, leaves} {
			if f := <-p.out; !f.GetClosing() {
				t.Error(f)
			}
		}
		if err := leaves.close(); err != nil {
			t.Error(err)
		}
		s.send(t, put(2, "k"))
		if got := s.answers(t, 1); got[2].GetPut() == nil {
			t.Error(got)
		}
		time.Sleep(2 * time.Second)
		s.send(t, put(3, "k")) // too late
		synctest.Wait()
		release()
		if got := s.answers(t, 1); got[1].GetPut() == nil {
			t.Error(got)
		}
		if err := <-s.ended; !errors.Is(err, rpctypes.ErrGRPCStopped) {
			t.Error(err)
		}
		r.ops.wg.Wait()
		if called, _, lent := r.ops.counts(); called != 2 || lent != 0 {
			t.Errorf("%d operations, %d buffers", called, lent)
		}
	})
}

// from returns the context of a connection.
func from(address net.Addr) context.Context {
	return peer.NewContext(context.Background(), &peer.Peer{Addr: address})
}

// TestPipesOfTheNode: above the bounds pipes are refused with an error that says so, and those that are open are served. Who opens pipe
// after pipe leaves as many to others as it has.
func TestPipesOfTheNode(t *testing.T) {
	r := newRig(t, func(o *Options) { o.MaxPipes = 15 })
	defer r.stop()
	client := func(last byte, port int) context.Context {
		return from(&net.TCPAddr{IP: net.IPv4(10, 0, 0, last), Port: port})
	}
	var open []*fakeStream
	for i, most := range []int{8, 4, 2, 1} { // each half of what is free
		for port := range most {
			open = append(open, r.pipeIn(client(byte(i), port)))
		}
		want := "clients of this address have"
		if len(open) == 15 {
			want = "15 open pipes"
		}
		for port := range 20 {
			if err := <-r.pipeIn(client(byte(i), port)).ended; status.Code(err) != codes.ResourceExhausted || !strings.Contains(err.Error(), want) {
				t.Fatal(err)
			}
		}
	}
	for _, s := range open {
		s.send(t, put(1, "k"))
		s.answers(t, 1)
		if err := s.close(); err != nil {
			t.Error(err)
		}
	}
	if s := r.pipe(); s.close() != nil {
		t.Error("there is room, and a pipe is refused")
	}
}

// TestPipesOfAConnection: a connection has its own bound, and what it takes leaves room for others.
func TestPipesOfAConnection(t *testing.T) {
	r := newRig(t, func(o *Options) { o.MaxPipes, o.MaxPipesOfConnection = 12, 3 })
	defer r.stop()
	greedy, other := from(&net.TCPAddr{IP: net.IPv6loopback, Port: 1}), from(&net.TCPAddr{IP: net.IPv6loopback, Port: 2})
	var open []*fakeStream
	for range 3 {
		open = append(open, r.pipeIn(greedy))
	}
	for range 20 {
		if err := <-r.pipeIn(greedy).ended; status.Code(err) != codes.ResourceExhausted || !strings.Contains(err.Error(), "connection has 3 open pipes") {
			t.Fatal(err)
		}
	}
	open = append(open, r.pipeIn(other))
	for range 4 { // they have one address, and may be anybody's
		open = append(open, r.pipeIn(from(&net.UnixAddr{Name: "@", Net: "unix"})))
	}
	for _, s := range open {
		s.send(t, put(1, "k"))
		s.answers(t, 1)
		if err := s.close(); err != nil {
			t.Error(err)
		}
	}
	if s := r.pipeIn(greedy); s.close() != nil {
		t.Error("there is room, and a pipe is refused")
	}
	if len(r.connections)+len(r.clients)+r.open != 0 {
		t.Errorf("without pipes there are %d, of the connections %v and the clients %v", r.open, r.connections, r.clients)
	}
}

// TestWaitsForTheClient: while a client leaves a window's bytes of answers, what has come is not begun, until it takes some or the
// operation's time is over.
func TestWaitsForTheClient(t *testing.T) {
	bubble(t, nil, func(t *testing.T, r *rig) {
		p := newPipe(r.Service, &fakeStream{ctx: t.Context()})
		defer p.end()
		begun, err := p.admitted(get(1, "k"), get(2, "k"), get(3, "k"))
		if err != nil {
			t.Fatal(err)
		}
		p.answer(answer{tag: 1, body: mem.BufferSlice{mem.SliceBuffer(make([]byte, r.window.GetBytes()))}})
		for _, o := range begun[1:] {
			r.begin(o)
		}
		called := func(want int, when string) {
			t.Helper()
			synctest.Wait()
			if got, _, _ := r.ops.counts(); got != want {
				t.Errorf("%d operations are begun %s, want %d", got, when, want)
			}
		}
		called(0, "while the client takes nothing")
		p.cancelAll([]uint64{2})
		called(1, "once one is given up")
		if f, n := p.take(); n != 1 {
			t.Errorf("%d answers in a frame", n)
		} else {
			f.free()
		}
		called(2, "once the client has taken")
	})
}

// TestRefusedFrame: nothing of a refused frame stays in the window.
func TestRefusedFrame(t *testing.T) {
	bubble(t, nil, func(t *testing.T, r *rig) {
		p := newPipe(r.Service, &fakeStream{ctx: t.Context()})
		defer p.end()
		if _, err := p.admitted(put(1, "k"), put(2, "k"), put(1, "k")); status.Code(err) != codes.InvalidArgument {
			t.Error(err)
		}
		if len(p.under) != 0 || p.bytes != 0 {
			t.Errorf("%d operations of %d bytes are under way", len(p.under), p.bytes)
		}
	})
}

// TestSlowClient: nothing more is read from a client that does not take large answers. It gets them all once it does.
func TestSlowClient(t *testing.T) {
	bubble(t, nil, func(t *testing.T, r *rig) {
		r.ops.bytes = 1 << 20
		s := r.pipe()
		sent := make(chan struct{})
		go func() {
			defer close(sent)
			for tag := range uint64(50) {
				s.send(t, get(tag, "k"))
				time.Sleep(time.Millisecond) // the one before is answered
			}
		}()
		time.Sleep(time.Second)
		if called, _, _ := r.ops.counts(); called > 8 {
			t.Errorf("%d answers of a MiB are in memory, and the window has 4 MiB", called)
		}
		s.answers(t, 50)
		<-sent
		if err := s.close(); err != nil {
			t.Error(err)
		}
	})
}

// TestSmallFrames: answers that are large together come in frames that any client takes.
func TestSmallFrames(t *testing.T) {
	bubble(t, nil, func(t *testing.T, r *rig) {
		r.ops.bytes = 300 << 10
		s := r.pipe()
		release := r.ops.hold("k")
		for tag := range uint64(12) {
			s.send(t, get(tag, "k"))
		}
		release()
		synctest.Wait()
		for n := 0; n < 12; {
			f := <-s.out
			n += len(f.GetAnswers())
			if size := proto.Size(f); size > frameBytes+1024 {
				t.Errorf("a frame of %d bytes", size)
			}
		}
		if err := s.close(); err != nil {
			t.Error(err)
		}
	})
}

// FuzzClient sends frames of any bytes. Whatever they are, each operation that was begun is answered once, or the pipe ends with
// an error, and nothing is left.
func FuzzClient(f *testing.F) {
	for _, ops := range [][]*pipepb.Operation{{put(1, "k"), get(2, "k")}, {put(1, "")}, {{Tag: 9}}, {put(1, "k"), put(1, "k")}, nil} {
		b, err := proto.Marshal(&pipepb.ClientFrame{Operations: ops, Cancels: []uint64{1}})
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b, b)
	}
	f.Add([]byte{0xff}, []byte(nil))
	for _, seed := range [][]byte{
		bytes.Repeat([]byte{1<<3 | 2, 0}, 100), bytes.Repeat([]byte{2 << 3, 7}, 100), within(2, bytes.Repeat([]byte{7}, 100)), within(2, []byte{0x80}),
		within(1, within(6, bytes.Repeat([]byte{2<<3 | 2, 0}, 100))), within(1, bytes.Repeat([]byte{3<<3 | 2, 0, 4<<3 | 2, 0}, 100)), within(1, nested(100)),
	} {
		f.Add(seed, seed)
	}
	f.Fuzz(func(t *testing.T, one, two []byte) {
		r := newRig(t, func(o *Options) { o.WindowOperations = 8 })
		defer r.stop()
		s := r.pipe()
		go func() {
			for _, b := range [][]byte{one, two} {
				select {
				case s.in <- b:
				case <-s.ctx.Done():
				}
			}
			close(s.in)
		}()
		answered := 0
		for {
			select {
			case f := <-s.out:
				answered += len(f.GetAnswers())
				continue
			case err := <-s.ended:
				if want := operationsOf(one) + operationsOf(two); err == nil && answered != want {
					t.Errorf("%d of %d operations are answered", answered, want)
				}
			}
			return
		}
	})
}

// operationsOf returns how many operations a frame has, 0 if it is none.
func operationsOf(b []byte) int {
	f := &pipepb.ClientFrame{}
	if proto.Unmarshal(b, f) != nil {
		return 0
	}
	return len(f.GetOperations())
}

// TestErrorsOfAnyText: an error whose text is no UTF-8 arrives as its code.
func TestErrorsOfAnyText(t *testing.T) {
	for _, text := range []string{"plain", "\xff\xfe"} {
		e := &pipepb.Error{}
		if err := proto.Unmarshal(errorBody(status.Error(codes.NotFound, text)).Materialize(), e); err != nil || codes.Code(e.GetCode()) != codes.NotFound {
			t.Error(fmt.Sprintf("%q", text), e, err)
		}
	}
}
