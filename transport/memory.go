package transport

import (
	"bytes"
	"io"
	"sync"
)

// chunkBytes is the size of one write: large enough that the cost of a write is small
// against its bytes, small enough to keep a class's queue moving.
const chunkBytes = 64 << 10

// smallBytes is the size of the first chunk of a lane at rest: many times a heartbeat.
const smallBytes = 2 << 10

var (
	chunks      = sync.Pool{New: func() any { return new([chunkBytes]byte) }}
	smallChunks = sync.Pool{New: func() any { return new([smallBytes]byte) }}
)

// largePool holds memory for frames of up to maxPooledBytes while they wait to be sent
// or are received. Without it a frame that is read in many pieces would be garbage
// twice for each piece. At least half of the memory is used.
var largePool [largeClasses]sync.Pool

const (
	largeClasses   = 5
	maxPooledBytes = chunkBytes << (largeClasses - 1)
)

// pooled is memory that goes back to its pool; the zero value goes to none.
type pooled struct {
	pool   *sync.Pool
	memory any
}

// done gives the memory back. Nobody may use it any more.
func (p pooled) done() {
	if p.pool != nil {
		p.pool.Put(p.memory)
	}
}

// small returns the empty memory of a small chunk.
func small() ([]byte, pooled) {
	m := smallChunks.Get().(*[smallBytes]byte)
	return m[:0], pooled{&smallChunks, m}
}

// whole returns the empty memory of a chunk.
func whole() ([]byte, pooled) {
	m := chunks.Get().(*[chunkBytes]byte)
	return m[:0], pooled{&chunks, m}
}

// large returns empty memory for n bytes. No pool has it where n is too large.
func large(n int) ([]byte, pooled) {
	class := 0
	for chunkBytes<<class < n {
		if class++; class == largeClasses {
			return make([]byte, 0, n), pooled{}
		}
	}
	p, ok := largePool[class].Get().(*[]byte)
	if !ok {
		all := make([]byte, chunkBytes<<class)
		p = &all
	}
	return (*p)[:0:n], pooled{&largePool[class], p}
}

// Recycle takes back the memory of a message from Stream.Recv that nobody uses any
// more. It saves work of the garbage collector for receivers of many bytes, such as the
// tables of a snapshot. Others need not call it.
func Recycle(payload []byte) {
	if cap(payload) == chunkBytes {
		chunks.Put((*[chunkBytes]byte)(payload[:chunkBytes]))
	}
}

// memory returns memory for the frame's payload. It is pooled for messages of streams,
// whose receivers may recycle it, if at least half of it is used.
func (f *frame) memory() []byte {
	if f.kind == frameData && len(f.payload) > chunkBytes/2 && len(f.payload) <= chunkBytes {
		return chunks.Get().(*[chunkBytes]byte)[:0]
	}
	return make([]byte, 0, len(f.payload))
}

// readGrowing reads n bytes. Its memory is at most twice the bytes that have arrived,
// beside one pooled buffer.
func readGrowing(r io.Reader, n int) ([]byte, error) {
	if n <= maxPooledBytes {
		b, memory := large(n)
		defer memory.done()
		b = b[:n]
		if _, err := io.ReadFull(r, b); err != nil {
			return nil, err
		}
		return bytes.Clone(b), nil
	}
	b := make([]byte, 0, min(n, readBufferBytes))
	for len(b) < n {
		if len(b) == cap(b) {
			grown := make([]byte, len(b), min(n, 2*cap(b)))
			copy(grown, b)
			b = grown
		}
		got, err := r.Read(b[len(b):min(cap(b), n)])
		b = b[:len(b)+got]
		if err != nil && len(b) < n {
			return nil, err
		}
	}
	return b, nil
}
