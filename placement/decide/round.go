package decide

import (
	"fmt"
	"slices"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
)

const (
	// reviewed bounds the replicas that a round reviews because of the state of their
	// nodes; the last node may bring it above that.
	reviewed = 1 << 17
	// patrolled bounds the ranges that a round reviews because it is their turn, and
	// patrolEvery is how often one does: there is also a round for each operation that ends.
	patrolled   = 1 << 13
	patrolEvery = time.Second
	// scanned bounds the ranges of one need that a round tries to do something for, in
	// multiples of Settings.MaxOperations.
	scanned = 2
)

// Abandon says that an operation under way cannot succeed any more and should be given
// up: its executor stops it and reports that it ended.
type Abandon struct {
	Range keyspace.RangeID
	Why   string
}

// Round is the outcome of one round of decisions.
type Round struct {
	// Operations are new, most urgent first, and count as under way until Finish.
	Operations []Operation
	Abandon    []Abandon
}

// Decide returns what should be done now.
func (c *Cluster) Decide(now clock.Time) Round {
	c.now = max(c.now, now)
	c.round = nil
	abandoned := c.watchSilence()
	c.reviewStale()
	c.reindex()
	c.patrolSome()
	if c.settings.Paused {
		return Round{Abandon: abandoned}
	}
	abandoned = append(abandoned, c.leaveFallbacks()...)
	c.shares()
	for need := QuorumRisk; need <= Cold; need++ {
		if need == Cold {
			c.balance()
		}
		c.serve(need)
	}
	return Round{Operations: c.round, Abandon: abandoned}
}

// watchSilence finds the nodes that have been silent for long.
func (c *Cluster) watchSilence() []Abandon {
	var out []Abandon
	for _, n := range slices.Clone(c.silent) {
		age := c.now.Sub(n.SilentSince)
		// A node that is to leave, and is silent, is mostly one that was lost.
		if !n.swept && (age >= c.settings.AbandonAfter || n.State == Decommissioning) {
			n.swept = true
			out = append(out, n.needing()...)
		}
		if dead := c.settings.Lost(&n.Node, c.now); n.dead != dead {
			n.dead = dead
			c.touch(n)
			c.reviewLater(n)
		}
		if !n.known && len(n.replicas) == 0 && n.receiving+n.sending+n.tasks == 0 {
			c.unindex(n)
			n.Silent = false
			c.noteSilence(n)
			delete(c.nodes, n.ID)
		}
	}
	return out
}

// needing returns the operations that the silent node holds up.
func (n *node) needing() []Abandon {
	var out []Abandon
	for _, r := range n.replicas {
		if op := r.op; op != nil && op.Range == r.Descriptor.Range &&
			(op.To == n.ID || op.Source == n.ID || op.Lead == n.ID) {
			out = append(out, Abandon{op.Range, fmt.Sprintf("%s: node %s is silent", op.String(), n.ID)})
		}
	}
	slices.SortFunc(out, func(a, b Abandon) int { return compare(a.Range, b.Range) })
	return out
}

// reviewStale reviews the ranges of nodes whose state has changed.
func (c *Cluster) reviewStale() {
	c.reindex()
	done := 0
	for len(c.stale) > 0 && done < c.reviewed {
		n := c.stale[0]
		c.stale = c.stale[1:]
		n.queued = false
		done += len(n.replicas)
		for _, r := range n.replicas {
			c.review(r)
		}
	}
}

// patrolSome reviews the next ranges in turn, if some are due.
func (c *Cluster) patrolSome() {
	if c.now < c.patrolAt {
		return
	}
	c.patrolAt = c.now.Add(patrolEvery)
	for range min(patrolled, len(c.all)) {
		if c.patrol >= len(c.all) {
			c.patrol = 0
		}
		c.review(c.all[c.patrol])
		c.patrol++
	}
}

// serve decides operations for the ranges with a need.
func (c *Cluster) serve(need Reason) {
	q := &c.queues[need]
	for range min(len(q.items), scanned*c.settings.MaxOperations) {
		if c.underWay >= c.settings.MaxOperations || len(q.items) == 0 {
			return
		}
		if q.next >= len(q.items) {
			q.next = 0
		}
		r := q.items[q.next]
		// It was looked at up to a patrol ago, and what it needs hangs on more than itself.
		if c.review(r); r.need != need {
			continue
		}
		// What is decided leaves the queue, and another takes its place there.
		if op, h := c.act(r); h == free {
			c.emit(r, op)
		} else {
			q.next++
		}
	}
}

// act returns the operation that the range needs most, or what holds it up.
func (c *Cluster) act(r *rng) (Operation, hold) {
	switch r.need {
	case QuorumRisk, Repair:
		op, h := c.repair(r)
		if h != free && c.handsOver(r) {
			return c.handOver(r)
		}
		return op, h
	case Joint:
		return c.leaveJoint(r)
	case Learner:
		return c.learner(r)
	case Drain:
		return c.drain(r)
	case Zones:
		return c.spread(r)
	case Factor:
		return c.factor(r)
	case Cold:
		return c.merge(r)
	default:
		panic(fmt.Sprintf("decide: range %s is queued for %s", r.Descriptor.Range, r.need))
	}
}
