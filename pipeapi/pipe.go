package pipeapi

import (
	"context"
	"errors"
	"io"
	"runtime"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"golang.org/x/sync/semaphore"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/skeindb/skein/api/pipepb"
	"github.com/skeindb/skein/clock"
)

// pipe is an open pipe. Its reader begins operations, and its writer sends their answers and decides when it ends.
type pipe struct {
	s      *Service
	stream grpc.ServerStream
	// ctx is that of all operations.
	ctx    context.Context
	cancel context.CancelFunc
	// wake has the writer look: at new answers, or at the end of the reader.
	wake chan struct{}
	// parts is the pipe's room for parts of transactions.
	parts *semaphore.Weighted
	// running counts the operations that workers do. It grows under mu, while over is false.
	running sync.WaitGroup

	mu sync.Mutex
	// room wakes who waits for room for answers: there may be some, the pipe is over, or the time of an operation is.
	room sync.Cond
	// The rest is guarded by mu. under are the operations that are in the window, bytes their size.
	under map[uint64]*operation
	bytes uint64
	// answers wait for the writer. Their operations are in the window.
	answers     []answer
	answerBytes uint64
	// reserved are the bytes of answers that are about to come. singles counts the operations of that growth that have begun.
	// again counts those that wait to be done once more.
	reserved       uint64
	singles, again int
	// read says that the reader has ended, and readErr why, nil for the client's side that was closed.
	read    bool
	readErr error
	// watcher is a timer for look, which counts looks. watched says that it runs.
	watcher clock.Timer
	watched bool
	looks   uint64
	// stopped says that no operation is begun any more, over that the writer has ended.
	stopped, over bool
}

func newPipe(s *Service, stream grpc.ServerStream) *pipe {
	p := &pipe{s: s, stream: stream, wake: make(chan struct{}, 1), under: make(map[uint64]*operation), parts: semaphore.NewWeighted(s.o.PartBytes / 2)}
	p.ctx, p.cancel = context.WithCancel(stream.Context())
	p.room.L = &p.mu
	return p
}

// readFrames begins what comes.
func (p *pipe) readFrames() error {
	for {
		f := new(clientFrame)
		if err := p.stream.RecvMsg(f); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		begun, cancels, err := p.receive(f)
		if err != nil {
			return err
		}
		for _, o := range begun {
			o.begin()
		}
		p.cancelAll(cancels)
		p.mu.Lock()
		p.await(p.ctx, p.hasRoom)
		p.mu.Unlock()
	}
}

// admit takes operations into the window: all of them, or none.
func (p *pipe) admit(ops []*operation) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.stopped || p.over {
		return rpctypes.ErrGRPCStopped
	}
	bytes := p.bytes
	for i, o := range ops {
		bytes += o.size
		if err := p.fits(o.tag, bytes); err != nil {
			for _, o := range ops[:i] { // no worker does them, so nothing else takes them out
				o.cancel()
				delete(p.under, o.tag)
			}
			return err
		}
		o.ctx, o.cancel = o.context()
		o.looks, o.hasty = p.looks, o.timeoutMs > 0 && o.timeoutMs < uint32(2*patience/time.Millisecond)
		p.under[o.tag] = o
	}
	p.bytes = bytes
	p.running.Add(len(ops))
	if len(ops) > 0 {
		p.watch()
	}
	return nil
}

// fits returns an error if one more operation does not fit into the window, which then has so many bytes. mu is held.
func (p *pipe) fits(tag, bytes uint64) error {
	if _, ok := p.under[tag]; ok {
		return p.broken(codes.InvalidArgument, "the tag %d is that of an operation that is not answered: give each operation under way another one", tag)
	}
	w := p.s.window
	if n := len(p.under) + 1; n > int(w.GetOperations()) || bytes > w.GetBytes() {
		return p.broken(codes.ResourceExhausted, "the client ignores the window: with the tag %d there are %d operations of %d bytes under way, and at most %d of %d bytes may be: wait for answers before you send more",
			tag, n, bytes, w.GetOperations(), w.GetBytes())
	}
	return nil
}

// broken returns the error that ends a pipe whose client breaks the protocol.
func (p *pipe) broken(code codes.Code, format string, args ...any) error {
	p.s.o.Metrics.Broken.Inc()
	return status.Errorf(code, "skein: pipe: "+format, args...)
}

// cancelAll ends the contexts of operations.
func (p *pipe) cancelAll(tags []uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, tag := range tags {
		if o := p.under[tag]; o != nil {
			o.cancel()
			o.giveUp()
		}
	}
}

// reader is the goroutine of the reader. It ends soon after the writer.
func (p *pipe) reader() {
	err := p.readFrames()
	p.mu.Lock()
	p.read, p.readErr = true, err
	p.mu.Unlock()
	p.signal()
}

// signal has the writer look.
func (p *pipe) signal() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// answer hands an answer to the writer. It is the last thing that a worker does with a pipe.
func (p *pipe) answer(a answer) {
	defer p.running.Done()
	p.mu.Lock()
	p.answers = append(p.answers, a)
	p.answerBytes += uint64(a.body.Len())
	p.release(p.under[a.tag])
	first := len(p.answers) == 1
	p.mu.Unlock()
	if first {
		p.signal()
	}
}

// release gives back what an operation has of the pipe beside its answer. mu is held.
func (p *pipe) release(o *operation) {
	o.request = nil // it may be large, and the client may not take the answer
	o.giveBack()
	if o.reserved == 0 && !o.counted {
		return
	}
	p.reserved -= o.reserved
	if o.counted {
		p.singles--
	}
	o.reserved, o.counted = 0, false
	p.room.Broadcast()
}

// write is the writer, in the goroutine of the stream. It returns what the stream ends with.
func (p *pipe) write() error {
	if err := p.send(&pipepb.ServerFrame{Window: p.s.window}); err != nil {
		return err
	}
	closing := p.s.o.Operations.Closing()
	var grace clock.Timer
	var late <-chan time.Time // of grace
	defer func() {
		if grace != nil {
			grace.Stop()
		}
	}()
	for {
		select {
		case <-p.wake:
			runtime.Gosched() // those who are about to answer join this frame
		case <-p.ctx.Done():
			return status.FromContextError(p.ctx.Err()).Err()
		case <-closing:
			closing = nil
			grace = p.s.o.Clock.NewTimer(p.s.o.Grace)
			late = grace.C()
			if err := p.send(&pipepb.ServerFrame{Closing: true}); err != nil {
				return err
			}
		case <-late:
			p.mu.Lock()
			p.stopped = true
			p.mu.Unlock()
		}
		if ended, err := p.flush(); ended || err != nil {
			return err
		}
	}
}

// flush sends all answers that there are, and says whether the pipe ends and how.
func (p *pipe) flush() (ended bool, err error) {
	for {
		f, n := p.take()
		if n == 0 {
			return p.finished()
		}
		p.s.o.Metrics.Answers.Observe(float64(n))
		err := p.stream.SendMsg(f)
		f.free()
		if err != nil {
			return true, err
		}
	}
}

// take takes answers into a frame, and their operations out of the window.
func (p *pipe) take() (f *frame, n int) {
	f = &frame{}
	p.mu.Lock()
	defer p.mu.Unlock()
	for bytes := 0; n < len(p.answers); n++ {
		a := &p.answers[n]
		size := a.body.Len()
		if n > 0 && bytes+size > frameBytes {
			break
		}
		bytes += size
		p.answerBytes -= uint64(size)
		p.bytes -= p.under[a.tag].size
		delete(p.under, a.tag)
		f.add(a)
	}
	if p.answers = p.answers[n:]; len(p.answers) == 0 {
		p.answers = nil
	}
	p.room.Broadcast()
	return f, n
}

// finished says whether the pipe ends, and how.
func (p *pipe) finished() (ended bool, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.read && p.readErr != nil && !p.stopped:
		return true, p.readErr
	case len(p.under) > 0:
		return false, nil
	case p.stopped:
		return true, rpctypes.ErrGRPCStopped
	}
	return p.read, nil
}

func (p *pipe) send(m *pipepb.ServerFrame) error {
	f, err := frameOf(m)
	if err != nil {
		return err
	}
	return p.stream.SendMsg(f)
}

// end ends what is under way, and waits for it.
func (p *pipe) end() {
	p.cancel()
	p.mu.Lock()
	p.over = true
	p.room.Broadcast()
	if p.watcher != nil {
		p.watcher.Stop()
	}
	for _, o := range p.under {
		o.giveUp()
	}
	p.mu.Unlock()
	p.running.Wait()
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, a := range p.answers {
		a.body.Free()
	}
	// A change that was begun may wait for its range for long, and it refers to the pipe. It must not keep all requests of
	// the window.
	p.under, p.answers = nil, nil
}
