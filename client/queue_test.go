package client

import (
	"context"
	"errors"
	"fmt"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/skeindb/skein/api/pipepb"
)

// noPipe is a client whose goroutine does not run.
func noPipe(user string) *Client {
	return newClient(&clientv3.Client{Username: user})
}

// lateContext ends behind the first look at it.
type lateContext struct {
	context.Context
	looked func()
}

func (c *lateContext) Err() error {
	err := c.Context.Err()
	if looked := c.looked; looked != nil {
		c.looked = nil
		looked()
	}
	return err
}

// TestGivenUpAtTheLastMoment: a put that is given up while it is taken out of the queue is not sent, and is no success.
func TestGivenUpAtTheLastMoment(t *testing.T) {
	c := noPipe("")
	base, cancel := context.WithCancel(t.Context())
	ctx := &lateContext{Context: base}
	f := Do(ctx, c, &pb.PutRequest{Key: []byte("k")})
	ctx.looked = func() {
		cancel()
		if err := f.Err(); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	}
	if calls := c.any.take(4, 4000, &pipepb.Window{FrameBytes: 2000}); len(calls) != 0 {
		t.Error("it is sent")
	}
	<-f.Done()
	if f.call.err == nil {
		t.Error("it is a success")
	}
}

// TestQueueWithoutPipe: while no pipe can be opened, calls whose context has ended leave the queue, and others stay.
func TestQueueWithoutPipe(t *testing.T) {
	c := noPipe("")
	ended, cancel := context.WithCancel(t.Context())
	gone := Do(ended, c, &pb.PutRequest{Key: []byte("k")})
	stays := Do(t.Context(), c, &pb.PutRequest{Key: []byte("k")})
	cancel()
	if c.notOpened(status.Error(codes.Unavailable, "nobody there")) {
		t.Error("it does not try again")
	}
	<-gone.Done()
	if err := gone.Err(); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if len(c.any.queue) != 1 || c.any.queue[0] != &stays.call {
		t.Errorf("the queue has %d calls", len(c.any.queue))
	}
}

// TestFinalErrors: what may pass is tried again, whether it is of the stream or of the login before it.
func TestFinalErrors(t *testing.T) {
	for _, c := range []struct {
		err   error
		user  string
		final bool
	}{
		{err: status.Error(codes.Unavailable, "gone")},
		{err: rpctypes.Error(rpctypes.ErrGRPCNoLeader), user: "u"},
		{err: rpctypes.Error(rpctypes.ErrGRPCTimeout), user: "u"},
		{err: rpctypes.Error(rpctypes.ErrGRPCRequestTooManyRequests), user: "u"},
		{err: fmt.Errorf("login: %w", context.Canceled), user: "u"},
		{err: context.DeadlineExceeded, user: "u"},
		{err: rpctypes.ErrGRPCInvalidAuthToken, user: "u"},
		{err: rpctypes.ErrGRPCAuthOldRevision, user: "u"},
		{err: rpctypes.ErrGRPCInvalidAuthToken, final: true},
		{err: rpctypes.ErrGRPCAuthOldRevision, final: true},
		{err: rpctypes.Error(rpctypes.ErrGRPCAuthFailed), user: "u", final: true},
		{err: rpctypes.ErrGRPCUserEmpty, final: true},
		{err: status.Error(codes.Unimplemented, "unknown service"), final: true},
		{err: errNoWindow, final: true},
	} {
		if err := noPipe(c.user).finally(c.err); (err != nil) != c.final {
			t.Errorf("user %q, %v: %v", c.user, c.err, err)
		}
	}
}
