package node

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/watch"
)

// ended runs a node's work and ends it. It returns the duration, the log and the error.
func ended(node func(context.Context, *stages) error) (took time.Duration, logged []observer.LoggedEntry, err error) {
	core, logs := observer.New(zap.ErrorLevel)
	ctx, cancel := context.WithCancel(context.Background())
	s := newStages(clock.Virtual(), func(int) {})
	begun := time.Now()
	cancel()
	err = s.run(ctx, zap.New(core), func() error { return node(ctx, s) })
	return time.Since(begun), logs.All(), err
}

// Whatever stage of a start or stop hangs, the process leaves, and says which. Stages that go
// on take as long as they take.
func TestAStageThatHangsIsLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		took, logged, err := ended(func(_ context.Context, s *stages) error {
			for range 5 {
				s.enter("a slow one")
				time.Sleep(stageTimeout - stagePoll - time.Millisecond)
			}
			return nil
		})
		if err != nil || len(logged) > 0 {
			t.Errorf("slow stages: %v after %v, %v", err, took, logged)
		}
		failed := errors.New("failed")
		if _, _, err := ended(func(context.Context, *stages) error { return failed }); !errors.Is(err, failed) {
			t.Errorf("an error: %v", err)
		}
		release := make(chan struct{})
		defer close(release)
		took, logged, err = ended(func(_ context.Context, s *stages) error {
			s.enter("one that hangs")
			<-release
			return nil
		})
		if !errors.Is(err, errStuck) || !strings.Contains(err.Error(), "one that hangs") || took > stageTimeout+2*stagePoll {
			t.Errorf("%v after %v", err, took)
		}
		if len(logged) != 1 || logged[0].ContextMap()["stage"] != "one that hangs" || !strings.Contains(logged[0].ContextMap()["goroutines"].(string), "goroutine ") {
			t.Errorf("logged %v", logged)
		}
	})
}

// The process leaves also where it is the log that hangs.
func TestALogThatHangsIsLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release, exited := make(chan struct{}), make(chan int, 1)
		log := zap.New(zapcore.NewCore(zapcore.NewJSONEncoder(zapcore.EncoderConfig{}), hung{release}, zap.InfoLevel))
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		s := newStages(clock.Virtual(), func(code int) { exited <- code })
		begun := time.Now()
		go func() {
			_ = s.run(ctx, log, func() error {
				log.Info("stopping")
				return nil
			})
		}()
		if code, took := <-exited, time.Since(begun); code != 1 || took > stageTimeout+2*stagePoll+exitDelay {
			t.Errorf("left with %d after %v", code, took)
		}
		close(release)
	})
}

// hung is a log that takes nothing in until it is released.
type hung struct{ release chan struct{} }

func (h hung) Write(p []byte) (int, error) { <-h.release; return len(p), nil }
func (h hung) Sync() error                 { return nil }

// A node that runs is not to end: no stage is too long for it.
func TestANodeThatRunsIsNotLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStages(clock.Virtual(), func(int) {})
		err := s.run(context.Background(), zap.NewNop(), func() error {
			time.Sleep(24 * time.Hour)
			s.end() // by itself, with its disk
			time.Sleep(stageTimeout / 2)
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	})
}

// A stop ends by itself, and each stage stays below the time after which the process would exit
// anyway. That holds with a hanging disk, with silent peers and with watchers that read nothing.
func TestAStopIsBounded(t *testing.T) {
	const ranges = 4
	for _, c := range []struct {
		name string
		// hang has something hang for the first node, until the returned function is called.
		hang func(r *rig) (release func())
	}{
		{"peers", func(r *rig) func() {
			r.crash(r.nodes[1:]...)
			return func() {}
		}},
		{"disk", func(r *rig) func() { return r.nodes[0].disk.stall() }},
		{"watchers", func(r *rig) func() {
			n := r.nodes[0]
			s := n.core.Watches().NewStream()
			if _, _, err := s.Watch(r.t.Context(), 1, watch.Request{Span: keyspace.Span{Start: []byte("k"), End: []byte("l")}}); err != nil {
				r.t.Fatal(err)
			}
			for range 20 {
				r.spread(n, ranges, strings.Repeat("v", 32<<10))
			}
			return s.Close
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			bubble(t, 3, borders(ranges), func(o *Options) { o.stages = newStages(o.Clock, func(int) {}) }, func(r *rig) {
				n := r.nodes[0]
				r.spread(n, ranges, "v")
				release := c.hang(r)
				core := n.core
				begun, done := time.Now(), make(chan struct{})
				ctx, cancel := context.WithCancel(context.Background())
				cancel()
				err := core.o.stages.run(ctx, zap.NewNop(), func() error {
					defer close(done)
					return core.Stop(context.Background())
				})
				if took := time.Since(begun); errors.Is(err, errStuck) || took > time.Minute {
					t.Errorf("%v after %v", err, took)
				}
				release()
				<-done
				n.set(nil)
			})
		})
	}
}
