//go:build planted

package raftgroup

import (
	"sync/atomic"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/internal/mutation"
)

// mutationState is the host's state for the bugs of package mutation.
type mutationState struct{ ticked atomic.Int64 }

func (p *mutationState) tick(now clock.Time) { p.ticked.Store(int64(now)) }

// leaseClock reads the clock that leases are compared with. The bug takes the last tick
// for it: a stopped process has no ticks.
func (h *Host) leaseClock() clock.Time {
	if at := clock.Time(h.mutated.ticked.Load()); at != 0 && mutation.Is(mutation.LeaseByTicks) {
		return at
	}
	return h.cfg.Clock.Now()
}

// mutateReplay makes a range apply again an entry that its record says is applied.
func (g *Group) mutateReplay(a *engine.Applied) {
	base, _ := g.log.Base()
	if !mutation.Is(mutation.AppliedTwice) || g.id.IsSystem() || a.Index <= base || a.Index == a.ConfIndex {
		return
	}
	if term, err := g.log.Term(a.Index - 1); err == nil && term > 0 {
		a.Index, a.Term = a.Index-1, term
	}
}
