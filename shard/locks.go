package shard

import (
	"maps"

	"github.com/skeindb/skein/shard/command"
	"github.com/skeindb/skein/shard/locktable"
)

// publishTxnsLocked takes over what an applied entry has done to locks, records and attachments.
func (r *Replica) publishTxnsLocked(changes []lockChange) {
	now := r.store.cfg.Clock.Now()
	for i := range changes {
		ch := &changes[i]
		if ch.attachment.Lease != 0 {
			r.publishAttachmentLocked(ch.attachment)
			continue
		}
		r.wokenLocked(r.locks.Apply(&ch.Change, now))
	}
}

// forgetLocks drops the locks of a replica that is gone from the node's budget.
func (r *Replica) forgetLocks() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.locks.Forget()
}

// loadTableLocked makes the table of a replica whose state was read from the engine.
func (r *Replica) loadTableLocked(s *command.TxnState) {
	r.locks.Forget()
	r.leases.attached = maps.Clone(s.Attachments)
	changes := make([]lockChange, 0, len(s.Locks)+len(s.Records))
	for _, l := range s.Locks {
		changes = append(changes, lockChange{Change: locktable.Change{Added: l}})
	}
	for _, t := range s.Records {
		changes = append(changes, lockChange{Change: locktable.Change{Record: t}})
	}
	r.publishTxnsLocked(changes)
}
