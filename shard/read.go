package shard

import (
	"context"
	"errors"

	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/rangeapi/stages"
)

// errAgain says that what a read waited for was discarded: it starts over.
var errAgain = errors.New("shard: start over")

// maxReadStarts bounds how often a read starts over before its caller is told to.
const maxReadStarts = 16

// read answers a request that changes nothing. It runs in the caller's goroutine.
func (r *Replica) read(ctx context.Context, req *rangeapi.Request, w *waits) (*rangeapi.Response, error) {
	rev := req.ReadRevision
	if rev == 0 {
		a, err := r.currentRevision(ctx, req.Permit, w)
		if err != nil {
			return nil, err
		}
		rev = a.Current
	} else if err := r.sameSequencer(req); err != nil {
		return nil, err
	}
	if err := r.believe(ctx, rev, w); err != nil {
		return nil, err
	}
	r.store.heard(rev)
	at, err := r.readRevision(req, rev)
	if err != nil {
		return nil, err
	}
	bounds, ok := rangeapi.Bounds(req.Op)
	if !ok {
		bounds = keyspace.Single(rangeapi.FirstKey)
	}
	for range maxReadStarts {
		resp, err := r.readOnce(ctx, req, bounds, rev, at, w)
		if errors.Is(err, errAgain) {
			w.turns++
			r.store.metrics.readRestarts.Inc()
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

// sameSequencer refuses a read at a revision of a sequencer that has a successor. A paused machine's
// clock stands still, so its sequencer may believe in a lease that is over. A write of its
// successor's may be older than the read and have a higher revision.
func (r *Replica) sameSequencer(req *rangeapi.Request) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.sameSequencerLocked(req)
}

func (r *Replica) sameSequencerLocked(req *rangeapi.Request) error {
	if req.ReadTerm == 0 || req.Txn != nil {
		return nil // nobody knows whose revision it is, or it is that of a decided transaction
	}
	term := max(r.rec.SequencerTerm, uint64(r.store.sequencerTerm.Load()))
	if req.ReadTerm < term && !mutation.Is(mutation.OldSequencerBelieved) {
		r.store.metrics.pipeline.OldSequencer.Inc()
		return kverror.New(kverror.ReadAgain, "revision %d comes from the sequencer of term %d, and there is one of term %d", req.ReadRevision, req.ReadTerm, term)
	}
	r.store.heardTerm(req.ReadTerm)
	return nil
}

// currentRevision asks the sequencer for the current revision.
func (r *Replica) currentRevision(ctx context.Context, permit keyspace.Permit, w *waits) (keyspace.SequenceAnswer, error) {
	ch := make(chan keyspace.SequenceAnswer, 1)
	req := keyspace.SequenceRequest{Range: r.id, Permit: permit, Direct: true}
	r.store.cfg.Sequencer.Sequence(req, func(a keyspace.SequenceAnswer) { ch <- a })
	a, err := await(ctx, r, w, stages.Revision, ch)
	if err != nil {
		return a, kverror.Of(err)
	}
	r.store.observe(a)
	return a, a.Err
}

// maxAhead is how far ahead of all that this node has heard of a revision may be that
// another node names, without the sequencer being asked about it.
const maxAhead = 1 << 20

// believe refuses a revision that cannot have been allocated. Taken for known it
// would stay the node's floor, and what it is given to the range's last one: nothing
// could be compared, locked or written under it any more.
func (r *Replica) believe(ctx context.Context, rev keyspace.Revision, w *waits) error {
	if rev <= r.store.Floor()+maxAhead {
		return nil
	}
	a, err := r.currentRevision(ctx, keyspace.Internal, w)
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
	if c := r.store.Compacted(); at < c && req.Txn == nil {
		return 0, &kverror.Error{Kind: kverror.Compacted, CompactRevision: c}
	}
	return at, nil
}

// readOnce reads in the order that S5 demands: wait for older changes of the keys,
// confirm the leadership, read, check that it was this range's to read.
func (r *Replica) readOnce(
	ctx context.Context, req *rangeapi.Request, bounds keyspace.Span, rev, at keyspace.Revision, w *waits,
) (proto.Message, error) {
	term, err := r.awaitOlder(ctx, req, bounds, at, w)
	if err != nil {
		return nil, err
	}
	if !r.group.LeaseHeld(term) {
		if err := r.awaitReadIndex(ctx, w); err != nil {
			return nil, err
		}
	}
	if err := r.stillLeads(req, bounds, term); err != nil {
		return nil, err
	}
	budget := r.store.reads.Budget(ctx)
	defer budget.Release()
	resp, oldest, err := r.reader.Read(req.Op, rev, at, &budget)
	if err != nil {
		return nil, err
	}
	return resp, r.checkRead(req, bounds, term, at, oldest)
}

// awaitOlder waits until this replica leads and until every change of the keys is
// applied that is here now and may be at or below the revision.
func (r *Replica) awaitOlder(ctx context.Context, req *rangeapi.Request, bounds keyspace.Span, at keyspace.Revision, w *waits) (term uint64, err error) {
	r.mu.Lock()
	for {
		in := stages.Queued
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
				wait, in, w.lock = h.Ended(), stages.Blocked, h.Lock
				r.store.metrics.pipeline.LockWaits.Inc()
			}
		}
		if wait == nil {
			break
		}
		r.mu.Unlock()
		if _, err := await(ctx, r, w, in, wait); err != nil {
			return 0, kverror.Of(err)
		}
		r.mu.Lock()
	}
	term = r.pipe.Term()
	b := r.pipe.NewestBatch(bounds, at)
	if b == nil {
		r.mu.Unlock()
		return term, nil
	}
	ended := b.Ended()
	r.mu.Unlock()
	r.store.metrics.readWaits.Inc()
	if _, err := await(ctx, r, w, stages.Held, ended); err != nil {
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

func (r *Replica) awaitReadIndex(ctx context.Context, w *waits) error {
	ch := make(chan error, 1)
	r.group.ReadIndex(func(_ uint64, err error) { ch <- err })
	failed, err := await(ctx, r, w, stages.Confirming, ch)
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
	// The read may have waited for the log or a lock. Either may tell of a later sequencer.
	return r.sameSequencerLocked(req)
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
		r.countReadLocked(bounds) // here, since a read that starts over is one read
		return nil
	}
	if o, ok := rangeapi.RangeOf(req.Op); ok && o.GetRevision() > 0 {
		return &kverror.Error{Kind: kverror.Compacted, CompactRevision: r.rec.Compacted}
	}
	// A read of the present never fails as compacted: the gateway takes a new
	// revision.
	return kverror.New(kverror.ReadAgain, "revision %d, compacted up to %d", at, r.rec.Compacted)
}
