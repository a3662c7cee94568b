package engine

import (
	"context"
	"fmt"
	"slices"
	"sync"
)

// durability calls listeners after flushes.
type durability struct {
	kick chan struct{} // holds at most one notice: many flushes are one call

	mu struct {
		sync.Mutex
		listeners []*func()
	}
}

func (d *durability) init() { d.kick = make(chan struct{}, 1) }

func (d *durability) signal() {
	select {
	case d.kick <- struct{}{}:
	default:
	}
}

// OnDurable registers a listener that is called whenever more may have become
// durable by a flush, many of them perhaps in one call. What an ingest makes durable is
// its group's alone, and whoever ingests hears of it from IngestTables.
// Listeners are called one after another on a goroutine of the engine, so they
// must not block for long; they read DurableApplied of the groups they care for.
// The returned function takes the listener off; a call under way may still end.
func (e *Engine) OnDurable(listener func()) (remove func()) {
	l := &listener
	m := &e.durable.mu
	m.Lock()
	defer m.Unlock()
	m.listeners = append(slices.Clone(m.listeners), l)
	return func() {
		m.Lock()
		defer m.Unlock()
		m.listeners = slices.DeleteFunc(slices.Clone(m.listeners), func(o *func()) bool { return o == l })
	}
}

func (e *Engine) durabilityLoop() {
	for {
		select {
		case <-e.ctx.Done():
			return
		case <-e.durable.kick:
		}
		e.durable.mu.Lock()
		listeners := e.durable.mu.listeners
		e.durable.mu.Unlock()
		for _, l := range listeners {
			(*l)()
		}
	}
}

// flushRound is one flush that several callers wait for.
type flushRound struct {
	done chan struct{}
	err  error // set before done is closed
}

// flusher bundles the calls of Flush: one flush runs, and all calls that come
// meanwhile share the next. A flush for each call would fill L0 with small tables.
type flusher struct {
	kick chan struct{}

	mu struct {
		sync.Mutex
		next *flushRound // what callers wait for and no flush has begun for
		gone bool        // the loop has ended
	}
}

func (f *flusher) init() { f.kick = make(chan struct{}, 1) }

// join returns the round that begins after the call.
func (f *flusher) join() *flushRound {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.mu.gone {
		r := &flushRound{done: make(chan struct{}), err: ErrClosed}
		close(r.done)
		return r
	}
	if f.mu.next == nil {
		f.mu.next = &flushRound{done: make(chan struct{})}
		select {
		case f.kick <- struct{}{}:
		default:
		}
	}
	return f.mu.next
}

func (f *flusher) take() *flushRound {
	f.mu.Lock()
	defer f.mu.Unlock()
	r := f.mu.next
	f.mu.next = nil
	return r
}

// abandon ends all waiting for flushes that will not come.
func (f *flusher) abandon() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.mu.gone = true
	if r := f.mu.next; r != nil {
		r.err = ErrClosed
		close(r.done)
		f.mu.next = nil
	}
}

// Flush returns when everything that was committed before the call is durable. It
// waits as long as the disk is full; ctx ends the waiting, not the flush.
func (e *Engine) Flush(ctx context.Context) error {
	r := e.flusher.join()
	select {
	case <-r.done:
		return r.err
	case <-ctx.Done():
		return fmt.Errorf("engine: flush: %w", context.Cause(ctx))
	case <-e.fatal.once:
		return e.Err()
	}
}

func (e *Engine) flusherLoop() {
	defer e.flusher.abandon()
	for {
		select {
		case <-e.ctx.Done():
			return
		case <-e.fatal.once:
			return
		case <-e.flusher.kick:
		}
		if r := e.flusher.take(); r != nil {
			r.err = e.flushOnce()
			close(r.done)
		}
	}
}

// flushOnce flushes all memtables and waits for it. It may wait in AsyncFlush
// already, where too many memtables are full; Abort stops waiting for it then.
func (e *Engine) flushOnce() error {
	flushed, err := e.db.AsyncFlush()
	if err != nil {
		return fmt.Errorf("engine: flush: %w", err)
	}
	select {
	case <-flushed:
		return e.Err() // a fatal error and the end of the flush may come together
	case <-e.ctx.Done():
		return ErrClosed
	case <-e.fatal.once:
		return e.Err()
	}
}
