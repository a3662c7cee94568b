package shard

import (
	"errors"
	"fmt"
	"slices"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/command"
	"github.com/skeindb/skein/shard/eval"
	"github.com/skeindb/skein/shard/locktable"
	"github.com/skeindb/skein/shard/pipeline"
)

// Leases registers ranges with leases.
type Leases interface {
	// Register has the lease's record list the span. done is called exactly once, from another goroutine: once the record lists
	// it, or with kverror.LeaseNotFound where there is no such lease. While the lease is being revoked it is not called. With
	// another error the record may or may not list the span.
	Register(lease keyspace.LeaseID, span keyspace.Span, done func(keyspace.LeaseRegistration, error))
}

func (r *Replica) applyAttachment(b *engine.Batch, m rangeapi.Attachment, out *outcome) error {
	s := &r.applying
	s.setAttachment(m)
	s.lacking = slices.DeleteFunc(s.lacking, func(l keyspace.LeaseID) bool { return l == m.Lease })
	out.locks = append(out.locks, lockChange{attachment: m})
	return command.PutAttachment(b, r.id, m)
}

// applyDetachment removes the attachment of a lease. That of a later incarnation stays: the revoke of an earlier one comes too
// late. A merge may have brought several locks together that revoke the lease. The attachment stays until the last of them ends,
// because the others still have attached keys to delete.
func (r *Replica) applyDetachment(b *engine.Batch, m rangeapi.Attachment, out *outcome) error {
	s := &r.applying
	here := s.txns.Attachments[m.Lease]
	if here > m.Incarnation || s.txns.Revokes(m.Lease) {
		out.locks = append(out.locks, lockChange{attachment: rangeapi.Attachment{Lease: m.Lease, Incarnation: here}})
		return nil
	}
	s.setAttachment(rangeapi.Attachment{Lease: m.Lease})
	out.locks = append(out.locks, lockChange{attachment: rangeapi.Attachment{Lease: m.Lease}})
	return b.Delete(command.AttachmentKey(r.id, m.Lease))
}

// indexChange is a change of the index of leases.
type indexChange struct {
	key      []byte
	to, from keyspace.LeaseID
}

// noteLeases notes what a version changes in the index of leases. If the key had the same lease before, the index has it already,
// so repeated puts pay for the index once. An attachment that goes takes no key out of the index.
func (s *applyState) noteLeases(v *mvcc.Version, was keyspace.LeaseID) {
	if _, ok := s.txns.Attachments[v.Lease]; v.Lease != 0 && !ok {
		s.lacking = command.AddLease(s.lacking, v.Lease)
	}
	if v.Lease != was {
		s.attached = append(s.attached, indexChange{key: v.Key, to: v.Lease, from: was})
	}
}

// checkLacking refuses a batch with a key of a lease of which there is no attachment, nor one in the batch: nobody would come to
// delete the key.
func (s *applyState) checkLacking() error {
	if len(s.lacking) == 0 {
		return nil
	}
	return refuse(fmt.Errorf("keys are attached to leases %d, of which the range has no attachment", s.lacking))
}

func (s *applyState) writeAttached(b *engine.Batch) error {
	for i := range s.attached {
		a := &s.attached[i]
		if a.from != 0 {
			if err := s.index.Detach(b, a.from, a.key); err != nil {
				return err
			}
		}
		if a.to != 0 {
			if err := s.index.Attach(b, a.to, a.key); err != nil {
				return err
			}
		}
	}
	return nil
}

// LeaseSpans implements raftgroup.LeaseIndexer.
func (r *Replica) LeaseSpans(snap engine.Reader, applied engine.Applied) ([]engine.KeySpan, error) {
	rec, err := command.DecodeRecord(applied.Payload)
	if err != nil {
		return nil, fmt.Errorf("shard: range %s: leases of a snapshot: %w", r.id, err)
	}
	txns, err := command.LoadTxns(snap, r.id)
	if err != nil {
		return nil, err
	}
	spans := make([]engine.KeySpan, 0, len(txns.Attachments))
	for lease := range txns.Attachments {
		spans = append(spans, engine.LeaseSpan(lease, rec.Span))
	}
	slices.SortFunc(spans, func(a, b engine.KeySpan) int { return slices.Compare(a.Lower, b.Lower) })
	return spans, nil
}

// forgetAttached deletes what is left in the index of leases of the state that a snapshot
// has replaced. The snapshot has cleared what its own attachments cover. Entries that a crash
// leaves behind are harmless: a key counts as attached only if its version says so too.
func (r *Replica) forgetAttached(now *command.Record, txns *command.TxnState) error {
	old := &r.applying
	if len(old.txns.Attachments) == 0 {
		return nil
	}
	b := r.store.cfg.Engine.NewBatch()
	forget := func(lease keyspace.LeaseID, s keyspace.Span) error {
		k := engine.LeaseSpan(lease, s)
		return b.DeleteRange(k.Lower, k.Upper)
	}
	for lease := range old.txns.Attachments {
		var err error
		if _, kept := txns.Attachments[lease]; !kept {
			err = forget(lease, old.rec.Span)
		} else if right, ok := old.rec.Span.Intersect(keyspace.Span{Start: now.Span.End}); ok && len(now.Span.End) > 0 {
			err = forget(lease, right)
		}
		if err != nil {
			return errors.Join(err, b.Close())
		}
	}
	if b.Empty() {
		return b.Close()
	}
	return b.Commit()
}

// leases are the attachments of a replica's leases: those that are applied, and those that come or
// go. Guarded by the replica's mu; it calls nobody.
type leases struct {
	// attached are the applied attachments.
	attached map[keyspace.LeaseID]keyspace.LeaseIncarnation
	// trimmed is how many there were behind the last trim of a load that follows.
	trimmed int
	// changing has the registration of each attachment that comes or goes; nil if there are none.
	changing map[keyspace.LeaseID]*registration
}

// attachable says whether keys may be attached to the lease in what is evaluated from now on. An attachment that is about to go
// does not count any more. One that is about to come counts once its item has a place. From then on puts go into the same
// entry or one behind it, and no entry is applied without those before it.
func (l *leases) attachable(lease keyspace.LeaseID) bool {
	if reg := l.changing[lease]; reg != nil {
		return reg.state == registrationPlaced
	}
	_, ok := l.attached[lease]
	return ok
}

// begin adds a registration. A lease has one at a time.
func (l *leases) begin(reg *registration) {
	if old := l.changing[reg.lease]; old != nil {
		panic(fmt.Sprintf("shard: range %s: lease %d is registered in state %d, and now in state %d", reg.r.id, reg.lease, old.state, reg.state))
	}
	if l.changing == nil {
		l.changing = map[keyspace.LeaseID]*registration{}
	}
	l.changing[reg.lease] = reg
}

// under reports whether the registration has not ended.
func (l *leases) under(reg *registration) bool { return l.changing[reg.lease] == reg }

// end takes a registration away. It reports whether it was there.
func (l *leases) end(reg *registration) bool {
	if !l.under(reg) {
		return false
	}
	if delete(l.changing, reg.lease); len(l.changing) == 0 {
		l.changing = nil
	}
	return true
}

// apply takes over an attachment that is applied, or gone if it has no incarnation. It returns the
// registration that was on its way, nil if there was none.
func (l *leases) apply(m rangeapi.Attachment) *registration {
	switch {
	case m.Incarnation == 0:
		delete(l.attached, m.Lease)
	case l.attached == nil:
		l.attached = map[keyspace.LeaseID]keyspace.LeaseIncarnation{m.Lease: m.Incarnation}
	default:
		l.attached[m.Lease] = m.Incarnation
	}
	if reg := l.changing[m.Lease]; reg != nil && reg.state != registrationAsked {
		return reg
	}
	return nil
}

// registration is an attachment that comes or goes. It is in the memory of one leadership alone: a revoke that reaches the range
// ends it, and so does a split, and whoever waits starts over. An attachment of an answer that comes later than the revoke would
// keep a lease alive that is gone.
type registration struct {
	// Held has those who wait. There is no lock.
	locktable.Held
	r     *Replica
	lease keyspace.LeaseID
	span  keyspace.Span
	state registrationState
	// asked are the calls that waited when the record was asked. "No such lease" does not
	// answer a later call: the lease may have been granted meanwhile.
	asked map[*pipeline.Call]struct{}
}

type registrationState uint8

const (
	// registrationAsked: the lease's record is being asked for.
	registrationAsked registrationState = iota
	// registrationAttaches: the attachment is on its way through the pipeline.
	registrationAttaches
	// registrationPlaced: it has its place, and is not applied.
	registrationPlaced
	// registrationDetaches: its end has its place, and is not applied.
	registrationDetaches
)

// attach is the command that brings an attachment; the replica makes it itself.
type attach struct{ attachment rangeapi.Attachment }

func (*attach) Kind() rangeapi.TxnKind { return 0 }

func (r *Replica) registerLocked(lease keyspace.LeaseID, state registrationState) *registration {
	span := r.rec.Span
	if r.rec.Merge.Role == command.MergeTarget {
		span = r.rec.Merge.Hull // the attachment may be for both soon
	}
	reg := &registration{r: r, lease: lease, span: span, state: state}
	r.leases.begin(reg)
	return reg
}

// wantAttachmentLocked returns the registration that brings the attachment of a lease, nil where the lease has it by now.
func (r *Replica) wantAttachmentLocked(lease keyspace.LeaseID, out *pipeline.Answers) *registration {
	if r.leases.attachable(lease) {
		return nil
	}
	reg := r.leases.changing[lease]
	if reg == nil {
		reg = r.registerLocked(lease, registrationAsked)
		out.Later(reg.ask)
	}
	return reg
}

// awaitAttachmentLocked has a call evaluated again once the lease has its attachment, or is known not to be there.
func (r *Replica) awaitAttachmentLocked(c *pipeline.Call, lease keyspace.LeaseID, out *pipeline.Answers) {
	c.Lacks = 0
	if reg := r.wantAttachmentLocked(lease, out); reg != nil {
		r.pipe.Block(c, locktable.Meeting{Held: &reg.Held})
		return
	}
	r.pipe.Requeue(c)
}

// prepareAttachmentLocked is awaitAttachmentLocked of a Prepare. The attachment may have to wait for a
// revoke, and the revoke for locks that the transaction holds elsewhere. So only a transaction
// without locks waits. Others give way and come back without any.
func (r *Replica) prepareAttachmentLocked(c *pipeline.Call, op *rangeapi.Prepare, lease keyspace.LeaseID, out *pipeline.Answers) {
	if op.WaitForOlder {
		r.awaitAttachmentLocked(c, lease, out)
		return
	}
	if r.wantAttachmentLocked(lease, out) == nil {
		r.pipe.Requeue(c)
		return
	}
	out.Add(c, kverror.New(kverror.Conflict, "transaction %s waits for lease %d to be registered", op.Name, lease))
}

// ask asks the lease's record.
func (reg *registration) ask() {
	reg.r.mu.Lock()
	reg.asked = map[*pipeline.Call]struct{}{}
	for _, c := range reg.waiting() {
		reg.asked[c] = struct{}{}
	}
	reg.r.mu.Unlock()
	reg.r.store.cfg.Leases.Register(reg.lease, reg.span, reg.registered)
}

// registered takes the answer.
func (reg *registration) registered(got keyspace.LeaseRegistration, err error) {
	if err == nil && got.Incarnation == 0 {
		err = kverror.New(kverror.Internal, "lease %d was registered without an incarnation", reg.lease)
	}
	r := reg.r
	var out pipeline.Answers
	r.mu.Lock()
	switch {
	case !r.leases.under(reg):
		// A late answer: the registration was ended.
	case errors.Is(err, kverror.LeaseNotFound):
		for _, c := range reg.waiting() {
			if _, ok := reg.asked[c]; ok {
				c.Lacks = reg.lease
			}
		}
		r.endRegistrationLocked(reg)
	case err != nil:
		r.failRegistrationLocked(reg, pipeline.NotProposed(err), &out)
	default:
		reg.state = registrationAttaches
		s := &txnCommand{r: r, op: &attach{rangeapi.Attachment{Lease: reg.lease, Incarnation: got.Incarnation}}, registered: reg}
		r.pipe.Requeue(pipeline.NewCall(r.store.ctx, &rangeapi.Request{Range: r.id, Generation: r.rec.Generation}, s, 0))
	}
	r.mu.Unlock()
	r.pipe.Send(&out)
}

// attach puts an attachment into the batch, unless its registration was ended.
func (s *txnCommand) attach(c *pipeline.Call, op *attach, out *pipeline.Answers) {
	if !s.r.leases.under(s.registered) {
		out.Add(c, kverror.New(kverror.Dropped, "the registration of lease %d was ended", op.attachment.Lease))
		return
	}
	s.answer = &rangeapi.Resolved{}
	s.add(c, &command.TxnItem{Kind: command.ItemAttach, Attachment: op.attachment})
	if written := s.r.store.cfg.Written; written == nil || written() >= keyspace.VersionLeases {
		s.placed()
	}
}

// waiting returns those who wait for the registration.
func (reg *registration) waiting() (calls []*pipeline.Call) {
	for _, w := range reg.Waiters() {
		calls = append(calls, w.(*pipeline.Call)) //nolint:forcetypeassert // a replica's waiters are its calls
	}
	return calls
}

// endRegistrationLocked has those look again who wait for the registration.
func (r *Replica) endRegistrationLocked(reg *registration) {
	if r.leases.end(reg) {
		r.wokenLocked(r.locks.Wake(&reg.Held))
	}
}

// failRegistrationLocked answers those who wait.
func (r *Replica) failRegistrationLocked(reg *registration, err error, out *pipeline.Answers) {
	for _, c := range reg.waiting() {
		r.pipe.Leave(c, err, out)
	}
	r.endRegistrationLocked(reg)
}

// dropRegistrationsLocked ends all registrations: they were for another span, or for a leadership that is over.
func (r *Replica) dropRegistrationsLocked() {
	for _, reg := range r.leases.changing {
		r.endRegistrationLocked(reg)
	}
}

// dropAskedLocked has those look again who wait for an answer that is not here yet.
func (r *Replica) dropAskedLocked() {
	for _, reg := range r.leases.changing {
		if reg.state == registrationAsked {
			r.endRegistrationLocked(reg)
		}
	}
}

// publishAttachmentLocked takes over an attachment that is applied, or gone.
func (r *Replica) publishAttachmentLocked(m rangeapi.Attachment) {
	if reg := r.leases.apply(m); reg != nil {
		r.endRegistrationLocked(reg)
	}
}

func leasesOf(writes []*eval.PendingVersion) (all []keyspace.LeaseID) {
	for _, v := range writes {
		all = command.AddLease(all, v.Lease())
	}
	return all
}
