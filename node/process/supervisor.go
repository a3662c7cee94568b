package process

import (
	"context"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/wake"
)

const (
	// extendEvery lies between two messages by which a start or stop that takes long gets more time,
	// extendBy is how much.
	extendEvery = 10 * time.Second
	extendBy    = 30 * time.Second
)

// A phase is what the service manager knows of a node's life.
type phase int

const (
	phaseStarting phase = iota
	phaseServing
	phaseStopping
)

// Supervisor tells the service manager how far the node is: systemd with Type=notify, or another one with its
// protocol (sd_notify(3)). A nil one tells nobody.
//
// The node is ready once its ports serve. It may lack a quorum then: units that are started one after the other would
// wait for ever. Only founders wait for each other, before their first start is complete. A start may replay much, and a stop has a bound for each stage, so both ask for more time as long
// as they take. While the node serves, the watchdog is fed only if wal and store move.
type Supervisor struct {
	clock clock.Clock
	stage func() (name string, took time.Duration)
	log   *zap.Logger
	// tell sends one message.
	tell func(state string) error
	// watchdog is after which silence the manager kills the process. 0 is never.
	watchdog time.Duration
	// changed wakes Run: it alone sends, because a manager that hangs must not keep the node from stopping.
	changed wake.Signal

	mu      sync.Mutex
	phase   phase
	stalled func() bool // whether wal or store do not move; set while the node serves
}

// Supervise returns the Supervisor of this process, nil if nobody wants to be told, and what ends it.
func Supervise(c clock.Clock, s *Stages, log *zap.Logger) (_ *Supervisor, release func()) {
	if os.Getenv("NOTIFY_SOCKET") == "" {
		return nil, func() {}
	}
	watchdog, err := daemon.SdWatchdogEnabled(false)
	if err != nil {
		log.Warn("the service manager's watchdog is not fed", zap.Error(err))
	}
	v := NewSupervisor(c, s, watchdog, log, func(state string) error {
		_, err := daemon.SdNotify(false, state)
		return err
	})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		v.Run(ctx)
	}()
	return v, func() {
		cancel()
		<-done
	}
}

// NewSupervisor returns one that tells by tell, and feeds a watchdog of that length; 0 is none.
func NewSupervisor(c clock.Clock, s *Stages, watchdog time.Duration, log *zap.Logger, tell func(state string) error) *Supervisor {
	return &Supervisor{clock: c, stage: s.At, log: log, watchdog: watchdog, changed: wake.New(), tell: tell}
}

// Serving says that the node serves. stalled says whether its wal or store do not move.
func (v *Supervisor) Serving(stalled func() bool) { v.set(phaseServing, stalled) }

// Stopping says that the node has begun to stop.
func (v *Supervisor) Stopping() { v.set(phaseStopping, nil) }

func (v *Supervisor) set(p phase, stalled func() bool) {
	if v == nil {
		return
	}
	v.mu.Lock()
	v.phase, v.stalled = p, stalled
	v.mu.Unlock()
	v.changed.Set()
}

// Run tells until ctx ends.
func (v *Supervisor) Run(ctx context.Context) {
	every := extendEvery
	if v.watchdog > 0 {
		every = min(every, v.watchdog/3)
	}
	timer := v.clock.NewTimer(every)
	defer timer.Stop()
	told, failed := phaseStarting, false
	for {
		state, now := v.state(told)
		if state != "" {
			err := v.tell(state)
			if err != nil && !failed {
				v.log.Warn("the service manager cannot be told how far the node is", zap.String("state", state), zap.Error(err))
			}
			failed = err != nil
		}
		if !failed {
			told = now // else it is told once more
		}
		select {
		case <-ctx.Done():
			return
		case <-v.changed:
		case <-timer.C():
		}
		timer.Reset(every)
	}
}

// state returns what the manager is to be told now, and which phase it knows then.
func (v *Supervisor) state(told phase) (string, phase) {
	v.mu.Lock()
	now, stalled := v.phase, v.stalled
	v.mu.Unlock()
	var lines []string
	if now != told {
		lines = append(lines, map[phase]string{phaseServing: daemon.SdNotifyReady + "\nSTATUS=serves clients", phaseStopping: daemon.SdNotifyStopping}[now])
	}
	if now != phaseServing {
		name, _ := v.stage()
		lines = append(lines, fmt.Sprintf("EXTEND_TIMEOUT_USEC=%d", extendBy.Microseconds()), "STATUS="+name)
	}
	if v.watchdog > 0 && (now != phaseServing || !stalled()) {
		lines = append(lines, daemon.SdNotifyWatchdog)
	}
	return strings.Join(lines, "\n"), now
}
