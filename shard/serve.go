package shard

import (
	"context"
	"fmt"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/rangeapi/stages"
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
	payload, asked := stages.CutAsked(payload)
	req, err := rangeapi.DecodeRequest(payload)
	if err != nil {
		return rangeapi.AppendAnswer(nil, nil, rangeapi.BadRequest("%v", err))
	}
	req.Traced = asked
	resp, record, err := s.do(ctx, req)
	s.noteGone(nameOf(req.Op), record, err)
	var answer []byte
	if err != nil {
		answer, err = rangeapi.AppendAnswer(nil, nil, err)
	} else {
		answer, err = rangeapi.AppendAnswer(make([]byte, 0, rangeapi.SizeBound(resp.Op)+rangeapi.AnswerOverheadBytes), resp, nil)
	}
	return record.Before(answer), err
}

// nameOf names a request for operators.
func nameOf(op proto.Message) string {
	switch op.(type) {
	case *pb.RangeRequest:
		return "range"
	case *pb.PutRequest:
		return "put"
	case *pb.DeleteRangeRequest:
		return "delete range"
	}
	return "txn"
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
	payload, asked := stages.CutAsked(payload)
	c, k, id, g, err := rangeapi.DecodeTxnHead(payload)
	if err == nil && k == rangeapi.TxnRead {
		req, err := rangeapi.DecodeTxnRead(&c, id, g)
		if err != nil {
			return rangeapi.AppendAnswer(nil, nil, rangeapi.BadRequest("%v", err))
		}
		req.Traced = asked
		resp, record, err := s.do(ctx, req)
		s.noteGone("read of a transaction", record, err)
		answer, err := rangeapi.AppendAnswer(nil, resp, err)
		return record.Before(answer), err
	}
	return s.answerTxn(ctx, payload, asked, true)
}

// handleTxnEnd answers method 23. What may have to wait does not come this way.
func (s *Store) handleTxnEnd(ctx context.Context, _ keyspace.NodeID, payload []byte) ([]byte, error) {
	payload, asked := stages.CutAsked(payload)
	return s.answerTxn(ctx, payload, asked, false)
}

func (s *Store) answerTxn(ctx context.Context, payload []byte, asked, prepares bool) ([]byte, error) {
	id, g, op, err := rangeapi.DecodeTxnCommand(payload)
	if err == nil && prepares == rangeapi.EndsLocks(op) {
		err = fmt.Errorf("shard: %T by the method of other commands", op)
	}
	if err != nil {
		return rangeapi.AppendTxnAnswer(nil, nil, rangeapi.BadRequest("%v", err))
	}
	a, record, err := s.txn(ctx, id, g, op, asked)
	s.noteGone("part of a transaction", record, err)
	answer, err := rangeapi.AppendTxnAnswer(nil, a, err)
	return record.Before(answer), err
}

func (s *Store) handlePage(ctx context.Context, _ keyspace.NodeID, payload []byte) ([]byte, error) {
	payload, asked := stages.CutAsked(payload)
	req, err := rangeapi.DecodePageRequest(payload)
	if err != nil {
		return rangeapi.AppendPageAnswer(nil, nil, rangeapi.BadRequest("%v", err)), nil
	}
	req.Traced = asked
	resp, record, err := s.do(ctx, req)
	s.noteGone("page of a read", record, err)
	if err != nil {
		return record.Before(rangeapi.AppendPageAnswer(nil, nil, err)), nil
	}
	a := resp.Op.(*rangeapi.PageAnswer) //nolint:forcetypeassert // it answers nothing else
	return record.Before(rangeapi.EncodePage(a)), nil
}
