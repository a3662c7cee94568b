package shard

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/budget"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/rangeapi/stages"
	"github.com/skeindb/skein/shard/command"
	"github.com/skeindb/skein/shard/eval"
	"github.com/skeindb/skein/shard/locktable"
	"github.com/skeindb/skein/shard/pipeline"
)

// txnCommand is a command of a transaction on its way through the pipeline: the operation of its
// call. Only a revoke has writes of its own.
type txnCommand struct {
	r      *Replica
	op     rangeapi.TxnCommand
	answer rangeapi.TxnAnswer
	// item is what the entry will carry, nil where nothing changes.
	item *command.TxnItem
	// on are the locks that the item brings, ends or changes.
	on []*locktable.Held
	// swept is the lock to sweep, as it was when the gate let the command pass. The evaluation reads it without the replica's mu.
	swept *command.Lock
	// writes are the intents of a lock whose revisions may still be unknown; draft has the answer's.
	writes []*eval.PendingVersion
	own    *eval.PendingTxn
	draft  eval.Draft
	// creates are the create revisions of the answer's results.
	creates []eval.Ref
	size    int
	// registered is the registration that the command ends, for an attachment that comes or goes.
	registered *registration
	// hull is what a revoke sweeps.
	hull keyspace.Span
	// reading is what the answer holds of the node's budget of reads, until it is given.
	reading budget.Share
}

var _ pipeline.Operation = (*txnCommand)(nil)

// Command implements pipeline.Operation.
func (s *txnCommand) Command() rangeapi.TxnCommand { return s.op }

// Answered implements pipeline.Effect: it gives back what the answer holds of the node's budget of reads.
func (s *txnCommand) Answered() {
	s.reading.Release()
	s.reading = budget.Share{}
}

// Txn serves one command of a transaction over several ranges at a replica of this node.
func (s *Store) Txn(ctx context.Context, id keyspace.RangeID, g keyspace.Generation, op rangeapi.TxnCommand) (rangeapi.TxnAnswer, error) {
	call := stages.Of(ctx)
	a, record, err := s.txn(ctx, id, g, op, call.Traced())
	call.Note(record)
	return a, err
}

// txn is Txn. It returns where the time went of a command that took long or is traced.
func (s *Store) txn(ctx context.Context, id keyspace.RangeID, g keyspace.Generation, op rangeapi.TxnCommand, traced bool) (rangeapi.TxnAnswer, *stages.Record, error) {
	r := s.Replica(id)
	if r == nil {
		return nil, nil, kverror.New(kverror.RangeNotHere, "range %s on node %s", id, s.cfg.Self)
	}
	if err := rangeapi.CheckTxnCommand(op); err != nil {
		return nil, nil, err
	}
	if k, ok := op.(*rangeapi.LeaseKeys); ok {
		a, err := r.leaseKeys(ctx, &rangeapi.Request{Range: id, Generation: g, ReadRevision: k.At}, k)
		return a, nil, err
	}
	return r.command(ctx, &rangeapi.Request{Range: id, Generation: g, Traced: traced}, op)
}

// command takes a TxnCommand through the pipeline.
func (r *Replica) command(ctx context.Context, req *rangeapi.Request, op rangeapi.TxnCommand) (rangeapi.TxnAnswer, *stages.Record, error) {
	if err := r.believe(ctx, rangeapi.RevisionOf(op), &waits{}); err != nil {
		return nil, nil, err
	}
	r.store.heardTerm(rangeapi.TermOf(op))
	s := &txnCommand{r: r, op: op}
	c, watch := pipeline.NewCall(ctx, req, s, commandBytes(op)), clock.StartStopwatch()
	_, err := r.pipe.Run(c, watch)
	record := r.recordCall(ctx, c, watch.Elapsed())
	if err != nil {
		return nil, record, err
	}
	return s.answer, record, nil
}

// maxFenceRaise bounds by how much one command may raise a fence: attempts are counted one by
// one, and a fence is never to reach the end of the numbers.
const maxFenceRaise = 1 << 48

// commandBytes is about what a command takes until it is answered.
func commandBytes(op rangeapi.TxnCommand) int64 {
	n := pipeline.CallOverheadBytes
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

// Gate implements pipeline.Course. A command that meets a lock waits for its end, or gives way
// if it is of a younger transaction. Most commands need no evaluation at all.
func (s *txnCommand) Gate(c *pipeline.Call, out *pipeline.Answers) (dealt bool) {
	switch op := s.op.(type) {
	case *rangeapi.Prepare:
		return s.gatePrepare(c, op, out)
	case *rangeapi.Commit:
		s.commit(c, op, out)
	case *rangeapi.Decide:
		s.decide(c, op, out)
	case *rangeapi.Forget:
		s.forget(c, op, out)
	case *rangeapi.Resolve:
		return s.resolve(c, op, out)
	case *rangeapi.Revoke:
		return s.gateRevoke(c, op, out)
	case *attach:
		s.attach(c, op, out)
	}
	return true
}

// gatePrepare lets a Prepare pass to its evaluation that meets nobody.
func (s *txnCommand) gatePrepare(c *pipeline.Call, op *rangeapi.Prepare, out *pipeline.Answers) (dealt bool) {
	r := s.r
	if r.rec.Span.Contains(op.Anchor) && op.Name.Attempt <= r.fence {
		s.answer = &rangeapi.Prepared{Fence: r.fence}
		out.Add(c, nil)
		return true
	}
	if op.Pin {
		// A range whose compaction is held back is not held back any longer for that.
		if at, low := op.PinAt, max(r.rec.Compacted, r.store.Compacted()); at != 0 && at < low {
			out.Add(c, &kverror.Error{Kind: kverror.Compacted, CompactRevision: low})
			return true
		}
		r.pinLocked(op.PinAt)
	}
	if len(op.Guards) == 0 && len(op.Writes) == 0 && op.Revoke == 0 {
		s.answer = &rangeapi.Prepared{}
		out.Add(c, nil)
		return true
	}
	if h := r.quellLocked(op.Revoke); h != nil {
		r.pipe.Block(c, locktable.Meeting{Held: h})
		return true
	}
	m, dies, outside := r.locks.Meets(op, r.rec.Span)
	switch {
	case outside:
		out.Add(c, r.errorLocked(kverror.WrongRange, fmt.Sprintf("keys of %s are outside of %s", op.Name, r.rec.Span)))
	case dies:
		out.Add(c, kverror.New(kverror.Conflict, "transaction %s meets the older %s", op.Name, m.Held.Name))
	case m.Held != nil:
		r.pipe.Block(c, m)
	case r.store.locks.Bytes() > r.store.cfg.Limits.LockBytes:
		out.Add(c, kverror.New(kverror.TooManyRequests, "node %s: transactions hold %d bytes of locks", r.store.cfg.Self, r.store.locks.Bytes()))
	default:
		return false
	}
	return true
}

// evaluatePrepare evaluates a Prepare that the gate has let pass.
func (s *txnCommand) evaluatePrepare(c *pipeline.Call, op *rangeapi.Prepare, pass *pipeline.Pass) error {
	if op.Revoke != 0 {
		return s.prepareRevoke(c, op, pass)
	}
	r := s.r
	e := r.pipe.Evaluation(c, pass)
	s.Answered()
	p, err := e.Prepare(op, r.store.cfg.Limits.MaxEntryBytes/4, r.store.cfg.Limits.PrevBytes)
	if p.HoldsRead {
		s.reading = pass.Budget.Keep()
	} else {
		pass.Budget.Release()
	}
	s.answer, s.own, s.creates = p.Answer, e.Txn(), p.Creates
	return err
}

// Evaluate implements pipeline.Course.
func (s *txnCommand) Evaluate(c *pipeline.Call, pass *pipeline.Pass) (err error) {
	switch op := s.op.(type) {
	case *rangeapi.Prepare:
		return s.evaluatePrepare(c, op, pass)
	case *rangeapi.Resolve:
		if op.Detach != 0 {
			s.item, err = s.r.evaluateDetach(op)
		} else {
			s.item, err = eval.Sweep(s.r.data, s.swept, op.Revision, s.r.store.cfg.Limits.MaxEntryBytes)
		}
	case *rangeapi.Revoke:
		return s.evaluateRevoke(c, op, pass)
	}
	return err
}

// Place implements pipeline.Course.
func (s *txnCommand) Place(c *pipeline.Call, pass *pipeline.Pass, err error, out *pipeline.Answers) {
	switch op := s.op.(type) {
	case *rangeapi.Prepare:
		s.placePrepare(c, op, &pass.Evaluation, err, out)
		return
	case *rangeapi.Revoke:
		s.placeRevoke(c, op, &pass.Evaluation, err, out)
		return
	}
	if err != nil {
		s.undo()
		out.Add(c, err)
		return
	}
	if s.item.Kind == command.ItemSweep {
		s.answer = &rangeapi.Resolved{More: true}
	}
	s.add(c, s.item, s.on...)
}

// placePrepare is Place of a Prepare.
func (s *txnCommand) placePrepare(c *pipeline.Call, op *rangeapi.Prepare, e *eval.Evaluation, err error, out *pipeline.Answers) {
	r := s.r
	var wait eval.WaitError
	var missing eval.NeedsLease
	switch {
	case errors.As(err, &missing):
		r.prepareAttachmentLocked(c, op, missing.Lease, out)
		return
	case errors.As(err, &wait):
		c.Lacks = 0
		r.pipe.Park(c, wait.Txn.Batch)
		return
	case errors.Is(err, eval.ErrOtherPath):
		// A hint: the coordinator looks again, and nothing rests on it.
		out.Add(c, nil)
		return
	case err != nil:
		out.Add(c, err)
		return
	}
	a := s.answer.(*rangeapi.Prepared)
	writes := e.Writes()
	if a.Refused != nil {
		writes = nil
	}
	if pipeline.HasPut(writes) {
		if err := r.store.noSpace(); err != nil {
			out.Add(c, err)
			return
		}
	}
	l := &command.Lock{ID: rangeapi.LockID{Range: r.id}, Name: op.Name, Anchor: op.Anchor, Floor: s.own.Floor, Spans: prepareSpans(op, a)}
	a.Floor = l.Floor
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
	r.pipe.Append(c)
	// Its intents are in the lock only once they are finished, and count from now on.
	s.on = []*locktable.Held{r.locks.Acquire(l, int64(s.size), r.store.cfg.Clock.Now())}
}

// decidingLocked has a call wait for a lock about which an entry on its way decides.
func (r *Replica) decidingLocked(c *pipeline.Call, h *locktable.Held) bool {
	if h == nil || !h.Deciding {
		return false
	}
	r.pipe.Block(c, locktable.Meeting{Held: h})
	return true
}

func (s *txnCommand) commit(c *pipeline.Call, op *rangeapi.Commit, out *pipeline.Answers) {
	r := s.r
	if t := r.locks.Record(op.Name); t != nil {
		if t.Revision != op.Revision {
			out.Add(c, kverror.New(kverror.Internal, "transaction %s is committed at %d, and now at %d", op.Name, t.Revision, op.Revision))
			return
		}
		s.say(c, &rangeapi.Decided{Revision: t.Revision}, out)
		return
	}
	h := r.locks.Find(op.Name, op.AnchorLock)
	rec := &command.CommitRecord{Name: op.Name, Anchor: op.Anchor, Revision: op.Revision, Locks: op.Locks}
	switch {
	case h == nil:
		s.say(c, &rangeapi.Decided{}, out)
	case r.decidingLocked(c, h):
	case !r.intactLocked(h):
		s.say(c, &rangeapi.Decided{}, out)
	case !r.mayBeAtLocked(c, h, op.Revision, out):
	case rec.Bytes() > r.store.cfg.Limits.MaxRecordBytes:
		out.Add(c, kverror.New(kverror.RequestTooLarge, "the %d locks of transaction %s have spans of %d bytes, more than an entry may have: divide the transaction, or use shorter keys",
			len(op.Locks), op.Name, rec.Bytes()))
	default:
		s.answer = &rangeapi.Decided{Revision: op.Revision}
		s.add(c, &command.TxnItem{Kind: command.ItemCommit, ID: op.AnchorLock, Record: rec}, h)
	}
}

// intactLocked says whether a lock that its attempt took at its anchor is the one that was made there. A split may have cut the
// lock, the anchor's half may have been aborted, and a merge may have brought the other half here. Then the fence has passed the
// attempt, and this half does not cover the anchor. A revoke's lock covers no anchor: if a fence has passed its attempt, the
// revoke starts over.
func (r *Replica) intactLocked(h *locktable.Held) bool {
	return h.Name.Attempt > r.rec.Fence || h.Covers(h.Anchor)
}

// mayBeAtLocked refuses a command of a lock at a revision that cannot be its transaction's:
// in the log it would end every replica.
func (r *Replica) mayBeAtLocked(c *pipeline.Call, h *locktable.Held, rev keyspace.Revision, out *pipeline.Answers) bool {
	err := h.Above(rev)
	if h.Pending {
		err = fmt.Errorf("lock %s of %s is not applied, and its revision is %d", h.ID, h.Name, rev)
	}
	if err != nil {
		out.Add(c, kverror.New(kverror.Internal, "%v", err))
	}
	return err == nil
}

func (s *txnCommand) decide(c *pipeline.Call, op *rangeapi.Decide, out *pipeline.Answers) {
	r := s.r
	if t := r.locks.Record(op.Name); t != nil {
		s.say(c, &rangeapi.Decided{Revision: t.Revision, Locks: t.Locks}, out)
		return
	}
	hs := slices.Clone(r.locks.Named(op.Name))
	for _, h := range hs {
		if r.decidingLocked(c, h) {
			return
		}
	}
	if len(hs) == 0 && op.Name.Attempt <= r.rec.Fence {
		s.say(c, &rangeapi.Decided{}, out)
		return
	}
	if op.Name.Attempt > r.fence+maxFenceRaise {
		out.Add(c, kverror.New(kverror.Internal, "attempt %s is named where the fence is %d", op.Name, r.fence))
		return
	}
	r.fence = max(r.fence, op.Name.Attempt)
	it := &command.TxnItem{Kind: command.ItemFence, Fence: op.Name.Attempt}
	s.answer = &rangeapi.Decided{}
	s.add(c, it, hs...)
}

func (s *txnCommand) forget(c *pipeline.Call, op *rangeapi.Forget, out *pipeline.Answers) {
	r := s.r
	if r.locks.Record(op.Name) == nil {
		s.say(c, &rangeapi.Resolved{}, out)
		return
	}
	s.answer = &rangeapi.Resolved{}
	s.add(c, &command.TxnItem{Kind: command.ItemForget, Name: op.Name})
}

// resolve ends a lock, or one of several of the attempt. It passes a lock to the
// evaluation if there are keys to sweep, or if the attachment of a lease is to end with it.
func (s *txnCommand) resolve(c *pipeline.Call, op *rangeapi.Resolve, out *pipeline.Answers) (dealt bool) {
	r := s.r
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
		out.Add(c, kverror.New(kverror.Conflict, "attempt %s was aborted, and lease %d still has its attachment", op.Name, op.Detach))
	case h == nil:
		s.say(c, &rangeapi.Resolved{}, out)
	case r.decidingLocked(c, h):
	case op.Revision != 0 && !r.mayBeAtLocked(c, h, op.Revision, out):
	case op.Revision != 0 && h.Sweep() >= 0:
		h.Deciding = true
		s.on, s.swept = []*locktable.Held{h}, h.Lock
		return false
	case op.Detach != 0 && (!h.Keyless() || h.Revoke != rangeapi.Attachment{Lease: op.Detach, Incarnation: op.Incarnation}):
		out.Add(c, kverror.New(kverror.Internal, "lock %s of %s is not that of lease %d without keys", h.ID, h.Name, op.Detach))
	case op.Detach != 0:
		h.Deciding = true
		s.on, s.answer = []*locktable.Held{h}, &rangeapi.Resolved{More: more}
		return false
	default:
		s.answer = &rangeapi.Resolved{More: more, Intact: op.Revision == 0 && op.Lock == h.ID && r.intactLocked(h)}
		s.add(c, &command.TxnItem{Kind: command.ItemResolve, Revision: op.Revision}, h)
	}
	return true
}

// Undo implements pipeline.Effect.
func (s *txnCommand) Undo(_ *pipeline.Call, err error, out *pipeline.Answers) {
	if reg := s.registered; err != nil && reg != nil && reg.state == registrationAttaches && s.r.leases.under(reg) {
		// Its item has no place yet, or the cluster version is old. They fail rather than try again: if the record lists the
		// range they would be back at once, and a leader that is about to fall would drop this again.
		s.r.failRegistrationLocked(reg, err, out)
	}
	s.undo()
	s.on = nil
}

// undo takes back what the command has left in the table: its batch is discarded.
func (s *txnCommand) undo() {
	r := s.r
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
		case ch.revision == 0 || ch.attachment.Lease != 0:
		case ch.Added != nil:
			// A sweep.
			r.epochs.End(r.store.cache)
		default:
			for k := range ch.Removed.Writes {
				v := ch.Removed.Writes[k].At(ch.revision)
				h := eval.CachedVersion{Alive: !v.Tombstone, Version: v.Version, Lease: v.Lease, Mod: v.Mod, Create: v.Create, Value: v.Value}
				if len(h.Value) <= eval.MaxCachedValueBytes {
					h.Value = bytes.Clone(h.Value) // it outlives the lock
				}
				r.store.cache.Put(r.epochs.Of(v.Key), v.Key, h)
			}
		}
	}
}
