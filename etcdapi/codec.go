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

// countingCodec is gRPC's codec. Like etcd's metrics it counts the bytes of messages without their
// frames. It also counts the bytes of large answers until they are sent, and takes streamed keys
// and events that are encoded already.
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
	case *sharedResponse:
		b = m.encode()
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

// largeAnswerBytes is the size from which an answer counts until it is sent.
const largeAnswerBytes = 64 << 10

// marshalAnswer encodes an answer. A large one counts as long as gRPC has it, because the handler
// returns long before a slow client has taken it.
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

// unsentPool takes back the buffer of one answer when it is sent.
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
	// keys are key values as a RangeResponse encodes them.
	keys []byte
	// last is the rest of the response, in the last part only.
	last *pb.RangeResponse
}

// fieldRangeResponse is the field of a RangeStreamResponse with the response.
const fieldRangeResponse protowire.Number = 1

// errLateKeys is a bug: a part has its keys in keys.
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

// sharedResponse is a WatchResponse whose events were encoded for many watchers.
type sharedResponse struct {
	// head is the encoded header.
	head []byte
	id   int64
	// events are encoded events, one slice behind the other.
	events [][]byte
}

// Fields of a WatchResponse.
const (
	fieldWatchHeader protowire.Number = 1
	fieldWatchID     protowire.Number = 2
)

// copiedBytes is the size up to which events are copied behind the header. A copy costs less than
// another slice of a message costs gRPC.
const copiedBytes = 2 << 10

// encode returns the response. Large events are not copied.
func (r *sharedResponse) encode() mem.BufferSlice {
	size, small := 0, 0
	for _, e := range r.events {
		size += len(e)
	}
	if size <= copiedBytes {
		small = size
	}
	const idBytes = 1 + 10
	head := append(make([]byte, 0, len(r.head)+idBytes+small), r.head...)
	if r.id != 0 {
		head = protowire.AppendTag(head, fieldWatchID, protowire.VarintType)
		head = protowire.AppendVarint(head, uint64(r.id))
	}
	if small > 0 {
		for _, e := range r.events {
			head = append(head, e...)
		}
		return mem.BufferSlice{mem.SliceBuffer(head)}
	}
	out := make(mem.BufferSlice, 0, 1+len(r.events))
	out = append(out, mem.SliceBuffer(head))
	for _, e := range r.events {
		out = append(out, mem.SliceBuffer(e))
	}
	return out
}

// appendWatchHeader appends a header as a WatchResponse encodes it.
func appendWatchHeader(dst []byte, h *pb.ResponseHeader) ([]byte, error) {
	b, err := proto.Marshal(h)
	if err != nil {
		return nil, err
	}
	return protowire.AppendBytes(protowire.AppendTag(dst, fieldWatchHeader, protowire.BytesType), b), nil
}
