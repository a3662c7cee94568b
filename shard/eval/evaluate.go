package eval

import (
	"errors"
	"slices"
	"sync"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/command"
)

// Input is what an evaluation starts from: a state, and what bounds the request.
type Input struct {
	// Store is the applied state, read at Base: [Newest], or the revision of a read.
	Store Store
	Base  keyspace.Revision
	// Overlay is what is evaluated and not applied. Guard guards it, and Epochs.
	Overlay *Overlay
	Guard   *sync.Mutex
	// Cache and Epochs know the newest applied versions; nil if Base is not Newest.
	Cache  *VersionCache
	Epochs *KeyEpochs
	// Record is the range's applied record, and Counts what was counted of its spans. Guard
	// guards both; they are nil if Base is not Newest.
	Record *command.Record
	Counts *SpanCounts
	// KnownCount returns the number of living keys of the span at the revision, if it can be
	// had without a scan; nil if Base is Newest.
	KnownCount func(s keyspace.Span, at keyspace.Revision) (n int64, ok bool)
	// Leases says to which leases keys may be attached, nil to none. Lacks and Absent are
	// leases that are known not to exist.
	Leases Leases
	Lacks  keyspace.LeaseID
	Absent []keyspace.LeaseID
	// Floor is the highest revision that the node has heard of: the request's own is above.
	Floor keyspace.Revision
	// Current is the highest revision that was allocated, as far as the range knows, and
	// Compacted the cluster's compacted revision, -1 before the first compaction. Both are
	// for explicit revisions inside a transaction.
	Current, Compacted keyspace.Revision
	// MaxWriteBytes bounds what the request may change.
	MaxWriteBytes int
	// Budget counts what the request reads. Whoever made it releases it.
	Budget *Budget
}

// Leases says to which leases keys may be attached.
type Leases interface {
	// Attachable says whether the range may attach keys to the lease now.
	Attachable(lease keyspace.LeaseID) bool
}

// Evaluation is one request on its way through the evaluator, and afterwards what the
// request does and answers. It is for one goroutine, and may be used for one request after
// another.
type Evaluation struct {
	view view
	// oldest is the lowest explicit revision that was read, 0 if none was.
	oldest keyspace.Revision

	changes changes
	draft   Draft
	// sub is the number of the operation at hand, in a transaction over several ranges.
	sub uint32

	// one is unused memory for a request that is a single put, the most frequent one. pair
	// is that for the put's leases, if it has one.
	one  *onePut
	pair *leasePair
}

// Reset makes the evaluation one of another request.
func (e *Evaluation) Reset(in Input) {
	*e = Evaluation{view: view{in: in}}
}

// Writes returns the versions that the request writes, in the order of its operations.
func (e *Evaluation) Writes() []*PendingVersion { return e.changes.writes }

// WriteBytes is about what the writes take in an entry.
func (e *Evaluation) WriteBytes() int { return e.changes.bytes }

// Txn returns the transaction of the writes.
func (e *Evaluation) Txn() *PendingTxn { return e.changes.txn }

// Draft returns the answer.
func (e *Evaluation) Draft() Draft { return e.draft }

// Seen returns the newest batch of which the request has seen a version, nil if none.
func (e *Evaluation) Seen() *Batch { return e.view.seen }

// Oldest returns the lowest explicit revision that was read, 0 if none was.
func (e *Evaluation) Oldest() keyspace.Revision { return e.oldest }

// Run evaluates a request that can write: it says what the request does and answers. The
// error is a [WaitError], a [FutureError], a [NeedsLease], a [Refusal], or one that needs no
// holding back.
func (e *Evaluation) Run(op proto.Message) error {
	e.begin(op)
	return e.run(op)
}

// onePut is what a single put leaves behind, in one allocation.
type onePut struct {
	txn     PendingTxn
	version PendingVersion
	writes  [1]*PendingVersion
	resp    pb.PutResponse
	header  pb.ResponseHeader
}

// leasedPut is a onePut with a lease.
type leasedPut struct {
	onePut
	leases leasePair
}

// begin makes the transaction that the request may become.
func (e *Evaluation) begin(op proto.Message) {
	p, ok := op.(*pb.PutRequest)
	switch {
	case !ok:
		e.changes.txn = &PendingTxn{Floor: e.view.in.Floor}
		return
	case p.GetLease() == 0:
		e.one = &onePut{}
	default:
		l := &leasedPut{}
		e.one, e.pair = &l.onePut, &l.leases
	}
	e.one.txn.Floor = e.view.in.Floor
	e.changes.txn, e.changes.writes = &e.one.txn, e.one.writes[:0]
}

// newPut returns memory for a put's version and answer.
func (e *Evaluation) newPut() (*PendingVersion, *pb.PutResponse) {
	one := e.one
	if one == nil {
		return &PendingVersion{}, &pb.PutResponse{Header: &pb.ResponseHeader{}}
	}
	e.one = nil
	one.resp.Header = &one.header
	return &one.version, &one.resp
}

// FutureError says that a transaction reads at a revision that the range has not
// heard of. The sequencer must say whether it was allocated.
type FutureError struct{ Revision keyspace.Revision }

// Error implements error.
func (FutureError) Error() string { return kverror.FutureRevision.Error() }

// Refusal is an error that depends on the state which the Evaluation saw. It must
// be held back like an answer: the state may yet be discarded.
type Refusal struct{ Err error }

// Error implements error.
func (r Refusal) Error() string { return r.Err.Error() }

// Unwrap returns the error that the request gets.
func (r Refusal) Unwrap() error { return r.Err }

func (e *Evaluation) run(op proto.Message) error {
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
		e.draft.Op, e.draft.top = resp, resp.Header
	case *pb.DeleteRangeRequest:
		e.view.own = &e.changes
		resp, err := e.deleteRange(o)
		if err != nil {
			return err
		}
		e.draft.Op, e.draft.top = resp, resp.Header
	case *pb.TxnRequest:
		return e.txn(o)
	default:
		return rangeapi.BadRequest("%T cannot be evaluated", op)
	}
	return nil
}

// txn evaluates the compares, then everything that can refuse the branch, then the
// branch.
func (e *Evaluation) txn(t *pb.TxnRequest) error {
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
	e.draft.Op, e.draft.top = resp, resp.Header
	return nil
}

// checkBranch refuses what etcd refuses before a transaction's first operation, on
// the state before it. It returns what is left of the path.
func (e *Evaluation) checkBranch(t *pb.TxnRequest, path []bool) ([]bool, error) {
	succeeded, path := path[0], path[1:]
	for _, op := range branch(t, succeeded) {
		var err error
		switch o := op.GetRequest().(type) {
		case *pb.RequestOp_RequestRange:
			err = e.checkRevision(o.RequestRange.GetRevision())
		case *pb.RequestOp_RequestPut:
			if err = e.checkPut(o.RequestPut); errors.Is(err, kverror.LeaseNotFound) {
				// The compares led here: the answer tells of the state.
				err = Refusal{err}
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
func (e *Evaluation) checkRevision(rev int64) error {
	switch {
	case rev == 0:
		return nil
	case rev > int64(e.view.in.Current):
		return FutureError{keyspace.Revision(rev)}
	case rev < int64(e.view.in.Compacted), rev < -1:
		return Refusal{&kverror.Error{Kind: kverror.Compacted, CompactRevision: max(e.view.in.Compacted, 0)}}
	}
	return nil
}

// checkPut refuses a put by its lease and by a previous version that it needs.
func (e *Evaluation) checkPut(p *pb.PutRequest) error {
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
		err = Refusal{kverror.KeyNotFound}
	}
	return err
}

// NeedsLease says that a put cannot be evaluated before the range may attach keys to the
// lease.
type NeedsLease struct{ Lease keyspace.LeaseID }

// Error implements error.
func (NeedsLease) Error() string { return "waits for the attachment of a lease" }

// checkLease refuses a put to a lease that does not exist.
func (e *Evaluation) checkLease(lease keyspace.LeaseID) error {
	switch {
	case e.view.in.Leases == nil:
		return kverror.LeaseNotFound
	case e.view.in.Leases.Attachable(lease):
		return nil
	case e.view.in.Lacks == lease || slices.Contains(e.view.in.Absent, lease):
		return kverror.LeaseNotFound
	}
	return NeedsLease{lease}
}

func (e *Evaluation) put(p *pb.PutRequest) (*pb.PutResponse, error) {
	get := e.view.getHead
	if p.GetIgnoreValue() || p.GetPrevKv() {
		get = e.view.get
	}
	prev, ok, err := get(p.GetKey())
	if err != nil {
		return nil, err
	}
	v, resp := e.newPut()
	*v = PendingVersion{
		Key: p.GetKey(), value: p.GetValue(), Txn: e.changes.txn,
		create: Ref{txn: e.changes.txn}, version: 1, Lived: ok,
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
		return nil, Refusal{kverror.KeyNotFound}
	}
	if lease != 0 {
		if v.leases, e.pair = e.pair, nil; v.leases == nil {
			v.leases = &leasePair{}
		}
		v.leases.to = lease
	}
	return resp, e.write(v, was)
}

func (e *Evaluation) deleteRange(r *pb.DeleteRangeRequest) (*pb.DeleteRangeResponse, error) {
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
	// The keys are removed after the scan: the view must not change under it.
	var items []item
	size := 0
	err := e.view.scan(s, !r.GetPrevKv(), func(it *item) error {
		if size += len(it.key) + command.VersionOverheadBytes; size > e.view.in.MaxWriteBytes {
			return tooLarge(e.view.in.MaxWriteBytes)
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
func (e *Evaluation) remove(r *pb.DeleteRangeRequest, resp *pb.DeleteRangeResponse, it *item) error {
	resp.Deleted++
	if r.GetPrevKv() {
		resp.PrevKvs = append(resp.PrevKvs, e.draft.keep(it))
	}
	return e.write(&PendingVersion{Key: it.key, Txn: e.changes.txn, Tombstone: true, Lived: true}, it.lease)
}

// write adds a version whose Lived says whether the key is alive now; was is the lease
// that the key is attached to now.
func (e *Evaluation) write(v *PendingVersion, was keyspace.LeaseID) error {
	if own := e.changes.get(v.Key); own != nil {
		before := own.Prior()
		v.Lived, was = before.Lived, before.Lease
	}
	if v.leases != nil {
		v.leases.from = was
	} else if was != 0 {
		v.leases = &leasePair{from: was}
	}
	v.sub = e.sub
	e.changes.add(v)
	if e.changes.bytes > e.view.in.MaxWriteBytes {
		return tooLarge(e.view.in.MaxWriteBytes)
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
func (e *Evaluation) execute(t *pb.TxnRequest, path []bool) (*pb.TxnResponse, []bool, error) {
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
func (e *Evaluation) rangeOp(r *pb.RangeRequest) (*pb.RangeResponse, error) {
	at := Newest
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

func (e *Evaluation) header(h *pb.ResponseHeader) {
	e.draft.headers = append(e.draft.headers, headerDraft{h: h, changed: len(e.changes.writes) > 0})
}
