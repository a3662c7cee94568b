package shard

import (
	"context"
	"fmt"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/transport"
)

// Registrar is what RegisterHandlers needs of the bus.
type Registrar interface {
	HandleCall(m transport.Method, class transport.Class, h transport.CallHandler)
	HandleStream(m transport.Method, class transport.Class, h transport.StreamHandler)
}

// RegisterHandlers registers the methods of replicas at a bus that is not started yet.
func (s *Store) RegisterHandlers(r Registrar) {
	r.HandleCall(transport.MethodShardRequest, transport.ClassRequest, s.handleRequest)
	r.HandleCall(transport.MethodShardTxn, transport.ClassRequest, s.handleTxn)
	r.HandleCall(transport.MethodShardTxnEnd, transport.ClassRequest, s.handleTxnEnd)
	r.HandleCall(transport.MethodShardPage, transport.ClassRequest, s.handlePage)
	r.HandleCall(transport.MethodShardAdmin, transport.ClassRequest, s.handleAdmin)
	r.HandleStream(transport.MethodShardFeed, transport.ClassRequest, s.handleFeeds)
	r.HandleCall(transport.MethodShardLoad, transport.ClassRequest, s.handleLoad)
	r.HandleCall(transport.MethodShardWatch, transport.ClassRequest, s.handleWatch)
	r.HandleCall(transport.MethodShardVersions, transport.ClassRequest, s.handleVersions)
}

func (s *Store) handleRequest(ctx context.Context, _ keyspace.NodeID, payload []byte) ([]byte, error) {
	req, err := rangeapi.DecodeRequest(payload)
	if err != nil {
		return rangeapi.AppendAnswer(nil, nil, rangeapi.BadRequest("%v", err))
	}
	resp, err := s.Do(ctx, req)
	if err != nil {
		return rangeapi.AppendAnswer(nil, nil, err)
	}
	return rangeapi.AppendAnswer(make([]byte, 0, rangeapi.SizeBound(resp.Op)+rangeapi.AnswerOverheadBytes), resp, nil)
}

// handleLoad answers method 26.
func (s *Store) handleLoad(ctx context.Context, _ keyspace.NodeID, payload []byte) ([]byte, error) {
	q, err := rangeapi.DecodeLoadRequest(payload)
	if err != nil {
		return rangeapi.AppendLoadAnswer(nil, nil, rangeapi.BadRequest("%v", err)), nil
	}
	a, err := s.Load(ctx, q)
	return rangeapi.AppendLoadAnswer(nil, a, err), nil
}

// handleTxn answers method 18.
func (s *Store) handleTxn(ctx context.Context, _ keyspace.NodeID, payload []byte) ([]byte, error) {
	c, k, id, g, err := rangeapi.DecodeTxnHead(payload)
	if err == nil && k == rangeapi.TxnRead {
		req, err := rangeapi.DecodeTxnRead(&c, id, g)
		if err != nil {
			return rangeapi.AppendAnswer(nil, nil, rangeapi.BadRequest("%v", err))
		}
		resp, err := s.Do(ctx, req)
		return rangeapi.AppendAnswer(nil, resp, err)
	}
	return s.answerTxn(ctx, payload, true)
}

// handleTxnEnd answers method 23. What may have to wait does not come this way.
func (s *Store) handleTxnEnd(ctx context.Context, _ keyspace.NodeID, payload []byte) ([]byte, error) {
	return s.answerTxn(ctx, payload, false)
}

func (s *Store) answerTxn(ctx context.Context, payload []byte, prepares bool) ([]byte, error) {
	id, g, op, err := rangeapi.DecodeTxnCommand(payload)
	if err == nil && prepares == rangeapi.EndsLocks(op) {
		err = fmt.Errorf("shard: %T by the method of other commands", op)
	}
	if err != nil {
		return rangeapi.AppendTxnAnswer(nil, nil, rangeapi.BadRequest("%v", err))
	}
	a, err := s.Txn(ctx, id, g, op)
	return rangeapi.AppendTxnAnswer(nil, a, err)
}

func (s *Store) handlePage(ctx context.Context, _ keyspace.NodeID, payload []byte) ([]byte, error) {
	req, err := rangeapi.DecodePageRequest(payload)
	if err != nil {
		return rangeapi.AppendPageAnswer(nil, nil, rangeapi.BadRequest("%v", err)), nil
	}
	resp, err := s.Do(ctx, req)
	if err != nil {
		return rangeapi.AppendPageAnswer(nil, nil, err), nil
	}
	a := resp.Op.(*rangeapi.PageAnswer) //nolint:forcetypeassert // it answers nothing else
	return rangeapi.EncodePage(a), nil
}
