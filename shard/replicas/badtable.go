package replicas

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
)

// errBadTable refuses a claim.
var errBadTable = errors.New("a bad table is not dropped yet")

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

// In returns the open replicas of which a bad table may hold data. Once it is dropped there are none.
func (m *Manager) In(c *engine.Corruption) (in []keyspace.GroupID) {
	for _, r := range m.cfg.Owner.Replicas() {
		if s := r.State(); s.Holds() && c.MayHold(r.Range().Group(), s.Descriptor.Span) {
			in = append(in, r.Range().Group())
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, all := m.overlappingLocked(c); all == nil {
		return nil // they have come since
	}
	return in
}

// DropTable drops a bad table that KeepOutOf knows, if nobody has data in it, and with it those that it overlaps. Who
// drops only a part of a table reads its borders, which may be bad.
func (m *Manager) DropTable(ctx context.Context, c *engine.Corruption) error {
	m.mu.Lock()
	whole, all := m.overlappingLocked(c)
	m.mu.Unlock()
	if all == nil {
		return nil
	}
	if err := m.nobodyIn(whole); err != nil {
		return err
	}
	// With nothing in memory the tables are dropped at once. Otherwise it would be done with the next flush, whose failure
	// nobody here would hear of.
	if err := m.cfg.Engine.Flush(ctx); err != nil {
		return err
	}
	whole, end, err := m.beginDrop(c)
	if err != nil || whole == nil {
		return err
	}
	if err = m.nobodyIn(whole); err == nil {
		err = m.cfg.Engine.Drop(ctx, whole)
	}
	end(err == nil)
	return err
}

// overlappingLocked returns a bad table with all that it overlaps, as one, and all of them. There are none if the table
// is dropped already.
func (m *Manager) overlappingLocked(c *engine.Corruption) (whole *engine.Corruption, all []*badTable) {
	w := *c
	for more := true; more; {
		more, all = false, nil
		for _, b := range m.bad {
			if b.dropped || !b.Bounds.Overlaps(w.Bounds) {
				continue
			}
			all = append(all, b)
			if bytes.Compare(b.Bounds.Lower, w.Bounds.Lower) < 0 {
				w.Bounds.Lower, more = b.Bounds.Lower, true
			}
			if bytes.Compare(b.Bounds.Upper, w.Bounds.Upper) > 0 {
				w.Bounds.Upper, more = b.Bounds.Upper, true
			}
		}
	}
	if !slices.ContainsFunc(all, func(b *badTable) bool { return b.Corruption == c }) {
		all = nil
	}
	return &w, all
}

// nobodyIn returns an error if a record says that a range has data in a bad table.
func (m *Manager) nobodyIn(c *engine.Corruption) error {
	hs, err := m.holders(nil)
	if err != nil {
		return err
	}
	for _, h := range hs.list {
		if c.MayHold(h.g, h.span) {
			return fmt.Errorf("shard: range %s has a record with data in %s", h.g.Range(), c.Path)
		}
	}
	return nil
}

// beginDrop begins the attempt to drop a bad table, in which nobody is about to have data, with all that it overlaps.
// Until it ends nobody comes to. whole is nil if the table is dropped already.
func (m *Manager) beginDrop(c *engine.Corruption) (whole *engine.Corruption, end func(dropped bool), err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	whole, all := m.overlappingLocked(c)
	if all == nil {
		return nil, nil, nil
	}
	for id, span := range m.claims {
		if whole.MayHold(id.Group(), span) {
			return nil, nil, fmt.Errorf("shard: range %s is about to have data in %s", id, whole.Path)
		}
	}
	ended := make(chan struct{})
	for _, b := range all {
		if b.dropping != nil {
			// What comes after the end of that attempt must not be dropped by this one.
			return nil, nil, fmt.Errorf("shard: %s is being dropped", b.Path)
		}
	}
	for _, b := range all {
		b.dropping = ended
	}
	return whole, func(dropped bool) {
		m.mu.Lock()
		defer m.mu.Unlock()
		close(ended)
		for _, b := range all {
			b.dropping, b.dropped = nil, dropped
		}
	}, nil
}

// inBadTableLocked says why a range cannot come to have a span here: a bad table would be in the way.
func (m *Manager) inBadTableLocked(id keyspace.RangeID, span keyspace.Span) error {
	for _, b := range m.bad {
		if !b.dropped && b.MayHold(id.Group(), span) {
			return fmt.Errorf("shard: range %s would have data in %s: %w", id, b.Corruption, errBadTable)
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
