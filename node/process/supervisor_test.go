package process

import (
	"context"
	"errors"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/wake"
	"github.com/skeindb/skein/node/process/processtest"
)

// supervised starts a supervisor with that watchdog in a bubble.
func supervised(t *testing.T, watchdog time.Duration) (*Supervisor, *Stages, *processtest.Manager) {
	t.Helper()
	m, s := &processtest.Manager{}, NewStages(clock.Virtual(), func(int) {})
	v := NewSupervisor(clock.Virtual(), s, watchdog, zap.NewNop(), m.Tell)
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { v.Run(ctx) })
	t.Cleanup(func() { cancel(); wg.Wait() })
	return v, s, m
}

// A start and a stop that take long get time as long as they take, and READY comes once.
func TestTheManagerIsTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v, s, m := supervised(t, 0)
		s.Enter("open the storage")
		time.Sleep(time.Hour)
		const more = "EXTEND_TIMEOUT_USEC=30000000\nSTATUS="
		said := m.Take()
		if n := strings.Count(said, more+"open the storage"); n < 359 || n > 361 {
			t.Errorf("in an hour of replay it got more time %d times", n)
		}
		if strings.Contains(said, "READY") || strings.Contains(said, "WATCHDOG") {
			t.Errorf("while it starts: %s", said)
		}
		v.Serving(func() bool { return false })
		if said := m.Take(); said != "READY=1\nSTATUS=serves clients" {
			t.Errorf("when it serves: %q", said)
		}
		time.Sleep(time.Hour)
		if said := m.Take(); said != "" {
			t.Errorf("while it serves, without a watchdog: %q", said)
		}
		s.Enter("end the requests of clients")
		v.Stopping()
		if said := m.Take(); said != "STOPPING=1\n"+more+"end the requests of clients" {
			t.Errorf("when it stops: %q", said)
		}
		time.Sleep(extendEvery)
		if said := m.Take(); said != more+"end the requests of clients" {
			t.Errorf("while it stops: %q", said)
		}
	})
}

// A manager that cannot be told is reported once, and does not keep the node from anything.
func TestAManagerThatIsGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		core, logs := observer.New(zap.WarnLevel)
		failed, s := 0, NewStages(clock.Virtual(), func(int) {})
		v := &Supervisor{clock: clock.Virtual(), stage: s.At, log: zap.New(core), changed: wake.New(), tell: func(string) error {
			failed++
			return errors.New("gone")
		}}
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		v.Run(ctx)
		if logs.Len() != 1 || failed < 100 {
			t.Errorf("%d messages failed, and %d lines say so", failed, logs.Len())
		}
	})
}

// What could not be told is told once more: without READY the manager would end a node that serves.
func TestReadyIsToldAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var told []string
		var back atomic.Bool
		s := NewStages(clock.Virtual(), func(int) {})
		v := &Supervisor{clock: clock.Virtual(), stage: s.At, log: zap.NewNop(), changed: wake.New(), tell: func(text string) error {
			if !back.Load() {
				return errors.New("gone")
			}
			told = append(told, text)
			return nil
		}}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			v.Run(ctx)
		}()
		v.Serving(func() bool { return false })
		time.Sleep(time.Minute)
		back.Store(true)
		time.Sleep(2 * extendEvery)
		cancel()
		<-ended
		if len(told) == 0 || !strings.HasPrefix(told[0], "READY=1") || strings.Count(strings.Join(told, "\n"), "READY=1") != 1 {
			t.Errorf("told: %q", told)
		}
	})
}

// Over a real socket, as systemd has it.
func TestNotifySocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), "notify")
	socket, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer socket.Close()
	t.Setenv("NOTIFY_SOCKET", path)
	t.Setenv("WATCHDOG_USEC", "60000000")
	s := NewStages(clock.System(), func(int) {})
	v, release := Supervise(clock.System(), s, zap.NewNop())
	defer release()
	next := func() string {
		b := make([]byte, 4096)
		n, err := socket.Read(b)
		if err != nil {
			t.Fatal(err)
		}
		return string(b[:n])
	}
	if got := next(); got != "EXTEND_TIMEOUT_USEC=30000000\nSTATUS=start\nWATCHDOG=1" {
		t.Errorf("first %q", got)
	}
	v.Serving(func() bool { return true })
	if got := next(); got != "READY=1\nSTATUS=serves clients" {
		t.Errorf("then %q", got)
	}
	v.Stopping()
	if got := next(); !strings.HasPrefix(got, "STOPPING=1\n") {
		t.Errorf("at the end %q", got)
	}
	t.Setenv("NOTIFY_SOCKET", "")
	if v, release := Supervise(clock.System(), s, zap.NewNop()); v != nil {
		release()
		t.Error("somebody is told where nobody asks")
	}
}
