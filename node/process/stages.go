package process

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
)

const (
	// StageTimeout is how long one stage of a start or stop may take once the node is to end.
	// The timeouts within a stage are shorter. But a store may have to flush its memory to disks
	// that others use too.
	StageTimeout = 30 * time.Second
	// stagePoll lies between two looks at the stage.
	stagePoll = time.Second
	// exitDelay is how long the process takes to say so: it may be the log that hangs.
	exitDelay = 5 * time.Second
	// stacksBytes bounds what is logged of the goroutines of a node that does not end.
	stacksBytes = 256 << 10
)

// ErrStuck says that a node did not end in time, and that its process exits anyway.
var ErrStuck = errors.New("the node does not end")

// Stages say how far a node is in its start or stop, for who waits for its end. A nil one
// takes no note.
type Stages struct {
	clock clock.Clock
	// exit ends the process where it cannot even say that it does.
	exit func(code int)

	mu     sync.Mutex
	name   string
	since  clock.Time
	ending chan struct{}
	ends   bool // ending is closed
}

// NewStages returns those of a node that begins its start. exit ends the process.
func NewStages(c clock.Clock, exit func(code int)) *Stages {
	return &Stages{clock: c, exit: exit, name: "start", since: c.Now(), ending: make(chan struct{})}
}

// Enter says that a stage begins, and the one before is over.
func (s *Stages) Enter(name string) { s.EnterFor(name, 0) }

// EnterFor is Enter for a stage that lasts so long by intention: time counts from then on.
func (s *Stages) EnterFor(name string, meant time.Duration) {
	if s == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.name, s.since = name, s.clock.Now().Add(meant)
}

// End says that the node is to end, in whatever stage it is: from now on time counts.
func (s *Stages) End() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.ends {
		s.ends, s.since = true, s.clock.Now()
		close(s.ending)
	}
}

// At returns the stage, and for how long it counts.
func (s *Stages) At() (name string, took time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.name, s.clock.Now().Sub(s.since)
}

// Run runs a node until ctx ends or the node does, and returns the node's error. If the node is
// to end and a stage of that takes longer than StageTimeout, Run returns without it. The process
// should then leave as after a crash, which loses nothing acknowledged. Only this case leaves a
// goroutine behind.
func (s *Stages) Run(ctx context.Context, log *zap.Logger, node func() error) error {
	done := make(chan error, 1)
	go func() { done <- node() }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		s.End()
	case <-s.ending:
	}
	timer := s.clock.NewTimer(stagePoll)
	defer timer.Stop()
	for {
		select {
		case err := <-done:
			return err
		case <-timer.C():
		}
		if stage, took := s.At(); took >= StageTimeout {
			// For the caller's words too, so that nothing stops it.
			s.clock.AfterFunc(exitDelay, func() { s.exit(1) })
			stacks := make([]byte, stacksBytes)
			stacks = stacks[:runtime.Stack(stacks, true)]
			log.Error("the node does not end, and the process leaves without that: what was acknowledged is stored",
				zap.String("stage", stage), zap.Duration("after", took), zap.ByteString("goroutines", stacks))
			return fmt.Errorf("%w: %q takes longer than %v", ErrStuck, stage, StageTimeout)
		}
		timer.Reset(stagePoll)
	}
}
