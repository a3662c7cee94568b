package shard

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/command"
	"github.com/skeindb/skein/shard/eval"
	"github.com/skeindb/skein/shard/locktable"
)

// txnCommand is a TxnCommand on its way through the pipeline. It travels as a call without writes
// of its own.
type txnCommand struct {
	op     rangeapi.TxnCommand
	answer rangeapi.TxnAnswer
	// item is what the entry will carry, nil where nothing changes.
	item *command.TxnItem
	// on are the locks that the item brings, ends or changes.
	on []*locktable.Held
	// swept is the lock to sweep, as it was when the gate let the command pass. The evaluation
	// reads it without the replica's mu.
	swept *command.Lock
	// writes are the intents of a lock whose revisions may still be unknown; draft has the
	// answer's.
	writes []*eval.PendingVersion
	own    *eval.PendingTxn
	draft  eval.Draft
	// creates are the create revisions of the answer's results.
	creates []eval.Ref
	size    int
	// registered is the registration that the command ends, for a mark that comes or goes.
	registered *registration
	// hull is what a revoke sweeps.
	hull keyspace.Span
	// reading is what the answer holds of the node's budget of reads, until it is given.
	reading int64
}

// forgetRead gives back what the answer holds of the node's budget of reads.
func (s *txnCommand) forgetRead(n *Node) {
	n.reads.GiveBack(s.reading)
	s.reading = 0
}

// Txn serves one command of a transaction over several ranges at a replica of this node.
func (n *Node) Txn(ctx context.Context, id keyspace.RangeID, g keyspace.Generation, op rangeapi.TxnCommand) (rangeapi.TxnAnswer, error) {
	r := n.Replica(id)
	if r == nil {
		return nil, kverror.New(kverror.RangeNotHere, "range %s on node %s", id, n.cfg.Self)
	}
	if err := rangeapi.CheckTxnCommand(op); err != nil {
		return nil, err
	}
	if k, ok := op.(*rangeapi.LeaseKeys); ok {
		return r.leaseKeys(ctx, &rangeapi.Request{Range: id, Generation: g, ReadRevision: k.At}, k)
	}
	return r.command(ctx, &rangeapi.Request{Range: id, Generation: g}, op)
}

// command takes a TxnCommand through the pipeline.
func (r *Replica) command(ctx context.Context, req *rangeapi.Request, op rangeapi.TxnCommand) (rangeapi.TxnAnswer, error) {
	if err := r.believe(ctx, revisionOf(op)); err != nil {
		return nil, err
	}
	c := newCall(ctx, req)
	c.cmd = &txnCommand{op: op}
	c.bytes = commandBytes(op)
	if _, err := r.run(c); err != nil {
		return nil, err
	}
	return c.cmd.answer, nil
}

// revisionOf returns the highest revision that a command names as one that was handed out.
func revisionOf(op rangeapi.TxnCommand) keyspace.Revision {
	switch o := op.(type) {
	case *rangeapi.Prepare:
		return o.Name.Start
	case *rangeapi.Commit:
		return max(o.Name.Start, o.Revision)
	case *rangeapi.Resolve:
		return max(o.Name.Start, o.Revision)
	case *rangeapi.Decide:
		return o.Name.Start
	}
	return 0
}

// maxFenceRaise bounds by how much one command may raise a fence: attempts are counted one by
// one, and a fence is never to reach the end of the numbers.
const maxFenceRaise = 1 << 48

// commandBytes is about what a command takes until it is answered.
func commandBytes(op rangeapi.TxnCommand) int64 {
	n := callOverheadBytes
	switch o := op.(type) {
	case *rangeapi.Prepare:
		n += len(o.Anchor)
		for i := range o.Guards {
			n += proto.Size(o.Guards[i].Compare) + command.VersionOverheadBytes
		}
		for i := range o.Writes {
			n += proto.Size(o.Writes[i].Op) + command.VersionOverheadBytes
		}
	case *rangeapi.Commit:
		n += len(o.Anchor)
		for i := range o.Locks {
			n += len(o.Locks[i].Span.Start) + len(o.Locks[i].Span.End) + command.VersionOverheadBytes
		}
	case *rangeapi.Decide:
		n += len(o.Anchor)
	case *rangeapi.Forget:
		n += len(o.Anchor)
	}
	return int64(n)
}

// endsLocks says whether the call is a command that others may be waiting for.
func (c *call) endsLocks() bool { return c.cmd != nil && rangeapi.EndsLocks(c.cmd.op) }

// gateLocked checks a call against the locks of transactions over several ranges before its
// evaluation. A call that meets a lock waits for its end, or gives way if it is a younger
// transaction. Most commands need no evaluation at all. dealt says that the call is gone.
func (r *Replica) gateLocked(c *call, lead *leadership, out *answers) (dealt bool) {
	if c.cmd == nil {
		m := r.locks.Conflict(c.req.Op)
		if m.Held == nil {
			return false
		}
		r.blockLocked(c, m)
		return true
	}
	switch op := c.cmd.op.(type) {
	case *rangeapi.Prepare:
		return r.gatePrepareLocked(c, op, out)
	case *rangeapi.Commit:
		r.commitLocked(c, op, lead, out)
	case *rangeapi.Decide:
		r.decideLocked(c, op, lead, out)
	case *rangeapi.Forget:
		r.forgetLocked(c, op, lead, out)
	case *rangeapi.Resolve:
		return r.resolveLocked(c, op, lead, out)
	case *rangeapi.Revoke:
		return r.gateRevokeLocked(c, op, out)
	case *attach:
		r.attachLocked(c, op, lead, out)
	}
	return true
}

// gatePrepareLocked lets a Prepare pass to its evaluation that meets nobody.
func (r *Replica) gatePrepareLocked(c *call, op *rangeapi.Prepare, out *answers) (dealt bool) {
	if r.rec.Span.Contains(op.Anchor) && op.Name.Attempt <= r.fence {
		c.cmd.answer = &rangeapi.Prepared{Fence: r.fence}
		out.add(c, nil)
		return true
	}
	if op.Pin {
		// A range whose compaction is held back is not held back any longer for that.
		if at, low := op.PinAt, max(r.rec.Compacted, r.node.Compacted()); at != 0 && at < low {
			out.add(c, &kverror.Error{Kind: kverror.Compacted, CompactRevision: low})
			return true
		}
		r.pinLocked(op.PinAt)
	}
	if len(op.Guards) == 0 && len(op.Writes) == 0 && op.Revoke == 0 {
		c.cmd.answer = &rangeapi.Prepared{}
		out.add(c, nil)
		return true
	}
	if h := r.quellLocked(op.Revoke); h != nil {
		r.blockLocked(c, locktable.Meeting{Held: h})
		return true
	}
	m, dies, outside := r.locks.Meets(op, r.rec.Span)
	switch {
	case outside:
		out.add(c, r.errorLocked(kverror.WrongRange, fmt.Sprintf("keys of %s are outside of %s", op.Name, r.rec.Span)))
	case dies:
		out.add(c, kverror.New(kverror.Conflict, "transaction %s meets the older %s", op.Name, m.Held.Name))
	case m.Held != nil:
		r.blockLocked(c, m)
	case r.node.locks.Bytes() > r.node.cfg.Limits.LockBytes:
		out.add(c, kverror.New(kverror.TooManyRequests, "node %s: transactions hold %d bytes of locks", r.node.cfg.Self, r.node.locks.Bytes()))
	default:
		return false
	}
	return true
}

// evaluatePrepare evaluates a Prepare that the gate has let pass.
func (r *Replica) evaluatePrepare(c *call, op *rangeapi.Prepare, pass *pass) (*eval.Evaluation, error) {
	if op.Revoke != 0 {
		return r.prepareRevoke(c, op, pass)
	}
	e := r.newEvaluation(c, pass)
	c.cmd.forgetRead(r.node)
	p, err := e.Prepare(op, r.node.cfg.Limits.MaxEntryBytes/4, r.node.cfg.Limits.PrevBytes)
	if p.HoldsRead {
		c.cmd.reading = pass.budget.Taken()
	} else {
		pass.budget.Release()
	}
	c.cmd.answer, c.cmd.own, c.cmd.creates = p.Answer, e.Txn(), p.Creates
	return e, err
}

// evaluateCommand evaluates a command that the gate has let pass.
func (r *Replica) evaluateCommand(c *call, pass *pass) (e *eval.Evaluation, err error) {
	switch op := c.cmd.op.(type) {
	case *rangeapi.Prepare:
		return r.evaluatePrepare(c, op, pass)
	case *rangeapi.Resolve:
		if op.Detach != 0 {
			c.cmd.item, err = r.evaluateUnmark(op)
		} else {
			c.cmd.item, err = eval.Sweep(r.store, c.cmd.swept, op.Revision, r.node.cfg.Limits.MaxEntryBytes)
		}
	case *rangeapi.Revoke:
		return r.evaluateRevoke(c, op, pass)
	}
	return nil, err
}

// placeCommandLocked is placeLocked of a command.
func (r *Replica) placeCommandLocked(c *call, lead *leadership, e *eval.Evaluation, err error, out *answers) {
	if _, ok := c.cmd.op.(*rangeapi.Prepare); ok {
		r.placePrepareLocked(c, lead, e, err, out)
		return
	}
	if op, ok := c.cmd.op.(*rangeapi.Revoke); ok {
		r.placeRevokeLocked(c, op, lead, e, err, out)
		return
	}
	if err != nil {
		r.undoLocked(c.cmd)
		out.add(c, err)
		return
	}
	if c.cmd.item.Kind == command.ItemSweep {
		c.cmd.answer = &rangeapi.Resolved{More: true}
	}
	r.decideLockLocked(c, lead, c.cmd.item, c.cmd.on...)
}

// placePrepareLocked is placeLocked of a Prepare that was evaluated.
func (r *Replica) placePrepareLocked(c *call, lead *leadership, e *eval.Evaluation, err error, out *answers) {
	s, op := c.cmd, c.cmd.op.(*rangeapi.Prepare)
	var wait eval.WaitError
	var missing eval.NeedsLease
	switch {
	case errors.As(err, &missing):
		r.prepareMarkLocked(c, op, missing.Lease, out)
		return
	case errors.As(err, &wait):
		c.lacks = 0
		r.parkLocked(c, batchOf(wait.Txn.Batch))
		return
	case errors.Is(err, eval.ErrOtherPath):
		// A hint: the coordinator looks again, and nothing rests on it.
		out.add(c, nil)
		return
	case err != nil:
		out.add(c, err)
		return
	}
	a := s.answer.(*rangeapi.Prepared)
	writes := e.Writes()
	if a.Refused != nil {
		writes = nil
	}
	if hasPut(writes) && r.node.full() {
		out.add(c, kverror.New(kverror.NoSpace, "the disk of node %s is full", r.node.cfg.Self))
		return
	}
	l := &command.Lock{ID: rangeapi.LockID{Range: r.id}, Name: op.Name, Anchor: op.Anchor, Floor: s.own.Floor, Spans: prepareSpans(op, a)}
	if op.Revoke != 0 {
		l.Spans = revokeSpans(s, writes)
		l.Revoke = rangeapi.Attachment{Lease: op.Revoke, Incarnation: op.Incarnation}
		if r.revokeMeetsLocked(c, op, l.Spans, out) {
			return
		}
	}
	l.Leases = leasesOf(writes)
	s.writes, s.draft = writes, e.Draft()
	s.size = l.Bytes() + e.WriteBytes()
	s.item = &command.TxnItem{Kind: command.ItemLock, Lock: l}
	r.appendLocked(c, lead)
	// Its intents are in the lock only once they are finished, and count from now on.
	s.on = []*locktable.Held{r.locks.Acquire(l, int64(s.size), r.node.cfg.Clock.Now())}
}

// decideLockLocked puts a command with an item that decides about locks into the batch.
func (r *Replica) decideLockLocked(c *call, lead *leadership, it *command.TxnItem, on ...*locktable.Held) {
	for _, h := range on {
		h.Deciding = true
	}
	c.cmd.item, c.cmd.on, c.cmd.size = it, on, 64
	if it.Record != nil {
		c.cmd.size += it.Record.Bytes()
	}
	for _, k := range it.Keys {
		c.cmd.size += len(k) + command.VersionOverheadBytes
	}
	r.appendLocked(c, lead)
}

// decidingLocked has a call wait for a lock about which an entry on its way decides.
func (r *Replica) decidingLocked(c *call, h *locktable.Held) bool {
	if h == nil || !h.Deciding {
		return false
	}
	r.blockLocked(c, locktable.Meeting{Held: h})
	return true
}

// sayLocked answers a command that found nothing to change, once the leadership is confirmed:
// an old leader must not answer so.
func (r *Replica) sayLocked(c *call, a rangeapi.TxnAnswer, out *answers) {
	c.cmd.answer = a
	r.confirming++
	out.toConfirm(c)
}

func (r *Replica) commitLocked(c *call, op *rangeapi.Commit, lead *leadership, out *answers) {
	if t := r.locks.Record(op.Name); t != nil {
		if t.Revision != op.Revision {
			out.add(c, kverror.New(kverror.Internal, "transaction %s is committed at %d, and now at %d", op.Name, t.Revision, op.Revision))
			return
		}
		r.sayLocked(c, &rangeapi.Decided{Revision: t.Revision}, out)
		return
	}
	h := r.locks.Find(op.Name, op.AnchorLock)
	switch {
	case h == nil:
		r.sayLocked(c, &rangeapi.Decided{}, out)
	case r.decidingLocked(c, h):
	case !r.intactLocked(h):
		r.sayLocked(c, &rangeapi.Decided{}, out)
	case !r.mayBeAtLocked(c, h, op.Revision, out):
	default:
		c.cmd.answer = &rangeapi.Decided{Revision: op.Revision}
		rec := &command.CommitRecord{Name: op.Name, Anchor: op.Anchor, Revision: op.Revision, Locks: op.Locks}
		r.decideLockLocked(c, lead, &command.TxnItem{Kind: command.ItemCommit, ID: op.AnchorLock, Record: rec}, h)
	}
}

// intactLocked says whether a lock that its attempt took at its anchor is the one that was made
// there. A split may have cut the lock, the anchor's half may have been aborted, and a merge
// may have brought the other half here. Then the fence has passed the attempt, and this half
// does not cover the anchor. A revoke's lock covers no anchor: if a fence has passed its
// attempt, the revoke starts over.
func (r *Replica) intactLocked(h *locktable.Held) bool {
	return h.Name.Attempt > r.rec.Fence || h.Covers(h.Anchor)
}

// mayBeAtLocked refuses a command of a lock at a revision that cannot be its transaction's:
// in the log it would end every replica.
func (r *Replica) mayBeAtLocked(c *call, h *locktable.Held, rev keyspace.Revision, out *answers) bool {
	err := h.Above(rev)
	if h.Pending {
		err = fmt.Errorf("lock %s of %s is not applied, and its revision is %d", h.ID, h.Name, rev)
	}
	if err != nil {
		out.add(c, kverror.New(kverror.Internal, "%v", err))
	}
	return err == nil
}

func (r *Replica) decideLocked(c *call, op *rangeapi.Decide, lead *leadership, out *answers) {
	if t := r.locks.Record(op.Name); t != nil {
		r.sayLocked(c, &rangeapi.Decided{Revision: t.Revision, Locks: t.Locks}, out)
		return
	}
	hs := slices.Clone(r.locks.Named(op.Name))
	for _, h := range hs {
		if r.decidingLocked(c, h) {
			return
		}
	}
	if len(hs) == 0 && op.Name.Attempt <= r.rec.Fence {
		r.sayLocked(c, &rangeapi.Decided{}, out)
		return
	}
	if op.Name.Attempt > r.fence+maxFenceRaise {
		out.add(c, kverror.New(kverror.Internal, "attempt %s is named where the fence is %d", op.Name, r.fence))
		return
	}
	r.fence = max(r.fence, op.Name.Attempt)
	it := &command.TxnItem{Kind: command.ItemFence, Fence: op.Name.Attempt}
	c.cmd.answer = &rangeapi.Decided{}
	r.decideLockLocked(c, lead, it, hs...)
}

func (r *Replica) forgetLocked(c *call, op *rangeapi.Forget, lead *leadership, out *answers) {
	if r.locks.Record(op.Name) == nil {
		r.sayLocked(c, &rangeapi.Resolved{}, out)
		return
	}
	c.cmd.answer = &rangeapi.Resolved{}
	r.decideLockLocked(c, lead, &command.TxnItem{Kind: command.ItemForget, Name: op.Name})
}

// resolveLocked ends a lock, or one of several of the attempt. It passes a lock to the
// evaluation if there are keys to sweep, or if the attachment of a lease is to end with it.
func (r *Replica) resolveLocked(c *call, op *rangeapi.Resolve, lead *leadership, out *answers) (dealt bool) {
	var h *locktable.Held
	more := false
	for _, o := range r.locks.Named(op.Name) {
		if op.Lock == (rangeapi.LockID{}) || o.ID == op.Lock {
			more = h != nil
			h = o
		}
	}
	switch {
	case h == nil && op.Detach != 0 && r.revocableLocked(op.Detach, op.Incarnation):
		out.add(c, kverror.New(kverror.Conflict, "attempt %s was aborted, and lease %d still has its mark", op.Name, op.Detach))
	case h == nil:
		r.sayLocked(c, &rangeapi.Resolved{}, out)
	case r.decidingLocked(c, h):
	case op.Revision != 0 && !r.mayBeAtLocked(c, h, op.Revision, out):
	case op.Revision != 0 && h.Sweep() >= 0:
		h.Deciding = true
		c.cmd.on, c.cmd.swept = []*locktable.Held{h}, h.Lock
		return false
	case op.Detach != 0 && (!h.Keyless() || h.Revoke != rangeapi.Attachment{Lease: op.Detach, Incarnation: op.Incarnation}):
		out.add(c, kverror.New(kverror.Internal, "lock %s of %s is not that of lease %d without keys", h.ID, h.Name, op.Detach))
	case op.Detach != 0:
		h.Deciding = true
		c.cmd.on, c.cmd.answer = []*locktable.Held{h}, &rangeapi.Resolved{More: more}
		return false
	default:
		c.cmd.answer = &rangeapi.Resolved{More: more, Intact: op.Revision == 0 && op.Lock == h.ID && r.intactLocked(h)}
		r.decideLockLocked(c, lead, &command.TxnItem{Kind: command.ItemResolve, Revision: op.Revision}, h)
	}
	return true
}

// undoLocked takes back what a command has left in the table: its batch is discarded.
func (r *Replica) undoLocked(s *txnCommand) {
	if s.registered != nil {
		r.endRegistrationLocked(s.registered)
	}
	for _, h := range s.on {
		if s.item != nil && s.item.Kind == command.ItemLock {
			r.wokenLocked(r.locks.Release(h))
		} else {
			r.wokenLocked(r.locks.Wake(h))
		}
	}
}

// cacheResolvedLocked remembers what the own pipeline's resolutions have made of their keys.
func (r *Replica) cacheResolvedLocked(changes []lockChange) {
	for i := range changes {
		ch := &changes[i]
		switch {
		case ch.revision == 0 || ch.mark.Lease != 0:
		case ch.Added != nil:
			// A sweep.
			r.epochs.End(r.node.cache)
		default:
			for k := range ch.Removed.Writes {
				v := ch.Removed.Writes[k].At(ch.revision)
				h := eval.CachedVersion{Alive: !v.Tombstone, Version: v.Version, Lease: v.Lease, Mod: v.Mod, Create: v.Create, Value: v.Value}
				if len(h.Value) <= eval.MaxCachedValueBytes {
					h.Value = bytes.Clone(h.Value) // it outlives the lock
				}
				r.node.cache.Put(r.epochs.Of(v.Key), v.Key, h)
			}
		}
	}
}
