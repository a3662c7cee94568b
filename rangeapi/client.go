package rangeapi

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"

	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/transport"
)

// Caller is what a Client needs of the bus.
type Caller interface {
	Call(ctx context.Context, to keyspace.NodeID, m transport.Method, payload []byte) ([]byte, error)
	OpenStream(ctx context.Context, to keyspace.NodeID, m transport.Method, first []byte) (transport.Stream, error)
}

// Client reaches replicas on all nodes. It may be used from many goroutines.
type Client struct {
	self  keyspace.NodeID
	local Local
	bus   Caller
}

// Local serves a Client's requests to replicas of its own node, without the bus. Its methods answer
// as those of Client.
type Local interface {
	Do(ctx context.Context, req *Request) (*Response, error)
	Txn(ctx context.Context, id keyspace.RangeID, g keyspace.Generation, op TxnOp) (TxnAnswer, error)
	AwaitResolved(ctx context.Context, q *ResolvedRequest) (FeedPosition, error)
	History(q *HistoryRequest) (*HistoryPage, error)
}

// NewClient returns a client on node self, whose replicas local serves.
func NewClient(self keyspace.NodeID, local Local, bus Caller) *Client {
	return &Client{self: self, local: local, bus: bus}
}

// Do sends a request to the replica of its range on a node. Errors are of package kverror and say
// whether the request may have been applied.
func (c *Client) Do(ctx context.Context, node keyspace.NodeID, req *Request) (*Response, error) {
	if node == c.self {
		return c.local.Do(ctx, req)
	}
	if p, ok := req.Op.(*Page); ok {
		return c.page(ctx, node, req, p)
	}
	if req.Txn != nil {
		return c.readFor(ctx, node, req)
	}
	b, err := AppendRequest(make([]byte, 0, SizeBound(req.Op)+requestOverheadBytes), req)
	if err != nil {
		return nil, err
	}
	answer, err := c.bus.Call(ctx, node, transport.MethodShardRequest, b)
	if err != nil {
		return nil, CallError(err, CanWrite(req.Op))
	}
	p, failed, err := DecodeAnswer(answer)
	if err != nil {
		return nil, &kverror.Error{Kind: kverror.Internal, Detail: fmt.Sprintf("answer of node %s: %v", node, err)}
	}
	if failed != nil {
		return nil, failed
	}
	return p, nil
}

// CallError turns an error of the bus into a kverror.
func CallError(err error, write bool) error {
	var remote *transport.RemoteError
	switch {
	case transport.NotDelivered(err), !write && errors.Is(err, transport.ErrUnreachable):
		// A lost read has no effect.
		return &kverror.Error{Kind: kverror.Unreachable, Detail: err.Error()}
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return kverror.Of(err)
	case errors.As(err, &remote):
		return &kverror.Error{Kind: kverror.Internal, Detail: err.Error()}
	}
	return &kverror.Error{Kind: kverror.TimeoutConnectionLost, Detail: err.Error()}
}

// Txn sends a transaction command to the replica of a range on a node.
func (c *Client) Txn(
	ctx context.Context, node keyspace.NodeID, id keyspace.RangeID, g keyspace.Generation, op TxnOp,
) (TxnAnswer, error) {
	if node == c.self {
		return c.local.Txn(ctx, id, g, op)
	}
	b, err := AppendTxnOp(nil, id, g, op)
	if err != nil {
		return nil, err
	}
	method := transport.MethodShardTxn
	if EndsLocks(op) {
		method = transport.MethodShardTxnEnd
	}
	answer, err := c.bus.Call(ctx, node, method, b)
	if err != nil {
		return nil, CallError(err, true)
	}
	a, failed, err := DecodeTxnAnswer(answer)
	switch {
	case err == nil && failed != nil:
		return nil, failed
	case err == nil && !a.answers(op.Kind()):
		err = fmt.Errorf("%T for %T", a, op)
	}
	if err != nil {
		return nil, &kverror.Error{Kind: kverror.Internal, Detail: fmt.Sprintf("answer of node %s: %v", node, err)}
	}
	return a, nil
}

// readFor is Do for a read on behalf of a transaction.
func (c *Client) readFor(ctx context.Context, node keyspace.NodeID, req *Request) (*Response, error) {
	b := append([]byte(nil), txnWireVersion, byte(TxnRead))
	b = binary.AppendUvarint(b, uint64(req.Range))
	b = binary.AppendUvarint(b, uint64(req.Generation))
	b = binary.AppendUvarint(AppendName(b, *req.Txn), uint64(req.ReadRevision))
	b, err := marshal.MarshalAppend(b, req.Op)
	if err != nil {
		return nil, BadRequest("encode %T: %v", req.Op, err)
	}
	answer, err := c.bus.Call(ctx, node, transport.MethodShardTxn, b)
	if err != nil {
		return nil, CallError(err, false)
	}
	p, failed, err := DecodeAnswer(answer)
	if err != nil {
		return nil, &kverror.Error{Kind: kverror.Internal, Detail: fmt.Sprintf("answer of node %s: %v", node, err)}
	}
	if failed != nil {
		return nil, failed
	}
	return p, nil
}

// page is Do for a Page.
func (c *Client) page(ctx context.Context, node keyspace.NodeID, req *Request, p *Page) (*Response, error) {
	b, err := AppendPageRequest(make([]byte, 0, proto.Size(p.RangeRequest)+requestOverheadBytes+txnNameBytes), req, p)
	if err != nil {
		return nil, err
	}
	answer, err := c.bus.Call(ctx, node, transport.MethodShardPiece, b)
	if err != nil {
		return nil, CallError(err, false)
	}
	a, failed, err := DecodePageAnswer(answer)
	if err != nil {
		return nil, &kverror.Error{Kind: kverror.Internal, Detail: fmt.Sprintf("answer of node %s: %v", node, err)}
	}
	if failed != nil {
		return nil, failed
	}
	return &Response{Op: a}, nil
}

// AwaitResolved asks the node's replica of a range, see shard's Replica.AwaitResolved.
func (c *Client) AwaitResolved(ctx context.Context, node keyspace.NodeID, q *ResolvedRequest) (FeedPosition, error) {
	if node == c.self {
		return c.local.AwaitResolved(ctx, q)
	}
	b, err := c.bus.Call(ctx, node, transport.MethodShardWatch, q.encode())
	if err != nil {
		return FeedPosition{}, CallError(err, false)
	}
	return decodeResolved(b)
}

// History asks the node's replica of a range, see shard's Replica.History.
func (c *Client) History(ctx context.Context, node keyspace.NodeID, q *HistoryRequest) (*HistoryPage, error) {
	if node == c.self {
		return c.local.History(q)
	}
	b, err := c.bus.Call(ctx, node, transport.MethodShardWatch, q.encode())
	if err != nil {
		return nil, CallError(err, false)
	}
	return decodeHistoryPage(b)
}

// FeedStream is a gateway's stream of feeds from one node. One goroutine may call Order while
// another one calls Recv.
type FeedStream struct{ st transport.Stream }

// NewFeedStream returns the gateway's end of an open stream of feeds.
func NewFeedStream(st transport.Stream) *FeedStream { return &FeedStream{st} }

// OpenFeeds opens a stream of feeds from a node. The caller closes it. ctx bounds only the opening.
func (c *Client) OpenFeeds(ctx context.Context, node keyspace.NodeID) (*FeedStream, error) {
	st, err := c.bus.OpenStream(ctx, node, transport.MethodShardFeed, EncodeOrders(nil))
	if err != nil {
		return nil, fmt.Errorf("rangeapi: feeds of node %s: %w", node, err)
	}
	return NewFeedStream(st), nil
}

// Order opens and closes feeds.
func (s *FeedStream) Order(ctx context.Context, orders []FeedOrder) error {
	return s.st.Send(ctx, EncodeOrders(orders))
}

// Recv returns the next parts. Their keys and values share memory.
func (s *FeedStream) Recv(ctx context.Context) ([]FeedPart, error) {
	b, err := s.st.Recv(ctx)
	if err != nil {
		return nil, err
	}
	return DecodeParts(b)
}

// Close ends all feeds of the stream.
func (s *FeedStream) Close() { s.st.Close(nil) }
