package rangeapi

import (
	"encoding/binary"
	"errors"
	"fmt"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/internal/wire"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
)

// txnWireVersion is the first byte of the messages of bus methods 18 and 23;
// docs/format/rangeapi.md has the bytes.
const txnWireVersion = 4

// Flags of a Prepare, of its answer and of one result.
const (
	prepareWaitForOlder = 1 << iota
	preparePin
	prepareChecked
)

const (
	preparedHeld = 1 << iota
	preparedChanges
	preparedRefused
)

const (
	resolvedMore = 1 << iota
	resolvedIntact
)

const (
	resultLived = 1 << iota
	resultUncounted
)

const (
	factFound = 1 << iota
	factHolds
)

func appendProto(dst []byte, m proto.Message) ([]byte, error) {
	dst = binary.AppendUvarint(dst, uint64(proto.Size(m)))
	dst, err := marshal.MarshalAppend(dst, m)
	if err != nil {
		return dst, BadRequest("encode %T: %v", m, err)
	}
	return dst, nil
}

func (c *Reader) proto(m proto.Message) {
	if b := c.Bytes(); c.OK() {
		if err := proto.Unmarshal(b, m); err != nil {
			c.Fail(fmt.Errorf("rangeapi: decode %T: %w", m, err))
		}
	}
}

// AppendTxnCommand appends the binary form of a transaction command to a range.
func AppendTxnCommand(dst []byte, id keyspace.RangeID, g keyspace.Generation, op TxnCommand) ([]byte, error) {
	dst = append(dst, txnWireVersion, byte(op.Kind()))
	dst = appendRange(dst, id, g)
	switch o := op.(type) {
	case *Prepare:
		return appendPrepare(dst, o)
	case *Commit:
		dst = AppendLockID(wire.AppendBytes(AppendName(dst, o.Name), o.Anchor), o.AnchorLock)
		return AppendLocks(binary.AppendUvarint(binary.AppendUvarint(dst, uint64(o.Revision)), o.Term), o.Locks), nil
	case *Resolve:
		dst = binary.AppendUvarint(AppendLockID(AppendName(dst, o.Name), o.Lock), uint64(o.Revision))
		return AppendAttachment(binary.AppendUvarint(dst, o.Term), Attachment{o.Detach, o.Incarnation}), nil
	case *Decide:
		return wire.AppendBytes(AppendName(dst, o.Name), o.Anchor), nil
	case *Forget:
		return wire.AppendBytes(AppendName(dst, o.Name), o.Anchor), nil
	case *Revoke:
		dst = AppendAttachment(dst, Attachment{o.Lease, o.Incarnation})
		return appendChecked(dst, o.Checked), nil
	case *LeaseKeys:
		dst = AppendSpan(binary.AppendUvarint(dst, uint64(o.Lease)), 0, o.Span)
		return binary.AppendUvarint(dst, uint64(o.At)), nil
	}
	return dst, BadRequest("no transaction command %T", op)
}

func appendPrepare(dst []byte, o *Prepare) (_ []byte, err error) {
	dst = wire.AppendBytes(AppendName(dst, o.Name), o.Anchor)
	dst = append(dst, wire.Flag(o.WaitForOlder, prepareWaitForOlder)|wire.Flag(o.Pin, preparePin)|wire.Flag(o.Checked.At != 0, prepareChecked))
	dst = appendChecked(binary.AppendUvarint(dst, uint64(o.PinAt)), o.Checked)
	dst = binary.AppendUvarint(dst, uint64(len(o.Guards)))
	for i := range o.Guards {
		if dst, err = appendProto(append(dst, byte(o.Guards[i].Want)), o.Guards[i].Compare); err != nil {
			return dst, err
		}
	}
	dst = binary.AppendUvarint(dst, uint64(len(o.Writes)))
	for i := range o.Writes {
		w := &o.Writes[i]
		dst = append(binary.AppendUvarint(dst, uint64(w.Number)), byte(kindOf(w.Op)))
		if dst, err = appendProto(dst, w.Op); err != nil {
			return dst, err
		}
	}
	dst = binary.AppendUvarint(AppendAttachment(dst, Attachment{o.Revoke, o.Incarnation}), uint64(len(o.Absent)))
	for _, lease := range o.Absent {
		dst = binary.AppendUvarint(dst, uint64(lease))
	}
	return dst, nil
}

func (c *Reader) prepare() *Prepare {
	p := &Prepare{Name: c.Name(), Anchor: c.Bytes()}
	f := c.Flags(prepareWaitForOlder | preparePin | prepareChecked)
	p.WaitForOlder, p.Pin, p.PinAt = f&prepareWaitForOlder != 0, f&preparePin != 0, c.Revision()
	if f&prepareChecked != 0 {
		p.Checked = c.checked()
	}
	n := c.Count(2)
	p.Guards = make([]Guard, 0, n)
	for range n {
		g := Guard{Want: Want(c.Byte()), Compare: &pb.Compare{}}
		c.proto(g.Compare)
		p.Guards = append(p.Guards, g)
	}
	n = c.Count(3)
	p.Writes = make([]Write, 0, n)
	for range n {
		w := Write{Number: uint32(c.Uvarint())}
		switch k := opKind(c.Byte()); k {
		case opPut, opDelete:
			w.Op = newRequestOp(k)
			c.proto(w.Op)
		default:
			c.Fail(fmt.Errorf("rangeapi: write of kind %d", k))
		}
		p.Writes = append(p.Writes, w)
	}
	m := c.Attachment()
	p.Revoke, p.Incarnation = m.Lease, m.Incarnation
	for range c.Count(1) {
		p.Absent = append(p.Absent, c.Lease())
	}
	return p
}

// checked decodes the revision of a check that was made.
func (c *Reader) checked() keyspace.KeyCheck {
	check := keyspace.KeyCheck{At: c.Revision(), Term: c.Uvarint()}
	if check.At == 0 {
		c.Fail(errors.New("rangeapi: keys of a lease checked at revision 0"))
	}
	return check
}

// appendChecked appends a check, if there is one.
func appendChecked(dst []byte, check keyspace.KeyCheck) []byte {
	if check.At == 0 {
		return dst
	}
	return binary.AppendUvarint(binary.AppendUvarint(dst, uint64(check.At)), check.Term)
}

// DecodeTxnCommand decodes what AppendTxnCommand wrote. It copies what it keeps.
func DecodeTxnCommand(b []byte) (id keyspace.RangeID, g keyspace.Generation, op TxnCommand, err error) {
	c, k, id, g, err := DecodeTxnHead(b)
	if err != nil {
		return 0, 0, nil, err
	}
	switch k {
	case TxnPrepare:
		op = c.prepare()
	case TxnCommit:
		o := &Commit{Name: c.Name(), Anchor: c.Bytes(), AnchorLock: c.LockID(), Revision: c.Revision(), Term: c.Uvarint()}
		o.Locks = c.Locks()
		op = o
	case TxnResolve:
		o := &Resolve{Name: c.Name(), Lock: c.LockID(), Revision: c.Revision(), Term: c.Uvarint()}
		m := c.Attachment()
		o.Detach, o.Incarnation = m.Lease, m.Incarnation
		op = o
	case TxnDecide:
		op = &Decide{Name: c.Name(), Anchor: c.Bytes()}
	case TxnForget:
		op = &Forget{Name: c.Name(), Anchor: c.Bytes()}
	case TxnRevoke, TxnRevokeChecked:
		m := c.Attachment()
		o := &Revoke{Lease: m.Lease, Incarnation: m.Incarnation}
		if k == TxnRevokeChecked {
			o.Checked = c.checked()
		}
		op = o
	case TxnLeaseKeys:
		o := &LeaseKeys{Lease: keyspace.LeaseID(c.Uvarint())}
		o.Span = c.Span(c.Flags(SpanSingle) != 0)
		o.At = c.Revision()
		op = o
	default:
		c.Fail(fmt.Errorf("rangeapi: unknown transaction command %d", k))
	}
	if err := c.End(); err != nil {
		return 0, 0, nil, err
	}
	return id, g, op, nil
}

// DecodeTxnHead decodes what all messages of the method begin with. The rest is a copy.
func DecodeTxnHead(b []byte) (c Reader, k TxnKind, id keyspace.RangeID, g keyspace.Generation, err error) {
	if len(b) < 2 {
		return c, 0, 0, 0, wire.ErrTruncated
	}
	if b[0] != txnWireVersion {
		return c, 0, 0, 0, fmt.Errorf("rangeapi: transaction command version %d, want %d", b[0], txnWireVersion)
	}
	c = NewReader(append([]byte(nil), b[2:]...))
	id, g = keyspace.RangeID(c.Uvarint()), keyspace.Generation(c.Uvarint())
	return c, TxnKind(b[1]), id, g, c.Err()
}

// AppendTxnAnswer appends the binary form of an answer, or of the error if it is not nil.
func AppendTxnAnswer(dst []byte, a TxnAnswer, failed error) ([]byte, error) {
	dst = append(dst, txnWireVersion)
	if failed != nil {
		return kverror.Append(append(dst, StatusError), kverror.Of(failed)), nil
	}
	dst = append(dst, StatusOK)
	switch o := a.(type) {
	case *Prepared:
		return appendPrepared(append(dst, byte(TxnPrepare)), o)
	case *Decided:
		dst = binary.AppendUvarint(append(dst, byte(TxnDecide)), uint64(o.Revision))
		return AppendLocks(dst, o.Locks), nil
	case *Resolved:
		return append(dst, byte(TxnResolve), wire.Flag(o.More, resolvedMore)|wire.Flag(o.Intact, resolvedIntact)), nil
	case *Revoked:
		return binary.AppendUvarint(append(dst, byte(TxnRevoke), wire.Flag(o.TooMany, 1)), uint64(o.Revision)), nil
	case *Attached:
		dst = binary.AppendUvarint(append(dst, byte(TxnLeaseKeys), wire.Flag(o.More, 1)), uint64(len(o.Keys)))
		for _, k := range o.Keys {
			dst = wire.AppendBytes(dst, k)
		}
		return dst, nil
	}
	return dst, fmt.Errorf("rangeapi: no answer %T", a)
}

func appendPrepared(dst []byte, p *Prepared) ([]byte, error) {
	dst = append(dst, wire.Flag(p.Held, preparedHeld)|wire.Flag(p.Changes, preparedChanges)|wire.Flag(p.Refused != nil, preparedRefused))
	dst = binary.AppendUvarint(AppendLockID(dst, p.Lock), p.Fence)
	dst = binary.AppendUvarint(dst, uint64(p.Floor))
	dst = binary.AppendUvarint(dst, uint64(len(p.Facts)))
	for _, f := range p.Facts {
		dst = append(dst, wire.Flag(f.Found, factFound)|wire.Flag(f.Holds, factHolds))
	}
	if p.Refused != nil {
		dst = wire.AppendBytes(binary.AppendUvarint(dst, uint64(p.RefusedAt)), kverror.Append(nil, p.Refused))
	}
	dst = binary.AppendUvarint(dst, uint64(len(p.Results)))
	for i := range p.Results {
		r := &p.Results[i]
		dst = binary.AppendUvarint(dst, uint64(r.Number))
		dst = append(dst, wire.Flag(r.Lived, resultLived)|wire.Flag(r.Uncounted, resultUncounted))
		dst = binary.AppendUvarint(dst, uint64(r.Version))
		dst = binary.AppendUvarint(dst, uint64(r.Create))
		dst = binary.AppendUvarint(dst, uint64(r.Lease))
		dst = binary.AppendUvarint(wire.AppendBytes(dst, r.Value), uint64(r.Deleted))
		dst = binary.AppendUvarint(dst, uint64(len(r.Prevs)))
		for _, kv := range r.Prevs {
			var err error
			if dst, err = appendProto(dst, kv); err != nil {
				return dst, err
			}
		}
	}
	return dst, nil
}

func (c *Reader) prepared() *Prepared {
	f := c.Flags(preparedHeld | preparedChanges | preparedRefused)
	p := &Prepared{Held: f&preparedHeld != 0, Changes: f&preparedChanges != 0, Lock: c.LockID(), Fence: c.attempt(), Floor: c.Revision()}
	for range c.Count(1) {
		f := c.Flags(factFound | factHolds)
		p.Facts = append(p.Facts, Fact{Found: f&factFound != 0, Holds: f&factHolds != 0})
	}
	if f&preparedRefused != 0 {
		p.RefusedAt = uint32(c.Uvarint())
		e, err := kverror.Decode(c.Bytes())
		if err != nil {
			c.Fail(err)
		}
		p.Refused = e
	}
	n := c.Count(8)
	p.Results = make([]WriteResult, 0, n)
	for range n {
		r := WriteResult{Number: uint32(c.Uvarint())}
		f := c.Flags(resultLived | resultUncounted)
		r.Lived, r.Uncounted = f&resultLived != 0, f&resultUncounted != 0
		r.Version, r.Create, r.Lease = int64(c.Uvarint()), c.Revision(), keyspace.LeaseID(c.Uvarint())
		if r.Value = c.Bytes(); len(r.Value) == 0 {
			r.Value = nil
		}
		r.Deleted = int64(c.Uvarint())
		for range c.Count(1) {
			kv := &mvccpb.KeyValue{}
			c.proto(kv)
			r.Prevs = append(r.Prevs, kv)
		}
		p.Results = append(p.Results, r)
	}
	return p
}

// DecodeTxnAnswer decodes what AppendTxnAnswer wrote: an answer, or the range's error in failed.
// err says that the bytes are no answer. It copies what it keeps.
func DecodeTxnAnswer(b []byte) (a TxnAnswer, failed *kverror.Error, err error) {
	if len(b) < 2 {
		return nil, nil, wire.ErrTruncated
	}
	if b[0] != txnWireVersion {
		return nil, nil, fmt.Errorf("rangeapi: transaction command version %d, want %d", b[0], txnWireVersion)
	}
	c := NewReader(append([]byte(nil), b[2:]...))
	switch b[1] {
	case StatusError:
		failed, err = kverror.Decode(c.Rest())
		return nil, failed, err
	case StatusOK:
	default:
		return nil, nil, fmt.Errorf("rangeapi: answer status %d", b[1])
	}
	switch k := TxnKind(c.Byte()); k {
	case TxnPrepare:
		a = c.prepared()
	case TxnDecide:
		d := &Decided{Revision: c.Revision()}
		d.Locks = c.Locks()
		a = d
	case TxnResolve:
		f := c.Flags(resolvedMore | resolvedIntact)
		a = &Resolved{More: f&resolvedMore != 0, Intact: f&resolvedIntact != 0}
	case TxnRevoke:
		a = &Revoked{TooMany: c.Flags(1) != 0, Revision: c.Revision()}
	case TxnLeaseKeys:
		o := &Attached{More: c.Flags(1) != 0}
		for range c.Count(1) {
			o.Keys = append(o.Keys, c.Bytes())
		}
		a = o
	default:
		c.Fail(fmt.Errorf("rangeapi: unknown answer %d", k))
	}
	if err := c.End(); err != nil {
		return nil, nil, err
	}
	return a, nil, nil
}

// DecodeTxnName decodes what AppendName wrote.
func DecodeTxnName(b []byte) (TxnName, error) {
	c := NewReader(b)
	n := c.Name()
	return n, c.End()
}

// ReadingTxn returns the transaction that a read is made for, or the zero name.
func (q *Request) ReadingTxn() TxnName {
	if q.Txn == nil {
		return TxnName{}
	}
	return *q.Txn
}

// DecodeTxnRead decodes a read on behalf of a transaction, behind its head.
func DecodeTxnRead(c *Reader, id keyspace.RangeID, g keyspace.Generation) (*Request, error) {
	name := c.Name()
	req := &Request{Range: id, Generation: g, Txn: &name, ReadRevision: c.Revision()}
	op := &pb.RangeRequest{}
	if c.OK() {
		if err := proto.Unmarshal(c.Rest(), op); err != nil {
			c.Fail(fmt.Errorf("rangeapi: decode %T: %w", op, err))
		}
	}
	if c.OK() && (name.IsZero() || req.ReadRevision == 0) {
		c.Fail(wire.ErrTruncated)
	}
	req.Op = op
	return req, c.Err()
}
