package replicas

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/raftgroup/lifecycle"
)

// Ask implements lifecycle.Opener.
func (m *Manager) Ask(ctx context.Context, u lifecycle.Unknown) (keyspace.Descriptor, error) {
	return m.cfg.Look(ctx, u.From, u.Group.Range())
}

// untakenEvery is how often it is told that replicas are not taken.
const untakenEvery = 10 * time.Second

// OpenEmpty implements lifecycle.Opener: it opens an empty replica of a range whose span nobody
// holds here. A snapshot of its leader fills it.
func (m *Manager) OpenEmpty(ctx context.Context, u lifecycle.Unknown, d *keyspace.Descriptor) error {
	if d.Generation == 0 {
		return nil
	}
	for _, r := range m.cfg.Owner.Replicas() {
		if s := r.State(); s.Holds() && s.Descriptor.Span.Overlaps(d.Span) {
			// The split that makes it is still to be applied here.
			return nil
		}
	}
	// The question took its time. A split that was applied meanwhile has written the first record
	// before its parent's span shrank: looked at in this order, nothing is missed.
	id := u.Group.Range()
	if opened, err := m.openDurable(ctx, id); opened || err != nil {
		return err
	}
	if m.cfg.Room != nil {
		if err := m.cfg.Room(1); err != nil {
			// Placement gives an operation up whose replica does not come. Until then the peer speaks on.
			if now := m.cfg.Clock.Now(); m.untaken == 0 || now.Sub(m.untaken) >= untakenEvery {
				m.untaken = now
				m.log.Warn("replicas are not taken", zap.Stringer("range", id), zap.Error(err))
			}
			return nil
		}
	}
	start := &Start{Range: id, Replica: u.To, Introduced: *d}
	err := m.cfg.Owner.Open(start)
	if errors.Is(err, raftgroup.ErrNoRecord) {
		// The split whose replay makes its record may be still to come. If nobody here has its span, none
		// will: the parent's replica went into quarantine before the split, and is removed.
		start.Unreadable = err
		err = m.ifUnheld(d.Span, func() error { return m.cfg.Owner.Open(start) })
	}
	if errors.Is(err, raftgroup.ErrExists) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open an empty replica: %w", err)
	}
	m.log.Info("opened an empty replica", zap.Stringer("range", id), zap.Uint64("replica", uint64(u.To)))
	return nil
}
