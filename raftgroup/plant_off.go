//go:build !planted

package raftgroup

import (
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/engine"
)

// planted is what the host keeps for the bugs of package plant: nothing.
type planted struct{}

func (planted) tick(clock.Time) {}

// leaseClock reads the clock that leases are compared with.
func (h *Host) leaseClock() clock.Time { return h.cfg.Clock.Now() }

func (*Group) plantReplay(*engine.Applied) {}
