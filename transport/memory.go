package transport

import (
	"bytes"
	"io"
	"sync"
)

// chunkBytes is the size of one write: enough to make the cost of a write small
// against its bytes, little enough to keep a class's queue moving.
const chunkBytes = 64 << 10

var chunks = sync.Pool{New: func() any { return new([chunkBytes]byte) }}

// largePool holds memory for frames of up to maxPooledBytes while they wait to be sent or are
// received: what is read in many pieces would else be collected twice for each of them. Of
// the memory at least half is used.
var largePool [largeClasses]sync.Pool

const (
	largeClasses   = 5
	maxPooledBytes = chunkBytes << (largeClasses - 1)
)

// large returns memory for n bytes, and what gives it back; nil where it is too large for that.
func large(n int) (b []byte, done func()) {
	class := 0
	for chunkBytes<<class < n {
		if class++; class == largeClasses {
			return make([]byte, n), nil
		}
	}
	p, ok := largePool[class].Get().(*[]byte)
	if !ok {
		all := make([]byte, chunkBytes<<class)
		p = &all
	}
	return (*p)[:n:n], func() { largePool[class].Put(p) }
}

// Recycle takes the memory of a message that Stream.Recv has returned and that nobody uses
// any more. Who receives much, as the tables of a snapshot, has the garbage collector stand
// still so; all others need not care.
func Recycle(payload []byte) {
	if cap(payload) == chunkBytes {
		chunks.Put((*[chunkBytes]byte)(payload[:chunkBytes]))
	}
}

// memory returns memory for the frame's payload: recycled where that is of a stream, whose
// receiver may give it back, and at least half of it is used.
func (f *frame) memory() []byte {
	if f.kind == frameData && len(f.payload) > chunkBytes/2 && len(f.payload) <= chunkBytes {
		return chunks.Get().(*[chunkBytes]byte)[:0]
	}
	return make([]byte, 0, len(f.payload))
}

// readGrowing reads n bytes into memory that at most doubles what has arrived, beside that
// of one pooled buffer.
func readGrowing(r io.Reader, n int) ([]byte, error) {
	if n <= maxPooledBytes {
		b, done := large(n)
		defer done()
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
