package pipeline

import (
	"fmt"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/eval"
)

// evaluateLook is after how many calls, and keys that they visit in the store, a pass looks
// whether its turn is over. One whose slot is lent looks after each call: a few reads of a slow disk
// would take many turns.
const evaluateLook = 8

// evaluatePass evaluates what waits, in the pool. again says that there is more.
func (p *Pipeline) evaluatePass(w *worker) (again bool) {
	pass := &Pass{watched: watchedStore{reads: &w.reads}}
	out := &pass.out
	p.mu.Lock()
	if p.evaluating {
		panic(fmt.Sprintf("pipeline: range %s is evaluated twice at a time", p.id))
	}
	p.evaluating = true
	watch := clock.StartStopwatch()
	begun := watch.After(p.shared.Epoch)
	p.read(begun)
	p.env.BeginPass(pass)
	l := &p.shared.Limits
	for n, looked := 0, 0; ; n++ {
		work := n + pass.watched.visited
		look := work-looked >= evaluateLook || w.lent.Load()
		var elapsed time.Duration
		if look {
			looked, elapsed = work, watch.Elapsed()
			p.read(begun + elapsed)
		}
		if n >= l.BatchRequests || look && elapsed > l.EvaluateTurn || w.guest && w.lent.Load() {
			again = true
			break
		}
		c := p.next()
		if c == nil {
			break
		}
		p.step(c, pass)
	}
	took := watch.Elapsed()
	p.read(begun + took)
	if p.filling != nil {
		p.filling.evaluated(p.now)
	}
	p.evaluating = false
	ask := p.start()
	if p.closed > 0 {
		p.env.Notify()
	}
	p.mu.Unlock()
	if err := pass.Store.Close(); err != nil {
		p.log.Error("close an iterator", zap.Error(err))
	}
	p.shared.Metrics.evaluateSeconds.Observe(took.Seconds())
	p.Send(out)
	p.ask(ask, true)
	return again
}

// step takes one call out of evaluation to where it belongs.
func (p *Pipeline) step(c *Call, pass *Pass) {
	out := &pass.out
	if err := p.refusal(c); err != nil {
		c.op.Undo(c, nil, out)
		out.Add(c, err)
		return
	}
	if c.op.Gate(c, out) {
		if len(out.confirm) > 0 {
			p.confirmNow(out)
		}
		return
	}
	if needsCurrent(c) {
		c.marks |= wasAsked
		p.Append(c)
		return
	}
	lead := p.lead
	p.mu.Unlock()
	err := c.op.Evaluate(c, pass)
	p.mu.Lock()
	if p.lead == lead {
		c.op.Place(c, pass, err, out)
		return
	}
	// The overlay on which it was evaluated is gone (trap 55). Within the term the
	// request is simply evaluated again.
	c.op.Undo(c, nil, out)
	if p.Term() == lead.term {
		p.Requeue(c)
		return
	}
	out.Add(c, p.env.Error(kverror.Dropped, "the leadership ended during evaluation"))
}

// refusal says why a call is not evaluated any more.
func (p *Pipeline) refusal(c *Call) error {
	wait, err := p.takes(c)
	switch {
	case err != nil:
		return err
	case wait != nil:
		return p.env.Error(kverror.Busy, "the range is about to change")
	case c.ctx.Err() != nil:
		return kverror.Of(c.ctx.Err())
	case c.Req.Permit.Ended(p.access):
		// In a batch it would take all others with it.
		return kverror.New(kverror.AccessChanged, "rights were taken away at index %d", p.access)
	}
	return nil
}

// needsCurrent says whether the call reads at an explicit revision inside a
// transaction, for which the current revision is asked before it is evaluated.
func needsCurrent(c *Call) bool {
	return c.marks&wasAsked == 0 && rangeapi.ExplicitRevision(c.Req.Op)
}

// confirmNow answers what only needs the leadership confirmed, without waiting for the end of
// the pass.
func (p *Pipeline) confirmNow(out *Answers) {
	calls := out.confirm
	out.confirm = nil
	p.mu.Unlock()
	p.confirm(out.term, calls)
	p.mu.Lock()
}

// Evaluation returns the pass's evaluation, made anew for the call.
func (p *Pipeline) Evaluation(c *Call, pass *Pass) *eval.Evaluation {
	pass.Budget = p.shared.Reads.AtOnce()
	in := p.env.Input(pass)
	pass.watched.Store, in.Store = in.Store, &pass.watched
	p.mu.Lock()
	in.Overlay = p.overlay
	p.mu.Unlock()
	in.Base, in.Guard, in.Record, in.Counts = eval.Newest, p.mu, p.rec, &p.counts
	in.Cache, in.Epochs, in.Lacks = p.shared.Cache, p.epochs, c.Lacks
	in.Current, in.Compacted = c.current, c.compacted
	in.MaxWriteBytes, in.Budget = p.shared.Limits.MaxEntryBytes, &pass.Budget
	pass.Evaluation.Reset(in)
	return &pass.Evaluation
}
