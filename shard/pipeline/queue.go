package pipeline

import (
	"math"
	"slices"

	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi/stages"
	"github.com/skeindb/skein/shard/eval"
	"github.com/skeindb/skein/shard/locktable"
)

// patience is how often a call may be put back before the range evaluates nothing
// that came after it.
const patience = 3

// takes says whether a call may go into the pipeline, or when to ask again.
func (p *Pipeline) takes(c *Call) (wait <-chan struct{}, err error) {
	wait, err = p.env.Takes(c.Req)
	if err == nil && p.draining {
		return nil, p.env.Error(kverror.Busy, "the node hands its leaderships over")
	}
	return wait, err
}

// next takes the next call that may be evaluated, nil where there is none.
func (p *Pipeline) next() *Call {
	l := &p.shared.Limits
	if p.draining {
		p.queueWoken()
		if len(p.queue) > 0 {
			return p.take(0) // it is refused: takes says so
		}
	}
	if p.lead == nil || p.closed > 0 || !p.env.MayEvaluate() || !p.Waits() || len(p.proposed) >= l.InflightBatches {
		return nil
	}
	if p.filling != nil && (len(p.filling.calls) >= l.BatchRequests || p.filling.bytes >= l.MaxEntryBytes) {
		return nil
	}
	i := 0
	if p.barrier != nil {
		if i = slices.Index(p.queue, p.barrier); i < 0 {
			return nil
		}
	} else if w := p.locks.Next(); w != nil {
		c := callOf(w)
		c.moveTo(placeEvaluation, nil)
		c.enter(stages.Evaluation, p.now)
		return c
	}
	if len(p.queue) == 0 {
		return nil
	}
	return p.take(i)
}

// take takes the i-th call out of the queue to be evaluated.
func (p *Pipeline) take(i int) *Call {
	c := p.queue[i]
	if i == 0 {
		p.queue[0] = nil
		p.queue = p.queue[1:]
	} else {
		p.queue = slices.Delete(p.queue, i, i+1)
	}
	p.barrier = nil
	p.queueBytes -= c.bytes
	c.moveTo(placeEvaluation, nil)
	c.enter(stages.Evaluation, p.now)
	return c
}

// Append adds an evaluated call to the batch that fills, and its writes to the overlay.
func (p *Pipeline) Append(c *Call) {
	b := p.filling
	if b == nil {
		p.batches++
		b = newBatch(p.batches, p.lead)
		p.filling = b
	}
	b.add(c)
	if c.evaluated() && c.marks&wasCounted == 0 {
		c.marks |= wasCounted
		p.env.Count(c)
	}
	for _, v := range c.writes {
		p.overlay.Add(v)
	}
}

// Park lets a call wait until the batch has its revisions.
func (p *Pipeline) Park(c *Call, on *eval.Batch) {
	if c.waits < math.MaxUint8 {
		c.waits++
	}
	if c.waits > patience && p.barrier == nil {
		p.barrier = c
	}
	b := batchOf(on)
	if b == nil || b.settled {
		// It got them meanwhile.
		p.Requeue(c)
		return
	}
	c.moveTo(placeParked, b)
	c.enter(stages.Parked, p.now)
	b.parked = append(b.parked, c)
}

// Requeue puts a call to the front of the queue.
func (p *Pipeline) Requeue(c *Call) {
	c.moveTo(placeQueue, nil)
	c.enter(stages.Queued, p.now)
	p.queue = slices.Insert(p.queue, 0, c)
	p.queueBytes += c.bytes
	p.Schedule()
}

// Refuse answers everything that waits in the queue.
func (p *Pipeline) Refuse(out *Answers, err error) {
	for _, c := range p.queue {
		c.isAt(placeQueue, nil)
		c.op.Undo(c, err, out) // the attachment of a lease has begun before it came here
		out.Add(c, err)
	}
	clear(p.queue)
	p.queue, p.queueBytes, p.barrier = p.queue[:0], 0, nil
}

// Block lets a call wait until the lock has ended or changed.
func (p *Pipeline) Block(c *Call, m locktable.Meeting) {
	c.moveTo(placeBlocked, nil)
	c.enter(stages.Blocked, p.now)
	c.met = m.Held.Lock
	p.locks.Wait(c, m)
	p.shared.Metrics.LockWaits.Inc()
}

// Leave answers a call with an error if it waits for a lock.
func (p *Pipeline) Leave(c *Call, err error, out *Answers) {
	if c.place != placeBlocked {
		return
	}
	p.locks.Leave(c)
	out.Add(c, kverror.Of(err))
}

// queueWoken puts the calls whose lock has ended back to the front of the queue.
func (p *Pipeline) queueWoken() {
	if !p.locks.HasWoken() {
		return
	}
	var calls []*Call
	for _, w := range p.locks.TakeWoken() {
		c := callOf(w)
		c.moveTo(placeQueue, nil)
		c.enter(stages.Queued, p.now)
		p.queueBytes += c.bytes
		calls = append(calls, c)
	}
	p.queue = slices.Insert(p.queue, 0, calls...)
}

// callOf returns the waiter as the call that it is.
func callOf(w locktable.Waiter) *Call {
	return w.(*Call) //nolint:forcetypeassert // a pipeline's waiters are its calls
}
