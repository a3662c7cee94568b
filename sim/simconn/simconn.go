// Package simconn is a client's gRPC connection to the nodes of a simulation. Each call goes to any node that takes
// calls. Answers get lost now and then, and streams break after a few messages: whoever calls must repeat.
package simconn

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Peer is a node that takes a call. Life ends with the node: no client hears of it afterwards. Leave ends the call.
type Peer struct {
	Conn  grpc.ClientConnInterface
	Life  context.Context
	Leave func()
}

// Options are what a Conn is made of.
type Options struct {
	// Pick returns a node that takes calls, nil if there is none; n is a random number.
	Pick func(n int) *Peer
	// Rand decides what breaks.
	Rand *rand.Rand
	// Timeout bounds one call that is no stream.
	Timeout time.Duration
	// Lose is of how many answers one gets lost, Break after how many messages a stream breaks at most; 0 is never.
	Lose, Break int
}

// Conn is a grpc.ClientConnInterface. It may be used from many goroutines.
type Conn struct {
	o  Options
	mu sync.Mutex
	// last, guarded by mu as Options.Rand is, is the node of the last call.
	last int
}

// New returns a connection.
func New(o Options) *Conn { return &Conn{o: o} }

func (c *Conn) draw(n int) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.o.Rand.IntN(n)
}

// pick takes a node for a call: mostly the last one's.
func (c *Conn) pick() *Peer {
	c.mu.Lock()
	if c.o.Rand.IntN(3) == 0 {
		c.last = c.o.Rand.IntN(1 << 20)
	}
	n := c.last
	c.mu.Unlock()
	return c.o.Pick(n)
}

var errGone = status.Error(codes.Unavailable, "simconn: the connection broke")

// Invoke implements grpc.ClientConnInterface.
func (c *Conn) Invoke(ctx context.Context, method string, args, reply any, opts ...grpc.CallOption) error {
	p := c.pick()
	if p == nil {
		return errGone
	}
	defer p.Leave()
	ctx, cancel := context.WithTimeout(ctx, c.o.Timeout)
	defer cancel()
	stop := context.AfterFunc(p.Life, cancel)
	defer stop()
	err := p.Conn.Invoke(ctx, method, args, reply, opts...)
	if p.Life.Err() != nil || c.o.Lose > 0 && c.draw(c.o.Lose) == 0 {
		return errGone
	}
	return err
}

// NewStream implements grpc.ClientConnInterface.
func (c *Conn) NewStream(ctx context.Context, desc *grpc.StreamDesc, method string, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	p := c.pick()
	if p == nil {
		return nil, errGone
	}
	ctx, cancel := context.WithCancel(ctx)
	st := &stream{peer: p, left: -1}
	unhook := context.AfterFunc(p.Life, cancel)
	st.end = sync.OnceFunc(func() {
		cancel()
		unhook()
		p.Leave()
	})
	context.AfterFunc(ctx, st.end)
	var err error
	if st.ClientStream, err = p.Conn.NewStream(ctx, desc, method, opts...); err != nil {
		st.end()
		return nil, err
	}
	if c.o.Break > 0 {
		st.left = 1 + c.draw(c.o.Break)
	}
	return st, nil
}

// stream is a stream that breaks. One goroutine receives.
type stream struct {
	grpc.ClientStream
	peer *Peer
	end  func()
	// left is how many messages come until it breaks, negative if it does not.
	left int
}

// RecvMsg implements grpc.ClientStream.
func (s *stream) RecvMsg(m any) error {
	if s.left == 0 {
		s.end()
		return errGone
	}
	s.left--
	err := s.ClientStream.RecvMsg(m)
	if s.peer.Life.Err() != nil {
		err = errGone
	}
	if err != nil {
		s.end()
	}
	return err
}
