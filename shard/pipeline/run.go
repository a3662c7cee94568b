package pipeline

import (
	"context"
	"errors"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
)

// NewRequest returns the call of a client's request that can change something.
func (p *Pipeline) NewRequest(ctx context.Context, req *rangeapi.Request) *Call {
	return NewCall(ctx, req, (*request)(p), int64(rangeapi.SizeBound(req.Op))+CallOverheadBytes)
}

// Run takes a call through the pipeline and waits for its answer. The call has come when the stopwatch was started. It is
// called without mu. Where nothing is in the way the caller evaluates: a change of goroutines would cost more than most evaluations.
// If the disk makes it wait there, it looks at its context only when the read is over.
func (p *Pipeline) Run(c *Call, watch clock.Stopwatch) (*rangeapi.Response, error) {
	c.come(p, watch)
	if err := p.enqueue(c); err != nil {
		return nil, err
	}
	p.shared.Pool.here(p)
	return p.Wait(c)
}

// Start is Run without the wait. answered is called once, without mu, when the call has its answer or its error, which
// Wait returns from then on. It must not block: others wait for their answers. Start says no where the call is refused, or
// has to wait before it is admitted. Then nothing has happened, and Run tells more.
func (p *Pipeline) Start(c *Call, watch clock.Stopwatch, answered func(ok bool)) bool {
	c.come(p, watch)
	c.onAnswer = answered
	if p.enqueue(c) != nil {
		return false
	}
	p.Schedule()
	return true
}

// errWaits says that a call would have to wait before it is admitted.
var errWaits = errors.New("pipeline: the call has to wait")

// Wait waits for the answer of an admitted call, no longer than its context lasts. It is called once, without mu.
func (p *Pipeline) Wait(c *Call) (*rangeapi.Response, error) {
	_, err := clock.Await(c.ctx, c.done)
	if err == nil {
		return c.answer()
	}
	p.giveUp(c, err)
	select {
	case <-c.done:
		return c.answer()
	default:
	}
	if c.lost.Load() && errors.Is(err, context.DeadlineExceeded) {
		return nil, kverror.New(kverror.TimeoutLeaderFail, "range %s: %v", p.id, err)
	}
	return nil, kverror.Of(err)
}

// giveUp takes a call whose caller has given up away from the lock that holds it up.
func (p *Pipeline) giveUp(c *Call, err error) {
	var out Answers
	p.mu.Lock()
	p.Leave(c, err, &out)
	p.mu.Unlock()
	p.Send(&out)
}

// enqueue admits a call: from here on it is answered exactly once.
func (p *Pipeline) enqueue(c *Call) error {
	if err := p.shared.Budget.admit(c); err != nil {
		return err
	}
	p.mu.Lock()
	err := p.enqueueLocked(c)
	p.mu.Unlock()
	if err != nil {
		p.shared.Budget.leave(c)
		if errors.Is(err, kverror.NotLeader) {
			p.env.Wake()
		}
	}
	return err
}

func (p *Pipeline) enqueueLocked(c *Call) error {
	for {
		wait, err := p.takes(c)
		if err != nil {
			return err
		}
		if wait == nil {
			break
		}
		if c.onAnswer != nil {
			return errWaits
		}
		p.mu.Unlock()
		_, err = clock.Await(c.ctx, wait)
		p.mu.Lock()
		if err != nil {
			return kverror.Of(err)
		}
	}
	if waiting := p.queueBytes + p.locks.BlockedBytes(); waiting > 0 &&
		waiting+c.bytes > p.shared.Limits.RangePendingBytes && !c.endsLocks() {
		return kverror.New(kverror.TooManyRequests, "range %s: %d bytes wait for evaluation", p.id, waiting)
	}
	c.moveTo(placeQueue, nil)
	p.queue = append(p.queue, c)
	p.queueBytes += c.bytes
	return nil
}
