package shard

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"time"

	"go.uber.org/zap"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/load"
	"github.com/skeindb/skein/shard/load/heat"
	"github.com/skeindb/skein/shard/pipeline"
)

// RangeMeasure is what one replica of this node knows of its range's size and, where it
// leads, of its load.
type RangeMeasure struct {
	Descriptor keyspace.Descriptor
	// Leads says that this replica leads its range and serves it.
	Leads bool
	// Term is the raft term in which it leads, 0 where it does not.
	Term uint64
	load.Figures
}

// Measures returns what is known of every replica of this node, in no order. It asks
// nothing of the store.
func (s *Store) Measures() []RangeMeasure {
	all := s.Replicas()
	out := make([]RangeMeasure, 0, len(all))
	for _, r := range all {
		r.mu.Lock()
		if r.rec.Generation != 0 && !r.stopped {
			out = append(out, r.measureLocked())
		}
		r.mu.Unlock()
	}
	return out
}

func (r *Replica) measureLocked() RangeMeasure {
	m := RangeMeasure{Descriptor: r.descriptorLocked(), Leads: r.pipe.Leads(), Figures: r.load.Figures()}
	if m.Leads {
		m.Term = r.pipe.Term()
	}
	return m
}

// liveKeys returns how many keys the ranges have that this node leads, as far as they are counted.
func (s *Store) liveKeys() (n int64) {
	for _, r := range s.Replicas() {
		r.mu.Lock()
		if r.pipe.Leads() && r.rec.Counted {
			n += r.rec.Live
		}
		r.mu.Unlock()
	}
	return n
}

// Count implements pipeline.Range: it counts a call that was evaluated.
func (e *pipelineEnv) Count(c *pipeline.Call) {
	writes := c.Changes()
	if s, ok := c.Operation().(*txnCommand); ok {
		if _, writes = s.op.(*rangeapi.Prepare); !writes {
			return // it goes on with what was counted
		}
	}
	if !writes {
		if e.load.Read() {
			e.load.Look(load.Request{Span: callSpan(c)})
		}
		return
	}
	if bytes := uint64(c.Bytes() - pipeline.CallOverheadBytes); e.load.Wrote(bytes) {
		e.load.Look(load.Request{Span: callSpan(c), Writes: true, Bytes: bytes})
	}
}

// countReadLocked counts a read that does not go through the pipeline.
func (r *Replica) countReadLocked(bounds keyspace.Span) {
	if r.load.Read() {
		r.load.Look(load.Request{Span: bounds})
	}
}

// countReadHereLocked counts a read of what is applied here.
func (r *Replica) countReadHereLocked(op proto.Message) {
	if r.load.ReadHere() {
		bounds, _ := rangeapi.Bounds(op)
		r.load.Look(load.Request{Span: bounds})
	}
}

// callSpan is where a call's keys lie.
func callSpan(c *pipeline.Call) keyspace.Span {
	op, cmd := c.Asks()
	if cmd == nil {
		s, _ := rangeapi.Bounds(op)
		return s
	}
	var first []byte
	if p, ok := cmd.(*rangeapi.Prepare); ok {
		p.Keys(func(key, _ []byte, writes bool) {
			if first == nil || writes {
				first = key
			}
		})
	}
	return keyspace.Single(first)
}

// someLoads returns the loads of at most that many replicas, in no order.
func (s *Store) someLoads(most int) []*load.Range {
	s.mu.RLock()
	defer s.mu.RUnlock()
	some := make([]*load.Range, 0, min(most, len(s.replicas)))
	for _, r := range s.replicas {
		if len(some) == most {
			break
		}
		some = append(some, &r.load)
	}
	return some
}

// runMeter runs the meter until the node stops.
func (s *Store) runMeter() {
	forget := s.cfg.Engine.OnDurable(s.meter.Flushed)
	defer forget()
	s.meter.Run(s.ctx)
}

// keepHeat stores a minute of the heat map.
func (s *Store) keepHeat(at int64, c heat.Column) {
	if err := s.heat.Add(at, c); err != nil {
		s.log.Warn("a minute of the heat map is not stored", zap.Error(err))
	}
}

// Heat returns the heat map of what this node's replicas have served until about a second ago.
func (s *Store) Heat(ctx context.Context, q heat.Query) (*heat.Grid, error) {
	s.recorder.Flush()
	return s.heat.Grid(ctx, q)
}

// cutEvery is how often the store is told where ranges begin. Flushes and compactions cut their tables
// there, and a late border costs little.
const cutEvery = time.Minute

// cutTables has the tables of the store end where ranges do, until the node stops.
func (s *Store) cutTables() {
	for clock.Sleep(s.ctx, s.cfg.Clock, cutEvery) == nil {
		s.cutTablesNow()
	}
}

func (s *Store) cutTablesNow() {
	var groups []keyspace.GroupID
	var starts [][]byte
	for _, r := range s.Replicas() {
		r.mu.Lock()
		if r.rec.Generation != 0 {
			groups, starts = append(groups, r.id.Group()), append(starts, r.rec.Span.Start)
		}
		r.mu.Unlock()
	}
	slices.SortFunc(starts, bytes.Compare)
	s.cfg.Engine.CutTables(groups, starts)
}

// loadStore implements load.Store.
type loadStore struct{ *engine.Engine }

// Middle implements load.Store.
func (s loadStore) Middle(span keyspace.Span) (mvcc.Split, error) {
	return mvcc.FindSplitKey(s.Engine, span)
}

// loadOwner implements load.Owner.
type loadOwner struct{ r *Replica }

// LoadState implements load.Owner.
func (o loadOwner) LoadState() load.State {
	r := o.r
	return load.State{
		Generation: r.rec.Generation, Span: r.rec.Span,
		Leads: r.pipe.Leads(), Draining: r.pipe.Draining(), Stopped: r.stopped,
	}
}

// CanSplit implements load.Owner. A range is not split while its members change: nobody would
// look after a child's learner. It is not split while a node is silent: that node would have
// two ranges to catch up with.
func (o loadOwner) CanSplit(ctx context.Context) error {
	r := o.r
	r.mu.Lock()
	members := r.replicas
	r.mu.Unlock()
	for _, m := range members {
		if m.Role != keyspace.RoleVoter {
			return kverror.New(kverror.Busy, "range %s: its members are being changed", r.id)
		}
	}
	ps, err := r.group.Progress(ctx)
	if err != nil {
		return kverror.New(kverror.Busy, "range %s: %v", r.id, err)
	}
	for i := range ps {
		if !ps[i].NodeAlive {
			return kverror.New(kverror.Busy, "range %s: node %s is silent", r.id, ps[i].Replica.Node)
		}
	}
	return nil
}

// Split implements load.Owner.
func (o loadOwner) Split(ctx context.Context, generation keyspace.Generation, key []byte) error {
	_, err := o.r.Split(ctx, generation, key)
	return err
}

// SplitMiddle is Split at the key that halves the range's bytes.
func (r *Replica) SplitMiddle(ctx context.Context, generation keyspace.Generation) ([]keyspace.Descriptor, error) {
	d := r.Descriptor()
	h, err := r.load.Halve(ctx, d.Generation, d.Span)
	if errors.Is(err, mvcc.ErrNoSplitKey) {
		return nil, kverror.New(kverror.BadRequest, "%v", err)
	}
	if err != nil {
		return nil, err
	}
	return r.Split(ctx, generation, h.Key)
}
