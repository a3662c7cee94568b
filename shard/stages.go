package shard

import (
	"context"
	"errors"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/rangeapi/stages"
	"github.com/skeindb/skein/shard/command"
	"github.com/skeindb/skein/shard/pipeline"
)

// waits are the stages of a read, which has a goroutine of its own. Only a read that waits reads the clock.
type waits struct {
	stages.Times
	// lock is the one for which it waited last.
	lock  *command.Lock
	turns uint32
}

// await waits for the channel as clock.Await does, in a stage of the read. It goes on in the stage of evaluation.
func await[T any](ctx context.Context, r *Replica, w *waits, in stages.Stage, ch <-chan T) (v T, err error) {
	select {
	case v = <-ch:
		return v, nil
	default:
	}
	w.Enter(in, clock.StartStopwatch().After(r.store.pipes.Epoch))
	v, err = clock.Await(ctx, ch)
	w.Enter(stages.Evaluation, clock.StartStopwatch().After(r.store.pipes.Epoch))
	return v, err
}

// records says whether to make a record of a request that took so long. A request of this node that has none because of
// others is told so.
func (s *Store) records(ctx context.Context, took time.Duration, traced bool) bool {
	if traced || took < stages.Threshold {
		return traced
	}
	ok, _ := s.recorded.Take(s.cfg.Clock.Now(), stages.PerSecond)
	if !ok {
		stages.Of(ctx).Asked(s.cfg.Self)
	}
	return ok
}

// recordRead returns the record of a read that took long or asks for it.
func (r *Replica) recordRead(ctx context.Context, q *rangeapi.Request, w *waits, watch clock.Stopwatch, took time.Duration) *stages.Record {
	if !r.store.records(ctx, took, q.Traced) {
		return nil
	}
	record := w.Record(watch.After(r.store.pipes.Epoch) + took)
	record.Range, record.Node, record.Turns = r.id, r.store.cfg.Self, w.turns
	if w.lock != nil {
		record.Lock = w.lock.Name.String()
	}
	return record
}

// recordCall is recordRead of a call.
func (r *Replica) recordCall(ctx context.Context, c *pipeline.Call, took time.Duration) *stages.Record {
	if !r.store.records(ctx, took, c.Req.Traced) {
		return nil
	}
	record := r.pipe.Record(c, took)
	record.Node = r.store.cfg.Self
	return record
}

// noteGone has the node keep the record of another node's request that has given up: its answer does not arrive there.
// One that is traced has a record even if it was fast.
func (s *Store) noteGone(what string, record *stages.Record, err error) {
	gone := errors.Is(err, kverror.Canceled) || errors.Is(err, kverror.DeadlineExceeded)
	if gone && record != nil && record.Took >= stages.Threshold && s.cfg.Slow != nil {
		s.cfg.Slow(record.Alone(what))
	}
}
