package shard

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/internal/wake"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/shard/command"
	"github.com/skeindb/skein/shard/removal"
)

// maintenancePace is the least pause after each step. So maintenance takes a small part of the
// machine: at most 1000 ranges a second, or 1000 steps of removal.
const maintenancePace = time.Millisecond

// removalRest is the pause after a step of removal, in multiples of the step's time, where
// Limits.RemovePause sets none. Removal takes a quarter of a core at most, whatever a version
// costs, and a large store is not slowed down by a pause that suits a small one.
const removalRest = 3

// maintenanceAsk is how often a node asks for the compacted revision. A node that serves requests
// hears of it with their revisions. A node whose ranges nobody uses does not, and these ranges
// have versions to remove too.
const maintenanceAsk = time.Minute

// maintenanceRetry is how long a replica waits after its step failed. Others do not wait.
const maintenanceRetry = time.Second

// removalQuiet is how long no step is taken before a removal counts as ended. Ranges hear of a
// compaction one by one.
const removalQuiet = time.Second

// maintenance looks after all replicas of a node in one goroutine, one bounded step at a time: it
// raises compacted revisions, removes old versions, and counts keys after a split.
type maintenance struct {
	store *Store
	kick  wake.Signal

	mu sync.Mutex
	// todo are the replicas that may need something, in the order in which they were
	// noted. Guarded by mu.
	todo  []*Replica
	noted map[*Replica]bool

	// pause follows the step that has just run. began and ended are the times of the removal under
	// way over all replicas; began is 0 if there is none. Only run touches them.
	pause        time.Duration
	began, ended clock.Time
}

func newMaintenance(s *Store) *maintenance {
	return &maintenance{store: s, kick: wake.New(), noted: make(map[*Replica]bool)}
}

// note has a replica looked after soon.
func (m *maintenance) note(rs ...*Replica) {
	m.mu.Lock()
	for _, r := range rs {
		if !m.noted[r] {
			m.noted[r] = true
			m.todo = append(m.todo, r)
		}
	}
	m.mu.Unlock()
	m.kick.Set()
}

func (m *maintenance) next() *Replica {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.todo) == 0 {
		return nil
	}
	r := m.todo[0]
	m.todo[0] = nil
	m.todo = m.todo[1:]
	delete(m.noted, r)
	return r
}

// run is the goroutine of maintenance.
func (m *maintenance) run(ctx context.Context) {
	ask := m.store.cfg.Clock.NewTimer(maintenanceAsk)
	defer ask.Stop()
	quiet := m.store.cfg.Clock.NewTimer(removalQuiet)
	defer quiet.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-quiet.C():
			m.endRemoval()
			continue
		case <-ask.C():
			m.store.cfg.Sequencer.Sequence(keyspace.SequenceRequest{}, m.store.observe)
			ask.Reset(maintenanceAsk)
			continue
		case <-m.kick:
		}
		for r := m.next(); r != nil; r = m.next() {
			m.pause = maintenancePace
			again, err := r.maintain(ctx)
			if err != nil && ctx.Err() == nil {
				m.store.metrics.maintenanceErrors.Inc()
				r.log.Warn("a step of maintenance failed", zap.Error(err))
			}
			if again && err != nil {
				m.store.after(maintenanceRetry, func() { m.note(r) })
			} else if again {
				m.note(r)
			}
			if clock.Sleep(ctx, m.store.cfg.Clock, m.pause) != nil {
				return
			}
		}
		if m.began != 0 {
			quiet.Reset(removalQuiet - m.store.cfg.Clock.Now().Sub(m.ended))
		}
	}
}

// beginRemoval notes that a step of removal begins.
func (m *maintenance) beginRemoval() {
	if m.began == 0 {
		m.began = m.store.cfg.Clock.Now()
	}
}

// endRemoval notes that the removal over all replicas has ended: there was no more to do
// for a while.
func (m *maintenance) endRemoval() {
	if m.began != 0 {
		m.store.metrics.removeTotals.Observe(float64(m.ended.Sub(m.began).Milliseconds()))
		m.began = 0
	}
}

// rest sets the pause after a step of removal that took so long.
func (m *maintenance) rest(took time.Duration) {
	m.ended = m.store.cfg.Clock.Now()
	if m.pause = m.store.cfg.Limits.RemovePause; m.pause == 0 {
		m.pause = max(maintenancePace, removalRest*took)
	}
}

// upkeep is a replica's maintenance: what is under way, and how far old versions are removed here.
// Guarded by the replica's mu; it calls nobody.
type upkeep struct {
	// compacting is the compacted revision that is on its way through the log, and
	// counting says that a scan for the live-key count is.
	compacting keyspace.Revision
	counting   bool
	// awaiting says that the leader looks at the map for the commit of the merge in which its
	// range is to absorb another one.
	awaiting bool
	// lookingAgain says that the replica will be noted again for what could not be done.
	lookingAgain bool
	// removedTo is the compacted revision up to which old versions are gone here.
	removedTo keyspace.Revision
	// removeFrom is where the removal goes on, nil at its beginning.
	removeFrom []byte
	// removing is closed at the end of the step of removal under way, nil if there is none.
	// receiving says that a snapshot comes in, or that the replica ends: no step may begin.
	removing  chan struct{}
	receiving bool
}

// lose ends what only a leader has under way.
func (u *upkeep) lose() { u.compacting, u.counting = 0, false }

// replaced notes that the replica has other data, of which nothing is removed yet.
func (u *upkeep) replaced() { u.removedTo, u.removeFrom = 0, nil }

// beginStep begins a step of removal, and endStep ends it for those who wait for it.
func (u *upkeep) beginStep() { u.removing = make(chan struct{}) }

func (u *upkeep) endStep() {
	close(u.removing)
	u.removing = nil
}

// stop lets no step begin until resume. running is closed at the end of the step under way, nil if
// there is none.
func (u *upkeep) stop() (running <-chan struct{}) {
	u.receiving = true
	return u.removing
}

func (u *upkeep) resume() { u.receiving = false }

// stepped notes what a step has done: it began at since and has come as far as the cursor, or to
// the end of the span if that is nil. If the range has changed meanwhile, the pass begins anew.
func (u *upkeep) stepped(same bool, since, to keyspace.Revision, cursor []byte) (ended bool) {
	if !same || u.removedTo != since {
		u.removeFrom = nil
		return false
	}
	if u.removeFrom = cursor; cursor == nil {
		u.removedTo = to
	}
	return cursor == nil
}

// needsCareLocked says whether a leader has something to propose or a replica
// something to remove.
func (r *Replica) needsCareLocked() bool {
	return r.raiseLocked() != 0 || r.rec.Compacted > r.upkeep.removedTo || r.countsLocked()
}

// countsLocked says whether a leader is to count its keys.
func (r *Replica) countsLocked() bool {
	return r.pipe.Leads() && !r.rec.Counted && !r.upkeep.counting && !r.rec.Load.Active() && !r.rec.Merge.StandsStill()
}

// raiseLocked returns the compacted revision that this leader should propose, 0 for
// none. A range without changes since its last one has nothing to let go: it sleeps on.
func (r *Replica) raiseLocked() keyspace.Revision {
	c := r.store.mayCompactTo()
	if !r.pipe.Leads() || r.pipe.Draining() || r.pipe.Closed() || r.rec.Merge.Role != command.MergeNone || r.rec.Load.Active() || c <= r.rec.Compacted || c <= r.upkeep.compacting || r.rec.LastRevision < r.rec.Compacted {
		return 0
	}
	if c = r.keepLocked(c); c <= r.rec.Compacted || c <= r.upkeep.compacting {
		return 0
	}
	return c
}

// heldBackLocked says whether locks, pins or what is being sequenced keep this leader from
// compacting as far as it should.
func (r *Replica) heldBackLocked() bool {
	c := r.store.mayCompactTo()
	return (!r.locks.Empty() || r.pins.Any() || r.pipe.Sequencing()) && r.pipe.Leads() && c > r.rec.Compacted && r.keepLocked(c) < c
}

// lookAgainLocked notes the replica again after a pause, when it may not be held back any more.
func (r *Replica) lookAgainLocked() {
	if r.upkeep.lookingAgain {
		return
	}
	r.upkeep.lookingAgain = true
	r.store.after(maintenanceRetry, func() {
		r.mu.Lock()
		r.upkeep.lookingAgain = false
		r.mu.Unlock()
		r.store.maintenance.note(r)
	})
}

// SetHeld has the leaders of this node compact their ranges up to low at most, until it is called again: somebody
// reads a cut through the whole store at low or above. Until the first call nothing is compacted where Config.Holds
// is set. A leader that has not heard of a new hold may go too far: the reads of a cut find that out, see cuttable.
func (s *Store) SetHeld(low keyspace.Revision) {
	if old := keyspace.Revision(s.held.Swap(int64(low))); low > old && s.ctx.Err() == nil {
		s.maintenance.note(s.Replicas()...)
	}
}

// mayCompactTo returns the revision to which the ranges of this node may be compacted.
func (s *Store) mayCompactTo() keyspace.Revision {
	if mutation.Is(mutation.HoldIgnored) {
		return s.Compacted()
	}
	return min(s.Compacted(), s.heldFrom())
}

// heldFrom is the lowest revision that is held, keyspace.MaxRevision if none is, and -1 while that is not known.
func (s *Store) heldFrom() keyspace.Revision { return keyspace.Revision(s.held.Load()) }

// maintain does one step. again says that there is more to do.
func (r *Replica) maintain(ctx context.Context) (again bool, err error) {
	r.mu.Lock()
	if r.stopped || r.rec.Generation == 0 {
		r.mu.Unlock()
		return false, nil
	}
	if r.heldBackLocked() {
		r.lookAgainLocked()
		if c := r.store.mayCompactTo(); r.pinnedLocked(c) < c {
			r.store.unpins.note(r)
		}
	}
	if c := r.raiseLocked(); c != 0 {
		term, gen := r.pipe.Term(), r.rec.Generation
		r.upkeep.compacting = c
		r.mu.Unlock()
		entry := binary.AppendVarint(command.AppendHeader(nil, command.Header{Kind: command.KindCompact, Term: term, Generation: gen}), int64(c))
		failed := func(error) {
			r.mu.Lock()
			r.upkeep.compacting = 0
			r.mu.Unlock()
		}
		if err := r.group.Propose(term, entry, failed); err != nil {
			failed(err)
			return true, fmt.Errorf("raise the compacted revision to %d: %w", c, err)
		}
		return r.needsCare(), nil
	}
	if r.rec.Compacted > r.upkeep.removedTo && !r.upkeep.receiving {
		r.upkeep.beginStep()
		r.mu.Unlock()
		defer r.removed()
		return r.removeStep()
	}
	if r.countsLocked() {
		r.upkeep.counting = true
		r.mu.Unlock()
		return false, r.countAll(ctx)
	}
	r.mu.Unlock()
	return false, nil
}

func (r *Replica) needsCare() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.needsCareLocked()
}

// loadRemoval returns up to which revision old versions of the range are removed. A note from
// before the range absorbed another one says nothing about the other's keys.
func (s *Store) loadRemoval(rec *command.Record) (keyspace.Revision, error) {
	v, ok, err := s.cfg.Engine.Get(removal.NoteKey(rec.RangeID))
	if err != nil || !ok {
		return 0, err
	}
	rev, g, err := removal.DecodeNote(v)
	if err != nil {
		return 0, fmt.Errorf("shard: range %s: the removed revision: %w", rec.RangeID, err)
	}
	if g < rec.Absorbed {
		return 0, nil
	}
	return rev, nil
}

// forgetRemoval deletes the note of how far old versions are removed, durably: other data takes
// their place, and its ingest may become durable before a commit here would.
func (s *Store) forgetRemoval(id keyspace.RangeID) error {
	b := s.cfg.Engine.NewBatch()
	err := b.Delete(removal.NoteKey(id))
	if err == nil {
		err = b.Commit()
	}
	if err == nil && !mutation.Is(mutation.SnapshotNotDurable) {
		err = s.cfg.Engine.Flush(s.ctx)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("shard: range %s: forget how far old versions are removed: %w", id, err), b.Close())
	}
	return nil
}

// removed ends a step of removal for those who wait for it.
func (r *Replica) removed() {
	r.mu.Lock()
	r.upkeep.endStep()
	r.mu.Unlock()
}

// stopRemoval stops the removal of old versions until resumeRemoval, and returns when no step is
// under way. A step is bounded, and so is the wait.
func (r *Replica) stopRemoval() {
	r.mu.Lock()
	running := r.upkeep.stop()
	r.mu.Unlock()
	if running != nil {
		<-running
	}
}

// clearRemoval is stopRemoval before a snapshot is installed. A step that read before the install
// must not commit after it: it would delete a tombstone and leave the older put that the snapshot
// has brought back.
//
// The note of how far old versions are removed is deleted too, before the install makes other data
// durable: after a crash it would be wrong about them. A replica without data has no note.
func (r *Replica) clearRemoval() error {
	r.stopRemoval()
	r.mu.Lock()
	empty := r.rec.Generation == 0
	r.mu.Unlock()
	if empty {
		return nil
	}
	return r.store.forgetRemoval(r.id)
}

// resumeRemoval ends stopRemoval.
func (r *Replica) resumeRemoval() {
	r.mu.Lock()
	r.upkeep.resume()
	r.mu.Unlock()
	r.store.maintenance.note(r)
}

// removeStep removes a bounded number of old versions. Replicas do so independently: no read at or
// above the compacted revision can tell (invariant 5).
func (r *Replica) removeStep() (again bool, err error) {
	step := clock.StartStopwatch()
	batch := r.store.cfg.Limits.RemoveBatch
	r.mu.Lock()
	o := mvcc.RemoveOptions{
		Span: r.rec.Span, Compacted: r.rec.Compacted, Since: r.upkeep.removedTo, Cursor: r.upkeep.removeFrom,
		MaxVisits: batch, MaxDeletes: batch,
	}
	generation := r.rec.Generation
	r.mu.Unlock()
	r.store.maintenance.beginRemoval()
	defer func() {
		took := step.Elapsed()
		r.store.metrics.removePauses.Observe(float64(took.Milliseconds()))
		r.store.maintenance.rest(took)
	}()
	b := r.store.cfg.Engine.NewBatch()
	defer func() { err = errors.Join(err, b.Close()) }()
	res, err := mvcc.RemoveOld(r.store.cfg.Engine, b, o)
	if err != nil {
		return false, fmt.Errorf("remove versions up to %d: %w", o.Compacted, err)
	}
	done := res.Cursor == nil
	if done {
		note := removal.AppendNote(nil, o.Compacted, generation)
		if err := b.Set(removal.NoteKey(r.id), note); err != nil {
			return false, err
		}
	}
	if !b.Empty() {
		if err := b.Commit(); err != nil {
			return false, err
		}
	}
	r.store.metrics.removed.Add(float64(res.Removed))
	r.mu.Lock()
	defer r.mu.Unlock()
	same := r.rec.Generation == generation // no split and no merge came between
	if r.upkeep.stepped(same, o.Since, o.Compacted, res.Cursor) {
		r.store.metrics.removedLast.Set(float64(r.store.cfg.Clock.Wall().Unix()))
	}
	return r.needsCareLocked(), nil // keys may have to be counted yet
}

// countAll counts the living keys at the last applied revision and proposes what
// the count differs from the changes since the split.
func (r *Replica) countAll(ctx context.Context) error {
	r.mu.Lock()
	if !r.pipe.Leads() {
		r.upkeep.counting = false
		r.mu.Unlock()
		return nil
	}
	term, gen, span := r.pipe.Term(), r.rec.Generation, r.rec.Span
	at, since := r.rec.LastRevision, r.rec.Live
	if !r.locks.Empty() {
		// A locked write may still be applied at a revision above its floor, during the scan.
		known := false
		at = r.locks.LowestFloor(at)
		if since, known = r.live.At(at, since); !known {
			r.upkeep.counting = false
			r.lookAgainLocked()
			r.mu.Unlock()
			return nil
		}
	}
	r.mu.Unlock()
	failed := func(error) {
		r.mu.Lock()
		r.upkeep.counting = false
		r.mu.Unlock()
	}
	n, err := r.countPaced(ctx, span, at)
	if err == nil {
		r.mu.Lock()
		stale := r.rec.Compacted > at && r.rec.LastRevision != at || r.rec.Generation != gen
		r.mu.Unlock()
		if stale {
			// Counted versions may have been removed during the scan.
			failed(nil)
			r.store.maintenance.note(r)
			return nil
		}
		entry := binary.AppendVarint(command.AppendHeader(nil, command.Header{Kind: command.KindCount, Term: term, Generation: gen}), n-since)
		err = r.group.Propose(term, entry, failed)
	}
	if err != nil {
		failed(err)
		return fmt.Errorf("count %s at %d: %w", span, at, err)
	}
	return nil
}

// countPart is how many versions a count looks at between two pauses.
const countPart = 20_000

func (r *Replica) countPaced(ctx context.Context, span keyspace.Span, at keyspace.Revision) (int64, error) {
	var total int64
	for {
		n, next, err := mvcc.CountPart(r.store.cfg.Engine, span, at, countPart)
		if err != nil {
			return 0, err
		}
		total += n
		if next == nil {
			return total, nil
		}
		span.Start = next
		if err := clock.Sleep(ctx, r.store.cfg.Clock, maintenancePace); err != nil {
			return 0, err
		}
	}
}
