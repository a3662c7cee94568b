// Package wire reads and writes the elements of which Skein's wire and disk forms are
// made: varints, flags, fixed words and length-prefixed bytes. Each format keeps its own
// layout and version; this package only keeps the decoders from reading past the end and
// from allocating what is merely claimed.
//
// A [Reader] remembers the first error and reads zero values from then on, so that a
// decoder checks once, at its end. The functions [Uvarint] and [Bytes] do the same work
// without a Reader, for decoders on the path of every entry.
package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// ErrTruncated says that the input ends before the form does, or claims more elements
// than it has bytes for.
var ErrTruncated = errors.New("truncated")

// Uvarint reads an unsigned varint and returns what follows it.
func Uvarint(b []byte) (v uint64, rest []byte, err error) {
	v, n := binary.Uvarint(b)
	if n <= 0 {
		return 0, nil, ErrTruncated
	}
	return v, b[n:], nil
}

// Bytes reads a length and that many bytes, which stay a part of b, and returns what
// follows them.
func Bytes(b []byte) (field, rest []byte, err error) {
	n, b, err := Uvarint(b)
	if err != nil {
		return nil, nil, err
	}
	if n > uint64(len(b)) {
		return nil, nil, ErrTruncated
	}
	return b[:n:n], b[n:], nil
}

// AppendBytes appends the length of b and b.
func AppendBytes(dst, b []byte) []byte {
	dst = binary.AppendUvarint(dst, uint64(len(b)))
	return append(dst, b...)
}

// Flag returns f where set, else 0.
func Flag(set bool, f byte) byte {
	if set {
		return f
	}
	return 0
}

// Reader reads a form from its beginning. After the first error all reads return zero
// values. A Reader is used by one goroutine; copying it copies its place.
type Reader struct {
	b   []byte
	err error
}

// NewReader returns a Reader of b. What it reads stays a part of b.
func NewReader(b []byte) Reader { return Reader{b: b} }

// Fail notes an error, unless there is one already.
func (r *Reader) Fail(err error) {
	if r.err == nil {
		r.err, r.b = err, nil
	}
}

// Failf notes an error with a formatted text, unless there is one already.
func (r *Reader) Failf(format string, args ...any) { r.Fail(fmt.Errorf(format, args...)) }

// Err returns the first error.
func (r *Reader) Err() error { return r.err }

// OK says that nothing has failed so far.
func (r *Reader) OK() bool { return r.err == nil }

// End returns the first error, or one where bytes are left over.
func (r *Reader) End() error {
	if r.err == nil && len(r.b) > 0 {
		return fmt.Errorf("%d bytes left over", len(r.b))
	}
	return r.err
}

// Len returns how many bytes are left.
func (r *Reader) Len() int { return len(r.b) }

// Rest takes all bytes that are left.
func (r *Reader) Rest() []byte {
	b := r.b
	r.b = nil
	return b
}

// Take replaces what is left, for a decoder that has read a part by other means. It does
// nothing after an error.
func (r *Reader) Take(rest []byte, err error) {
	if err != nil {
		r.Fail(err)
		return
	}
	if r.err == nil {
		r.b = rest
	}
}

// Peek returns the bytes that are left, without reading them.
func (r *Reader) Peek() []byte { return r.b }

// Byte reads one byte.
func (r *Reader) Byte() byte {
	if len(r.b) == 0 {
		r.Fail(ErrTruncated)
		return 0
	}
	v := r.b[0]
	r.b = r.b[1:]
	return v
}

// Bool reads a byte that is 0 or 1.
func (r *Reader) Bool() bool {
	v := r.Byte()
	if v > 1 {
		r.Failf("a boolean is %d", v)
	}
	return v == 1
}

// Flags reads a byte in which only the known bits may be set.
func (r *Reader) Flags(known byte) byte {
	f := r.Byte()
	if f&^known != 0 {
		r.Failf("flags are %#x, known are %#x", f, known)
		return 0
	}
	return f
}

// Uvarint reads an unsigned varint.
func (r *Reader) Uvarint() uint64 {
	v, n := binary.Uvarint(r.b)
	if n <= 0 {
		r.Fail(ErrTruncated)
		return 0
	}
	r.b = r.b[n:]
	return v
}

// Uint64BE reads eight bytes, the highest first.
func (r *Reader) Uint64BE() uint64 {
	if len(r.b) < 8 {
		r.Fail(ErrTruncated)
		return 0
	}
	v := binary.BigEndian.Uint64(r.b)
	r.b = r.b[8:]
	return v
}

// Uint64LE reads eight bytes, the lowest first.
func (r *Reader) Uint64LE() uint64 {
	if len(r.b) < 8 {
		r.Fail(ErrTruncated)
		return 0
	}
	v := binary.LittleEndian.Uint64(r.b)
	r.b = r.b[8:]
	return v
}

// Fixed reads n bytes, whose number the format fixes. They stay a part of the input.
func (r *Reader) Fixed(n int) []byte {
	if len(r.b) < n {
		r.Fail(ErrTruncated)
		return nil
	}
	v := r.b[:n:n]
	r.b = r.b[n:]
	return v
}

// Bytes reads a length and that many bytes, which stay a part of the input.
func (r *Reader) Bytes() []byte {
	n := r.Uvarint()
	if n > uint64(len(r.b)) {
		r.Fail(ErrTruncated)
		return nil
	}
	v := r.b[:n:n]
	r.b = r.b[n:]
	return v
}

// BytesUpTo is Bytes with a limit of the format's own. It returns nil for a field of no
// bytes, so that whoever keeps the field does not keep the input.
func (r *Reader) BytesUpTo(limit int) []byte {
	v := r.Bytes()
	if len(v) > limit {
		r.Failf("%d bytes, at most %d", len(v), limit)
		return nil
	}
	if len(v) == 0 {
		return nil
	}
	return v
}

// Count reads how many elements follow, each of at least size bytes, size being 1 or
// more. A number that the input has no room for is an error, so that a caller may
// allocate what it is told.
func (r *Reader) Count(size int) int {
	n := r.Uvarint()
	if n > uint64(len(r.b)/size) {
		r.Fail(ErrTruncated)
		return 0
	}
	return int(n)
}

// CountUpTo is Count with a limit of the format's own.
func (r *Reader) CountUpTo(limit, size int) int {
	n := r.Count(size)
	if n > limit {
		r.Failf("%d elements, at most %d", n, limit)
		return 0
	}
	return n
}
