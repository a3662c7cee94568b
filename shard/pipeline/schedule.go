package pipeline

import "sync"

// Pool is the node's fixed set of goroutines that evaluate. A pipeline is in the
// queue or with one worker, never with two. Its mu comes after that of any pipeline.
type Pool struct {
	mu     sync.Mutex
	cond   sync.Cond
	queue  []*Pipeline
	state  map[*Pipeline]poolState
	closed bool
	// held keeps the workers from beginning anything.
	held bool
	wg   sync.WaitGroup
}

type poolState uint8

const (
	poolQueued poolState = iota + 1
	poolRunning
	// poolAgain is poolRunning of a pipeline that was scheduled meanwhile.
	poolAgain
)

// schedule has the pipeline evaluate soon.
func (p *Pool) schedule(r *Pipeline) {
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
