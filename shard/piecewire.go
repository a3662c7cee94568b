package shard

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/transport"
)

// pieceWireVersion leads the messages of bus method 24; docs/format/shard.md has the
// bytes.
const pieceWireVersion = 1

// Flags of a piece and of its answer.
const (
	pieceWithCount = 1 << iota
	pieceForTxn
)

const pieceMore = 1

// appendPieceRequest appends the binary form of a Request of a Piece.
func appendPieceRequest(dst []byte, q *Request, p *Piece) ([]byte, error) {
	dst = append(dst, pieceWireVersion, flag(p.WithCount, pieceWithCount)|flag(q.Txn != nil, pieceForTxn))
	dst = binary.AppendUvarint(dst, uint64(q.Range))
	dst = binary.AppendUvarint(dst, uint64(q.Generation))
	dst = binary.AppendUvarint(dst, uint64(q.ReadRevision))
	if q.Txn != nil {
		dst = appendName(dst, *q.Txn)
	}
	dst = binary.AppendUvarint(dst, uint64(p.MaxBytes))
	dst, err := marshal.MarshalAppend(dst, p.RangeRequest)
	if err != nil {
		return dst, badRequest("encode %T: %v", p.RangeRequest, err)
	}
	return dst, nil
}

// decodePieceRequest reads what appendPieceRequest wrote. Keys may be parts of b.
func decodePieceRequest(b []byte) (*Request, error) {
	c := cursor{b: b}
	if v := c.byte(); c.err == nil && v != pieceWireVersion {
		return nil, fmt.Errorf("shard: version %d of a piece, want %d", v, pieceWireVersion)
	}
	f := c.flags(pieceWithCount | pieceForTxn)
	q := &Request{Range: keyspace.RangeID(c.uvarint()), Generation: keyspace.Generation(c.uvarint()), ReadRevision: c.revision()}
	if f&pieceForTxn != 0 {
		name := c.name()
		q.Txn = &name
		if c.err == nil && (name.IsZero() || q.ReadRevision == 0) {
			c.fail(fmt.Errorf("shard: a piece at %d for transaction %v", q.ReadRevision, name))
		}
	}
	p := &Piece{RangeRequest: &pb.RangeRequest{}, WithCount: f&pieceWithCount != 0}
	if n := c.uvarint(); n <= MaxPieceBytes {
		p.MaxBytes = int(n)
	} else {
		c.fail(fmt.Errorf("shard: a piece of %d bytes", n))
	}
	if c.err == nil {
		if err := unmarshal.Unmarshal(c.b, p.RangeRequest); err != nil {
			c.fail(fmt.Errorf("shard: decode %T: %w", p.RangeRequest, err))
		}
	}
	q.Op = p
	return q, c.err
}

// pieceOverheadBytes bounds what an answer has beside its keys and Next.
const pieceOverheadBytes = 3 + 5*binary.MaxVarintLen64

// appendPieceAnswer appends the binary form of the answer to a piece, or of the error
// where it is not nil.
func appendPieceAnswer(dst []byte, a *PieceAnswer, failed error) []byte {
	dst = append(dst, pieceWireVersion)
	if failed != nil {
		return kverror.Append(append(dst, statusError), kverror.Of(failed))
	}
	dst = append(dst, statusOK, flag(a.GetMore(), pieceMore))
	dst = binary.AppendUvarint(dst, uint64(a.GetHeader().GetRevision()))
	for _, n := range [...]int64{a.GetCount(), a.N, a.Seen} {
		dst = binary.AppendUvarint(dst, uint64(n))
	}
	return append(appendBytes(dst, a.Next), a.Keys...)
}

// encodePiece is the binary form of the answer to a piece, whose keys it takes over.
func encodePiece(a *PieceAnswer) []byte {
	bare := *a
	bare.Keys = nil
	head := appendPieceAnswer(make([]byte, 0, pieceOverheadBytes+len(a.Next)), &bare, nil)
	if at := pieceHeadroom - len(head); at >= 0 && len(a.room) == pieceHeadroom+len(a.Keys) {
		copy(a.room[at:], head)
		return a.room[at:]
	}
	return append(head, a.Keys...)
}

// decodePieceAnswer reads what appendPieceAnswer wrote: an answer, or in failed the error
// that the range answered with. The keys are not looked into.
func decodePieceAnswer(b []byte) (a *PieceAnswer, failed *kverror.Error, err error) {
	c := cursor{b: b}
	if v := c.byte(); c.err == nil && v != pieceWireVersion {
		return nil, nil, fmt.Errorf("shard: version %d of a piece's answer, want %d", v, pieceWireVersion)
	}
	switch s := c.byte(); {
	case c.err != nil:
		return nil, nil, c.err
	case s == statusError:
		failed, err = kverror.Decode(c.b)
		return nil, failed, err
	case s != statusOK:
		return nil, nil, fmt.Errorf("shard: status %d of a piece's answer", s)
	}
	more := c.flags(pieceMore) != 0
	rev := c.revision()
	a = &PieceAnswer{RangeResponse: &pb.RangeResponse{Header: &pb.ResponseHeader{Revision: int64(rev)}, More: more}}
	for _, n := range [...]*int64{&a.Count, &a.N, &a.Seen} {
		v := c.uvarint()
		if v > math.MaxInt64 {
			c.fail(fmt.Errorf("shard: %d keys", v))
		}
		*n = int64(v)
	}
	a.Next = orNil(c.bytes())
	if a.N > a.Seen {
		c.fail(fmt.Errorf("shard: a piece with %d of %d keys", a.N, a.Seen))
	}
	if c.err != nil {
		return nil, nil, c.err
	}
	a.Keys = c.b
	return a, nil, nil
}

// piece is Do of a Piece.
func (c *Client) piece(ctx context.Context, node keyspace.NodeID, req *Request, p *Piece) (*Response, error) {
	b, err := appendPieceRequest(make([]byte, 0, proto.Size(p.RangeRequest)+requestOverheadBytes+txnNameBytes), req, p)
	if err != nil {
		return nil, err
	}
	answer, err := c.bus.Call(ctx, node, transport.MethodShardPiece, b)
	if err != nil {
		return nil, callError(err, false)
	}
	a, failed, err := decodePieceAnswer(answer)
	if err != nil {
		return nil, &kverror.Error{Kind: kverror.Internal, Detail: fmt.Sprintf("answer of node %s: %v", node, err)}
	}
	if failed != nil {
		return nil, failed
	}
	return &Response{Op: a}, nil
}

// txnNameBytes is more than the name of a transaction takes.
const txnNameBytes = 8 + 4*binary.MaxVarintLen64

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
