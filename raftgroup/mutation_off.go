//go:build !planted

package raftgroup

import (
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/engine"
)

// mutationState is the host's state for the bugs of package mutation: none.
type mutationState struct{}

func (mutationState) tick(clock.Time) {}

// leaseClock reads the clock that leases are compared with.
func (h *Host) leaseClock() clock.Time { return h.cfg.Clock.Now() }

func (*Group) mutateReplay(*engine.Applied) {}
