package shard

import (
	"context"
	"fmt"

	"go.uber.org/zap"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/shard/eval"
	"github.com/skeindb/skein/shard/locktable"
	"github.com/skeindb/skein/shard/pipeline"
	"github.com/skeindb/skein/shard/removal"
	"github.com/skeindb/skein/shard/replicas"
)

func newLifecycle(s *Store) *replicas.Manager {
	return replicas.New(replicas.Config{
		Self: s.cfg.Self, Clock: s.cfg.Clock, Engine: s.cfg.Engine, Groups: s.cfg.Groups, Owner: lifecycleOwner{s}, Placed: s.cfg.Placed,
		Look: func(ctx context.Context, node keyspace.NodeID, id keyspace.RangeID) (keyspace.Descriptor, error) {
			d, _, err := s.admins.Look(ctx, node, id)
			return d, err
		},
		Room: s.Room, After: s.after, Logger: s.log,
	})
}

// Create makes this node's replicas of new ranges durable and opens them, see
// replicas.Manager.Create.
func (s *Store) Create(ctx context.Context, ds []keyspace.Descriptor) error {
	return s.lifecycle.Create(ctx, ds)
}

// Unknown is raftgroup.Config's: a node speaks to a replica that is not open here.
func (s *Store) Unknown(from keyspace.NodeID, g keyspace.GroupID, to keyspace.ReplicaID) {
	s.lifecycle.Unknown(from, g, to)
}

// Removed is raftgroup.Config's: a leader says that a replica of this node is no member of its
// group.
func (s *Store) Removed(g keyspace.GroupID, _ keyspace.ReplicaID) {
	if !g.IsSystem() {
		s.lifecycle.Check(g.Range())
	}
}

// lifecycleOwner is a Store as package replicas sees it.
type lifecycleOwner struct{ store *Store }

func (o lifecycleOwner) Replica(id keyspace.RangeID) replicas.Replica {
	if r := o.store.Replica(id); r != nil {
		return lifecycleReplica{r}
	}
	return nil
}

func (o lifecycleOwner) Replicas() []replicas.Replica {
	all := o.store.Replicas()
	rs := make([]replicas.Replica, len(all))
	for i, r := range all {
		rs[i] = lifecycleReplica{r}
	}
	return rs
}

func (o lifecycleOwner) Open(s *replicas.Start) error {
	r := o.store.newReplica(s.Range)
	r.introduced = s.Introduced
	if s.Unreadable != nil {
		o.store.cfg.Groups.KeepClosed(s.Range.Group(), s.Replica, s.Unreadable.Error())
	}
	if s.Applied != nil {
		if err := r.loadStored(s); err != nil {
			return err
		}
	}
	return o.store.open(r, s.Replica)
}

func (o lifecycleOwner) Drop(id keyspace.RangeID) {
	o.store.Replica(id).forgetLocks() // nothing is applied to it any more
	// Until here it has held its span.
	o.store.mu.Lock()
	defer o.store.mu.Unlock()
	delete(o.store.replicas, id)
	o.store.metrics.replicas.Set(float64(len(o.store.replicas)))
}

func (o lifecycleOwner) DeleteNotes(b *engine.Batch, id keyspace.RangeID) error {
	return b.Delete(removal.NoteKey(id))
}

// lifecycleReplica is a Replica as package replicas sees it.
type lifecycleReplica struct{ r *Replica }

func (l lifecycleReplica) Range() keyspace.RangeID { return l.r.id }

func (l lifecycleReplica) State() replicas.State {
	l.r.mu.Lock()
	defer l.r.mu.Unlock()
	return l.r.lifecycleStateLocked()
}

func (l lifecycleReplica) CaughtUp() bool {
	s := l.r.group.Status()
	return s.Applied >= s.Commit
}

func (l lifecycleReplica) Campaign() { l.r.group.Campaign() }
func (l lifecycleReplica) Expel()    { l.r.expel() }

func (r *Replica) lifecycleStateLocked() replicas.State {
	s := replicas.State{
		Descriptor: r.descriptorLocked(), Introduced: r.introduced, Merge: r.rec.Merge,
		Absorbed: r.absorbed, Ended: r.stopped, KnowsLeader: r.leader.Leader != 0,
	}
	if r.group != nil {
		s.Replica = r.group.Replica()
	}
	return s
}

// loadStored gives a replica that is not open yet its stored state.
func (r *Replica) loadStored(s *replicas.Start) (err error) {
	a := s.Applied
	r.applying = applyState{rec: s.Record, confIndex: a.ConfIndex, replicas: a.Replicas, term: a.Term, txns: s.Txns}
	r.rec, r.confIndex, r.replicas = s.Record, a.ConfIndex, a.Replicas
	r.applying.advance(true)
	r.resolved = r.applying.resolved
	r.position = raftgroup.Position{Index: a.Index, Term: a.Term}
	r.live.Reset(s.Record.LastRevision)
	r.loadTableLocked(&s.Txns)
	if r.upkeep.removedTo, err = r.store.loadRemoval(&s.Record); err != nil {
		return err
	}
	r.store.heard(s.Record.LastRevision)
	raise(&r.store.sequencerTerm, int64(s.Record.SequencerTerm))
	return nil
}

func (s *Store) newReplica(id keyspace.RangeID) *Replica {
	r := &Replica{
		store: s, id: id, data: eval.NewEngineStore(s.cfg.Engine), locks: locktable.New(&s.locks),
		log: s.log.WithLazy(zap.Stringer("range", id)), epochs: eval.NewKeyEpochs(s.cache),
	}
	r.pipe.Init(pipeline.Config{
		Shared: &s.pipes, Range: id, Log: r.log, Env: (*pipelineEnv)(r), Mu: &r.mu, Record: &r.rec, Locks: &r.locks, Epochs: &r.epochs,
	})
	if s.isDraining() {
		r.pipe.Drain()
	}
	r.reader.Init(eval.ReadConfig{
		Shared: &s.readers, Range: id, Store: r.data, Applied: &r.appliedBatches,
		Guard: &r.mu, Record: &r.rec, Live: &r.live, Epochs: &r.epochs, Leader: &r.pipe,
	})
	r.feeds.Init(s.feeds, id, &r.mu, feedSource{r})
	r.load = s.meter.Range(id, &r.mu, loadOwner{r}, r.log)
	return r
}

// open opens the replica's group and lets requests find it.
func (s *Store) open(r *Replica, self keyspace.ReplicaID) error {
	g, err := s.cfg.Groups.open(r.id.Group(), self, r.position, r)
	if err != nil {
		return fmt.Errorf("shard: open range %s as replica %d: %w", r.id, self, err)
	}
	r.opened(g)
	s.mu.Lock()
	s.replicas[r.id] = r
	stopped, draining := s.stopped, s.draining
	s.metrics.replicas.Set(float64(len(s.replicas)))
	s.mu.Unlock()
	if draining {
		r.mu.Lock()
		r.pipe.Drain()
		r.mu.Unlock()
	}
	if stopped {
		r.stop()
	}
	s.maintenance.note(r)
	r.mu.Lock()
	r.load.Measure()
	r.mu.Unlock()
	s.ids.Prefetch()
	return nil
}

// expel ends the replica: whoever asks for the range here is sent elsewhere, and no
// removal of old versions is under way any more.
func (r *Replica) expel() {
	r.end(kverror.New(kverror.RangeNotHere, "range %s was moved away from node %s", r.id, r.store.cfg.Self))
	r.stopRemoval()
}
