package transport

import (
	"sync"
	"sync/atomic"
)

// forcedBytes is the room behind a full queue for small frames that must not be lost:
// cancellations, credits, ends, refusals.
const forcedBytes = 1 << 20

// handlerBytes is what a running handler counts for beside its payload: a goroutine, whose stack
// mostly has 8 KiB.
const handlerBytes = 8 << 10

// peerBytes is what a peer takes at rest: its connections, and a read buffer of 64 KiB for each lane.
// BenchmarkIdlePeers has 872 kB.
const peerBytes = 900 << 10

// pool is memory that all peers share: one for their queues, one for the handlers of their calls. These are
// apart, because handlers wait for what the queues carry.
//
// Half of it is floors: what a queue may hold whatever the others hold. All have the same size, and
// more peers make it smaller. Beyond its floor a queue may take half as much as it leaves free of the
// other half. So one that nobody empties gets a third of that, and the next one less. The last quarter
// of it is for empty queues, because one message may be large: it passes as long as it fits.
type pool struct {
	// floor is the size of a floor, and shared what there is beyond all floors.
	floor, shared atomic.Int64
	beyond        atomic.Int64 // what is held beyond floors
	freed         waiters
}

// divide sets floor and shared by what all may hold and by how many floors there are.
func (p *pool) divide(total int64, floors int) {
	p.floor.Store(total / 2 / int64(floors))
	p.shared.Store(total / 2)
}

// divide divides QueueBytes among so many peers.
func (e *Endpoint) divide(peers int) {
	total, n := e.cfg.QueueBytes, max(peers, 1)
	e.queues.divide(max(total-int64(n)*peerBytes, total/2), numClasses*n)
	e.handling.divide(total/2, n)
}

// take takes n of the shared bytes for a queue that has so many of them. empty says that the queue
// is. If nobody has any, all passes: a small pool must not refuse a message for ever.
func (p *pool) take(n, has int64, empty bool) bool {
	shared := p.shared.Load()
	for {
		beyond := p.beyond.Load()
		free := shared - beyond - n
		if beyond > 0 && !(empty && free >= 0) && has+n > (free-shared/4)/2 {
			return false
		}
		if p.beyond.CompareAndSwap(beyond, beyond+n) {
			return true
		}
	}
}

func (p *pool) give(n int64) {
	p.beyond.Add(-n)
	p.freed.wake()
}

// waiters wait until bytes are given back.
type waiters struct {
	count atomic.Int32 // spares wake the lock
	mu    sync.Mutex
	woken chan struct{} // closed by the next wake; guarded by mu, nil if none waits
}

func (w *waiters) wake() {
	if w.count.Load() == 0 {
		return
	}
	w.mu.Lock()
	if w.woken != nil {
		close(w.woken)
		w.woken = nil
	}
	w.mu.Unlock()
}

// await returns a channel that the next wake closes. The caller calls done afterwards.
func (w *waiters) await() (woken <-chan struct{}, done func()) {
	w.count.Add(1)
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.woken == nil {
		w.woken = make(chan struct{})
	}
	return w.woken, func() { w.count.Add(-1) }
}

// budget bounds the bytes that wait in the lanes of one class of one session, or those that the
// handlers of one peer's calls hold.
type budget struct {
	pool  *pool
	total *atomic.Int64 // over all peers; for the metric
	freed waiters

	mu sync.Mutex // guards what follows
	// beyond is the part of used that is taken from the pool. forced is the part that was forced
	// in, or less.
	used, beyond, forced int64
}

// take reserves n bytes. force is for small frames that must not be lost.
func (b *budget) take(n int, force bool) bool {
	floor := b.pool.floor.Load()
	b.mu.Lock()
	defer b.mu.Unlock()
	more := max(b.used+int64(n)-floor-b.beyond, 0)
	if more > 0 && !b.pool.take(more, b.beyond, b.used == 0) {
		if !force || b.forced+int64(n) > forcedBytes {
			return false
		}
		b.forced += int64(n)
		b.pool.beyond.Add(more)
	}
	b.used += int64(n)
	b.beyond += more
	b.total.Add(int64(n))
	return true
}

func (b *budget) release(n int) {
	floor := b.pool.floor.Load()
	b.mu.Lock()
	b.used -= int64(n)
	b.forced = max(b.forced-int64(n), 0)
	back := b.beyond - min(b.beyond, max(b.used-floor, 0))
	b.beyond -= back
	b.mu.Unlock()
	b.total.Add(-int64(n))
	if back > 0 {
		b.pool.give(back)
	}
	b.freed.wake()
}

func (b *budget) empty() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.used == 0
}
