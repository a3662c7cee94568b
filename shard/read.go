package shard

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"sync"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/eval"
)

// errAgain says that what a read waited for was discarded: it starts over.
var errAgain = errors.New("shard: start over")

// maxReadStarts bounds how often a read starts over before its caller is told to.
const maxReadStarts = 16

// read answers a request that changes nothing. It runs in the caller's goroutine.
func (r *Replica) read(ctx context.Context, req *rangeapi.Request) (*rangeapi.Response, error) {
	rev := req.ReadRevision
	if rev == 0 {
		a, err := r.currentRevision(ctx)
		if err != nil {
			return nil, err
		}
		rev = a.Current
	}
	if err := r.believe(ctx, rev); err != nil {
		return nil, err
	}
	r.node.heard(rev)
	at, err := r.readRevision(req, rev)
	if err != nil {
		return nil, err
	}
	bounds, ok := rangeapi.Bounds(req.Op)
	if !ok {
		bounds = keyspace.Single(rangeapi.FirstKey)
	}
	for range maxReadStarts {
		resp, err := r.readOnce(ctx, req, bounds, rev, at)
		if errors.Is(err, errAgain) {
			r.node.metrics.readRestarts.Inc()
			continue
		}
		if err != nil {
			if errors.Is(err, kverror.NotLeader) {
				r.group.Wake()
			}
			return nil, err
		}
		return &rangeapi.Response{Op: resp}, nil
	}
	return nil, kverror.New(kverror.Busy, "range %s: the pipeline is cut again and again", r.id)
}

// currentRevision asks the sequencer for the current revision.
func (r *Replica) currentRevision(ctx context.Context) (keyspace.SequenceAnswer, error) {
	ch := make(chan keyspace.SequenceAnswer, 1)
	req := keyspace.SequenceRequest{Range: r.id}
	r.node.cfg.Sequencer.Sequence(req, func(a keyspace.SequenceAnswer) { ch <- a })
	a, err := clock.Await(ctx, ch)
	if err != nil {
		return a, kverror.Of(err)
	}
	r.node.observe(a)
	return a, a.Err
}

// maxAhead is how far ahead of all that this node has heard of a revision may be that
// another node names, without the sequencer being asked about it.
const maxAhead = 1 << 20

// believe refuses a revision that nobody can have been handed out. Taken for known it
// would stay the node's floor, and what it is given to the range's last one: nothing
// could be compared, locked or written under it any more.
func (r *Replica) believe(ctx context.Context, rev keyspace.Revision) error {
	if rev <= r.node.Floor()+maxAhead {
		return nil
	}
	a, err := r.currentRevision(ctx)
	if err != nil {
		return err
	}
	if rev > a.Current {
		return kverror.New(kverror.Internal, "revision %d was named, the last one is %d", rev, a.Current)
	}
	return nil
}

// readRevision returns the revision at which the state is read: the explicit one of
// a RangeRequest, otherwise the read's own.
func (r *Replica) readRevision(req *rangeapi.Request, rev keyspace.Revision) (keyspace.Revision, error) {
	o, ok := rangeapi.RangeOf(req.Op)
	if !ok || o.GetRevision() <= 0 {
		return rev, nil
	}
	at := keyspace.Revision(o.GetRevision())
	if at > rev {
		return 0, kverror.New(kverror.FutureRevision, "revision %d, the last one is %d", at, rev)
	}
	if c := r.node.Compacted(); at < c && req.Txn == nil {
		return 0, &kverror.Error{Kind: kverror.Compacted, CompactRevision: c}
	}
	return at, nil
}

// readOnce reads in the order that S5 demands: wait for older changes of the keys,
// confirm the leadership, read, check that it was this range's to read.
func (r *Replica) readOnce(ctx context.Context, req *rangeapi.Request, bounds keyspace.Span, rev, at keyspace.Revision) (proto.Message, error) {
	term, err := r.awaitOlder(ctx, req, bounds, at)
	if err != nil {
		return nil, err
	}
	if !r.group.LeaseHeld(term) {
		if err := r.awaitReadIndex(ctx); err != nil {
			return nil, err
		}
	}
	if err := r.stillLeads(req, bounds, term); err != nil {
		return nil, err
	}
	budget := r.node.reads.Budget()
	defer budget.Release()
	resp, oldest, err := r.readStore(req.Op, rev, at, &budget)
	if err != nil {
		return nil, err
	}
	return resp, r.checkRead(req, bounds, term, at, oldest)
}

// awaitOlder waits until this replica leads and until every change of the keys is
// applied that is here now and may be at or below the revision.
func (r *Replica) awaitOlder(ctx context.Context, req *rangeapi.Request, bounds keyspace.Span, at keyspace.Revision) (term uint64, err error) {
	r.mu.Lock()
	for {
		wait, err := r.servesLocked(req)
		if err != nil {
			r.mu.Unlock()
			return 0, err
		}
		if wait == nil && r.change.takes(bounds) {
			// S7. The channel is closed when the change's fate is known.
			wait = r.change.done
		}
		if wait == nil && !r.locks.Empty() && !mutation.Is(mutation.TxnHalfVisible) {
			// A lock with a floor at or above the revision leaves nothing to see at it. No lock
			// with a lower floor can come: this node has heard of the revision.
			if h := r.locks.Reader(bounds, at, req.ReadingTxn()); h != nil {
				wait = h.Ended()
				r.node.metrics.pipeline.LockWaits.Inc()
			}
		}
		if wait == nil {
			break
		}
		r.mu.Unlock()
		if _, err := clock.Await(ctx, wait); err != nil {
			return 0, kverror.Of(err)
		}
		r.mu.Lock()
	}
	r.countReadLocked(bounds)
	term = r.pipe.Term()
	b := r.pipe.NewestBatch(bounds, at)
	if b == nil {
		r.mu.Unlock()
		return term, nil
	}
	ended := b.Ended()
	r.mu.Unlock()
	r.node.metrics.readWaits.Inc()
	if _, err := clock.Await(ctx, ended); err != nil {
		return 0, kverror.Of(err)
	}
	r.mu.Lock()
	applied := b.Applied()
	r.mu.Unlock()
	if !applied {
		// Trap 75: what it waited for is discarded; somebody else's write may be in
		// its place.
		return 0, errAgain
	}
	return term, nil
}

func (r *Replica) awaitReadIndex(ctx context.Context) error {
	ch := make(chan error, 1)
	r.group.ReadIndex(func(_ uint64, err error) { ch <- err })
	failed, err := clock.Await(ctx, ch)
	switch {
	case err != nil:
		return kverror.Of(err)
	case failed != nil:
		return kverror.New(kverror.NoLeader, "range %s: %v", r.id, failed)
	}
	return nil
}

// standsLocked says whether the leadership of the term still answers for the span.
func (r *Replica) standsLocked(term uint64, bounds keyspace.Span) bool {
	return r.pipe.Term() == term && !r.change.takes(bounds) && !r.rec.Merge.StandsStill()
}

// stillLeads makes sure that the read waited under the leadership that was confirmed.
func (r *Replica) stillLeads(req *rangeapi.Request, bounds keyspace.Span, term uint64) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, err := r.servesLocked(req); err != nil {
		return err
	}
	if !r.standsLocked(term, bounds) {
		return errAgain
	}
	return nil
}

// checkRead says whether what was read at the revision was all there and this
// range's to answer. oldest is an explicit revision inside a transaction, 0 for none.
// The leadership must be that for which the read waited: without one a snapshot may
// have taken versions away before the compacted revision here tells so.
func (r *Replica) checkRead(req *rangeapi.Request, bounds keyspace.Span, term uint64, at, oldest keyspace.Revision) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if req.Generation != r.rec.Generation {
		return r.errorLocked(kverror.WrongRange, "the range changed during the read")
	}
	if !r.standsLocked(term, bounds) {
		return errAgain
	}
	if oldest != 0 && oldest < r.rec.Compacted {
		return &kverror.Error{Kind: kverror.Compacted, CompactRevision: r.rec.Compacted}
	}
	if at >= r.rec.Compacted {
		return nil
	}
	if o, ok := rangeapi.RangeOf(req.Op); ok && o.GetRevision() > 0 {
		return &kverror.Error{Kind: kverror.Compacted, CompactRevision: r.rec.Compacted}
	}
	// A read of the present never fails as compacted: the gateway takes a new
	// revision.
	return kverror.New(kverror.ReadAgain, "revision %d, compacted up to %d", at, r.rec.Compacted)
}

// readStore answers from the store: everything at or below the revision is there.
func (r *Replica) readStore(
	op proto.Message, rev, at keyspace.Revision, budget *eval.Budget,
) (resp proto.Message, oldest keyspace.Revision, err error) {
	switch o := op.(type) {
	case *pb.RangeRequest:
		resp, err := r.readRange(o, at, budget)
		if err != nil {
			return nil, 0, err
		}
		resp.Header = &pb.ResponseHeader{Revision: int64(rev)}
		return resp, 0, nil
	case *rangeapi.Page:
		answer, err := r.readPiece(o, at, budget)
		if err != nil {
			return nil, 0, err
		}
		answer.Header = &pb.ResponseHeader{Revision: int64(rev)}
		return answer, 0, nil
	case *pb.TxnRequest:
		return r.readTxn(o, rev, budget)
	}
	return nil, 0, rangeapi.BadRequest("%T is no read", op)
}

// readTxn evaluates a transaction that can write in no branch as a read at rev.
func (r *Replica) readTxn(
	t *pb.TxnRequest, rev keyspace.Revision, budget *eval.Budget,
) (resp proto.Message, oldest keyspace.Revision, err error) {
	var none sync.Mutex
	r.mu.Lock()
	compacted := r.rec.CompactedIn(r.node.Compacted())
	r.mu.Unlock()
	var e eval.Evaluation
	e.Reset(eval.Input{
		Store: r.store, Base: rev, Overlay: eval.NewOverlay(), Guard: &none,
		Current: rev, Compacted: compacted, Budget: budget,
	})
	err = e.Run(t)
	var future eval.FutureError
	var refused eval.Refusal
	switch {
	case err == nil:
		d := e.Draft()
		d.Settle(rev, false)
		return d.Op, e.Oldest(), nil
	case errors.As(err, &future):
		return nil, 0, kverror.New(kverror.FutureRevision, "revision %d, the last one is %d", future.Revision, rev)
	case errors.As(err, &refused):
		return nil, 0, refused.Err
	}
	return nil, 0, err
}

// readRange runs a RangeRequest at the revision.
func (r *Replica) readRange(o *pb.RangeRequest, at keyspace.Revision, budget *eval.Budget) (*pb.RangeResponse, error) {
	resp := &pb.RangeResponse{}
	s, ok := keyspace.FromEtcd(o.GetKey(), o.GetRangeEnd())
	if !ok {
		return resp, nil
	}
	var err error
	if o.GetCountOnly() {
		resp.Count, err = r.count(s, at)
		return resp, err
	}
	if len(o.GetRangeEnd()) == 0 {
		return resp, r.readKey(o, at, resp)
	}
	got, err := r.collect(o, s, at, budget)
	if err != nil {
		return nil, err
	}
	resp.Count = got.seen
	if !got.whole {
		if resp.Count, err = r.countBehind(s, at, got.kvs); err != nil {
			return nil, err
		}
	}
	total := resp.Count
	rangeapi.Shape(o, resp, got.kvs)
	if !rangeapi.Collects(o) && !rangeapi.Sorts(o) && resp.More {
		r.rememberPage(s, at, resp.Kvs, total)
	}
	return resp, r.fits(resp)
}

// fits refuses an answer that is better read in pieces.
func (r *Replica) fits(resp *pb.RangeResponse) error {
	left := r.node.cfg.Limits.AnswerBytes
	for _, kv := range resp.Kvs {
		if left -= int64(len(kv.Key) + len(kv.Value)); left < 0 {
			return kverror.New(kverror.ReadByPages, "more than %d bytes", r.node.cfg.Limits.AnswerBytes)
		}
	}
	return nil
}

func (r *Replica) readKey(o *pb.RangeRequest, at keyspace.Revision, resp *pb.RangeResponse) error {
	kv, err := r.newestAt(o.GetKey(), at)
	if err != nil || kv == nil {
		return err
	}
	resp.Count = 1
	rangeapi.Shape(o, resp, []*mvccpb.KeyValue{kv})
	return nil
}

// newestAt returns the key as it is at the revision, up to which everything is
// applied; nil if it is not there.
func (r *Replica) newestAt(key []byte, at keyspace.Revision) (*mvccpb.KeyValue, error) {
	r.mu.Lock()
	cached, known := r.node.cache.Get(r.epochs.Of(key), key)
	seen := r.appliedBatches.Load()
	r.mu.Unlock()
	if known && cached.Mod <= at && (cached.Whole || !cached.Alive) {
		r.node.metrics.cacheHits.Inc()
		return cached.KeyValue(key), nil
	}
	r.node.metrics.cacheMisses.Inc()
	v, ok, err := r.store.Get(key, at)
	if err != nil || !ok {
		return nil, err
	}
	r.mu.Lock()
	// It is the newest version only if nothing is published above the revision, and
	// nothing was published meanwhile.
	if r.pipe.Leads() && at >= r.rec.LastRevision && r.appliedBatches.Load() == seen {
		r.node.cache.Put(r.epochs.Of(key), key, eval.CachedVersion{
			Alive: true, Version: v.Version, Lease: v.Lease, Mod: v.Mod, Create: v.Create, Value: v.Value,
		})
	}
	r.mu.Unlock()
	return eval.KeyValue(&v), nil
}

// collected are the keys of a scan that pass the filters.
type collected struct {
	kvs []*mvccpb.KeyValue
	// seen are the keys that the scan went past, whole says that these are all.
	seen  int64
	whole bool
}

// collect scans the span until the limit is reached.
func (r *Replica) collect(o *pb.RangeRequest, s keyspace.Span, at keyspace.Revision, budget *eval.Budget) (c collected, err error) {
	limit, tail := rangeapi.ScanLimit(o), tailOf(o)
	needValues := !o.GetKeysOnly() || o.GetSortTarget() == pb.RangeRequest_VALUE
	c.whole = true
	err = r.store.Scan(s, at, !needValues, func(v *mvcc.Version) error {
		if limit > 0 && int64(len(c.kvs)) >= limit {
			c.whole = false
			return eval.ErrStop
		}
		c.seen++
		kv := eval.KeyValue(v)
		if rangeapi.FilteredOut(o, kv) {
			return nil
		}
		if err := budget.Take(kvBytes(kv)); err != nil {
			return err
		}
		kv.Key, kv.Value = bytes.Clone(v.Key), bytes.Clone(v.Value)
		c.kvs = append(c.kvs, kv)
		if tail > 0 && len(c.kvs) >= 2*tail {
			c.keepLast(tail, budget)
		}
		return nil
	})
	switch {
	case err == nil || errors.Is(err, eval.ErrStop):
		return c, nil
	case budget.Exceeded():
		return c, kverror.New(kverror.ReadByPages, "%v", err)
	}
	return c, fmt.Errorf("shard: range %s: read %s at %d: %w", r.id, s, at, err)
}

// kvBytes is about what a key value takes in memory.
func kvBytes(kv *mvccpb.KeyValue) int64 { return int64(len(kv.Key)+len(kv.Value)) + kvOverheadBytes }

// kvOverheadBytes is about what a key value takes beside its key and value.
const kvOverheadBytes = 160

// keepLast forgets all but the last n keys.
func (c *collected) keepLast(n int, budget *eval.Budget) {
	gone := c.kvs[:len(c.kvs)-n]
	for _, kv := range gone {
		budget.GiveBack(kvBytes(kv))
	}
	copy(c.kvs, c.kvs[len(gone):])
	clear(c.kvs[n:])
	c.kvs = c.kvs[:n]
}

// tailOf is how many of the last keys are enough for the answer; 0 is all. One more than
// asked for says whether there are more.
func tailOf(o *pb.RangeRequest) int {
	l := o.GetLimit()
	if o.GetSortTarget() != pb.RangeRequest_KEY || o.GetSortOrder() != pb.RangeRequest_DESCEND || l <= 0 || l > math.MaxInt32 {
		return 0
	}
	return int(l) + 1
}

// countBehind returns the count of the span, of which kvs are the first keys.
func (r *Replica) countBehind(s keyspace.Span, at keyspace.Revision, kvs []*mvccpb.KeyValue) (int64, error) {
	if n, ok := r.knownCount(s, at); ok {
		return n, nil
	}
	rest := keyspace.Span{Start: keyspace.Next(kvs[len(kvs)-1].Key), End: s.End}
	if !keyBelowEnd(rest) {
		return int64(len(kvs)), nil
	}
	n, err := r.count(rest, at)
	return n + int64(len(kvs)), err
}

// keyBelowEnd says whether a span that was cut at its front still holds a key.
func keyBelowEnd(s keyspace.Span) bool {
	return len(s.End) == 0 || bytes.Compare(s.Start, s.End) < 0
}

// rememberPage keeps the count of what is behind a page.
func (r *Replica) rememberPage(s keyspace.Span, at keyspace.Revision, kvs []*mvccpb.KeyValue, total int64) {
	rest := keyspace.Span{Start: keyspace.Next(kvs[len(kvs)-1].Key), End: s.End}
	r.rememberCount(rest, at, total-int64(len(kvs)))
}
