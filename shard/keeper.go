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
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/internal/wake"
	"github.com/skeindb/skein/internal/wire"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/shard/command"
)

// keeperPace is the least pause after each step, so that upkeep takes a small part of
// the machine: at most 1000 ranges a second, or 1000 steps of removal.
const keeperPace = time.Millisecond

// removalRest is how many times as long as a step of removal took the keeper rests
// after it, where no pause is set: removal takes a quarter of a core at most, whatever
// a version costs, and a big store is not the slower for a pause that suits a small one.
const removalRest = 3

// keeperAsk is how often a node asks for the compacted revision. Whoever serves
// requests hears of it with their revisions; one that leads ranges which nobody uses
// does not, and they too have versions to let go.
const keeperAsk = time.Minute

// keeperRetry is the pause after a step that failed, of its replica alone: what keeps
// it from its work may last.
const keeperRetry = time.Second

// removalQuiet is after how long without a step a removal has ended: of one compaction
// the ranges hear one by one.
const removalQuiet = time.Second

// keeper does the upkeep of all replicas of a node in one goroutine, a bounded step
// at a time: raising compacted revisions, removing old versions, counting after a
// split.
type keeper struct {
	n    *Node
	kick wake.Signal

	mu sync.Mutex
	// todo are the replicas that may need something, in the order in which they were
	// noted. Guarded by mu.
	todo  []*Replica
	noted map[*Replica]bool

	// pause is what the step that has just run asks for. began and ended are those of the
	// removal under way over all replicas, began 0 where there is none. Only run touches them.
	pause        time.Duration
	began, ended clock.Time
}

func newKeeper(n *Node) *keeper {
	return &keeper{n: n, kick: wake.New(), noted: make(map[*Replica]bool)}
}

// note has a replica looked after soon.
func (k *keeper) note(rs ...*Replica) {
	k.mu.Lock()
	for _, r := range rs {
		if !k.noted[r] {
			k.noted[r] = true
			k.todo = append(k.todo, r)
		}
	}
	k.mu.Unlock()
	k.kick.Set()
}

func (k *keeper) next() *Replica {
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.todo) == 0 {
		return nil
	}
	r := k.todo[0]
	k.todo[0] = nil
	k.todo = k.todo[1:]
	delete(k.noted, r)
	return r
}

// run is the keeper's goroutine.
func (k *keeper) run(ctx context.Context) {
	ask := k.n.cfg.Clock.NewTimer(keeperAsk)
	defer ask.Stop()
	quiet := k.n.cfg.Clock.NewTimer(removalQuiet)
	defer quiet.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-quiet.C():
			k.endRemoval()
			continue
		case <-ask.C():
			k.n.cfg.Sequencer.Sequence(keyspace.SequenceRequest{}, k.n.observe)
			ask.Reset(keeperAsk)
			continue
		case <-k.kick:
		}
		for r := k.next(); r != nil; r = k.next() {
			k.pause = keeperPace
			again, err := r.upkeep(ctx)
			if err != nil && ctx.Err() == nil {
				k.n.metrics.keeperErrors.Inc()
				r.log.Warn("upkeep failed", zap.Error(err))
			}
			if again && err != nil {
				k.n.after(keeperRetry, func() { k.note(r) })
			} else if again {
				k.note(r)
			}
			if clock.Sleep(ctx, k.n.cfg.Clock, k.pause) != nil {
				return
			}
		}
		if k.began != 0 {
			quiet.Reset(removalQuiet - k.n.cfg.Clock.Now().Sub(k.ended))
		}
	}
}

// beginRemoval notes that a step of removal begins.
func (k *keeper) beginRemoval() {
	if k.began == 0 {
		k.began = k.n.cfg.Clock.Now()
	}
}

// endRemoval notes that the removal over all replicas has ended: there was no more to do
// for a while.
func (k *keeper) endRemoval() {
	if k.began != 0 {
		k.n.metrics.removeTotals.Observe(float64(k.ended.Sub(k.began).Milliseconds()))
		k.began = 0
	}
}

// rest has the keeper pause after a step of removal that took so long.
func (k *keeper) rest(took time.Duration) {
	k.ended = k.n.cfg.Clock.Now()
	if k.pause = k.n.cfg.Limits.RemovePause; k.pause == 0 {
		k.pause = max(keeperPace, removalRest*took)
	}
}

// needsCareLocked says whether a leader has something to propose or a replica
// something to remove.
func (r *Replica) needsCareLocked() bool {
	return r.raiseLocked() != 0 || r.rec.Compacted > r.removedTo || r.countsLocked()
}

// countsLocked says whether a leader is to count its keys.
func (r *Replica) countsLocked() bool {
	return r.pipe.Leads() && !r.rec.Counted && !r.counting && !r.rec.Merge.StandsStill()
}

// raiseLocked returns the compacted revision that this leader should propose, 0 for
// none. A range without changes since its last one has nothing to let go: it sleeps on.
func (r *Replica) raiseLocked() keyspace.Revision {
	c := r.node.Compacted()
	if !r.pipe.Leads() || r.pipe.Draining() || r.pipe.Closed() || r.rec.Merge.Role != command.MergeNone || c <= r.rec.Compacted || c <= r.compacting || r.rec.LastRevision < r.rec.Compacted {
		return 0
	}
	if c = r.keepLocked(c); c <= r.rec.Compacted || c <= r.compacting {
		return 0
	}
	return c
}

// heldBackLocked says whether locks, pins or what is being sequenced keep this leader from
// compacting as far as it should.
func (r *Replica) heldBackLocked() bool {
	c := r.node.Compacted()
	return (!r.locks.Empty() || r.pins.now.began != 0 || r.pipe.Sequencing()) && r.pipe.Leads() && c > r.rec.Compacted && r.keepLocked(c) < c
}

// lookAgainLocked has the replica looked after once more when what holds it back may be
// gone.
func (r *Replica) lookAgainLocked() {
	if r.lookingAgain {
		return
	}
	r.lookingAgain = true
	r.node.after(keeperRetry, func() {
		r.mu.Lock()
		r.lookingAgain = false
		r.mu.Unlock()
		r.node.keeper.note(r)
	})
}

// upkeep does one step. again says that there is more to do.
func (r *Replica) upkeep(ctx context.Context) (again bool, err error) {
	r.mu.Lock()
	if r.stopped || r.rec.Generation == 0 {
		r.mu.Unlock()
		return false, nil
	}
	if r.heldBackLocked() {
		r.lookAgainLocked()
		if c := r.node.Compacted(); r.pinnedLocked(c) < c {
			r.node.unpins.note(r)
		}
	}
	if c := r.raiseLocked(); c != 0 {
		term, gen := r.pipe.Term(), r.rec.Generation
		r.compacting = c
		r.mu.Unlock()
		entry := binary.AppendVarint(command.AppendHeader(nil, command.Header{Kind: command.KindCompact, Term: term, Generation: gen}), int64(c))
		failed := func(error) {
			r.mu.Lock()
			r.compacting = 0
			r.mu.Unlock()
		}
		if err := r.group.Propose(term, entry, failed); err != nil {
			failed(err)
			return true, fmt.Errorf("raise the compacted revision to %d: %w", c, err)
		}
		return r.needsCare(), nil
	}
	if r.rec.Compacted > r.removedTo && !r.receiving {
		r.removing = make(chan struct{})
		r.mu.Unlock()
		defer r.removed()
		return r.removeStep()
	}
	if r.countsLocked() {
		r.counting = true
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

// removalKey is the node's own note of how far old versions of a range are gone.
func removalKey(id keyspace.RangeID) []byte {
	return engine.NodeLocalKey(binary.BigEndian.AppendUint64([]byte("shard/removed/"), uint64(id)))
}

// appendRemoval appends the value of removalKey: up to where old versions are gone, of the
// span that the range had in the generation.
func appendRemoval(dst []byte, to keyspace.Revision, g keyspace.Generation) []byte {
	return binary.AppendUvarint(binary.AppendUvarint(dst, uint64(to)), uint64(g))
}

func decodeRemoval(b []byte) (to keyspace.Revision, g keyspace.Generation, err error) {
	rev, rest, err := wire.Uvarint(b)
	if err != nil {
		return 0, 0, err
	}
	generation, rest, err := wire.Uvarint(rest)
	if err == nil && len(rest) > 0 {
		err = fmt.Errorf("%d bytes left over", len(rest))
	}
	return keyspace.Revision(rev), keyspace.Generation(generation), err
}

// loadRemoval returns up to where old versions of the range are gone. What is known from
// before it absorbed another range says nothing of that one's keys.
func (n *Node) loadRemoval(rec *command.Record) (keyspace.Revision, error) {
	v, ok, err := n.cfg.Engine.Get(removalKey(rec.RangeID))
	if err != nil || !ok {
		return 0, err
	}
	rev, g, err := decodeRemoval(v)
	if err != nil {
		return 0, fmt.Errorf("shard: range %s: the removed revision: %w", rec.RangeID, err)
	}
	if g < rec.Absorbed {
		return 0, nil
	}
	return rev, nil
}

// forgetRemoval drops the note of how far old versions are gone, for good: other data
// takes their place, and an ingest of it may become durable before what is committed
// here.
func (n *Node) forgetRemoval(id keyspace.RangeID) error {
	b := n.cfg.Engine.NewBatch()
	err := b.Delete(removalKey(id))
	if err == nil {
		err = b.Commit()
	}
	if err == nil && !mutation.Is(mutation.SnapshotNotDurable) {
		err = n.cfg.Engine.Flush(n.ctx)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("shard: range %s: forget how far old versions are removed: %w", id, err), b.Close())
	}
	return nil
}

// removed ends a step of removal for those who wait for it.
func (r *Replica) removed() {
	r.mu.Lock()
	close(r.removing)
	r.removing = nil
	r.mu.Unlock()
}

// standStill keeps old versions from being removed until standEasy, and returns when
// no step is under way: what one has read before a snapshot is installed must not
// be committed after it. It would take a tombstone and leave the older put that the
// snapshot has brought back. A step is bounded, and so is the wait.
//
// The note of how far old versions are gone goes too, before the install makes
// other data durable: it must not speak for them after a crash. A replica that has
// no data yet has none.
func (r *Replica) standStill() error {
	r.mu.Lock()
	r.receiving = true
	running, empty := r.removing, r.rec.Generation == 0
	r.mu.Unlock()
	if running != nil {
		<-running
	}
	if empty {
		return nil
	}
	return r.node.forgetRemoval(r.id)
}

// standEasy ends standStill.
func (r *Replica) standEasy() {
	r.mu.Lock()
	r.receiving = false
	r.mu.Unlock()
	r.node.keeper.note(r)
}

// removeStep removes a bounded number of old versions. It is this replica's own
// matter: no read at or above the compacted revision can tell (invariant 5).
func (r *Replica) removeStep() (again bool, err error) {
	step := clock.StartStopwatch()
	batch := r.node.cfg.Limits.RemoveBatch
	r.mu.Lock()
	o := mvcc.RemoveOptions{
		Span: r.rec.Span, Compacted: r.rec.Compacted, Since: r.removedTo, Cursor: r.removeFrom,
		MaxVisits: batch, MaxDeletes: batch,
	}
	generation := r.rec.Generation
	r.mu.Unlock()
	r.node.keeper.beginRemoval()
	defer func() {
		took := step.Elapsed()
		r.node.metrics.removePauses.Observe(float64(took.Milliseconds()))
		r.node.keeper.rest(took)
	}()
	b := r.node.cfg.Engine.NewBatch()
	defer func() { err = errors.Join(err, b.Close()) }()
	res, err := mvcc.RemoveOld(r.node.cfg.Engine, b, o)
	if err != nil {
		return false, fmt.Errorf("remove versions up to %d: %w", o.Compacted, err)
	}
	done := res.Cursor == nil
	if done {
		note := appendRemoval(nil, o.Compacted, generation)
		if err := b.Set(removalKey(r.id), note); err != nil {
			return false, err
		}
	}
	if !b.Empty() {
		if err := b.Commit(); err != nil {
			return false, err
		}
	}
	r.node.metrics.removed.Add(float64(res.Removed))
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.rec.Generation != generation || r.removedTo != o.Since {
		// A split or a snapshot came between: the pass begins anew.
		r.removeFrom = nil
		return true, nil
	}
	r.removeFrom = res.Cursor
	if done {
		r.removedTo = o.Compacted
		r.node.metrics.removedLast.Set(float64(r.node.cfg.Clock.Wall().Unix()))
	}
	return r.needsCareLocked(), nil // keys may have to be counted yet
}

// countAll counts the living keys at the last applied revision and proposes what
// the count differs from the changes since the split.
func (r *Replica) countAll(ctx context.Context) error {
	r.mu.Lock()
	if !r.pipe.Leads() {
		r.counting = false
		r.mu.Unlock()
		return nil
	}
	term, gen, span := r.pipe.Term(), r.rec.Generation, r.rec.Span
	at, since := r.rec.LastRevision, r.rec.Live
	if !r.locks.Empty() {
		// What is locked may yet come at a revision above its floor, and in the middle of
		// the scan.
		known := false
		at = r.locks.LowestFloor(at)
		if since, known = r.live.At(at, since); !known {
			r.counting = false
			r.lookAgainLocked()
			r.mu.Unlock()
			return nil
		}
	}
	r.mu.Unlock()
	failed := func(error) {
		r.mu.Lock()
		r.counting = false
		r.mu.Unlock()
	}
	n, err := r.countPaced(ctx, span, at)
	if err == nil {
		r.mu.Lock()
		stale := r.rec.Compacted > at && r.rec.LastRevision != at || r.rec.Generation != gen
		r.mu.Unlock()
		if stale {
			// What was counted may have been removed under the scan.
			failed(nil)
			r.node.keeper.note(r)
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
		n, next, err := mvcc.CountPart(r.node.cfg.Engine, span, at, countPart)
		if err != nil {
			return 0, err
		}
		total += n
		if next == nil {
			return total, nil
		}
		span.Start = next
		if err := clock.Sleep(ctx, r.node.cfg.Clock, keeperPace); err != nil {
			return 0, err
		}
	}
}
