package shard

import (
	"context"
	"errors"

	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/rangeapi"
)

// maxHistoryBytes bounds what a page of history may be asked to hold.
const maxHistoryBytes = 16 << 20

// mayAppearLocked says whether a version at or below the revision, which was handed out
// before the question, may still be applied here: it returns a channel that is closed
// when what keeps it open has ended or changed, or nil. Only the leader can tell. What
// ends a lock is not looked for in the pipeline: until it is applied the lock is there.
func (r *Replica) mayAppearLocked(rev keyspace.Revision) <-chan struct{} {
	// What fills asks for its revisions later, and gets higher ones. What is being
	// sequenced may have got its own, from this sequencer or the one before, unless it
	// was evaluated by who knew of the revision.
	if b := r.sequencing; b != nil && !b.settled && b.txns > 0 && b.floor < rev {
		return b.wait()
	}
	for i := len(r.proposed) - 1; i >= 0; i-- {
		if b := r.proposed[i]; b.txns > 0 && b.first <= rev {
			return b.wait()
		}
	}
	if r.locks.Empty() || mutation.Is(mutation.VoidDespiteLock) {
		return nil
	}
	// A lock that comes later knows of the revision. One that is here has been for a while,
	// if it holds up a question: its transaction is asked about soon.
	h := r.locks.Reader(r.rec.Span, rev, rangeapi.TxnName{})
	if h == nil {
		return nil
	}
	h.Urgent = true
	return h.Ended()
}

// AwaitResolved returns, once no version at or below q.Revision can appear in the range any
// more that is not applied here, where this replica is: whoever has all events up to
// that mark has all up to q.Revision, which must have been handed out. It is the leader's to say, under a
// lease or a ReadIndex begun after the question; others refuse with NotLeader. While a
// split is under way nothing is said.
func (r *Replica) AwaitResolved(ctx context.Context, q *rangeapi.ResolvedRequest) (applied rangeapi.FeedPosition, err error) {
	r.node.metrics.completeQuestions.Inc()
	if err := r.believe(ctx, q.Revision); err != nil {
		return rangeapi.FeedPosition{}, err
	}
	// What is evaluated from now on has a floor that tells: a busy range always has
	// something that is being sequenced.
	r.node.heard(q.Revision)
	for range maxReadStarts {
		applied, err = r.completeOnce(ctx, q)
		if errors.Is(err, kverror.NotLeader) {
			r.group.Wake()
		}
		if !errors.Is(err, errAgain) {
			return applied, err
		}
	}
	return rangeapi.FeedPosition{}, kverror.New(kverror.Busy, "range %s: the pipeline is cut again and again", r.id)
}

// markLocked is where the replica is. A range that has applied no batch of its own, as the child
// of a split, has what came before it all the same: who has heard nothing of it is not there, so
// that it is no zero mark. It is below all others, whose terms are above 0.
func (r *Replica) markLocked() rangeapi.FeedPosition {
	if m := rangeapi.FeedPosition(r.rec.Last); m != (rangeapi.FeedPosition{}) {
		return m
	}
	return rangeapi.FeedPosition{Number: 1}
}

func (r *Replica) completeOnce(ctx context.Context, q *rangeapi.ResolvedRequest) (rangeapi.FeedPosition, error) {
	term, err := r.awaitNothing(ctx, q)
	if err != nil {
		return rangeapi.FeedPosition{}, err
	}
	if !r.group.LeaseHeld(term) {
		if err := r.awaitReadIndex(ctx); err != nil {
			return rangeapi.FeedPosition{}, err
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, err := r.leadsLocked(q.Generation); err != nil {
		return rangeapi.FeedPosition{}, err
	}
	if r.lead == nil || r.lead.term != term || r.change != nil || r.rec.Merge.StandsStill() {
		return rangeapi.FeedPosition{}, errAgain
	}
	return r.markLocked(), nil
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
			return r.lead.term, nil
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

// History returns a page of events; any replica can that has applied enough.
func (r *Replica) History(q *rangeapi.HistoryRequest) (*rangeapi.HistoryPage, error) {
	v, err := r.viewHistory(q.Generation, q.From)
	if err != nil {
		return nil, err
	}
	switch {
	case !v.span.Covers(q.Span):
		return nil, kverror.New(kverror.WrongRange, "history of %s, range %s is %s", q.Span, r.id, v.span)
	case !v.mark.Reaches(q.Seen):
		return nil, kverror.New(kverror.Busy, "range %s is at %v here, not at %v", r.id, v.mark, q.Seen)
	}
	p := &rangeapi.HistoryPage{}
	o := mvcc.HistoryOptions{Span: q.Span, From: q.From, To: q.To, MaxBytes: min(q.MaxBytes, maxHistoryBytes)}
	var next feedPlace
	p.Events, next, err = r.history(q.Generation, o, historyWant{fromKey: q.FromKey, prev: q.Prev, compacted: q.Compacted})
	p.Next, p.NextKey = next.rev, next.key
	return p, err
}

func (n *Node) watched(id keyspace.RangeID) (*Replica, error) {
	if r := n.Replica(id); r != nil {
		return r, nil
	}
	return nil, kverror.New(kverror.RangeNotHere, "range %s on node %s", id, n.cfg.Self)
}

// handleWatch answers bus method 22.
func (n *Node) handleWatch(ctx context.Context, _ keyspace.NodeID, payload []byte) ([]byte, error) {
	complete, history, err := rangeapi.DecodeWatchRequest(payload)
	switch {
	case err != nil:
		return rangeapi.EncodeWatchError(rangeapi.BadRequest("%v", err)), nil
	case complete != nil:
		applied, err := n.AwaitResolved(ctx, complete)
		if err != nil {
			return rangeapi.EncodeWatchError(err), nil
		}
		return rangeapi.EncodeResolved(applied), nil
	}
	p, err := n.History(history)
	if err != nil {
		return rangeapi.EncodeWatchError(err), nil
	}
	return p.Encode(), nil
}

// AwaitResolved is Replica.AwaitResolved of the range that q names.
func (n *Node) AwaitResolved(ctx context.Context, q *rangeapi.ResolvedRequest) (rangeapi.FeedPosition, error) {
	r, err := n.watched(q.Range)
	if err != nil {
		return rangeapi.FeedPosition{}, err
	}
	return r.AwaitResolved(ctx, q)
}

// History is Replica.History of the range that q names.
func (n *Node) History(q *rangeapi.HistoryRequest) (*rangeapi.HistoryPage, error) {
	r, err := n.watched(q.Range)
	if err != nil {
		return nil, err
	}
	return r.History(q)
}
