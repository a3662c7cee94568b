package client

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/skeindb/skein/api/pipepb"
)

// stream is an open pipe. The goroutine that has opened it sends by it, and one of its own receives.
type stream struct {
	l      *lane
	grpc   grpc.BidiStreamingClient[pipepb.ClientFrame, pipepb.ServerFrame]
	cancel context.CancelFunc
	window *pipepb.Window
	// over is closed when nothing more is received.
	over chan struct{}

	mu sync.Mutex
	// Guarded by mu. under are the calls that are sent and not answered, bytes their size.
	under map[uint64]*call
	bytes uint64
	// cancels are tags that are to be sent.
	cancels []uint64
	// leaving says that nothing more is sent, ended that nothing more is received.
	leaving, ended bool
}

// Bounds of an opening: loginTimeout that of a login, which hashes a password, and openingTimeout that of the rest.
const (
	loginTimeout   = 30 * time.Second
	openingTimeout = 5 * time.Second
)

// errNoWindow is a bug of the node.
var errNoWindow = errors.New("client: the node's first frame has no window")

// open opens a pipe on a connection, and starts to receive.
func (l *lane) open(conn *grpc.ClientConn) (*stream, error) {
	c := l.c
	ctx, cancel := context.WithCancel(c.ctx)
	bound := openingTimeout
	if c.etcd.Username != "" {
		bound = loginTimeout
	}
	late := time.AfterFunc(bound, cancel)
	defer late.Stop()
	g, err := pipepb.NewPipeClient(conn).Open(ctx, grpc.MaxCallRecvMsgSize(math.MaxInt32), grpc.MaxCallSendMsgSize(math.MaxInt32))
	var f *pipepb.ServerFrame
	if err == nil {
		late.Reset(openingTimeout)
		f, err = g.Recv()
	}
	if err == nil && f.GetWindow() == nil {
		err = errNoWindow
	}
	if err != nil {
		cancel()
		return nil, err
	}
	s := &stream{l: l, grpc: g, cancel: cancel, window: f.GetWindow(), over: make(chan struct{}), under: make(map[uint64]*call), leaving: f.GetClosing()}
	c.workers.Go(s.receive) // whoever opens one has closed wait
	return s, nil
}

// serve sends until the stream takes no more, and says whether it has sent anything. If nothing was under way from one tick of
// idle to the next, it ends.
func (s *stream) serve(idle <-chan time.Time) (sent bool) {
	defer func() {
		_ = s.grpc.CloseSend() // an error is the receiver's too
	}()
	ticked := false // and nothing was sent since
	for {
		f, on := s.next()
		switch {
		case !on:
			return sent
		case f == nil:
			select {
			case <-s.l.wake:
				runtime.Gosched() // those who are about to call join this message
			case <-s.over:
				return sent
			case <-idle:
				if ticked && s.nothingUnder() {
					return sent
				}
				ticked = true
			}
		case s.grpc.Send(f) != nil:
			return sent // the receiver learns why
		default:
			sent, ticked = true, false
		}
	}
}

// next returns the next message, or nil if there is nothing to send. on is false if the stream takes no more.
func (s *stream) next() (f *pipepb.ClientFrame, on bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.leaving || s.ended {
		return nil, false
	}
	if len(s.cancels) > 0 { // they have a frame of their own, so that operations have all of theirs
		f = &pipepb.ClientFrame{Cancels: s.cancels}
		s.cancels = nil
		return f, true
	}
	calls := s.l.take(int(s.window.GetOperations())-len(s.under), s.window.GetBytes()-s.bytes, s.window)
	if len(calls) == 0 {
		return nil, true
	}
	f = &pipepb.ClientFrame{Operations: make([]*pipepb.Operation, len(calls))}
	for i, call := range calls {
		call.on.Store(s)
		s.under[call.op.GetTag()] = call
		s.bytes += call.size
		f.Operations[i] = call.op
	}
	return f, true
}

// nothingUnder says whether nothing is under way.
func (s *stream) nothingUnder() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.under) == 0
}

// giveUp tells the node that nobody waits for a call any more.
func (s *stream) giveUp(call *call) {
	s.mu.Lock()
	if s.under[call.op.GetTag()] == call {
		s.cancels = append(s.cancels, call.op.GetTag())
	}
	s.mu.Unlock()
	s.l.look()
}

// receive takes answers until the stream ends.
func (s *stream) receive() {
	defer s.cancel()
	for {
		f, err := s.grpc.Recv()
		if err != nil {
			s.end(err)
			return
		}
		s.answered(f)
	}
}

// answered ends the calls that a frame answers.
func (s *stream) answered(f *pipepb.ServerFrame) {
	calls := make([]*call, len(f.GetAnswers()))
	s.mu.Lock()
	s.leaving = s.leaving || f.GetClosing()
	for i, a := range f.GetAnswers() {
		if call := s.under[a.GetTag()]; call != nil {
			calls[i] = call
			delete(s.under, a.GetTag())
			s.bytes -= call.size
		}
	}
	s.mu.Unlock()
	for i, a := range f.GetAnswers() {
		if calls[i] == nil {
			continue // an answer of nobody's harms nobody
		}
		if p := a.GetPlace(); p != nil {
			s.l.c.learn(calls[i], p)
		}
		s.endCall(calls[i], a)
	}
	s.l.look()
}

// endCall ends a call by its answer.
func (s *stream) endCall(c *call, a *pipepb.Answer) {
	err := c.errorOf(a)
	toAny := s.l == &s.l.c.any
	if e := a.GetError(); e != nil && !toAny && isNodes(codes.Code(e.GetCode())) {
		s.l.c.forget(c) // another node may be better off
	}
	if err == nil || !isOldToken(err) || s.l.c.etcd.Username == "" || c.renewed {
		c.end(a, err)
		return
	}
	// Nothing has happened. The next stream has a new token. A leader's says nothing of that of any.
	c.renewed = toAny
	s.leave()
	s.l.c.again([]*call{c})
}

// isNodes says whether an error with the code may be the node's, rather than that of the request.
func isNodes(code codes.Code) bool {
	return code == codes.Unavailable || code == codes.DeadlineExceeded
}

// leave has the client open another stream.
func (s *stream) leave() {
	s.mu.Lock()
	s.leaving = true
	s.mu.Unlock()
}

// end settles the calls that have no answer: reads are sent again.
func (s *stream) end(err error) {
	s.mu.Lock()
	s.ended = true
	under := s.under
	s.under = nil
	s.mu.Unlock()
	close(s.over)
	why := rpctypes.Error(err)
	if s.l.c.ctx.Err() != nil {
		why = ErrClosed
	}
	broken := status.Code(err) == codes.InvalidArgument || status.Code(err) == codes.ResourceExhausted
	var again []*call
	for _, call := range under {
		switch {
		case call.changes:
			call.end(nil, fmt.Errorf("%w: %w", ErrUnknownFate, why))
		case broken:
			call.end(nil, why) // the node does not take what was sent: again it would end alike
		default:
			again = append(again, call)
		}
	}
	s.l.c.again(again)
}
