package client

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/api/pipepb"
)

// call is one operation. Whoever takes it out of the queue, or out of a stream, ends it.
type call struct {
	ctx  context.Context
	op   *pipepb.Operation
	size uint64
	// key is one that the operation concerns, by which it is sent to a leader. Without one any node is as good.
	key []byte
	// changes says that it may change something.
	changes bool
	// renewed says that it was sent again with another token. Who ends the call reads and writes it.
	renewed bool
	// state is one of those below, and on the stream that the call was sent by last.
	state atomic.Int32
	on    atomic.Pointer[stream]
	// done is closed behind answer and err.
	done   chan struct{}
	answer *pipepb.Answer
	err    error
}

// States of a call: it may be sent, or nobody waits for it any more.
const (
	queued int32 = iota
	sent
	gaveUp
)

// end gives the call its answer or error.
func (c *call) end(a *pipepb.Answer, err error) {
	c.answer, c.err = a, err
	close(c.done)
}

// errorOf returns the error that an answer is, in the words of etcd's client.
func (c *call) errorOf(a *pipepb.Answer) error {
	if c.isAnswer(a) {
		return nil
	}
	e := a.GetError()
	code := codes.Code(e.GetCode())
	if code == codes.OK {
		return c.unknown(errNoAnswer)
	}
	if ended := c.ctx.Err(); ended != nil && (code == codes.Canceled || code == codes.DeadlineExceeded) {
		return c.unknown(ended)
	}
	err := rpctypes.Error(status.Error(code, e.GetMessage()))
	if mayHaveHappened(code, err) {
		return c.unknown(err)
	}
	return err
}

// errNoAnswer is a bug of the node.
var errNoAnswer = errors.New("client: what the node answers is no answer to the operation")

// isAnswer says whether an answer is the response to the operation.
func (c *call) isAnswer(a *pipepb.Answer) bool {
	switch c.op.GetRequest().(type) {
	case *pipepb.Operation_Range:
		return a.GetRange() != nil
	case *pipepb.Operation_Put:
		return a.GetPut() != nil
	case *pipepb.Operation_DeleteRange:
		return a.GetDeleteRange() != nil
	}
	return a.GetTxn() != nil
}

// unknown returns the error of a call that has happened or not.
func (c *call) unknown(err error) error {
	if !c.changes {
		return err
	}
	return fmt.Errorf("%w: %w", ErrUnknownFate, err)
}

// mayHaveHappened says whether a change that a node answers with the error may have happened all the same.
func mayHaveHappened(code codes.Code, err error) bool {
	for _, e := range []error{rpctypes.ErrTimeout, rpctypes.ErrTimeoutDueToLeaderFail, rpctypes.ErrTimeoutDueToConnectionLost, rpctypes.ErrLeaderChanged, rpctypes.ErrCorrupt} {
		if errors.Is(err, e) {
			return true
		}
	}
	return code == codes.Canceled || code == codes.DeadlineExceeded || code == codes.Unknown || code == codes.Internal
}

// Request is an operation: one of etcd's [pb.RangeRequest], [pb.PutRequest], [pb.DeleteRangeRequest] and [pb.TxnRequest],
// or a [pipepb.CompareAndPut]. It must not be changed before the answer has come.
type Request interface {
	*pb.RangeRequest | *pb.PutRequest | *pb.DeleteRangeRequest | *pb.TxnRequest | *pipepb.CompareAndPut
}

// operationOf returns the operation of a request, and whether it may change anything.
func operationOf(request any) (op *pipepb.Operation, changes bool) {
	switch r := request.(type) {
	case *pb.RangeRequest:
		return &pipepb.Operation{Request: &pipepb.Operation_Range{Range: r}}, false
	case *pb.PutRequest:
		return &pipepb.Operation{Request: &pipepb.Operation_Put{Put: r}}, true
	case *pb.DeleteRangeRequest:
		return &pipepb.Operation{Request: &pipepb.Operation_DeleteRange{DeleteRange: r}}, true
	case *pb.TxnRequest:
		return &pipepb.Operation{Request: &pipepb.Operation_Txn{Txn: r}}, changesAny(r)
	case *pipepb.CompareAndPut:
		return &pipepb.Operation{Request: &pipepb.Operation_CompareAndPut{CompareAndPut: r}}, true
	}
	panic(fmt.Sprintf("client: %T is no request", request)) // Request names all of them
}

// changesAny says whether a transaction has anything but reads.
func changesAny(r *pb.TxnRequest) bool {
	for _, branch := range [2][]*pb.RequestOp{r.GetSuccess(), r.GetFailure()} {
		for _, op := range branch {
			if op.GetRequestRange() == nil {
				return true
			}
		}
	}
	return false
}

// Do begins a request and returns without waiting for its answer. It never blocks: what cannot be sent yet is queued, and
// the queue has no bound, so callers bound how many futures they have. The context holds for the request until it is
// answered: once it has ended, the answer is not waited for, and a request that was not sent is not sent.
func Do[R Request](ctx context.Context, c *Client, request R) *Future {
	op, changes := operationOf(request)
	op.Tag = c.tags.Add(1)
	if by, ok := ctx.Deadline(); ok {
		op.TimeoutMs = uint32(min(max(time.Until(by).Milliseconds(), 0)+1, maxTimeoutMs))
	}
	f := &Future{call{ctx: ctx, op: op, size: uint64(proto.Size(op)), key: keyOf(request), changes: changes, done: make(chan struct{})}}
	c.enqueue(&f.call)
	return f
}

// maxTimeoutMs is an hour: no node works as long for an operation.
const maxTimeoutMs = 3600_000

// Future is an answer that is still to come. Its methods may be called from many goroutines, any number of times.
type Future struct{ call call }

// Done is closed once there is an answer or an error. The end of the context alone need not close it.
func (f *Future) Done() <-chan struct{} { return f.call.done }

// wait returns the answer. It waits until it is there or the context has ended.
func (f *Future) wait() (*pipepb.Answer, error) {
	c := &f.call
	select {
	case <-c.done:
		return c.answer, c.err
	case <-c.ctx.Done():
	}
	if c.state.CompareAndSwap(queued, gaveUp) || c.state.Load() == gaveUp {
		return nil, c.ctx.Err() // and it is not sent any more
	}
	select {
	case <-c.done:
		return c.answer, c.err
	default:
	}
	if s := c.on.Load(); s != nil {
		s.giveUp(c)
	}
	return nil, c.unknown(c.ctx.Err())
}

// Range waits for the answer to a RangeRequest.
func (f *Future) Range() (*pb.RangeResponse, error) {
	a, err := f.wait()
	return a.GetRange(), err
}

// Put waits for the answer to a PutRequest.
func (f *Future) Put() (*pb.PutResponse, error) {
	a, err := f.wait()
	return a.GetPut(), err
}

// Delete waits for the answer to a DeleteRangeRequest.
func (f *Future) Delete() (*pb.DeleteRangeResponse, error) {
	a, err := f.wait()
	return a.GetDeleteRange(), err
}

// Txn waits for the answer to a TxnRequest or a CompareAndPut.
func (f *Future) Txn() (*pb.TxnResponse, error) {
	a, err := f.wait()
	return a.GetTxn(), err
}

// Err waits for any answer, and returns its error.
func (f *Future) Err() error {
	_, err := f.wait()
	return err
}
