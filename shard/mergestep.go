package shard

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/command"
)

func zapRange(id keyspace.RangeID) zap.Field { return zap.Stringer("source", id) }
func zapSpan(s keyspace.Span) zap.Field      { return zap.Stringer("span", s) }

// mergeLagEntries is how far behind a replica may be of which a merge is to wait: it stands
// still until all have come to the freeze.
const mergeLagEntries = 64

// settlePoll is how often a node looks whether what is settled has become durable, where a
// flush did not make it so: the replica was behind.
const settlePoll = 10 * time.Millisecond

// merge takes one step of a merge.
func (s *Store) merge(ctx context.Context, o *keyspace.MergeOrder) (*adminAnswer, error) {
	if o == nil || o.ID == 0 {
		return nil, rangeapi.BadRequest("a step of no merge")
	}
	if o.Step == keyspace.MergeStore {
		if err := s.cfg.Engine.Flush(ctx); err != nil {
			return nil, fmt.Errorf("shard: merge %d: %w", o.ID, err)
		}
		return &adminAnswer{}, nil
	}
	r := s.Replica(o.Range)
	if r == nil {
		return nil, kverror.New(kverror.RangeNotHere, "range %s on node %s", o.Range, s.cfg.Self)
	}
	var err error
	switch o.Step {
	case keyspace.MergeBind, keyspace.MergeFreeze, keyspace.MergeAbsorb, keyspace.MergeRelease:
		err = r.mergeStep(ctx, o)
	case keyspace.MergeSettle:
		err = r.settle(ctx, o.ID)
	case keyspace.MergeHold:
		err = r.hold(ctx, o.ID)
	default:
		err = rangeapi.BadRequest("%s of range %s", o.Step, o.Range)
	}
	return &adminAnswer{Descriptors: []keyspace.Descriptor{r.Descriptor()}}, err
}

// mergeStep has the leader propose one step of a merge, and returns once it is applied.
// What was applied before is not proposed again.
func (r *Replica) mergeStep(ctx context.Context, o *keyspace.MergeOrder) error {
	term, done, err := r.checkMerge(o)
	if done || err != nil {
		return err
	}
	if o.Step == keyspace.MergeBind || o.Step == keyspace.MergeFreeze {
		if err := r.checkAlong(ctx); err != nil {
			return err
		}
	}
	p, err := r.beginMergeStep(ctx, term, o)
	if p == nil || err != nil {
		return err
	}
	if _, err := clock.Await(ctx, p.done); err != nil {
		return kverror.New(kverror.LeaderChanged, "%s range %s: %v", o.Step, r.id, err)
	}
	if p.err != nil {
		return fmt.Errorf("shard: %s range %s: %w", o.Step, r.id, p.err)
	}
	return nil
}

// beginMergeStep proposes the step's entry. A freeze and an absorb close the pipeline first. Once
// the entry is proposed, the pending change and later the range's new state keep requests out:
// the pipeline may open again before the entry is applied.
func (r *Replica) beginMergeStep(ctx context.Context, term uint64, o *keyspace.MergeOrder) (*pendingChange, error) {
	if o.Step == keyspace.MergeFreeze || o.Step == keyspace.MergeAbsorb {
		defer r.reopen()
		if err := r.closePipeline(ctx); err != nil {
			return nil, kverror.New(kverror.Busy, "%s range %s: %v", o.Step, r.id, err)
		}
	}
	if o.Step == keyspace.MergeBind || o.Step == keyspace.MergeFreeze {
		if err := r.checkFloors(o.Other); err != nil {
			return nil, err
		}
	}
	return r.proposeMerge(term, o)
}

// mergeLook is how often the leader of a range that is to absorb another one looks at the map,
// and absorbTimeout how long it then tries.
const (
	mergeLook     = time.Second
	absorbTimeout = 5 * time.Second
)

// awaitCommitLocked has a leader whose range is to absorb another one look at the map until the
// merge is over. Behind the commit nothing can be refused any more, and the merge must not wait
// for placement's next leader if the one that committed it is lost.
func (r *Replica) awaitCommitLocked() {
	if r.rec.Merge.Role != command.MergeTarget || !r.pipe.Leads() || r.upkeep.awaiting || r.store.cfg.Placed == nil {
		return
	}
	r.upkeep.awaiting = true
	r.store.after(mergeLook, r.absorbIfCommitted)
}

func (r *Replica) absorbIfCommitted() {
	r.mu.Lock()
	d, id := r.descriptorLocked(), r.rec.Merge.ID
	target := r.rec.Merge.Role == command.MergeTarget && r.pipe.Leads()
	r.mu.Unlock()
	if target && r.store.mergedInMap(&d) {
		ctx, cancel := clock.WithTimeout(r.store.ctx, r.store.cfg.Clock, absorbTimeout)
		defer cancel()
		err := r.mergeStep(ctx, &keyspace.MergeOrder{Step: keyspace.MergeAbsorb, ID: id, Range: d.Range})
		r.log.Info("absorb, as the map says that the merge is committed", zap.Uint64("merge", id), zap.Error(err))
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.upkeep.awaiting = false
	r.awaitCommitLocked()
}

// mergedInMap says whether the map gives the range the span of its right neighbour too: the
// merge for which it is bound is committed. A bound range changes its span in no other way.
func (s *Store) mergedInMap(d *keyspace.Descriptor) bool {
	now, ok := s.cfg.Placed.Descriptor(d.Range)
	if !ok || now.Generation <= d.Generation || len(d.Span.End) == 0 {
		return false
	}
	return len(now.Span.End) == 0 || bytes.Compare(now.Span.End, d.Span.End) > 0
}

// checkMerge says whether the step can be taken, and in which term; done that it was.
func (r *Replica) checkMerge(o *keyspace.MergeOrder) (term uint64, done bool, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.checkMergeLocked(o)
}

func (r *Replica) checkMergeLocked(o *keyspace.MergeOrder) (term uint64, done bool, err error) {
	m, begins := &r.rec.Merge, o.Step == keyspace.MergeBind || o.Step == keyspace.MergeFreeze
	switch {
	case r.stopped:
		return 0, false, r.ended
	case r.pipe.Draining():
		return 0, false, r.errorLocked(kverror.Busy, "the node stops")
	case !r.pipe.Leads():
		return 0, false, r.errorLocked(kverror.NotLeader, "")
	case !begins && r.rec.Merged >= o.ID && m.ID != o.ID, begins && m.ID == o.ID:
		return 0, true, nil
	case r.change != nil:
		return 0, false, r.errorLocked(kverror.Busy, "another change of the range is under way")
	case o.Step == keyspace.MergeAbsorb && (m.Role != command.MergeTarget || m.ID != o.ID):
		return 0, false, kverror.New(kverror.Internal, "range %s is to absorb by merge %d, and is bound to merge %d", r.id, o.ID, m.ID)
	case !begins:
		return r.pipe.Term(), false, nil
	case r.rec.Load.Active():
		return 0, false, r.errorLocked(kverror.Busy, "the range is being loaded")
	case m.Role != command.MergeNone || r.rec.Merged >= o.ID:
		return 0, false, kverror.New(kverror.BadRequest, "range %s is bound to merge %d, and merge %d is over", r.id, m.ID, r.rec.Merged)
	case o.Generation != r.rec.Generation || o.ConfIndex != r.confIndex:
		return 0, false, r.errorLocked(kverror.WrongRange, fmt.Sprintf("generation %d, members of index %d", r.rec.Generation, r.confIndex))
	case r.altering > 0:
		return 0, false, r.errorLocked(kverror.Busy, "a change of the range's members is under way")
	}
	for _, x := range r.replicas {
		if x.Role != keyspace.RoleVoter {
			return 0, false, r.errorLocked(kverror.Busy, "the range's members are being changed")
		}
	}
	return r.pipe.Term(), false, nil
}

// checkAlong refuses where not all replicas are near: a merge waits for every one of them,
// and the source stands still meanwhile.
func (r *Replica) checkAlong(ctx context.Context) error {
	ps, err := r.group.Progress(ctx)
	if err != nil {
		return kverror.New(kverror.NotLeader, "range %s: %v", r.id, err)
	}
	last := r.group.Status().Last
	for _, p := range ps {
		if !p.NodeAlive || p.Match+mergeLagEntries < last {
			return kverror.New(kverror.Busy, "the replica of range %s on node %s is behind", r.id, p.Replica.Node)
		}
	}
	return nil
}

// checkFloors refuses where a lock of one range may leave versions behind below what the
// other has compacted: the two are to have one compacted revision, and no lock below. The
// target compacts no further while it is bound, nor does the source behind its closed pipeline or
// its freeze, and what is locked later has a higher floor.
func (r *Replica) checkFloors(other keyspace.RangeID) error {
	o := r.store.Replica(other)
	if o == nil {
		return kverror.New(kverror.Busy, "range %s is not on node %s", other, r.store.cfg.Self)
	}
	low, compacted := keyspace.MaxRevision, keyspace.Revision(0)
	for _, x := range []*Replica{r, o} {
		x.mu.Lock()
		low = x.locks.LowestFloor(low)
		// What is on its way may yet come before the freeze.
		compacted = max(compacted, x.rec.Compacted, x.upkeep.compacting)
		leads := x.pipe.Leads()
		x.mu.Unlock()
		if !leads {
			return kverror.New(kverror.Busy, "range %s is not led on node %s", x.id, r.store.cfg.Self)
		}
	}
	if low < compacted {
		return kverror.New(kverror.Busy, "a transaction holds a lock from revision %d on, and %d is compacted", low, compacted)
	}
	return nil
}

var mergeCommands = map[keyspace.MergeStep]command.Kind{
	keyspace.MergeBind: command.KindBind, keyspace.MergeFreeze: command.KindFreeze,
	keyspace.MergeAbsorb: command.KindAbsorb, keyspace.MergeRelease: command.KindRelease,
}

// proposeMerge proposes the step's entry. nil without an error says that it was applied
// meanwhile.
func (r *Replica) proposeMerge(term uint64, o *keyspace.MergeOrder) (*pendingChange, error) {
	r.mu.Lock()
	now, done, err := r.checkMergeLocked(o)
	if err == nil && !done && now != term {
		err = r.errorLocked(kverror.Dropped, "the leadership has changed")
	}
	if done || err != nil {
		r.mu.Unlock()
		return nil, err
	}
	p := &pendingChange{kind: mergeCommands[o.Step]}
	if o.Step == keyspace.MergeFreeze {
		leaving := r.rec.Span
		p.leaving = &leaving
	}
	entry := command.AppendHeader(nil, command.Header{Kind: p.kind, Term: term, Generation: r.rec.Generation})
	entry = command.AppendMergeCommand(entry, p.kind, &command.MergeCommand{ID: o.ID, ConfIndex: o.ConfIndex, Other: o.Other, Hull: o.Hull})
	r.beginChangeLocked(p)
	r.mu.Unlock()
	if err := r.proposeChange(term, entry, p); err != nil {
		return nil, kverror.New(kverror.Dropped, "%s range %s: %v", o.Step, r.id, err)
	}
	r.log.Info("proposed a step of a merge", zap.Stringer("step", o.Step), zap.Uint64("merge", o.ID), zap.Uint64("term", term))
	return p, nil
}

// settle returns once this replica has applied that it is frozen for the merge, and that is
// durable.
func (r *Replica) settle(ctx context.Context, id uint64) error {
	r.mu.Lock()
	for !r.rec.Merge.Frozen() || r.rec.Merge.ID != id {
		if r.stopped || r.rec.Merged >= id {
			r.mu.Unlock()
			return kverror.New(kverror.BadRequest, "merge %d of range %s is over", id, r.id)
		}
		wait := r.changedLocked()
		r.mu.Unlock()
		if _, err := clock.Await(ctx, wait); err != nil {
			return kverror.Of(err)
		}
		r.mu.Lock()
	}
	r.mu.Unlock()
	for {
		durable, err := r.store.frozenDurably(r.id, id)
		if durable || err != nil {
			return err
		}
		if err := r.store.cfg.Engine.Flush(ctx); err != nil {
			return fmt.Errorf("shard: settle range %s: %w", r.id, err)
		}
		if durable, err = r.store.frozenDurably(r.id, id); durable || err != nil {
			return err
		}
		if err := clock.Sleep(ctx, r.store.cfg.Clock, settlePoll); err != nil {
			return kverror.Of(err)
		}
	}
}

// hold keeps the target's pipeline closed until it is about to absorb: what is under way is out of
// the way by the time the merge is committed. It ends with the context, which a merge that is not
// committed ends, and behind Limits.MergeHold. From then on the range serves, and is closed again to absorb.
func (r *Replica) hold(ctx context.Context, id uint64) error {
	ctx, cancel := clock.WithTimeout(ctx, r.store.cfg.Clock, r.store.cfg.Limits.MergeHold)
	defer cancel()
	defer r.reopen()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.pipe.Close()
	for m := &r.rec.Merge; r.change == nil && m.Role == command.MergeTarget && m.ID == id && r.pipe.Leads() && !r.stopped; {
		wait := r.changedLocked()
		r.mu.Unlock()
		_, err := clock.Await(ctx, wait)
		r.mu.Lock()
		if err != nil {
			return kverror.Of(err)
		}
	}
	return nil
}

// frozenDurably says whether the range would be frozen for the merge after a crash now.
func (s *Store) frozenDurably(source keyspace.RangeID, id uint64) (bool, error) {
	rec, ok, err := s.lifecycle.DurableRecord(source)
	return ok && rec.Merge.Frozen() && rec.Merge.ID == id, err
}

// Merge has a node take one step of a merge. Errors are of package kverror; with
// LeaderChanged the step may yet be taken.
func (c *AdminClient) Merge(ctx context.Context, node keyspace.NodeID, o keyspace.MergeOrder) error {
	_, err := c.ask(ctx, node, &adminRequest{Op: adminMerge, Merge: &o}, true)
	if err != nil && errors.Is(err, raftgroup.ErrStopped) {
		return kverror.New(kverror.Stopped, "%v", err)
	}
	return err
}
