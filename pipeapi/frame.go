package pipeapi

import (
	"bytes"
	"errors"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"golang.org/x/sync/semaphore"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/skeindb/skein/api/pipepb"
)

// Two bytes of a frame can be a message of a hundred bytes in memory. So frames come as bytes, and what is in them is counted before
// it is decoded.

// clientFrame is a ClientFrame as its bytes.
type clientFrame struct{ buffer mem.Buffer }

// Received implements etcdapi.Received.
func (f *clientFrame) Received(b mem.BufferSlice) {
	f.buffer = b.MaterializeToBuffer(mem.DefaultBufferPool())
}

// encodedOperation is an Operation as its bytes, which are the frame's.
type encodedOperation struct {
	body []byte
	// messages is how many messages are in it.
	messages int
}

// Fields of a ClientFrame.
const (
	fieldOperations protowire.Number = 1
	fieldCancels    protowire.Number = 2
)

// Fields of an Operation.
const (
	fieldOperationTag protowire.Number = 1
	fieldTimeoutMs    protowire.Number = 2
)

// receive takes the operations of a frame into the window: all of them, or none.
func (p *pipe) receive(f *clientFrame) (begun []*operation, cancels []uint64, err error) {
	defer f.buffer.Free()
	encoded, cancels, err := p.scan(f.buffer.ReadOnlyData())
	if err != nil {
		return nil, nil, err
	}
	p.s.o.Metrics.Operations.Observe(float64(len(encoded)))
	begun = make([]*operation, 0, len(encoded))
	for _, e := range encoded {
		var o *operation
		if o, err = p.decode(e); err != nil {
			break
		}
		begun = append(begun, o)
	}
	if err == nil {
		err = p.admit(begun)
	}
	if err != nil {
		for _, o := range begun {
			o.giveBack()
		}
		return nil, nil, err
	}
	return begun, cancels, nil
}

// errFrame returns the error that ends a pipe whose client sends what is no ClientFrame.
func (p *pipe) errFrame(err error) error {
	return p.broken(codes.Internal, "the frame is no ClientFrame: %v", err)
}

// scan finds the operations and cancels of a frame. It takes no more memory than the window has of either.
func (p *pipe) scan(b []byte) (ops []encodedOperation, cancels []uint64, err error) {
	most := int(p.s.window.GetOperations())
	for len(b) > 0 {
		field, kind, value, rest, err := next(b)
		if err != nil {
			return nil, nil, p.errFrame(err)
		}
		b = rest
		switch {
		case field == fieldOperations && kind == protowire.BytesType:
			if len(ops) == most {
				return nil, nil, p.broken(codes.ResourceExhausted, "the client ignores the window: a frame has more than %d operations, and at most %d may be under way: wait for answers before you send more", most, most)
			}
			n, err := operationShape.messages(value, protowire.DefaultRecursionLimit)
			if err != nil {
				return nil, nil, p.errFrame(err)
			}
			ops = append(ops, encodedOperation{value, n})
		case field == fieldCancels && (kind == protowire.VarintType || kind == protowire.BytesType):
			for len(value) > 0 { // several, if they are packed
				tag, n := protowire.ConsumeVarint(value)
				if n < 0 {
					return nil, nil, p.errFrame(protowire.ParseError(n))
				}
				if len(cancels) == most {
					return nil, nil, p.broken(codes.ResourceExhausted, "a frame has more than %d cancels, and no more operations can be under way: name each once", most)
				}
				cancels, value = append(cancels, tag), value[n:]
			}
		}
	}
	return ops, cancels, nil
}

// next returns the first field of a message: its value without the length of bytes, and what follows.
func next(b []byte) (field protowire.Number, kind protowire.Type, value, rest []byte, err error) {
	field, kind, n := protowire.ConsumeTag(b)
	if n < 0 {
		return 0, 0, nil, nil, protowire.ParseError(n)
	}
	b = b[n:]
	if n = protowire.ConsumeFieldValue(field, kind, b); n < 0 {
		return 0, 0, nil, nil, protowire.ParseError(n)
	}
	if value = b[:n]; kind == protowire.BytesType {
		value, _ = protowire.ConsumeBytes(value) // it was found to be whole
	}
	return field, kind, value, b[n:], nil
}

// shape says which fields of a message are messages, and of which shape. The others are nil. It is indexed by the fields' numbers.
type shape struct{ fields []*shape }

var operationShape = shapeOf((&pipepb.Operation{}).ProtoReflect().Descriptor(), map[protoreflect.FullName]*shape{})

// shapeOf returns the shape of a message. known are those that are made already, or are being made: messages hold one another.
func shapeOf(d protoreflect.MessageDescriptor, known map[protoreflect.FullName]*shape) *shape {
	if s := known[d.FullName()]; s != nil {
		return s
	}
	s := &shape{}
	known[d.FullName()] = s
	for i := range d.Fields().Len() {
		f := d.Fields().Get(i)
		if f.Message() == nil {
			continue
		}
		if n := int(f.Number()) + 1 - len(s.fields); n > 0 {
			s.fields = append(s.fields, make([]*shape, n)...)
		}
		s.fields[f.Number()] = shapeOf(f.Message(), known)
	}
	return s
}

var errDepth = errors.New("its messages are nested too deeply")

// messages counts the messages that decoding a message makes within it. Those that others replace count too.
func (s *shape) messages(b []byte, depth int) (int, error) {
	if len(s.fields) == 0 {
		return 0, nil // the decoder finds what is wrong with it
	}
	if depth == 0 {
		return 0, errDepth
	}
	count := 0
	for len(b) > 0 {
		field, kind, value, rest, err := next(b)
		if err != nil {
			return 0, err
		}
		b = rest
		if kind != protowire.BytesType || int(field) >= len(s.fields) || s.fields[field] == nil {
			continue
		}
		n, err := s.fields[field].messages(value, depth-1)
		if err != nil {
			return 0, err
		}
		count += 1 + n
	}
	return count, nil
}

const (
	// messageBytes is the most that a message within an operation takes in memory beside the bytes of its keys and values.
	messageBytes = 256
	// freeMessages is how many of an operation count as part of it. A transaction with more of them takes room of Options.PartBytes.
	freeMessages = 16
)

// decode decodes an operation. One that finds no room for its messages stays encoded, and its worker waits for room.
func (p *pipe) decode(e encodedOperation) (*operation, error) {
	o := &operation{p: p, size: uint64(len(e.body)), field: fieldError}
	if e.messages > freeMessages {
		o.tag, o.timeoutMs = headOf(e.body)
		switch parts := int64(e.messages) * messageBytes; {
		case parts > p.s.o.PartBytes:
			o.refusal = rpctypes.ErrGRPCTooManyOps
			p.s.o.Metrics.Refused.Inc()
			return o, nil
		case !o.takeParts(parts, (*semaphore.Weighted).TryAcquire):
			o.late = encodedOperation{bytes.Clone(e.body), e.messages} // a frame must not stay for one operation
			return o, nil
		}
	}
	if err := o.decode(e.body); err != nil {
		o.giveBack()
		return nil, p.errFrame(err)
	}
	return o, nil
}

// headOf returns what must be known of an operation before it is decoded.
func headOf(b []byte) (tag uint64, timeoutMs uint32) {
	for len(b) > 0 {
		field, kind, value, rest, err := next(b)
		if err != nil {
			break // not in bytes whose messages were counted
		}
		v, _ := protowire.ConsumeVarint(value)
		switch {
		case kind != protowire.VarintType:
		case field == fieldOperationTag:
			tag = v
		case field == fieldTimeoutMs:
			timeoutMs = uint32(v)
		}
		b = rest
	}
	return tag, timeoutMs
}

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
