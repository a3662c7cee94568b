package pipeline

import (
	"sync"
	"sync/atomic"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/shard/eval"
)

// Pool is the node's fixed set of goroutines that evaluate, beside callers that find nothing in their way. A pipeline is in the
// queue or with one worker, never with two. Each pass takes a slot for the processor. One that
// waits for the disk lends it to another, so that slow reads of some ranges do not
// stop the writes of all. Its mu comes after that of any pipeline.
type Pool struct {
	clock  clock.Clock
	mu     sync.Mutex
	cond   sync.Cond
	queue  []*Pipeline
	state  map[*Pipeline]poolState
	closed bool
	// held keeps the workers from beginning anything.
	held bool
	// slots are for the processor; busy of them are taken and not lent.
	slots, busy int
	workers     []*worker
	// guests are those of the workers that stand for callers which evaluate themselves, as far as none does.
	guests []*worker
	// timer is for look. watched says that it runs: a pipeline waits for a slot.
	timer   clock.Timer
	watched bool
	wg      sync.WaitGroup
}

// worker is one goroutine of the pool, or stands for a caller's. Its pass writes reads and reads lent; all else is guarded by the
// pool's mu.
type worker struct {
	// reads is odd while the worker's pass reads the store.
	reads atomic.Uint32
	// seen is what reads was at the last look.
	seen uint32
	// running says that it has a pass.
	running bool
	// guest says that it stands for a caller.
	guest bool
	// lent says that another has its slot until the pass ends.
	lent atomic.Bool
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
	p.scheduleLocked(r)
}

// scheduleLocked is schedule with mu held.
func (p *Pool) scheduleLocked(r *Pipeline) {
	if p.closed {
		return
	}
	switch p.state[r] {
	case 0:
		p.state[r] = poolQueued
		p.add(r)
	case poolRunning:
		p.state[r] = poolAgain
	case poolQueued, poolAgain:
	}
}

// add queues a pipeline. mu is held.
func (p *Pool) add(r *Pipeline) {
	p.queue = append(p.queue, r)
	if p.busy < p.slots {
		p.cond.Signal()
	}
	p.watch()
}

// watch starts the timer for look if a pipeline waits for a slot. mu is held.
func (p *Pool) watch() {
	if len(p.queue) == 0 || p.busy < p.slots || p.watched || p.closed || p.slots == 0 {
		return
	}
	p.watched = true
	if p.timer == nil {
		p.timer = p.clock.AfterFunc(lendAfter, p.look)
	} else {
		p.timer.Reset(lendAfter)
	}
}

// look lends the slots of the passes that have been in one read since the last look.
func (p *Pool) look() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.watched = false
	for _, w := range p.workers {
		if !w.running || w.lent.Load() {
			continue
		}
		n := w.reads.Load()
		if n%2 == 1 && n == w.seen {
			w.lent.Store(true)
			p.busy--
			p.cond.Signal()
		}
		w.seen = n
	}
	p.watch()
}

// watchedStore is the store of a pass as the pool watches it.
type watchedStore struct {
	eval.Store
	reads *atomic.Uint32
	// visited counts keys.
	visited int
}

// Get implements eval.Store.
func (s *watchedStore) Get(key []byte, at keyspace.Revision) (v mvcc.Version, ok bool, err error) {
	s.visited++
	s.reads.Add(1)
	v, ok, err = s.Store.Get(key, at)
	s.reads.Add(1)
	return v, ok, err
}

// Scan implements eval.Store.
func (s *watchedStore) Scan(span keyspace.Span, at keyspace.Revision, keysOnly bool, fn func(v *mvcc.Version) error) error {
	s.reads.Add(1)
	err := s.Store.Scan(span, at, keysOnly, func(v *mvcc.Version) error {
		s.visited++
		return fn(v)
	})
	s.reads.Add(1)
	return err
}

// Attached implements eval.Store.
func (s *watchedStore) Attached(lease keyspace.LeaseID, span keyspace.Span, fn func(key []byte) error) error {
	s.reads.Add(1)
	err := s.Store.Attached(lease, span, func(key []byte) error {
		s.visited++
		s.reads.Add(1) // fn looks the key up, which is a read of its own
		err := fn(key)
		s.reads.Add(1)
		return err
	})
	s.reads.Add(1)
	return err
}
