package driver

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/internal/wake"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/decide"
	"github.com/skeindb/skein/placement/fsm"
)

const (
	// decideEvery lies between two rounds of decisions.
	decideEvery = time.Second
	// hearWithin is how long a new leader waits for a node that lives and has not said
	// what it leads.
	hearWithin = 30 * time.Second
	// nodeCopies bounds the copies of replicas that a node receives at a time, and those
	// that it sends.
	nodeCopies = 4
	// smallCopies bounds them while they have less than smallBytes together: half a second
	// of what a node sends and receives by default. Raftgroup has as many places.
	smallCopies = 16
	smallBytes  = 32 << 20
	// nodeDeadAfter is NodeDeadAfter's default.
	nodeDeadAfter = 5 * time.Minute
	// rangeMaxBytes, rangeSplitLoad and rangeMergeAfter are the defaults of RangeMaxBytes,
	// RangeSplitLoad and RangeMergeAfter. An hour outlives what comes once an hour.
	rangeMaxBytes   = 256 << 20
	rangeSplitLoad  = 10_000
	rangeMergeAfter = time.Hour
	// SurveyEvery lies between two looks at all ranges, for the metrics and to forget
	// what nodes have said of ranges that are gone.
	SurveyEvery = 10 * time.Second
	// leadersSought bounds the ranges whose leaders a survey asks for.
	leadersSought = 64
)

// decider decides for one leadership what is to be changed in the cluster. Each leader builds
// its knowledge anew. The map, the node table and the operations are replicated; the reports
// of nodes and their liveness are not. Its decisions go through the placement group and do not
// depend on it from there on.
type decider struct {
	s        *Driver
	term     uint64
	tracker  *Tracker
	operator *operator
	// kick asks for a round at once: an operation has ended, so there is room for another.
	kick wake.Signal
	wait sync.WaitGroup

	mu sync.Mutex
	// Guarded by mu: how operations have ended, by id, and the tasks that have.
	ended map[uint64]bool
	tasks map[keyspace.RangeID]bool

	// The rest belongs to the goroutine of run.
	c        *decide.Cluster
	settings decide.Settings
	began    clock.Time
	surveyed clock.Time
	// heard says that decisions may be made: every node that lives has told everything
	// once, or was waited for long enough.
	heard bool
	// view is what c was last brought up to; nil before the first round.
	view  *fsm.View
	nodes map[keyspace.NodeID]decide.Node
	lost  map[keyspace.NodeID]bool
	// boots say which nodes start again and again.
	boots map[keyspace.NodeID]*boots
	// members counts the nodes by which the placement group has its number of voters.
	members int
	// central says that a node that lives hears half of the others or more.
	central bool
	ranges  map[keyspace.RangeID]known
	under   map[keyspace.RangeID]fsm.Operation
	// unsettled says that feedOperations has more to do for the operations as they are.
	unsettled bool
	// ownTried counts, by node, the operations that were to bring a replica of the placement
	// group there since the last one came.
	ownTried    map[keyspace.NodeID]int
	ownFallback keyspace.NodeID
	// ownNumberAt is since when the group could have a better number of voters, 0 if it cannot.
	ownNumberAt clock.Time
	// ownCrowdedAt is since when voters of the group share a zone without need, 0 if none do.
	ownCrowdedAt clock.Time
	// handOverAt is when the group's leadership may be handed over next, and handOverPause
	// what lies between two attempts.
	handOverAt    clock.Time
	handOverPause time.Duration
	// seat says on which node the sequencer had better sit.
	seat seat
	// gathering says whether leads had better be on this node.
	gathering gathering
	// sought is the range that findLeaders has asked last.
	sought keyspace.RangeID
	// giveUp are those under way that cannot succeed any more, and why.
	giveUp map[keyspace.RangeID]string
}

// known is a range of the map, and since when it has its generation; 0 is longer than
// this leadership.
type known struct {
	row  *fsm.Range
	born clock.Time
}

func newDecider(s *Driver, term uint64, h *Tracker, o *operator) *decider {
	now := s.o.Clock.Now()
	d := &decider{
		s: s, term: term, tracker: h, operator: o, kick: wake.New(),
		ended: map[uint64]bool{}, tasks: map[keyspace.RangeID]bool{},
		settings: s.deciding(), began: now, surveyed: now,
		nodes: map[keyspace.NodeID]decide.Node{}, lost: map[keyspace.NodeID]bool{}, boots: map[keyspace.NodeID]*boots{},
		ranges: map[keyspace.RangeID]known{}, under: map[keyspace.RangeID]fsm.Operation{},
		giveUp: map[keyspace.RangeID]string{}, ownTried: map[keyspace.NodeID]int{},
	}
	d.c = decide.New(d.settings, term, now)
	return d
}

// deciding returns what decisions are made by where no setting of the cluster says
// anything else.
func (s *Driver) deciding() decide.Settings {
	set := decide.Defaults()
	set.NodeDeadAfter = s.o.NodeDeadAfter
	set.AbandonAfter = min(set.AbandonAfter, set.NodeDeadAfter)
	set.NodeCopies, set.SmallCopies, set.SmallBytes = nodeCopies, smallCopies, smallBytes
	set.RangeMaxBytes, set.SplitLoad = s.o.RangeMaxBytes, s.o.RangeSplitLoad
	s.mergeAfter(&set, s.o.RangeMergeAfter)
	return set
}

// mergeAfter has ranges merged after so long, where somebody here merges ranges.
func (s *Driver) mergeAfter(set *decide.Settings, after time.Duration) {
	if set.MergeAge = max(after, 0); s.o.Merger == nil {
		set.MergeAge = 0
	}
	set.MergeRetry = min(decide.Defaults().MergeRetry, set.MergeAge)
}

// run decides until ctx ends.
func (d *decider) run(ctx context.Context) {
	defer d.s.o.Metrics.forgetDecisions()
	defer d.wait.Wait()
	timer := d.s.o.Clock.NewTimer(decideEvery)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C():
		case <-d.kick:
		}
		d.round(ctx)
		timer.Reset(decideEvery)
	}
}

// round takes over what has changed and decides once.
func (d *decider) round(ctx context.Context) {
	now, v := d.s.o.Clock.Now(), d.s.o.Group.View()
	d.feedSettings(v)
	d.feedNodes(v, now)
	d.feedRanges(v, now)
	d.feedOperations(v, now)
	d.view = v
	d.removeEmptied(ctx, v)
	d.upgrade(ctx, v)
	d.changeAlarms(ctx, v)
	d.endHolds(ctx, v)
	if now.Sub(d.surveyed) >= SurveyEvery {
		d.surveyed = now
		d.survey(ctx)
	}
	if !d.mayDecide(now) {
		return
	}
	d.gather(now)
	r := d.c.Decide(now)
	for _, a := range r.Abandon {
		d.giveUp[a.Range] = a.Why
	}
	for id, why := range d.giveUp {
		d.operator.abandon(id, d.under[id].ID, why) // it may not be worked on yet
	}
	for i := range r.Operations {
		d.begin(ctx, &r.Operations[i])
	}
	d.decideOwn(ctx, d.s.o.Group.View())
	d.measure()
}

// feedSettings takes over what the operator has set.
func (d *decider) feedSettings(v *fsm.View) {
	if d.view != nil && d.view.SettingsRevision() == v.SettingsRevision() {
		return
	}
	set := d.s.deciding()
	set.Paused = v.Paused()
	if n, ok := fsm.ParseReplication(v.SettingValue(fsm.SettingReplication)); ok {
		set.ReplicationFactor = n
	}
	if after, ok := fsm.ParseMergeAfter(v.SettingValue(fsm.SettingMergeAfter)); ok {
		d.s.mergeAfter(&set, after)
	}
	if set != d.settings {
		d.s.o.Logger.Info("settings of decisions", zap.Bool("paused", set.Paused), zap.Int("replication", set.ReplicationFactor),
			zap.Duration("merge-after", set.MergeAge))
	}
	if set.Paused && !d.settings.Paused {
		d.s.o.Logger.Warn("placement is paused: nothing is repaired, balanced or merged until skein placement resume")
	}
	d.settings = set
	d.c.Set(set)
	d.s.o.Metrics.Paused.Set(0)
	if set.Paused {
		d.s.o.Metrics.Paused.Set(1)
	}
}

// feedNodes takes over the node table, who is heard and hears others, and what nodes say of
// their disks.
func (d *decider) feedNodes(v *fsm.View, now clock.Time) {
	d.central, d.members = false, 0
	for id, row := range v.NodeRows() {
		if row.State.Member() {
			d.members++
		}
		d.central = d.central || counts(&row) && d.s.o.Central(id)
	}
	for id, row := range v.NodeRows() {
		if !counts(&row) {
			continue
		}
		n := decidedNode(&row)
		complete := d.tracker.Told(&n)
		old, ok := d.nodes[id]
		d.seeBoot(id, &old, now)
		n.Silent, n.SilentSince = d.silent(id) && !mutation.Is(mutation.DeadCountedAlive), old.SilentSince
		n.IsolatedSince = old.IsolatedSince
		switch {
		case n.Silent && !old.Silent:
			n.SilentSince = now
			d.s.o.Logger.Warn("node is not heard, or starts again and again", zap.Stringer("peer", id),
				zap.Int("boots-in-a-row", d.boots[id].row), zap.Bool("told-all", complete))
		case !n.Silent && old.Silent:
			n.SilentSince = 0
			delete(d.lost, id)
			d.s.o.Logger.Info("node is heard again", zap.Stringer("peer", id))
		case d.lost[id] && !d.settings.Lost(&n, now):
			delete(d.lost, id) // it was taken back, and may come in time
		case !d.lost[id] && d.settings.Lost(&n, now):
			d.lost[id] = true
			d.s.o.Logger.Warn("node counts as lost: its replicas are rebuilt elsewhere",
				zap.Stringer("peer", id), zap.Duration("silent", now.Sub(n.SilentSince)))
		}
		if n.Silent && d.boots[id].flaps() {
			n.SilentSince = d.boots[id].began
		}
		if n.Full != old.Full {
			d.s.o.Logger.Warn("whether a node has memory for another replica has changed; without it the node is given none: raise --memory-budget-bytes there, add nodes or merge ranges",
				zap.Stringer("peer", id), zap.Bool("full", n.Full))
		}
		if n.Isolated = !n.Silent && d.isolated(id); n.Isolated != old.Isolated {
			n.IsolatedSince = now
			d.s.o.Logger.Info("whether a node is given leaders and replicas has changed: it hears hardly any other, or does again",
				zap.Stringer("peer", id), zap.Bool("isolated", n.Isolated))
		}
		if !ok || n != old {
			d.nodes[id] = n
			d.c.PutNode(n)
		}
	}
	for id := range d.nodes {
		if row, _ := v.Node(id); !counts(&row) {
			delete(d.nodes, id)
			delete(d.boots, id)
			d.c.RemoveNode(id)
		}
	}
}

// attributeZone is the attribute of a node by whose value replicas are kept apart.
const attributeZone = "zone"

// feedRanges takes over the map and what nodes say of the ranges that they lead.
func (d *decider) feedRanges(v *fsm.View, now clock.Time) {
	since := uint64(0)
	if d.view != nil {
		since = d.view.Version
	}
	news := map[keyspace.RangeID]bool{}
	if v.Version > since {
		for _, g := range v.RowsSince(since) {
			id := g.Descriptor.Range
			k, ok := d.ranges[id]
			if ok && k.row.Descriptor.Generation != g.Descriptor.Generation || !ok && d.view != nil {
				k.born = now
			}
			k.row = g
			d.ranges[id], news[id] = k, true
		}
	}
	for _, id := range d.tracker.take() {
		news[id] = true
	}
	// Absorbed ranges go first. One that was put once more would take its heir's place in the
	// lookup of neighbours, and then leave nobody there.
	if len(d.ranges) != v.Len() {
		d.dropRanges(v)
	}
	for id := range news {
		if k, ok := d.ranges[id]; ok {
			c := d.tracker.of(id)
			d.c.PutRange(decide.Range{
				Descriptor: k.row.Descriptor, Leader: c.leader, Bytes: c.Bytes, Load: c.Load, Born: k.born, Kept: k.row.Kept,
				Quarantined: d.tracker.Quarantined(id),
			})
		}
	}
}

// dropRanges forgets the ranges that the map has no more.
func (d *decider) dropRanges(v *fsm.View) {
	there := make(map[keyspace.RangeID]bool, v.Len())
	v.All(func(g *fsm.Range) bool {
		there[g.Descriptor.Range] = true
		return true
	})
	for id := range d.ranges {
		if !there[id] {
			delete(d.ranges, id)
			d.c.RemoveRange(id)
		}
	}
}

// feedOperations takes over which operations are under way, whoever has begun them, and
// how others have ended.
func (d *decider) feedOperations(v *fsm.View, now clock.Time) {
	d.mu.Lock()
	tasks, told := d.tasks, len(d.ended) > 0
	d.tasks = map[keyspace.RangeID]bool{}
	d.mu.Unlock()
	for id, done := range tasks {
		d.c.Finish(id, now, done)
		delete(d.giveUp, id)
	}
	if d.view != nil && d.view.OperationsVersion() == v.OperationsVersion() && !told && !d.unsettled {
		return
	}
	d.unsettled = false
	all := v.Operations()
	there := make(map[keyspace.RangeID]uint64, len(all))
	for i := range all {
		there[all[i].Range] = all[i].ID
	}
	for id, op := range d.under {
		if there[id] != op.ID {
			d.feedEnd(&op, now)
		}
	}
	for i := range all {
		d.feedBegun(&all[i])
	}
	d.forgetEnds(v)
}

// feedEnd takes over that an operation is gone. The one that has worked on it says how that
// came a moment after the view has it: until then the range is left alone. Of one that nobody
// here has worked on it is not known.
func (d *decider) feedEnd(op *fsm.Operation, now clock.Time) {
	if d.operator.works(op) {
		d.unsettled = true
		return
	}
	d.mu.Lock()
	done, told := d.ended[op.ID]
	d.mu.Unlock()
	if done = done || !told; op.Kind == fsm.OperationMerge {
		// The map knows how it ended, whoever executed it.
		_, still := d.ranges[op.Right]
		done = !still
	}
	d.c.Finish(op.Range, now, done)
	delete(d.under, op.Range)
	delete(d.giveUp, op.Range)
}

// feedBegun takes over that an operation is under way. If that fails yet, the next round tries
// again: the range is about to come with the map, or a decision for it is about to be refused.
func (d *decider) feedBegun(op *fsm.Operation) {
	if _, ok := d.under[op.Range]; ok || op.Range == fsm.OwnGroup {
		return
	}
	if err := d.c.Begin(decisionOf(op, d.tracker.of(op.Range).leader)); err != nil {
		d.unsettled = true
		d.s.o.Logger.Debug("operation is not counted yet", zap.Uint64("operation", op.ID), zap.Error(err))
		return
	}
	d.under[op.Range] = *op
}

// forgetEnds forgets how operations have ended that nobody waits for: they are neither under
// way as far as decisions go, nor in the view, which may be older than their end.
func (d *decider) forgetEnds(v *fsm.View) {
	wanted := map[uint64]bool{}
	for _, op := range d.under {
		wanted[op.ID] = true
	}
	for _, op := range v.Operations() {
		wanted[op.ID] = true
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for id := range d.ended {
		if !wanted[id] {
			delete(d.ended, id)
		}
	}
}

// over is told by the operator that an operation has ended; done says that it came to its
// end, and was not given up.
func (d *decider) over(op *fsm.Operation, done bool) {
	d.mu.Lock()
	d.ended[op.ID] = done
	d.mu.Unlock()
	d.kick.Set()
}

// mayDecide says whether every living node has reported its ranges.
func (d *decider) mayDecide(now clock.Time) bool {
	if d.heard {
		return true
	}
	var missing keyspace.NodeID
	for id, n := range d.nodes {
		if told := (decide.Node{ID: id}); !d.tracker.Told(&told) && !n.Silent {
			missing = id
		}
	}
	late := now.Sub(d.began) >= hearWithin
	if missing != 0 && !late {
		return false
	}
	d.heard = true
	d.s.o.Logger.Info("decisions begin", zap.Uint64("term", d.term), zap.Int("nodes", len(d.nodes)),
		zap.Int("ranges", len(d.ranges)), zap.Int("operations", len(d.under)), zap.Stringer("not-heard", missing))
	return true
}

// survey looks at all ranges.
func (d *decider) survey(ctx context.Context) {
	if d.heard {
		d.findLeaders(ctx)
	}
	d.tracker.keep(func(id keyspace.RangeID) bool { _, ok := d.ranges[id]; return ok })
	under, stopped := d.c.Health()
	d.s.o.Metrics.UnderReplicated.Set(float64(under))
	d.s.o.Metrics.Stopped.Set(float64(stopped))
}

// findLeaders asks some of the ranges of which nobody says that he leads them. Most are about
// to have a leader, or have no quorum. But a node does not repeat a report that was forgotten,
// or overruled by an older one.
func (d *decider) findLeaders(ctx context.Context) {
	ids := d.tracker.unled(maps.Keys(d.ranges))
	slices.Sort(ids)
	first, _ := slices.BinarySearch(ids, d.sought+1)
	for i := range min(len(ids), leadersSought) {
		id := ids[(first+i)%len(ids)]
		d.sought = id
		d.wait.Go(func() {
			ctx, cancel := clock.WithTimeout(ctx, d.s.o.Clock, OperationStep)
			defer cancel()
			if _, _, err := d.operator.look(ctx, id); err != nil {
				d.s.o.Logger.Debug("nobody leads a range", zap.Stringer("range", id), zap.Error(err))
			}
		})
	}
}

// measure sets the metrics of a round.
func (d *decider) measure() {
	m := d.s.o.Metrics
	m.OperationsUnderWay.Set(float64(len(d.under)))
	pending := d.c.Pending()
	for need := decide.QuorumRisk; need <= decide.Cold; need++ {
		if !need.Known() {
			continue
		}
		m.Pending.WithLabelValues(need.String()).Set(float64(pending[need]))
	}
}
