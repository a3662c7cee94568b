package rangeapi

import (
	"encoding/binary"
	"errors"
	"fmt"

	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/internal/wire"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
)

// wireVersion is the first byte of bus method 16's messages; docs/format/rangeapi.md has the bytes.
// wirePermit is that of a request with a permit. There is none before cluster version 4.
const (
	wireVersion = 3
	wirePermit  = 4
)

// requestOverheadBytes and AnswerOverheadBytes bound the bytes of a request and an answer beside
// their operation.
const (
	requestOverheadBytes = 2 + 5*binary.MaxVarintLen64
	AnswerOverheadBytes  = 3
)

// The second byte of an answer.
const (
	StatusOK    = 0
	StatusError = 1
)

// marshal appends op to dst. Its form need not be deterministic, because decoders accept any order
// of fields.
var marshal = proto.MarshalOptions{}

// unmarshal drops unknown fields, as the plain forms do.
var unmarshal = proto.UnmarshalOptions{DiscardUnknown: true}

// AppendRequest appends the binary form of q to dst.
func AppendRequest(dst []byte, q *Request) ([]byte, error) {
	plain := plainKind(q.Op)
	kind := plain
	if kind == 0 {
		if kind = kindOf(q.Op); kind == 0 {
			return dst, BadRequest("no operation %T", q.Op)
		}
	}
	version := byte(wireVersion)
	if q.Permit != keyspace.Internal {
		version = wirePermit
	}
	dst = append(dst, version, byte(kind))
	dst = appendRange(dst, q.Range, q.Generation)
	dst = binary.AppendUvarint(dst, uint64(q.ReadRevision))
	dst = binary.AppendUvarint(dst, q.ReadTerm)
	if version == wirePermit {
		dst = binary.AppendUvarint(dst, uint64(q.Permit))
	}
	if plain != 0 {
		return appendPlain(dst, q.Op), nil
	}
	dst, err := marshal.MarshalAppend(dst, q.Op)
	if err != nil {
		return dst, BadRequest("encode %T: %v", q.Op, err)
	}
	return dst, nil
}

// DecodeRequest decodes what AppendRequest wrote. The request's keys and values may be parts of b.
func DecodeRequest(b []byte) (*Request, error) {
	if len(b) < 2 {
		return nil, wire.ErrTruncated
	}
	var ints [5]uint64
	count := 4
	switch b[0] {
	case wireVersion:
	case wirePermit:
		count = 5
	default:
		return nil, fmt.Errorf("rangeapi: request version %d, want %d or %d", b[0], wireVersion, wirePermit)
	}
	kind := opKind(b[1])
	rest := b[2:]
	var err error
	for i := range count {
		if ints[i], rest, err = wire.Uvarint(rest); err != nil {
			return nil, err
		}
	}
	if ints[2] >= uint64(keyspace.MaxRevision) {
		return nil, fmt.Errorf("rangeapi: read revision %d", ints[2])
	}
	if count == 5 && keyspace.Permit(ints[4]) == keyspace.Internal {
		return nil, errors.New("rangeapi: a request with an empty permit")
	}
	op, err := decodeOp(kind, rest)
	if err != nil {
		return nil, err
	}
	return &Request{
		Range:        keyspace.RangeID(ints[0]),
		Generation:   keyspace.Generation(ints[1]),
		ReadRevision: keyspace.Revision(ints[2]),
		ReadTerm:     ints[3],
		Permit:       keyspace.Permit(ints[4]),
		Op:           op,
	}, nil
}

func decodeOp(kind opKind, b []byte) (proto.Message, error) {
	if kind == opPlainGet || kind == opPlainPut {
		return decodePlain(kind, b)
	}
	return decodeMessage(newRequestOp(kind), kind, b)
}

// decodeMessage decodes b into m, which is nil for an unknown kind.
func decodeMessage(m proto.Message, kind opKind, b []byte) (proto.Message, error) {
	if m == nil {
		return nil, fmt.Errorf("rangeapi: unknown operation %d", kind)
	}
	if err := unmarshal.Unmarshal(b, m); err != nil {
		return nil, fmt.Errorf("rangeapi: decode %T: %w", m, err)
	}
	return m, nil
}

// AppendAnswer appends the binary form of a response, or of the error if it is not nil.
func AppendAnswer(dst []byte, p *Response, failed error) ([]byte, error) {
	dst = append(dst, wireVersion)
	if failed != nil {
		return kverror.Append(append(dst, StatusError), kverror.Of(failed)), nil
	}
	if kind := plainResponse(p.Op); kind != 0 {
		return appendPlainResponse(append(dst, StatusOK, byte(kind)), p.Op), nil
	}
	kind := responseKind(p.Op)
	if kind == 0 {
		return dst, fmt.Errorf("rangeapi: no response %T", p.Op)
	}
	return marshal.MarshalAppend(append(dst, StatusOK, byte(kind)), p.Op)
}

// DecodeAnswer decodes what AppendAnswer wrote: a response, or the range's error in failed. err
// says that the bytes are no answer. The response's keys and values may be parts of b.
func DecodeAnswer(b []byte) (p *Response, failed *kverror.Error, err error) {
	if len(b) < 2 {
		return nil, nil, wire.ErrTruncated
	}
	if b[0] != wireVersion {
		return nil, nil, fmt.Errorf("rangeapi: answer version %d, want %d", b[0], wireVersion)
	}
	switch b[1] {
	case StatusError:
		failed, err = kverror.Decode(b[2:])
		return nil, failed, err
	case StatusOK:
	default:
		return nil, nil, fmt.Errorf("rangeapi: answer status %d", b[1])
	}
	if len(b) < 3 {
		return nil, nil, wire.ErrTruncated
	}
	op, err := decodeResponse(opKind(b[2]), b[3:])
	if err != nil {
		return nil, nil, err
	}
	return &Response{Op: op}, nil, nil
}

func decodeResponse(kind opKind, b []byte) (proto.Message, error) {
	if kind == opPlainGet || kind == opPlainPut {
		return decodePlainResponse(kind, b)
	}
	return decodeMessage(newResponseOp(kind), kind, b)
}
