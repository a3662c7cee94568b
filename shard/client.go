package shard

import (
	"context"
	"errors"
	"fmt"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/transport"
)

// Caller is what a Client needs of the bus.
type Caller interface {
	Call(ctx context.Context, to keyspace.NodeID, m transport.Method, payload []byte) ([]byte, error)
	OpenStream(ctx context.Context, to keyspace.NodeID, m transport.Method, first []byte) (transport.Stream, error)
}

// Registrar is what RegisterHandlers needs of the bus.
type Registrar interface {
	HandleCall(m transport.Method, class transport.Class, h transport.CallHandler)
	HandleStream(m transport.Method, class transport.Class, h transport.StreamHandler)
}

// Client reaches replicas on all nodes. It may be used from many goroutines.
type Client struct {
	self  keyspace.NodeID
	local *Node
	bus   Caller
}

// RegisterHandlers registers the methods of replicas at a bus that is not started yet.
func (n *Node) RegisterHandlers(r Registrar) {
	r.HandleCall(transport.MethodShardRequest, transport.ClassRequest, n.handleRequest)
	r.HandleCall(transport.MethodShardTxn, transport.ClassRequest, n.handleTxn)
	r.HandleCall(transport.MethodShardTxnEnd, transport.ClassRequest, n.handleTxnEnd)
	r.HandleCall(transport.MethodShardAdmin, transport.ClassRequest, n.handleAdmin)
	r.HandleStream(transport.MethodShardFeed, transport.ClassRequest, n.handleFeeds)
	r.HandleCall(transport.MethodShardWatch, transport.ClassRequest, n.handleWatch)
}

// Do sends a request to the replica of its range on a node. Errors are of package
// kverror and say whether the request may have been applied.
func (c *Client) Do(ctx context.Context, node keyspace.NodeID, req *Request) (*Response, error) {
	if node == c.self {
		return c.local.Do(ctx, req)
	}
	if req.Txn != nil {
		return c.readFor(ctx, node, req)
	}
	b, err := AppendRequest(make([]byte, 0, sizeBound(req.Op)+requestOverheadBytes), req)
	if err != nil {
		return nil, err
	}
	answer, err := c.bus.Call(ctx, node, transport.MethodShardRequest, b)
	if err != nil {
		return nil, callError(err, canWrite(req.Op))
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

// callError turns an error of the bus into one of the table.
func callError(err error, write bool) error {
	var remote *transport.RemoteError
	switch {
	case transport.NotDelivered(err), !write && errors.Is(err, transport.ErrUnreachable):
		// A read that got lost has done nothing.
		return &kverror.Error{Kind: kverror.Unreachable, Detail: err.Error()}
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return kverror.Of(err)
	case errors.As(err, &remote):
		return &kverror.Error{Kind: kverror.Internal, Detail: err.Error()}
	}
	return &kverror.Error{Kind: kverror.TimeoutConnectionLost, Detail: err.Error()}
}

func (n *Node) handleRequest(ctx context.Context, _ keyspace.NodeID, payload []byte) ([]byte, error) {
	req, err := DecodeRequest(payload)
	if err != nil {
		return AppendAnswer(nil, nil, badRequest("%v", err))
	}
	resp, err := n.Do(ctx, req)
	if err != nil {
		return AppendAnswer(nil, nil, err)
	}
	return AppendAnswer(make([]byte, 0, sizeBound(resp.Op)+answerOverheadBytes), resp, nil)
}
