package rangeapi

import (
	"encoding/binary"
	"fmt"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/internal/wire"
)

// Most requests get or put one key and nothing else. They and their responses have a wire form of
// their own, without protobuf's reflection on both sides. Decoded keys and values are parts of the
// message.

// plainKind returns the kind of a request with a plain form, and 0 for others.
func plainKind(op proto.Message) opKind {
	switch o := op.(type) {
	case *pb.PutRequest:
		return opPlainPut
	case *pb.RangeRequest:
		if plainGet(o) {
			return opPlainGet
		}
	}
	return 0
}

// plainGet says whether a request asks for the whole newest version of one key.
func plainGet(o *pb.RangeRequest) bool {
	return len(o.GetRangeEnd()) == 0 && o.GetLimit() == 0 && o.GetRevision() == 0 &&
		o.GetSortOrder() == pb.RangeRequest_NONE && o.GetSortTarget() == pb.RangeRequest_KEY &&
		!o.GetKeysOnly() && !o.GetCountOnly() &&
		o.GetMinModRevision() == 0 && o.GetMaxModRevision() == 0 &&
		o.GetMinCreateRevision() == 0 && o.GetMaxCreateRevision() == 0
}

// The flags of a plain request.
const (
	plainSerializable = 1 << iota
	plainPrevKV
	plainIgnoreValue
	plainIgnoreLease
	plainFlags = 1<<iota - 1
)

// appendPlain appends a request of a plain kind.
func appendPlain(dst []byte, op proto.Message) []byte {
	switch o := op.(type) {
	case *pb.RangeRequest:
		dst = append(dst, wire.Flag(o.GetSerializable(), plainSerializable))
		return append(dst, o.GetKey()...)
	case *pb.PutRequest:
		dst = append(dst, wire.Flag(o.GetPrevKv(), plainPrevKV)|wire.Flag(o.GetIgnoreValue(), plainIgnoreValue)|wire.Flag(o.GetIgnoreLease(), plainIgnoreLease))
		dst = binary.AppendVarint(dst, o.GetLease())
		return append(wire.AppendBytes(dst, o.GetKey()), o.GetValue()...)
	}
	panic(fmt.Sprintf("rangeapi: %T has no plain form", op))
}

// decodePlain decodes what appendPlain wrote.
func decodePlain(k opKind, b []byte) (proto.Message, error) {
	if len(b) == 0 {
		return nil, wire.ErrTruncated
	}
	flags := b[0]
	if flags > plainFlags {
		return nil, fmt.Errorf("rangeapi: flags %#x of a plain request", flags)
	}
	b = b[1:]
	if k == opPlainGet {
		return &pb.RangeRequest{Key: b, Serializable: flags&plainSerializable != 0}, nil
	}
	lease, b, err := wire.Varint(b)
	if err != nil {
		return nil, err
	}
	key, value, err := wire.Bytes(b)
	if err != nil {
		return nil, err
	}
	return &pb.PutRequest{
		Key: key, Value: orNil(value), Lease: lease, PrevKv: flags&plainPrevKV != 0,
		IgnoreValue: flags&plainIgnoreValue != 0, IgnoreLease: flags&plainIgnoreLease != 0,
	}, nil
}

// plainResponse returns the kind of a response with a plain form: to a get, with or without its
// key, and to a put without previous version.
func plainResponse(op proto.Message) opKind {
	switch o := op.(type) {
	case *pb.PutResponse:
		if bareHeader(o.GetHeader()) && o.GetPrevKv() == nil {
			return opPlainPut
		}
	case *pb.RangeResponse:
		if bareHeader(o.GetHeader()) && !o.GetMore() && int64(len(o.GetKvs())) == o.GetCount() && o.GetCount() <= 1 {
			return opPlainGet
		}
	}
	return 0
}

// bareHeader says whether there is a header with only the revision, as ranges send it.
func bareHeader(h *pb.ResponseHeader) bool {
	return h != nil && h.GetClusterId() == 0 && h.GetMemberId() == 0 && h.GetRaftTerm() == 0
}

// appendPlainResponse appends a response of a plain kind.
func appendPlainResponse(dst []byte, op proto.Message) []byte {
	switch o := op.(type) {
	case *pb.PutResponse:
		return binary.AppendVarint(dst, o.GetHeader().GetRevision())
	case *pb.RangeResponse:
		dst = binary.AppendVarint(dst, o.GetHeader().GetRevision())
		if len(o.GetKvs()) == 0 {
			return dst
		}
		kv := o.GetKvs()[0]
		dst = binary.AppendVarint(dst, kv.GetCreateRevision())
		dst = binary.AppendVarint(dst, kv.GetModRevision())
		dst = binary.AppendVarint(dst, kv.GetVersion())
		dst = binary.AppendVarint(dst, kv.GetLease())
		return append(wire.AppendBytes(dst, kv.GetKey()), kv.GetValue()...)
	}
	panic(fmt.Sprintf("rangeapi: %T has no plain form", op))
}

// decodePlainResponse decodes what appendPlainResponse wrote.
func decodePlainResponse(k opKind, b []byte) (proto.Message, error) {
	rev, b, err := wire.Varint(b)
	if err != nil {
		return nil, err
	}
	if k == opPlainPut {
		if len(b) != 0 {
			return nil, fmt.Errorf("rangeapi: %d bytes behind the response to a put", len(b))
		}
		return &pb.PutResponse{Header: &pb.ResponseHeader{Revision: rev}}, nil
	}
	get := &struct {
		resp   pb.RangeResponse
		header pb.ResponseHeader
		kv     mvccpb.KeyValue
		kvs    [1]*mvccpb.KeyValue
	}{}
	get.header.Revision = rev
	get.resp.Header = &get.header
	if len(b) == 0 {
		return &get.resp, nil
	}
	kv := &get.kv
	for _, field := range [...]*int64{&kv.CreateRevision, &kv.ModRevision, &kv.Version, &kv.Lease} {
		if *field, b, err = wire.Varint(b); err != nil {
			return nil, err
		}
	}
	if kv.Key, kv.Value, err = wire.Bytes(b); err != nil {
		return nil, err
	}
	kv.Value = orNil(kv.Value)
	get.kvs[0] = kv
	get.resp.Kvs, get.resp.Count = get.kvs[:], 1
	return &get.resp, nil
}

// SizeBound bounds the bytes of a message in protobuf's form. It is exact, except for messages with
// a plain form, where a bound costs less.
func SizeBound(op proto.Message) int {
	switch o := op.(type) {
	case *pb.PutRequest:
		return len(o.GetKey()) + len(o.GetValue()) + plainFieldsBytes
	case *pb.RangeRequest:
		return len(o.GetKey()) + len(o.GetRangeEnd()) + plainFieldsBytes
	}
	if plainResponse(op) == 0 {
		return proto.Size(op)
	}
	n := plainFieldsBytes
	if o, ok := op.(*pb.RangeResponse); ok {
		for _, kv := range o.GetKvs() {
			n += len(kv.GetKey()) + len(kv.GetValue()) + plainFieldsBytes
		}
	}
	return n
}

// plainFieldsBytes exceeds all fields of a message without its keys and values, which are twelve at
// most.
const plainFieldsBytes = 12 * (1 + binary.MaxVarintLen64)

// orNil returns absent bytes as protobuf does.
func orNil(b []byte) []byte {
	if len(b) == 0 {
		return nil
	}
	return b
}
