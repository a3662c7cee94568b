package etcdapi

import (
	"errors"

	"github.com/prometheus/client_golang/prometheus"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc/encoding"
	grpcproto "google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/internal/budget"
)

// countingCodec is gRPC's codec. Like etcd's metrics it counts the bytes of messages without their
// frames. It also counts the bytes of large answers until they are sent, takes streamed keys
// and events that are encoded already, and leaves some messages to others to decode.
type countingCodec struct {
	encoding.CodecV2
	sent, received prometheus.Counter
	answers        *budget.Bytes
}

func newCountingCodec(m *Metrics, answers *budget.Bytes) countingCodec {
	return countingCodec{CodecV2: encoding.GetCodecV2(grpcproto.Name), sent: m.SentBytes, received: m.ReceivedBytes, answers: answers}
}

// Encoded is a message that is encoded already, which gRPC frees when it is sent.
type Encoded interface{ Encoded() mem.BufferSlice }

// Received is a message that takes its bytes, and is decoded by whom it is for. The bytes are gRPC's once Received has returned, unless it
// has taken a reference to them.
type Received interface{ Received(b mem.BufferSlice) }

// Marshal implements encoding.CodecV2.
func (c countingCodec) Marshal(v any) (b mem.BufferSlice, err error) {
	b, err = c.encode(v)
	c.sent.Add(float64(b.Len()))
	return b, err
}

// encode is Marshal of what is not sent by itself.
func (c countingCodec) encode(v any) (mem.BufferSlice, error) {
	switch m := v.(type) {
	case Encoded:
		return m.Encoded(), nil
	case *streamedKeys:
		return m.encode()
	case *sharedResponse:
		return m.encode(), nil
	case *spanAnswer:
		return m.encode()
	case *pb.RangeResponse:
		return c.marshalAnswer(m)
	case *pb.TxnResponse:
		return c.marshalAnswer(m)
	}
	return c.CodecV2.Marshal(v)
}

// Unmarshal implements encoding.CodecV2.
func (c countingCodec) Unmarshal(b mem.BufferSlice, v any) error {
	c.received.Add(float64(b.Len()))
	if m, ok := v.(Received); ok {
		m.Received(b)
		return nil
	}
	return c.CodecV2.Unmarshal(b, v)
}

// largeAnswerBytes is the size from which an answer counts until it is sent.
const largeAnswerBytes = 64 << 10

// marshalAnswer encodes an answer that holds nothing of the budget. A large one counts as long as
// gRPC has it, because the handler returns long before a slow client has taken it.
func (c countingCodec) marshalAnswer(m proto.Message) (mem.BufferSlice, error) {
	size := proto.Size(m)
	if size < largeAnswerBytes {
		return c.CodecV2.Marshal(m)
	}
	return marshalHeld(m, size, hold(c.answers, int64(size)))
}

// hold counts bytes that are in memory already, but no more of them than one answer may have.
func hold(answers *budget.Bytes, bytes int64) *budget.Share {
	held := answers.Share()
	if err := held.Add(min(bytes, answers.Reserve())); err != nil {
		panic(err) // it holds nothing before
	}
	return &held
}

// marshalHeld encodes an answer of a size. All that it holds is given back when it is sent.
func marshalHeld(m proto.Message, size int, held *budget.Share) (mem.BufferSlice, error) {
	pool := mem.DefaultBufferPool()
	buf := pool.Get(size)
	if _, err := (proto.MarshalOptions{UseCachedSize: true}).MarshalAppend((*buf)[:0], m); err != nil {
		pool.Put(buf)
		held.Release()
		return nil, err
	}
	return mem.BufferSlice{mem.NewBuffer(buf, &heldBuffer{BufferPool: pool, sent: held.Release})}, nil
}

// heldBuffer takes back the buffer of an answer when gRPC has sent it.
type heldBuffer struct {
	mem.BufferPool
	sent func()
}

// Put implements mem.BufferPool.
func (p *heldBuffer) Put(b *[]byte) {
	p.sent()
	if p.BufferPool != nil {
		p.BufferPool.Put(b)
	}
}

// spanAnswerKey is the context's key of the spanAnswer in which a handler of Range leaves its
// answer.
type spanAnswerKey struct{}

// spanAnswer is the answer of a Range of a span, see [KV.RangeSpan].
type spanAnswer struct {
	keys  [][]byte
	rest  *pb.RangeResponse
	share *budget.Share
}

func (a *spanAnswer) size() int {
	size := proto.Size(a.rest)
	for _, k := range a.keys {
		size += len(k)
	}
	return size
}

// encode returns the answer as a RangeResponse. Large keys are not copied, and are given back piece
// by piece as gRPC has sent them.
func (a *spanAnswer) encode() (mem.BufferSlice, error) {
	size := a.size()
	if size >= largeAnswerBytes && a.keys == nil {
		return marshalHeld(a.rest, proto.Size(a.rest), a.share)
	}
	head, err := proto.MarshalOptions{}.MarshalAppend(make([]byte, 0, min(size, largeAnswerBytes)), a.rest)
	if err != nil || size < largeAnswerBytes {
		for _, k := range a.keys {
			head = append(head, k...)
		}
		a.share.Release()
		return mem.BufferSlice{mem.SliceBuffer(head)}, err
	}
	out := make(mem.BufferSlice, 1, 1+len(a.keys))
	out[0] = mem.SliceBuffer(head)
	for _, k := range a.keys {
		bytes := int64(len(k))
		if mem.IsBelowBufferPoolingThreshold(len(k)) {
			a.share.Give(bytes)
			out = append(out, mem.SliceBuffer(k))
			continue
		}
		out = append(out, mem.NewBuffer(&k, &heldBuffer{sent: func() { a.share.Give(bytes) }}))
	}
	return out, nil
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
