package pipeapi

import (
	"context"
	"io"
	"strings"
	"sync"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/api/pipepb"
	"github.com/skeindb/skein/clock"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fakeOperations answer once they are let to, and count the buffers of answers that are not freed.
type fakeOperations struct {
	closing chan struct{}
	wg      sync.WaitGroup

	mu sync.Mutex
	// Guarded by mu. held are channels by keys: an operation on such a key waits for that channel.
	held map[string]chan struct{}
	// bytes is the size of the values that reads find, lent how many buffers of answers are not freed.
	bytes, lent int
	// differs says that the compares of transactions fail, which then read a value.
	differs bool
	// places are those of keys, located counts the questions for them.
	places  map[string]*pipepb.Place
	located int
	// called counts the operations, most is how many there were at the same time.
	called, now, most int
	// beginning, if set, is called while a request is begun.
	beginning func()
	// begun counts the requests that were begun, waited those of them for which somebody has waited.
	begun, waited int
}

func newOperations() *fakeOperations {
	return &fakeOperations{closing: make(chan struct{}), held: map[string]chan struct{}{}}
}

// hold has operations on a key wait until the returned function is called.
func (f *fakeOperations) hold(key string) (release func()) {
	ch := make(chan struct{})
	f.mu.Lock()
	defer f.mu.Unlock()
	f.held[key] = ch
	return func() { close(ch) }
}

// Place implements Operations.
func (f *fakeOperations) Place(_ context.Context, key []byte) *pipepb.Place {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.located++
	return f.places[string(key)]
}

func (f *fakeOperations) Closing() <-chan struct{} { return f.closing }
func (f *fakeOperations) Go(g func())              { f.wg.Go(g) }
func (f *fakeOperations) MaxMessageBytes() int     { return 1 << 20 }

var errNoKey = status.Error(codes.InvalidArgument, "etcdserver: key is not provided")

// Begin implements Operations. A put to a key that begins with "here/" is begun, and its first attempt fails if "fails" follows.
func (f *fakeOperations) Begin(ctx context.Context, request any, answered func(ok bool)) (func() (mem.BufferSlice, error), bool) {
	p, ok := request.(*pb.PutRequest)
	if !ok || !strings.HasPrefix(string(p.GetKey()), "here/") {
		return func() (mem.BufferSlice, error) { return f.Do(ctx, request) }, false
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.begun++
	if f.beginning != nil {
		f.beginning()
	}
	held, done := f.held[string(p.GetKey())], make(chan struct{})
	fails := strings.HasPrefix(string(p.GetKey()), "here/fails")
	if held == nil {
		close(done)
		answered(!fails) // before the caller has what it finishes the request by
	} else {
		f.wg.Go(func() {
			<-held
			close(done)
			answered(!fails)
		})
	}
	return func() (mem.BufferSlice, error) {
		select {
		case <-done:
			if !fails {
				return f.Do(context.WithoutCancel(ctx), &pb.PutRequest{Key: []byte("done")})
			}
		default:
		}
		f.mu.Lock()
		f.waited++
		f.mu.Unlock()
		select {
		case <-done:
			return f.Do(context.WithoutCancel(ctx), &pb.PutRequest{Key: []byte("done")})
		case <-ctx.Done():
			return nil, status.FromContextError(ctx.Err()).Err()
		}
	}, true
}

func (f *fakeOperations) Do(ctx context.Context, request any) (mem.BufferSlice, error) {
	f.mu.Lock()
	f.called++
	f.now++
	f.most = max(f.most, f.now)
	key, answer := f.answer(request)
	held := f.held[key]
	f.mu.Unlock()
	defer func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.now--
	}()
	if key == "" {
		return nil, errNoKey
	}
	if held != nil {
		select {
		case <-held:
		case <-ctx.Done():
			return nil, status.FromContextError(ctx.Err()).Err()
		}
	}
	b, err := proto.Marshal(answer)
	if err != nil {
		return nil, err
	}
	f.mu.Lock()
	f.lent++
	f.mu.Unlock()
	if mem.IsBelowBufferPoolingThreshold(len(b)) {
		f.Put(&b) // it is not counted by gRPC either
		return mem.BufferSlice{mem.SliceBuffer(b)}, nil
	}
	return mem.BufferSlice{mem.NewBuffer(&b, f)}, nil
}

// answer returns the key of a request, and an answer. f.mu is held.
func (f *fakeOperations) answer(request any) (string, proto.Message) {
	switch r := request.(type) {
	case *pb.PutRequest:
		return string(r.GetKey()), &pb.PutResponse{Header: &pb.ResponseHeader{Revision: 7}}
	case *pb.RangeRequest:
		kv := &mvccpb.KeyValue{Key: r.GetKey(), Value: make([]byte, f.bytes)}
		return string(r.GetKey()), &pb.RangeResponse{Header: &pb.ResponseHeader{Revision: 7}, Kvs: []*mvccpb.KeyValue{kv}, Count: 1}
	case *pb.DeleteRangeRequest:
		return string(r.GetKey()), &pb.DeleteRangeResponse{Header: &pb.ResponseHeader{Revision: 7}, Deleted: 1}
	case *pb.TxnRequest:
		key := "txn"
		if c := r.GetCompare(); len(c) > 0 {
			key = string(c[0].GetKey())
		}
		if f.differs {
			kv := &mvccpb.KeyValue{Key: []byte(key), Value: make([]byte, f.bytes)}
			read := &pb.ResponseOp_ResponseRange{ResponseRange: &pb.RangeResponse{Kvs: []*mvccpb.KeyValue{kv}, Count: 1}}
			return key, &pb.TxnResponse{Header: &pb.ResponseHeader{Revision: 7}, Responses: []*pb.ResponseOp{{Response: read}}}
		}
		return key, &pb.TxnResponse{Header: &pb.ResponseHeader{Revision: 7}, Succeeded: true}
	}
	panic("no request of KV")
}

// Get implements mem.BufferPool.
func (f *fakeOperations) Get(n int) *[]byte { b := make([]byte, n); return &b }

// Put implements mem.BufferPool.
func (f *fakeOperations) Put(*[]byte) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.lent--
}

// counts returns how many operations there were, and at the same time, and how many buffers are lent.
func (f *fakeOperations) counts() (called, most, lent int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.called, f.most, f.lent
}

// starts returns how many requests were begun, and for how many of them somebody has waited.
func (f *fakeOperations) starts() (begun, waited int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.begun, f.waited
}

// fakeStream is a stream between a test and a pipe. Its messages pass as bytes, as on a network.
type fakeStream struct {
	grpc.ServerStream // nil: other methods are not called
	ctx               context.Context
	cancel            context.CancelFunc
	in                chan []byte // closed when the client closes its side
	out               chan *pipepb.ServerFrame
	ended             chan error // what the pipe ended with
}

func (s *fakeStream) Context() context.Context { return s.ctx }

func (s *fakeStream) RecvMsg(m any) error {
	select {
	case b, ok := <-s.in:
		if !ok {
			return io.EOF
		}
		m.(*clientFrame).Received(mem.BufferSlice{mem.SliceBuffer(b)})
		return nil
	case <-s.ctx.Done():
		return s.ctx.Err()
	}
}

func (s *fakeStream) SendMsg(m any) error {
	bufs := m.(*frame).Encoded()
	defer bufs.Free()
	f := &pipepb.ServerFrame{}
	if err := proto.Unmarshal(bufs.Materialize(), f); err != nil {
		return err
	}
	select {
	case s.out <- f:
		return nil
	case <-s.ctx.Done():
		return s.ctx.Err()
	}
}

// Recv and Send make it a BidiStreamingServer.
func (s *fakeStream) Recv() (*pipepb.ClientFrame, error) { panic("not called") }
func (s *fakeStream) Send(*pipepb.ServerFrame) error     { panic("not called") }

// rig is a service of fakes.
type rig struct {
	*Service
	ops *fakeOperations
	t   testing.TB
}

func newRig(t testing.TB, change func(*Options)) *rig {
	t.Helper()
	r := &rig{ops: newOperations(), t: t}
	o := Options{Operations: r.ops, Clock: clock.System()}
	if change != nil {
		change(&o)
	}
	r.Service = New(o)
	return r
}

// stop ends the service as a node does, and looks for what is left.
func (r *rig) stop() {
	r.t.Helper()
	close(r.ops.closing)
	r.ops.wg.Wait()
	if _, _, lent := r.ops.counts(); lent != 0 {
		r.t.Errorf("%d buffers of answers are not freed", lent)
	}
}

// pipe opens a pipe, and takes its window.
func (r *rig) pipe() *fakeStream {
	r.t.Helper()
	return r.pipeIn(context.Background())
}

// pipeIn is pipe with the context of a connection.
func (r *rig) pipeIn(ctx context.Context) *fakeStream {
	r.t.Helper()
	s := &fakeStream{in: make(chan []byte), out: make(chan *pipepb.ServerFrame), ended: make(chan error, 1)}
	s.ctx, s.cancel = context.WithCancel(ctx)
	go func() {
		err := r.Open(s)
		s.cancel() // as gRPC does when the handler returns
		s.ended <- err
	}()
	select {
	case f := <-s.out:
		if f.GetWindow().GetOperations() == 0 || len(f.GetAnswers()) != 0 {
			r.t.Errorf("the first frame is %v", f)
		}
	case <-s.ctx.Done():
	}
	return s
}

// send sends operations.
func (s *fakeStream) send(t testing.TB, ops ...*pipepb.Operation) {
	t.Helper()
	s.frame(t, &pipepb.ClientFrame{Operations: ops})
}

func (s *fakeStream) frame(t testing.TB, f *pipepb.ClientFrame) {
	t.Helper()
	b, err := proto.Marshal(f)
	if err != nil {
		t.Fatal(err)
	}
	select {
	case s.in <- b:
	case <-s.ctx.Done():
	}
}

// answers takes n answers, by their tags.
func (s *fakeStream) answers(t testing.TB, n int) map[uint64]*pipepb.Answer {
	t.Helper()
	got := map[uint64]*pipepb.Answer{}
	for len(got) < n {
		select {
		case f := <-s.out:
			for _, a := range f.GetAnswers() {
				if got[a.GetTag()] != nil {
					t.Errorf("the tag %d is answered twice", a.GetTag())
				}
				got[a.GetTag()] = a
			}
		case <-s.ctx.Done():
			t.Fatalf("the pipe ended after %d of %d answers: %v", len(got), n, <-s.ended)
		}
	}
	return got
}

func put(tag uint64, key string) *pipepb.Operation {
	return &pipepb.Operation{Tag: tag, Request: &pipepb.Operation_Put{Put: &pb.PutRequest{Key: []byte(key)}}}
}

func get(tag uint64, key string) *pipepb.Operation {
	return &pipepb.Operation{Tag: tag, Request: &pipepb.Operation_Range{Range: &pb.RangeRequest{Key: []byte(key)}}}
}

// admitted takes operations into the window of a pipe, as its reader does.
func (p *pipe) admitted(ops ...*pipepb.Operation) ([]*operation, error) {
	b, err := proto.Marshal(&pipepb.ClientFrame{Operations: ops})
	if err != nil {
		return nil, err
	}
	return p.receivedBytes(b)
}

// receivedBytes takes a frame as the reader does.
func (p *pipe) receivedBytes(b []byte) ([]*operation, error) {
	f := &clientFrame{}
	f.Received(mem.BufferSlice{mem.SliceBuffer(b)})
	begun, _, err := p.receive(f)
	return begun, err
}
