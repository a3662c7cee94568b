package client_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/skeindb/skein/api/pipepb"
	"github.com/skeindb/skein/client"
	"github.com/skeindb/skein/kverror"
)

// fakeNode is a node whose pipes a test serves.
type fakeNode struct {
	pipepb.UnsafePipeServer
	// serve is asked for each pipe, the first of which has the number 0.
	serve func(n int, s grpc.BidiStreamingServer[pipepb.ClientFrame, pipepb.ServerFrame]) error

	mu    sync.Mutex
	pipes int // guarded by mu
}

func (f *fakeNode) Open(s grpc.BidiStreamingServer[pipepb.ClientFrame, pipepb.ServerFrame]) error {
	f.mu.Lock()
	n := f.pipes
	f.pipes++
	f.mu.Unlock()
	if err := s.Send(&pipepb.ServerFrame{Window: &pipepb.Window{Operations: 4, Bytes: 4000, FrameBytes: 2000}}); err != nil {
		return err
	}
	return f.serve(n, s)
}

// start serves, and returns a client of it.
func (f *fakeNode) start(t *testing.T) *client.Client {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	s := grpc.NewServer()
	pipepb.RegisterPipeServer(s, f)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = s.Serve(l) // ends by Stop
	}()
	t.Cleanup(func() {
		s.Stop()
		<-done
	})
	return open(t, at(l.Addr().String()))
}

// answer answers an operation as a node does where all goes well.
func answer(op *pipepb.Operation) *pipepb.Answer {
	h := &pb.ResponseHeader{Revision: 7}
	switch op.GetRequest().(type) {
	case *pipepb.Operation_Range:
		return &pipepb.Answer{Tag: op.GetTag(), Answer: &pipepb.Answer_Range{Range: &pb.RangeResponse{Header: h}}}
	case *pipepb.Operation_Put:
		return &pipepb.Answer{Tag: op.GetTag(), Answer: &pipepb.Answer_Put{Put: &pb.PutResponse{Header: h}}}
	}
	return &pipepb.Answer{Tag: op.GetTag(), Answer: &pipepb.Answer_Txn{Txn: &pb.TxnResponse{Header: h}}}
}

// answerAll serves a pipe where all goes well.
func answerAll(s grpc.BidiStreamingServer[pipepb.ClientFrame, pipepb.ServerFrame]) error {
	for {
		f, err := s.Recv()
		if err != nil {
			return nil //nolint:nilerr // the client's side is closed
		}
		out := &pipepb.ServerFrame{}
		for _, op := range f.GetOperations() {
			out.Answers = append(out.Answers, answer(op))
		}
		if err := s.Send(out); err != nil {
			return err
		}
	}
}

// TestLostPipe: of what was sent and not answered, reads are sent again by another pipe, and the fate of changes is unknown. What
// was not sent is sent.
func TestLostPipe(t *testing.T) {
	f := &fakeNode{serve: func(n int, s grpc.BidiStreamingServer[pipepb.ClientFrame, pipepb.ServerFrame]) error {
		if n > 0 {
			return answerAll(s)
		}
		for got := 0; got < 4; { // the window: the fifth is not sent
			in, err := s.Recv()
			if err != nil {
				return err
			}
			got += len(in.GetOperations())
		}
		return status.Error(codes.Unavailable, "the node is gone")
	}}
	c := f.start(t)
	read := client.Do(t.Context(), c, &pb.RangeRequest{Key: []byte("k")})
	readOnly := client.Do(t.Context(), c, &pb.TxnRequest{Success: []*pb.RequestOp{{Request: &pb.RequestOp_RequestRange{RequestRange: &pb.RangeRequest{Key: []byte("k")}}}}})
	put := client.Do(t.Context(), c, &pb.PutRequest{Key: []byte("k")})
	cas := client.Do(t.Context(), c, &pipepb.CompareAndPut{Put: &pb.PutRequest{Key: []byte("k")}})
	unsent := client.Do(t.Context(), c, &pb.PutRequest{Key: []byte("k")})
	for what, f := range map[string]*client.Future{"a read": read, "a transaction that reads": readOnly, "a put that was not sent": unsent} {
		if err := f.Err(); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	for what, f := range map[string]*client.Future{"a put": put, "a compare-and-put": cas} {
		if err := f.Err(); !errors.Is(err, client.ErrUnknownFate) || !strings.Contains(err.Error(), "the node is gone") {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// TestObeysTheWindow: neither operations nor bytes under way are more than the node has announced, and no frame is larger. What
// fits into no frame is refused as etcd does.
func TestObeysTheWindow(t *testing.T) {
	f := &fakeNode{serve: func(_ int, s grpc.BidiStreamingServer[pipepb.ClientFrame, pipepb.ServerFrame]) error {
		var under []*pipepb.Operation
		for {
			in, err := s.Recv()
			if err != nil {
				return nil //nolint:nilerr // the client's side is closed
			}
			under = append(under, in.GetOperations()...)
			bytes := 0
			for _, op := range under {
				bytes += len(op.GetPut().GetValue())
			}
			if len(under) > 4 || bytes > 4000 {
				return status.Errorf(codes.ResourceExhausted, "%d operations of %d bytes", len(under), bytes)
			}
			// The last one is answered first, and one stays under way where it can.
			if err := s.Send(&pipepb.ServerFrame{Answers: []*pipepb.Answer{answer(under[len(under)-1])}}); err != nil {
				return err
			}
			if under = under[:len(under)-1]; len(under) > 1 {
				out := &pipepb.ServerFrame{}
				for _, op := range under {
					out.Answers = append(out.Answers, answer(op))
				}
				under = nil
				if err := s.Send(out); err != nil {
					return err
				}
			}
			if len(under) == 1 {
				if err := s.Send(&pipepb.ServerFrame{Answers: []*pipepb.Answer{answer(under[0])}}); err != nil {
					return err
				}
				under = nil
			}
		}
	}}
	c := f.start(t)
	var futures []*client.Future
	for i := range 200 {
		futures = append(futures, client.Do(t.Context(), c, &pb.PutRequest{Key: fmt.Append(nil, i), Value: make([]byte, 1+i*9)}))
	}
	for i, f := range futures {
		if err := f.Err(); err != nil {
			t.Fatalf("put %d: %v", i, err)
		}
	}
	if _, err := c.Put(t.Context(), "k", string(make([]byte, 2000))); !errors.Is(err, rpctypes.ErrRequestTooLarge) {
		t.Error(err)
	}
}

// TestGivenUp: a call ends with its context. The node is told, and the change that was sent may have happened.
func TestGivenUp(t *testing.T) {
	got, told := make(chan uint64, 2), make(chan uint64, 2)
	f := &fakeNode{serve: func(_ int, s grpc.BidiStreamingServer[pipepb.ClientFrame, pipepb.ServerFrame]) error {
		for {
			in, err := s.Recv()
			if err != nil {
				return nil //nolint:nilerr // the client's side is closed
			}
			for _, op := range in.GetOperations() {
				got <- op.GetTag()
			}
			for _, tag := range in.GetCancels() {
				told <- tag
			}
		}
	}}
	c := f.start(t)
	for _, put := range []bool{true, false} {
		ctx, cancel := context.WithCancel(t.Context())
		var future *client.Future
		if put {
			future = client.Do(ctx, c, &pb.PutRequest{Key: []byte("k")})
		} else {
			future = client.Do(ctx, c, &pb.RangeRequest{Key: []byte("k")})
		}
		tag := <-got
		cancel()
		if err := future.Err(); !errors.Is(err, context.Canceled) || errors.Is(err, client.ErrUnknownFate) != put {
			t.Errorf("put %v: %v", put, err)
		}
		if canceled := <-told; canceled != tag {
			t.Errorf("the tag %d is given up, and the node is told of %d", tag, canceled)
		}
	}
}

// TestLeavesAClosingNode: what comes after a node has said that it stops goes by another pipe, and what was sent is answered by the
// old one.
func TestLeavesAClosingNode(t *testing.T) {
	release, second := make(chan struct{}), make(chan struct{}, 16)
	f := &fakeNode{serve: func(n int, s grpc.BidiStreamingServer[pipepb.ClientFrame, pipepb.ServerFrame]) error {
		if n > 0 {
			second <- struct{}{}
			return answerAll(s)
		}
		in, err := s.Recv()
		if err != nil {
			return err
		}
		if err := s.Send(&pipepb.ServerFrame{Closing: true}); err != nil {
			return err
		}
		<-release
		return s.Send(&pipepb.ServerFrame{Answers: []*pipepb.Answer{answer(in.GetOperations()[0])}})
	}}
	c := f.start(t)
	first := client.Do(t.Context(), c, &pb.PutRequest{Key: []byte("k")})
	<-second // so the client knows
	_, err := c.Put(t.Context(), "k", "v")
	must(t, err)
	close(release)
	if err := first.Err(); err != nil {
		t.Error(err)
	}
}

// TestFates: a change that a node answers with an error has an unknown fate exactly where the table of errors says so. A read
// has none.
func TestFates(t *testing.T) {
	table := kverror.Table()
	f := &fakeNode{serve: func(_ int, s grpc.BidiStreamingServer[pipepb.ClientFrame, pipepb.ServerFrame]) error {
		for {
			in, err := s.Recv()
			if err != nil {
				return nil //nolint:nilerr // the client's side is closed
			}
			out := &pipepb.ServerFrame{}
			for _, op := range in.GetOperations() {
				key := op.GetPut().GetKey()
				if key == nil {
					key = op.GetRange().GetKey()
				}
				e := status.Convert(table[key[0]].GRPC)
				out.Answers = append(out.Answers, &pipepb.Answer{Tag: op.GetTag(), Answer: &pipepb.Answer_Error{Error: &pipepb.Error{Code: int32(e.Code()), Message: e.Message()}}})
			}
			if err := s.Send(out); err != nil {
				return err
			}
		}
	}}
	c := f.start(t)
	for i, row := range table {
		_, err := c.Put(t.Context(), string([]byte{byte(i)}), "")
		if err == nil || row.Fate == kverror.Unknown && !errors.Is(err, client.ErrUnknownFate) {
			t.Errorf("%s: %v does not say that the change may have happened", row.Name, err)
		}
		if row.Fate == kverror.NotApplied && row.Retry != kverror.RetryRouter && errors.Is(err, client.ErrUnknownFate) {
			t.Errorf("%s: %v, and it has not happened", row.Name, err)
		}
		if _, err := c.Get(t.Context(), string([]byte{byte(i)})); err == nil || errors.Is(err, client.ErrUnknownFate) {
			t.Errorf("%s: a read ends with %v", row.Name, err)
		}
	}
}

// TestNoPipe: an endpoint without pipes is named as that.
func TestNoPipe(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	s := grpc.NewServer()
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = s.Serve(l) // ends by Stop
	}()
	defer func() {
		s.Stop()
		<-done
	}()
	if _, err := client.Open(t.Context(), at(l.Addr().String())); !errors.Is(err, client.ErrNoPipe) {
		t.Error(err)
	}
}
