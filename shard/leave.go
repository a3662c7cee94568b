package shard

import (
	"context"
	"encoding/binary"
	"fmt"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/shard/command"
)

// Placed knows the range map; placement's client does.
type Placed interface {
	// Descriptor returns the newest descriptor of the range that this node's copy of the
	// map has. key is one of the range's keys, which is where it is looked for first.
	Descriptor(id keyspace.RangeID, key []byte) (keyspace.Descriptor, bool)
	// At returns the newest descriptor that this node's copy of the map has of the range
	// that holds the key.
	At(key []byte) (keyspace.Descriptor, bool)
}

// Times of the leaver.
const (
	// leaveSweep is how often all replicas are compared with the map: one that slept, or
	// whose node was down, while it was removed hears of it from nobody.
	leaveSweep = 10 * time.Second
	// leaveRetry is the pause after a removal that failed, or has to wait.
	leaveRetry = time.Second
)

// leaver removes replicas that their groups have removed. One goroutine does it, one
// replica at a time: each removal ends with a flush.
type leaver struct {
	n    *Node
	kick chan struct{}

	mu sync.Mutex
	// Guarded by mu: todo are the ranges to look at, each once; waits those to look at after a
	// pause; begun those whose stored replica is being removed.
	todo         []keyspace.RangeID
	waits, begun map[keyspace.RangeID]bool
}

func newLeaver(n *Node) *leaver {
	return &leaver{n: n, kick: make(chan struct{}, 1), waits: map[keyspace.RangeID]bool{}, begun: map[keyspace.RangeID]bool{}}
}

func (l *leaver) begin(id keyspace.RangeID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.begun[id] = true
}

func (l *leaver) began(id keyspace.RangeID) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.begun[id]
}

func (l *leaver) done(id keyspace.RangeID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.begun, id)
}

// note has the leaver look whether the range's replica here still is a member.
func (l *leaver) note(id keyspace.RangeID) {
	l.mu.Lock()
	if !slices.Contains(l.todo, id) {
		l.todo = append(l.todo, id)
	}
	l.mu.Unlock()
	select {
	case l.kick <- struct{}{}:
	default:
	}
}

// again has the leaver look once more after a pause, however often it is told meanwhile.
func (l *leaver) again(id keyspace.RangeID) {
	l.mu.Lock()
	waits := l.waits[id]
	l.waits[id] = true
	l.mu.Unlock()
	if waits {
		return
	}
	l.n.after(leaveRetry, func() {
		l.mu.Lock()
		delete(l.waits, id)
		l.mu.Unlock()
		l.note(id)
	})
}

func (l *leaver) next() (id keyspace.RangeID, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.todo) == 0 {
		return 0, false
	}
	id = l.todo[0]
	l.todo = slices.Delete(l.todo, 0, 1)
	return id, true
}

// run is the leaver's goroutine.
func (l *leaver) run(ctx context.Context) {
	sweep := l.n.cfg.Clock.NewTimer(leaveSweep)
	defer sweep.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-sweep.C():
			for _, r := range l.n.Replicas() {
				if l.n.expelled(r) || l.n.mergedAway(r) {
					l.note(r.id)
				}
			}
			sweep.Reset(leaveSweep)
		case <-l.kick:
		}
		for id, ok := l.next(); ok && ctx.Err() == nil; id, ok = l.next() {
			if err := l.n.leave(ctx, id); err != nil && ctx.Err() == nil {
				l.n.log.Warn("remove a replica", zap.Stringer("range", id), zap.Error(err))
				l.again(id)
			}
		}
	}
}

// Removed is raftgroup.Config's: a leader says that a replica of this node is no member
// of its group. It may be the word of a leader that has not heard of the replica yet,
// so that it is a reason to look and no more.
func (n *Node) Removed(g keyspace.GroupID, _ keyspace.ReplicaID) {
	if !g.IsSystem() {
		n.leaver.note(g.Range())
	}
}

// expelled says whether the replica is certainly no member of its group any more: the
// configuration that it has applied itself, or a newer one in the map, is without it.
// Both are committed, and no replica's id is ever used again.
func (n *Node) expelled(r *Replica) bool {
	r.mu.Lock()
	d, g, frozen := r.descriptorLocked(), r.group, r.rec.Merge.Frozen()
	if d.Generation == 0 {
		d = r.introduced
	}
	r.mu.Unlock()
	if g == nil {
		return false
	}
	self := g.Replica()
	if !hasReplica(&d, self) {
		return true
	}
	if n.cfg.Placed == nil {
		return false
	}
	now, ok := n.cfg.Placed.Descriptor(r.id, d.Span.Start)
	if !ok {
		return !frozen && n.overtaken(&d)
	}
	return !hasReplica(&now, self) && now.Newer(&d)
}

// overtaken says whether another range has come to hold the descriptor's first key after it,
// by the map. A range keeps its first key until it is absorbed: that has happened then, and
// every replica that was a member is frozen.
func (n *Node) overtaken(d *keyspace.Descriptor) bool {
	now, ok := n.cfg.Placed.At(d.Span.Start)
	return ok && now.Range != d.Range && now.Generation > d.Generation
}

func hasReplica(d *keyspace.Descriptor, id keyspace.ReplicaID) bool {
	return slices.ContainsFunc(d.Replicas, func(m keyspace.Replica) bool { return m.ID == id })
}

// leftKey is the node's own note of the newest replica of a range that has left it.
func leftKey(id keyspace.RangeID) []byte {
	return engine.NodeLocalKey(binary.BigEndian.AppendUint64([]byte("shard/left/"), uint64(id)))
}

// left returns the newest replica of the range that has left this node, 0 for none. It
// and those before it never come back: their log is gone, and with it what they have
// promised. One that began anew would vote for a leader that lacks what it has
// acknowledged, and who does not know yet that it was removed would count the vote.
func (n *Node) left(id keyspace.RangeID) (keyspace.ReplicaID, error) {
	v, ok, err := n.cfg.Engine.Get(leftKey(id))
	if err != nil || !ok {
		return 0, err
	}
	replica, w := binary.Uvarint(v)
	if w <= 0 || w != len(v) {
		return 0, fmt.Errorf("shard: range %s: %d bytes for the replica that has left", id, len(v))
	}
	return keyspace.ReplicaID(replica), nil
}

// setLeft writes the note that a replica has left.
func setLeft(b *engine.Batch, id keyspace.RangeID, replica keyspace.ReplicaID) error {
	return b.Set(leftKey(id), binary.AppendUvarint(nil, uint64(replica)))
}

// leaves is for apply: it notes that this node's replica is no member behind the change
// of the members, in the batch that makes it so.
func (r *Replica) leaves(b *engine.Batch, before, after []keyspace.Replica) error {
	for _, m := range before {
		if m.Node == r.node.cfg.Self && !slices.ContainsFunc(after, func(o keyspace.Replica) bool { return o.ID == m.ID }) {
			return setLeft(b, r.id, m.ID)
		}
	}
	return nil
}

// mergedAway says whether the merge for which the replica is frozen is certainly committed,
// and no other replica here needs what this one has at the end.
func (n *Node) mergedAway(r *Replica) bool {
	r.mu.Lock()
	m, d, absorbed := r.rec.Merge, r.descriptorLocked(), r.absorbed
	r.mu.Unlock()
	if !m.Frozen() {
		return false
	}
	target, here, err := n.record(m.Other)
	if err != nil || here && target.Merged < m.ID {
		return false
	}
	if absorbed {
		return true
	}
	if n.cfg.Placed == nil {
		return false
	}
	return n.overtaken(&d)
}

// record returns the applied record of the node's replica of a range; here says that there is
// one that is a member.
func (n *Node) record(id keyspace.RangeID) (rec command.Record, here bool, err error) {
	a, ok, err := n.cfg.Engine.Applied(id.Group())
	if err != nil || !ok {
		return rec, false, err
	}
	here = slices.ContainsFunc(a.Replicas, func(m keyspace.Replica) bool { return m.Node == n.cfg.Self })
	rec, err = command.DecodeRecord(a.Payload)
	return rec, here, err
}

// absorbDurably returns once a crash cannot take the target of a merge back to where it
// needs the frozen replica again.
func (n *Node) absorbDurably(ctx context.Context, r *Replica) error {
	r.mu.Lock()
	m := r.rec.Merge
	r.mu.Unlock()
	target, ok, err := n.durableRecord(m.Other)
	if err == nil && (!ok || target.Merged < m.ID) {
		err = n.cfg.Engine.Flush(ctx)
	}
	if err != nil {
		return fmt.Errorf("shard: range %s: that range %s has absorbed it: %w", r.id, m.Other, err)
	}
	return nil
}

// leave removes the node's replica of the range and its data if it is no member any
// more. Until that is durable its span is kept from others.
func (n *Node) leave(ctx context.Context, id keyspace.RangeID) error {
	r := n.Replica(id)
	if r == nil {
		return n.leaveStored(ctx, id)
	}
	merged := n.mergedAway(r)
	if !merged && !n.expelled(r) || mutation.Is(mutation.NeverRemoved) {
		return nil
	}
	r.mu.Lock()
	begun := r.stopped // by an attempt that failed, or by a merge: it makes no child any more
	r.mu.Unlock()
	if s := r.group.Status(); !begun && s.Applied < s.Commit {
		// One of these entries may be a split, which makes a child: without this log nothing
		// would, and the child's own log may stand in the wal since before a crash.
		n.leaver.again(id)
		return nil
	}
	if merged {
		if err := n.absorbDurably(ctx, r); err != nil {
			return err
		}
	}
	r.expel()
	if err := n.noteLeft(ctx, r); err != nil {
		return err
	}
	if err := n.removeReplica(ctx, id); err != nil {
		return err
	}
	r.forgetLocks() // nothing is applied to it any more
	// Until here it has held its span.
	n.mu.Lock()
	delete(n.replicas, id)
	n.metrics.replicas.Set(float64(len(n.replicas)))
	n.mu.Unlock()
	r.log.Info("removed a replica that is no member any more")
	return nil
}

// noteLeft makes it durable that a replica has left of which no durable applied record
// says so: one without data, or a child whose first record no flush has reached. After a
// crash behind the tombstone deleteData could not say which one it was, and a split that
// is replayed would make it anew.
func (n *Node) noteLeft(ctx context.Context, r *Replica) error {
	_, durable, err := n.cfg.Engine.DurableApplied(r.id.Group())
	if err != nil || durable {
		return err
	}
	b := n.cfg.Engine.NewBatch()
	defer b.Close()
	if err = setLeft(b, r.id, r.group.Replica()); err == nil {
		err = b.Commit()
	}
	if err == nil {
		err = n.cfg.Engine.Flush(ctx)
	}
	if err != nil {
		return fmt.Errorf("shard: range %s: note that replica %d has left: %w", r.id, r.group.Replica(), err)
	}
	return nil
}

// leaveStored removes what the engine has of a replica that was not opened, since the
// configuration in its record is without it.
func (n *Node) leaveStored(ctx context.Context, id keyspace.RangeID) error {
	a, ok, err := n.cfg.Engine.Applied(id.Group())
	if err != nil || !ok && !n.leaver.began(id) {
		return err
	}
	left, err := n.left(id)
	if err != nil {
		return err
	}
	for _, m := range a.Replicas {
		if m.Node == n.cfg.Self && m.ID > left {
			return nil // it is being opened
		}
	}
	n.leaver.begin(id) // what was committed when a flush fails is removed once more
	if err := n.removeReplica(ctx, id); err != nil {
		return err
	}
	n.leaver.done(id)
	if n.Replica(id) == nil {
		n.unclaim(id)
	}
	n.log.Info("removed what was left of a replica", zap.Stringer("range", id))
	return nil
}

// removeReplica removes group, log and data for good. What fails is to be repeated.
func (n *Node) removeReplica(ctx context.Context, id keyspace.RangeID) error {
	err := n.cfg.Groups.remove(ctx, id.Group(), func(b *engine.Batch) error {
		a, ok, err := n.cfg.Engine.Applied(id.Group())
		if err != nil {
			return err
		}
		if !ok {
			return n.deleteData(b, id.Group(), nil)
		}
		return n.deleteData(b, id.Group(), &a)
	})
	if err != nil {
		return fmt.Errorf("shard: remove the replica of range %s: %w", id, err)
	}
	return nil
}

// expel ends the replica: whoever asks for the range here is sent elsewhere, and no
// removal of old versions is under way any more.
func (r *Replica) expel() {
	r.end(kverror.New(kverror.RangeNotHere, "range %s was moved away from node %s", r.id, r.node.cfg.Self))
	r.standStillForGood()
}

// standStillForGood returns when no removal of old versions is under way, and none will be.
func (r *Replica) standStillForGood() {
	r.mu.Lock()
	r.receiving = true
	running := r.removing
	r.mu.Unlock()
	if running != nil {
		<-running
	}
}
