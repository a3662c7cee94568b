package node

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/node/process"
	"github.com/skeindb/skein/node/process/processtest"
	"github.com/skeindb/skein/watch"
)

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
			var s *process.Stages // of the first node
			bubble(t, 3, borders(ranges), func(o *Options) {
				if s == nil {
					s = process.NewStages(o.Clock, func(int) {})
					o.Stage = s.Enter
				}
			}, func(r *rig) {
				n := r.nodes[0]
				r.spread(n, ranges, "v")
				release := c.hang(r)
				core := n.core
				begun, done := time.Now(), make(chan struct{})
				ctx, cancel := context.WithCancel(context.Background())
				cancel()
				err := s.Run(ctx, zap.NewNop(), func() error {
					defer close(done)
					return core.Stop(context.Background())
				})
				if took := time.Since(begun); errors.Is(err, process.ErrStuck) || took > time.Minute {
					t.Errorf("%v after %v", err, took)
				}
				release()
				<-done
				n.set(nil)
			})
		})
	}
}

// The watchdog is fed at least twice in its time, and not while the disk hangs.
func TestTheWatchdogBitesOnAHangingDisk(t *testing.T) {
	bubble(t, 1, nil, nil, func(r *rig) {
		const watchdog = 20 * time.Second
		m := &processtest.Manager{}
		v := process.NewSupervisor(clock.Virtual(), process.NewStages(clock.Virtual(), func(int) {}), watchdog, zap.NewNop(), m.Tell)
		ctx, cancel := context.WithCancel(context.Background())
		var wg sync.WaitGroup
		wg.Go(func() { v.Run(ctx) })
		defer wg.Wait()
		defer cancel()
		n := r.nodes[0]
		if time.Sleep(watchdog); !strings.Contains(m.Take(), "WATCHDOG=1") {
			r.t.Error("a node that starts was not fed")
		}
		v.Serving(n.core.host.DiskStalled)
		m.Take()
		for range 10 {
			if time.Sleep(watchdog / 2); m.Take() == "" {
				r.t.Error("a node whose disk moves was not fed")
			}
		}
		release := n.disk.stall()
		r.wait(20*time.Second, "the node notices", n.core.host.DiskStalled)
		m.Take()
		time.Sleep(3 * watchdog)
		if said := m.Take(); said != "" {
			r.t.Errorf("while the disk hung: %q", said)
		}
		release()
		r.wait(20*time.Second, "the disk moves", func() bool { return !n.core.host.DiskStalled() })
		if time.Sleep(watchdog); m.Take() == "" {
			r.t.Error("behind a disk that hung it was not fed")
		}
		r.stop(n)
	})
}
