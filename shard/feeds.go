package shard

import (
	"context"
	"fmt"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/command"
	"github.com/skeindb/skein/shard/rangefeed"
	"github.com/skeindb/skein/transport"
)

// newFeeds returns the server of the node's feeds.
func newFeeds(s *Store) *rangefeed.Server {
	return rangefeed.NewServer(rangefeed.Config{
		Clock: s.cfg.Clock, Engine: s.cfg.Engine, Log: s.log, Metrics: s.metrics.feeds,
		Find: func(id keyspace.RangeID) (*rangefeed.Feeds, error) {
			r, err := s.fed(id)
			if err != nil {
				return nil, err
			}
			return &r.feeds, nil
		},
	})
}

// handleFeeds serves bus method 21.
func (s *Store) handleFeeds(ctx context.Context, peer keyspace.NodeID, first []byte, st transport.Stream) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(s.ctx, cancel)
	defer stop()
	return s.feeds.Serve(ctx, peer, first, st)
}

// handleWatch answers bus method 22.
func (s *Store) handleWatch(ctx context.Context, _ keyspace.NodeID, payload []byte) ([]byte, error) {
	question, history, err := rangeapi.DecodeWatchRequest(payload)
	switch {
	case err != nil:
		return rangeapi.EncodeWatchError(rangeapi.BadRequest("%v", err)), nil
	case question != nil:
		applied, err := s.AwaitResolved(ctx, question)
		if err != nil {
			return rangeapi.EncodeWatchError(err), nil
		}
		return rangeapi.EncodeResolved(applied), nil
	}
	p, err := s.History(history)
	if err != nil {
		return rangeapi.EncodeWatchError(err), nil
	}
	return p.Encode(), nil
}

// AwaitResolved is Replica.AwaitResolved of the range that q names.
func (s *Store) AwaitResolved(ctx context.Context, q *rangeapi.ResolvedRequest) (rangeapi.FeedPosition, error) {
	r, err := s.fed(q.Range)
	if err != nil {
		return rangeapi.FeedPosition{}, err
	}
	return r.AwaitResolved(ctx, q)
}

// History returns a page of events of the range that q names.
func (s *Store) History(q *rangeapi.HistoryRequest) (*rangeapi.HistoryPage, error) {
	r, err := s.fed(q.Range)
	if err != nil {
		return nil, err
	}
	return r.feeds.History(q)
}

// fed returns the replica of a range whose events a gateway asks for.
func (s *Store) fed(id keyspace.RangeID) (*Replica, error) {
	if r := s.Replica(id); r != nil {
		return r, nil
	}
	return nil, kverror.New(kverror.RangeNotHere, "range %s on node %s", id, s.cfg.Self)
}

// feedSource implements rangefeed.Source.
type feedSource struct{ r *Replica }

// View implements rangefeed.Source.
func (s feedSource) View(g keyspace.Generation, from keyspace.Revision) (rangefeed.View, error) {
	r := s.r
	switch {
	case r.stopped:
		return rangefeed.View{}, r.ended
	case r.doubt != nil:
		return rangefeed.View{}, kverror.New(kverror.Busy, "range %s: its replicas have different hashes", r.id)
	case r.rec.Generation == 0:
		return rangefeed.View{}, kverror.New(kverror.RangeNotHere, "range %s is empty on node %s", r.id, r.store.cfg.Self)
	case g > r.rec.Generation:
		return rangefeed.View{}, r.errorLocked(kverror.Busy, fmt.Sprintf("range %s has generation %d yet", r.id, r.rec.Generation))
	case g < r.rec.Generation:
		return rangefeed.View{}, r.errorLocked(kverror.WrongRange, fmt.Sprintf("range %s has generation %d", r.id, r.rec.Generation))
	}
	if err := kept(&r.rec, from); err != nil {
		return rangefeed.View{}, err
	}
	return rangefeed.View{Last: r.rec.LastRevision, Resolved: r.resolved, Position: r.positionLocked(), Span: r.rec.Span}, nil
}

// StillShows implements rangefeed.Source.
func (s feedSource) StillShows(g keyspace.Generation, from keyspace.Revision) error {
	rec, err := s.shown(g)
	if err != nil {
		return err
	}
	return kept(&rec, from)
}

// Compacted implements rangefeed.Source.
func (s feedSource) Compacted(g keyspace.Generation) (keyspace.Revision, error) {
	rec, err := s.shown(g)
	if err != nil {
		return 0, err
	}
	return rec.CompactedIn(s.r.store.Compacted()), nil
}

// shown returns the record of what the store shows, if that is the range at the generation. The
// tables of a snapshot are in the store before the replica learns of it, so the snapshot's record
// says what it has compacted.
func (s feedSource) shown(g keyspace.Generation) (command.Record, error) {
	r := s.r
	r.mu.Lock()
	_, err := s.View(g, keyspace.MaxRevision)
	rec, receiving := r.rec, r.upkeep.receiving
	r.mu.Unlock()
	if err != nil || !receiving {
		return rec, err
	}
	rec, _, err = r.store.lifecycle.Record(r.id)
	switch {
	case err != nil:
		return rec, fmt.Errorf("shard: range %s: the record that a snapshot may have replaced: %w", r.id, err)
	case rec.Generation != g:
		return rec, kverror.New(kverror.Busy, "range %s: a snapshot brings generation %d", r.id, rec.Generation)
	}
	return rec, nil
}

// kept says whether the store still has all events from the revision on. If any are below
// the compacted revision, some of them are gone.
func kept(rec *command.Record, from keyspace.Revision) error {
	if from >= rec.Compacted || from > rec.LastRevision {
		return nil
	}
	return &kverror.Error{
		Kind: kverror.Compacted, CompactRevision: rec.Compacted,
		Detail: fmt.Sprintf("range %s is asked for events from revision %d on", rec.RangeID, from),
	}
}

// endFeedsAtSplitLocked ends all feeds behind what was applied before the split. Parent and
// child are other ranges now, and their feeds begin where these ended.
func (r *Replica) endFeedsAtSplitLocked(p *rangefeed.Publication, sp *appliedSplit) {
	r.feeds.Publish(p)
	err := r.errorLocked(kverror.WrongRange, "the range was split")
	err.Descriptors = append(err.Descriptors, sp.descriptor())
	r.feeds.End(err)
}

// feedsAfterSnapshotLocked makes the feeds read the store again, since the snapshot has
// skipped entries. If the range has changed, they end.
func (r *Replica) feedsAfterSnapshotLocked(old keyspace.Generation) {
	if r.rec.Generation != old {
		r.feeds.End(r.errorLocked(kverror.WrongRange, "a snapshot brought another generation"))
		return
	}
	r.feeds.Restart()
}
