package etcdapi

import (
	"errors"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc/encoding"
	grpcproto "google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// countingCodec is gRPC's codec, counting the bytes that pass, as etcd's metrics do:
// messages without their frames. It also counts the bytes of large answers until they
// have left, and knows streamed keys that are encoded already.
type countingCodec struct {
	encoding.CodecV2
	sent, received prometheus.Counter
	unsent         *atomic.Int64
}

func newCountingCodec(m *Metrics, unsent *atomic.Int64) countingCodec {
	return countingCodec{CodecV2: encoding.GetCodecV2(grpcproto.Name), sent: m.SentBytes, received: m.ReceivedBytes, unsent: unsent}
}

// Marshal implements encoding.CodecV2.
func (c countingCodec) Marshal(v any) (b mem.BufferSlice, err error) {
	switch m := v.(type) {
	case *streamedKeys:
		b, err = m.encode()
	case *pb.RangeResponse:
		b, err = c.marshalAnswer(m)
	case *pb.TxnResponse:
		b, err = c.marshalAnswer(m)
	default:
		b, err = c.CodecV2.Marshal(v)
	}
	c.sent.Add(float64(b.Len()))
	return b, err
}

// Unmarshal implements encoding.CodecV2.
func (c countingCodec) Unmarshal(b mem.BufferSlice, v any) error {
	c.received.Add(float64(b.Len()))
	return c.CodecV2.Unmarshal(b, v)
}

// largeAnswerBytes is an answer that is counted until it has left.
const largeAnswerBytes = 64 << 10

// marshalAnswer encodes an answer. A large one counts for as long as gRPC has it: the
// handler has returned long before a slow client has taken it.
func (c countingCodec) marshalAnswer(m proto.Message) (mem.BufferSlice, error) {
	size := proto.Size(m)
	if size < largeAnswerBytes {
		return c.CodecV2.Marshal(m)
	}
	pool := mem.DefaultBufferPool()
	buf := pool.Get(size)
	if _, err := (proto.MarshalOptions{UseCachedSize: true}).MarshalAppend((*buf)[:0], m); err != nil {
		pool.Put(buf)
		return nil, err
	}
	c.unsent.Add(int64(size))
	return mem.BufferSlice{mem.NewBuffer(buf, &unsentPool{BufferPool: pool, unsent: c.unsent, bytes: int64(size)})}, nil
}

// unsentPool takes the buffer of one answer back when it has left.
type unsentPool struct {
	mem.BufferPool
	unsent *atomic.Int64
	bytes  int64
}

// Put implements mem.BufferPool.
func (p *unsentPool) Put(b *[]byte) {
	p.unsent.Add(-p.bytes)
	p.BufferPool.Put(b)
}

// streamedKeys is a part of a RangeStream.
type streamedKeys struct {
	// keys are key values as they stand in an encoded RangeResponse.
	keys []byte
	// last is the rest of the response, nil but in the last part.
	last *pb.RangeResponse
}

// fieldRangeResponse is the field of a RangeStreamResponse that holds the response.
const fieldRangeResponse protowire.Number = 1

// errLateKeys is a bug: the keys of a part are in keys.
var errLateKeys = errors.New("etcdapi: the last part of a stream has keys that are not encoded")

// encode returns the part as a RangeStreamResponse. The keys are not copied.
func (s *streamedKeys) encode() (mem.BufferSlice, error) {
	if len(s.last.GetKvs()) > 0 {
		return nil, errLateKeys
	}
	head := protowire.AppendTag(nil, fieldRangeResponse, protowire.BytesType)
	if s.last == nil {
		head = protowire.AppendVarint(head, uint64(len(s.keys)))
		return mem.BufferSlice{mem.SliceBuffer(head), mem.SliceBuffer(s.keys)}, nil
	}
	tail, err := proto.Marshal(s.last)
	if err != nil {
		return nil, err
	}
	head = protowire.AppendVarint(head, uint64(len(s.keys)+len(tail)))
	return mem.BufferSlice{mem.SliceBuffer(head), mem.SliceBuffer(s.keys), mem.SliceBuffer(tail)}, nil
}
