package replicas

import (
	"context"
	"fmt"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
)

// badTable is a table that was met with a bad block.
type badTable struct {
	*engine.Corruption
	dropped bool
	// dropping is closed at the end of the attempt to drop it that is under way, nil if none is.
	dropping chan struct{}
}

// KeepOutOf keeps those out of a bad table who have no data in it yet, until it is dropped. Their data
// would be in other tables, but nobody can tell it from the bad one's afterwards, and reads would
// meet that one. first says that it was not met before.
func (m *Manager) KeepOutOf(c *engine.Corruption) (first bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, b := range m.bad {
		// A reader of an old state of the store may meet the table after it was dropped.
		if b.Path == c.Path && b.Bounds.Overlaps(c.Bounds) {
			return false
		}
	}
	m.bad = append(m.bad, &badTable{Corruption: c})
	return true
}

// In returns the open replicas of which a bad table may hold data.
func (m *Manager) In(c *engine.Corruption) (in []keyspace.GroupID) {
	for _, r := range m.cfg.Owner.Replicas() {
		if s := r.State(); s.Holds() && c.MayHold(r.Range().Group(), s.Descriptor.Span) {
			in = append(in, r.Range().Group())
		}
	}
	return in
}

// DropTable drops a bad table that KeepOutOf knows, if nobody has data in it.
func (m *Manager) DropTable(ctx context.Context, c *engine.Corruption) error {
	end, err := m.beginDrop(c)
	if err != nil {
		return err
	}
	dropped := false
	defer func() { end(dropped) }()
	hs, err := m.holders(nil)
	if err != nil {
		return err
	}
	for _, h := range hs.list {
		if c.MayHold(h.g, h.span) {
			return fmt.Errorf("shard: range %s has a record with data in %s", h.g.Range(), c.Path)
		}
	}
	err = m.cfg.Engine.Drop(ctx, c)
	dropped = err == nil
	return err
}

// beginDrop begins the attempt to drop a bad table in which nobody is about to have data. Until it ends
// nobody comes to.
func (m *Manager) beginDrop(c *engine.Corruption) (end func(dropped bool), err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for id, span := range m.claims {
		if c.MayHold(id.Group(), span) {
			return nil, fmt.Errorf("shard: range %s is about to have data in %s", id, c.Path)
		}
	}
	for _, b := range m.bad {
		if b.Corruption == c {
			b.dropping = make(chan struct{})
			return func(dropped bool) {
				m.mu.Lock()
				defer m.mu.Unlock()
				close(b.dropping)
				b.dropping, b.dropped = nil, dropped
			}, nil
		}
	}
	panic(fmt.Sprintf("shard: drop %s, which nobody was kept out of", c))
}

// inBadTableLocked says why a range cannot come to have a span here: a bad table would be in the way.
func (m *Manager) inBadTableLocked(id keyspace.RangeID, span keyspace.Span) error {
	for _, b := range m.bad {
		if !b.dropped && b.MayHold(id.Group(), span) {
			return fmt.Errorf("shard: range %s would have data in %s, which is not dropped yet", id, b.Corruption)
		}
	}
	return nil
}

// droppingLocked returns what is closed when no bad table is being dropped in which a range would have
// data, nil if none is.
func (m *Manager) droppingLocked(id keyspace.RangeID, span keyspace.Span) (ended <-chan struct{}) {
	for _, b := range m.bad {
		if b.dropping != nil && b.MayHold(id.Group(), span) {
			return b.dropping
		}
	}
	return nil
}
