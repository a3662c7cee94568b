package replicas

import (
	"context"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/shard/command"
)

// child is a child of a split whose first record is visible. lead says that the parent is led
// here.
type child struct {
	id   keyspace.RangeID
	lead bool
}

// BootstrapChild writes the first record of a split's child into the parent's batch. A child that
// is here already, or was once, stays as it is. After a crash the parent's log is replayed, and the
// child's own state may be newer by then (traps 2, 4, 28). Its votes are in the wal and not touched.
func (m *Manager) BootstrapChild(b *engine.Batch, rec *command.Record, replicas []keyspace.Replica, txns *command.TxnState) error {
	self, member := on(replicas, m.cfg.Self)
	if !member || m.cfg.Owner.Replica(rec.RangeID) != nil {
		return nil
	}
	g := rec.RangeID.Group()
	left, err := m.Tombstones.Left(g)
	if err != nil {
		return err
	}
	if self <= left {
		// The child was moved away before the parent came to its split here (trap 3).
		return deleteSpan(b, rec.Span, txns)
	}
	_, have, err := m.cfg.Engine.Applied(g)
	if err != nil || have {
		return err
	}
	if err := m.cfg.Groups.Bootstrap(b, g, replicas, command.AppendRecord(nil, rec)); err != nil {
		return err
	}
	if err := txns.Write(b, rec.RangeID); err != nil {
		return err
	}
	m.ClaimHeld(rec.RangeID, rec.Span)
	return nil
}

// OpenChild has a child opened whose first record is visible. If the parent is led here, the child
// stands for election at once: nobody serves its span before. OpenChild does not block, and
// asks no peer: children do not wait behind replicas of which only peers know.
func (m *Manager) OpenChild(id keyspace.RangeID, lead bool) {
	m.mu.Lock()
	m.children = append(m.children, child{id, lead})
	m.mu.Unlock()
	m.kickChildren.Set()
}

// openChildren is the goroutine that opens children of splits.
func (m *Manager) openChildren(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-m.kickChildren:
		}
		m.mu.Lock()
		children := m.children
		m.children = nil
		m.mu.Unlock()
		for _, c := range children {
			if ctx.Err() != nil {
				return
			}
			if err := m.openChild(c); err != nil {
				m.log.Warn("open the child of a split", zap.Stringer("range", c.id), zap.Error(err))
			}
		}
	}
}

func (m *Manager) openChild(c child) error {
	// Without a record this node is not a member, or no more.
	if opened, err := m.openMade(c.id); err != nil || !opened {
		return err
	}
	if r := m.cfg.Owner.Replica(c.id); r != nil && c.lead {
		m.campaign(r, firstCampaigns)
	}
	return nil
}

// The first campaign of a new range may come too early for its followers, or be lost with a message.
// A few more follow, so that the span does not wait for an election timeout.
const (
	firstCampaigns     = 10
	firstCampaignPause = 100 * time.Millisecond
)

// campaign has the replica stand for election, and again after a pause while it knows no leader.
func (m *Manager) campaign(r Replica, times int) {
	r.Campaign()
	if times--; times == 0 {
		return
	}
	m.cfg.After(firstCampaignPause, func() {
		if s := r.State(); !s.KnowsLeader {
			m.campaign(r, times)
		}
	})
}
