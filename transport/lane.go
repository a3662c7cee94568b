package transport

import (
	"context"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/skeindb/skein/internal/wake"
)

// forcedBytes plus half of the limit is the room behind a full queue for small frames
// that must not be lost: cancellations, credits, ends, refusals.
const forcedBytes = 1 << 20

// budget bounds the bytes that wait in the lanes of one class of one session.
type budget struct {
	limit *atomic.Int64 // the endpoint's, which changes
	used  atomic.Int64
	total *atomic.Int64 // over all peers; for the metric

	waiting atomic.Int32 // how many wait for room; spares release the lock
	mu      sync.Mutex
	room    chan struct{} // closed at the next release; guarded by mu, nil if none waits
}

// take reserves n bytes. A message that alone exceeds the limit passes when nothing
// else waits, so that a small budget cannot refuse it for ever.
func (b *budget) take(n int, force bool) bool {
	limit := b.limit.Load()
	if force {
		limit += limit/2 + forcedBytes
	}
	for {
		used := b.used.Load()
		if used > 0 && used+int64(n) > limit {
			return false
		}
		// Not add-and-undo: a waiter would mistake the brief refusal for bytes whose
		// release will wake it.
		if b.used.CompareAndSwap(used, used+int64(n)) {
			b.total.Add(int64(n))
			return true
		}
	}
}

func (b *budget) release(n int) {
	b.used.Add(-int64(n))
	b.total.Add(-int64(n))
	if b.waiting.Load() == 0 {
		return
	}
	b.mu.Lock()
	if b.room != nil {
		close(b.room)
		b.room = nil
	}
	b.mu.Unlock()
}

// await returns a channel that is closed when bytes are released after the call. The
// caller makes sure that some bytes are still taken, and calls done afterwards.
func (b *budget) await() (room <-chan struct{}, done func()) {
	b.waiting.Add(1)
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.room == nil {
		b.room = make(chan struct{})
	}
	return b.room, func() { b.waiting.Add(-1) }
}

// Lane is the outgoing queue of one stream of a session: one class, one order
// slot. Users append frames to it; the carrier's writer takes them in batches.
type Lane struct {
	class   Class
	slot    int
	budget  *budget
	metrics *classMetrics
	sent    prometheus.Counter // bytes to the peer, over all classes
	wake    wake.Signal        // frames came, or the lane was closed
	ended   <-chan struct{}    // closed at the session's end

	mu     sync.Mutex
	queue  []chunk // what waits is queue[head:]
	head   int
	put    uint64 // bytes ever appended
	taken  uint64 // bytes ever handed to the writer
	idle   bool   // the writer waits for wake
	linger linger
	closed bool
}

// chunk is a run of whole frames that leaves in one write.
type chunk struct {
	b      []byte
	frames int
	memory pooled // b's
}

// Batch is what one write takes: whole frames.
type Batch struct {
	chunk
	lane *Lane
}

// Bytes returns the frames; they are the carrier's until Done.
func (b *Batch) Bytes() []byte { return b.b }

// Done returns the batch's memory and its share of the budget.
func (b *Batch) Done() {
	b.lane.budget.release(len(b.b))
	b.memory.done()
	b.chunk = chunk{}
}

// Class returns the class whose frames the lane carries.
func (l *Lane) Class() Class { return l.class }

// Slot returns the lane's number within its class.
func (l *Lane) Slot() int { return l.slot }

// enqueue appends one frame. It answers at once: ErrQueueFull, or ErrNoRoute after the
// session's end. force is for small frames that must not be lost. If pos is not nil,
// enqueue stores the frame's position in it before the frame can be taken.
func (l *Lane) enqueue(h *header, payload []byte, force bool, pos *uint64) error {
	h.finish(len(payload))
	n := h.n + len(payload)
	if !l.budget.take(n, force) {
		l.metrics.dropped.Inc()
		return ErrQueueFull
	}
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		l.budget.release(n)
		return ErrNoRoute
	}
	c := l.room(n)
	c.b = append(append(c.b, h.b[:h.n]...), payload...)
	c.frames++
	if pos != nil {
		*pos = l.put
	}
	l.put += uint64(n)
	idle := l.idle
	l.idle = false
	l.mu.Unlock()
	if idle {
		l.wake.Set()
	}
	return nil
}

// enqueueWait is enqueue that waits for room until ctx ends.
func (l *Lane) enqueueWait(ctx context.Context, h *header, payload []byte) error {
	for {
		err := l.enqueue(h, payload, false, nil)
		if err != ErrQueueFull { //nolint:errorlint // enqueue returns it bare
			return err
		}
		room, done := l.budget.await()
		if l.budget.used.Load() == 0 {
			done() // all was released in between; nothing would wake this waiter
			continue
		}
		select {
		case <-room:
			done()
		case <-l.ended:
			done()
			return ErrNoRoute
		case <-ctx.Done():
			done()
			return context.Cause(ctx)
		}
	}
}

// room returns the chunk for n more bytes. A lane at rest begins with a small chunk, since
// a heartbeat often stays alone; a whole one replaces it when more comes. Large frames get
// memory of about their own size, so that at least half of every other pooled chunk but the
// last is used.
func (l *Lane) room(n int) *chunk {
	atRest := len(l.queue) == l.head
	if !atRest {
		last := &l.queue[len(l.queue)-1]
		if len(last.b)+n <= cap(last.b) {
			return last
		}
		if cap(last.b) == smallBytes && len(last.b)+n <= chunkBytes {
			b, memory := whole()
			b = append(b, last.b...)
			last.memory.done()
			last.b, last.memory = b, memory
			return last
		}
	}
	var c chunk
	switch {
	case atRest && n <= smallBytes:
		c.b, c.memory = small()
	case n <= chunkBytes/2:
		c.b, c.memory = whole()
	default:
		c.b, c.memory = large(n)
	}
	l.queue = append(l.queue, c)
	return &l.queue[len(l.queue)-1]
}

// Take waits for frames and returns the next batch: all that has gathered, up to 64 KiB
// or one larger frame. ok is false after the session's end. Only one goroutine takes
// from a lane.
func (l *Lane) Take() (b Batch, ok bool) {
	yielded := false
	for {
		l.mu.Lock()
		if l.closed {
			l.mu.Unlock()
			return Batch{}, false
		}
		if l.head < len(l.queue) {
			b = Batch{chunk: l.queue[l.head], lane: l}
			l.queue[l.head] = chunk{}
			if l.head++; l.head == len(l.queue) {
				l.queue, l.head = l.queue[:0], 0
			}
			l.taken += uint64(len(b.b))
			l.linger.note(b.frames, yielded)
			l.mu.Unlock()
			l.metrics.sent(b.frames, len(b.b))
			l.sent.Add(float64(len(b.b)))
			return b, true
		}
		l.idle = true
		yielded = l.linger.due()
		l.mu.Unlock()
		<-l.wake
		if yielded {
			runtime.Gosched()
		}
	}
}

// linger decides whether the writer, woken by a first frame, lets other goroutines run
// before it takes the batch. A batch of several frames costs little more than one
// frame, and concurrent calls then take half the CPU. With a single client the wait
// would only add latency at each hop.
type linger struct {
	// alone counts the batches in a row that stayed at one frame although the writer
	// lingered, up to aloneMax. waits counts the waits.
	alone, waits uint8
}

const (
	// aloneMax is a row so long that chance does not make it under load.
	aloneMax = 64
	// aloneRetry is after how many waits the writer lingers again.
	aloneRetry = 16
)

// due says whether to linger this time.
func (c *linger) due() bool {
	c.waits++
	return c.alone < aloneMax || c.waits%aloneRetry == 0
}

// note records how many frames a batch had.
func (c *linger) note(frames int, waited bool) {
	switch {
	case frames > 1:
		c.alone = 0
	case waited && c.alone < aloneMax:
		c.alone++
	}
}

// close drops the queued frames and ends the writer. It returns how many bytes the
// writer has taken; frames behind them were certainly not sent.
func (l *Lane) close() (taken uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return l.taken
	}
	l.closed = true
	for _, c := range l.queue[l.head:] {
		b := Batch{chunk: c, lane: l}
		l.metrics.dropped.Add(float64(b.frames))
		b.Done()
	}
	l.queue, l.head = nil, 0
	if l.idle {
		l.idle = false
		l.wake.Set()
	}
	return l.taken
}
