package shard

import (
	"context"
	"fmt"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/transport"
)

// Registrar is what RegisterHandlers needs of the bus.
type Registrar interface {
	HandleCall(m transport.Method, class transport.Class, h transport.CallHandler)
	HandleStream(m transport.Method, class transport.Class, h transport.StreamHandler)
}

// RegisterHandlers registers the methods of replicas at a bus that is not started yet.
func (n *Node) RegisterHandlers(r Registrar) {
	r.HandleCall(transport.MethodShardRequest, transport.ClassRequest, n.handleRequest)
	r.HandleCall(transport.MethodShardTxn, transport.ClassRequest, n.handleTxn)
	r.HandleCall(transport.MethodShardTxnEnd, transport.ClassRequest, n.handleTxnEnd)
	r.HandleCall(transport.MethodShardPiece, transport.ClassRequest, n.handlePiece)
	r.HandleCall(transport.MethodShardAdmin, transport.ClassRequest, n.handleAdmin)
	r.HandleStream(transport.MethodShardFeed, transport.ClassRequest, n.handleFeeds)
	r.HandleCall(transport.MethodShardWatch, transport.ClassRequest, n.handleWatch)
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

// handleTxn answers method 18.
func (n *Node) handleTxn(ctx context.Context, _ keyspace.NodeID, payload []byte) ([]byte, error) {
	c, k, id, g, err := txnHead(payload)
	if err == nil && k == txnRead {
		req, err := decodeRead(&c, id, g)
		if err != nil {
			return AppendAnswer(nil, nil, badRequest("%v", err))
		}
		resp, err := n.Do(ctx, req)
		return AppendAnswer(nil, resp, err)
	}
	return n.answerTxn(ctx, payload, true)
}

// handleTxnEnd answers method 23. What may have to wait does not come this way.
func (n *Node) handleTxnEnd(ctx context.Context, _ keyspace.NodeID, payload []byte) ([]byte, error) {
	return n.answerTxn(ctx, payload, false)
}

func (n *Node) answerTxn(ctx context.Context, payload []byte, prepares bool) ([]byte, error) {
	id, g, op, err := DecodeTxnOp(payload)
	if err == nil && prepares == endsLocks(op) {
		err = fmt.Errorf("shard: %T by the method of other steps", op)
	}
	if err != nil {
		return AppendTxnAnswer(nil, nil, badRequest("%v", err))
	}
	a, err := n.Txn(ctx, id, g, op)
	return AppendTxnAnswer(nil, a, err)
}

func (n *Node) handlePiece(ctx context.Context, _ keyspace.NodeID, payload []byte) ([]byte, error) {
	req, err := decodePieceRequest(payload)
	if err != nil {
		return appendPieceAnswer(nil, nil, badRequest("%v", err)), nil
	}
	resp, err := n.Do(ctx, req)
	if err != nil {
		return appendPieceAnswer(nil, nil, err), nil
	}
	a := resp.Op.(*PieceAnswer) //nolint:forcetypeassert // it answers nothing else
	return encodePiece(a), nil
}
