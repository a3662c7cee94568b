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
	"github.com/skeindb/skein/shard/replicas"
)

func newLifecycle(n *Node) *replicas.Manager {
	return replicas.New(replicas.Config{
		Self: n.cfg.Self, Clock: n.cfg.Clock, Engine: n.cfg.Engine, Groups: n.cfg.Groups, Owner: lifecycleOwner{n}, Placed: n.cfg.Placed,
		Look: func(ctx context.Context, node keyspace.NodeID, id keyspace.RangeID) (keyspace.Descriptor, error) {
			d, _, err := n.admins.Look(ctx, node, id)
			return d, err
		},
		After: n.after, Logger: n.log,
	})
}

// Create makes this node's replicas of new ranges durable and opens them, see
// replicas.Manager.Create.
func (n *Node) Create(ctx context.Context, ds []keyspace.Descriptor) error {
	return n.lifecycle.Create(ctx, ds)
}

// Unknown is raftgroup.Config's: a node speaks to a replica that is not open here.
func (n *Node) Unknown(from keyspace.NodeID, g keyspace.GroupID, to keyspace.ReplicaID) {
	n.lifecycle.Unknown(from, g, to)
}

// Removed is raftgroup.Config's: a leader says that a replica of this node is no member of its
// group.
func (n *Node) Removed(g keyspace.GroupID, _ keyspace.ReplicaID) {
	if !g.IsSystem() {
		n.lifecycle.Check(g.Range())
	}
}

// lifecycleOwner is a Node as package replicas sees it.
type lifecycleOwner struct{ n *Node }

func (o lifecycleOwner) Replica(id keyspace.RangeID) replicas.Replica {
	if r := o.n.Replica(id); r != nil {
		return lifecycleReplica{r}
	}
	return nil
}

func (o lifecycleOwner) Replicas() []replicas.Replica {
	all := o.n.Replicas()
	rs := make([]replicas.Replica, len(all))
	for i, r := range all {
		rs[i] = lifecycleReplica{r}
	}
	return rs
}

func (o lifecycleOwner) Open(s *replicas.Start) error {
	r := o.n.newReplica(s.Range)
	r.introduced = s.Introduced
	if s.Applied != nil {
		if err := r.loadStored(s); err != nil {
			return err
		}
	}
	return o.n.open(r, s.Replica)
}

func (o lifecycleOwner) Drop(id keyspace.RangeID) {
	o.n.Replica(id).forgetLocks() // nothing is applied to it any more
	// Until here it has held its span.
	o.n.mu.Lock()
	defer o.n.mu.Unlock()
	delete(o.n.replicas, id)
	o.n.metrics.replicas.Set(float64(len(o.n.replicas)))
}

func (o lifecycleOwner) DeleteNotes(b *engine.Batch, id keyspace.RangeID) error {
	return b.Delete(removalKey(id))
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
	if r.removedTo, err = r.node.loadRemoval(&s.Record); err != nil {
		return err
	}
	r.node.heard(s.Record.LastRevision)
	return nil
}

func (n *Node) newReplica(id keyspace.RangeID) *Replica {
	r := &Replica{
		node: n, id: id, store: eval.NewEngineStore(n.cfg.Engine), locks: locktable.New(&n.locks),
		log: n.log.WithLazy(zap.Stringer("range", id)), epochs: eval.NewKeyEpochs(n.cache),
	}
	r.pipe.Init(pipeline.Config{
		Shared: &n.pipes, Range: id, Log: r.log, Env: (*pipelineEnv)(r), Mu: &r.mu, Record: &r.rec, Locks: &r.locks, Epochs: &r.epochs,
	})
	if n.isDraining() {
		r.pipe.Drain()
	}
	r.reader.Init(eval.ReadConfig{
		Shared: &n.readers, Range: id, Store: r.store, Applied: &r.appliedBatches,
		Guard: &r.mu, Record: &r.rec, Live: &r.live, Epochs: &r.epochs, Leader: &r.pipe,
	})
	r.feeds.Init(n.feeds, id, &r.mu, feedSource{r})
	r.load = n.meter.Range(id, &r.mu, loadOwner{r}, r.log)
	return r
}

// open opens the replica's group and lets requests find it.
func (n *Node) open(r *Replica, self keyspace.ReplicaID) error {
	g, err := n.cfg.Groups.open(r.id.Group(), self, r.position, r)
	if err != nil {
		return fmt.Errorf("shard: open range %s as replica %d: %w", r.id, self, err)
	}
	r.opened(g)
	n.mu.Lock()
	n.replicas[r.id] = r
	stopped, draining := n.stopped, n.draining
	n.metrics.replicas.Set(float64(len(n.replicas)))
	n.mu.Unlock()
	if draining {
		r.mu.Lock()
		r.pipe.Drain()
		r.mu.Unlock()
	}
	if stopped {
		r.stop()
	}
	n.maintenance.note(r)
	r.mu.Lock()
	r.load.Measure()
	r.mu.Unlock()
	n.ids.Prefetch()
	return nil
}

// expel ends the replica: whoever asks for the range here is sent elsewhere, and no
// removal of old versions is under way any more.
func (r *Replica) expel() {
	r.end(kverror.New(kverror.RangeNotHere, "range %s was moved away from node %s", r.id, r.node.cfg.Self))
	r.standStillForGood()
}

// standStillForGood stops the removal of old versions and returns when no step is under way.
func (r *Replica) standStillForGood() {
	r.mu.Lock()
	r.receiving = true
	running := r.removing
	r.mu.Unlock()
	if running != nil {
		<-running
	}
}
