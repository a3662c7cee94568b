package shard

import (
	"context"
	"errors"

	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
)

// advance computes the resolved revision from the applied state alone. Every version at or
// below it that there will ever be, on any replica, is applied here. locks says that the
// locks have changed.
//
// It is the last applied revision, or lies below the lowest floor of the locks that will
// leave versions behind. There are three sources of later versions:
//
//   - A batch of the range itself: Its leader evaluates it on top of the applied state, and
//     asks for its revisions after every earlier batch has got its own. So its revisions are
//     above the last applied one when it is applied, as stands asserts.
//
//   - The end, or the sweep, of a lock that is held now: Its revision is above the lock's
//     floor, which the end asserts. It may be far below the last one: it was allocated long ago,
//     perhaps, and later allocations to others are applied here (traps 64 and 74).
//
//   - The end of a lock that is not here yet: Its transaction asks for a revision when all
//     its locks are applied, so later than now. All that is applied here has its revision
//     by now, and in real time the sequencer allocates nothing lower.
//
// The resolved revision never falls. A lock that comes with a floor below it takes nothing
// back, since the lock's revision is above the resolved one all the same.
//
// One number for all keys of the range may say too little and never too much. A key that no
// lock touches is resolved up to the last revision, and yet its watchers wait for the lowest
// lock. Feeds, pages of history, serializable reads, and the heirs of a split or merge lag
// then, and miss nothing. The lag ends with the lock. The leader that is asked whether a
// revision is void asks after the lock within a second; a transaction whose coordinator is
// gone is then ended at its anchor. The lag stays while the anchor's range has no quorum,
// since nobody can tell what became of the revision. A number for each span would set free
// only the watchers of other keys.
func (s *applyState) advance(locks bool) {
	if s.rec.Load.Active() {
		return // a bulk brings revisions in no order, and nothing is seen of it before it ends
	}
	if locks {
		s.lowest = keyspace.MaxRevision
		for _, l := range s.txns.Locks {
			if l.Leaves() && !mutation.Is(mutation.ResolvedDespiteLock) {
				s.lowest = min(s.lowest, l.Floor)
			}
		}
	}
	s.resolved = max(s.resolved, min(s.rec.LastRevision, s.lowest))
}

// mayAppearLocked says whether a version may still be applied here at or below a revision
// that was allocated before the question. It returns nil if none may, else a channel that is
// closed when what stands in the way has ended or changed. Only the leader can tell. It does
// not search the pipeline for the ends of locks: a lock stays until its end is applied.
func (r *Replica) mayAppearLocked(rev keyspace.Revision) <-chan struct{} {
	if ended := r.pipe.MayAppear(rev); ended != nil {
		return ended
	}
	if r.locks.Empty() || mutation.Is(mutation.VoidDespiteLock) {
		return nil
	}
	// A lock that comes later has a floor at or above the revision. One that holds up a
	// question is old, so its transaction is asked about soon.
	h := r.locks.Reader(r.rec.Span, rev, rangeapi.TxnName{})
	if h == nil {
		return nil
	}
	h.Urgent = true
	return h.Ended()
}

// AwaitResolved waits until every version at or below q.Revision that may ever appear in the
// range is applied here. It returns the range's feed position at that time: all events up to
// q.Revision are at or before that position. The revision must have been allocated.
// Only the leader can answer, under a lease or a ReadIndex that began after the question;
// other replicas refuse with NotLeader. It waits for a split that is under way.
func (r *Replica) AwaitResolved(ctx context.Context, q *rangeapi.ResolvedRequest) (applied rangeapi.FeedPosition, err error) {
	r.store.metrics.resolvedQuestions.Inc()
	if err := r.believe(ctx, q.Revision, &waits{}); err != nil {
		return rangeapi.FeedPosition{}, err
	}
	// From now on the floors of batches show that the revision was known. Without that a busy
	// range, which always sequences a batch, would never answer.
	r.store.heard(q.Revision)
	for range maxReadStarts {
		applied, err = r.resolvedOnce(ctx, q)
		if errors.Is(err, kverror.NotLeader) {
			r.group.Wake()
		}
		if !errors.Is(err, errAgain) {
			return applied, err
		}
	}
	return rangeapi.FeedPosition{}, kverror.New(kverror.Busy, "range %s: the pipeline is cut again and again", r.id)
}

func (r *Replica) resolvedOnce(ctx context.Context, q *rangeapi.ResolvedRequest) (rangeapi.FeedPosition, error) {
	term, err := r.awaitNothing(ctx, q)
	if err != nil {
		return rangeapi.FeedPosition{}, err
	}
	if !r.group.LeaseHeld(term) {
		if err := r.awaitReadIndex(ctx, &waits{}); err != nil {
			return rangeapi.FeedPosition{}, err
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, err := r.leadsLocked(q.Generation); err != nil {
		return rangeapi.FeedPosition{}, err
	}
	if r.pipe.Term() != term || r.change != nil || r.rec.Merge.StandsStill() {
		return rangeapi.FeedPosition{}, errAgain
	}
	return r.positionLocked(), nil
}

// awaitNothing waits until this replica leads and nothing at or below the revision may
// appear any more, and returns its term.
func (r *Replica) awaitNothing(ctx context.Context, q *rangeapi.ResolvedRequest) (term uint64, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for {
		wait, err := r.leadsLocked(q.Generation)
		if err != nil {
			return 0, err
		}
		if wait == nil && r.change != nil {
			wait = r.change.done // S7
		}
		if wait == nil {
			wait = r.mayAppearLocked(q.Revision)
		}
		if wait == nil {
			return r.pipe.Term(), nil
		}
		r.mu.Unlock()
		select {
		case <-wait:
			err = nil
		case <-ctx.Done():
			err = kverror.Of(ctx.Err())
		}
		r.mu.Lock()
		if err != nil {
			return 0, err
		}
	}
}
