package rangeapi

import (
	"encoding/binary"
	"fmt"

	"github.com/skeindb/skein/internal/wire"
	"github.com/skeindb/skein/keyspace"
)

// Reader decodes what requests, answers and entries have in common.
type Reader struct{ wire.Reader }

// NewReader returns a reader of b. What it returns stays a part of b.
func NewReader(b []byte) Reader { return Reader{wire.NewReader(b)} }

// Revision decodes a revision below keyspace.MaxRevision.
func (c *Reader) Revision() keyspace.Revision {
	v := c.Uvarint()
	if v >= uint64(keyspace.MaxRevision) {
		c.Fail(fmt.Errorf("rangeapi: revision %d", v))
		return 0
	}
	return keyspace.Revision(v)
}

// Span decodes a span; single says that it is one key.
func (c *Reader) Span(single bool) keyspace.Span {
	start := c.Bytes()
	if single {
		return keyspace.Single(start)
	}
	s := keyspace.Span{Start: start, End: c.Bytes()}
	if c.OK() && len(s.End) > 0 && string(s.Start) >= string(s.End) {
		c.Fail(fmt.Errorf("rangeapi: span %s", s))
	}
	return s
}

// SpanSingle marks a span of one key, whose end is left out.
const SpanSingle = 0x80

// AppendSpan appends flags, with SpanSingle for a span of one key, and the span.
func AppendSpan(dst []byte, flags byte, s keyspace.Span) []byte {
	if s.IsSingle() {
		return wire.AppendBytes(append(dst, flags|SpanSingle), s.Start)
	}
	return wire.AppendBytes(wire.AppendBytes(append(dst, flags), s.Start), s.End)
}

// appendRange appends a range's id and generation.
func appendRange(dst []byte, id keyspace.RangeID, g keyspace.Generation) []byte {
	return binary.AppendUvarint(binary.AppendUvarint(dst, uint64(id)), uint64(g))
}

// AppendName appends the binary form of n.
func AppendName(dst []byte, n TxnName) []byte {
	dst = binary.AppendUvarint(dst, uint64(n.Start))
	dst = binary.AppendUvarint(dst, uint64(n.Node))
	dst = binary.BigEndian.AppendUint64(dst, uint64(n.Boot))
	dst = binary.AppendUvarint(dst, n.Counter)
	return binary.AppendUvarint(dst, n.Attempt)
}

// MaxAttempt is above the numbers of all attempts. One more can still be counted.
const MaxAttempt = 1 << 62

// attempt decodes the number of an attempt.
func (c *Reader) attempt() uint64 {
	v := c.Uvarint()
	if v >= MaxAttempt {
		c.Fail(fmt.Errorf("rangeapi: attempt %d", v))
	}
	return v
}

// Name decodes what AppendName wrote.
func (c *Reader) Name() (n TxnName) {
	n.Start, n.Node = c.Revision(), keyspace.NodeID(c.Uvarint())
	n.Boot = keyspace.BootID(c.Uint64BE())
	n.Counter, n.Attempt = c.Uvarint(), c.attempt()
	return n
}

// AppendLockID appends the binary form of id.
func AppendLockID(dst []byte, id LockID) []byte {
	dst = binary.AppendUvarint(dst, uint64(id.Range))
	dst = binary.AppendUvarint(dst, id.Term)
	dst = binary.AppendUvarint(dst, id.Number)
	return binary.AppendUvarint(dst, uint64(id.Index))
}

// LockID decodes what AppendLockID wrote.
func (c *Reader) LockID() LockID {
	return LockID{Range: keyspace.RangeID(c.Uvarint()), Term: c.Uvarint(), Number: c.Uvarint(), Index: uint32(c.Uvarint())}
}

// AppendLocks appends the number of locks and the locks.
func AppendLocks(dst []byte, ls []LockRef) []byte {
	dst = binary.AppendUvarint(dst, uint64(len(ls)))
	for i := range ls {
		dst = AppendSpan(AppendLockID(dst, ls[i].ID), 0, ls[i].Span)
	}
	return dst
}

// Locks decodes what AppendLocks wrote.
func (c *Reader) Locks() []LockRef {
	n := c.Count(6)
	ls := make([]LockRef, 0, n)
	for range n {
		l := LockRef{ID: c.LockID()}
		flags := c.Byte()
		if flags&^SpanSingle != 0 {
			c.Fail(fmt.Errorf("rangeapi: flags %#x of a span", flags))
		}
		l.Span = c.Span(flags != 0)
		ls = append(ls, l)
	}
	return ls
}
