package conformance

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/api/pipepb"
)

// pipe is an open pipe to a gateway. It speaks the protocol itself: package client has words of its own for errors, and sends
// reads again, and the comparison must see what the node answers.
type pipe struct {
	stream grpc.BidiStreamingClient[pipepb.ClientFrame, pipepb.ServerFrame]
	cancel context.CancelFunc
	window *pipepb.Window
	// received is closed when nothing more comes, and says why.
	received chan struct{}
	err      error

	sending sync.Mutex // while an operation is sent

	mu sync.Mutex
	// Guarded by mu. under are the operations under way, by their tags, bytes their size, last the last tag.
	under map[uint64]underWay
	bytes uint64
	last  uint64
}

// underWay is an operation that is not answered.
type underWay struct {
	size uint64
	to   chan<- *pipepb.Answer // has room for one
}

// openPipe opens a pipe, with the user that the context names. The context ends the opening and nothing else.
func openPipe(ctx context.Context, conn *grpc.ClientConn) (*pipe, error) {
	own, cancel := context.WithCancel(context.WithoutCancel(ctx))
	late := context.AfterFunc(ctx, cancel)
	stream, err := pipepb.NewPipeClient(conn).Open(own)
	var f *pipepb.ServerFrame
	if err == nil {
		f, err = stream.Recv()
	}
	if err == nil && (f.GetWindow() == nil || !late()) {
		err = fmt.Errorf("conformance: the first frame of a pipe is %v: %w", f, ctx.Err())
	}
	if err != nil {
		cancel()
		return nil, err
	}
	p := &pipe{stream: stream, cancel: cancel, window: f.GetWindow(), received: make(chan struct{}), under: map[uint64]underWay{}}
	go p.receive()
	return p, nil
}

// close ends the pipe, and says what is wrong with its end.
func (p *pipe) close() error {
	defer p.cancel()
	if err := p.stream.CloseSend(); err != nil {
		return err
	}
	<-p.received
	return p.err
}

// receive hands out answers until the pipe ends.
func (p *pipe) receive() {
	defer close(p.received)
	for {
		f, err := p.stream.Recv()
		if err != nil {
			p.err = err
			return
		}
		p.mu.Lock()
		for _, a := range f.GetAnswers() {
			if o, ok := p.under[a.GetTag()]; ok {
				o.to <- a
				p.bytes -= o.size
				delete(p.under, a.GetTag())
			}
		}
		p.mu.Unlock()
	}
}

// enter takes an operation into the window and gives it a tag. It is not ok if the window, or a frame, has no room.
func (p *pipe) enter(op *pipepb.Operation) (answered <-chan *pipepb.Answer, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.last++
	op.Tag = p.last
	size := uint64(proto.Size(op))
	framed := uint64(proto.Size(&pipepb.ClientFrame{Operations: []*pipepb.Operation{op}}))
	w := p.window
	if framed > w.GetFrameBytes() || p.bytes+size > w.GetBytes() || len(p.under) >= int(w.GetOperations()) {
		return nil, false
	}
	to := make(chan *pipepb.Answer, 1)
	p.bytes += size
	p.under[op.Tag] = underWay{size, to}
	return to, true
}

// do sends an operation and waits for its answer. It is not ok, and nothing is sent, if the pipe has no room for it.
func (p *pipe) do(ctx context.Context, op *pipepb.Operation) (a answer, ok bool) {
	answered, ok := p.enter(op)
	if !ok {
		return a, false
	}
	p.sending.Lock()
	err := p.stream.Send(&pipepb.ClientFrame{Operations: []*pipepb.Operation{op}})
	p.sending.Unlock()
	if err == nil || errors.Is(err, io.EOF) { // the end of the stream has its reason
		select {
		case a := <-answered:
			return answerOf(a), true
		case <-p.received:
			err = p.err
		case <-ctx.Done():
			err = ctx.Err()
		}
	}
	return answer{code: codes.Internal, text: fmt.Sprintf("conformance: the pipe: %v", err)}, true
}

// answerOf returns the answer of a store that the answer to an operation is.
func answerOf(a *pipepb.Answer) answer {
	switch r := a.GetAnswer().(type) {
	case *pipepb.Answer_Error:
		return answer{code: codes.Code(r.Error.GetCode()), text: r.Error.GetMessage()}
	case *pipepb.Answer_Range:
		return answer{response: r.Range}
	case *pipepb.Answer_Put:
		return answer{response: r.Put}
	case *pipepb.Answer_DeleteRange:
		return answer{response: r.DeleteRange}
	case *pipepb.Answer_Txn:
		return answer{response: r.Txn}
	}
	return answer{code: codes.Internal, text: fmt.Sprintf("conformance: the pipe: an answer %v", a)}
}

// operation returns the operation that a call is, nil if pipes have none.
func (c *call) operation() *pipepb.Operation {
	if c.kind.do != nil || c.kind.invoke != nil {
		return nil // it is made in another way
	}
	switch r := c.request.(type) {
	case *pb.RangeRequest:
		return &pipepb.Operation{Request: &pipepb.Operation_Range{Range: r}}
	case *pb.PutRequest:
		return &pipepb.Operation{Request: &pipepb.Operation_Put{Put: r}}
	case *pb.DeleteRangeRequest:
		return &pipepb.Operation{Request: &pipepb.Operation_DeleteRange{DeleteRange: r}}
	case *pb.TxnRequest:
		if c.kind.name == compareAndPutName {
			short := &pipepb.CompareAndPut{ModRevision: r.GetCompare()[0].GetModRevision(), Put: r.GetSuccess()[0].GetRequestPut()}
			return &pipepb.Operation{Request: &pipepb.Operation_CompareAndPut{CompareAndPut: short}}
		}
		return &pipepb.Operation{Request: &pipepb.Operation_Txn{Txn: r}}
	}
	return nil
}

// compareAndPutName marks transactions that the pipe has a short form of.
const compareAndPutName = "CompareAndPut"

// compareAndPut returns such a transaction: a put if the key was last modified at a revision, and otherwise a read of the key.
func (s *source) compareAndPut(g int) *pb.TxnRequest {
	put := s.txnPut(g)
	key := put.GetRequestPut().GetKey()
	revision := s.near(s.known[string(key)].GetModRevision())
	return &pb.TxnRequest{
		Compare: []*pb.Compare{{Key: key, Target: pb.Compare_MOD, Result: pb.Compare_EQUAL, TargetUnion: &pb.Compare_ModRevision{ModRevision: revision}}},
		Success: []*pb.RequestOp{put},
		Failure: []*pb.RequestOp{{Request: &pb.RequestOp_RequestRange{RequestRange: &pb.RangeRequest{Key: key}}}},
	}
}

// pipeName stands in the counts of outcomes before the kinds of calls that went by a pipe.
const pipeName = "Pipe "

// ask makes a call at a gateway of Skein's: by a pipe, if the call is to go there and one can carry it.
func (p *pair) ask(ctx context.Context, c *call, gateway int) answer {
	if c.byPipe {
		if a, ok := p.askByPipe(ctx, c, gateway); ok {
			return a
		}
		c.byPipe = false
	}
	return do(ctx, p.skein.conns[gateway], c)
}

func (p *pair) askByPipe(ctx context.Context, c *call, gateway int) (a answer, ok bool) {
	op := c.operation()
	switch {
	case op == nil || p.users == nil && p.pipes == nil:
		return a, false
	case p.users == nil:
		return p.pipes[gateway].do(ctx, op)
	}
	// A pipe has one user. One that is refused says nothing of the operation.
	own, err := openPipe(ctx, p.skein.conns[gateway])
	if err != nil {
		return a, false
	}
	defer func() { _ = own.close() }() // what is wrong with the pipe, the answer says
	return own.do(ctx, op)
}

// openPipes opens a pipe to each gateway, unless calls have users.
func (p *pair) openPipes(ctx context.Context) error {
	if p.users != nil {
		return nil
	}
	for _, conn := range p.skein.conns {
		opened, err := openPipe(ctx, conn)
		if err != nil {
			return errors.Join(fmt.Errorf("open a pipe: %w", err), p.closePipes())
		}
		p.pipes = append(p.pipes, opened)
	}
	return nil
}

// closePipes closes what openPipes has opened. A pipe that the node has ended is an error.
func (p *pair) closePipes() error {
	var wrong []error
	for i, open := range p.pipes {
		if err := open.close(); !errors.Is(err, io.EOF) {
			wrong = append(wrong, fmt.Errorf("the pipe to node %d: %w", i+1, err))
		}
	}
	p.pipes = nil
	return errors.Join(wrong...)
}
