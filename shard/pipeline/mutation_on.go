//go:build planted

package pipeline

import "github.com/skeindb/skein/internal/mutation"

// mutationState is what a pipeline keeps for the bugs of package mutation.
type mutationState struct{ kept *batch }

// mutateAnswers answers a batch that is about to be proposed. Others go on in the
// places of its calls, without the bytes that those have given back.
func (b *batch) mutateAnswers(out *Answers) {
	if !mutation.Is(mutation.AcknowledgedBeforeQuorum) {
		return
	}
	for i, c := range b.calls {
		other := NewCall(c.ctx, c.Req, c.op, 0)
		other.place, other.at = c.place, c.at
		other.txn, other.writes, other.draft, other.seen = c.txn, c.writes, c.draft, c.seen
		b.calls[i] = other
		out.Add(c, nil)
	}
}

// mutateKeep keeps the batch that waits for its revisions when leadership is lost.
func (p *Pipeline) mutateKeep() {
	b := p.sequencing
	if !mutation.Is(mutation.OtherTerm) || b == nil || b.settled || b.txns == 0 {
		return
	}
	p.sequencing = nil
	kept := newBatch(b.Order(), b.lead)
	kept.calls, kept.txns, kept.bytes, kept.parked = b.calls, b.txns, b.bytes, b.parked
	b.calls, b.parked = nil, nil
	for _, c := range append(append([]*Call(nil), kept.calls...), kept.parked...) {
		c.at = kept
	}
	for _, c := range kept.calls {
		if len(c.writes) > 0 {
			c.txn.Batch = &kept.Batch
		}
	}
	p.mutated.kept = kept
}

// mutateKept gives the next leadership the batch that another one has evaluated.
func (p *Pipeline) mutateKept() {
	b := p.mutated.kept
	if p.mutated.kept = nil; b == nil || p.filling != nil {
		return
	}
	b.lead, p.filling = p.lead, b
	for _, c := range b.calls {
		for _, v := range c.writes {
			p.overlay.Add(v)
		}
	}
}
