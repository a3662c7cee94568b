package placement

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/wake"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/sequencer"
	"github.com/skeindb/skein/transport"
)

// queued is a request for revisions that waits for its batch.
type queued struct {
	item sequencer.Item
	// age counts from Sequence on. It is a stopwatch since each request takes a look at it, and only gives up by it.
	age  clock.Stopwatch
	done func(keyspace.SequenceAnswer)
	// err is set where the request is refused.
	err error
}

// sequenceQueue holds the requests that wait while one batch is under way.
type sequenceQueue struct {
	mu sync.Mutex
	// Guarded by mu. refused are answered by a goroutine of their own, since Sequence
	// never calls done itself.
	waiting []queued
	refused []queued
	closed  bool

	wake       wake.Signal
	wakeRefuse wake.Signal

	// turn is held while a batch is under way. It guards the number of the last batch, the
	// highest term that an answer of was used, and the last revision in one. It comes before mu.
	// directRead runs since a read was last answered directly.
	turn       sync.Mutex
	number     uint64
	term       uint64
	last       keyspace.Revision
	directRead clock.Stopwatch

	// The following belong to the sequence loop.
	taken   []queued
	items   []sequencer.Item
	spare   []queued
	expired []queued
}

func (q *sequenceQueue) init() {
	q.wake, q.wakeRefuse = wake.New(), wake.New()
}

// Sequence asks the sequencer for req.Count consecutive revisions (at most
// sequencer.MaxBatchRevisions), or with Count 0 for the current one. It returns at once; done
// is called exactly once, from a goroutine of the Client's, and must not block. Before Sequence
// returns it is called for a Direct request that this node answers itself, and after Stop, with Stopped.
//
// Requests are answered in batches: one batch of a node is under way at a time, and
// all that come meanwhile join the next. A request that has no answer after
// SequenceTimeout gets an error of fate NotApplied: numbers that may have been
// allocated to it are used by nobody. So does one that finds MaxQueued waiting.
func (c *Client) Sequence(req keyspace.SequenceRequest, done func(keyspace.SequenceAnswer)) {
	e := queued{
		item: sequencer.Item{Range: req.Range, Generation: req.Generation, Count: uint32(max(req.Count, 0)), Also: req.Also, Permit: req.Permit},
		age:  clock.StartStopwatch(), done: done,
	}
	q := &c.queue
	if req.Direct && req.Count >= 0 && req.Count <= sequencer.MaxBatchRevisions && len(req.Also) == 0 {
		if a, ok := c.sequenceDirect(&e); ok {
			c.answer(&e, a)
			return
		}
	}
	q.mu.Lock()
	switch {
	case req.Count < 0 || req.Count > sequencer.MaxBatchRevisions:
		e.err = kverror.New(kverror.BadRequest, "%d revisions asked for, at most %d", req.Count, sequencer.MaxBatchRevisions)
	case len(req.Also) > 0 && (req.Count != 1 || len(req.Also) >= keyspace.MaxRevisionRanges):
		e.err = kverror.New(kverror.BadRequest, "%d revisions for %d further ranges", req.Count, len(req.Also))
	case q.closed:
		q.mu.Unlock()
		done(keyspace.SequenceAnswer{Err: kverror.New(kverror.Stopped, "range %s asks for revisions", req.Range)})
		return
	case len(q.waiting) >= c.o.MaxQueued:
		e.err = kverror.New(kverror.TooManyRequests, "%d requests wait for revisions", len(q.waiting))
	}
	if e.err != nil {
		q.refused = append(q.refused, e)
	} else {
		q.waiting = append(q.waiting, e)
	}
	q.mu.Unlock()
	if e.err != nil {
		q.wakeRefuse.Set()
	} else {
		q.wake.Set()
	}
}

// refuseLoop answers refused requests.
func (c *Client) refuseLoop() {
	for {
		select {
		case <-c.ctx.Done():
			return
		case <-c.queue.wakeRefuse:
		}
		c.queue.refuse(c)
	}
}

func (q *sequenceQueue) refuse(c *Client) {
	q.mu.Lock()
	refused := q.refused
	q.refused = nil
	q.mu.Unlock()
	for i := range refused {
		c.o.Metrics.SequenceErrors.Inc()
		refused[i].done(keyspace.SequenceAnswer{Err: refused[i].err})
	}
}

// drain answers what waits when the Client stops, after its goroutines have ended.
func (c *Client) drain() {
	q := &c.queue
	q.mu.Lock()
	q.closed = true
	for _, e := range q.waiting {
		e.err = kverror.New(kverror.Stopped, "range %s asks for revisions", e.item.Range)
		q.refused = append(q.refused, e)
	}
	q.waiting = nil
	q.mu.Unlock()
	q.refuse(c)
}

// sequenceLoop sends one batch after the other.
func (c *Client) sequenceLoop() {
	for {
		select {
		case <-c.ctx.Done():
			return
		case <-c.queue.wake:
		}
		for c.ctx.Err() == nil && c.queue.take(c.o.SequenceTimeout) {
			c.queue.turn.Lock()
			c.sequenceBatch()
			c.queue.turn.Unlock()
		}
	}
}

// directReadEvery lies between two reads that are answered directly. Reads that come faster cost less in batches: a
// thousand clients' gets took 3 to 12 % more of the servers' processor time where each was answered directly. A batch
// of writes has come together already.
const directReadEvery = 200 * time.Microsecond

// sequenceDirect answers a request as a batch of its own if this node is the sequencer, no other batch is under
// way, no read was answered so just before, and the answer is there at once. Else the request has to wait like any
// other.
func (c *Client) sequenceDirect(e *queued) (a keyspace.SequenceAnswer, ok bool) {
	q := &c.queue
	if c.Leader() != c.o.Self || c.ctx.Err() != nil || !q.turn.TryLock() {
		return a, false
	}
	defer q.turn.Unlock()
	if e.item.Count == 0 {
		if q.directRead.Elapsed() < directReadEvery {
			return a, false
		}
		q.directRead = e.age
	}
	q.number++
	b := sequencer.Batch{Boot: c.o.Boot, Number: q.number, Items: []sequencer.Item{e.item}}
	own := c.o.Service.sequencer.Begin(c.o.Self, b)
	g, ok, err := own.Answered()
	if !ok && !own.Withdraw() {
		g, err = own.Wait(c.ctx) // it is on its way
		ok = true
	}
	if !ok || err != nil || q.accept(&b, &g) != nil {
		return a, false
	}
	c.o.Metrics.BatchRequests.Observe(1)
	c.o.Metrics.BatchRevisions.Observe(float64(b.Total()))
	g.Answers(b.Items, func(_ int, got keyspace.SequenceAnswer) { a = got })
	return a, true
}

// take moves what the next batch can carry into q.taken, in the order of arrival,
// and what has waited for timeout into q.expired. It returns false where nothing
// waits.
func (q *sequenceQueue) take(timeout time.Duration) bool {
	q.taken, q.items, q.expired = q.taken[:0], q.items[:0], q.expired[:0]
	q.mu.Lock()
	defer q.mu.Unlock()
	n, total, also := 0, 0, 0
	old := true // until one is met that is not: they are in order
	for ; n < len(q.waiting) && len(q.taken) < sequencer.MaxItems; n++ {
		e := &q.waiting[n]
		if old = old && e.age.Elapsed() >= timeout; old {
			q.expired = append(q.expired, *e)
			continue
		}
		total, also = total+int(e.item.Count), also+len(e.item.Also)
		if total > sequencer.MaxBatchRevisions || also > sequencer.MaxAlso {
			break
		}
		q.taken = append(q.taken, *e)
		q.items = append(q.items, e.item)
	}
	// The rest moves into the other buffer. A long queue is not shifted down in place, and its
	// front does not keep the array alive.
	rest := append(q.spare[:0], q.waiting[n:]...)
	clear(q.waiting)
	q.spare, q.waiting = q.waiting[:0], rest
	return n > 0
}

// sequenceBatch brings one batch to its answer.
func (c *Client) sequenceBatch() {
	q := &c.queue
	for i := range q.expired {
		c.answer(&q.expired[i], keyspace.SequenceAnswer{Err: kverror.New(kverror.NoLeader, "no sequencer took the request in time")})
	}
	if len(q.taken) == 0 {
		return
	}
	q.number++
	b := sequencer.Batch{Boot: c.o.Boot, Number: q.number, Items: q.items}
	c.o.Metrics.BatchRequests.Observe(float64(len(b.Items)))
	c.o.Metrics.BatchRevisions.Observe(float64(b.Total()))
	g, err := c.sequenceOnce(&b)
	if err != nil {
		for i := range q.taken {
			c.answer(&q.taken[i], keyspace.SequenceAnswer{Err: err})
		}
	} else {
		g.Answers(q.items, func(i int, a keyspace.SequenceAnswer) { c.answer(&q.taken[i], a) })
	}
	clear(q.taken)
	clear(q.expired)
}

func (c *Client) answer(e *queued, a keyspace.SequenceAnswer) {
	if a.Err != nil {
		c.o.Metrics.SequenceErrors.Inc()
	}
	a.Took = e.age.Elapsed()
	c.o.Metrics.SequenceSeconds.Observe(a.Took.Seconds())
	e.done(a)
}

// sequenceOnce asks for one batch until it is answered or its oldest request has
// waited too long. The number stays the same through all attempts, and with it the
// content: a sequencer that has answered it already answers the same again. An
// answer is taken only from the attempt that runs, so what another one might still
// say is lost with it.
func (c *Client) sequenceOnce(b *sequencer.Batch) (sequencer.Grant, error) {
	q := &c.queue
	var local *sequencer.Pending
	if c.Leader() == c.o.Self {
		// The sequencer is a function call away, and mostly answers at once.
		local = c.beginLocal(b)
		switch g, ok, err := local.Answered(); {
		case ok && err == nil:
			return g, q.accept(b, &g)
		case ok:
			local = nil
		}
	}
	left := c.o.SequenceTimeout - q.taken[0].age.Elapsed()
	ctx, cancel := clock.WithTimeout(c.ctx, c.o.Clock, left)
	defer cancel()
	var g sequencer.Grant
	err := c.attempts(ctx, true, func(ctx context.Context, node keyspace.NodeID) (err error) {
		var own *sequencer.Pending
		own, local = local, nil
		if g, err = c.sequenceAt(ctx, node, b, own); err != nil {
			return err
		}
		c.SetLeaderHint(node, g.Term)
		return q.accept(b, &g)
	})
	if err != nil {
		return sequencer.Grant{}, c.sequenceError(err)
	}
	return g, nil
}

// beginLocal gives the batch to this node's own sequencer, with a content of its
// own: the queue's buffer is the next batch's as soon as this one has an answer.
func (c *Client) beginLocal(b *sequencer.Batch) *sequencer.Pending {
	own := *b
	own.Items = slices.Clone(b.Items)
	return c.o.Service.sequencer.Begin(c.o.Self, own)
}

// sequenceAt makes one attempt at a node. own, if not nil, is the batch at this node's own
// sequencer. It is waited for, or withdrawn before another sequencer is asked.
func (c *Client) sequenceAt(ctx context.Context, node keyspace.NodeID, b *sequencer.Batch, own *sequencer.Pending) (sequencer.Grant, error) {
	if node == c.o.Self {
		if own == nil {
			own = c.beginLocal(b)
		}
		return own.Wait(ctx)
	}
	if own != nil {
		own.Withdraw()
	}
	p, err := c.o.Bus.Call(ctx, node, transport.MethodPlacementSequence, b.Encode())
	if err != nil {
		return sequencer.Grant{}, fmt.Errorf("ask node %s for revisions: %w", node, err)
	}
	return sequencer.DecodeGrant(p)
}

// errStaleAnswer is an answer to another number, or from a sequencer older than
// one whose answers were used.
var errStaleAnswer = kverror.New(kverror.NotLeader, "answer of an earlier sequencer")

// accept checks an answer before it is used. Revisions that step back in one term
// order break S2 of package sequencer: going on would corrupt what clients see.
func (q *sequenceQueue) accept(b *sequencer.Batch, g *sequencer.Grant) error {
	if g.Number != b.Number || g.Term < q.term {
		return errStaleAnswer
	}
	if g.Before < q.last {
		panic(fmt.Sprintf("placement: revisions after %d allocated in term %d, revision %d in term %d before",
			g.Before, g.Term, q.last, q.term))
	}
	q.term, q.last = g.Term, g.Last(b.Items)
	return nil
}

// sequenceError gives the end of a batch without an answer its kind: whatever
// happened to it, its numbers are not used.
func (c *Client) sequenceError(err error) error {
	if c.ctx.Err() != nil {
		return kverror.New(kverror.Stopped, "ask for revisions: %v", err)
	}
	var e *kverror.Error
	if errors.As(err, &e) && e.Fate() == kverror.NotApplied && e.Retry() != kverror.RetryRouter {
		return e
	}
	return kverror.New(kverror.NoLeader, "ask for revisions: %v", err)
}
