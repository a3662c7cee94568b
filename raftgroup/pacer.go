package raftgroup

import (
	"slices"
	"sync"
)

// pacer hands out wake-ups at a bounded rate, so that the death of a node with many groups does not overload the others.
type pacer struct {
	h  *Host
	mu sync.Mutex
	// queue holds each group at most once (Group.public.wakeWanted).
	queue []*Group
	// credit is the unused rest of the last tick's share, in groups times 1e9.
	credit int64
}

func (p *pacer) init(h *Host) { p.h = h }

// add queues groups in the order of their ids, so that all survivors of a node's death work on the same groups at the same time.
func (p *pacer) add(groups []*Group) {
	slices.SortFunc(groups, func(a, b *Group) int {
		if a.id.IsSystem() != b.id.IsSystem() {
			return boolInt(b.id.IsSystem()) - boolInt(a.id.IsSystem())
		}
		return int(min(max(int64(a.id-b.id), -1), 1))
	})
	for _, g := range groups {
		if g.id.IsSystem() {
			g.w.flag(g, flagWakePaced)
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, g := range groups {
		if !g.id.IsSystem() && g.public.wakeWanted.CompareAndSwap(0, 1) {
			p.queue = append(p.queue, g)
		}
	}
}

// tick wakes this tick's share.
func (p *pacer) tick() {
	p.mu.Lock()
	share := int64(p.h.cfg.WakesPerSecond) * int64(p.h.cfg.TickInterval)
	p.credit = min(p.credit+share, max(share, 1e9))
	n := min(int(p.credit/1e9), len(p.queue))
	p.credit -= int64(n) * 1e9
	if n == len(p.queue) && n > 0 {
		p.credit = min(p.credit, share)
	}
	batch := slices.Clone(p.queue[:n])
	rest := copy(p.queue, p.queue[n:])
	clear(p.queue[rest:])
	p.queue = p.queue[:rest]
	p.mu.Unlock()
	for _, g := range batch {
		g.w.flag(g, flagWakePaced)
	}
}
