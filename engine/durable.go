package engine

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/skeindb/skein/internal/wake"
)

// durability calls listeners after flushes.
type durability struct {
	wake wake.Signal // many flushes cause one call

	mu struct {
		sync.Mutex
		listeners []*func()
	}
}

func (d *durability) init() { d.wake = wake.New() }

// OnDurable registers a listener that is called whenever a flush may have made more
// durable; one call may cover many flushes. It is not called for an ingest, which
// concerns its own group only and reports through IngestTables. Listeners run one after
// another on a goroutine of the engine, so they must not block for long. They read
// DurableApplied of their groups. The returned function unregisters the listener, but a
// call under way may still end.
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
		case <-e.durable.wake:
		}
		e.durable.mu.Lock()
		listeners := e.durable.mu.listeners
		e.durable.mu.Unlock()
		for _, l := range listeners {
			(*l)()
		}
	}
}

// flushRound is one flush for which several callers wait.
type flushRound struct {
	done chan struct{}
	err  error // set before done is closed
}

// flusher combines calls of Flush. One flush runs, and all calls that arrive meanwhile
// share the next. A flush for each call would fill L0 with small tables.
type flusher struct {
	wake wake.Signal

	mu struct {
		sync.Mutex
		next *flushRound // the round of waiting callers whose flush has not begun
		gone bool        // the loop has ended
	}
}

func (f *flusher) init() { f.wake = wake.New() }

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
		f.wake.Set()
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

// abandon ends all waits for flushes that will not happen.
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

// Flush returns when everything committed before the call is durable. It waits as long as
// the disk is full; ctx ends the wait, not the flush.
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
		case <-e.flusher.wake:
		}
		if r := e.flusher.take(); r != nil {
			r.err = e.flushOnce()
			close(r.done)
		}
	}
}

// flushOnce flushes all memtables and waits for the flush. If too many memtables are
// full, AsyncFlush itself may wait; Abort then stops the wait.
func (e *Engine) flushOnce() error {
	flushed, err := e.db.AsyncFlush()
	if err != nil {
		return fmt.Errorf("engine: flush: %w", err)
	}
	select {
	case <-flushed:
		return e.Err() // a fatal error and the end of the flush may coincide
	case <-e.ctx.Done():
		return ErrClosed
	case <-e.fatal.once:
		return e.Err()
	}
}
