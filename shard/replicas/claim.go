package replicas

import (
	"bytes"
	"fmt"
	"slices"
	"sort"

	"github.com/skeindb/skein/keyspace"
)

// Claim is a span that a range here is about to hold.
type Claim struct {
	Range keyspace.RangeID
	// Stored says that the engine has a record of the range.
	Stored bool
	Span   keyspace.Span
	// Generation is that of a snapshot's range, 0 otherwise.
	Generation keyspace.Generation
}

// Claim keeps the spans for their ranges and returns why it refuses some of them: they overlap
// what another range holds or claims, an earlier claim of the call, or a bad table. A replica whose data is being
// deleted makes way for nobody: its deletion may be written and not visible yet.
func (m *Manager) Claim(want []Claim) (refused map[keyspace.RangeID]error) {
	refused = make(map[keyspace.RangeID]error)
	kept := make([]Claim, 0, len(want))
	m.mu.Lock()
	deleting := m.deleting
	for _, c := range want {
		err := m.claimedLocked(c)
		if err == nil && !c.Stored {
			err = m.inBadTableLocked(c.Range, c.Span)
		}
		if err != nil {
			refused[c.Range] = err
			continue
		}
		m.claims[c.Range] = c.Span
		kept = append(kept, c)
	}
	m.mu.Unlock()
	slices.SortFunc(kept, func(a, b Claim) int { return bytes.Compare(a.Span.Start, b.Span.Start) })
	for _, r := range m.cfg.Owner.Replicas() {
		s, deleted := r.State(), deleting[r.Range().Group()]
		if !s.Holds() && !(deleted && s.Absorbed) {
			continue
		}
		span := s.Descriptor.Span
		// kept are disjoint and in order: those that overlap follow each other.
		i := sort.Search(len(kept), func(i int) bool {
			return len(kept[i].Span.End) == 0 || bytes.Compare(kept[i].Span.End, span.Start) > 0
		})
		for ; i < len(kept) && kept[i].Span.Overlaps(span); i++ {
			if c := kept[i]; c.Range != r.Range() && refused[c.Range] == nil && (deleted || !s.Yields(&c)) {
				refused[c.Range] = fmt.Errorf("shard: %s for range %s overlaps %s of range %s", c.Span, c.Range, span, r.Range())
				m.Unclaim(c.Range)
			}
		}
	}
	return refused
}

// ifUnheld calls f if no replica holds a part of the span, or is about to. None comes to hold it
// meanwhile.
func (m *Manager) ifUnheld(span keyspace.Span, f func() error) error {
	const nobody keyspace.RangeID = 0
	m.unheld.Lock()
	defer m.unheld.Unlock()
	if refused := m.Claim([]Claim{{Range: nobody, Span: span}}); len(refused) > 0 {
		return refused[nobody]
	}
	defer m.Unclaim(nobody)
	hs, err := m.holders(nil)
	if err != nil {
		return err
	}
	for g := range hs.overlapping(span) {
		return fmt.Errorf("shard: range %s has a record with a part of %s", g.Range(), span)
	}
	return f()
}

func (m *Manager) claimedLocked(c Claim) error {
	for id, have := range m.claims {
		if id != c.Range && have.Overlaps(c.Span) {
			return fmt.Errorf("shard: %s for range %s overlaps %s, which range %s is about to hold", c.Span, c.Range, have, id)
		}
	}
	return nil
}

// beginDeletions keeps the spans of open replicas from all others until endDeletions, and returns why
// it cannot: another range claims a part of the span. Its snapshot may be written already.
func (m *Manager) beginDeletions(open map[keyspace.GroupID]State) (refused map[keyspace.GroupID]error) {
	refused = make(map[keyspace.GroupID]error)
	deleting := make(map[keyspace.GroupID]bool, len(open))
	m.mu.Lock()
	defer m.mu.Unlock()
	for g, s := range open {
		c := Claim{Range: g.Range(), Span: s.Descriptor.Span}
		if s.Descriptor.Generation != 0 {
			if err := m.claimedLocked(c); err != nil {
				refused[g] = err
				continue
			}
		}
		deleting[g] = true
	}
	m.deleting = deleting
	return refused
}

func (m *Manager) endDeletions() {
	m.mu.Lock()
	m.deleting = nil
	m.mu.Unlock()
}

// ClaimHeld keeps a span that a replica here holds: a split's parent for the child, or a replica
// that is not opened any more for itself. So nobody else holds or claims it. It waits while a bad table
// is dropped in which the child's records would be: its number may lie between two others.
func (m *Manager) ClaimHeld(id keyspace.RangeID, s keyspace.Span) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for ended := m.droppingLocked(id, s); ended != nil; ended = m.droppingLocked(id, s) {
		m.mu.Unlock()
		<-ended
		m.mu.Lock()
	}
	m.claims[id] = s
}

// ClaimMore extends the claim of a range by what its replica still holds. It says whether nobody
// else claims a part of that: whoever does looks at the replicas afterwards, and will find
// nothing in the way.
func (m *Manager) ClaimMore(id keyspace.RangeID, s keyspace.Span) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.claimedLocked(Claim{Range: id, Span: s}) != nil {
		return false
	}
	m.claims[id] = s
	return true
}

// Unclaim gives a claim up.
func (m *Manager) Unclaim(id keyspace.RangeID) {
	m.mu.Lock()
	delete(m.claims, id)
	m.mu.Unlock()
}
