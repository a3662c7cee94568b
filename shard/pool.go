package shard

import "sync"

// pool is the node's fixed set of goroutines that evaluate. A replica is in the
// queue or with one worker, never with two.
type pool struct {
	mu     sync.Mutex
	cond   sync.Cond
	queue  []*Replica
	state  map[*Replica]poolState
	closed bool
	// held keeps the workers from beginning anything: a seam for stories, in which
	// the batch that a call joins must not depend on the schedule.
	held bool
	wg   sync.WaitGroup
}

type poolState uint8

const (
	poolQueued poolState = iota + 1
	poolRunning
	// poolAgain is poolRunning of a replica that was scheduled meanwhile.
	poolAgain
)

func newPool() *pool {
	p := &pool{state: make(map[*Replica]poolState)}
	p.cond.L = &p.mu
	return p
}

func (p *pool) start(workers int) {
	for range workers {
		p.wg.Go(p.work)
	}
}

// schedule has the replica evaluated soon.
func (p *pool) schedule(r *Replica) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return
	}
	switch p.state[r] {
	case 0:
		p.state[r] = poolQueued
		p.queue = append(p.queue, r)
		p.cond.Signal()
	case poolRunning:
		p.state[r] = poolAgain
	case poolQueued, poolAgain:
	}
}

func (p *pool) work() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for {
		for (len(p.queue) == 0 || p.held) && !p.closed {
			p.cond.Wait()
		}
		if p.closed {
			return
		}
		r := p.queue[0]
		p.queue[0] = nil
		p.queue = p.queue[1:]
		p.state[r] = poolRunning
		p.mu.Unlock()
		again := r.evaluatePass()
		p.mu.Lock()
		if again || p.state[r] == poolAgain {
			p.state[r] = poolQueued
			p.queue = append(p.queue, r)
			p.cond.Signal()
		} else {
			delete(p.state, r)
		}
	}
}

// stop ends the workers and waits for them.
func (p *pool) stop() {
	p.mu.Lock()
	p.closed = true
	p.cond.Broadcast()
	p.mu.Unlock()
	p.wg.Wait()
}
