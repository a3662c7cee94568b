package shard

import (
	"encoding/binary"
	"fmt"
	"math"

	"github.com/skeindb/skein/internal/wire"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
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
	dst = append(dst, pieceWireVersion, wire.Flag(p.WithCount, pieceWithCount)|wire.Flag(q.Txn != nil, pieceForTxn))
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
	c := newReader(b)
	if v := c.Byte(); c.OK() && v != pieceWireVersion {
		return nil, fmt.Errorf("shard: version %d of a piece, want %d", v, pieceWireVersion)
	}
	f := c.Flags(pieceWithCount | pieceForTxn)
	q := &Request{Range: keyspace.RangeID(c.Uvarint()), Generation: keyspace.Generation(c.Uvarint()), ReadRevision: c.revision()}
	if f&pieceForTxn != 0 {
		name := c.name()
		q.Txn = &name
		if c.OK() && (name.IsZero() || q.ReadRevision == 0) {
			c.Fail(fmt.Errorf("shard: a piece at %d for transaction %v", q.ReadRevision, name))
		}
	}
	p := &Piece{RangeRequest: &pb.RangeRequest{}, WithCount: f&pieceWithCount != 0}
	if n := c.Uvarint(); n <= MaxPieceBytes {
		p.MaxBytes = int(n)
	} else {
		c.Fail(fmt.Errorf("shard: a piece of %d bytes", n))
	}
	if c.OK() {
		if err := unmarshal.Unmarshal(c.Rest(), p.RangeRequest); err != nil {
			c.Fail(fmt.Errorf("shard: decode %T: %w", p.RangeRequest, err))
		}
	}
	q.Op = p
	return q, c.Err()
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
	dst = append(dst, statusOK, wire.Flag(a.GetMore(), pieceMore))
	dst = binary.AppendUvarint(dst, uint64(a.GetHeader().GetRevision()))
	for _, n := range [...]int64{a.GetCount(), a.N, a.Seen} {
		dst = binary.AppendUvarint(dst, uint64(n))
	}
	return append(wire.AppendBytes(dst, a.Next), a.Keys...)
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
	c := newReader(b)
	if v := c.Byte(); c.OK() && v != pieceWireVersion {
		return nil, nil, fmt.Errorf("shard: version %d of a piece's answer, want %d", v, pieceWireVersion)
	}
	switch s := c.Byte(); {
	case !c.OK():
		return nil, nil, c.Err()
	case s == statusError:
		failed, err = kverror.Decode(c.Rest())
		return nil, failed, err
	case s != statusOK:
		return nil, nil, fmt.Errorf("shard: status %d of a piece's answer", s)
	}
	more := c.Flags(pieceMore) != 0
	rev := c.revision()
	a = &PieceAnswer{RangeResponse: &pb.RangeResponse{Header: &pb.ResponseHeader{Revision: int64(rev)}, More: more}}
	for _, n := range [...]*int64{&a.Count, &a.N, &a.Seen} {
		v := c.Uvarint()
		if v > math.MaxInt64 {
			c.Fail(fmt.Errorf("shard: %d keys", v))
		}
		*n = int64(v)
	}
	a.Next = orNil(c.Bytes())
	if a.N > a.Seen {
		c.Fail(fmt.Errorf("shard: a piece with %d of %d keys", a.N, a.Seen))
	}
	if !c.OK() {
		return nil, nil, c.Err()
	}
	a.Keys = c.Rest()
	return a, nil, nil
}

// txnNameBytes is more than the name of a transaction takes.
const txnNameBytes = 8 + 4*binary.MaxVarintLen64
