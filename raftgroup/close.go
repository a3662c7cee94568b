package raftgroup

import (
	"context"
	"errors"
	"fmt"

	"go.uber.org/zap"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/raftgroup/quarantine"
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

// Deleter writes the deletion of a group's data into a batch. Removed lists the group by then, and
// all that are removed with it: they certainly never come back. The batches are committed after the
// last one is written: until Remove returns, nobody else may come to hold what they delete.
type Deleter func(b *engine.Batch, g keyspace.GroupID) error

// Remove closes groups and removes their logs for good. del, which may be nil, deletes the state
// machine's data; the applied record is deleted with it. The groups share each sync of the wal and
// each flush. The removal of a group survives a crash, unless it is in failed. A crash before
// that leaves its tombstone in the wal, and Removed lists the group.
func (h *Host) Remove(ctx context.Context, ids []keyspace.GroupID, del Deleter) (failed map[keyspace.GroupID]error) {
	failed = make(map[keyspace.GroupID]error)
	fail := func(err error, ids ...keyspace.GroupID) {
		for _, id := range ids {
			failed[id] = fmt.Errorf("raftgroup: remove group %s: %w", id, err)
		}
	}
	for _, id := range ids {
		h.beginClose(id) // all at once: Close waits for each
	}
	var closed []keyspace.GroupID
	defer func() {
		for _, id := range closed {
			h.unreserve(id)
		}
	}()
	for _, id := range ids {
		err := h.Close(ctx, id)
		if err == nil {
			err = h.reserve(id)
		}
		if err != nil {
			fail(err, id)
			continue
		}
		closed = append(closed, id)
	}
	if len(closed) == 0 {
		return failed
	}
	if err := h.storeApplied(ctx, closed); err != nil {
		fail(err, closed...)
		return failed
	}
	// The tombstones first: if a crash loses a deletion in the engine, the replica must not come
	// back without its votes.
	wb := h.cfg.WAL.NewBatch()
	for _, id := range closed {
		wb.Remove(id)
	}
	if err := h.submitAndWait(ctx, wb.SetSync, func(done func(error)) { h.cfg.WAL.Submit(wb, done) }); err != nil {
		fail(err, closed...)
		return failed
	}
	h.quarantine.Forget(closed) // before their notes are deleted
	var deleted []keyspace.GroupID
	for i, err := range h.deleteStates(closed, del) {
		if err != nil {
			fail(err, closed[i])
			continue
		}
		deleted = append(deleted, closed[i])
	}
	if err := h.cfg.Engine.Flush(ctx); err != nil {
		fail(err, deleted...)
		return failed
	}
	// A tombstone goes only now: the deletion of the state is durable (trap 30).
	fb := h.cfg.WAL.NewBatch()
	for _, id := range deleted {
		fb.Forget(id)
	}
	fb.SetSync(false)
	h.cfg.WAL.Submit(fb, nil)
	return failed
}

// deleteStates deletes the groups' applied records and data, and returns an error or nil for each.
// Each has a batch of its own, because one that cannot be deleted must not keep the others. All batches
// are written before the first is committed: the engine sorts its range deletions anew for the first
// read behind each.
func (h *Host) deleteStates(ids []keyspace.GroupID, del Deleter) []error {
	batches, errs := make([]*engine.Batch, len(ids)), make([]error, len(ids))
	for i, id := range ids {
		batches[i] = h.cfg.Engine.NewBatch()
		errs[i] = batches[i].DeleteApplied(id)
		if errs[i] == nil {
			errs[i] = quarantine.DeleteNote(batches[i], id)
		}
		if errs[i] == nil && del != nil {
			errs[i] = del(batches[i], id)
		}
	}
	for i, b := range batches {
		if errs[i] == nil {
			errs[i] = b.Commit()
		}
		errs[i] = errors.Join(errs[i], b.Close())
	}
	return errs
}

// storeApplied makes the groups' applied state durable before their logs go. An entry may
// have made another group's first record, as a split does. Nothing would make that record
// again after a crash, and that group's log may hold acknowledged entries.
func (h *Host) storeApplied(ctx context.Context, ids []keyspace.GroupID) error {
	durable := make(map[keyspace.GroupID]uint64, len(ids))
	err := h.cfg.Engine.VisitDurableApplied(ids, func(id keyspace.GroupID, d engine.Applied) error {
		durable[id] = d.Index
		return nil
	})
	if err != nil {
		return err
	}
	for _, id := range ids {
		a, ok, err := h.cfg.Engine.Applied(id)
		if err != nil {
			return err
		}
		if d, stored := durable[id]; ok && (!stored || d < a.Index) {
			return h.cfg.Engine.Flush(ctx)
		}
	}
	return nil
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
// be opened again. Call it before the first Open. del is Remove's; the applied record of a group
// may be gone already.
func (h *Host) FinishRemovals(ctx context.Context, del Deleter) error {
	ids := h.Removed()
	failed := h.Remove(ctx, ids, del)
	for _, id := range ids {
		if failed[id] != nil {
			return fmt.Errorf("after a crash: %w", failed[id])
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
	g.saveCommit() // for the tools of a stopped node
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
