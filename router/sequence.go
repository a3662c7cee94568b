package router

import (
	"context"
	"errors"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi/stages"
)

// current asks the sequencer for the current revision. It refuses with AccessChanged where the context's
// permit has ended.
func (r *Router) current(ctx context.Context, await awaiter) (keyspace.SequenceAnswer, error) {
	got := make(chan keyspace.SequenceAnswer, 1)
	permit, _ := keyspace.PermitOf(ctx)
	r.cfg.Sequencer.Sequence(keyspace.SequenceRequest{Permit: permit, Direct: true}, func(a keyspace.SequenceAnswer) { got <- a })
	watch := clock.StartStopwatch()
	a, err := await(ctx, got)
	if err != nil {
		noteUnanswered(stages.Of(ctx), watch.Elapsed())
		return a, err
	}
	if a.Took > noteWait {
		stages.Of(ctx).Waited(a.Took, a.Err)
	}
	if a.Err == nil {
		r.coordinator.observe(a.Current)
	}
	return a, a.Err
}

// noteUnanswered notes a wait for the sequencer that ended without its answer.
func noteUnanswered(call *stages.Call, waited time.Duration) {
	if waited > noteWait {
		call.Waited(waited, errNoSequencer)
	}
}

var errNoSequencer = errors.New("no sequencer answered")

// noteWait is from when on a wait for the current revision is noted.
const noteWait = stages.Threshold / 10

// currentOrWait is current, repeated until ctx ends if the sequencer cannot be reached. Asking
// changes nothing.
func (r *Router) currentOrWait(ctx context.Context) (keyspace.SequenceAnswer, error) {
	// The first answer, or a refusal, comes well within the request's time.
	await := clock.AwaitSoon[keyspace.SequenceAnswer]
	for pause := firstPause; ; pause = min(2*pause, lastPause) {
		a, err := r.current(ctx, await)
		await = clock.Await[keyspace.SequenceAnswer]
		if err == nil {
			return a, nil
		}
		switch e := kverror.Of(err); {
		case ctx.Err() != nil:
			return a, err
		case e.Kind == kverror.TooManyRequests || e.Kind == kverror.Internal || e.Kind == kverror.AccessChanged:
			return a, err
		}
		sleep := clock.Sleep(ctx, r.cfg.Clock, pause)
		stages.Of(ctx).Waited(pause, err)
		if sleep != nil {
			return a, err
		}
	}
}

// awaiter is clock.Await or clock.AwaitSoon.
type awaiter func(context.Context, <-chan keyspace.SequenceAnswer) (keyspace.SequenceAnswer, error)
