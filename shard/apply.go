package shard

import (
	"fmt"
	"slices"

	"go.uber.org/zap"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/command"
	"github.com/skeindb/skein/shard/eval"
	"github.com/skeindb/skein/shard/pipeline"
	"github.com/skeindb/skein/shard/rangefeed"
	"github.com/skeindb/skein/shard/replicas"
)

// applyState is the replicated state as Apply leaves it, ahead of what is
// published by the entries whose batch is not committed yet.
type applyState struct {
	rec       command.Record
	confIndex uint64
	replicas  []keyspace.Replica
	// term is that of the last entry.
	term uint64
	done []outcome
	// txns are the locks and records of transactions over several ranges.
	txns command.TxnState
	// grown is the bytes of the entries that are not published yet.
	grown uint64
	// resolved is the range's resolved revision, see advance. lowest is the lowest floor of
	// the locks that will leave versions behind, or MaxRevision.
	resolved, lowest keyspace.Revision
	// versions is the memory for those of one batch; replaced of them are not the last of their transaction for their key.
	versions []mvcc.Version
	replaced int
	// attached are the changes of the index of leases in the batch at hand, in their order.
	attached []indexChange
	index    mvcc.LeaseIndex
	// lacking are leases of the batch at hand that have keys, and no attachment so far.
	lacking []keyspace.LeaseID
	// undo takes back, from its end on, what the entry at hand has changed in txns.
	undo []txnUndo
}

// outcome is what one entry did, for Applied to publish.
type outcome struct {
	kind command.Kind
	// link names a batch; ok says that the command took effect.
	link command.Link
	ok   bool
	// refused says that the entry broke a rule.
	refused bool
	// deltas are the changes of the live-key count, and locks those of what transactions over several ranges hold, for a batch.
	deltas []eval.CountChange
	locks  []lockChange
	// split is set for a split that took effect. source is set for an absorb: the range that
	// has ended. border is its first key, and epochs are its key epochs on this node.
	split  *appliedSplit
	source keyspace.RangeID
	border []byte
	epochs eval.KeyEpochs
	// events are a batch's for the feeds, if there were any feeds when it was applied; resolved is applyState.resolved behind it.
	events   *rangefeed.Events
	resolved keyspace.Revision
	// turns says that the load of the range begins or ends with a load.
	turns bool
}

// Apply implements raftgroup.StateMachine: it writes bytes and decides nothing that state and entries do not say (invariant 5).
func (r *Replica) Apply(b *engine.Batch, ents []raftgroup.Entry) error {
	s := &r.applying
	for i := range ents {
		e := &ents[i]
		s.term = e.Term
		s.grown += uint64(len(e.Data))
		if e.Replicas != nil {
			if err := r.store.lifecycle.Tombstones.SetDeparted(b, r.id.Group(), r.store.cfg.Self, s.replicas, e.Replicas); err != nil {
				return err
			}
			s.replicas, s.confIndex = e.Replicas, e.Index
			continue
		}
		if len(e.Data) == 0 {
			continue
		}
		if err := r.applyOrRefuse(b, e); err != nil {
			return fmt.Errorf("shard: range %s: apply entry %d of term %d: %w", r.id, e.Index, e.Term, err)
		}
	}
	return nil
}

// applyOrRefuse applies an entry, or leaves everything as it was if the entry is refused. So
// no entry ends a replica: every one of them would refuse it again after each start.
func (r *Replica) applyOrRefuse(b *engine.Batch, e *raftgroup.Entry) error {
	s := &r.applying
	from, rec := b.Savepoint(), s.rec
	out, err := r.applyEntry(b, e)
	if e.Refused = asRefusal(err); e.Refused != nil {
		s.rec = rec
		s.undoTxns()
		err = b.RollBack(from)
		out = outcome{kind: out.kind, link: out.link, refused: true}
	}
	clear(s.undo) // it must not keep what has ended
	s.undo = s.undo[:0]
	if err != nil {
		return err
	}
	if !out.ok {
		r.store.metrics.noops.Inc()
	}
	s.advance(len(out.locks) > 0)
	out.resolved = s.resolved
	s.done = append(s.done, out)
	return nil
}

// applyEntry applies an entry. If it refuses the entry, it may have changed batch, record and locks.
func (r *Replica) applyEntry(b *engine.Batch, e *raftgroup.Entry) (out outcome, err error) {
	s := &r.applying
	h, body, err := command.DecodeHeader(e.Data)
	if err != nil {
		return out, refuse(err)
	}
	out.kind = h.Kind
	if h.Term == e.Term && h.Generation == s.rec.Generation && (h.Kind == command.KindRelease || !s.rec.Merge.StandsStill()) {
		switch h.Kind {
		case command.KindBatch:
			err = r.applyBatch(b, h, body, &out)
		case command.KindSplit:
			err = r.applySplit(b, body, &out)
		case command.KindCompact:
			var n int64
			if n, err = command.DecodeNumber(body); err == nil && keyspace.Revision(n) > s.rec.Compacted {
				s.rec.Compacted, out.ok = keyspace.Revision(n), true
			}
			err = refuse(err)
		case command.KindCount:
			var n int64
			if n, err = command.DecodeNumber(body); err == nil && !s.rec.Counted {
				s.rec.Live, s.rec.Counted, out.ok = s.rec.Live+n, true, true
			}
			err = refuse(err)
		case command.KindBind, command.KindFreeze, command.KindAbsorb, command.KindRelease:
			err = r.applyMerge(b, h.Kind, body, &out)
		case command.KindLoad:
			err = r.applyLoad(b, body, &out)
		}
	} else if h.Kind == command.KindBatch {
		if c, _, err := command.DecodeBatchHeader(body); err == nil {
			out.link = command.Link{Term: h.Term, Number: c.Number}
		}
	}
	if err != nil {
		return out, fmt.Errorf("%s: %w", h.Kind, err)
	}
	return out, nil
}

// applyBatch writes a batch's versions if it stands on the last applied one.
func (r *Replica) applyBatch(b *engine.Batch, h command.Header, body []byte, out *outcome) error {
	s := &r.applying
	c, versions, err := command.DecodeBatchHeader(body)
	if err != nil {
		return refuse(err)
	}
	out.link = command.Link{Term: h.Term, Number: c.Number}
	if stands, err := r.stands(&c); !stands && !(mutation.Is(mutation.AppliedTwice) && out.link == s.rec.Last) {
		return err
	}
	s.rec.SequencerTerm = max(s.rec.SequencerTerm, c.SequencerTerm)
	items, err := command.VisitBatch(&c, versions, func(_ int, v *mvcc.Version, before command.Prior) error {
		if !s.rec.Span.Contains(v.Key) {
			return fmt.Errorf("key %q is outside of %s", v.Key, s.rec.Span)
		}
		s.addVersion(v, before, out)
		return nil
	})
	err = refuse(err)
	if c.Txns > 0 {
		s.rec.LastRevision = c.First + keyspace.Revision(c.Txns) - 1
	}
	if err == nil && len(items) > 0 {
		err = r.applyItems(b, h, &c, items, out)
	}
	if err == nil {
		err = s.checkLacking()
	}
	if err == nil && r.feeds.Active() {
		out.events = rangefeed.Capture(s.versions) // before write puts them into its order
	}
	if err == nil {
		err = s.write(b)
	}
	s.forgetVersions()
	if err != nil {
		return err
	}
	s.rec.Last, out.ok = out.link, true
	r.store.metrics.applied.Add(float64(c.Txns))
	return nil
}

// stands says whether the batch stands on the last applied one, and then on its revision too.
func (r *Replica) stands(c *command.Batch) (bool, error) {
	s := &r.applying
	switch {
	case c.Prev != s.rec.Last:
		return false, nil
	case c.Txns > 0 && c.First <= s.rec.LastRevision:
		return false, refuse(fmt.Errorf("revision %d after revision %d", c.First, s.rec.LastRevision))
	case c.Hash != s.rec.Hash && !mutation.Is(mutation.AppliedTwice):
		if err := r.differs(c); err != nil {
			return false, err
		}
	}
	return true, nil
}

// Payload implements raftgroup.Payloader.
func (r *Replica) Payload() []byte {
	rec := &r.applying.rec
	if mutation.Is(mutation.CursorNotDurable) && rec.Load.Active() {
		forgotten := *rec
		forgotten.Load.LoadCursor = rangeapi.LoadCursor{Stage: rec.Load.Stage}
		rec = &forgotten
	}
	return command.AppendRecord(make([]byte, 0, 64+len(rec.Span.Start)+len(rec.Span.End)), rec)
}

// Applied implements raftgroup.StateMachine: it publishes and answers.
func (r *Replica) Applied(upTo raftgroup.Position) {
	s := &r.applying
	var out pipeline.Answers
	var heirs []*outcome
	var feeds rangefeed.Publication
	r.appliedBatches.Add(1)
	r.mu.Lock()
	oldCompacted, oldGeneration := r.rec.Compacted, r.rec.Generation
	changed, bound := r.confIndex != s.confIndex, r.rec.Merge.ID != s.rec.Merge.ID || r.rec.Merged != s.rec.Merged
	r.rec, r.confIndex, r.replicas, r.position = s.rec, s.confIndex, s.replicas, upTo
	r.resolved = s.resolved
	r.load.Applied(s.grown)
	s.grown = 0
	for i := range s.done {
		o := &s.done[i]
		switch o.kind {
		case command.KindBatch:
			r.publishBatchLocked(o, &feeds, &out)
		case command.KindCount:
			r.upkeep.counting = false
		case command.KindCompact:
			r.upkeep.compacting = 0
		case command.KindSplit, command.KindBind, command.KindFreeze, command.KindAbsorb, command.KindRelease, command.KindLoad:
			if r.publishChangeLocked(o, &feeds); o.ok && (o.split != nil || o.source != 0) {
				heirs = append(heirs, o)
			}
		}
	}
	r.feeds.Publish(&feeds)
	r.pipe.Passed(s.term, &out)
	leads := r.pipe.Leads()
	more := leads && r.pipe.Waits()
	if r.pipe.Closed() || r.pipe.Draining() || r.rec.Generation != oldGeneration || bound {
		r.notifyLocked()
	}
	if bound {
		r.awaitCommitLocked()
	}
	care := r.rec.Compacted != oldCompacted || r.rec.Generation != oldGeneration
	revision, term, watched := r.rec.LastRevision, r.rec.SequencerTerm, !r.locks.Empty()
	r.mu.Unlock()

	r.store.heard(revision)
	raise(&r.store.sequencerTerm, int64(term))
	if watched {
		r.store.pushes.note(r)
	}
	r.pipe.Send(&out)
	for _, o := range heirs {
		r.store.changeApplied(r, o)
	}
	clear(s.done)
	s.done = s.done[:0]
	if more || bound {
		r.pipe.Schedule()
	}
	if care || bound {
		// An aborted merge lets the range's maintenance go on.
		r.store.maintenance.note(r)
	}
	if changed {
		r.membersChanged(leads)
	}
}

// publishBatchLocked publishes a batch. out gets the answers of its calls.
func (r *Replica) publishBatchLocked(o *outcome, feeds *rangefeed.Publication, out *pipeline.Answers) {
	r.live.Apply(o.deltas)
	if o.ok {
		feeds.Add(o.events, o.resolved, rangeapi.FeedPosition(o.link))
	}
	switch own := r.pipe.Applied(o.link, o.ok, out); {
	case own && o.ok:
		r.cacheResolvedLocked(o.locks)
	case o.ok:
		// Not from this leadership's pipeline.
		r.epochs.End(r.store.cache)
	case own && o.refused:
		// What the leader knew when it evaluated the batch may be wrong.
		r.epochs.End(r.store.cache)
	}
	if len(o.locks) > 0 {
		r.publishTxnsLocked(o.locks)
	}
}

// publishChangeLocked takes over a change of the range itself, if it took effect.
func (r *Replica) publishChangeLocked(o *outcome, feeds *rangefeed.Publication) {
	if o.ok {
		switch o.kind {
		case command.KindSplit:
			r.publishSplitLocked(o, feeds)
		case command.KindBind:
			// From now on the range asks for both spans. A registration that was answered before is
			// in the lease's record before placement commits the merge.
			r.dropAskedLocked()
		case command.KindAbsorb:
			r.publishAbsorbLocked(o, feeds)
		case command.KindLoad:
			r.publishLoadLocked(o, feeds)
		case command.KindFreeze, command.KindRelease, command.KindBatch, command.KindCompact, command.KindCount:
		}
	}
	if r.change == nil || r.change.kind != o.kind {
		return
	}
	if o.split != nil {
		r.change.made = o.split.descriptor()
	}
	r.endChangeLocked(changeFate(o))
}

// changeApplied does what a change that was applied asks of the node.
func (s *Store) changeApplied(r *Replica, o *outcome) {
	if o.split != nil {
		s.splitApplied(r, o.split)
		return
	}
	s.absorbApplied(r, o.source)
}

// publishSplitLocked takes over a split that is applied.
func (r *Replica) publishSplitLocked(o *outcome, feeds *rangefeed.Publication) {
	r.endFeedsAtSplitLocked(feeds, o.split)
	r.dropRegistrationsLocked()
	r.publishTxnsLocked(o.locks)
	r.epochs.End(r.store.cache)
	r.live.Reset(r.rec.LastRevision)
	r.children = append(r.children, o.split.descriptor())
	if len(r.children) > maxChildren {
		r.children = slices.Delete(r.children, 0, 1)
	}
}

// SnapshotSpans implements raftgroup.Snapshotter.
func (r *Replica) SnapshotSpans(applied engine.Applied) []engine.KeySpan {
	rec, err := command.DecodeRecord(applied.Payload)
	if err != nil {
		panic(fmt.Sprintf("shard: range %s: snapshot spans of applied index %d: %v", r.id, applied.Index, err))
	}
	return []engine.KeySpan{
		engine.GroupLocalSpan(r.id.Group()),
		engine.VersionedSpan(rec.Span),
	}
}

// AcceptSnapshot implements raftgroup.Snapshotter: the snapshot's span must not
// overlap what another replica of this node holds (trap 6).
func (r *Replica) AcceptSnapshot(applied engine.Applied) error {
	rec, err := command.DecodeRecord(applied.Payload)
	if err != nil {
		return fmt.Errorf("shard: range %s: snapshot at index %d: %w", r.id, applied.Index, err)
	}
	if rec.RangeID != r.id {
		return fmt.Errorf("shard: snapshot of range %s offered to range %s", rec.RangeID, r.id)
	}
	c := replicas.Claim{Range: r.id, Span: rec.Span, Generation: rec.Generation}
	if why := r.store.lifecycle.Claim([]replicas.Claim{c}); why[r.id] != nil {
		return fmt.Errorf("shard: snapshot at index %d: %w", applied.Index, why[r.id])
	}
	if err := r.clearRemoval(); err != nil {
		r.resumeRemoval()
		r.store.lifecycle.Unclaim(r.id)
		return err
	}
	r.store.makeWay(&c, &rec, &applied)
	return nil
}

// SnapshotDone implements raftgroup.Snapshotter.
func (r *Replica) SnapshotDone(applied engine.Applied, err error) {
	defer r.store.lifecycle.Unclaim(r.id)
	defer r.resumeRemoval()
	if err != nil {
		return
	}
	rec, derr := command.DecodeRecord(applied.Payload)
	if derr != nil {
		panic(fmt.Sprintf("shard: range %s: installed snapshot at index %d: %v", r.id, applied.Index, derr))
	}
	var out pipeline.Answers
	s := &r.applying
	txns, derr := command.LoadTxns(r.store.cfg.Engine, r.id)
	if derr == nil {
		derr = r.forgetAttached(&rec, &txns)
	}
	if derr != nil {
		r.store.cfg.Groups.Quarantine(r.id.Group(), fmt.Sprintf("the records of a snapshot at index %d: %v", applied.Index, derr))
		return
	}
	left := r.leftBehind(&rec)
	if !s.rec.Span.Covers(rec.Span) {
		// Nothing was known here of keys that came with a merge: a lock on them may be older
		// than the resolved revision without them.
		s.resolved = 0
	}
	s.rec, s.confIndex, s.replicas, s.term, s.done = rec, applied.ConfIndex, applied.Replicas, applied.Term, nil
	s.txns = txns
	s.advance(true)
	r.mu.Lock()
	if r.pipe.Leads() {
		panic(fmt.Sprintf("shard: range %s: snapshot at index %d for the leader of term %d", r.id, applied.Index, r.pipe.Term()))
	}
	oldGeneration := r.rec.Generation
	r.rec, r.confIndex, r.replicas = rec, applied.ConfIndex, applied.Replicas
	r.resolved = s.resolved
	r.position = raftgroup.Position{Index: applied.Index, Term: applied.Term}
	r.live.Reset(rec.LastRevision)
	r.loadTableLocked(&txns)
	r.upkeep.replaced()
	r.installs++
	r.load.Replaced()
	r.epochs.End(r.store.cache)
	r.pipe.Replaced(applied.Term, &out)
	r.feedsAfterSnapshotLocked(oldGeneration)
	r.endChangeLocked(kverror.New(kverror.LeaderChanged, "a snapshot replaced the state"))
	r.notifyLocked()
	r.mu.Unlock()
	r.store.heard(rec.LastRevision)
	raise(&r.store.sequencerTerm, int64(rec.SequencerTerm))
	r.pipe.Send(&out)
	r.store.waysMade(&rec)
	r.deleteLeft(left)
}

// leftBehind returns the span that the replica has lost by a snapshot past a split, and claims it. It returns nil if nothing was
// lost, or if another replica comes there: the snapshot of that one clears it.
func (r *Replica) leftBehind(now *command.Record) *keyspace.Span {
	old := &r.applying.rec
	left, ok := old.Span.Intersect(keyspace.Span{Start: now.Span.End})
	if old.Generation == 0 || !ok || len(now.Span.End) == 0 ||
		!r.store.lifecycle.ClaimMore(r.id, keyspace.Span{Start: now.Span.Start, End: old.Span.End}) {
		return nil
	}
	return &left
}

// deleteLeft deletes the span that a snapshot has left behind, unless another replica here holds
// it. The child may have been moved, and then never comes here to clear it. Nobody reads the span
// any more: a reader with an older page learns that the range has changed.
func (r *Replica) deleteLeft(left *keyspace.Span) {
	if left == nil {
		return
	}
	if err := r.store.lifecycle.DeleteUnheld(r.id, *left); err != nil {
		r.log.Warn("delete what a snapshot has left behind", zapSpan(*left), zap.Error(err))
	}
}
