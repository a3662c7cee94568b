package shard

import (
	"errors"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/command"
)

// draft is an answer that still misses revisions: those of its own request, and
// of predecessors that wait for theirs.
type draft struct {
	op proto.Message
	// top is the header that reports the request's revision.
	top *pb.ResponseHeader
	// headers are those of operations inside a transaction.
	headers []headerDraft
	kvs     []found
	ranges  []*rangeDraft
}

type headerDraft struct {
	h *pb.ResponseHeader
	// changed says that the transaction had changed something by then: the header
	// reports its revision and not the one before.
	changed bool
}

// settle fills in the revisions once the request has its own: rev, which it bears
// where it changed something.
func (d *draft) settle(rev keyspace.Revision, changed bool) {
	d.top.Revision = int64(rev)
	for _, h := range d.headers {
		h.h.Revision = int64(rev)
		if changed && !h.changed {
			h.h.Revision--
		}
	}
	for i := range d.kvs {
		f := &d.kvs[i]
		f.kv.ModRevision, f.kv.CreateRevision = int64(f.mod.must()), int64(f.create.must())
	}
	for _, r := range d.ranges {
		r.finish()
	}
}

// keep returns the item as etcd's message and remembers it where a revision is
// still to come.
func (d *draft) keep(it *item) *mvccpb.KeyValue {
	// Asked before the message is made: a revision may arrive in between, and would
	// then be neither in the message nor remembered.
	_, modKnown := it.mod.known()
	_, createKnown := it.create.known()
	kv := it.kv()
	if !modKnown || !createKnown {
		d.kvs = append(d.kvs, found{kv: kv, mod: it.mod, create: it.create})
	}
	return kv
}

// evaluation is one request on its way through the evaluator.
type evaluation struct {
	view view
	// current is the revision that the range knows to be handed out, and compacted the
	// cluster's compacted revision, -1 before the first compaction: both for explicit
	// revisions inside a transaction.
	current, compacted keyspace.Revision
	maxWriteBytes      int
	// oldest is the lowest explicit revision that was read, 0 if none was.
	oldest keyspace.Revision

	changes changes
	draft   draft
	// sub is the number of the operation at hand, in a transaction over several ranges.
	sub uint32
	// home is the replica that may write, nil where nothing is. lacks is the call's, and
	// absent are leases that a coordinator has found not to be there.
	home   *Replica
	lacks  keyspace.LeaseID
	absent []keyspace.LeaseID

	// one is the memory of a request that is a single put, the most frequent one, until
	// it is used, and pair that of its leases where it has one; budget that of the view's.
	one    *onePut
	pair   *leasePair
	budget readBudget
}

// onePut is all that a single put leaves behind, in one piece of memory.
type onePut struct {
	txn     pendingTxn
	version pendingVersion
	writes  [1]*pendingVersion
	resp    pb.PutResponse
	header  pb.ResponseHeader
}

// leasedPut is a onePut with a lease.
type leasedPut struct {
	onePut
	leases leasePair
}

// begin makes the transaction that the request may become.
func (e *evaluation) begin(op proto.Message, floor keyspace.Revision) {
	p, ok := op.(*pb.PutRequest)
	switch {
	case !ok:
		e.changes.txn = &pendingTxn{floor: floor}
		return
	case p.GetLease() == 0:
		e.one = &onePut{}
	default:
		l := &leasedPut{}
		e.one, e.pair = &l.onePut, &l.leases
	}
	e.one.txn.floor = floor
	e.changes.txn, e.changes.writes = &e.one.txn, e.one.writes[:0]
}

// newPut returns memory for a put's version and answer.
func (e *evaluation) newPut() (*pendingVersion, *pb.PutResponse) {
	one := e.one
	if one == nil {
		return &pendingVersion{}, &pb.PutResponse{Header: &pb.ResponseHeader{}}
	}
	e.one = nil
	one.resp.Header = &one.header
	return &one.version, &one.resp
}

// futureError says that a transaction reads at a revision that the range has not
// heard of. Whether it is one of the future, the sequencer must say.
type futureError struct{ rev keyspace.Revision }

func (futureError) Error() string { return kverror.FutureRevision.Error() }

// refusal is an error that depends on the state which the evaluation saw. It must
// be held back like an answer: the state may yet be discarded.
type refusal struct{ err error }

func (r refusal) Error() string { return r.err.Error() }
func (r refusal) Unwrap() error { return r.err }

// run evaluates a request that can write. Afterwards changes and draft say what
// it does and answers. The error is a waitError, a futureError, a refusal, or one
// that needs no holding back.
func (e *evaluation) run(op proto.Message) error {
	switch o := op.(type) {
	case *pb.PutRequest:
		if err := e.checkPut(o); err != nil {
			return err
		}
		e.view.own = &e.changes
		resp, err := e.put(o)
		if err != nil {
			return err
		}
		e.draft.op, e.draft.top = resp, resp.Header
	case *pb.DeleteRangeRequest:
		e.view.own = &e.changes
		resp, err := e.deleteRange(o)
		if err != nil {
			return err
		}
		e.draft.op, e.draft.top = resp, resp.Header
	case *pb.TxnRequest:
		return e.txn(o)
	default:
		return rangeapi.BadRequest("%T cannot be evaluated", op)
	}
	return nil
}

// txn evaluates the compares, then everything that can refuse the branch, then the
// branch.
func (e *evaluation) txn(t *pb.TxnRequest) error {
	path, err := choosePath(&e.view, t, nil)
	if err != nil {
		return err
	}
	if _, err := e.checkBranch(t, path); err != nil {
		return err
	}
	e.view.own = &e.changes
	resp, _, err := e.execute(t, path)
	if err != nil {
		return err
	}
	resp.Header = &pb.ResponseHeader{}
	e.draft.op, e.draft.top = resp, resp.Header
	return nil
}

// checkBranch refuses what etcd refuses before a transaction's first operation, on
// the state before it. It returns what is left of the path.
func (e *evaluation) checkBranch(t *pb.TxnRequest, path []bool) ([]bool, error) {
	succeeded, path := path[0], path[1:]
	for _, op := range branch(t, succeeded) {
		var err error
		switch o := op.GetRequest().(type) {
		case *pb.RequestOp_RequestRange:
			err = e.checkRevision(o.RequestRange.GetRevision())
		case *pb.RequestOp_RequestPut:
			if err = e.checkPut(o.RequestPut); errors.Is(err, kverror.LeaseNotFound) {
				// The compares led here: the answer tells of the state.
				err = refusal{err}
			}
		case *pb.RequestOp_RequestTxn:
			path, err = e.checkBranch(o.RequestTxn, path)
		}
		if err != nil {
			return nil, err
		}
	}
	return path, nil
}

// checkRevision checks an explicit revision inside a transaction. etcd's first
// revision is -1 until the first compaction.
func (e *evaluation) checkRevision(rev int64) error {
	switch {
	case rev == 0:
		return nil
	case rev > int64(e.current):
		return futureError{keyspace.Revision(rev)}
	case rev < int64(e.compacted), rev < -1:
		return refusal{&kverror.Error{Kind: kverror.Compacted, CompactRevision: max(e.compacted, 0)}}
	}
	return nil
}

// checkPut refuses a put by its lease and by a previous version that it needs.
func (e *evaluation) checkPut(p *pb.PutRequest) error {
	if p.GetLease() != 0 {
		if err := e.checkLease(keyspace.LeaseID(p.GetLease())); err != nil {
			return err
		}
	}
	if !p.GetIgnoreValue() && !p.GetIgnoreLease() {
		return nil
	}
	_, ok, err := e.view.getHead(p.GetKey())
	if err == nil && !ok {
		err = refusal{kverror.KeyNotFound}
	}
	return err
}

func (e *evaluation) put(p *pb.PutRequest) (*pb.PutResponse, error) {
	get := e.view.getHead
	if p.GetIgnoreValue() || p.GetPrevKv() {
		get = e.view.get
	}
	prev, ok, err := get(p.GetKey())
	if err != nil {
		return nil, err
	}
	v, resp := e.newPut()
	*v = pendingVersion{
		key: p.GetKey(), value: p.GetValue(), txn: e.changes.txn,
		create: ref{txn: e.changes.txn}, version: 1, lived: ok,
	}
	lease, was := keyspace.LeaseID(p.GetLease()), keyspace.LeaseID(0)
	if ok {
		v.create, v.version, was = prev.create, prev.version+1, prev.lease
		if p.GetIgnoreValue() || p.GetPrevKv() {
			if err := e.view.retain(&prev); err != nil {
				return nil, err
			}
		}
		if p.GetIgnoreValue() {
			v.value = prev.value
		}
		if p.GetIgnoreLease() {
			lease = prev.lease
		}
		if p.GetPrevKv() {
			resp.PrevKv = e.draft.keep(&prev)
		}
	} else if p.GetIgnoreValue() || p.GetIgnoreLease() {
		return nil, refusal{kverror.KeyNotFound}
	}
	if lease != 0 {
		if v.leases, e.pair = e.pair, nil; v.leases == nil {
			v.leases = &leasePair{}
		}
		v.leases.to = lease
	}
	return resp, e.write(v, was)
}

func (e *evaluation) deleteRange(r *pb.DeleteRangeRequest) (*pb.DeleteRangeResponse, error) {
	resp := &pb.DeleteRangeResponse{Header: &pb.ResponseHeader{}}
	if len(r.GetRangeEnd()) == 0 {
		get := e.view.getHead
		if r.GetPrevKv() {
			get = e.view.get
		}
		it, ok, err := get(r.GetKey())
		if err != nil || !ok {
			return resp, err
		}
		if r.GetPrevKv() {
			if err := e.view.retain(&it); err != nil {
				return nil, err
			}
		}
		return resp, e.remove(r, resp, &it)
	}
	s, ok := keyspace.FromEtcd(r.GetKey(), r.GetRangeEnd())
	if !ok {
		return resp, nil
	}
	// What the scan finds is removed behind it: the view must not change under it.
	var items []item
	size := 0
	err := e.view.scan(s, newest, !r.GetPrevKv(), func(it *item) error {
		if size += len(it.key) + command.VersionOverheadBytes; size > e.maxWriteBytes {
			return tooLarge(e.maxWriteBytes)
		}
		if err := e.view.retain(it); err != nil {
			return err
		}
		items = append(items, *it)
		return nil
	})
	if err != nil {
		return nil, err
	}
	for i := range items {
		if err := e.remove(r, resp, &items[i]); err != nil {
			return nil, err
		}
	}
	return resp, nil
}

// remove deletes one living key and accounts for it in the response.
func (e *evaluation) remove(r *pb.DeleteRangeRequest, resp *pb.DeleteRangeResponse, it *item) error {
	resp.Deleted++
	if r.GetPrevKv() {
		resp.PrevKvs = append(resp.PrevKvs, e.draft.keep(it))
	}
	return e.write(&pendingVersion{key: it.key, txn: e.changes.txn, tombstone: true, lived: true}, it.lease)
}

// write adds a version whose lived says whether the key is alive now; was is the lease
// that the key is attached to now.
func (e *evaluation) write(v *pendingVersion, was keyspace.LeaseID) error {
	if own := e.changes.get(v.key); own != nil {
		before := own.prior()
		v.lived, was = before.Lived, before.Lease
	}
	if v.leases != nil {
		v.leases.from = was
	} else if was != 0 {
		v.leases = &leasePair{from: was}
	}
	v.sub = e.sub
	e.changes.add(v)
	if e.changes.bytes > e.maxWriteBytes {
		return tooLarge(e.maxWriteBytes)
	}
	return nil
}

// tooLarge refuses a change that does not fit in one entry. Nothing of it is done.
func tooLarge(limit int) error {
	return kverror.New(kverror.RequestTooLarge,
		"one request may change at most %d bytes of keys and values: delete or write in smaller parts", limit)
}

// execute runs the operations of the branch that was chosen. It returns what is
// left of the path.
func (e *evaluation) execute(t *pb.TxnRequest, path []bool) (*pb.TxnResponse, []bool, error) {
	succeeded, path := path[0], path[1:]
	ops := branch(t, succeeded)
	resp := &pb.TxnResponse{Succeeded: succeeded, Responses: make([]*pb.ResponseOp, len(ops))}
	for i, op := range ops {
		r := &pb.ResponseOp{}
		resp.Responses[i] = r
		switch o := op.GetRequest().(type) {
		case *pb.RequestOp_RequestRange:
			d, err := e.rangeOp(o.RequestRange)
			if err != nil {
				return nil, nil, err
			}
			r.Response = &pb.ResponseOp_ResponseRange{ResponseRange: d}
		case *pb.RequestOp_RequestPut:
			p, err := e.put(o.RequestPut)
			if err != nil {
				return nil, nil, err
			}
			e.header(p.Header)
			r.Response = &pb.ResponseOp_ResponsePut{ResponsePut: p}
		case *pb.RequestOp_RequestDeleteRange:
			d, err := e.deleteRange(o.RequestDeleteRange)
			if err != nil {
				return nil, nil, err
			}
			e.header(d.Header)
			r.Response = &pb.ResponseOp_ResponseDeleteRange{ResponseDeleteRange: d}
		case *pb.RequestOp_RequestTxn:
			n, rest, err := e.execute(o.RequestTxn, path)
			if err != nil {
				return nil, nil, err
			}
			// etcd leaves the header of a nested answer empty, and so do we.
			n.Header, path = &pb.ResponseHeader{}, rest
			r.Response = &pb.ResponseOp_ResponseTxn{ResponseTxn: n}
		}
	}
	return resp, path, nil
}

// rangeOp runs a range operation inside a transaction: it sees what the operations
// before it have done, or the state at its explicit revision.
func (e *evaluation) rangeOp(r *pb.RangeRequest) (*pb.RangeResponse, error) {
	at := newest
	if r.GetRevision() > 0 {
		at = keyspace.Revision(r.GetRevision())
		if e.oldest == 0 || at < e.oldest {
			e.oldest = at
		}
	}
	d, err := collectRange(&e.view, r, at)
	if err != nil {
		return nil, err
	}
	e.header(d.resp.Header)
	if d.open() {
		e.draft.ranges = append(e.draft.ranges, d)
		return d.resp, nil
	}
	for i := range d.kvs {
		f := &d.kvs[i]
		_, modKnown := f.mod.known()
		_, createKnown := f.create.known()
		if !modKnown || !createKnown {
			e.draft.kvs = append(e.draft.kvs, *f)
		}
	}
	d.finish()
	return d.resp, nil
}

func (e *evaluation) header(h *pb.ResponseHeader) {
	e.draft.headers = append(e.draft.headers, headerDraft{h: h, changed: len(e.changes.writes) > 0})
}
