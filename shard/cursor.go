package shard

import (
	"encoding/binary"
	"fmt"

	"github.com/skeindb/skein/internal/wire"
	"github.com/skeindb/skein/keyspace"
)

// reader reads what requests, answers and entries have in common.
type reader struct{ wire.Reader }

// newReader returns a reader of b. What it reads stays a part of b.
func newReader(b []byte) reader { return reader{wire.NewReader(b)} }

func (c *reader) revision() keyspace.Revision {
	v := c.Uvarint()
	if v >= uint64(keyspace.MaxRevision) {
		c.Fail(fmt.Errorf("shard: revision %d", v))
		return 0
	}
	return keyspace.Revision(v)
}

// span reads a span whose flag says that it is one key.
func (c *reader) span(single bool) keyspace.Span {
	start := c.Bytes()
	if single {
		return keyspace.Single(start)
	}
	s := keyspace.Span{Start: start, End: c.Bytes()}
	if c.OK() && len(s.End) > 0 && string(s.Start) >= string(s.End) {
		c.Fail(fmt.Errorf("shard: span %s", s))
	}
	return s
}

// spanSingle marks a span of one key, whose end is left out.
const spanSingle = 0x80

func appendSpan(dst []byte, flags byte, s keyspace.Span) []byte {
	if isKey(s) {
		return wire.AppendBytes(append(dst, flags|spanSingle), s.Start)
	}
	return wire.AppendBytes(wire.AppendBytes(append(dst, flags), s.Start), s.End)
}

func appendName(dst []byte, n TxnName) []byte {
	dst = binary.AppendUvarint(dst, uint64(n.Start))
	dst = binary.AppendUvarint(dst, uint64(n.Node))
	dst = binary.BigEndian.AppendUint64(dst, uint64(n.Boot))
	dst = binary.AppendUvarint(dst, n.Counter)
	return binary.AppendUvarint(dst, n.Attempt)
}

// maxAttempt is above the numbers of all attempts: one behind it can still be counted.
const maxAttempt = 1 << 62

// attempt reads the number of an attempt.
func (c *reader) attempt() uint64 {
	v := c.Uvarint()
	if v >= maxAttempt {
		c.Fail(fmt.Errorf("shard: attempt %d", v))
	}
	return v
}

func (c *reader) name() (n TxnName) {
	n.Start, n.Node = c.revision(), keyspace.NodeID(c.Uvarint())
	n.Boot = keyspace.BootID(c.Uint64BE())
	n.Counter, n.Attempt = c.Uvarint(), c.attempt()
	return n
}

func appendLockID(dst []byte, id LockID) []byte {
	dst = binary.AppendUvarint(dst, uint64(id.Range))
	dst = binary.AppendUvarint(dst, id.Term)
	dst = binary.AppendUvarint(dst, id.Number)
	return binary.AppendUvarint(dst, uint64(id.Index))
}

func (c *reader) lockID() LockID {
	return LockID{Range: keyspace.RangeID(c.Uvarint()), Term: c.Uvarint(), Number: c.Uvarint(), Index: uint32(c.Uvarint())}
}

func appendLocks(dst []byte, ls []LockRef) []byte {
	dst = binary.AppendUvarint(dst, uint64(len(ls)))
	for i := range ls {
		dst = appendSpan(appendLockID(dst, ls[i].ID), 0, ls[i].Span)
	}
	return dst
}

func (c *reader) locks() []LockRef {
	n := c.Count(6)
	ls := make([]LockRef, 0, n)
	for range n {
		l := LockRef{ID: c.lockID()}
		flags := c.Byte()
		if flags&^spanSingle != 0 {
			c.Fail(fmt.Errorf("shard: flags %#x of a span", flags))
		}
		l.Span = c.span(flags != 0)
		ls = append(ls, l)
	}
	return ls
}
