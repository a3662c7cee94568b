package pipeline

// NewPool returns a pool without workers.
func NewPool() *Pool {
	p := &Pool{state: make(map[*Pipeline]poolState)}
	p.cond.L = &p.mu
	return p
}

// Start starts the workers.
func (p *Pool) Start(workers int) {
	for range workers {
		p.wg.Go(p.work)
	}
}

func (p *Pool) work() {
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
	p.mu.Unlock()
	p.wg.Wait()
}
