package pipeline

import (
	"errors"
	"slices"

	"go.uber.org/zap"

	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/shard/command"
	"github.com/skeindb/skein/shard/eval"
)

// cut cuts the chain at a batch that will never be applied: it and all that
// was evaluated on top of it are discarded. The leadership goes on from the batch
// before. Entries behind the cut that are in the log name a predecessor that is
// never applied, so they are no-ops.
func (p *Pipeline) cut(b *batch, err error, out *Answers) {
	i := slices.Index(p.proposed, b)
	if i < 0 {
		i = len(p.proposed)
	}
	gone := append([]*batch(nil), p.proposed[i:]...)
	for _, x := range []*batch{p.sequencing, p.filling} {
		if x != nil && !slices.Contains(gone, x) && !slices.Contains(p.proposed[:i], x) {
			gone = append(gone, x)
		}
	}
	clear(p.proposed[i:])
	p.proposed = p.proposed[:i]
	if slices.Contains(gone, p.sequencing) {
		p.sequencing = nil
	}
	p.filling = nil
	old := p.lead
	p.lead = p.newLeadership(old.term)
	p.lead.number, p.lead.revision = old.number, old.revision
	if i > 0 {
		p.lead.last, p.lead.hash = p.proposed[i-1].link, p.proposed[i-1].hash
	}
	for _, x := range p.proposed {
		x.lead = p.lead
	}
	for k := len(gone) - 1; k >= 0; k-- {
		p.discard(gone[k], err, out)
	}
	p.shared.Metrics.cuts.Inc()
	p.log.Info("gave up batches that were not committed", zap.Uint64("term", old.term), zap.Int("batches", len(gone)), zap.Error(err))
}

// discard takes a batch out of the overlay and answers its calls.
func (p *Pipeline) discard(b *batch, err error, out *Answers) {
	for k := len(b.calls) - 1; k >= 0; k-- {
		c := b.calls[k]
		c.isAt(placeBatch, b)
		for j := len(c.writes) - 1; j >= 0; j-- {
			p.overlay.Discard(c.writes[j])
		}
		if c.op.ItemBytes() > 0 {
			var undone Answers // what goes through an interface takes memory, which a put does not need
			c.op.Undo(c, p.errorOf(c, err), &undone)
			out.join(&undone)
		}
	}
	b.end(false)
	// The first of those that are put back comes to the front of the queue last.
	for _, c := range slices.Backward(b.take(&b.calls, placeBatch)) {
		if p.goesAgain(c, err) {
			p.Requeue(c)
			continue
		}
		out.Add(c, p.errorOf(c, err))
	}
	for _, c := range b.take(&b.held, placeHeld) {
		p.confirming--
		out.Add(c, p.errorOf(c, err))
	}
	for _, c := range b.take(&b.parked, placeParked) {
		p.Requeue(c)
	}
}

// goesAgain says whether a call whose batch is discarded is evaluated again: the batch had another call that was not
// permitted any more. A command was undone, and its sender sends it again.
func (p *Pipeline) goesAgain(c *Call, err error) bool {
	return errors.Is(err, kverror.AccessChanged) && !c.Req.Permit.Ended(p.access) && c.op.Command() == nil
}

// errorOf returns the error of a call whose batch is discarded. AccessChanged is the error of the calls whose
// permit has ended. The others were only with them, and are sent again as they are.
func (p *Pipeline) errorOf(c *Call, err error) error {
	if errors.Is(err, kverror.AccessChanged) && !c.Req.Permit.Ended(p.access) {
		return p.env.Error(kverror.Dropped, "a request in the same batch is not permitted any more")
	}
	return err
}

// Lose ends the leadership. Batches that were not proposed are discarded. The log decides about
// the others. The overlay is gone, and whoever waits for it starts over. The locks that are not
// applied were dropped before.
func (p *Pipeline) Lose(out *Answers) {
	failed := p.env.Error(kverror.Dropped, "the leadership ended before the proposal")
	p.mutateKeep()
	pending := p.proposed
	p.proposed = nil
	for _, b := range []*batch{p.sequencing, p.filling} {
		if b != nil && !slices.Contains(pending, b) {
			pending = append(pending, b)
		}
	}
	p.sequencing, p.filling = nil, nil
	lostFrom := len(p.lost)
	for _, b := range pending {
		b.end(false)
		for _, c := range b.take(&b.parked, placeParked) {
			out.Add(c, failed)
		}
		for _, c := range b.take(&b.held, placeHeld) {
			p.confirming--
			out.Add(c, failed)
		}
		if b.link.Number == 0 || b.refused {
			b.answer(out, failed)
			continue
		}
		for _, c := range b.calls {
			c.isAt(placeBatch, b)
			c.lost.Store(true)
		}
		p.lost = append(p.lost, b)
	}
	if len(p.lost) > lostFrom {
		lost := slices.Clone(p.lost[lostFrom:])
		p.shared.After(p.shared.Limits.FateTimeout, func() { p.fateTimeout(lost) })
	}
	p.lead, p.overlay = nil, eval.NewOverlay()
	p.queueWoken()
	p.barrier = nil
}

// Applied answers the calls of a batch whose entry was applied, or was a no-op. The overlay
// loses what the store shows from now on. own says that the batch is one of the present
// leadership.
func (p *Pipeline) Applied(link command.Link, ok bool, out *Answers) (own bool) {
	if len(p.proposed) == 0 || p.proposed[0].link != link {
		p.appliedLost(link, ok, out)
		return false
	}
	b := p.proposed[0]
	if !ok {
		// Its place in the chain was never reached; nothing behind it will be either.
		p.cut(b, p.env.Error(kverror.Dropped, "the entry was a no-op"), out)
		return true
	}
	p.proposed[0] = nil
	p.proposed = p.proposed[1:]
	for _, c := range b.calls {
		c.isAt(placeBatch, b)
		for _, v := range c.writes {
			p.overlay.Remove(v)
			p.counts.Applied(v)
			p.shared.Cache.Put(p.epochs.Of(v.Key), v.Key, v.Cached())
		}
	}
	if b.items > 0 {
		// A command may have applied what a lock held.
		p.counts.Forget()
	}
	b.commit = p.env.Committed()
	b.end(true)
	b.answer(out, nil)
	for _, c := range b.take(&b.held, placeHeld) {
		p.toConfirm(c, out)
	}
	return true
}

// appliedLost answers a batch of a former leadership whose entry was applied, or was a no-op.
func (p *Pipeline) appliedLost(link command.Link, ok bool, out *Answers) {
	for i, b := range p.lost {
		if b.link != link {
			continue
		}
		if ok {
			b.answer(out, nil)
		} else {
			b.answer(out, p.env.Error(kverror.Dropped, "the entry was a no-op"))
		}
		p.lost = append(p.lost[:i], p.lost[i+1:]...)
		return
	}
}

// dropLost answers the lost batches that apply nowhere, since b was dropped: those of its term
// that were evaluated on top of it. The log decides those of other terms.
func (p *Pipeline) dropLost(b *batch, detail string, out *Answers) {
	i := slices.Index(p.lost, b)
	if i < 0 {
		return
	}
	kept := p.lost[:i]
	for _, l := range p.lost[i:] {
		if l.lead.term == b.lead.term {
			l.answer(out, p.env.Error(kverror.Dropped, detail))
			continue
		}
		kept = append(kept, l)
	}
	clear(p.lost[len(kept):])
	p.lost = kept
}

// Passed answers what a leadership of an older term left behind: an entry of
// a newer term is applied, so that nothing of the older one can still come.
func (p *Pipeline) Passed(term uint64, out *Answers) {
	kept := p.lost[:0]
	for _, b := range p.lost {
		if b.lead.term >= term {
			kept = append(kept, b)
			continue
		}
		b.answer(out, p.env.Error(kverror.Dropped, "the leader changed before the entry was replicated"))
	}
	clear(p.lost[len(kept):])
	p.lost = kept
}

// Replaced answers the calls of a former leadership after a snapshot has replaced the state. term
// is that of the snapshot's last entry. The state has the batches of the last applied batch's term
// up to that batch. If `term` is newer, no others of that term come. The fate of all other batches
// is unknown.
func (p *Pipeline) Replaced(term uint64, out *Answers) {
	for _, b := range p.lost {
		switch last := p.rec.Last; {
		case last.Term == b.link.Term && b.link.Number <= last.Number:
			b.answer(out, nil)
		case last.Term == b.link.Term && term > b.link.Term:
			b.answer(out, p.env.Error(kverror.Dropped, "the leader changed before the entry was replicated"))
		default:
			b.answer(out, kverror.New(kverror.LeaderChanged, "range %s: a snapshot replaced the log", p.id))
		}
	}
	p.lost = nil
}

// Abandon answers everything whose fate only the log could tell: the replica has ended.
func (p *Pipeline) Abandon(out *Answers) {
	for _, b := range p.lost {
		b.answer(out, kverror.New(kverror.LeaderChanged, "range %s: the node stops", p.id))
	}
	p.lost = nil
}

// fateTimeout answers those of the batches whose fate the log has not told.
func (p *Pipeline) fateTimeout(batches []*batch) {
	var out Answers
	p.mu.Lock()
	for _, b := range batches {
		for i, l := range p.lost {
			if l == b {
				b.answer(&out, kverror.New(kverror.LeaderChanged, "range %s", p.id))
				p.lost = append(p.lost[:i], p.lost[i+1:]...)
				break
			}
		}
	}
	p.mu.Unlock()
	p.Send(&out)
}
