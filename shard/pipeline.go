package shard

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/eval"
)

// refusedRetry is after how long a proposal is offered again for which the group
// had no room.
const refusedRetry = 2 * time.Millisecond

// evaluateLook is after how many calls a pass looks whether its turn is over.
const evaluateLook = 8

// patience is how often a call may be put back before the range evaluates nothing
// that came after it.
const patience = 3

// write takes a request that can change something through the pipeline and waits
// for its answer.
func (r *Replica) write(ctx context.Context, req *rangeapi.Request, bytes int64) (*rangeapi.Response, error) {
	c := newCall(ctx, req)
	c.bytes = bytes
	return r.run(c)
}

// run takes a call through the pipeline and waits for its answer.
func (r *Replica) run(c *call) (*rangeapi.Response, error) {
	ctx := c.ctx
	if err := r.enqueue(c); err != nil {
		return nil, err
	}
	r.node.pool.schedule(r)
	_, err := clock.Await(ctx, c.done)
	if err == nil {
		return c.resp, c.err
	}
	r.leave(c, err)
	select {
	case <-c.done:
		return c.resp, c.err
	default:
	}
	if c.lost.Load() && errors.Is(err, context.DeadlineExceeded) {
		return nil, kverror.New(kverror.TimeoutLeaderFail, "range %s: %v", r.id, err)
	}
	return nil, kverror.Of(err)
}

// leave takes a call whose caller has given up away from the lock that holds it up.
func (r *Replica) leave(c *call, err error) {
	var out answers
	r.mu.Lock()
	r.leaveLocked(c, err, &out)
	r.mu.Unlock()
	out.send(r.node)
}

// enqueue admits a call: from here on it is answered exactly once.
func (r *Replica) enqueue(c *call) error {
	if err := r.node.admit(c); err != nil {
		return err
	}
	r.mu.Lock()
	err := r.takesLocked(c.req)
	for errors.Is(err, errNotYet) {
		err = r.awaitGenerationLocked(c)
	}
	if waiting := r.queueBytes + r.locks.BlockedBytes(); err == nil && waiting > 0 &&
		waiting+c.bytes > r.node.cfg.Limits.RangePendingBytes && !c.endsLocks() {
		err = kverror.New(kverror.TooManyRequests, "range %s: %d bytes wait for evaluation", r.id, waiting)
	}
	if err == nil {
		c.moveTo(placeQueue, nil)
		r.queue = append(r.queue, c)
		r.queueBytes += c.bytes
	}
	r.mu.Unlock()
	if err != nil {
		r.node.unadmit(c)
		if errors.Is(err, kverror.NotLeader) {
			r.group.Wake()
		}
	}
	return err
}

// pass is one turn of a replica in the pool.
type pass struct {
	store eval.PassStore
	// evaluation and budget are those of the call at hand.
	evaluation eval.Evaluation
	budget     eval.Budget
}

// evaluatePass evaluates what waits, in the pool. again says that there is more.
func (r *Replica) evaluatePass() (again bool) {
	var out answers
	r.mu.Lock()
	if r.evaluating {
		panic(fmt.Sprintf("shard: range %s is evaluated twice at a time", r.id))
	}
	r.evaluating = true
	watch := clock.StartStopwatch()
	pass := &pass{store: eval.NewPassStore(r.store, &r.appliedBatches)}
	for n := 0; ; n++ {
		if n >= r.node.cfg.Limits.BatchRequests || n > 0 && n%evaluateLook == 0 && watch.Elapsed() > r.node.cfg.Limits.EvaluateTurn {
			again = true
			break
		}
		c := r.nextLocked()
		if c == nil {
			break
		}
		lead := r.lead
		err := r.takesLocked(c.req)
		if err == nil && c.ctx.Err() != nil {
			err = kverror.Of(c.ctx.Err())
		}
		if err != nil {
			if c.cmd != nil && c.cmd.registered != nil {
				r.endRegistrationLocked(c.cmd.registered)
			}
			out.add(c, err)
			continue
		}
		if (!r.locks.Empty() || c.cmd != nil) && r.gateLocked(c, lead, &out) {
			if len(out.confirm) > 0 {
				r.confirmLocked(lead, &out)
			}
			continue
		}
		if needsCurrent(c) {
			c.asked = true
			r.appendLocked(c, lead)
			continue
		}
		r.evaluateLocked(c, lead, pass, &out)
	}
	r.evaluating = false
	ask := r.startLocked()
	if r.closed > 0 {
		r.notifyLocked()
	}
	r.mu.Unlock()
	if err := pass.store.Close(); err != nil {
		r.log.Error("close an iterator", zap.Error(err))
	}
	r.node.metrics.evaluateSeconds.Observe(watch.Elapsed().Seconds())
	out.send(r.node)
	r.ask(ask)
	return again
}

// waitsLocked says whether a call waits for evaluation.
func (r *Replica) waitsLocked() bool { return len(r.queue) > 0 || r.locks.HasWoken() }

// nextLocked takes the next call that may be evaluated, nil where there is none.
func (r *Replica) nextLocked() *call {
	l := &r.node.cfg.Limits
	if r.draining {
		r.queueWokenLocked()
	}
	if r.draining && len(r.queue) > 0 {
		// It is refused: takesLocked says so.
		c := r.queue[0]
		r.queue, r.barrier = r.queue[1:], nil
		r.queueBytes -= c.bytes
		c.moveTo(placeEvaluation, nil)
		return c
	}
	if r.lead == nil || r.closed > 0 || r.change != nil || r.rec.Merge.StandsStill() || !r.waitsLocked() || len(r.proposed) >= l.InflightBatches {
		return nil
	}
	if r.filling != nil && (len(r.filling.calls) >= l.BatchRequests || r.filling.bytes >= l.MaxEntryBytes) {
		return nil
	}
	i := 0
	if r.barrier != nil {
		if i = slices.Index(r.queue, r.barrier); i < 0 {
			return nil
		}
	} else if w := r.locks.Next(); w != nil {
		c := callOf(w)
		c.moveTo(placeEvaluation, nil)
		return c
	}
	if len(r.queue) == 0 {
		return nil
	}
	c := r.queue[i]
	if i == 0 {
		r.queue[0] = nil
		r.queue = r.queue[1:]
	} else {
		r.queue = slices.Delete(r.queue, i, i+1)
	}
	r.barrier = nil
	r.queueBytes -= c.bytes
	c.moveTo(placeEvaluation, nil)
	return c
}

// evaluateLocked evaluates a call without the lock and puts it where it belongs.
func (r *Replica) evaluateLocked(c *call, lead *leadership, pass *pass, out *answers) {
	r.mu.Unlock()
	var e *eval.Evaluation
	var err error
	if c.cmd != nil {
		e, err = r.evaluateCommand(c, pass)
	} else {
		e, err = r.evaluate(c, pass)
	}
	r.mu.Lock()
	r.placeLocked(c, lead, e, err, out)
}

// confirmLocked answers what only needs the leadership confirmed.
func (r *Replica) confirmLocked(lead *leadership, out *answers) {
	calls := out.confirm
	out.confirm = nil
	r.mu.Unlock()
	r.confirm(lead, calls)
	r.mu.Lock()
}

// needsCurrent says whether the call reads at an explicit revision inside a
// transaction, for which the current revision is asked before it is evaluated.
func needsCurrent(c *call) bool {
	return !c.asked && rangeapi.ExplicitRevision(c.req.Op)
}

// evaluate runs the evaluator on the state as it is now. What it returns is valid
// until the pass evaluates the next call.
func (r *Replica) evaluate(c *call, pass *pass) (*eval.Evaluation, error) {
	e := r.newEvaluation(c, pass)
	err := e.Run(c.req.Op)
	// From here on the answer counts with the call's own bytes: it is small beside the
	// bound, or the request would not fit into an entry.
	pass.budget.Release()
	return e, err
}

// newEvaluation returns the pass's evaluation, made anew for the call.
func (r *Replica) newEvaluation(c *call, pass *pass) *eval.Evaluation {
	n := r.node
	pass.budget = n.reads.Budget()
	in := eval.Input{
		Store: &pass.store, Base: eval.Newest, Overlay: r.overlayOf(), Guard: &r.mu,
		Cache: n.cache, Epochs: &r.epochs, Lacks: c.lacks,
		Floor: n.Floor(), Current: c.current, Compacted: c.compacted,
		MaxWriteBytes: n.cfg.Limits.MaxEntryBytes, Budget: &pass.budget,
	}
	if n.cfg.Leases != nil {
		in.Leases = (*attachableLeases)(r)
	}
	pass.evaluation.Reset(in)
	return &pass.evaluation
}

// attachableLeases is a replica as the evaluation asks it for leases.
type attachableLeases Replica

// Attachable implements eval.Leases.
func (a *attachableLeases) Attachable(lease keyspace.LeaseID) bool {
	r := (*Replica)(a)
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.markedLocked(lease)
}

func (r *Replica) overlayOf() *eval.Overlay {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.overlay
}

// placeLocked puts an evaluated call where it belongs: into the batch that fills,
// behind a batch it waits for, or back to its caller.
func (r *Replica) placeLocked(c *call, lead *leadership, e *eval.Evaluation, err error, out *answers) {
	if r.lead != lead {
		// The overlay on which it was evaluated is gone (trap 55). Within the term the
		// request is simply evaluated again.
		if c.cmd != nil {
			r.undoLocked(c.cmd)
			c.cmd.on = nil
		}
		if r.lead != nil && r.lead.term == lead.term {
			r.requeueLocked(c)
			return
		}
		out.add(c, r.errorLocked(kverror.Dropped, "the leadership ended during evaluation"))
		return
	}
	if c.cmd != nil {
		r.placeCommandLocked(c, lead, e, err, out)
		return
	}
	c.future, c.fail, c.writes, c.txn, c.draft = 0, nil, nil, nil, eval.Draft{}
	c.seen = e.Seen()
	if err != nil {
		r.placeFailedLocked(c, lead, err, out)
		return
	}
	if oldest := e.Oldest(); oldest != 0 && oldest < r.rec.Compacted {
		// Versions that it read at an explicit revision may have been removed meanwhile.
		c.compacted = r.rec.Compacted
		r.requeueLocked(c)
		return
	}
	c.draft, c.writes = e.Draft(), e.Writes()
	if len(c.writes) > 0 {
		c.txn = e.Txn()
	}
	if len(c.writes) > 0 && hasPut(c.writes) && r.node.full() {
		out.add(c, kverror.New(kverror.NoSpace, "the disk of node %s is full", r.node.cfg.Self))
		return
	}
	r.appendLocked(c, lead)
}

// placeFailedLocked is placeLocked of a call whose evaluation ended with an error.
func (r *Replica) placeFailedLocked(c *call, lead *leadership, err error, out *answers) {
	var wait eval.WaitError
	var future eval.FutureError
	var refused eval.Refusal
	var missing eval.NeedsLease
	switch {
	case errors.As(err, &missing):
		r.awaitMarkLocked(c, missing.Lease, out)
		return
	case errors.As(err, &wait):
		c.lacks = 0
		r.parkLocked(c, batchOf(wait.Txn.Batch))
		return
	case errors.As(err, &future):
		c.future = future.Revision
	case errors.As(err, &refused):
		c.fail = refused.Err
	default:
		out.add(c, err)
		return
	}
	r.appendLocked(c, lead)
}

func hasPut(writes []*eval.PendingVersion) bool {
	for _, v := range writes {
		if !v.Tombstone {
			return true
		}
	}
	return false
}

// parkLocked lets a call wait until the batch has its revisions.
func (r *Replica) parkLocked(c *call, b *batch) {
	c.waits++
	if c.waits > patience && r.barrier == nil {
		r.barrier = c
	}
	if b == nil || b.settled {
		// It got them meanwhile.
		r.requeueLocked(c)
		return
	}
	c.moveTo(placeParked, b)
	b.parked = append(b.parked, c)
}

// requeueLocked puts a call back to the front of the queue.
func (r *Replica) requeueLocked(c *call) {
	c.moveTo(placeQueue, nil)
	r.queue = slices.Insert(r.queue, 0, c)
	r.queueBytes += c.bytes
	r.node.pool.schedule(r)
}

// appendLocked adds an evaluated call to the batch that fills, and its writes to
// the overlay.
func (r *Replica) appendLocked(c *call, lead *leadership) {
	b := r.filling
	if b == nil {
		r.batches++
		b = newBatch(r.batches, lead)
		r.filling = b
	}
	c.moveTo(placeBatch, b)
	b.calls = append(b.calls, c)
	r.countLocked(c)
	if c.cmd != nil {
		b.items++
		b.bytes += c.cmd.entryBytes()
		if len(c.writes) > 0 {
			b.revokes++
		}
	}
	if len(c.writes) == 0 {
		return
	}
	c.txn.Batch = &b.Batch
	if b.txns == 0 || c.txn.Floor < b.floor {
		b.floor = c.txn.Floor
	}
	b.txns++
	for _, v := range c.writes {
		b.bytes += v.Bytes()
		r.overlay.Add(v)
	}
}

// startLocked takes the batch for which revisions are asked next, if none is under
// way.
func (r *Replica) startLocked() *batch {
	if r.sequencing != nil || r.filling == nil {
		return nil
	}
	r.sequencing, r.filling = r.filling, nil
	return r.sequencing
}

// ask asks the sequencer for a batch's revisions. It may be answered within the
// call.
func (r *Replica) ask(b *batch) {
	if b == nil {
		return
	}
	r.mu.Lock()
	req := keyspace.SequenceRequest{Range: r.id, Generation: r.rec.Generation, Count: b.txns}
	// A batch of commands alone needs no revision and no place among them.
	commands := b.items > 0 && b.txns == 0 && b.items == len(b.calls)
	r.mu.Unlock()
	if commands {
		r.settled(b, keyspace.SequenceAnswer{})
		return
	}
	watch := clock.StartStopwatch()
	r.node.cfg.Sequencer.Sequence(req, func(a keyspace.SequenceAnswer) {
		r.node.metrics.sequenceSeconds.Observe(watch.Elapsed().Seconds())
		r.sequenced(b, a)
	})
}

// sequenced takes the sequencer's answer for a batch: it fills in the revisions,
// proposes what changes something and asks for the batch that filled meanwhile.
func (r *Replica) sequenced(b *batch, a keyspace.SequenceAnswer) {
	r.node.observe(a)
	r.settled(b, a)
}

// settled goes on with a batch whose revisions are known.
func (r *Replica) settled(b *batch, a keyspace.SequenceAnswer) {
	var out answers
	r.mu.Lock()
	if r.sequencing != b || r.lead != b.lead {
		// A late answer: its batch was discarded (traps 55, 78). The numbers, if there
		// are any, bear no event.
		r.mu.Unlock()
		return
	}
	if a.Err != nil {
		r.cutLocked(b, sequenceError(a.Err), &out)
		ask := r.startLocked()
		r.notifyLocked()
		r.mu.Unlock()
		out.send(r.node)
		r.ask(ask)
		r.node.pool.schedule(r)
		return
	}
	r.settleLocked(b, &a, &out)
	var entry []byte
	if b.txns > 0 || b.items > 0 {
		entry = b.encode(r.rec.Generation, a.First)
		r.proposed = append(r.proposed, b)
		b.mutateAnswers(&out)
	}
	lead := b.lead
	r.mu.Unlock()
	out.send(r.node)
	r.confirm(lead, out.confirm)
	if entry != nil {
		if b.txns > 0 {
			r.node.metrics.batchRequests.Observe(float64(b.txns))
		}
		r.propose(b, entry)
		return
	}
	r.proceed(b)
}

// sequenceError makes of the sequencer's error one of requests that were certainly
// not proposed.
func sequenceError(err error) error {
	e := kverror.Of(err)
	if e.Fate() == kverror.NotApplied && e.Kind != kverror.BadRequest {
		return e
	}
	return kverror.New(kverror.Dropped, "no revision: %v", err)
}

// settleLocked gives each call of the batch its revision. Calls that change nothing
// get the last one before their place and leave the batch: its later fate is not theirs.
// They may be evaluated again, and then write with another batch.
func (r *Replica) settleLocked(b *batch, a *keyspace.SequenceAnswer, out *answers) {
	b.settled, b.first = true, a.First
	place := a.Current
	if b.txns > 0 {
		place = a.First - 1
		if a.First <= b.lead.revision || a.First <= r.rec.LastRevision {
			panic(fmt.Sprintf("shard: range %s was given revision %d after %d", r.id, a.First, max(b.lead.revision, r.rec.LastRevision)))
		}
		b.lead.revision = a.First + keyspace.Revision(b.txns) - 1
	}
	for _, c := range b.take(&b.calls, placeBatch) {
		if len(c.writes) > 0 {
			place++
			c.txn.SetRevision(place)
			if c.cmd != nil {
				c.cmd.answer = &rangeapi.Revoked{Revision: place}
			} else {
				c.draft.Settle(place, true)
			}
			b.calls = append(b.calls, c)
			continue
		}
		if c.cmd != nil {
			b.calls = append(b.calls, c)
			continue
		}
		r.settleReadLocked(c, place, a.Compacted, out)
	}
	if len(b.calls) != b.txns+b.items-b.revokes {
		panic(fmt.Sprintf("shard: range %s: %s has %d calls with writes, counted %d and %d", r.id, b, len(b.calls), b.txns, b.items))
	}
	for _, c := range b.take(&b.parked, placeParked) {
		r.requeueLocked(c)
	}
}

// settleReadLocked deals with a call that changes nothing, now that its place is
// known.
func (r *Replica) settleReadLocked(c *call, place, compacted keyspace.Revision, out *answers) {
	switch {
	case c.draft.Op == nil && c.fail == nil && (c.future == 0 || c.future <= place):
		// It asked for the current revision, or it now knows that the revision it reads
		// at is not one of the future.
		c.current, c.compacted = place, r.compactedLocked(compacted)
		c.future = 0
		r.requeueLocked(c)
		return
	case c.future != 0:
		c.fail = kverror.New(kverror.FutureRevision, "revision %d, the last one is %d", c.future, place)
	case c.fail == nil:
		c.draft.Settle(place, false)
	}
	r.confirming++
	if seen := batchOf(c.seen); seen != nil && !seen.Applied() && !mutation.Is(mutation.NoopFromOverlay) {
		c.moveTo(placeHeld, seen)
		seen.held = append(seen.held, c)
		return
	}
	out.toConfirm(c)
}

// confirm answers calls that change nothing, under the lease or after a ReadIndex
// begun now: all that they saw is applied.
func (r *Replica) confirm(lead *leadership, calls []*call) {
	if len(calls) == 0 {
		return
	}
	if r.group.LeaseHeld(lead.term) {
		r.confirmed(lead, calls, nil)
		return
	}
	r.group.ReadIndex(func(_ uint64, err error) { r.confirmed(lead, calls, err) })
}

func (r *Replica) confirmed(lead *leadership, calls []*call, err error) {
	var out answers
	r.mu.Lock()
	// A chain that was cut meanwhile changes nothing: what they saw is applied.
	if err == nil && (r.lead == nil || r.lead.term != lead.term) {
		err = errors.New("the leadership ended")
	}
	for _, c := range calls {
		c.isAt(placeConfirming, nil)
		switch {
		case err != nil:
			out.add(c, r.errorLocked(kverror.Dropped, err.Error()))
		default:
			out.add(c, c.fail)
		}
	}
	r.confirming -= len(calls)
	if r.closed > 0 || r.draining {
		r.notifyLocked()
	}
	r.mu.Unlock()
	out.send(r.node)
}

// propose hands a batch's entry to the group, again and again while the group has no room:
// only a loss of leadership drops a batch with revisions.
func (r *Replica) propose(b *batch, entry []byte) {
	term := b.lead.term
	err := r.group.Propose(term, entry, func(err error) { r.dropped(b, err) })
	if errors.Is(err, raftgroup.ErrFull) {
		r.mu.Lock()
		stands := r.sequencing == b && r.lead == b.lead
		b.refused = true
		r.mu.Unlock()
		if !stands {
			r.dropped(b, err)
			return
		}
		r.node.metrics.refused.Inc()
		r.node.after(refusedRetry, func() { r.proposeAgain(b, entry) })
		return
	}
	if err != nil {
		r.dropped(b, err)
	}
	r.proceed(b)
}

func (r *Replica) proposeAgain(b *batch, entry []byte) {
	r.mu.Lock()
	stands := r.sequencing == b && r.lead == b.lead
	if stands {
		b.refused = false
	}
	r.mu.Unlock()
	if stands {
		r.propose(b, entry)
	}
}

// proceed frees the place of a batch that was sequenced and asks for the next.
func (r *Replica) proceed(b *batch) {
	r.mu.Lock()
	if r.sequencing != b {
		r.mu.Unlock()
		return
	}
	r.sequencing = nil
	ask := r.startLocked()
	if ask == nil && (r.closed > 0 || r.draining) {
		r.notifyLocked()
	}
	more := r.waitsLocked()
	r.mu.Unlock()
	r.ask(ask)
	if more {
		r.node.pool.schedule(r)
	}
}

// dropped is called where a proposal was certainly not appended to the log.
func (r *Replica) dropped(b *batch, err error) {
	var out answers
	r.mu.Lock()
	detail := fmt.Sprintf("the proposal was dropped: %v", err)
	if r.lead == b.lead && slices.Contains(r.proposed, b) {
		r.cutLocked(b, r.errorLocked(kverror.Dropped, detail), &out)
		r.notifyLocked()
	}
	if i := slices.Index(r.lost, b); i >= 0 {
		// Batches that were evaluated on top of it apply nowhere. The log decides those of
		// other terms.
		kept := r.lost[:i]
		for _, l := range r.lost[i:] {
			if l.lead.term == b.lead.term {
				failCalls(l, &out, r.errorLocked(kverror.Dropped, detail))
				continue
			}
			kept = append(kept, l)
		}
		clear(r.lost[len(kept):])
		r.lost = kept
	}
	r.mu.Unlock()
	out.send(r.node)
	r.node.pool.schedule(r)
}

func failCalls(b *batch, out *answers, err error) {
	for _, c := range b.take(&b.calls, placeBatch) {
		out.add(c, err)
	}
}

// cutLocked cuts the chain at a batch that will never be applied: it and all that
// was evaluated on top of it are discarded. The leadership goes on from the batch
// before. Entries behind the cut that are in the log name a predecessor that is
// never applied, so they are no-ops.
func (r *Replica) cutLocked(b *batch, err error, out *answers) {
	i := slices.Index(r.proposed, b)
	if i < 0 {
		i = len(r.proposed)
	}
	gone := append([]*batch(nil), r.proposed[i:]...)
	for _, x := range []*batch{r.sequencing, r.filling} {
		if x != nil && !slices.Contains(gone, x) && !slices.Contains(r.proposed[:i], x) {
			gone = append(gone, x)
		}
	}
	clear(r.proposed[i:])
	r.proposed = r.proposed[:i]
	if slices.Contains(gone, r.sequencing) {
		r.sequencing = nil
	}
	r.filling = nil
	old := r.lead
	r.lead = &leadership{term: old.term, number: old.number, revision: old.revision, last: r.rec.Last, hash: r.rec.Hash}
	if i > 0 {
		r.lead.last, r.lead.hash = r.proposed[i-1].link, r.proposed[i-1].hash
	}
	for _, x := range r.proposed {
		x.lead = r.lead
	}
	for k := len(gone) - 1; k >= 0; k-- {
		r.discardLocked(gone[k], err, out)
	}
	r.node.metrics.cuts.Inc()
	r.log.Info("cut the pipeline", zap.Uint64("term", old.term), zap.Int("batches", len(gone)), zap.Error(err))
}

// discardLocked takes a batch out of the overlay and answers its calls.
func (r *Replica) discardLocked(b *batch, err error, out *answers) {
	for k := len(b.calls) - 1; k >= 0; k-- {
		b.calls[k].isAt(placeBatch, b)
		w := b.calls[k].writes
		for j := len(w) - 1; j >= 0; j-- {
			r.overlay.Discard(w[j])
		}
		if s := b.calls[k].cmd; s != nil {
			if reg := s.registered; reg != nil && reg.state == registrationMarks && r.registrations[reg.lease] == reg {
				// They fail rather than try again: if the record lists the range they would be back
				// at once, and a leader that is about to fall would drop this again.
				r.failRegistrationLocked(reg, err, out)
			}
			r.undoLocked(s)
		}
	}
	b.end(false)
	failCalls(b, out, err)
	for _, c := range b.take(&b.held, placeHeld) {
		r.confirming--
		out.add(c, err)
	}
	for _, c := range b.take(&b.parked, placeParked) {
		r.requeueLocked(c)
	}
}
