// Package removal waits until every replica has removed the old versions that a compaction lets
// go. It asks nodes and knows no replica; package shard answers.
//
//	Await ─▶ leaders: Raised, node by node, in pages ─▶ marks that cover the keyspace once
//	      ─▶ replicas: Removed, each node about its own ─▶ all done
//	      ─▶ ranges have changed, or a replica is never done: from the beginning
//
// The leaders are asked first: they alone know how much of the log belongs to the compaction. Then
// all replicas have to come as far.
//
// # What if …
//
//   - Many wait at a time: One of them asks. The answer holds for all that wait for the same
//     or a lower revision. When it gives up, another one asks.
//
//   - A range has no leader: The marks leave a gap, and Await goes on until ctx ends.
//
//   - A range splits, merges or moves meanwhile: The node says so, and the leaders are asked again.
//
//   - A node does not live: It is not asked. Learners are not either: they are filled with what is
//     left, and may take their time.
package removal

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
)

// Cluster says which nodes there are and which of them live, as far as this node
// knows.
type Cluster interface {
	Nodes(ctx context.Context) ([]keyspace.NodeID, error)
	Alive(node keyspace.NodeID) bool
}

// Nodes asks nodes about their replicas.
type Nodes interface {
	// Raised returns the marks of the ranges that the node leads, ascending by id from behind
	// after, PageSize at most. The node takes note of the compacted revision.
	Raised(ctx context.Context, node keyspace.NodeID, compacted keyspace.Revision, after keyspace.RangeID) ([]Mark, error)
	// Removed compares the node's replicas with the marks. left are the ranges that have more to
	// remove; changed says that a range has split or moved since its mark was made.
	Removed(ctx context.Context, node keyspace.NodeID, marks []Mark) (left []keyspace.RangeID, changed bool, err error)
}

// Waiter waits for removal on behalf of one node.
type Waiter struct {
	Clock clock.Clock
	Nodes Nodes
	// turn is nil where nobody waits.
	turn atomic.Pointer[turn]
}

const (
	// PageSize bounds the ranges of one question about removal.
	PageSize = 1000
	// The pauses between two questions of one node grow from first to last by doubling.
	pauseFirst = 2 * time.Millisecond
	pauseLast  = 100 * time.Millisecond
	// rounds is how many questions in vain a node is asked before its ranges' leaders
	// are asked again: some 5 s. A replica that was moved away is never done.
	rounds = 50
)

// Mark says how far the replicas of a range must have come to have removed everything.
type Mark struct {
	// Descriptor is the leader's.
	Descriptor keyspace.Descriptor `json:"descriptor"`
	// Index is the leader's applied index. A replica that has applied as much and has
	// nothing to remove is done.
	Index uint64 `json:"index"`
	// Raised says that the range's compacted revision covers the cluster's, or would remove
	// nothing more.
	Raised bool `json:"raised"`
}

// errRangesChanged says that the ranges are others than those that were asked about.
var errRangesChanged = errors.New("shard: ranges have changed since they were asked about")

// turn is the one wait for removal that a node has at a time.
type turn struct {
	upTo keyspace.Revision
	// done is closed when it has ended, and came says then that all is removed.
	done chan struct{}
	came bool
}

// Await returns nil once every replica on a live node has removed the versions that a compaction at
// the revision lets go. The compaction must be committed; the nodes hear of it by this call. A range
// without a quorum keeps Await waiting until ctx ends.
func (w *Waiter) Await(ctx context.Context, cluster Cluster, compacted keyspace.Revision) error {
	own := &turn{upTo: compacted, done: make(chan struct{})}
	for !w.turn.CompareAndSwap(nil, own) {
		other := w.turn.Load()
		if other == nil {
			continue
		}
		select {
		case <-other.done:
		case <-ctx.Done():
			return fmt.Errorf("await removal up to revision %d, behind that up to %d: %w", compacted, other.upTo, ctx.Err())
		}
		if other.came && other.upTo >= compacted {
			return nil
		}
	}
	err := w.await(ctx, cluster, compacted)
	own.came = err == nil
	w.turn.Store(nil)
	close(own.done)
	return err
}

// await asks the nodes until all is removed.
func (w *Waiter) await(ctx context.Context, cluster Cluster, compacted keyspace.Revision) error {
	var last error
	for pause := pauseFirst; ; pause = min(2*pause, pauseLast) {
		nodes, err := cluster.Nodes(ctx)
		if err == nil {
			err = w.awaitOn(ctx, cluster, nodes, compacted)
		}
		if err == nil {
			return nil
		}
		if ctx.Err() == nil {
			last = err
			err = clock.Sleep(ctx, w.Clock, pause)
		}
		if err != nil {
			return fmt.Errorf("await removal up to revision %d: %w (last: %w)", compacted, err, last)
		}
	}
}

// awaitOn asks the leaders first: they alone know how much of the log belongs
// to the compaction. Then all replicas have to come as far.
func (w *Waiter) awaitOn(ctx context.Context, cluster Cluster, nodes []keyspace.NodeID, compacted keyspace.Revision) error {
	led := make([][]Mark, len(nodes))
	leaders, lctx := errgroup.WithContext(ctx)
	for i, node := range nodes {
		leaders.Go(func() (err error) {
			led[i], err = w.awaitRaised(lctx, cluster, node, compacted)
			return err
		})
	}
	if err := leaders.Wait(); err != nil {
		return err
	}
	marks := slices.Concat(led...)
	if err := coverAll(marks); err != nil {
		return err
	}
	replicas, rctx := errgroup.WithContext(ctx)
	for _, node := range nodes {
		own := slices.DeleteFunc(slices.Clone(marks), func(m Mark) bool {
			// A learner is filled with what is left; it may take its time.
			return !slices.ContainsFunc(m.Descriptor.Replicas, func(r keyspace.Replica) bool {
				return r.Node == node && r.Role != keyspace.RoleLearner
			})
		})
		replicas.Go(func() error { return w.awaitRemoved(rctx, cluster, node, own) })
	}
	return replicas.Wait()
}

// awaitRaised returns the marks of all ranges that the node leads, once all are
// raised; none of a node that does not live.
func (w *Waiter) awaitRaised(ctx context.Context, cluster Cluster, node keyspace.NodeID, compacted keyspace.Revision) ([]Mark, error) {
	var all []Mark
	var after keyspace.RangeID
	for pause := pauseFirst; cluster.Alive(node); {
		marks, err := w.Nodes.Raised(ctx, node, compacted, after)
		raised := err == nil && !slices.ContainsFunc(marks, func(m Mark) bool { return !m.Raised })
		if raised {
			all = append(all, marks...)
			if len(marks) < PageSize {
				return all, nil
			}
			after, pause = marks[len(marks)-1].Descriptor.Range, pauseFirst
			continue
		}
		if err := w.pause(ctx, &pause, err); err != nil {
			return nil, err
		}
	}
	return nil, nil
}

// awaitRemoved waits until the node has removed what the marks ask for, or does not
// live any more.
func (w *Waiter) awaitRemoved(ctx context.Context, cluster Cluster, node keyspace.NodeID, marks []Mark) error {
	for pause, vain := pauseFirst, 0; len(marks) > 0 && cluster.Alive(node); vain++ {
		if vain == rounds {
			return fmt.Errorf("%w: %d of them are not done on node %s", errRangesChanged, len(marks), node)
		}
		page := marks[:min(len(marks), PageSize)]
		notYet, changed, err := w.Nodes.Removed(ctx, node, page)
		if err == nil && changed {
			return errRangesChanged
		}
		if err == nil {
			left := slices.Clone(marks[len(page):])
			for _, m := range page {
				if slices.Contains(notYet, m.Descriptor.Range) {
					left = append(left, m) // behind those that were not asked about yet
				}
			}
			come := len(left) < len(marks)
			if marks = left; come {
				pause, vain = pauseFirst, 0
				continue
			}
		}
		if err := w.pause(ctx, &pause, err); err != nil {
			return err
		}
	}
	return nil
}

// pause waits before a node is asked again. why is the error of the last
// question, nil where the answer was only not yet the one hoped for.
func (w *Waiter) pause(ctx context.Context, pause *time.Duration, why error) error {
	if err := clock.Sleep(ctx, w.Clock, *pause); err != nil {
		return errors.Join(err, why)
	}
	*pause = min(2**pause, pauseLast)
	return nil
}

// coverAll checks that the ranges of the marks cover the keyspace exactly once. A range without a
// leader leaves a gap; a range that split between two questions overlaps.
func coverAll(marks []Mark) error {
	slices.SortFunc(marks, func(a, b Mark) int {
		return bytes.Compare(a.Descriptor.Span.Start, b.Descriptor.Span.Start)
	})
	var end []byte
	for i := range marks {
		s := marks[i].Descriptor.Span
		if !bytes.Equal(s.Start, end) || i > 0 && len(end) == 0 {
			return fmt.Errorf("%w: %s follows on %q", errRangesChanged, s, end)
		}
		end = s.End
	}
	if len(marks) == 0 || len(end) != 0 {
		return fmt.Errorf("%w: nobody leads what lies behind %q", errRangesChanged, end)
	}
	return nil
}
