package pipeline

import (
	"runtime"
	"time"

	"github.com/skeindb/skein/clock"
)

const (
	// diskWorkers is how many workers there are beside those that have the processor's slots:
	// so many passes may wait for the disk, and all others go on.
	diskWorkers = 64
	// lendAfter is after how long a read counts as one that waits for the disk; it takes up to
	// twice as long to be found. Most reads are answered from memory within microseconds.
	// Waking another worker costs more than such a read.
	lendAfter = time.Millisecond
)

// NewPool returns a pool without workers.
func NewPool(c clock.Clock) *Pool {
	p := &Pool{clock: c, state: make(map[*Pipeline]poolState)}
	p.cond.L = &p.mu
	return p
}

// Start starts the workers. That many passes may use the processor at a time.
func (p *Pool) Start(slots int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.slots = slots
	for range slots + diskWorkers {
		w := &worker{}
		p.workers = append(p.workers, w)
		p.wg.Go(func() { p.work(w) })
	}
	for range slots {
		w := &worker{guest: true}
		p.workers, p.guests = append(p.workers, w), append(p.guests, w)
	}
}

func (p *Pool) work(w *worker) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for {
		for (len(p.queue) == 0 || p.held || p.busy >= p.slots) && !p.closed {
			p.cond.Wait()
		}
		if p.closed {
			return
		}
		r := p.queue[0]
		p.queue[0] = nil
		p.queue = p.queue[1:]
		p.pass(w, r)
	}
}

// pass has a worker evaluate. mu is held, but not during the evaluation.
func (p *Pool) pass(w *worker, r *Pipeline) {
	p.state[r] = poolRunning
	p.busy++
	w.running = true
	p.watch()
	again := p.evaluate(w, r)
	w.running = false
	if !w.lent.Swap(false) {
		p.busy--
	}
	if again || p.state[r] == poolAgain {
		p.state[r] = poolQueued
		p.add(r)
	} else {
		delete(p.state, r)
	}
}

func (p *Pool) evaluate(w *worker, r *Pipeline) (again bool) {
	p.mu.Unlock()
	defer p.mu.Lock()
	// Whoever can run now may bring a call, which then shares an entry with the first one. Where nobody can,
	// as at light load, this costs nothing.
	runtime.Gosched()
	return r.evaluatePass(w)
}

// here has the caller evaluate, which is schedule without a change of goroutines. It does so where nothing else waits and a
// slot is free, for one pass; a read that waits for the disk holds the caller up, and ends the pass.
func (p *Pool) here(r *Pipeline) {
	p.mu.Lock()
	defer p.mu.Unlock()
	last := len(p.guests) - 1
	if last < 0 || p.closed || p.held || p.busy >= p.slots || len(p.queue) > 0 || p.state[r] != 0 {
		p.scheduleLocked(r)
		return
	}
	w := p.guests[last]
	p.guests = p.guests[:last]
	p.wg.Add(1) // before closed is set, and so before Stop waits
	p.pass(w, r)
	p.guests = append(p.guests, w)
	p.wg.Done()
	if len(p.queue) > 0 && p.busy < p.slots {
		p.cond.Signal() // what came meanwhile found no slot
	}
}

// Hold keeps the workers from beginning anything until release is called. It is a seam for
// tests, in which the batch that a call joins must not depend on the schedule.
func (p *Pool) Hold() (release func()) {
	p.mu.Lock()
	p.held = true
	p.mu.Unlock()
	return func() {
		p.mu.Lock()
		p.held = false
		p.mu.Unlock()
		p.cond.Broadcast()
	}
}

// Stop ends the workers and waits for them.
func (p *Pool) Stop() {
	p.mu.Lock()
	p.closed = true
	p.cond.Broadcast()
	if p.timer != nil {
		p.timer.Stop()
	}
	p.mu.Unlock()
	p.wg.Wait()
}
