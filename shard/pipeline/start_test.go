package pipeline

import (
	"context"
	"errors"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
)

// started is a call that nobody waits for, and what was said of its answers.
type started struct {
	*Call
	said []bool
}

// start starts a put, if it may be.
func (w *world) start(ctx context.Context, key string) (*started, bool) {
	w.t.Helper()
	s := &started{}
	s.Call = w.p.NewRequest(ctx, &rangeapi.Request{Range: 7, Generation: 1, Op: &pb.PutRequest{Key: []byte(key)}})
	return s, w.p.Start(s.Call, clock.StartStopwatch(), func(ok bool) {
		if !w.mu.TryLock() {
			w.t.Error("an answer is told with mu")
			return
		}
		w.mu.Unlock()
		if !s.Call.answered() {
			w.t.Error("told before the answer is there")
		}
		s.said = append(s.said, ok)
	})
}

// told checks what was said of the answer, once, and what Wait returns then.
func (w *world) told(when string, s *started, want error) {
	w.t.Helper()
	if len(s.said) != 1 || s.said[0] != (want == nil) {
		w.t.Errorf("%s: told %v", when, s.said)
	}
	resp, err := w.p.Wait(s.Call)
	if want == nil && (err != nil || resp.Op.(*pb.PutResponse).GetHeader().GetRevision() == 0) || want != nil && !errors.Is(err, want) {
		w.t.Errorf("%s: %v, %v", when, resp, err)
	}
}

// A call that nobody waits for is told once of its answer, when that is there: its entry is applied, it was discarded, or its fate
// is known after its leadership was lost.
func TestStart(t *testing.T) {
	w := newWorld(t)
	a, ok := w.start(t.Context(), "a")
	if !ok {
		t.Fatal("refused")
	}
	w.pass()
	w.settle(nil)
	if len(a.said) != 0 {
		t.Error("told before its entry is applied")
	}
	w.apply(true)
	w.told("applied", a, nil)

	b, _ := w.start(t.Context(), "b")
	w.pass()
	w.settle(nil)
	c, _ := w.start(t.Context(), "c")
	w.lose()
	w.told("not evaluated", c, kverror.NotLeader)
	if len(b.said) != 0 {
		t.Error("told while the log decides")
	}
	w.become(6)
	w.told("a newer term", b, kverror.Dropped)
	w.empty()
}

// A call is not started where it is refused or would have to wait before its admission, and leaves nothing.
func TestStartRefused(t *testing.T) {
	w := newWorld(t)
	w.lose()
	if _, ok := w.start(t.Context(), "a"); ok {
		t.Error("without leadership")
	}
	w.become(7)
	w.waits = make(chan struct{})
	if s, ok := w.start(t.Context(), "a"); ok || len(s.said) != 0 {
		t.Error("while the range changes")
	}
	w.waits = nil
	w.empty()
}

// A call that nobody waits for meets a lock. Its context ends, and whoever waits for it then ends it. That is told too.
func TestStartBehindALock(t *testing.T) {
	w := newWorld(t)
	w.lock("a")
	ctx, cancel := context.WithCancel(t.Context())
	s, _ := w.start(ctx, "a")
	w.pass()
	w.open("a lock is in the way", s.Call, placeBlocked)
	cancel()
	if _, err := w.p.Wait(s.Call); !errors.Is(err, kverror.Canceled) || len(s.said) != 1 || s.said[0] {
		t.Errorf("%v, told %v", err, s.said)
	}
}
