package transport

import (
	"context"
	"runtime"
	"sync"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/skeindb/skein/internal/wake"
)

// Lane is the outgoing queue of one stream of a session: one class, one order
// slot. Users append frames to it; the carrier's writer takes them in batches. To wake the writer
// for one frame costs more than to write it. So the sender writes a frame that comes alone, if the
// carrier can take it without a wait.
type Lane struct {
	class   Class
	slot    int
	budget  *budget
	metrics *classMetrics
	sent    prometheus.Counter // bytes to the peer, over all classes
	failed  prometheus.Counter // frames that did not leave for it
	wake    wake.Signal        // frames came, or the lane was closed
	ended   <-chan struct{}    // closed at the session's end

	mu     sync.Mutex
	queue  []chunk // what waits is queue[head:]
	head   int
	added  uint64 // bytes ever appended
	taken  uint64 // bytes ever handed to the writer
	idle   bool   // the writer waits for wake
	linger linger
	closed bool
	// tryWrite writes all of b or nothing, and does not block. It is nil where the carrier has no such thing.
	tryWrite func(b []byte) error
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
	err := l.put(h, payload, force, pos)
	if err == ErrQueueFull { //nolint:errorlint // put returns it bare
		l.metrics.dropped.Inc()
		l.failed.Inc()
	}
	return err
}

func (l *Lane) put(h *header, payload []byte, force bool, pos *uint64) error {
	h.finish(len(payload))
	n := h.n + len(payload)
	if !l.budget.take(n, force) {
		return ErrQueueFull
	}
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		l.budget.release(n)
		return ErrNoRoute
	}
	if pos != nil {
		*pos = l.added
	}
	l.added += uint64(n)
	if l.writeNow(h, payload) {
		l.mu.Unlock()
		l.budget.release(n)
		l.metrics.framesSent.Inc()
		l.metrics.bytesSent.Add(float64(n))
		l.sent.Add(float64(n))
		return nil
	}
	c := l.room(n)
	c.b = append(append(c.b, h.b[:h.n]...), payload...)
	c.frames++
	idle := l.idle
	l.idle = false
	l.mu.Unlock()
	if idle {
		l.wake.Set()
	}
	return nil
}

// writeNow writes a frame past the writer, where frames come alone and the writer has nothing to do. A carrier that cannot take
// it now, or has failed, leaves it to the writer. mu is held, so no frame overtakes another. Frames that the carrier has taken and not
// sent are in no budget. They are few: now and then one takes the writer, which waits in its write until they are sent.
func (l *Lane) writeNow(h *header, payload []byte) bool {
	n := h.n + len(payload)
	if l.tryWrite == nil || !l.idle || l.head < len(l.queue) || n > smallBytes || !l.linger.past() {
		return false
	}
	b, memory := small()
	err := l.tryWrite(append(append(b, h.b[:h.n]...), payload...))
	memory.done()
	if err != nil {
		return false
	}
	l.taken += uint64(n)
	return true
}

// setTryWrite says how frames that come alone are written. Only the writer calls it.
func (l *Lane) setTryWrite(f func(b []byte) error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.tryWrite = f
}

// enqueueWait is enqueue that waits for room until ctx ends.
func (l *Lane) enqueueWait(ctx context.Context, h *header, payload []byte) error {
	for {
		err := l.put(h, payload, false, nil)
		if err != ErrQueueFull { //nolint:errorlint // put returns it bare
			return err
		}
		if err := l.tryOrWait(ctx, h, payload); err != ErrQueueFull { //nolint:errorlint // it returns it bare
			return err
		}
	}
}

// tryOrWait tries again, so that nothing that was released meanwhile is missed, and then waits
// until some bytes are released. Then it returns ErrQueueFull.
func (l *Lane) tryOrWait(ctx context.Context, h *header, payload []byte) error {
	released, done := l.budget.freed.await()
	defer done()
	others, othersDone := l.budget.pool.freed.await()
	defer othersDone()
	if err := l.put(h, payload, false, nil); err != ErrQueueFull { //nolint:errorlint // put returns it bare
		return err
	}
	if !l.budget.empty() {
		others = nil // its own bytes will wake it; others' would wake all who wait, again and again
	}
	select {
	case <-released:
		return ErrQueueFull
	case <-others:
		return ErrQueueFull
	case <-l.ended:
		return ErrNoRoute
	case <-ctx.Done():
		return context.Cause(ctx)
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
		yielded = l.lingers()
		l.mu.Unlock()
		<-l.wake
		if yielded {
			runtime.Gosched()
		}
	}
}

// lingers says whether the writer lingers at its next batch. Where frames that come alone go past it, one that does not is there to
// look whether others come with it. mu is held.
func (l *Lane) lingers() bool { return l.tryWrite != nil || l.linger.due() }

// linger decides whether the writer, woken by a first frame, lets other goroutines run
// before it takes the batch. A batch of several frames costs little more than one
// frame, and concurrent calls then take half the CPU. With a single client the wait
// would only add latency at each hop.
type linger struct {
	// alone counts the batches in a row that stayed at one frame although the writer
	// lingered, up to aloneMax. waits counts the waits, or the frames that found the writer at rest where they may go past it.
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

// past says whether a frame may go past the writer: frames come alone, and now is not the time to look whether they still do.
func (c *linger) past() bool {
	c.waits++
	return c.alone >= aloneMax && c.waits%aloneRetry != 0
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
		l.failed.Add(float64(b.frames))
		b.Done()
	}
	l.queue, l.head = nil, 0
	if l.idle {
		l.idle = false
		l.wake.Set()
	}
	return l.taken
}
