package shard

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/command"
	"github.com/skeindb/skein/shard/eval"
	"github.com/skeindb/skein/shard/locktable"
	"github.com/skeindb/skein/shard/rangefeed"
	"github.com/skeindb/skein/shard/replicas"
)

// A merge lets a range, the target, absorb its right neighbour, the source. Placement
// orders it step by step and commits it; "Life of a merge" in doc.go has the
// whole. Each replica of the source stores its frozen state before the merge is committed.
// So the entry that absorbs finds the source's last state in the engine of any node that
// applies it, also after a crash. It never waits for another group.

// applyMerge is a step of a merge on every replica.
func (r *Replica) applyMerge(b *engine.Batch, kind command.Kind, body []byte, out *outcome) error {
	c, err := command.DecodeMergeCommand(kind, body)
	if err != nil {
		return refuse(err)
	}
	s := &r.applying
	switch {
	case kind == command.KindRelease:
		s.rec.Merged, out.ok = max(s.rec.Merged, c.ID), true
		if s.rec.Merge.ID == c.ID {
			s.rec.Merge = command.MergeState{}
		}
		return nil
	case kind == command.KindAbsorb:
		if s.rec.Merge.Role != command.MergeTarget || s.rec.Merge.ID != c.ID {
			return nil
		}
		return r.applyAbsorb(b, out)
	case c.ID <= s.rec.Merged || s.rec.Merge.Role != command.MergeNone || s.rec.Load.Active() || c.ConfIndex != s.confIndex:
		return nil
	case kind == command.KindBind:
		s.rec.Merge = command.MergeState{Role: command.MergeTarget, ID: c.ID, Other: c.Other, Hull: c.Hull}
	default:
		s.rec.Merge = command.MergeState{Role: command.MergeSource, ID: c.ID, Other: c.Other}
	}
	out.ok = true
	return nil
}

// sourceState is what the source of a merge has left: nothing changes it any more.
type sourceState struct {
	rec  command.Record
	txns command.TxnState
	// self is this node's replica.
	self keyspace.ReplicaID
}

// source reads the state of the source of a target's merge. Anything else than a frozen
// range there is a broken invariant: the merge would not have been committed.
func (s *Store) source(target *command.Record) (src sourceState, err error) {
	m := &target.Merge
	a, ok, err := s.cfg.Engine.Applied(m.Other.Group())
	if err != nil {
		return src, err
	}
	if !ok {
		return src, fmt.Errorf("merge %d: range %s is not here", m.ID, m.Other)
	}
	if src.rec, err = command.DecodeRecord(a.Payload); err != nil {
		return src, err
	}
	if f := &src.rec.Merge; !f.Frozen() || f.ID != m.ID || f.Other != target.RangeID || !slices.Equal(src.rec.Span.Start, target.Span.End) {
		return src, fmt.Errorf("merge %d: range %s of %s is here in merge %d with range %s as role %d, and %s is the target",
			m.ID, m.Other, src.rec.Span, f.ID, f.Other, f.Role, target.Span)
	}
	for _, x := range a.Replicas {
		if x.Node == s.cfg.Self {
			src.self = x.ID
		}
	}
	if src.self == 0 {
		return src, fmt.Errorf("merge %d: this node has left range %s", m.ID, m.Other)
	}
	src.txns, err = command.LoadTxns(s.cfg.Engine, m.Other)
	return src, err
}

// applyAbsorb lets the range take the source's place. Its keys stay where they are; what the
// range knows of them comes along: metadata only.
func (r *Replica) applyAbsorb(b *engine.Batch, out *outcome) error {
	s := &r.applying
	from, err := r.store.source(&s.rec)
	if err != nil {
		return err
	}
	last := max(s.rec.LastRevision, from.rec.LastRevision)
	s.resolved = max(s.resolved, min(last, s.txns.Lowest()))
	if !mutation.Is(mutation.ResolvedByOneHalf) {
		s.resolved = min(s.resolved, min(last, from.txns.Lowest()))
	}
	if err := r.joinTxns(b, &from.txns, out); err != nil {
		return err
	}
	m := s.rec.Merge
	s.rec = joinRecords(&s.rec, &from.rec, last)
	s.rec.Merged, s.rec.Merge = max(s.rec.Merged, m.ID), command.MergeState{}
	s.advance(true)
	out.ok, out.source, out.border = true, m.Other, from.rec.Span.Start
	if o := r.store.Replica(m.Other); o != nil {
		out.epochs = o.yieldEpochs(m.ID)
	}
	// From here on the node's replica of the source never comes back, whatever is replayed.
	return r.store.lifecycle.Tombstones.Set(b, m.Other.Group(), from.self)
}

// yieldEpochs hands over what the node knows of the keys of a frozen replica; nil where it is not
// frozen for the merge as far as it has come itself. Whoever reads here yet adds nothing to it.
func (r *Replica) yieldEpochs(merge uint64) (es eval.KeyEpochs) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.rec.Merge.Frozen() || r.rec.Merge.ID != merge {
		return nil
	}
	es = slices.Clone(r.epochs)
	r.epochs.End(r.store.cache)
	return es
}

// joinRecords returns the record of the range that two become.
func joinRecords(left, right *command.Record, last keyspace.Revision) command.Record {
	rec := *left
	rec.Span.End = right.Span.End
	// For each key a generation is higher than all that came before, at whatever range.
	rec.Generation = max(left.Generation, right.Generation) + 1
	rec.Absorbed = rec.Generation
	rec.LastRevision, rec.SequencerTerm = last, max(left.SequencerTerm, right.SequencerTerm)
	rec.Compacted = max(left.Compacted, right.Compacted)
	rec.Hash += right.Hash
	rec.Load = rec.Load.Join(&right.Load)
	rec.Fence = max(left.Fence, right.Fence)
	if rec.Counted = left.Counted && right.Counted; rec.Counted {
		rec.Live += right.Live
	} else {
		rec.Live = 0
	}
	return rec
}

// joinTxns takes over the source's locks, records and attachments. Two halves of one lock, which a
// split has cut, are one again.
func (r *Replica) joinTxns(b *engine.Batch, from *command.TxnState, out *outcome) error {
	s := &r.applying
	for id, l := range from.Locks {
		if mutation.Is(mutation.LocksLostAtMerge) {
			break
		}
		change := lockChange{Change: locktable.Change{Added: l}}
		if mine := s.txns.Locks[id]; mine != nil {
			change.Removed, change.Added = mine, joinLocks(mine, l)
		}
		s.txns.PutLock(change.Added)
		out.locks = append(out.locks, change)
		if err := command.PutLock(b, r.id, change.Added); err != nil {
			return err
		}
	}
	for _, t := range from.Records {
		s.txns.PutRecord(t)
		out.locks = append(out.locks, lockChange{Change: locktable.Change{Record: t}})
		if err := command.PutRecord(b, r.id, t); err != nil {
			return err
		}
	}
	for lease, incarnation := range from.Attachments {
		// The merge was committed together with the hull of both spans in the lease's record.
		m := rangeapi.Attachment{Lease: lease, Incarnation: max(incarnation, s.txns.Attachments[lease])}
		s.txns.PutAttachment(m)
		out.locks = append(out.locks, lockChange{attachment: m})
		if err := command.PutAttachment(b, r.id, m); err != nil {
			return err
		}
	}
	return nil
}

// joinLocks makes one lock of its two halves.
func joinLocks(left, right *command.Lock) *command.Lock {
	l := *left
	l.Spans = slices.Concat(left.Spans, right.Spans)
	l.Writes = slices.Concat(left.Writes, right.Writes)
	// As they were before the lock was cut: in the order of the operations.
	slices.SortStableFunc(l.Writes, func(a, b command.Intent) int { return cmp.Compare(a.V.Sub, b.V.Sub) })
	l.NoteLeases()
	return &l
}

// publishAbsorbLocked takes over that the range has absorbed its neighbour.
func (r *Replica) publishAbsorbLocked(o *outcome, feeds *rangefeed.Publication) {
	r.feeds.Publish(feeds)
	r.feeds.End(r.errorLocked(kverror.WrongRange, "the range has absorbed its neighbour"))
	r.dropRegistrationsLocked()
	r.publishTxnsLocked(o.locks)
	r.epochs.Absorb(r.store.cache, o.border, o.epochs)
	r.live.Reset(r.rec.LastRevision)
	r.upkeep.replaced()
	if !r.pipe.Leads() {
		return
	}
	r.pipe.Rebase()
	r.fence = max(r.fence, r.rec.Fence)
	// This replica does not know what the source has pinned, so it pins everything that is left.
	r.pins.Add(r.store.cfg.Clock.Now(), r.rec.Compacted)
}

// absorbApplied ends the node's replica of the source: whoever waits there learns of the
// range that has its keys now.
func (s *Store) absorbApplied(r *Replica, source keyspace.RangeID) {
	s.metrics.merges.Inc()
	d, lead := r.Descriptor(), r.Leader()
	r.log.Info("absorbed a range", zapRange(source), zapSpan(d.Span))
	if lead.IsLeader {
		s.cfg.Reporter.ReportDescriptors(d)
	}
	if o := s.Replica(source); o != nil {
		o.absorbedBy(d, lead.LeaderNode)
	}
	s.lifecycle.Check(source)
}

// absorbedBy ends a frozen replica that another one of this node has absorbed.
func (r *Replica) absorbedBy(d keyspace.Descriptor, leader keyspace.NodeID) {
	r.endMerged(d, leader)
	r.mu.Lock()
	r.absorbed = true
	r.mu.Unlock()
}

// endMerged ends a frozen replica whose merge is committed.
func (r *Replica) endMerged(d keyspace.Descriptor, leader keyspace.NodeID) {
	r.end(&kverror.Error{
		Kind: kverror.WrongRange, Leader: leader, Descriptors: []keyspace.Descriptor{d},
		Detail: fmt.Sprintf("range %s was absorbed by range %s", r.id, d.Range),
	})
}

// makeWay ends the replicas here that a snapshot of the target has absorbed, before it is
// installed: none of them reads or removes anything under it.
func (s *Store) makeWay(c *replicas.Claim, rec *command.Record, a *engine.Applied) {
	for _, o := range s.Replicas() {
		o.mu.Lock()
		s := o.lifecycleStateLocked()
		yields := s.Yields(c) && o.rec.Span.Overlaps(c.Span)
		o.mu.Unlock()
		if yields {
			o.endMerged(rec.Descriptor(a.ConfIndex, a.Replicas), 0)
			o.stopRemoval()
		}
	}
}

// waysMade follows the install of the target's snapshot. The lifecycle checks, and removes if it
// may, each replica that is frozen for a merge which the snapshot is past. Those that the
// snapshot covers are noted as absorbed.
func (s *Store) waysMade(target *command.Record) {
	for _, o := range s.Replicas() {
		o.mu.Lock()
		m := o.rec.Merge
		past := m.Frozen() && m.Other == target.RangeID && m.ID <= target.Merged
		if past && target.Generation > o.rec.Generation && target.Span.Contains(o.rec.Span.Start) {
			o.absorbed = true
		}
		o.mu.Unlock()
		if past {
			s.lifecycle.Check(o.id)
		}
	}
}
