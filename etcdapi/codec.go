package etcdapi

import (
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
)

// countingCodec is gRPC's codec, counting the bytes that pass, as etcd's metrics do:
// messages without their frames.
type countingCodec struct {
	encoding.CodecV2
	sent, received prometheus.Counter
}

func newCountingCodec(m *Metrics) countingCodec {
	return countingCodec{CodecV2: encoding.GetCodecV2(proto.Name), sent: m.SentBytes, received: m.ReceivedBytes}
}

// Marshal implements encoding.CodecV2.
func (c countingCodec) Marshal(v any) (mem.BufferSlice, error) {
	b, err := c.CodecV2.Marshal(v)
	c.sent.Add(float64(b.Len()))
	return b, err
}

// Unmarshal implements encoding.CodecV2.
func (c countingCodec) Unmarshal(b mem.BufferSlice, v any) error {
	c.received.Add(float64(b.Len()))
	return c.CodecV2.Unmarshal(b, v)
}
