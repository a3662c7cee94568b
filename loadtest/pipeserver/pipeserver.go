// Package pipeserver serves Skein's pipes from whatever serves etcd's KV, for the small servers that the load generator is tested
// and measured against. It trusts its clients: nobody is refused for ignoring the window, and cancels are passed over. A node's
// pipes are package pipeapi.
package pipeserver

import (
	"context"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/skeindb/skein/api/pipepb"
)

// The window of each pipe, as a node has it by default.
const (
	windowOperations = 1024
	windowBytes      = 4 << 20
	frameBytes       = 2 << 20
)

// Register has a server serve pipes whose operations are calls of kv.
func Register(s *grpc.Server, kv etcdserverpb.KVServer) {
	pipepb.RegisterPipeServer(s, &service{kv: kv})
}

type service struct {
	pipepb.UnsafePipeServer
	kv etcdserverpb.KVServer
}

// Open implements pipepb.PipeServer.
func (s *service) Open(stream grpc.BidiStreamingServer[pipepb.ClientFrame, pipepb.ServerFrame]) error {
	w := &pipepb.Window{Operations: windowOperations, Bytes: windowBytes, FrameBytes: frameBytes}
	if err := stream.Send(&pipepb.ServerFrame{Window: w}); err != nil {
		return err
	}
	answers := make(chan *pipepb.Answer, windowOperations)
	var work, writer sync.WaitGroup
	writer.Go(func() { write(stream, answers) })
	for {
		f, err := stream.Recv()
		if err != nil {
			break // the client has closed its side, or is gone
		}
		for _, op := range f.GetOperations() {
			work.Go(func() { answers <- s.answer(stream.Context(), op) })
		}
	}
	work.Wait()
	close(answers)
	writer.Wait()
	return nil
}

// write sends answers, those that there are in one frame, until there will be no more.
func write(stream grpc.BidiStreamingServer[pipepb.ClientFrame, pipepb.ServerFrame], answers <-chan *pipepb.Answer) {
	for a := range answers {
		f := &pipepb.ServerFrame{Answers: []*pipepb.Answer{a}}
		for range len(answers) {
			f.Answers = append(f.Answers, <-answers)
		}
		// Without its client the stream takes nothing, and Open ends.
		_ = stream.Send(f)
	}
}

// answer does one operation.
func (s *service) answer(ctx context.Context, op *pipepb.Operation) *pipepb.Answer {
	if ms := op.GetTimeoutMs(); ms > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Duration(ms)*time.Millisecond)
		defer cancel()
	}
	a := &pipepb.Answer{Tag: op.GetTag()}
	var err error
	switch r := op.GetRequest().(type) {
	case *pipepb.Operation_Put:
		var resp *etcdserverpb.PutResponse
		resp, err = s.kv.Put(ctx, r.Put)
		a.Answer = &pipepb.Answer_Put{Put: resp}
	case *pipepb.Operation_Range:
		var resp *etcdserverpb.RangeResponse
		resp, err = s.kv.Range(ctx, r.Range)
		a.Answer = &pipepb.Answer_Range{Range: resp}
	case *pipepb.Operation_Txn:
		var resp *etcdserverpb.TxnResponse
		resp, err = s.kv.Txn(ctx, r.Txn)
		a.Answer = &pipepb.Answer_Txn{Txn: resp}
	default:
		err = status.Errorf(codes.Unimplemented, "operation %T", r)
	}
	if err != nil {
		e := status.Convert(err)
		a.Answer = &pipepb.Answer_Error{Error: &pipepb.Error{Code: int32(e.Code()), Message: e.Message()}}
	}
	return a
}
