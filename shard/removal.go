package shard

import (
	"cmp"
	"context"
	"slices"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/shard/removal"
)

// removalMarks returns the marks of the ranges that this node leads, ascending by id
// from behind after, a page at most. Beforehand the node takes note of the compacted
// revision.
func (s *Store) removalMarks(compacted keyspace.Revision, after keyspace.RangeID) []removal.Mark {
	s.heardCompacted(compacted)
	all := slices.DeleteFunc(s.Replicas(), func(r *Replica) bool { return r.id <= after })
	slices.SortFunc(all, func(a, b *Replica) int { return cmp.Compare(a.id, b.id) })
	var marks []removal.Mark
	for _, r := range all {
		if m, leads := r.removalMark(compacted); leads {
			marks = append(marks, m)
			if !m.Raised {
				// It may have been at rest when the node heard of the compaction, and changed since.
				s.maintenance.note(r)
			}
		}
		if len(marks) == removal.PageSize {
			break
		}
	}
	return marks
}

func (r *Replica) removalMark(compacted keyspace.Revision) (m removal.Mark, leads bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.pipe.Leads() || r.rec.Generation == 0 {
		return removal.Mark{}, false
	}
	// Operations under way and locked writes may have a revision below the compacted one.
	idle := r.rec.LastRevision < r.rec.Compacted && r.idleLocked() && !r.heldBackLocked()
	return removal.Mark{
		Descriptor: r.descriptorLocked(), Index: r.position.Index,
		// Nobody waits for a hold: what it keeps goes when it ends.
		Raised: idle || r.store.heldFrom() >= 0 && r.rec.Compacted >= min(compacted, r.store.heldFrom()),
	}, true
}

// removed compares this node's replicas with the marks. left are the ranges with more to remove;
// changed says that a range has split or moved since its mark was made.
func (s *Store) removed(marks []removal.Mark) (left []keyspace.RangeID, changed bool) {
	for i := range marks {
		m := &marks[i]
		r := s.Replica(m.Descriptor.Range)
		if r == nil {
			// It is to be opened yet, or was moved away since.
			changed = true
			continue
		}
		r.mu.Lock()
		switch {
		case r.rec.Generation > m.Descriptor.Generation:
			changed = true
		case r.position.Index < m.Index, r.rec.Compacted > r.upkeep.removedTo:
			left = append(left, r.id)
		}
		r.mu.Unlock()
	}
	return left, changed
}

// removalNodes asks nodes for package removal.
type removalNodes struct{ c *AdminClient }

// Raised implements removal.Nodes.
func (r removalNodes) Raised(
	ctx context.Context, node keyspace.NodeID, compacted keyspace.Revision, after keyspace.RangeID,
) ([]removal.Mark, error) {
	a, err := r.c.ask(ctx, node, &adminRequest{Op: adminRaised, Compacted: compacted, Range: after}, false)
	if err != nil {
		return nil, err
	}
	return a.Marks, nil
}

// Removed implements removal.Nodes.
func (r removalNodes) Removed(ctx context.Context, node keyspace.NodeID, marks []removal.Mark) (left []keyspace.RangeID, changed bool, err error) {
	a, err := r.c.ask(ctx, node, &adminRequest{Op: adminRemoved, Marks: marks}, false)
	if err != nil {
		return nil, false, err
	}
	return a.Left, a.Changed, nil
}

// AwaitRemoval is removal.Waiter.Await.
func (c *AdminClient) AwaitRemoval(ctx context.Context, cluster removal.Cluster, compacted keyspace.Revision) error {
	return c.local.removal.Await(ctx, cluster, compacted)
}
