package transport

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"iter"
	"time"

	"github.com/skeindb/skein/keyspace"
)

// frameKind is the first byte of a frame's body. docs/format/transport.md has the
// byte tables; numbers are never reused.
type frameKind uint8

const (
	frameMessage frameKind = 1
	frameCall    frameKind = 2
	frameReply   frameKind = 3
	frameCancel  frameKind = 4
	frameOpen    frameKind = 5
	frameData    frameKind = 6
	frameCredit  frameKind = 7
	frameEnd     frameKind = 8
	framePing    frameKind = 9
	framePong    frameKind = 10
	// A call or a stream that the receiver is to pass on to another node, and one that was
	// passed on.
	framePassCall   frameKind = 11
	framePassedCall frameKind = 12
	framePassOpen   frameKind = 13
	framePassedOpen frameKind = 14
)

// status tells how a call or a stream ended.
type status uint8

const (
	statusOK       status = 0 // a reply's payload, or the end of a stream
	statusError    status = 1 // the handler's error: the payload is an error body
	statusBusy     status = 2 // too many handlers; it did not run
	statusNoMethod status = 3 // no such handler; it did not run
	statusClosing  status = 4 // the bus is closing; it did not run
	statusTooLarge status = 5 // the handler ran, but its answer is too large
	statusExpired  status = 6 // the handler gave up at the caller's deadline
	statusNoRoute  status = 7 // whoever was to pass it on has no session for it; it did not run
	statusLost     status = 8 // whoever has passed it on lost its session; it may have run

	numStatuses = 9
)

// The sender of a frame of a stream: its opener or its handler.
const (
	sideOpener  uint8 = 0
	sideHandler uint8 = 1
)

const (
	lengthBytes     = 4
	messageHeader   = 1 + 2
	callHeader      = 1 + 8 + 2 + 8
	replyHeader     = 1 + 8 + 1
	cancelBody      = 1 + 8
	openHeader      = 1 + 8 + 2
	dataHeader      = 1 + 8 + 1
	creditBody      = 1 + 8 + 1 + 4
	endHeader       = 1 + 8 + 1 + 1
	pingBody        = 1 + 8 + 24 // padded: a reset answers only packets above 42 bytes
	passCallHeader  = callHeader + 8
	passOpenHeader  = openHeader + 8
	maxHeaderBytes  = lengthBytes + passCallHeader
	errorBodyHeader = 4 + 4
)

// maxErrorBytes bounds message and detail of an error, so that the report of a failure
// is not itself too large to send.
const maxErrorBytes = 1 << 20

// errProtocol ends a session whose peer broke the protocol.
var errProtocol = errors.New("transport: protocol violation")

// errMalformed is wrapped by every error of a decoder of this package.
var errMalformed = errors.New("malformed frame")

// frame is one decoded frame. kind says which fields count.
type frame struct {
	kind    frameKind
	side    uint8
	status  status
	method  Method
	node    keyspace.NodeID // to which it is to be passed on, or from which it came
	id      uint64
	timeout time.Duration // of a call; 0 is none
	credit  uint32
	payload []byte
}

// header is room on the stack for the length and the fixed part of a frame.
type header struct {
	n int
	b [maxHeaderBytes]byte
}

func (h *header) start(k frameKind) { h.b[lengthBytes] = byte(k); h.n = lengthBytes + 1 }
func (h *header) u8(v uint8)        { h.b[h.n] = v; h.n++ }
func (h *header) u16(v uint16)      { binary.BigEndian.PutUint16(h.b[h.n:], v); h.n += 2 }
func (h *header) u32(v uint32)      { binary.BigEndian.PutUint32(h.b[h.n:], v); h.n += 4 }
func (h *header) u64(v uint64)      { binary.BigEndian.PutUint64(h.b[h.n:], v); h.n += 8 }

// finish writes the length of a frame with a payload of that many bytes.
func (h *header) finish(payloadBytes int) {
	binary.BigEndian.PutUint32(h.b[:], uint32(h.n-lengthBytes+payloadBytes))
}

func messageFrame(m Method) (h header) {
	h.start(frameMessage)
	h.u16(uint16(m))
	return h
}

// callFrame carries the caller's remaining time, because clocks of two nodes cannot be
// compared.
func callFrame(id uint64, m Method, timeout time.Duration) (h header) {
	h.start(frameCall)
	h.u64(id)
	h.u16(uint16(m))
	h.u64(uint64(max(timeout, 0) / time.Microsecond))
	return h
}

// passCallFrame also makes the frame of a call that was passed on: kind is framePassCall
// and node the receiver in the end, or framePassedCall and the caller.
func passCallFrame(kind frameKind, id uint64, m Method, timeout time.Duration, node keyspace.NodeID) (h header) {
	h = callFrame(id, m, timeout)
	h.b[lengthBytes] = byte(kind)
	h.u64(uint64(node))
	return h
}

func replyFrame(id uint64, st status) (h header) {
	h.start(frameReply)
	h.u64(id)
	h.u8(uint8(st))
	return h
}

func cancelFrame(id uint64) (h header) {
	h.start(frameCancel)
	h.u64(id)
	return h
}

func openFrame(id uint64, m Method) (h header) {
	h.start(frameOpen)
	h.u64(id)
	h.u16(uint16(m))
	return h
}

// passOpenFrame is to openFrame what passCallFrame is to callFrame.
func passOpenFrame(kind frameKind, id uint64, m Method, node keyspace.NodeID) (h header) {
	h = openFrame(id, m)
	h.b[lengthBytes] = byte(kind)
	h.u64(uint64(node))
	return h
}

func dataFrame(id uint64, side uint8) (h header) {
	h.start(frameData)
	h.u64(id)
	h.u8(side)
	return h
}

func creditFrame(id uint64, side uint8, bytes uint32) (h header) {
	h.start(frameCredit)
	h.u64(id)
	h.u8(side)
	h.u32(bytes)
	return h
}

func endFrame(id uint64, side uint8, st status) (h header) {
	h.start(frameEnd)
	h.u64(id)
	h.u8(side)
	h.u8(uint8(st))
	return h
}

// pingFrame also makes pongs: kind is framePing or framePong. Its payload is
// pingPadding.
func pingFrame(kind frameKind, number uint64) (h header) {
	h.start(kind)
	h.u64(number)
	return h
}

var pingPadding = make([]byte, pingBody-1-8)

// parseFrame decodes the body of a frame: what follows the length. The payload
// points into b.
func parseFrame(b []byte) (frame, error) {
	if len(b) == 0 {
		return frame{}, fmt.Errorf("%w: empty", errMalformed)
	}
	f := frame{kind: frameKind(b[0])}
	fixed, exact := frameShape(f.kind)
	switch {
	case fixed == 0:
		return frame{}, fmt.Errorf("%w: unknown kind %d", errMalformed, b[0])
	case len(b) < fixed, exact && len(b) != fixed:
		return frame{}, fmt.Errorf("%w: kind %d with %d bytes", errMalformed, b[0], len(b))
	}
	be := binary.BigEndian
	f.payload = b[fixed:]
	if f.kind == frameMessage {
		f.method = Method(be.Uint16(b[1:]))
		return f, nil
	}
	f.id = be.Uint64(b[1:])
	rest := b[9:]
	switch f.kind {
	case frameCall, framePassCall, framePassedCall:
		f.method = Method(be.Uint16(rest))
		micros := be.Uint64(rest[2:])
		f.timeout = time.Duration(min(micros, uint64(maxTimeout/time.Microsecond))) * time.Microsecond
		if f.kind != frameCall {
			f.node = keyspace.NodeID(be.Uint64(rest[10:]))
		}
	case frameReply:
		f.status = status(rest[0])
	case frameOpen:
		f.method = Method(be.Uint16(rest))
	case framePassOpen, framePassedOpen:
		f.method = Method(be.Uint16(rest))
		f.node = keyspace.NodeID(be.Uint64(rest[2:]))
	case frameData:
		f.side = rest[0]
	case frameCredit:
		f.side = rest[0]
		f.credit = be.Uint32(rest[1:])
	case frameEnd:
		f.side = rest[0]
		f.status = status(rest[1])
	default: // an id is all there is
	}
	if f.side > sideHandler || f.status >= numStatuses {
		return frame{}, fmt.Errorf("%w: kind %d, side %d, status %d", errMalformed, f.kind, f.side, f.status)
	}
	return f, nil
}

// maxTimeout bounds the timeout in a call's frame; more counts as none.
const maxTimeout = 365 * 24 * time.Hour

// frameShape returns the bytes of a kind's fixed part, 0 for an unknown kind, and
// whether nothing may follow it.
func frameShape(k frameKind) (fixed int, exact bool) {
	switch k {
	case frameMessage:
		return messageHeader, false
	case frameCall:
		return callHeader, false
	case frameReply:
		return replyHeader, false
	case frameCancel:
		return cancelBody, true
	case frameOpen:
		return openHeader, false
	case framePassCall, framePassedCall:
		return passCallHeader, false
	case framePassOpen, framePassedOpen:
		return passOpenHeader, false
	case frameData:
		return dataHeader, false
	case frameCredit:
		return creditBody, true
	case frameEnd:
		return endHeader, false
	case framePing, framePong:
		return pingBody, true
	}
	return 0, false
}

// errorBody returns the error body of err, bounded in size.
func errorBody(err error) []byte {
	re, ok := errors.AsType[*RemoteError](err)
	if !ok {
		re = &RemoteError{Message: err.Error()}
	}
	msg, detail := re.Message, re.Detail
	if len(msg) > maxErrorBytes/2 {
		msg = msg[:maxErrorBytes/2]
	}
	if len(detail) > maxErrorBytes/2 {
		detail = nil
		msg += " (its detail was too large to send)"
	}
	dst := make([]byte, 0, errorBodyHeader+len(msg)+len(detail))
	dst = binary.BigEndian.AppendUint32(dst, re.Code)
	dst = binary.BigEndian.AppendUint32(dst, uint32(len(msg)))
	dst = append(dst, msg...)
	return append(dst, detail...)
}

// parseError decodes an error body. Detail points into b.
func parseError(b []byte) (*RemoteError, error) {
	if len(b) < errorBodyHeader {
		return nil, fmt.Errorf("%w: error body of %d bytes", errMalformed, len(b))
	}
	n := binary.BigEndian.Uint32(b[4:])
	rest := b[errorBodyHeader:]
	if uint64(n) > uint64(len(rest)) {
		return nil, fmt.Errorf("%w: error text of %d bytes in %d", errMalformed, n, len(rest))
	}
	e := &RemoteError{Code: binary.BigEndian.Uint32(b), Message: string(rest[:n])}
	if len(rest) > int(n) {
		e.Detail = rest[n:]
	}
	return e, nil
}

// readBufferBytes is the read buffer of one stream. The memory of a larger frame grows
// by this step as its bytes arrive.
const readBufferBytes = 64 << 10

// frameReader reads frames from a stream.
type frameReader struct {
	r     *bufio.Reader
	max   int
	taken int // bytes of the frames returned, with headers; the reader of the count resets it
}

func newFrameReader(r io.Reader, maxFrameBytes int) *frameReader {
	return &frameReader{r: bufio.NewReaderSize(r, readBufferBytes), max: maxFrameBytes}
}

// next returns the next frame, whose payload belongs to the caller. It returns
// io.EOF only between two frames.
func (fr *frameReader) next() (frame, error) {
	n, err := fr.length()
	if err != nil {
		return frame{}, err
	}
	fr.taken += lengthBytes + n
	if lengthBytes+n <= fr.r.Size() {
		b, err := fr.r.Peek(lengthBytes + n)
		if err != nil {
			return frame{}, unexpectedEnd(err)
		}
		f, err := parseFrame(b[lengthBytes:])
		if err != nil {
			return frame{}, err
		}
		if len(f.payload) > 0 {
			// An exact copy: with a slice of a shared buffer, one small message in use
			// would pin the whole buffer.
			f.payload = append(f.memory(), f.payload...)
		} else {
			f.payload = nil
		}
		_, err = fr.r.Discard(lengthBytes + n)
		return f, err
	}
	if _, err := fr.r.Discard(lengthBytes); err != nil {
		return frame{}, unexpectedEnd(err)
	}
	body, err := readGrowing(fr.r, n)
	if err != nil {
		return frame{}, unexpectedEnd(err)
	}
	return parseFrame(body)
}

// length peeks the length of the next frame.
func (fr *frameReader) length() (int, error) {
	b, err := fr.r.Peek(lengthBytes)
	if err != nil {
		if len(b) > 0 {
			err = unexpectedEnd(err)
		}
		return 0, err
	}
	n := binary.BigEndian.Uint32(b)
	if n == 0 || uint64(n) > uint64(fr.max) {
		return 0, fmt.Errorf("%w: length %d, limit %d", errMalformed, n, fr.max)
	}
	return int(n), nil
}

func unexpectedEnd(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// SplitFrames yields the frames of a batch that a Lane returned, each with its
// length in front. It is for carriers that treat frames one by one.
func SplitFrames(batch []byte) iter.Seq[[]byte] {
	return func(yield func([]byte) bool) {
		for len(batch) > 0 {
			n := lengthBytes + int(binary.BigEndian.Uint32(batch))
			if !yield(batch[:n:n]) {
				return
			}
			batch = batch[n:]
		}
	}
}

// IsMessage says whether a frame of SplitFrames is a one-way message: the only
// kind that a carrier may drop, repeat or overtake without ending the session.
func IsMessage(frame []byte) bool { return frameKind(frame[lengthBytes]) == frameMessage }
