package wire

import (
	"bytes"
	"encoding/binary"
	"errors"
	"strings"
	"testing"
)

// form is what the tests write and read: one element of each kind.
func form() []byte {
	b := binary.AppendUvarint([]byte{7, 1, 0b101}, 300)
	b = binary.BigEndian.AppendUint64(b, 1<<40)
	b = binary.LittleEndian.AppendUint64(b, 1<<41)
	b = AppendBytes(b, []byte("key"))
	b = AppendBytes(b, nil)
	b = binary.AppendUvarint(b, 2)
	return append(b, 'x', 'y')
}

type read struct {
	first        byte
	is           bool
	flags        byte
	n, big, tiny uint64
	key, none    []byte
	list         []byte
}

func decode(r *Reader) (v read) {
	v.first, v.is, v.flags, v.n = r.Byte(), r.Bool(), r.Flags(0b111), r.Uvarint()
	v.big, v.tiny = r.Uint64BE(), r.Uint64LE()
	v.key, v.none = r.Bytes(), r.Bytes()
	for range r.CountUpTo(2, 1) {
		v.list = append(v.list, r.Byte())
	}
	return v
}

func TestReader(t *testing.T) {
	r := NewReader(form())
	v := decode(&r)
	if err := r.End(); err != nil {
		t.Fatal(err)
	}
	if v.first != 7 || !v.is || v.flags != 0b101 || v.n != 300 || v.big != 1<<40 || v.tiny != 1<<41 ||
		string(v.key) != "key" || len(v.none) != 0 || string(v.list) != "xy" {
		t.Errorf("read %+v", v)
	}
}

// TestTruncated cuts the form at each position: the reader reports it, and no read
// panics.
func TestTruncated(t *testing.T) {
	whole := form()
	for n := range whole {
		r := NewReader(whole[:n])
		decode(&r)
		if !errors.Is(r.End(), ErrTruncated) {
			t.Errorf("%d of %d bytes: %v", n, len(whole), r.End())
		}
	}
}

func TestRefused(t *testing.T) {
	for _, c := range []struct {
		name  string
		bytes []byte
		read  func(r *Reader)
		want  string
	}{
		{"a boolean of 2", []byte{2}, func(r *Reader) { r.Bool() }, "a boolean is 2"},
		{"an unknown flag", []byte{0x84}, func(r *Reader) { r.Flags(0x04) }, "flags are 0x84"},
		{"a varint of eleven bytes", bytes.Repeat([]byte{0xff}, 11), func(r *Reader) { r.Uvarint() }, "truncated"},
		{"more elements than bytes", []byte{200, 1, 0, 0}, func(r *Reader) { r.Count(2) }, "truncated"},
		{"more elements than the format has", []byte{3, 0, 0, 0}, func(r *Reader) { r.CountUpTo(2, 1) }, "3 elements, at most 2"},
		{"a length past the end", []byte{4, 'a'}, func(r *Reader) { r.Bytes() }, "truncated"},
		{"more bytes than the format has", []byte{3, 'a', 'b', 'c'}, func(r *Reader) { r.BytesUpTo(2) }, "3 bytes, at most 2"},
		{"bytes behind the form", []byte{1, 2}, func(r *Reader) { r.Byte() }, "1 bytes left over"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := NewReader(c.bytes)
			c.read(&r)
			if err := r.End(); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %q", err, c.want)
			}
		})
	}
}

// TestNoBytesKeepNothing checks that an empty field with a limit is nil, and that a field
// of exactly the limit is accepted.
func TestNoBytesKeepNothing(t *testing.T) {
	r := NewReader([]byte{0, 2, 'a', 'b'})
	none, full := r.BytesUpTo(2), r.BytesUpTo(2)
	if err := r.End(); err != nil || none != nil || string(full) != "ab" {
		t.Errorf("read %v and %q: %v", none, full, err)
	}
}

// TestFirstErrorStays checks that a later error does not hide the first one, and that
// nothing is read after it.
func TestFirstErrorStays(t *testing.T) {
	r := NewReader([]byte{2, 1, 1, 1, 1, 1, 1, 1, 1, 1})
	r.Bool()
	first := r.Err()
	r.Fail(ErrTruncated)
	r.Take([]byte{1}, nil)
	if r.Byte() != 0 || r.Uint64BE() != 0 || r.Bytes() != nil || r.Len() != 0 || !errors.Is(r.Err(), first) {
		t.Errorf("%v after %v", r.Err(), first)
	}
}

func FuzzReader(f *testing.F) {
	f.Add(form())
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		r := NewReader(b)
		v := decode(&r)
		if r.OK() && len(v.key)+len(v.none)+len(v.list) > len(b) {
			t.Errorf("%d bytes gave %+v", len(b), v)
		}
		field, rest, err := Bytes(b)
		q := NewReader(b)
		if got := q.Bytes(); (err == nil) != q.OK() || !bytes.Equal(got, field) || err == nil && !bytes.Equal(q.Peek(), rest) {
			t.Errorf("Bytes gives %q, %q, %v, the reader %q, %q, %v", field, rest, err, got, q.Peek(), q.Err())
		}
	})
}

// BenchmarkReader shows that a reader on the stack allocates nothing.
func BenchmarkReader(b *testing.B) {
	whole := form()
	b.ReportAllocs()
	for b.Loop() {
		r := NewReader(whole)
		r.Byte()
		r.Bool()
		r.Flags(0b111)
		r.Uvarint()
		r.Uint64BE()
		r.Uint64LE()
		r.Bytes()
		if !r.OK() {
			b.Fatal(r.Err())
		}
	}
}
