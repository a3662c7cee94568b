package transport

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/skeindb/skein/internal/measure"
)

// encodeFrame encodes a decoded frame as the lanes would.
func encodeFrame(f *frame) []byte {
	var h header
	switch f.kind {
	case frameMessage:
		h = messageFrame(f.method)
	case frameCall:
		h = callFrame(f.id, f.method, f.timeout)
	case frameReply:
		h = replyFrame(f.id, f.status)
	case frameCancel:
		h = cancelFrame(f.id)
	case frameOpen:
		h = openFrame(f.id, f.method)
	case framePassCall, framePassedCall:
		h = passCallFrame(f.kind, f.id, f.method, f.timeout, f.node)
	case framePassOpen, framePassedOpen:
		h = passOpenFrame(f.kind, f.id, f.method, f.node)
	case frameData:
		h = dataFrame(f.id, f.side)
	case frameCredit:
		h = creditFrame(f.id, f.side, f.credit)
	case frameEnd:
		h = endFrame(f.id, f.side, f.status)
	case framePing, framePong:
		h = pingFrame(f.kind, f.id)
		f.payload = pingPadding
	}
	h.finish(len(f.payload))
	return append(h.b[:h.n:h.n], f.payload...)
}

// TestFormat shows each frame byte by byte; a change of the golden file is a change
// of the format.
func TestFormat(t *testing.T) {
	datadriven.RunTest(t, "testdata/format", func(t *testing.T, d *datadriven.TestData) string {
		f := frame{payload: []byte(d.Input)}
		h := hello{}
		var kind, class, slot, of int
		args := map[string]any{
			"id": &f.id, "side": &f.side, "status": &f.status, "method": &f.method, "credit": &f.credit, "timeout": &f.timeout,
			"kind": &kind, "class": &class, "slot": &slot, "of": &of, "by": &f.node, "verdict": &h.verdict, "features": &h.features,
			"cluster": &h.cluster, "node": &h.node, "to": &h.to, "boot": &h.boot, "max": &h.maxMessage, "window": &h.window, "plan": &h.plan,
		}
		for _, a := range d.CmdArgs {
			if _, err := fmt.Sscan(a.Vals[0], scanTarget(args[a.Key])); err != nil {
				d.Fatalf(t, "%s: %v", a.Key, err)
			}
		}
		h.kind = Kind(kind)
		kinds := map[string]frameKind{
			"message": frameMessage, "call": frameCall, "reply": frameReply, "cancel": frameCancel, "open": frameOpen,
			"pass-call": framePassCall, "passed-call": framePassedCall, "pass-open": framePassOpen, "passed-open": framePassedOpen,
			"data": frameData, "credit": frameCredit, "end": frameEnd, "ping": framePing, "pong": framePong,
		}
		var b []byte
		switch d.Cmd {
		case "hello":
			b = helloFrame(frameHello, &h)
		case "answer":
			b = helloFrame(frameAnswer, &h)
		case "confirm":
			b = appendConfirm(nil)
		case "lane":
			b = appendLane(nil, Class(class), slot)
		case "join":
			j := joining{key: sessionKey([]byte(d.Input)), class: Class(class), slot: slot, of: of}
			b = joinFrame(j)
			if got, err := parseJoin(b[lengthBytes:]); err != nil || got != j {
				d.Fatalf(t, "read: %+v, %v", got, err)
			}
		case "knock":
			b = knockFrame(h.cluster, h.node, h.to)
			if from, ok := parseKnock(b, h.cluster, h.to); !ok || from != h.node {
				d.Fatalf(t, "read: %s, %t", from, ok)
			}
		case "ask":
			b = askFrame()
		case "told":
			b = toldFrame([]byte(d.Input))
			if got, err := newFrameReader(bytes.NewReader(b), 1<<10).told(); err != nil || string(got) != d.Input {
				d.Fatalf(t, "read: %q, %v", got, err)
			}
		case "error":
			b = errorBody(&RemoteError{Code: uint32(f.id), Message: d.Input, Detail: []byte{0xd1, 0xd2}})
		case "decode":
			return decodeHex(d.Input)
		default:
			f.kind = kinds[d.Cmd]
			b = encodeFrame(&f)
			if got, err := parseFrame(b[lengthBytes:]); err != nil || got.kind != f.kind || got.id != f.id || got.node != f.node || got.method != f.method || got.timeout != f.timeout {
				d.Fatalf(t, "parse: %+v, %v", got, err)
			}
		}
		return hex.Dump(b)
	})
}

// scanTarget makes a duration scannable as milliseconds.
func scanTarget(v any) any {
	if d, ok := v.(*time.Duration); ok {
		return (*scanMillis)(d)
	}
	return v
}

type scanMillis time.Duration

func (m *scanMillis) Scan(st fmt.ScanState, _ rune) error {
	var n int64
	if _, err := fmt.Fscan(st, &n); err != nil {
		return err
	}
	*m = scanMillis(time.Duration(n) * time.Millisecond)
	return nil
}

func decodeHex(input string) string {
	b, err := hex.DecodeString(strings.Join(strings.Fields(input), ""))
	if err != nil {
		return err.Error()
	}
	f, err := newFrameReader(bytes.NewReader(b), 1<<10).next()
	if err != nil {
		return err.Error()
	}
	return fmt.Sprintf("%+v", f)
}

// FuzzFrame: no body makes the decoder panic, and an accepted one encodes to the same
// bytes.
func FuzzFrame(f *testing.F) {
	for kind := frameMessage; kind <= framePassedOpen; kind++ {
		f.Add(encodeFrame(&frame{kind: kind, id: 7, method: 3, payload: nil})[lengthBytes:])
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		got, err := parseFrame(b)
		if err != nil {
			if !errors.Is(err, errMalformed) {
				t.Fatalf("error %v", err)
			}
			return
		}
		if got.kind == framePing || got.kind == framePong {
			return // its padding may be anything
		}
		if again := encodeFrame(&got)[lengthBytes:]; !bytes.Equal(again, b) && got.timeout != maxTimeout {
			t.Fatalf("%x decodes to %+v, which is %x", b, got, again)
		}
	})
}

// FuzzFrameReader: for any bytes, in any pieces, memory grows with the bytes received
// and not with the announced length.
func FuzzFrameReader(f *testing.F) {
	f.Add([]byte{0, 0, 0, 4, 1, 0, 1, 9}, false)
	f.Add([]byte{0x3f, 0xff, 0xff, 0xff, 1, 0, 1, 9}, true)
	f.Fuzz(func(t *testing.T, b []byte, pieces bool) {
		var r io.Reader = bytes.NewReader(b)
		if pieces {
			r = iotest.OneByteReader(r)
		}
		fr := newFrameReader(r, 1<<30)
		total := 0
		for {
			got, err := fr.next()
			if err != nil {
				break
			}
			if cap(got.payload) > 2*len(b)+readBufferBytes {
				t.Fatalf("%d bytes allocated for %d that came", cap(got.payload), len(b))
			}
			total += len(got.payload)
		}
		if total > len(b) {
			t.Fatalf("%d payload bytes out of %d", total, len(b))
		}
	})
}

// TestClaimedLength: a frame that claims a gigabyte and sends nothing allocates no
// more than one read buffer.
func TestClaimedLength(t *testing.T) {
	claim := []byte{0x3f, 0xff, 0xff, 0xff, 1, 0, 1}
	allocated := testing.Benchmark(func(b *testing.B) {
		b.Helper()
		b.ReportAllocs()
		for range b.N {
			_, err := newFrameReader(bytes.NewReader(claim), 1<<30).next()
			if !errors.Is(err, io.ErrUnexpectedEOF) {
				b.Fatal(err)
			}
		}
	}).AllocedBytesPerOp()
	if allocated > 4*readBufferBytes {
		t.Errorf("%d bytes allocated", allocated)
	}
}

// TestLargeFrames: sizes around the buffer's arrive whole, also in pieces.
func TestLargeFrames(t *testing.T) {
	for _, size := range []int{0, 1, readBufferBytes - 8, readBufferBytes - 7, readBufferBytes - 6, readBufferBytes, 3*readBufferBytes + 1} {
		want := bytes.Repeat([]byte{7}, size)
		b := encodeFrame(&frame{kind: frameMessage, method: 2, payload: want})
		b = append(b, encodeFrame(&frame{kind: frameCancel, id: 5})...)
		for _, r := range []io.Reader{bytes.NewReader(b), iotest.HalfReader(bytes.NewReader(b)), iotest.DataErrReader(bytes.NewReader(b))} {
			fr := newFrameReader(r, 1<<20)
			f, err := fr.next()
			if err != nil || !bytes.Equal(f.payload, want) {
				t.Fatalf("size %d: %d bytes, %v", size, len(f.payload), err)
			}
			if f, err = fr.next(); err != nil || f.id != 5 {
				t.Fatalf("size %d: second frame %+v, %v", size, f, err)
			}
			if _, err = fr.next(); !errors.Is(err, io.EOF) {
				t.Fatalf("size %d: end %v", size, err)
			}
		}
	}
}

func FuzzHello(f *testing.F) {
	h := hello{kind: KindBulk, cluster: 1, node: 2, to: 3, boot: 4, maxMessage: 5, window: 6}
	f.Add(helloFrame(frameHello, &h)[lengthBytes:])
	f.Add(appendLane(nil, ClassRaft, 3)[lengthBytes:])
	f.Add(appendConfirm(nil)[lengthBytes:])
	f.Fuzz(func(t *testing.T, b []byte) {
		_, _, _ = parseLane(b)
		_ = parseConfirm(b)
		if len(b) == 0 {
			return
		}
		got, err := parseHello(b, b[0])
		if err != nil {
			return
		}
		again := helloFrame(b[0], &got)[lengthBytes:]
		if len(b) < len(again) {
			again = again[:leastHelloBody] // of a build without plans
		}
		if !bytes.Equal(again, b[:len(again)]) {
			t.Fatalf("%x decodes to %+v, which is %x", b, got, again)
		}
	})
}

// A build from before recovery plans says nothing of them: it has none.
func TestHelloWithoutAPlan(t *testing.T) {
	h := hello{cluster: 1, node: 2, to: 3, boot: 4, maxMessage: 5, window: 6, plan: 7}
	b := helloFrame(frameHello, &h)[lengthBytes:]
	got, err := parseHello(b[:leastHelloBody], frameHello)
	if h.plan = 0; err != nil || got != h {
		t.Errorf("%+v, %v, want %+v", got, err, h)
	}
	if _, err := parseHello(b[:leastHelloBody-1], frameHello); err == nil {
		t.Error("a hello without its version was taken")
	}
}

func FuzzError(f *testing.F) {
	f.Add(errorBody(&RemoteError{Code: 1, Message: "m", Detail: []byte("d")}))
	f.Add([]byte{0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff})
	f.Fuzz(func(t *testing.T, b []byte) {
		e, err := parseError(b)
		if err != nil {
			return
		}
		if again := errorBody(e); len(b) < maxErrorBytes/2 && !bytes.Equal(again, b) {
			t.Fatalf("%x decodes to %+v, which is %x", b, e, again)
		}
	})
}

// TestLargeErrors: an error that is too large to send loses its detail and keeps its
// text.
func TestLargeErrors(t *testing.T) {
	huge := &RemoteError{Code: 3, Message: strings.Repeat("m", maxErrorBytes), Detail: make([]byte, maxErrorBytes)}
	b := errorBody(fmt.Errorf("wrapped: %w", huge))
	e, err := parseError(b)
	if err != nil || e.Code != 3 || len(e.Detail) != 0 || len(b) > maxErrorBytes {
		t.Errorf("%d bytes, code %d, detail %d bytes, %v", len(b), e.Code, len(e.Detail), err)
	}
}

// FuzzLane: the header of a lane that is accepted would be written alike.
func FuzzLane(f *testing.F) {
	f.Add(appendLane(nil, ClassRaft, 3)[lengthBytes:])
	f.Add([]byte{frameLane, uint8(numClasses), 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		c, slot, err := parseLane(b)
		if err != nil {
			if !errors.Is(err, errMalformed) {
				t.Fatal(err)
			}
			return
		}
		if again := appendLane(nil, c, slot)[lengthBytes:]; !bytes.Equal(again, b[:len(again)]) {
			t.Fatalf("%x decodes to lane %d of %v", b, slot, c)
		}
	})
}

// FuzzTold: reading an answer to Ask costs memory in proportion to the bytes received.
// The answer is read whole or refused.
func FuzzTold(f *testing.F) {
	f.Add(toldFrame([]byte("rows")))
	f.Add([]byte{1, 0xff, 0xff, 0xff, frameTold})
	f.Fuzz(func(t *testing.T, b []byte) {
		var told []byte
		var err error
		if got := measure.Excess(len(b), func() { told, err = newFrameReader(bytes.NewReader(b), 1<<10).told() }); got != 0 {
			t.Fatalf("%d bytes allocated for %d that came", got, len(b))
		}
		if err == nil && !bytes.HasPrefix(b, toldFrame(told)) {
			t.Fatalf("%x is read as %q", b, told)
		}
	})
}

// FuzzHandshake: a handshake frame costs little memory, whatever length it announces. It
// is read whole or refused.
func FuzzHandshake(f *testing.F) {
	f.Add(helloFrame(frameHello, &hello{cluster: 1, node: 2, to: 3, boot: 4, maxMessage: 5, window: 6}))
	f.Add([]byte{0x3f, 0xff, 0xff, 0xff, frameHello})
	f.Fuzz(func(t *testing.T, b []byte) {
		var body []byte
		var err error
		if got := measure.Excess(len(b), func() { body, err = newFrameReader(bytes.NewReader(b), 1<<30).body() }); got != 0 {
			t.Fatalf("%d bytes allocated for %d that came", got, len(b))
		}
		if err == nil && !bytes.Contains(b, body) {
			t.Fatalf("%x is read as %x", b, body)
		}
	})
}

// endless repeats bytes.
type endless struct {
	b  []byte
	at int
}

func (e *endless) Read(p []byte) (int, error) {
	n := copy(p, e.b[e.at:])
	e.at = (e.at + n) % len(e.b)
	return n, nil
}

// TestLargeFramesCostTheirMemoryOnce: the buffers that a large frame passes are reused,
// and only the receiver's copy is new memory.
func TestLargeFramesCostTheirMemoryOnce(t *testing.T) {
	const size = 512 << 10
	payload := make([]byte, size)
	read := testing.Benchmark(func(b *testing.B) {
		b.Helper()
		b.ReportAllocs()
		fr := newFrameReader(&endless{b: encodeFrame(&frame{kind: frameMessage, method: 2, payload: payload})}, 1<<30)
		for range b.N {
			if f, err := fr.next(); err != nil || len(f.payload) != size {
				b.Fatal(len(f.payload), err)
			}
		}
	}).AllocedBytesPerOp()
	if read > size*7/4 { // under the race detector a pool drops some of its content
		t.Errorf("%d bytes allocated for a frame of %d that comes", read, size)
	}
	sent := testing.Benchmark(func(b *testing.B) {
		b.Helper()
		b.ReportAllocs()
		for range b.N {
			b, memory := large(size)
			copy(b[:size], payload)
			memory.done()
		}
	}).AllocedBytesPerOp()
	if sent > size/2 {
		t.Errorf("%d bytes allocated for a frame of %d that waits to be sent", sent, size)
	}
}

// TestRecycledMemory: recycled memory serves later messages of streams, and other
// messages keep their content.
func TestRecycledMemory(t *testing.T) {
	sizes := []int{chunkBytes / 2, chunkBytes/2 + 1, 63 << 10, chunkBytes - 64, chunkBytes, chunkBytes + 1, 1, 0, 3 * chunkBytes}
	const rounds = 4
	var wire bytes.Buffer
	for i := range rounds * len(sizes) {
		wire.Write(encodeFrame(&frame{kind: frameData, id: uint64(i), payload: bytes.Repeat([]byte{byte(i)}, sizes[i%len(sizes)])}))
	}
	fr := newFrameReader(&wire, 1<<20)
	var kept [][]byte
	pooled := 0
	for i := range rounds * len(sizes) {
		f, err := fr.next()
		if err != nil {
			t.Fatal(err)
		}
		if len(f.payload) != sizes[i%len(sizes)] {
			t.Fatalf("message %d has %d bytes, wanted %d", i, len(f.payload), sizes[i%len(sizes)])
		}
		if cap(f.payload) == chunkBytes {
			pooled++
		}
		if i%2 == 0 {
			Recycle(f.payload)
			kept = append(kept, nil)
			continue
		}
		kept = append(kept, f.payload)
	}
	for i, b := range kept {
		if b != nil && !bytes.Equal(b, bytes.Repeat([]byte{byte(i)}, len(b))) {
			t.Errorf("message %d has changed", i)
		}
	}
	if pooled < 3*rounds {
		t.Errorf("%d messages came in memory that can be recycled, wanted %d", pooled, 3*rounds)
	}
	Recycle(nil)
	Recycle(make([]byte, 5, chunkBytes-1))
}

// FuzzJoin: the first frame of a further connection is read whole or refused.
func FuzzJoin(f *testing.F) {
	f.Add(joinFrame(joining{key: sessionKey{1, 2, 3}, class: ClassRequest, slot: 2, of: 3})[lengthBytes:])
	f.Add([]byte{frameJoin, 1})
	f.Fuzz(func(t *testing.T, b []byte) {
		j, err := parseJoin(b)
		if err != nil {
			if !errors.Is(err, errMalformed) {
				t.Fatal(err)
			}
			return
		}
		if again := joinFrame(j)[lengthBytes:]; !bytes.Equal(again, b[:len(again)]) {
			t.Fatalf("%x decodes to %+v, which is %x", b, j, again)
		}
	})
}
