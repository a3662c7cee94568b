package pipeapi

import (
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/api/pipepb"
)

// answer is one that is to be sent.
type answer struct {
	tag   uint64
	field protowire.Number
	// body is the encoded message in the field.
	body mem.BufferSlice
	// place is the encoded Place, or nil.
	place []byte
}

// frame is a ServerFrame, encoded: its answers are already.
type frame struct {
	// buffers are complete, and head follows them.
	buffers mem.BufferSlice
	head    []byte
}

// fieldAnswers is the field of a ServerFrame with an Answer.
const fieldAnswers protowire.Number = 2

// copiedBytes is the size up to which answers are copied. A copy costs less than another slice of a message costs gRPC.
const copiedBytes = 2 << 10

// frameBytes is the most bytes of answers that share a frame. gRPC's clients refuse messages above 4 MiB unless they
// are told otherwise, and large answers come alone.
const frameBytes = 1 << 20

// frameOf encodes a frame without answers.
func frameOf(m *pipepb.ServerFrame) (*frame, error) {
	b, err := proto.Marshal(m)
	return &frame{head: b}, err
}

// add adds an answer, whose body is the frame's from now on.
func (f *frame) add(a *answer) {
	size := a.body.Len()
	n := protowire.SizeTag(fieldTag) + protowire.SizeVarint(a.tag) + protowire.SizeTag(a.field) + protowire.SizeBytes(size)
	if a.place != nil {
		n += protowire.SizeTag(fieldPlace) + protowire.SizeBytes(len(a.place))
	}
	f.head = protowire.AppendTag(f.head, fieldAnswers, protowire.BytesType)
	f.head = protowire.AppendVarint(f.head, uint64(n))
	f.head = protowire.AppendTag(f.head, fieldTag, protowire.VarintType)
	f.head = protowire.AppendVarint(f.head, a.tag)
	if a.place != nil {
		f.head = protowire.AppendTag(f.head, fieldPlace, protowire.BytesType)
		f.head = protowire.AppendBytes(f.head, a.place)
	}
	f.head = protowire.AppendTag(f.head, a.field, protowire.BytesType)
	f.head = protowire.AppendVarint(f.head, uint64(size))
	if size > copiedBytes {
		f.buffers = append(f.buffers, mem.SliceBuffer(f.head))
		f.buffers = append(f.buffers, a.body...)
		f.head = nil
		return
	}
	for _, b := range a.body {
		f.head = append(f.head, b.ReadOnlyData()...)
	}
	a.body.Free()
}

// Encoded implements etcdapi.Encoded. The buffers are gRPC's from then on.
func (f *frame) Encoded() mem.BufferSlice {
	b := append(f.buffers, mem.SliceBuffer(f.head))
	f.buffers, f.head = nil, nil
	return b
}

// free gives back what has not become gRPC's.
func (f *frame) free() { f.buffers.Free() }
