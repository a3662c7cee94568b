package pipeline

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/rangeapi/stages"
)

// refusedRetry is after how long a proposal is offered again for which the group
// had no room.
const refusedRetry = 2 * time.Millisecond

// start takes the batch for which revisions are asked next, if none is under way.
func (p *Pipeline) start() *batch {
	if p.sequencing != nil || p.filling == nil {
		return nil
	}
	p.sequencing, p.filling = p.filling, nil
	p.sequencing.evaluated(p.now) // the pass may go on
	return p.sequencing
}

// ask asks the sequencer for a batch's revisions. It may be answered within the
// call, and directly where that is possible. The batch behind one that is answered so must not be asked for
// directly: under load one call would stand within the other without end.
func (p *Pipeline) ask(b *batch, direct bool) {
	if b == nil {
		return
	}
	watch := clock.StartStopwatch()
	p.mu.Lock()
	asked := watch.After(p.shared.Epoch)
	p.read(asked)
	b.asked = asked
	req := keyspace.SequenceRequest{Range: p.id, Generation: p.rec.Generation, Count: b.txns, Permit: b.permit, Direct: direct}
	// A batch of items alone needs no revision and no place among them.
	items := b.items > 0 && b.txns == 0 && b.items == len(b.calls)
	p.mu.Unlock()
	if items {
		p.settled(b, keyspace.SequenceAnswer{}, asked)
		return
	}
	p.env.Sequence(req, func(a keyspace.SequenceAnswer) {
		took := watch.Elapsed()
		p.shared.Metrics.sequenceSeconds.Observe(took.Seconds())
		p.env.Observe(a)
		p.settled(b, a, asked+took)
	})
}

// settled goes on with a batch for which the sequencer has answered. It fills in the revisions,
// proposes the batch if it changes anything, and asks for the batch that filled meanwhile. now is a reading of the
// clock.
func (p *Pipeline) settled(b *batch, a keyspace.SequenceAnswer, now time.Duration) {
	var out Answers
	p.mu.Lock()
	p.read(now)
	if p.sequencing != b || p.lead != b.lead {
		// A late answer: its batch was discarded (traps 55, 78). The numbers, if there
		// are any, bear no event.
		p.mu.Unlock()
		return
	}
	if a.Err == nil && b.txns > 0 {
		a.Err = p.checkOld(b, &a)
	}
	p.access = max(p.access, a.Access)
	if a.Err != nil {
		p.cut(b, NotProposed(a.Err), &out)
		ask := p.start()
		p.env.Notify()
		p.mu.Unlock()
		p.Send(&out)
		p.ask(ask, false)
		p.Schedule()
		return
	}
	p.settle(b, &a, &out)
	var entry []byte
	if b.txns > 0 || b.items > 0 {
		entry = b.encode(p.id, p.rec.Generation, a.First, p.env.SequencerTerm())
		p.proposed = append(p.proposed, b)
		b.mutateAnswers(&out)
	}
	p.mu.Unlock()
	p.Send(&out)
	if entry != nil {
		if b.txns > 0 {
			p.shared.Metrics.batchRequests.Observe(float64(b.txns))
		}
		p.propose(b, entry)
		return
	}
	p.proceed(b)
}

// checkOld refuses revisions of a sequencer that has a successor: its machine was paused, and its
// clock stood still meanwhile. They are not above all that the batch was evaluated on, or come from
// a term below the highest that the range knows.
func (p *Pipeline) checkOld(b *batch, a *keyspace.SequenceAnswer) error {
	known := max(b.lead.revision, p.rec.LastRevision)
	for _, c := range b.calls {
		if c.Changes() {
			known = max(known, c.txn.Floor)
		}
	}
	if a.First > known && a.Term >= p.rec.SequencerTerm {
		return nil
	}
	p.shared.Metrics.OldSequencer.Inc()
	return kverror.New(kverror.NoLeader, "range %s: revision %d of the sequencer of term %d, where revision %d is known, and a sequencer of term %d",
		p.id, a.First, a.Term, known, p.rec.SequencerTerm)
}

// NotProposed makes of an error of the sequencer, or of a lease's record, one of calls that were
// certainly not proposed.
func NotProposed(err error) error {
	e := kverror.Of(err)
	if e.Fate() == kverror.NotApplied && e.Kind != kverror.BadRequest {
		return e
	}
	return kverror.New(kverror.Dropped, "no revision: %v", err)
}

// settle gives each call of the batch its revision. Calls that change nothing
// get the last one before their place and leave the batch: its later fate is not theirs.
// They may be evaluated again, and then write with another batch.
func (p *Pipeline) settle(b *batch, a *keyspace.SequenceAnswer, out *Answers) {
	b.settled, b.first = true, a.First
	at := a.Current
	if b.txns > 0 {
		at = a.First - 1
		b.lead.revision = a.First + keyspace.Revision(b.txns) - 1
	}
	for _, c := range b.take(&b.calls, placeBatch) {
		c.enter(stages.Revision, b.asked)
		switch {
		case c.Changes():
			at++
			c.propose(b, p.now)
			c.txn.SetRevision(at)
			c.op.Settle(c, at)
			b.calls = append(b.calls, c)
		case c.op.ItemBytes() > 0:
			c.propose(b, p.now)
			b.calls = append(b.calls, c)
		default:
			p.settleRead(c, at, a.Compacted, out)
		}
	}
	if len(b.calls) != b.txns+b.items-b.both {
		panic(fmt.Sprintf("pipeline: range %s: %s has %d calls with writes, counted %d and %d", p.id, b, len(b.calls), b.txns, b.items))
	}
	for _, c := range b.take(&b.parked, placeParked) {
		p.Requeue(c)
	}
}

// settleRead deals with a call that changes nothing, now that its place is known.
func (p *Pipeline) settleRead(c *Call, at, compacted keyspace.Revision, out *Answers) {
	switch {
	case c.draft.Op == nil && c.fail == nil && (c.future == 0 || c.future <= at):
		// It asked for the current revision, or it now knows that the revision it reads
		// at is not one of the future.
		c.current, c.compacted = at, p.rec.CompactedIn(compacted)
		c.future = 0
		p.Requeue(c)
		return
	case c.future != 0:
		c.fail = kverror.New(kverror.FutureRevision, "revision %d, the last one is %d", c.future, at)
	case c.fail == nil:
		c.draft.Settle(at, false)
	}
	p.confirming++
	if seen := batchOf(c.seen); seen != nil && !seen.Applied() && !mutation.Is(mutation.NoopFromOverlay) {
		c.moveTo(placeHeld, seen)
		c.enter(stages.Held, p.now)
		seen.held = append(seen.held, c)
		return
	}
	p.toConfirm(c, out)
}

// propose hands a batch's entry to the group, again and again while the group has no room:
// only a loss of leadership drops a batch with revisions.
func (p *Pipeline) propose(b *batch, entry []byte) {
	term := b.lead.term
	err := p.env.Propose(term, entry, func(err error) { p.dropped(b, err) })
	if errors.Is(err, raftgroup.ErrFull) {
		p.mu.Lock()
		stands := p.sequencing == b && p.lead == b.lead
		b.refused = true
		p.mu.Unlock()
		if !stands {
			p.dropped(b, err)
			return
		}
		p.shared.Metrics.refused.Inc()
		p.shared.After(refusedRetry, func() { p.proposeAgain(b, entry) })
		return
	}
	if err != nil {
		p.dropped(b, err)
	}
	p.proceed(b)
}

func (p *Pipeline) proposeAgain(b *batch, entry []byte) {
	p.mu.Lock()
	stands := p.sequencing == b && p.lead == b.lead
	if stands {
		b.refused = false
	}
	p.mu.Unlock()
	if stands {
		p.propose(b, entry)
	}
}

// proceed frees the place of a batch that was sequenced and asks for the next.
func (p *Pipeline) proceed(b *batch) {
	p.mu.Lock()
	if p.sequencing != b {
		p.mu.Unlock()
		return
	}
	p.sequencing = nil
	ask := p.start()
	if ask == nil && (p.closed > 0 || p.draining) {
		p.env.Notify()
	}
	more := p.Waits()
	p.mu.Unlock()
	p.ask(ask, false)
	if more {
		p.Schedule()
	}
}

// dropped is called where a proposal was certainly not appended to the log.
func (p *Pipeline) dropped(b *batch, err error) {
	var out Answers
	p.mu.Lock()
	detail := fmt.Sprintf("the proposal was dropped: %v", err)
	if p.lead == b.lead && slices.Contains(p.proposed, b) {
		p.cut(b, p.env.Error(kverror.Dropped, detail), &out)
		p.env.Notify()
	}
	p.dropLost(b, detail, &out)
	p.mu.Unlock()
	p.Send(&out)
	p.Schedule()
}
