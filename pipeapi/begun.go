package pipeapi

import "time"

// Most changes wait for nothing but the answer of a range that this node leads. The reader begins them, and whoever brings the
// answer finishes them. All others have a worker that waits, and so has one that is given up, fails or takes long.

// In whose hands an operation is.
const (
	// ofReader: the reader is about to begin it.
	ofReader uint32 = iota
	// hasFailed and isDone: it was answered while the reader was beginning it.
	hasFailed
	isDone
	// ofNobody: it is begun, and who finishes it takes it from here.
	ofNobody
	// taken: somebody finishes it.
	taken
)

// patience is how long an operation may be begun without a worker that looks at its deadline, up to twice as long.
const patience = 250 * time.Millisecond

// begin begins an operation without a worker, if that can be.
func (o *operation) begin() {
	if !o.beginHere() {
		o.hands.Store(taken)
		o.p.s.begin(o)
	}
}

func (o *operation) beginHere() bool {
	p := o.p
	if o.request == nil || o.growth != small || o.hasty {
		return false
	}
	p.mu.Lock()
	room := p.hasRoom()
	p.mu.Unlock()
	if !room {
		return false
	}
	var begun bool
	if o.finish, begun = p.s.o.Operations.Begin(o.ctx, o.request, o.answered); !begun {
		return false
	}
	switch {
	case !o.hands.CompareAndSwap(ofReader, ofNobody):
		o.conclude(o.hands.Swap(taken) == isDone)
	case o.ctx.Err() != nil:
		o.giveUp() // who has ended the context may have come too early
	}
	return true
}

// answered says that an operation that was begun has its answer, which is an error unless ok. It does not block.
func (o *operation) answered(ok bool) {
	early := hasFailed
	if ok {
		early = isDone
	}
	if !o.hands.CompareAndSwap(ofReader, early) && o.hands.CompareAndSwap(ofNobody, taken) {
		o.conclude(ok)
	}
}

// conclude finishes an operation that is answered. An error may be no answer yet: a worker tries on.
func (o *operation) conclude(ok bool) {
	if o.here = ok; ok {
		o.do()
	} else {
		o.p.s.begin(o)
	}
}

// giveUp has a worker wait for an operation that was begun, for as long as its context lasts.
func (o *operation) giveUp() {
	if o.hands.CompareAndSwap(ofNobody, taken) {
		o.p.s.begin(o)
	}
}

// watch has what was begun watched from now on. mu is held.
func (p *pipe) watch() {
	switch {
	case p.watched:
		return
	case p.watcher == nil:
		p.watcher = p.s.o.Clock.AfterFunc(patience, p.look)
	default:
		p.watcher.Reset(patience)
	}
	p.watched = true
}

// look gives those a worker that were there at the last look.
func (p *pipe) look() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.watched = false
	for _, o := range p.under {
		switch h := o.hands.Load(); {
		case h == taken:
		case (o.looks == p.looks || h != ofNobody) && !p.over:
			p.watch()
		default:
			o.giveUp()
		}
	}
	p.looks++
}
