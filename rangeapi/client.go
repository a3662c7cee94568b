package rangeapi

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"

	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi/stages"
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
	Txn(ctx context.Context, id keyspace.RangeID, g keyspace.Generation, op TxnCommand) (TxnAnswer, error)
	AwaitResolved(ctx context.Context, q *ResolvedRequest) (FeedPosition, error)
	History(q *HistoryRequest) (*HistoryPage, error)
	LocalData
}

// LocalData are the replicas of this node for whole copies of the store.
type LocalData interface {
	Versions(ctx context.Context, q *VersionsRequest) (*VersionsPage, error)
	Load(ctx context.Context, q *LoadRequest) (*LoadAnswer, error)
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
	b, err := AppendRequest(asking(SizeBound(req.Op)+requestOverheadBytes, req.Traced), req)
	if err != nil {
		return nil, err
	}
	return call(ctx, c, node, transport.MethodShardRequest, b, CanWrite(req.Op), DecodeAnswer)
}

// call sends a request to another node and decodes the answer, which may be the range's error.
// write says that the request may change something.
func call[A any](
	ctx context.Context, c *Client, node keyspace.NodeID, m transport.Method, request []byte, write bool,
	decode func([]byte) (A, *kverror.Error, error),
) (A, error) {
	var none A
	stages.Of(ctx).Asked(node)
	b, err := c.bus.Call(ctx, node, m, request)
	if err != nil {
		return none, CallError(err, write)
	}
	b, record, err := stages.Cut(b)
	if err != nil {
		return none, badAnswer(node, err)
	}
	if record != nil {
		stages.Of(ctx).Note(record)
	}
	a, failed, err := decode(b)
	switch {
	case err != nil:
		return none, badAnswer(node, err)
	case failed != nil:
		return none, failed
	}
	return a, nil
}

// asking returns the beginning of a request, with room for so many bytes.
func asking(room int, traced bool) []byte {
	if !traced {
		return make([]byte, 0, room)
	}
	return stages.AppendAsked(make([]byte, 0, room+1))
}

// badAnswer returns the error for bytes that are no answer.
func badAnswer(node keyspace.NodeID, err error) error {
	return &kverror.Error{Kind: kverror.Internal, Detail: fmt.Sprintf("answer of node %s: %v", node, err)}
}

// CallError turns an error of the bus into a kverror.
func CallError(err error, write bool) error {
	var remote *transport.RemoteError
	switch {
	case transport.NotDelivered(err) && errors.Is(err, transport.ErrTooLarge):
		// No other node takes it either.
		return &kverror.Error{Kind: kverror.RequestTooLarge, Detail: err.Error()}
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
	ctx context.Context, node keyspace.NodeID, id keyspace.RangeID, g keyspace.Generation, op TxnCommand,
) (TxnAnswer, error) {
	if node == c.self {
		return c.local.Txn(ctx, id, g, op)
	}
	b, err := AppendTxnCommand(asking(0, stages.Of(ctx).Traced()), id, g, op)
	if err != nil {
		return nil, err
	}
	method := transport.MethodShardTxn
	if EndsLocks(op) {
		method = transport.MethodShardTxnEnd
	}
	a, err := call(ctx, c, node, method, b, true, DecodeTxnAnswer)
	if err == nil && !a.answers(op.Kind()) {
		return nil, badAnswer(node, fmt.Errorf("%T for %T", a, op))
	}
	return a, err
}

// readFor is Do for a read on behalf of a transaction.
func (c *Client) readFor(ctx context.Context, node keyspace.NodeID, req *Request) (*Response, error) {
	b := appendRange(append(asking(requestOverheadBytes, req.Traced), txnWireVersion, byte(TxnRead)), req.Range, req.Generation)
	b = binary.AppendUvarint(AppendName(b, *req.Txn), uint64(req.ReadRevision))
	b, err := marshal.MarshalAppend(b, req.Op)
	if err != nil {
		return nil, BadRequest("encode %T: %v", req.Op, err)
	}
	return call(ctx, c, node, transport.MethodShardTxn, b, false, DecodeAnswer)
}

// page is Do for a Page.
func (c *Client) page(ctx context.Context, node keyspace.NodeID, req *Request, p *Page) (*Response, error) {
	b, err := AppendPageRequest(asking(proto.Size(p.RangeRequest)+requestOverheadBytes+txnNameBytes, req.Traced), req, p)
	if err != nil {
		return nil, err
	}
	a, err := call(ctx, c, node, transport.MethodShardPage, b, false, DecodePageAnswer)
	if err != nil {
		return nil, err
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

// History asks the node's replica of a range, see rangefeed's Feeds.History.
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

// Load sends a request about a load to the replica of its range on a node. A repeated one does no harm.
func (c *Client) Load(ctx context.Context, node keyspace.NodeID, q *LoadRequest) (*LoadAnswer, error) {
	if node == c.self {
		return c.local.Load(ctx, q)
	}
	return call(ctx, c, node, transport.MethodShardLoad, q.encode(), true, DecodeLoadAnswer)
}

// Versions asks the node's replica of a range for a page of a cut.
func (c *Client) Versions(ctx context.Context, node keyspace.NodeID, q *VersionsRequest) (*VersionsPage, error) {
	if node == c.self {
		return c.local.Versions(ctx, q)
	}
	return call(ctx, c, node, transport.MethodShardVersions, q.Encode(), false, DecodeVersionsPage)
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
