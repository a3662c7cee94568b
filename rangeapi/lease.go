package rangeapi

import (
	"encoding/binary"
	"errors"

	"github.com/skeindb/skein/keyspace"
)

// Revoke deletes all keys of a lease in one range, at one revision, and removes the lease's
// attachment. It is for a lease with keys in this range alone. The lease's record must register no
// range meanwhile. It may be repeated.
type Revoke struct {
	Lease keyspace.LeaseID
	// Incarnation is the lease's. Keys of a later lease with the same id stay.
	Incarnation keyspace.LeaseIncarnation
	// Checked, if its At is not 0, says as of when somebody has checked the lease's keys. If one of them was
	// written later, nothing is done and the answer is kverror.KeysChanged.
	Checked keyspace.KeyCheck
}

// Revoked answers a Revoke.
type Revoked struct {
	// Revision is that of the deletion, or 0 without keys.
	Revision keyspace.Revision
	// TooMany says that nothing was done, because the keys do not fit into one entry.
	TooMany bool
}

// LeaseKeys asks for the keys of a span that are attached to a lease, as of a revision that was
// current after the request, or later.
type LeaseKeys struct {
	Lease keyspace.LeaseID
	Span  keyspace.Span
	At    keyspace.Revision
}

// Attached answers LeaseKeys: keys in order, and whether there are more behind the last one.
type Attached struct {
	Keys [][]byte
	More bool
}

// LeaseKeysBytes bounds the keys of one Attached.
const LeaseKeysBytes = 4 << 20

func checkLeaseOp(op TxnCommand) error {
	switch o := op.(type) {
	case *Revoke:
		if o.Lease == 0 {
			return BadRequest("revoke of no lease")
		}
	case *LeaseKeys:
		if o.Lease == 0 || o.At < 1 {
			return BadRequest("keys of lease %d at revision %d", o.Lease, o.At)
		}
	}
	return nil
}

// Attachment says that the lease's record lists the range's span. Keys of the range may be attached
// to the lease, and a revoke comes here. After a split both halves have it.
type Attachment struct {
	Lease       keyspace.LeaseID
	Incarnation keyspace.LeaseIncarnation
}

// AppendAttachment appends the binary form of m.
func AppendAttachment(dst []byte, m Attachment) []byte {
	return binary.AppendUvarint(binary.AppendUvarint(dst, uint64(m.Lease)), uint64(m.Incarnation))
}

// Attachment decodes what AppendAttachment wrote.
func (c *Reader) Attachment() Attachment {
	return Attachment{keyspace.LeaseID(c.Uvarint()), keyspace.LeaseIncarnation(c.Uvarint())}
}

// Lease decodes a lease id that is not 0.
func (c *Reader) Lease() keyspace.LeaseID {
	n := c.Uvarint()
	if n == 0 {
		c.Fail(errors.New("rangeapi: lease 0"))
	}
	return keyspace.LeaseID(n)
}
