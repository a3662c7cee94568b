package shard

import (
	"bytes"
	"context"
	"errors"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/command"
	"github.com/skeindb/skein/shard/eval"
	"github.com/skeindb/skein/shard/locktable"
	"github.com/skeindb/skein/shard/pipeline"
)

// quellLocked ends the registration of a lease that is about to be revoked. The registration's
// answer may be older than the revoke, and would bring the attachment of a lease that is gone. If
// the attachment is in the pipeline already, quellLocked returns what to wait for.
func (r *Replica) quellLocked(lease keyspace.LeaseID) *locktable.Held {
	reg := r.leases.changing[lease]
	if reg == nil {
		return nil
	}
	if reg.state != registrationAsked {
		return &reg.Held
	}
	r.endRegistrationLocked(reg)
	return nil
}

// gateRevoke lets a Revoke pass to its evaluation that has something to do.
func (s *txnCommand) gateRevoke(c *pipeline.Call, op *rangeapi.Revoke, out *pipeline.Answers) (dealt bool) {
	r := s.r
	if h := r.quellLocked(op.Lease); h != nil {
		r.pipe.Block(c, locktable.Meeting{Held: h})
		return true
	}
	if hs := r.locks.OfLease(op.Lease); len(hs) > 0 {
		r.pipe.Block(c, locktable.Meeting{Held: hs[0]})
		return true
	}
	if !r.revocableLocked(op.Lease, op.Incarnation) {
		s.say(c, &rangeapi.Revoked{}, out)
		return true
	}
	return false
}

// revocableLocked says whether the range may have keys of the incarnation.
func (r *Replica) revocableLocked(lease keyspace.LeaseID, i keyspace.LeaseIncarnation) bool {
	here, ok := r.leases.attached[lease]
	return ok && here <= i
}

// checkCountsLocked says why a check of a lease's keys does not count any more: a later leader of placement may have
// taken the revoke back. Then the newer keys, which it met, may be gone by now. Whatever removed them had its revision
// from that leader, and the range knows the leader's term.
func (r *Replica) checkCountsLocked(check keyspace.KeyCheck) error {
	if check.At != 0 && check.Term < r.rec.SequencerTerm {
		return kverror.New(kverror.NoLeader, "a revoke of the leader of placement of term %d, and there is one of term %d", check.Term, r.rec.SequencerTerm)
	}
	return nil
}

// evaluateRevoke deletes the keys of a lease, unless they are too many.
func (s *txnCommand) evaluateRevoke(c *pipeline.Call, op *rangeapi.Revoke, pass *pipeline.Pass) error {
	r := s.r
	e := r.pipe.Evaluation(c, pass)
	defer pass.Budget.Release()
	r.mu.Lock()
	span, err := r.rec.Span, r.checkCountsLocked(op.Checked)
	r.mu.Unlock()
	if err != nil {
		return err
	}
	tooMany, err := e.Revoke(op.Lease, op.Checked.At, span, r.store.cfg.Limits.MaxEntryBytes/4)
	if err != nil {
		return err
	}
	s.answer = &rangeapi.Revoked{TooMany: tooMany}
	return nil
}

// placeRevoke is Place of a Revoke. Nobody may have locked what it deletes.
func (s *txnCommand) placeRevoke(c *pipeline.Call, op *rangeapi.Revoke, e *eval.Evaluation, err error, out *pipeline.Answers) {
	r := s.r
	var wait eval.WaitError
	if errors.As(err, &wait) {
		r.pipe.Park(c, wait.Txn.Batch)
		return
	}
	if err != nil || s.answer.(*rangeapi.Revoked).TooMany {
		out.Add(c, err)
		return
	}
	for _, v := range e.Writes() {
		if m := r.locks.Holder(v.Key, true); m.Held != nil {
			r.pipe.Block(c, locktable.Meeting{Held: m.Held})
			return
		}
	}
	s.item, s.size = &command.TxnItem{Kind: command.ItemDetach, Attachment: rangeapi.Attachment{Lease: op.Lease, Incarnation: op.Incarnation}}, pipeline.CallOverheadBytes
	s.registered = r.registerLocked(op.Lease, registrationDetaches)
	c.TakeWrites(e)
	r.pipe.Append(c)
}

// prepareRevoke evaluates what a revoke over several ranges deletes here.
func (s *txnCommand) prepareRevoke(c *pipeline.Call, op *rangeapi.Prepare, pass *pipeline.Pass) error {
	r := s.r
	e := r.pipe.Evaluation(c, pass)
	defer pass.Budget.Release()
	r.mu.Lock()
	revocable, span, err := r.revocableLocked(op.Revoke, op.Incarnation), r.rec.Span, r.checkCountsLocked(op.Checked)
	r.mu.Unlock()
	if err != nil {
		return err
	}
	a, hull, err := e.PrepareRevoke(op.Revoke, op.Checked.At, revocable, span, r.store.cfg.Limits.MaxEntryBytes/4)
	// An earlier evaluation, before the call waited, may have left another hull.
	s.answer, s.own, s.hull = a, e.Txn(), hull
	return err
}

// revokeSpans returns what a revoke locks beside the attachment.
func revokeSpans(s *txnCommand, writes []*eval.PendingVersion) (spans []command.LockSpan) {
	if s.hull.Start != nil {
		return []command.LockSpan{{Span: s.hull, Mode: command.Sweep, Sub: 1}}
	}
	for _, v := range writes {
		spans = append(spans, command.LockSpan{Span: keyspace.Single(v.Key), Mode: command.Exclusive})
	}
	return spans
}

// revokeMeetsLocked looks for locks in the way of what a revoke has found to be deleted, by the rule of locktable.Table.Meets.
func (r *Replica) revokeMeetsLocked(c *pipeline.Call, op *rangeapi.Prepare, spans []command.LockSpan, out *pipeline.Answers) (dealt bool) {
	met, dies := r.locks.MeetsRevoke(op, spans)
	switch {
	case met == nil:
		return false
	case dies:
		out.Add(c, kverror.New(kverror.Conflict, "transaction %s meets the older %s", op.Name, met.Name))
	default:
		r.pipe.Block(c, locktable.Meeting{Held: met})
	}
	return true
}

// evaluateDetach ends the attachment of a lease without keys. The lock may have covered only a
// part of today's range: a merge may have added another part, whose own lock has ended
// before. There, keys may have been attached since, or a lock may be about to attach some.
func (r *Replica) evaluateDetach(op *rangeapi.Resolve) (*command.TxnItem, error) {
	release := &command.TxnItem{Kind: command.ItemRelease}
	conflict := kverror.New(kverror.Conflict, "lease %d has keys by now, attempt %s was aborted where they are", op.Detach, op.Name)
	r.mu.Lock()
	span, stays := r.rec.Span, !r.revocableLocked(op.Detach, op.Incarnation)
	attaches := r.locks.Attaches(op.Detach)
	r.mu.Unlock()
	switch {
	case stays:
		return release, nil // a later lease's attachment, and its keys
	case attaches:
		return nil, conflict
	}
	err := r.data.Attached(op.Detach, span, func(key []byte) error {
		v, ok, err := r.data.Get(key, eval.Newest)
		if err != nil || !ok || v.Lease != op.Detach {
			return err
		}
		return conflict
	})
	return release, err
}

// leaseKeys answers a LeaseKeys: everything up to its revision is applied and visible.
func (r *Replica) leaseKeys(ctx context.Context, req *rangeapi.Request, op *rangeapi.LeaseKeys) (rangeapi.TxnAnswer, error) {
	if err := r.believe(ctx, op.At, &waits{}); err != nil {
		return nil, err
	}
	r.store.heard(op.At)
	for range maxReadStarts {
		a, err := r.leaseKeysOnce(ctx, req, op)
		if errors.Is(err, errAgain) {
			r.store.metrics.readRestarts.Inc()
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
	term, err := r.awaitOlder(ctx, req, op.Span, op.At, &waits{})
	if err != nil {
		return nil, err
	}
	if !r.group.LeaseHeld(term) {
		if err := r.awaitReadIndex(ctx, &waits{}); err != nil {
			return nil, err
		}
	}
	if err := r.stillLeads(req, op.Span, term); err != nil {
		return nil, err
	}
	r.mu.Lock()
	span, ok := r.rec.Span.Intersect(op.Span)
	r.mu.Unlock()
	a := &rangeapi.Attached{}
	if !ok {
		return a, nil
	}
	budget := r.store.reads.Budget(ctx)
	defer budget.Release()
	size := 0
	err = r.data.Attached(op.Lease, span, func(key []byte) error {
		v, ok, err := r.data.Get(key, eval.Newest)
		if err != nil || !ok || v.Lease != op.Lease {
			return err
		}
		if size += len(key) + command.VersionOverheadBytes; size > rangeapi.LeaseKeysBytes && len(a.Keys) > 0 {
			a.More = true
			return eval.ErrStop
		}
		a.Keys = append(a.Keys, bytes.Clone(key))
		return budget.Take(int64(len(key)))
	})
	if err != nil && !errors.Is(err, eval.ErrStop) {
		return nil, err
	}
	return a, r.checkRead(req, op.Span, term, eval.Newest, 0)
}
