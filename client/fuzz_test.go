package client_test

import (
	"context"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/api/pipepb"
	"github.com/skeindb/skein/client"
)

// FuzzNode has a node send any frames. Whatever they are, a put ends: it has its response, is refused, or is of unknown fate. So does a
// read, which the next pipe answers where this one does not.
func FuzzNode(f *testing.F) {
	for _, frame := range []*pipepb.ServerFrame{
		{},
		{Closing: true},
		{Window: &pipepb.Window{}},
		{Answers: []*pipepb.Answer{{Tag: 1}, {Tag: 1}, {Tag: 9}}},
		{Answers: []*pipepb.Answer{{Tag: 1, Answer: &pipepb.Answer_Error{Error: &pipepb.Error{Code: 99, Message: "x"}}}}},
		{Answers: []*pipepb.Answer{{Tag: 1, Answer: &pipepb.Answer_Error{Error: &pipepb.Error{}}}}},
		{Answers: []*pipepb.Answer{{Tag: 2, Answer: &pipepb.Answer_Range{}}, {Tag: 1, Answer: &pipepb.Answer_Put{Put: &pb.PutResponse{}}}}},
	} {
		b, err := proto.Marshal(frame)
		must(f, err)
		f.Add(b, b)
	}
	f.Fuzz(func(t *testing.T, one, two []byte) {
		frames := []*pipepb.ServerFrame{{}, {}}
		if proto.Unmarshal(one, frames[0]) != nil || proto.Unmarshal(two, frames[1]) != nil {
			t.Skip() // gRPC ends the stream
		}
		node := &fakeNode{serve: func(n int, s grpc.BidiStreamingServer[pipepb.ClientFrame, pipepb.ServerFrame]) error {
			if n > 0 {
				return answerAll(s)
			}
			for got := 0; got < 2; {
				in, err := s.Recv()
				if err != nil {
					return err
				}
				got += len(in.GetOperations())
			}
			for _, frame := range frames {
				if err := s.Send(frame); err != nil {
					return err
				}
			}
			return nil
		}}
		c := node.start(t)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		change := client.Do(ctx, c, &pb.PutRequest{Key: []byte("k")})
		read := client.Do(ctx, c, &pb.RangeRequest{Key: []byte("k")})
		if response, err := change.Put(); ctx.Err() != nil || err == nil && response == nil {
			t.Errorf("a put: %v, %v", response, err)
		}
		if response, err := read.Range(); ctx.Err() != nil || err == nil && response == nil {
			t.Errorf("a read: %v, %v", response, err)
		}
	})
}
