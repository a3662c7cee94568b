package router

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi/stages"
)

// unheard is a sequencer without a quorum: it answers no question for a revision, and none for the current one if all is set.
type unheard struct {
	*ranges
	all atomic.Bool
	// late are the questions without an answer.
	late []func(keyspace.SequenceAnswer)
}

func (u *unheard) Sequence(req keyspace.SequenceRequest, done func(keyspace.SequenceAnswer)) {
	if req.Count == 0 && !u.all.Load() {
		u.ranges.Sequence(req, done)
		return
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	u.late = append(u.late, done)
}

// Where the sequencer does not answer until a request ends, that is named, and not the gateway.
func TestASequencerThatDoesNotAnswerIsNamed(t *testing.T) {
	for _, all := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			f, r := newRanges()
			u := &unheard{ranges: f}
			u.all.Store(all)
			r.cfg.Sequencer = u
			ctx, cancel := context.WithTimeout(internal(t), 700*time.Millisecond)
			defer cancel()
			watch := clock.StartStopwatch()
			call := stages.NewCall(ctx, watch, false)
			var err error
			if all {
				_, err = r.current(call, clock.Await[keyspace.SequenceAnswer])
			} else {
				_, err = r.Txn(call, &pb.TxnRequest{Success: []*pb.RequestOp{putAt("a", "v"), putAt("k", "v")}})
			}
			if !errors.Is(kverror.Of(err), kverror.DeadlineExceeded) {
				t.Errorf("all %t: %v", all, err)
			}
			const cause = "waited 700 ms for the current revision: no sequencer answered"
			if s, _ := call.Slow(2, watch.Elapsed()); s.Cause != cause {
				t.Errorf("all %t: %q, want %q", all, s.Cause, cause)
			}
			u.mu.Lock()
			late := u.late
			u.mu.Unlock()
			for _, done := range late {
				done(keyspace.SequenceAnswer{Err: errNoSequencer})
			}
			afterwards()
		})
	}
}
