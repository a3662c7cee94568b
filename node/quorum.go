package node

import (
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/node/operate"
	"github.com/skeindb/skein/shard"
)

const (
	// startPatience is for how long after its start a node does not miss others: they may start at the same time.
	startPatience = 5 * time.Second
	// leadersEvery is how many looks lie between two lines about leaders.
	leadersEvery = 5
)

// watcher tells the operator what the node hears: what has no quorum, and whose leaders have changed. It looks once in an
// election timeout, so that however much happens its lines are few.
type watcher struct {
	log   *zap.Logger
	clock clock.Clock
	begun clock.Time
	look  func() operate.Outage
	moves func() shard.Moves
	// ranges has no label, and no value either until one is known.
	ranges *prometheus.GaugeVec
	// since is when the present outage was seen first; 0 without one. told is what the log has of it.
	since clock.Time
	told  told
	// grown says that the last look has seen what the log does not have.
	grown bool
	looks int
}

// told is what the log has of an outage. Each part is told once: a node at most as silent and as one with replicas in quarantine. So the
// lines of an outage are bounded by its nodes.
type told struct {
	ranges, placement bool
	silent, closed    map[keyspace.NodeID]bool
}

// any says whether the log has anything.
func (t *told) any() bool { return t.ranges || t.placement }

// lacks says whether an outage has something that is not told.
func (t *told) lacks(o *operate.Outage) bool {
	untold := func(has map[keyspace.NodeID]bool, all []operate.Silent) bool {
		return slices.ContainsFunc(all, func(s operate.Silent) bool { return !has[s.ID] })
	}
	return o.Any() && (o.Placement && !t.placement || o.Ranges > 0 && !t.ranges || untold(t.silent, o.Silent) || untold(t.closed, o.Closed))
}

// add notes that an outage is told.
func (t *told) add(o *operate.Outage) {
	if t.silent == nil {
		t.silent, t.closed = map[keyspace.NodeID]bool{}, map[keyspace.NodeID]bool{}
	}
	t.ranges, t.placement = t.ranges || o.Ranges > 0, t.placement || o.Placement
	for _, s := range o.Silent {
		t.silent[s.ID] = true
	}
	for _, s := range o.Closed {
		t.closed[s.ID] = true
	}
}

// observe runs a watcher until the node stops.
func (c *Core) observe() {
	seen := &operate.Seen{}
	o := &watcher{
		log: c.log, clock: c.o.Clock, begun: c.o.Clock.Now(), look: func() operate.Outage { return c.admin.Outage(c.ctx, seen) }, moves: c.shards.TakeMoves,
		ranges: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "skein_ranges_without_quorum", Help: "Ranges of the cluster without a quorum, by the nodes that this one hears and replicas in quarantine; absent in its first seconds.",
		}, nil),
	}
	if c.o.Registry != nil {
		c.o.Registry.MustRegister(o.ranges)
	}
	c.wait.Go(func() {
		for clock.Sleep(c.ctx, c.o.Clock, clock.UntilNext(c.o.Clock, c.o.Election)) == nil {
			o.step()
		}
	})
	c.wait.Go(func() {
		for err := error(nil); err == nil; err = clock.Sleep(c.ctx, c.o.Clock, clock.UntilNext(c.o.Clock, troubleEvery)) {
			c.troubles.look()
		}
	})
}

func (o *watcher) step() {
	now := o.clock.Now()
	o.leaders()
	if now.Sub(o.begun) < startPatience {
		return
	}
	out := o.look()
	if out.Unsure && !out.Any() {
		o.grown = false
		return // it is not known to be over
	}
	lacks := o.told.lacks(&out)
	o.ranges.WithLabelValues().Set(float64(out.Ranges))
	grown := o.grown
	o.grown = lacks
	switch {
	case !out.Any():
		if o.told.any() {
			o.log.Info("all ranges and the placement group have a quorum again", zap.Duration("after", now.Sub(o.since)))
		}
		o.since, o.told = 0, told{}
	case o.since == 0:
		o.since = now // the next look says whether it lasts
	case lacks && grown:
		o.told.add(&out)
		o.log.Error("no quorum for "+out.What()+": "+out.Who(), zap.Int("ranges", out.Ranges), zap.Bool("placement", out.Placement), zap.String("next", out.Next()))
	}
}

// leaders logs which leaderships have come and gone.
func (o *watcher) leaders() {
	if o.looks++; o.looks%leadersEvery != 0 {
		return
	}
	if m := o.moves(); m.Gained.Count+m.Lost.Count > 0 {
		o.log.Info("leaders of ranges have changed: this node has begun to lead, and ceased",
			zap.Int("gained", m.Gained.Count), zap.Stringers("first-gained", m.Gained.First),
			zap.Int("lost", m.Lost.Count), zap.Stringers("first-lost", m.Lost.First))
	}
}
