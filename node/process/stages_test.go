package process

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
)

// ended runs a node's work and ends it. It returns the duration, the log and the error.
func ended(node func(context.Context, *Stages) error) (took time.Duration, logged []observer.LoggedEntry, err error) {
	core, logs := observer.New(zap.ErrorLevel)
	ctx, cancel := context.WithCancel(context.Background())
	s := NewStages(clock.Virtual(), func(int) {})
	begun := time.Now()
	cancel()
	err = s.Run(ctx, zap.New(core), func() error { return node(ctx, s) })
	return time.Since(begun), logs.All(), err
}

// Whatever stage of a start or stop hangs, the process leaves, and says which. Stages that go
// on take as long as they take.
func TestAStageThatHangsIsLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		took, logged, err := ended(func(_ context.Context, s *Stages) error {
			for range 5 {
				s.Enter("a slow one")
				time.Sleep(StageTimeout - stagePoll - time.Millisecond)
			}
			return nil
		})
		if err != nil || len(logged) > 0 {
			t.Errorf("slow stages: %v after %v, %v", err, took, logged)
		}
		failed := errors.New("failed")
		if _, _, err := ended(func(context.Context, *Stages) error { return failed }); !errors.Is(err, failed) {
			t.Errorf("an error: %v", err)
		}
		release := make(chan struct{})
		defer close(release)
		took, logged, err = ended(func(_ context.Context, s *Stages) error {
			s.Enter("one that hangs")
			<-release
			return nil
		})
		if !errors.Is(err, ErrStuck) || !strings.Contains(err.Error(), "one that hangs") || took > StageTimeout+2*stagePoll {
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
		s := NewStages(clock.Virtual(), func(code int) { exited <- code })
		begun := time.Now()
		go func() {
			_ = s.Run(ctx, log, func() error {
				log.Info("stopping")
				return nil
			})
		}()
		if code, took := <-exited, time.Since(begun); code != 1 || took > StageTimeout+2*stagePoll+exitDelay {
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
		s := NewStages(clock.Virtual(), func(int) {})
		err := s.Run(context.Background(), zap.NewNop(), func() error {
			time.Sleep(24 * time.Hour)
			s.End() // by itself, with its disk
			time.Sleep(StageTimeout / 2)
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	})
}
