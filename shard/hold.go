package shard

import "github.com/skeindb/skein/keyspace"

// SetHeld has the leaders of this node raise the compacted revisions of their ranges to low at most, until
// it is called again: somebody reads a cut through the whole store at low or above. keyspace.MaxRevision is no
// bound. The cluster's compacted revision stays what it is, and clients are refused what is below it.
//
// Until the first call nothing is raised where Config.Holds is set, since nobody knows what is held. A leader
// that has not heard of a new hold yet may raise too far. The reads of a cut find that out, see versions.go.
func (s *Store) SetHeld(low keyspace.Revision) {
	if old := keyspace.Revision(s.held.Swap(int64(low))); low > old && s.ctx.Err() == nil {
		s.maintenance.note(s.Replicas()...)
	}
}

// mayCompactTo returns the revision to which the ranges of this node may be compacted.
func (s *Store) mayCompactTo() keyspace.Revision { return s.heldTo(s.Compacted()) }

// knowsHeld says whether SetHeld was called, or never will be.
func (s *Store) knowsHeld() bool { return s.held.Load() >= 0 }

// heldTo returns the revision, or the lowest one that is held if that is lower.
func (s *Store) heldTo(c keyspace.Revision) keyspace.Revision {
	return min(c, keyspace.Revision(s.held.Load()))
}
