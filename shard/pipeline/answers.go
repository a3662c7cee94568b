package pipeline

import (
	"errors"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi/stages"
)

// Answers are collected with mu and sent without it, by Pipeline.Send.
type Answers struct {
	list []answer
	// confirm are calls whose answer needs the leadership of the term confirmed.
	confirm []*Call
	term    uint64
	later   []func()
}

type answer struct {
	c   *Call
	err error
}

// Add notes the answer of a call: its draft, or the error.
func (a *Answers) Add(c *Call, err error) {
	c.moveTo(placeAnswered, nil)
	a.list = append(a.list, answer{c, err})
}

// Later has f called once mu is free and the answers are sent.
func (a *Answers) Later(f func()) { a.later = append(a.later, f) }

// join adds what other has. Other confirms nothing: what is undone has failed.
func (a *Answers) join(other *Answers) {
	a.list = append(a.list, other.list...)
	a.later = append(a.later, other.later...)
}

// Confirm notes a call that changes nothing: it is answered once the leadership is confirmed.
func (p *Pipeline) Confirm(c *Call, out *Answers) {
	p.confirming++
	p.toConfirm(c, out)
}

func (p *Pipeline) toConfirm(c *Call, out *Answers) {
	c.moveTo(placeConfirming, nil)
	out.confirm, out.term = append(out.confirm, c), p.lead.term
}

// Send gives the callers their answers. It is called without mu.
func (p *Pipeline) Send(out *Answers) {
	for _, x := range out.list {
		p.answer(x.c, x.err)
	}
	for _, f := range out.later {
		f()
	}
	p.confirm(out.term, out.confirm)
}

// answer gives the caller its answer and the node the call's bytes back. It is
// called once.
func (p *Pipeline) answer(c *Call, err error) {
	p.shared.Budget.leave(c)
	c.op.Answered()
	c.err = err
	close(c.done)
	if c.onAnswer != nil {
		c.onAnswer(err == nil)
	}
}

// confirm answers calls that change nothing, under the lease or after a ReadIndex
// begun now: all that they saw is applied.
func (p *Pipeline) confirm(term uint64, calls []*Call) {
	if len(calls) == 0 {
		return
	}
	if p.env.LeaseHeld(term) {
		p.confirmed(term, calls, nil)
		return
	}
	now := clock.StartStopwatch().After(p.shared.Epoch)
	p.mu.Lock()
	p.read(now)
	for _, c := range calls {
		c.enter(stages.Confirming, p.now)
	}
	p.mu.Unlock()
	p.env.ReadIndex(func(_ uint64, err error) { p.confirmed(term, calls, err) })
}

func (p *Pipeline) confirmed(term uint64, calls []*Call, err error) {
	var out Answers
	p.mu.Lock()
	// A chain that was cut meanwhile changes nothing: what they saw is applied.
	if err == nil && p.Term() != term {
		err = errors.New("the leadership ended")
	}
	for _, c := range calls {
		c.isAt(placeConfirming, nil)
		switch {
		case err != nil:
			out.Add(c, p.env.Error(kverror.Dropped, err.Error()))
		default:
			out.Add(c, c.fail)
		}
	}
	p.confirming -= len(calls)
	if p.closed > 0 || p.draining {
		p.env.Notify()
	}
	p.mu.Unlock()
	p.Send(&out)
}
