package shard

import (
	"bytes"
	"context"
	"fmt"
	"strconv"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/shard/command"
	"github.com/skeindb/skein/shard/eval"
)

// A split waits up to splitLagWait for a live follower that lags, and looks every
// splitLagPoll. A follower that applies the split late cannot vote for the child. But a
// slow one must not hold up the split.
const (
	splitLagWait = 2 * time.Second
	splitLagPoll = 20 * time.Millisecond
)

// splitLagEntries is how far behind a follower may be and still not count as lagging.
const splitLagEntries = 64

// pendingChange is a split, or a step of a merge, that this leader has proposed.
type pendingChange struct {
	kind command.Kind
	// leaving is what this range may not hold any more once it is applied, nil for nothing.
	leaving *keyspace.Span
	// child is that of a split.
	child keyspace.RangeID
	// done is closed when the fate is known, which err then tells.
	done chan struct{}
	err  error
	// made is the child's descriptor, if err is nil.
	made keyspace.Descriptor
}

// takes says whether a part of the span may leave.
func (p *pendingChange) takes(s keyspace.Span) bool {
	return p != nil && p.leaving != nil && p.leaving.Overlaps(s)
}

// appliedSplit is what a replica has to do for a split that it has applied.
type appliedSplit struct {
	child    keyspace.RangeID
	rec      command.Record
	replicas []keyspace.Replica
}

// maxChildren bounds the ranges that a replica remembers to have split off.
const maxChildren = 8

func (a *appliedSplit) descriptor() keyspace.Descriptor {
	return a.rec.Descriptor(raftgroup.InitIndex, a.replicas)
}

func changeFate(o *outcome) error {
	if o.ok {
		return nil
	}
	return kverror.New(kverror.Dropped, "the range had changed")
}

// Split cuts the range at key: this range keeps [start, key), a new one gets
// [key, end). It returns both descriptors once the split is applied here. A
// generation other than 0 must be the range's. Errors are of package kverror; with
// LeaderChanged the split may yet happen.
func (r *Replica) Split(ctx context.Context, generation keyspace.Generation, key []byte) ([]keyspace.Descriptor, error) {
	term, err := r.checkSplit(generation, key)
	if err != nil {
		return nil, err
	}
	if err := r.store.Room(1); err != nil {
		return nil, fmt.Errorf("shard: split range %s: %w", r.id, err)
	}
	child, err := r.store.ids.Allocate(ctx)
	if err != nil {
		return nil, fmt.Errorf("shard: split range %s: new range id: %w", r.id, err)
	}
	r.awaitFollowers(ctx)
	if err := r.closePipeline(ctx); err != nil {
		r.reopen()
		return nil, err
	}
	defer r.reopen()
	sp, err := r.proposeSplit(term, generation, key, child)
	if err != nil {
		return nil, err
	}
	select {
	case <-sp.done:
	case <-ctx.Done():
		// The pipeline stays closed by the split itself until its fate is known.
		return nil, kverror.New(kverror.LeaderChanged, "split range %s at %q: %v", r.id, key, ctx.Err())
	}
	if sp.err != nil {
		return nil, fmt.Errorf("shard: split range %s at %q: %w", r.id, key, sp.err)
	}
	return []keyspace.Descriptor{r.Descriptor(), sp.made}, nil
}

// checkSplit says whether the range can be split at key, and in which term.
func (r *Replica) checkSplit(generation keyspace.Generation, key []byte) (term uint64, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	span := eval.SpanFromFirst(r.rec.Span)
	switch {
	case r.stopped || r.pipe.Draining():
		return 0, r.errorLocked(kverror.Busy, "the node stops")
	case !r.pipe.Leads():
		return 0, r.errorLocked(kverror.NotLeader, "")
	case generation != 0 && generation != r.rec.Generation:
		return 0, r.errorLocked(kverror.WrongRange, fmt.Sprintf("generation %d", r.rec.Generation))
	case !span.Contains(key):
		return 0, r.errorLocked(kverror.WrongRange, fmt.Sprintf("key %q is outside of %s", key, span))
	case bytes.Equal(span.Start, key):
		return 0, kverror.New(kverror.BadRequest, "range %s begins at %q already", r.id, key)
	case r.change != nil || r.pipe.Closed():
		return 0, r.errorLocked(kverror.Busy, "another split or transfer is under way")
	case r.rec.Merge.Role != command.MergeNone:
		return 0, r.errorLocked(kverror.Busy, "the range is being merged")
	}
	for _, m := range r.replicas {
		if m.Role != keyspace.RoleVoter && m.Role != keyspace.RoleLearner {
			return 0, r.errorLocked(kverror.Busy, "the range's members are being changed")
		}
	}
	return r.pipe.Term(), nil
}

// awaitFollowers waits a moment for live followers that lag.
func (r *Replica) awaitFollowers(ctx context.Context) {
	deadline := r.store.cfg.Clock.Now().Add(splitLagWait)
	for r.store.cfg.Clock.Now() < deadline {
		ps, err := r.group.Progress(ctx)
		if err != nil {
			return
		}
		last, lags := r.group.Status().Last, false
		for _, p := range ps {
			lags = lags || p.NodeAlive && p.Match+splitLagEntries < last
		}
		if !lags || clock.Sleep(ctx, r.store.cfg.Clock, splitLagPoll) != nil {
			return
		}
	}
}

// proposeSplit proposes the split. The pipeline is closed and empty. From here on
// nothing is answered for the span that leaves.
func (r *Replica) proposeSplit(term uint64, generation keyspace.Generation, key []byte, child keyspace.RangeID) (*pendingChange, error) {
	r.mu.Lock()
	if r.pipe.Term() != term || r.change != nil || generation != 0 && generation != r.rec.Generation {
		defer r.mu.Unlock()
		return nil, r.errorLocked(kverror.Dropped, "the range changed before the split")
	}
	sp := &pendingChange{
		kind:    command.KindSplit,
		leaving: &keyspace.Span{Start: bytes.Clone(key), End: r.rec.Span.End},
		child:   child,
	}
	entry := command.AppendHeader(nil, command.Header{Kind: command.KindSplit, Term: term, Generation: r.rec.Generation})
	entry = command.AppendSplit(entry, &command.Split{
		Key: key, Child: child, ConfIndex: r.confIndex, Replicas: r.replicas,
	})
	r.beginChangeLocked(sp)
	r.mu.Unlock()
	if err := r.proposeChange(term, entry, sp); err != nil {
		return nil, kverror.New(kverror.Dropped, "split range %s at %q: %v", r.id, key, err)
	}
	r.log.Info("proposed a split", zap.Uint64("term", term), zap.String("key", strconv.Quote(string(key))), zap.Stringer("child", child))
	return sp, nil
}

// beginChangeLocked notes a change that is about to be proposed. From here on nothing is
// evaluated, and nothing is answered for what leaves.
func (r *Replica) beginChangeLocked(p *pendingChange) {
	p.done = make(chan struct{})
	r.change = p
	r.notifyLocked() // who holds the pipeline closed for it need not any more
}

// proposeChange proposes the entry of a change that has begun.
func (r *Replica) proposeChange(term uint64, entry []byte, p *pendingChange) error {
	drop := func(err error) {
		r.mu.Lock()
		if r.change == p {
			r.endChangeLocked(kverror.New(kverror.Dropped, "the proposal was dropped: %v", err))
			r.notifyLocked()
		}
		r.mu.Unlock()
		r.pipe.Schedule()
	}
	err := r.group.Propose(term, entry, drop)
	if err != nil {
		drop(err)
	}
	return err
}

// applySplit is the split on every replica: metadata only. The child's first
// record travels in the same batch as the parent's new one.
func (r *Replica) applySplit(b *engine.Batch, body []byte, out *outcome) error {
	c, err := command.DecodeSplit(body)
	if err != nil {
		return refuse(err)
	}
	s := &r.applying
	if g := c.Child.Group(); c.Child == r.id || g.IsSystem() {
		return refuse(fmt.Errorf("range %s cannot be the child of range %s", c.Child, r.id))
	}
	if c.ConfIndex != s.confIndex || s.rec.Merge.Role != command.MergeNone || !s.rec.Span.Contains(c.Key) || bytes.Equal(s.rec.Span.Start, c.Key) {
		return nil
	}
	key := bytes.Clone(c.Key)
	child := command.Record{
		RangeID:       c.Child,
		Generation:    s.rec.Generation + 1,
		Span:          keyspace.Span{Start: key, End: s.rec.Span.End},
		LastRevision:  s.rec.LastRevision,
		SequencerTerm: s.rec.SequencerTerm,
		Compacted:     s.rec.Compacted,
		// Where nothing lives, nothing has to be counted.
		Counted: s.rec.Counted && s.rec.Live == 0,
		Fence:   s.rec.Fence,
		Load:    s.rec.Load.Cut(key),
	}
	s.rec.Span.End = key
	s.rec.Generation++
	s.rec.Counted, s.rec.Live = child.Counted, 0
	txns, err := r.splitTxns(b, key, out)
	if err != nil {
		return err
	}
	if err := r.store.lifecycle.BootstrapChild(b, &child, c.Replicas, &txns); err != nil {
		return err
	}
	out.ok, out.split = true, &appliedSplit{child: c.Child, rec: child, replicas: c.Replicas}
	return nil
}

// splitApplied has the child opened: its first record is visible.
func (s *Store) splitApplied(r *Replica, sp *appliedSplit) {
	s.metrics.splits.Inc()
	lead := r.Leader().IsLeader
	d := r.Descriptor()
	r.log.Info("split", zap.Stringer("child", sp.child), zap.Stringer("span", d.Span), zap.Stringer("leaving", sp.rec.Span))
	if lead {
		s.cfg.Reporter.ReportDescriptors(d, sp.descriptor())
	}
	s.lifecycle.OpenChild(sp.child, lead)
}
