//go:build planted

package shard

import "github.com/skeindb/skein/internal/mutation"

// mutationState is what a replica keeps for the bugs of package mutation.
type mutationState struct{ kept *batch }

// mutateAnswers answers a batch that is about to be proposed. Others go on in the
// places of its calls.
func (b *batch) mutateAnswers(out *answers) {
	if !mutation.Is(mutation.AcknowledgedBeforeQuorum) {
		return
	}
	for i, c := range b.calls {
		other := newCall(c.ctx, c.req)
		other.place, other.at, other.cmd = c.place, c.at, c.cmd
		other.txn, other.writes, other.draft, other.seen = c.txn, c.writes, c.draft, c.seen
		b.calls[i] = other
		out.add(c, nil)
	}
}

// mutateKeep keeps the batch that waits for its revisions when leadership is lost.
func (r *Replica) mutateKeep() {
	b := r.sequencing
	if !mutation.Is(mutation.OtherTerm) || b == nil || b.settled || b.txns == 0 {
		return
	}
	r.sequencing = nil
	kept := newBatch(b.Order(), b.lead)
	kept.calls, kept.txns, kept.bytes, kept.parked = b.calls, b.txns, b.bytes, b.parked
	b.calls, b.parked = nil, nil
	for _, c := range append(append([]*call(nil), kept.calls...), kept.parked...) {
		c.at = kept
	}
	for _, c := range kept.calls {
		if len(c.writes) > 0 {
			c.txn.Batch = &kept.Batch
		}
	}
	r.mutated.kept = kept
}

// mutateKept gives the next leadership the batch that another one has evaluated.
func (r *Replica) mutateKept() {
	b := r.mutated.kept
	if r.mutated.kept = nil; b == nil || r.filling != nil {
		return
	}
	b.lead, r.filling = r.lead, b
	for _, c := range b.calls {
		for _, v := range c.writes {
			r.overlay.Add(v)
		}
	}
}
