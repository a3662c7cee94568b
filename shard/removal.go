package shard

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
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

const (
	// removalPage bounds the ranges of one question about removal.
	removalPage = 1000
	// The pauses between two questions of one node grow from first to last by doubling.
	removalPauseFirst = 2 * time.Millisecond
	removalPauseLast  = 100 * time.Millisecond
	// removalRounds is how many questions in vain a node is asked before its ranges' leaders
	// are asked again: some 5 s. A replica that was moved away is never done.
	removalRounds = 50
)

// removalMark says of one range how far its replicas must have come for nothing to
// be left that compaction lets go.
type removalMark struct {
	// Descriptor is the leader's.
	Descriptor keyspace.Descriptor `json:"descriptor"`
	// Index is the leader's applied index. A replica that has applied as much and has
	// nothing to remove is done.
	Index uint64 `json:"index"`
	// Raised says that the range's own compacted revision covers the cluster's, or that
	// nothing has changed since one that lets go as much.
	Raised bool `json:"raised"`
}

// removalMarks returns the marks of the ranges that this node leads, ascending by id
// from behind after, a page at most. Beforehand the node takes note of the compacted
// revision.
func (n *Node) removalMarks(compacted keyspace.Revision, after keyspace.RangeID) []removalMark {
	n.heardCompacted(compacted)
	all := slices.DeleteFunc(n.Replicas(), func(r *Replica) bool { return r.id <= after })
	slices.SortFunc(all, func(a, b *Replica) int { return cmp.Compare(a.id, b.id) })
	var marks []removalMark
	for _, r := range all {
		if m, leads := r.removalMark(compacted); leads {
			marks = append(marks, m)
			if !m.Raised {
				// It may have been at rest when the node heard of the compaction, and changed since.
				n.keeper.note(r)
			}
		}
		if len(marks) == removalPage {
			break
		}
	}
	return marks
}

func (r *Replica) removalMark(compacted keyspace.Revision) (m removalMark, leads bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.pipe.Leads() || r.rec.Generation == 0 {
		return removalMark{}, false
	}
	// What is under way, or locked, may have a revision below the compacted one.
	idle := r.rec.LastRevision < r.rec.Compacted && r.idleLocked() && !r.heldBackLocked()
	return removalMark{
		Descriptor: r.descriptorLocked(), Index: r.position.Index,
		Raised: r.rec.Compacted >= compacted || idle,
	}, true
}

// removed returns the ranges of which this node has not yet removed what the marks
// ask for. changed says that a range has split or moved since its mark was made.
func (n *Node) removed(marks []removalMark) (left []keyspace.RangeID, changed bool) {
	for i := range marks {
		m := &marks[i]
		r := n.Replica(m.Descriptor.Range)
		if r == nil {
			// It is to be opened yet, or was moved away since.
			changed = true
			continue
		}
		r.mu.Lock()
		switch {
		case r.rec.Generation > m.Descriptor.Generation:
			changed = true
		case r.position.Index < m.Index, r.rec.Compacted > r.removedTo:
			left = append(left, r.id)
		}
		r.mu.Unlock()
	}
	return left, changed
}

// errRangesChanged says that the ranges are others than those that were asked about.
var errRangesChanged = errors.New("shard: ranges have changed since they were asked about")

// removalTurn is the one wait for removal that a node has at a time.
type removalTurn struct {
	upTo keyspace.Revision
	// done is closed when it has ended, and came says then that all is removed.
	done chan struct{}
	came bool
}

// AwaitRemoval returns nil once every replica on a node that lives has removed what
// compaction at the cluster's compacted revision lets go, for as long as ctx lasts: a
// range without a quorum keeps it waiting. The nodes hear of the compacted revision by
// it, which must be committed. However many wait, one of them asks the nodes: what it
// hears is true for all that wait for as much or less.
func (c *AdminClient) AwaitRemoval(ctx context.Context, cluster Cluster, compacted keyspace.Revision) error {
	own := &removalTurn{upTo: compacted, done: make(chan struct{})}
	for turn := &c.local.removalTurn; !turn.CompareAndSwap(nil, own); {
		other := turn.Load()
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
	err := c.awaitRemoval(ctx, cluster, compacted)
	own.came = err == nil
	c.local.removalTurn.Store(nil)
	close(own.done)
	return err
}

// awaitRemoval asks the nodes until all is removed.
func (c *AdminClient) awaitRemoval(ctx context.Context, cluster Cluster, compacted keyspace.Revision) error {
	var last error
	for pause := removalPauseFirst; ; pause = min(2*pause, removalPauseLast) {
		nodes, err := cluster.Nodes(ctx)
		if err == nil {
			err = c.awaitRemovalOn(ctx, cluster, nodes, compacted)
		}
		if err == nil {
			return nil
		}
		if ctx.Err() == nil {
			last = err
			err = clock.Sleep(ctx, c.local.cfg.Clock, pause)
		}
		if err != nil {
			return fmt.Errorf("await removal up to revision %d: %w (last: %w)", compacted, err, last)
		}
	}
}

// awaitRemovalOn asks the leaders first: they alone know how much of the log belongs
// to the compaction. Then all replicas have to come as far.
func (c *AdminClient) awaitRemovalOn(ctx context.Context, cluster Cluster, nodes []keyspace.NodeID, compacted keyspace.Revision) error {
	led := make([][]removalMark, len(nodes))
	leaders, lctx := errgroup.WithContext(ctx)
	for i, node := range nodes {
		leaders.Go(func() (err error) {
			led[i], err = c.awaitRaised(lctx, cluster, node, compacted)
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
		own := slices.DeleteFunc(slices.Clone(marks), func(m removalMark) bool {
			// A learner is filled with what is left; it may take its time.
			return !slices.ContainsFunc(m.Descriptor.Replicas, func(r keyspace.Replica) bool {
				return r.Node == node && r.Role != keyspace.RoleLearner
			})
		})
		replicas.Go(func() error { return c.awaitRemoved(rctx, cluster, node, own) })
	}
	return replicas.Wait()
}

// awaitRaised returns the marks of all ranges that the node leads, once all are
// raised; none of a node that does not live.
func (c *AdminClient) awaitRaised(ctx context.Context, cluster Cluster, node keyspace.NodeID, compacted keyspace.Revision) ([]removalMark, error) {
	var all []removalMark
	var after keyspace.RangeID
	for pause := removalPauseFirst; cluster.Alive(node); {
		a, err := c.ask(ctx, node, &adminRequest{Op: adminRaised, Compacted: compacted, Range: after}, false)
		raised := err == nil && !slices.ContainsFunc(a.Marks, func(m removalMark) bool { return !m.Raised })
		if raised {
			all = append(all, a.Marks...)
			if len(a.Marks) < removalPage {
				return all, nil
			}
			after, pause = a.Marks[len(a.Marks)-1].Descriptor.Range, removalPauseFirst
			continue
		}
		if err := c.pauseRemoval(ctx, &pause, err); err != nil {
			return nil, err
		}
	}
	return nil, nil
}

// awaitRemoved waits until the node has removed what the marks ask for, or does not
// live any more.
func (c *AdminClient) awaitRemoved(ctx context.Context, cluster Cluster, node keyspace.NodeID, marks []removalMark) error {
	for pause, vain := removalPauseFirst, 0; len(marks) > 0 && cluster.Alive(node); vain++ {
		if vain == removalRounds {
			return fmt.Errorf("%w: %d of them are not done on node %s", errRangesChanged, len(marks), node)
		}
		page := marks[:min(len(marks), removalPage)]
		a, err := c.ask(ctx, node, &adminRequest{Op: adminRemoved, Marks: page}, false)
		if err == nil && a.Changed {
			return errRangesChanged
		}
		if err == nil {
			left := slices.Clone(marks[len(page):])
			for _, m := range page {
				if slices.Contains(a.Left, m.Descriptor.Range) {
					left = append(left, m) // behind those that were not asked about yet
				}
			}
			come := len(left) < len(marks)
			if marks = left; come {
				pause, vain = removalPauseFirst, 0
				continue
			}
		}
		if err := c.pauseRemoval(ctx, &pause, err); err != nil {
			return err
		}
	}
	return nil
}

// pauseRemoval waits before a node is asked again. why is the error of the last
// question, nil where the answer was only not yet the one hoped for.
func (c *AdminClient) pauseRemoval(ctx context.Context, pause *time.Duration, why error) error {
	if err := clock.Sleep(ctx, c.local.cfg.Clock, *pause); err != nil {
		return errors.Join(err, why)
	}
	*pause = min(2**pause, removalPauseLast)
	return nil
}

// coverAll checks that the ranges of the marks cover the keyspace exactly once: that
// each has a leader, and that none was asked about before and after a split.
func coverAll(marks []removalMark) error {
	slices.SortFunc(marks, func(a, b removalMark) int {
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
