package raftgroup

import (
	"context"
	"fmt"

	"go.uber.org/zap"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
)

// closing is a group on its way out of memory. done is closed when nothing of it is left,
// or when err makes that impossible.
type closing struct {
	done chan struct{}
	err  error
}

// Close takes a group out of memory and waits, until ctx ends, until nothing of it runs
// any more. By then all entries that raft had handed out are applied, callbacks have run,
// and the log is durable: Open takes the contents of the log for durable. The state stays
// and Open brings it back, but only after all this is done, even if ctx ended earlier.
func (h *Host) Close(ctx context.Context, id keyspace.GroupID) error {
	c := h.beginClose(id)
	if c == nil {
		return nil
	}
	select {
	case <-c.done:
		return c.err
	case <-ctx.Done():
		return fmt.Errorf("raftgroup: close group %s: %w", id, context.Cause(ctx))
	}
}

// beginClose returns what to wait for, nil where there is no group.
func (h *Host) beginClose(id keyspace.GroupID) *closing {
	h.mu.Lock()
	defer h.mu.Unlock()
	c, g := h.mu.closing[id], h.mu.groups[id]
	if c != nil || g == nil {
		return c
	}
	c = &closing{done: make(chan struct{})}
	if !g.w.call(g, func() {
		g.close()
		// Behind everything that the applier has of the group. Its last append leaves
		// with this pass, so it is earlier in the wal's queue.
		g.w.schedule(g, applyTask{kind: taskCall, call: func() {
			h.cfg.WAL.Submit(h.cfg.WAL.NewBatch(), func(err error) { h.endClose(id, c, err) })
		}})
	}) {
		c.err = ErrStopped
		close(c.done)
		return c
	}
	h.mu.closing[id] = c
	return c
}

func (h *Host) endClose(id keyspace.GroupID, c *closing, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if c.err = err; err == nil {
		delete(h.mu.closing, id)
	}
	close(c.done)
}

// Remove closes a group and removes its log for good. del, which may be nil, writes the
// deletion of the state machine's data into a batch; the applied record is deleted with
// it. Remove returns when the removal survives a crash. A crash before that leaves the
// tombstone in the wal, and Removed lists the group.
func (h *Host) Remove(ctx context.Context, id keyspace.GroupID, del func(b *engine.Batch) error) error {
	if err := h.Close(ctx, id); err != nil {
		return err
	}
	if err := h.reserve(id); err != nil {
		return err
	}
	defer h.unreserve(id)
	if err := h.storeApplied(ctx, id); err != nil {
		return fmt.Errorf("raftgroup: remove group %s: %w", id, err)
	}
	// The tombstone first: if a crash loses the deletion in the engine, the replica must
	// not come back without its votes.
	wb := h.cfg.WAL.NewBatch()
	wb.Remove(id)
	if err := h.submitAndWait(ctx, wb.SetSync, func(done func(error)) { h.cfg.WAL.Submit(wb, done) }); err != nil {
		return fmt.Errorf("raftgroup: remove group %s: %w", id, err)
	}
	b := h.cfg.Engine.NewBatch()
	defer b.Close()
	err := b.DeleteApplied(id)
	if err == nil && del != nil {
		err = del(b)
	}
	if err == nil {
		err = b.Commit()
	}
	if err == nil {
		err = h.cfg.Engine.Flush(ctx)
	}
	if err != nil {
		return fmt.Errorf("raftgroup: remove group %s: %w", id, err)
	}
	fb := h.cfg.WAL.NewBatch()
	fb.Forget(id)
	fb.SetSync(false)
	h.cfg.WAL.Submit(fb, nil)
	return nil
}

// storeApplied makes a group's applied state durable before its log goes. An entry may
// have made another group's first record, as a split does. Nothing would make that record
// again after a crash, and that group's log may hold acknowledged entries.
func (h *Host) storeApplied(ctx context.Context, id keyspace.GroupID) error {
	a, ok, err := h.cfg.Engine.Applied(id)
	if err != nil || !ok {
		return err
	}
	d, durable, err := h.cfg.Engine.DurableApplied(id)
	if err != nil || durable && d.Index >= a.Index {
		return err
	}
	return h.cfg.Engine.Flush(ctx)
}

func (h *Host) submitAndWait(ctx context.Context, setSync func(bool), submit func(func(error))) error {
	setSync(true)
	ch := make(chan error, 1)
	submit(func(err error) { ch <- err })
	select {
	case err := <-ch:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Removed returns the groups that were removed here although a crash may have kept their
// data. They cannot be opened; call Remove for them again.
func (h *Host) Removed() []keyspace.GroupID { return h.cfg.WAL.Removed() }

// FinishRemovals repeats the removals that a crash interrupted, so that their groups may
// be opened again. Call it before the first Open. del writes the deletion of a group's
// data; a is nil if the applied record is gone already.
func (h *Host) FinishRemovals(ctx context.Context, del func(b *engine.Batch, g keyspace.GroupID, a *engine.Applied) error) error {
	for _, id := range h.Removed() {
		var at *engine.Applied
		a, ok, err := h.cfg.Engine.Applied(id)
		if err != nil {
			return fmt.Errorf("raftgroup: remove group %s again: %w", id, err)
		}
		if ok {
			at = &a
		}
		if err := h.Remove(ctx, id, func(b *engine.Batch) error { return del(b, id, at) }); err != nil {
			return fmt.Errorf("after a crash: %w", err)
		}
		h.log.Info("completed a removal that a crash had interrupted", zap.Stringer("group", id))
	}
	return nil
}

// close ends a group in its worker. It answers everything that waits and refuses
// everything that comes later. Completions that still arrive from the wal or the applier
// are dropped.
func (g *Group) close() {
	if g.closed {
		return
	}
	err := ErrClosed
	if g.h.stopping.Load() {
		err = ErrStopped
	}
	g.closed = true
	g.h.m.leaders.Sub(float64(boolInt(g.isLeader)))
	g.h.applied.Add(int64(g.commit - g.applied)) // nothing of it is left to apply here
	g.resetLease()
	g.public.leading.Store(0)
	g.w.setAwake(g, false)
	g.failReads(err)
	g.failChanges(ErrUnknownFate)
	g.endTransfer(err)
	g.abandonProposals()
	g.h.snaps.drop(g)
	if r := g.resetting; r != nil {
		g.resetting = nil
		r.result <- err
	}
	g.h.rememberPromise(g.id, g.promise.until)
	g.h.peers.change(g.conf.replicas, nil)
	g.h.mu.Lock()
	if g.h.mu.groups[g.id] == g {
		delete(g.h.mu.groups, g.id)
	}
	g.h.m.groups.Set(float64(len(g.h.mu.groups)))
	g.h.mu.Unlock()
}
