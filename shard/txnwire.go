package shard

import (
	"context"
	"encoding/binary"
	"fmt"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/transport"
)

// txnWireVersion leads the messages of bus methods 18 and 23; docs/format/shard.md has
// the bytes.
const txnWireVersion = 3

// Flags of a Prepare, of its answer and of one result.
const (
	preparePatient = 1 << iota
	preparePin
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
	resultSwept
)

const (
	factFound = 1 << iota
	factHolds
)

func flag(set bool, f byte) byte {
	if set {
		return f
	}
	return 0
}

// flags reads a byte of which only the known bits may be set.
func (c *cursor) flags(known byte) byte {
	f := c.byte()
	if f&^known != 0 {
		c.fail(fmt.Errorf("shard: flags %#x", f))
	}
	return f
}

func appendProto(dst []byte, m proto.Message) ([]byte, error) {
	dst = binary.AppendUvarint(dst, uint64(proto.Size(m)))
	dst, err := marshal.MarshalAppend(dst, m)
	if err != nil {
		return dst, badRequest("encode %T: %v", m, err)
	}
	return dst, nil
}

func (c *cursor) proto(m proto.Message) {
	if b := c.bytes(); c.err == nil {
		if err := proto.Unmarshal(b, m); err != nil {
			c.fail(fmt.Errorf("shard: decode %T: %w", m, err))
		}
	}
}

// AppendTxnOp appends the binary form of a step at a range to dst.
func AppendTxnOp(dst []byte, id keyspace.RangeID, g keyspace.Generation, op TxnOp) ([]byte, error) {
	dst = append(dst, txnWireVersion, byte(op.kind()))
	dst = binary.AppendUvarint(dst, uint64(id))
	dst = binary.AppendUvarint(dst, uint64(g))
	switch o := op.(type) {
	case *Prepare:
		return appendPrepare(dst, o)
	case *Commit:
		dst = appendLockID(appendBytes(appendName(dst, o.Name), o.Anchor), o.AnchorLock)
		return appendLocks(binary.AppendUvarint(dst, uint64(o.Revision)), o.Locks), nil
	case *Resolve:
		dst = binary.AppendUvarint(appendLockID(appendName(dst, o.Name), o.Lock), uint64(o.Revision))
		return appendLeaseMark(dst, mark{o.Unmark, o.Incarnation}), nil
	case *Decide:
		return appendBytes(appendName(dst, o.Name), o.Anchor), nil
	case *Forget:
		return appendBytes(appendName(dst, o.Name), o.Anchor), nil
	case *Revoke:
		return appendLeaseMark(dst, mark{o.Lease, o.Incarnation}), nil
	case *LeaseKeys:
		dst = appendSpan(binary.AppendUvarint(dst, uint64(o.Lease)), 0, o.Span)
		return binary.AppendUvarint(dst, uint64(o.At)), nil
	}
	return dst, badRequest("no step %T", op)
}

func appendPrepare(dst []byte, o *Prepare) (_ []byte, err error) {
	dst = appendBytes(appendName(dst, o.Name), o.Anchor)
	dst = append(dst, flag(o.Patient, preparePatient)|flag(o.Pin, preparePin))
	dst = binary.AppendUvarint(dst, uint64(o.PinAt))
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
	dst = binary.AppendUvarint(appendLeaseMark(dst, mark{o.Revoke, o.Incarnation}), uint64(len(o.Absent)))
	for _, lease := range o.Absent {
		dst = binary.AppendUvarint(dst, uint64(lease))
	}
	return dst, nil
}

func (c *cursor) prepare() *Prepare {
	p := &Prepare{Name: c.name(), Anchor: c.bytes()}
	f := c.flags(preparePatient | preparePin)
	p.Patient, p.Pin, p.PinAt = f&preparePatient != 0, f&preparePin != 0, c.revision()
	n := c.count(2)
	p.Guards = make([]Guard, 0, n)
	for range n {
		g := Guard{Want: Want(c.byte()), Compare: &pb.Compare{}}
		c.proto(g.Compare)
		p.Guards = append(p.Guards, g)
	}
	n = c.count(3)
	p.Writes = make([]Write, 0, n)
	for range n {
		w := Write{Number: uint32(c.uvarint())}
		switch k := opKind(c.byte()); k {
		case opPut, opDelete:
			w.Op = newRequestOp(k)
			c.proto(w.Op)
		default:
			c.fail(fmt.Errorf("shard: write of kind %d", k))
		}
		p.Writes = append(p.Writes, w)
	}
	m := c.mark()
	p.Revoke, p.Incarnation = m.lease, m.incarnation
	for range c.count(1) {
		p.Absent = append(p.Absent, c.lease())
	}
	return p
}

// DecodeTxnOp reads what AppendTxnOp wrote. It copies what it keeps.
func DecodeTxnOp(b []byte) (id keyspace.RangeID, g keyspace.Generation, op TxnOp, err error) {
	c, k, id, g, err := txnHead(b)
	if err != nil {
		return 0, 0, nil, err
	}
	switch k {
	case txnPrepare:
		op = c.prepare()
	case txnCommit:
		o := &Commit{Name: c.name(), Anchor: c.bytes(), AnchorLock: c.lockID(), Revision: c.revision()}
		o.Locks = c.locks()
		op = o
	case txnResolve:
		o := &Resolve{Name: c.name(), Lock: c.lockID(), Revision: c.revision()}
		m := c.mark()
		o.Unmark, o.Incarnation = m.lease, m.incarnation
		op = o
	case txnDecide:
		op = &Decide{Name: c.name(), Anchor: c.bytes()}
	case txnForget:
		op = &Forget{Name: c.name(), Anchor: c.bytes()}
	case txnRevoke:
		m := c.mark()
		op = &Revoke{Lease: m.lease, Incarnation: m.incarnation}
	case txnLeaseKeys:
		o := &LeaseKeys{Lease: keyspace.LeaseID(c.uvarint())}
		o.Span = c.span(c.flags(spanSingle) != 0)
		o.At = c.revision()
		op = o
	default:
		c.fail(fmt.Errorf("shard: unknown step %d", k))
	}
	if err := c.end(); err != nil {
		return 0, 0, nil, err
	}
	return id, g, op, nil
}

// txnHead reads what all messages of the method begin with. The rest is a copy.
func txnHead(b []byte) (c cursor, k txnKind, id keyspace.RangeID, g keyspace.Generation, err error) {
	if len(b) < 2 {
		return c, 0, 0, 0, errTruncated
	}
	if b[0] != txnWireVersion {
		return c, 0, 0, 0, fmt.Errorf("shard: step version %d, want %d", b[0], txnWireVersion)
	}
	c.b = append([]byte(nil), b[2:]...)
	id, g = keyspace.RangeID(c.uvarint()), keyspace.Generation(c.uvarint())
	return c, txnKind(b[1]), id, g, c.err
}

// AppendTxnAnswer appends the binary form of an answer, or of the error where it is not
// nil, to dst.
func AppendTxnAnswer(dst []byte, a TxnAnswer, failed error) ([]byte, error) {
	dst = append(dst, txnWireVersion)
	if failed != nil {
		return kverror.Append(append(dst, statusError), kverror.Of(failed)), nil
	}
	dst = append(dst, statusOK)
	switch o := a.(type) {
	case *Prepared:
		return appendPrepared(append(dst, byte(txnPrepare)), o)
	case *Decided:
		dst = binary.AppendUvarint(append(dst, byte(txnDecide)), uint64(o.Revision))
		return appendLocks(dst, o.Locks), nil
	case *Resolved:
		return append(dst, byte(txnResolve), flag(o.More, resolvedMore)|flag(o.Intact, resolvedIntact)), nil
	case *Revoked:
		return binary.AppendUvarint(append(dst, byte(txnRevoke), flag(o.TooMany, 1)), uint64(o.Revision)), nil
	case *Attached:
		dst = binary.AppendUvarint(append(dst, byte(txnLeaseKeys), flag(o.More, 1)), uint64(len(o.Keys)))
		for _, k := range o.Keys {
			dst = appendBytes(dst, k)
		}
		return dst, nil
	}
	return dst, fmt.Errorf("shard: no answer %T", a)
}

func appendPrepared(dst []byte, p *Prepared) ([]byte, error) {
	dst = append(dst, flag(p.Held, preparedHeld)|flag(p.Changes, preparedChanges)|flag(p.Refused != nil, preparedRefused))
	dst = binary.AppendUvarint(appendLockID(dst, p.Lock), p.Fence)
	dst = binary.AppendUvarint(dst, uint64(len(p.Facts)))
	for _, f := range p.Facts {
		dst = append(dst, flag(f.Found, factFound)|flag(f.Holds, factHolds))
	}
	if p.Refused != nil {
		dst = appendBytes(binary.AppendUvarint(dst, uint64(p.RefusedAt)), kverror.Append(nil, p.Refused))
	}
	dst = binary.AppendUvarint(dst, uint64(len(p.Results)))
	for i := range p.Results {
		r := &p.Results[i]
		dst = binary.AppendUvarint(dst, uint64(r.Number))
		dst = append(dst, flag(r.Lived, resultLived)|flag(r.Swept, resultSwept))
		dst = binary.AppendUvarint(dst, uint64(r.Version))
		dst = binary.AppendUvarint(dst, uint64(r.Create))
		dst = binary.AppendUvarint(dst, uint64(r.Lease))
		dst = binary.AppendUvarint(appendBytes(dst, r.Value), uint64(r.Deleted))
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

func (c *cursor) prepared() *Prepared {
	f := c.flags(preparedHeld | preparedChanges | preparedRefused)
	p := &Prepared{Held: f&preparedHeld != 0, Changes: f&preparedChanges != 0, Lock: c.lockID(), Fence: c.attempt()}
	for range c.count(1) {
		f := c.flags(factFound | factHolds)
		p.Facts = append(p.Facts, Fact{Found: f&factFound != 0, Holds: f&factHolds != 0})
	}
	if f&preparedRefused != 0 {
		p.RefusedAt = uint32(c.uvarint())
		e, err := kverror.Decode(c.bytes())
		if err != nil {
			c.fail(err)
		}
		p.Refused = e
	}
	n := c.count(8)
	p.Results = make([]WriteResult, 0, n)
	for range n {
		r := WriteResult{Number: uint32(c.uvarint())}
		f := c.flags(resultLived | resultSwept)
		r.Lived, r.Swept = f&resultLived != 0, f&resultSwept != 0
		r.Version, r.Create, r.Lease = int64(c.uvarint()), c.revision(), keyspace.LeaseID(c.uvarint())
		if r.Value = c.bytes(); len(r.Value) == 0 {
			r.Value = nil
		}
		r.Deleted = int64(c.uvarint())
		for range c.count(1) {
			kv := &mvccpb.KeyValue{}
			c.proto(kv)
			r.Prevs = append(r.Prevs, kv)
		}
		p.Results = append(p.Results, r)
	}
	return p
}

// DecodeTxnAnswer reads what AppendTxnAnswer wrote: an answer, or in failed the error
// that the range answered with. err says that the bytes are no answer. It copies what it
// keeps.
func DecodeTxnAnswer(b []byte) (a TxnAnswer, failed *kverror.Error, err error) {
	if len(b) < 2 {
		return nil, nil, errTruncated
	}
	if b[0] != txnWireVersion {
		return nil, nil, fmt.Errorf("shard: step version %d, want %d", b[0], txnWireVersion)
	}
	c := cursor{b: append([]byte(nil), b[2:]...)}
	switch b[1] {
	case statusError:
		failed, err = kverror.Decode(c.b)
		return nil, failed, err
	case statusOK:
	default:
		return nil, nil, fmt.Errorf("shard: answer status %d", b[1])
	}
	switch k := txnKind(c.byte()); k {
	case txnPrepare:
		a = c.prepared()
	case txnDecide:
		d := &Decided{Revision: c.revision()}
		d.Locks = c.locks()
		a = d
	case txnResolve:
		f := c.flags(resolvedMore | resolvedIntact)
		a = &Resolved{More: f&resolvedMore != 0, Intact: f&resolvedIntact != 0}
	case txnRevoke:
		a = &Revoked{TooMany: c.flags(1) != 0, Revision: c.revision()}
	case txnLeaseKeys:
		o := &Attached{More: c.flags(1) != 0}
		for range c.count(1) {
			o.Keys = append(o.Keys, c.bytes())
		}
		a = o
	default:
		c.fail(fmt.Errorf("shard: unknown answer %d", k))
	}
	if err := c.end(); err != nil {
		return nil, nil, err
	}
	return a, nil, nil
}

// AppendTxnName appends the binary form of a name to dst.
func AppendTxnName(dst []byte, n TxnName) []byte { return appendName(dst, n) }

// DecodeTxnName reads what AppendTxnName wrote.
func DecodeTxnName(b []byte) (TxnName, error) {
	c := cursor{b: b}
	n := c.name()
	return n, c.end()
}

// Txn sends a step of a transaction over several ranges to the replica of a range on a
// node.
func (c *Client) Txn(
	ctx context.Context, node keyspace.NodeID, id keyspace.RangeID, g keyspace.Generation, op TxnOp,
) (TxnAnswer, error) {
	if node == c.self {
		return c.local.Txn(ctx, id, g, op)
	}
	b, err := AppendTxnOp(nil, id, g, op)
	if err != nil {
		return nil, err
	}
	method := transport.MethodShardTxn
	if endsLocks(op) {
		method = transport.MethodShardTxnEnd
	}
	answer, err := c.bus.Call(ctx, node, method, b)
	if err != nil {
		return nil, callError(err, true)
	}
	a, failed, err := DecodeTxnAnswer(answer)
	switch {
	case err == nil && failed != nil:
		return nil, failed
	case err == nil && !a.answers(op.kind()):
		err = fmt.Errorf("%T for %T", a, op)
	}
	if err != nil {
		return nil, &kverror.Error{Kind: kverror.Internal, Detail: fmt.Sprintf("answer of node %s: %v", node, err)}
	}
	return a, nil
}

// readFor is Do of a read on behalf of a transaction.
func (c *Client) readFor(ctx context.Context, node keyspace.NodeID, req *Request) (*Response, error) {
	b := append([]byte(nil), txnWireVersion, byte(txnRead))
	b = binary.AppendUvarint(b, uint64(req.Range))
	b = binary.AppendUvarint(b, uint64(req.Generation))
	b = binary.AppendUvarint(appendName(b, *req.Txn), uint64(req.ReadRevision))
	b, err := marshal.MarshalAppend(b, req.Op)
	if err != nil {
		return nil, badRequest("encode %T: %v", req.Op, err)
	}
	answer, err := c.bus.Call(ctx, node, transport.MethodShardTxn, b)
	if err != nil {
		return nil, callError(err, false)
	}
	p, failed, err := DecodeAnswer(answer)
	if err != nil {
		return nil, &kverror.Error{Kind: kverror.Internal, Detail: fmt.Sprintf("answer of node %s: %v", node, err)}
	}
	if failed != nil {
		return nil, failed
	}
	return p, nil
}

// self is the transaction on whose behalf a read is made, the zero name for none.
func (q *Request) self() TxnName {
	if q.Txn == nil {
		return TxnName{}
	}
	return *q.Txn
}

func decodeRead(c *cursor, id keyspace.RangeID, g keyspace.Generation) (*Request, error) {
	name := c.name()
	req := &Request{Range: id, Generation: g, Txn: &name, ReadRevision: c.revision()}
	op := &pb.RangeRequest{}
	if c.err == nil {
		if err := proto.Unmarshal(c.b, op); err != nil {
			c.fail(fmt.Errorf("shard: decode %T: %w", op, err))
		}
	}
	if c.err == nil && (name.IsZero() || req.ReadRevision == 0) {
		c.fail(errTruncated)
	}
	req.Op = op
	return req, c.err
}

// handleTxn answers method 18.
func (n *Node) handleTxn(ctx context.Context, _ keyspace.NodeID, payload []byte) ([]byte, error) {
	c, k, id, g, err := txnHead(payload)
	if err == nil && k == txnRead {
		req, err := decodeRead(&c, id, g)
		if err != nil {
			return AppendAnswer(nil, nil, badRequest("%v", err))
		}
		resp, err := n.Do(ctx, req)
		return AppendAnswer(nil, resp, err)
	}
	return n.answerTxn(ctx, payload, true)
}

// handleTxnEnd answers method 23. What may have to wait does not come this way.
func (n *Node) handleTxnEnd(ctx context.Context, _ keyspace.NodeID, payload []byte) ([]byte, error) {
	return n.answerTxn(ctx, payload, false)
}

func (n *Node) answerTxn(ctx context.Context, payload []byte, prepares bool) ([]byte, error) {
	id, g, op, err := DecodeTxnOp(payload)
	if err == nil && prepares == endsLocks(op) {
		err = fmt.Errorf("shard: %T by the method of other steps", op)
	}
	if err != nil {
		return AppendTxnAnswer(nil, nil, badRequest("%v", err))
	}
	a, err := n.Txn(ctx, id, g, op)
	return AppendTxnAnswer(nil, a, err)
}
