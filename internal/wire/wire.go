// Package wire reads and writes the elements of Skein's wire and disk formats: varints,
// flags, fixed words and length-prefixed bytes. Each format keeps its own layout and
// version. This package only keeps the decoders from reading past the end and from
// allocating memory for mere claims.
//
// A [Reader] remembers the first error and returns zero values from then on, so a decoder
// checks once, at its end. The functions [Uvarint], [Varint] and [Bytes] do the same without
// a Reader, for decoders on the path of every entry.
//
// Four decoders do without this package. A segment of wal and a frame of transport have
// fixed layouts, without varints. mvcc decodes a version for each key that is read, and checks
// length and meaning in one step. keyspace imports nothing of Skein.
package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// ErrTruncated says that the input ends too early, or claims more elements than it has
// bytes for.
var ErrTruncated = errors.New("truncated")

// Uvarint reads an unsigned varint and returns the rest.
func Uvarint(b []byte) (v uint64, rest []byte, err error) {
	v, n := binary.Uvarint(b)
	if n <= 0 {
		return 0, nil, ErrTruncated
	}
	return v, b[n:], nil
}

// Varint reads a signed varint (zigzag) and returns the rest.
func Varint(b []byte) (v int64, rest []byte, err error) {
	v, n := binary.Varint(b)
	if n <= 0 {
		return 0, nil, ErrTruncated
	}
	return v, b[n:], nil
}

// Bytes reads a length and that many bytes, and returns the rest. The field refers to b.
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

// AppendBytes appends the length of b, then b.
func AppendBytes(dst, b []byte) []byte {
	dst = binary.AppendUvarint(dst, uint64(len(b)))
	return append(dst, b...)
}

// Flag returns f if set is true, else 0.
func Flag(set bool, f byte) byte {
	if set {
		return f
	}
	return 0
}

// Reader reads a form from its beginning. After the first error all reads return zero
// values. A Reader is used by one goroutine; a copy keeps its own position.
type Reader struct {
	b   []byte
	err error
}

// NewReader returns a Reader of b. Its results refer to b.
func NewReader(b []byte) Reader { return Reader{b: b} }

// Fail records an error, unless there is one already.
func (r *Reader) Fail(err error) {
	if r.err == nil {
		r.err, r.b = err, nil
	}
}

// Failf records a formatted error, unless there is one already.
func (r *Reader) Failf(format string, args ...any) { r.Fail(fmt.Errorf(format, args...)) }

// Err returns the first error.
func (r *Reader) Err() error { return r.err }

// OK reports whether nothing has failed so far.
func (r *Reader) OK() bool { return r.err == nil }

// End returns the first error, or an error if bytes are left.
func (r *Reader) End() error {
	if r.err == nil && len(r.b) > 0 {
		return fmt.Errorf("%d bytes left over", len(r.b))
	}
	return r.err
}

// Len returns the number of bytes left.
func (r *Reader) Len() int { return len(r.b) }

// Rest reads all bytes left.
func (r *Reader) Rest() []byte {
	b := r.b
	r.b = nil
	return b
}

// Take replaces the rest, for a decoder that has read a part by other means. It does
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

// Peek returns the rest without reading it.
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

// Bool reads a byte that must be 0 or 1.
func (r *Reader) Bool() bool {
	v := r.Byte()
	if v > 1 {
		r.Failf("a boolean is %d", v)
	}
	return v == 1
}

// Flags reads a byte in which only known bits may be set.
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

// Varint reads a signed varint (zigzag).
func (r *Reader) Varint() int64 {
	v, rest, err := Varint(r.b)
	r.Take(rest, err)
	return v
}

// Uint64BE reads eight bytes, big-endian.
func (r *Reader) Uint64BE() uint64 {
	if len(r.b) < 8 {
		r.Fail(ErrTruncated)
		return 0
	}
	v := binary.BigEndian.Uint64(r.b)
	r.b = r.b[8:]
	return v
}

// Uint64LE reads eight bytes, little-endian.
func (r *Reader) Uint64LE() uint64 {
	if len(r.b) < 8 {
		r.Fail(ErrTruncated)
		return 0
	}
	v := binary.LittleEndian.Uint64(r.b)
	r.b = r.b[8:]
	return v
}

// Bytes reads a length and that many bytes, which refer to the input.
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

// BytesUpTo is Bytes with a limit set by the format. It returns nil for an empty field,
// so that keeping the field does not keep the input.
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

// Count reads the number of elements that follow, each of at least size bytes; size is at
// least 1. A number for which the input has no room is an error, so a caller may allocate
// that many.
func (r *Reader) Count(size int) int {
	n := r.Uvarint()
	if n > uint64(len(r.b)/size) {
		r.Fail(ErrTruncated)
		return 0
	}
	return int(n)
}

// CountUpTo is Count with a limit set by the format.
func (r *Reader) CountUpTo(limit, size int) int {
	n := r.Count(size)
	if n > limit {
		r.Failf("%d elements, at most %d", n, limit)
		return 0
	}
	return n
}
