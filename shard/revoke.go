package shard

import (
	"bytes"
	"context"
	"errors"
	"slices"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/command"
	"github.com/skeindb/skein/shard/locktable"
)

// quellLocked ends the registration of a lease that is about to be revoked: its answer may
// be from before that, and would bring a mark of a lease that is gone. A mark that is on
// its way already must be awaited.
func (r *Replica) quellLocked(lease keyspace.LeaseID) *locktable.Held {
	reg := r.registrations[lease]
	if reg == nil {
		return nil
	}
	if reg.state != registrationAsked {
		return &reg.Held
	}
	r.endRegistrationLocked(reg)
	return nil
}

// gateRevokeLocked lets a Revoke pass to its evaluation that has something to do.
func (r *Replica) gateRevokeLocked(c *call, op *rangeapi.Revoke, out *answers) (dealt bool) {
	if h := r.quellLocked(op.Lease); h != nil {
		r.blockLocked(c, locktable.Meeting{Held: h})
		return true
	}
	if hs := r.locks.OfLease(op.Lease); len(hs) > 0 {
		r.blockLocked(c, locktable.Meeting{Held: hs[0]})
		return true
	}
	if !r.revocableLocked(op.Lease, op.Incarnation) {
		r.sayLocked(c, &rangeapi.Revoked{}, out)
		return true
	}
	return false
}

// revocableLocked says whether the range may have keys of the incarnation.
func (r *Replica) revocableLocked(lease keyspace.LeaseID, i keyspace.LeaseIncarnation) bool {
	here, ok := r.marks[lease]
	return ok && here <= i
}

// evaluateRevoke deletes the keys of a lease, unless they are too many.
func (r *Replica) evaluateRevoke(c *call, op *rangeapi.Revoke, pass *pass) (*evaluation, error) {
	e := r.newEvaluation(c, pass)
	defer func() { e.view.budget.release() }()
	e.changes.txn = &pendingTxn{floor: r.node.Floor()}
	r.mu.Lock()
	span := r.rec.Span
	r.mu.Unlock()
	keys, whole, err := e.view.attached(op.Lease, span, r.node.cfg.Limits.MaxEntryBytes/4)
	if err != nil {
		return e, err
	}
	c.step.answer = &rangeapi.Revoked{TooMany: !whole}
	if whole {
		err = e.detachAll(op.Lease, keys)
	}
	return e, err
}

func (e *evaluation) detachAll(lease keyspace.LeaseID, keys [][]byte) error {
	for _, k := range keys {
		if err := e.write(&pendingVersion{key: k, txn: e.changes.txn, tombstone: true, lived: true}, lease); err != nil {
			return err
		}
	}
	return nil
}

// attached returns the keys of the span that are attached to the lease, in their order, as
// far as they take limit bytes at most; whole says that these are all.
func (w *view) attached(lease keyspace.LeaseID, s keyspace.Span, limit int) (keys [][]byte, whole bool, err error) {
	layer, err := w.layer(s, newest)
	if err != nil {
		return nil, false, err
	}
	layer = slices.DeleteFunc(layer, func(v *pendingVersion) bool { return v.lease() != lease })
	whole = true
	add := func(key []byte) error {
		// The index says what was, a moment ago or before a crash; the version decides.
		it, ok, err := w.getHead(key)
		if err != nil || !ok || it.lease != lease {
			return err
		}
		if limit -= len(key) + command.VersionOverheadBytes; limit < 0 && len(keys) > 0 {
			whole = false
			return errStop
		}
		keys = append(keys, bytes.Clone(key))
		return w.charge(len(key))
	}
	err = w.store.attached(lease, s, func(key []byte) error {
		for len(layer) > 0 && bytes.Compare(layer[0].key, key) <= 0 {
			if !bytes.Equal(layer[0].key, key) {
				if err := add(layer[0].key); err != nil {
					return err
				}
			}
			layer = layer[1:]
		}
		return add(key)
	})
	for _, v := range layer {
		if err != nil {
			break
		}
		err = add(v.key)
	}
	if errors.Is(err, errStop) {
		err = nil
	}
	return keys, whole, err
}

// placeRevokeLocked is placeLocked of a Revoke. What it deletes nobody may have locked.
func (r *Replica) placeRevokeLocked(c *call, op *rangeapi.Revoke, lead *leadership, e *evaluation, err error, out *answers) {
	var wait waitError
	if errors.As(err, &wait) {
		r.parkLocked(c, wait.txn.batch)
		return
	}
	if err != nil || c.step.answer.(*rangeapi.Revoked).TooMany {
		out.add(c, err)
		return
	}
	for _, v := range e.changes.writes {
		if m := r.locks.Holder(v.key, true); m.Held != nil {
			r.blockLocked(c, locktable.Meeting{Held: m.Held})
			return
		}
	}
	s := c.step
	s.item, s.size = &command.TxnItem{Kind: command.ItemDetach, Attachment: rangeapi.Attachment{Lease: op.Lease, Incarnation: op.Incarnation}}, callOverheadBytes
	s.registered = r.registerLocked(op.Lease, registrationUnmarks)
	if c.writes = e.changes.writes; len(c.writes) > 0 {
		c.txn = e.changes.txn
	}
	r.appendLocked(c, lead)
}

// prepareRevoke evaluates the piece that a revoke over several ranges has here.
func (r *Replica) prepareRevoke(c *call, op *rangeapi.Prepare, pass *pass) (*evaluation, error) {
	e := r.newEvaluation(c, pass)
	defer func() { e.view.budget.release() }()
	e.changes.txn = &pendingTxn{floor: r.node.Floor()}
	a := &rangeapi.Prepared{}
	c.step.answer, c.step.own = a, e.changes.txn
	c.step.hull = keyspace.Span{} // of an evaluation before it waited
	r.mu.Lock()
	revocable := r.revocableLocked(op.Revoke, op.Incarnation)
	span := r.rec.Span
	r.mu.Unlock()
	if !revocable {
		return e, nil
	}
	keys, whole, err := e.view.attached(op.Revoke, span, r.node.cfg.Limits.MaxEntryBytes/4)
	if err != nil {
		return e, err
	}
	if a.Changes = len(keys) > 0; whole {
		e.sub = 1
		return e, e.detachAll(op.Revoke, keys)
	}
	// What is swept stays as it is until then, and with it all that lies between.
	c.step.hull = keyspace.Span{Start: keys[0], End: span.End}
	return e, nil
}

// revokeSpans returns what a revoke locks beside the mark.
func revokeSpans(s *step, writes []*pendingVersion) (spans []command.LockSpan) {
	if s.hull.Start != nil {
		return []command.LockSpan{{Span: s.hull, Mode: command.Sweep, Sub: 1}}
	}
	for _, v := range writes {
		spans = append(spans, command.LockSpan{Span: keyspace.Single(v.key), Mode: command.Exclusive})
	}
	return spans
}

// revokeMeetsLocked looks for locks in the way of what a revoke has found to be deleted, by
// the rule of meetsLocked.
func (r *Replica) revokeMeetsLocked(c *call, op *rangeapi.Prepare, spans []command.LockSpan, out *answers) (dealt bool) {
	met, dies := r.locks.MeetsRevoke(op, spans)
	switch {
	case met == nil:
		return false
	case dies:
		out.add(c, kverror.New(kverror.Conflict, "transaction %s meets the older %s", op.Name, met.Name))
	default:
		r.blockLocked(c, locktable.Meeting{Held: met})
	}
	return true
}

// sweepLease finds the next keys of a lease that a committed lock deletes.
func (r *Replica) sweepLease(l *command.Lock, it *command.TxnItem, span keyspace.Span, bytesLeft int) error {
	err := r.store.attached(l.Revoke.Lease, span, func(key []byte) error {
		v, ok, err := r.store.get(key, newest)
		if err != nil || !ok || v.Lease != l.Revoke.Lease || v.Mod >= it.Revision {
			return err
		}
		if bytesLeft -= len(key) + command.VersionOverheadBytes; bytesLeft < 0 && len(it.Keys) > 0 {
			it.Next = bytes.Clone(key)
			return errStop
		}
		it.Sweep(&mvcc.Version{Key: key, Lease: l.Revoke.Lease})
		return nil
	})
	if errors.Is(err, errStop) {
		err = nil
	}
	return err
}

// evaluateUnmark has the mark of a lease without keys go. The lock was of a part of the range,
// perhaps: where a merge has brought it together with another part, whose own lock others have
// ended, keys may have been attached there, or be about to be by a lock.
func (r *Replica) evaluateUnmark(op *rangeapi.Resolve) (*command.TxnItem, error) {
	release := &command.TxnItem{Kind: command.ItemRelease}
	conflict := kverror.New(kverror.Conflict, "lease %d has keys by now, attempt %s was aborted where they are", op.Detach, op.Name)
	r.mu.Lock()
	span, stays := r.rec.Span, !r.revocableLocked(op.Detach, op.Incarnation)
	attaches := r.locks.Attaches(op.Detach)
	r.mu.Unlock()
	switch {
	case stays:
		return release, nil // a later lease's mark, and its keys
	case attaches:
		return nil, conflict
	}
	err := r.store.attached(op.Detach, span, func(key []byte) error {
		v, ok, err := r.store.get(key, newest)
		if err != nil || !ok || v.Lease != op.Detach {
			return err
		}
		return conflict
	})
	return release, err
}

// leaseKeys answers a LeaseKeys: everything up to its revision is applied and visible.
func (r *Replica) leaseKeys(ctx context.Context, req *rangeapi.Request, op *rangeapi.LeaseKeys) (rangeapi.TxnAnswer, error) {
	if err := r.believe(ctx, op.At); err != nil {
		return nil, err
	}
	r.node.heard(op.At)
	for range maxReadStarts {
		a, err := r.leaseKeysOnce(ctx, req, op)
		if errors.Is(err, errAgain) {
			r.node.metrics.readRestarts.Inc()
			continue
		}
		if err != nil {
			if errors.Is(err, kverror.NotLeader) {
				r.group.Wake()
			}
			return nil, err
		}
		return a, nil
	}
	return nil, kverror.New(kverror.Busy, "range %s: the pipeline is cut again and again", r.id)
}

func (r *Replica) leaseKeysOnce(ctx context.Context, req *rangeapi.Request, op *rangeapi.LeaseKeys) (*rangeapi.Attached, error) {
	lead, err := r.awaitOlder(ctx, req, op.Span, op.At)
	if err != nil {
		return nil, err
	}
	if !r.group.LeaseHeld(lead.term) {
		if err := r.awaitReadIndex(ctx); err != nil {
			return nil, err
		}
	}
	if err := r.stillLeads(req, op.Span, lead); err != nil {
		return nil, err
	}
	r.mu.Lock()
	span, ok := r.rec.Span.Intersect(op.Span)
	r.mu.Unlock()
	a := &rangeapi.Attached{}
	if !ok {
		return a, nil
	}
	budget := r.node.readBudget()
	defer budget.release()
	size := 0
	err = r.store.attached(op.Lease, span, func(key []byte) error {
		v, ok, err := r.store.get(key, newest)
		if err != nil || !ok || v.Lease != op.Lease {
			return err
		}
		if size += len(key) + command.VersionOverheadBytes; size > rangeapi.LeaseKeysBytes && len(a.Keys) > 0 {
			a.More = true
			return errStop
		}
		a.Keys = append(a.Keys, bytes.Clone(key))
		return budget.take(int64(len(key)))
	})
	if err != nil && !errors.Is(err, errStop) {
		return nil, err
	}
	return a, r.checkRead(req, op.Span, lead, newest, 0)
}
