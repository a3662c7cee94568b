package operate

import (
	"bytes"
	"context"
	"slices"
	"sync"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/shard"
)

// clusterView is what all nodes say at about one moment, for an operator.
type clusterView struct {
	// nodes is the node table, without those that were removed: these are gone.
	nodes, gone []fsm.Node
	byName      map[keyspace.NodeID]string
	// lists are the replicas of each node by its own word, reports what it says of itself. A node
	// that does not answer has neither.
	lists   map[keyspace.NodeID][]shard.Summary
	reports map[keyspace.NodeID]Report
	// unanswered says why a node has no list or no report.
	unanswered map[keyspace.NodeID]error
	// clockAhead is how far a node's clock is ahead of this one's, by its report.
	clockAhead map[keyspace.NodeID]time.Duration
	// heard are the nodes that this one hears, or one that answers does. A loaded node, or one with
	// very many replicas, may be heard and yet not answer in time.
	heard map[keyspace.NodeID]bool
	// silentSince says when this node has last heard those that it does not hear; 0 where it does not know.
	silentSince map[keyspace.NodeID]fsm.UnixMillis
	// supposed are ranges that nobody says it leads itself, by the node that others take for the
	// leader.
	supposed map[keyspace.NodeID]map[keyspace.RangeID]bool
	// isolated are the nodes that answer and hear fewer than half of the others. If all do,
	// there are none, as for package decide: it says nothing of a single node.
	isolated map[keyspace.NodeID]bool
	// ranges are the ranges in key order, by the map or by newer replicas; missing are the keys
	// without a known range. led has for each of ranges who leads it.
	ranges  []keyspace.Descriptor
	missing []keyspace.Span
	led     []lead
	// beside are the ranges that only lists have, and whether somebody leads them.
	beside map[keyspace.RangeID]bool
	// counts are kept for each node, since a list of nodes shows them of all.
	counts map[keyspace.NodeID]*nodeCounts
	// lacks says that a range has a replica on a node that is not alive. Mostly there is none, and ranges need not be looked at again.
	lacks bool
	// stopped are the ranges without a quorum, whoever takes himself for their leader: a range at rest notices nothing.
	stopped map[keyspace.RangeID]bool
	// placement is the placement group's state, without replicas where nobody could say.
	placement  placement.Status
	operations map[keyspace.RangeID]fsm.Operation
	// settings are the cluster's, none where nobody could say.
	settings []fsm.Setting
	// stale says that no quorum could be asked for the node table, the operations or the
	// settings: they are what somebody knew last.
	stale bool
}

// lead is who leads a range by his own word, and what he says of it; of node 0 and nil where nobody says that he does.
type lead struct {
	by   keyspace.NodeID
	says *shard.Summary
}

// nodeCounts are a node's replicas by ranges, those that only it says it has (besides), and what it says it leads.
type nodeCounts struct {
	holds, besides, leads int64
	alive                 bool
	// list is what hear has not read yet of the node's list.
	list []shard.Summary
}

// replicaSaid is a replica by its node's list.
type replicaSaid struct {
	node keyspace.NodeID
	says *shard.Summary
}

// view asks all nodes, at the same time.
func (a *Admin) view(ctx context.Context) (*clusterView, error) {
	table, stale, err := a.nodeTable(ctx)
	if err != nil {
		return nil, err
	}
	v := &clusterView{operations: map[keyspace.RangeID]fsm.Operation{}, stale: stale}
	for _, n := range table {
		if n.State == fsm.NodeRemoved {
			v.gone = append(v.gone, n)
		} else {
			v.nodes = append(v.nodes, n)
		}
	}
	v.byName = names(v.nodes)
	if err := a.look(ctx, v); err != nil {
		return nil, err
	}
	status, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	// Without it nobody is listed as a member of the group, and nobody can leave it.
	v.placement, _ = a.o.Placement.Status(status)
	ops, err := a.operations(ctx, stale)
	if err == nil {
		v.settings, err = a.settings(ctx, stale)
	}
	v.stale = stale || err != nil
	for _, o := range ops {
		v.operations[o.Range] = o
	}
	return v, nil
}

// completeTimeout bounds how long nodes are asked again while their answers lack keys.
// completePause lies between the first two rounds, and doubles up to completePauseMax. All nodes
// know of a split or a merge a moment after it.
const (
	completeTimeout  = 3 * time.Second
	completePause    = 20 * time.Millisecond
	completePauseMax = 500 * time.Millisecond
)

// completeView is view, repeated for a while as long as the answers lack keys.
func (a *Admin) completeView(ctx context.Context) (*clusterView, error) {
	v, err := a.view(ctx)
	if err != nil {
		return nil, err
	}
	return v.complete(ctx, a.o.Clock, func(ctx context.Context) (*clusterView, error) {
		again := *v
		return &again, a.look(ctx, &again)
	}), nil
}

// complete returns the view, or a later one by look, with a range for every key. If there is none
// in time, it returns the last one. It uses at most half of the time that ctx has left, so the
// answer still reaches the operator.
func (v *clusterView) complete(ctx context.Context, c clock.Clock, look func(context.Context) (*clusterView, error)) *clusterView {
	limit := completeTimeout
	if end, ok := ctx.Deadline(); ok {
		limit = min(limit, end.Sub(clock.System().Wall())/2)
	}
	ctx, cancel := clock.WithTimeout(ctx, c, limit)
	defer cancel()
	for pause := completePause; len(v.missing) > 0 && clock.Sleep(ctx, c, pause) == nil; pause = min(2*pause, completePauseMax) {
		again, err := look(ctx)
		if err != nil || ctx.Err() != nil {
			break // not all that could have answered had the time
		}
		if len(again.lists) >= len(v.lists) {
			v = again
		}
	}
	return v
}

// look has every node say what it has, beside what this one knows of placement's map.
func (a *Admin) look(ctx context.Context, v *clusterView) error {
	mapped, err := a.o.Placement.RangeMap(ctx)
	if err != nil {
		return err
	}
	a.ask(ctx, v)
	v.settle(mapped)
	return nil
}

// settle finds which ranges there are and who leads them, by placement's map and the lists of all nodes. Nearly always the map has
// all ranges as they are. If lists have newer ones, what is near those is sorted again, and all only if the map lacks keys.
func (v *clusterView) settle(mapped []keyspace.Descriptor) {
	v.ranges, v.missing = mapped, nil
	switch newer := v.hear(); {
	case !whole(mapped):
		v.ranges, v.missing = cover(append(slices.Clip(mapped), newer...))
		v.hear()
	case len(newer) > 0:
		v.ranges, v.missing = coverNear(mapped, newer)
		v.hear()
	}
	v.suppose()
	v.stop()
}

// hear makes led, beside and counts by the lists. It returns what these have that is newer than ranges, or not among them. Lists are
// in the order of keys as ranges are, so that both are read side by side. To look each replica up would take three times as long.
func (v *clusterView) hear() (newer []keyspace.Descriptor) {
	v.led, v.counts, v.beside, v.lacks = make([]lead, len(v.ranges)), map[keyspace.NodeID]*nodeCounts{}, map[keyspace.RangeID]bool{}, false
	for node, l := range v.lists {
		v.countsOf(node).list = l
	}
	var rest []replicaSaid
	for i := range v.ranges {
		d := &v.ranges[i]
		v.lacks = v.lacks || len(d.Replicas) == 0
		for _, r := range d.Replicas {
			c := v.countsOf(r.Node)
			c.holds++
			v.lacks = v.lacks || !c.alive
			for len(c.list) > 0 && c.list[0].Descriptor.Range != d.Range && bytes.Compare(c.list[0].Descriptor.Span.Start, d.Span.Start) <= 0 {
				rest, c.list = append(rest, replicaSaid{r.Node, &c.list[0]}), c.list[1:]
			}
			if len(c.list) > 0 && c.list[0].Descriptor.Range == d.Range {
				if c.list[0].IsLeader {
					c.leads++
				}
				newer, c.list = v.hearOf(newer, i, r.Node, &c.list[0]), c.list[1:]
			}
		}
	}
	return v.hearRest(newer, rest)
}

// hearRest hears what lists have that is no replica of ranges, or not where it was looked for.
func (v *clusterView) hearRest(newer []keyspace.Descriptor, rest []replicaSaid) []keyspace.Descriptor {
	for node, c := range v.counts {
		for i := range c.list {
			rest = append(rest, replicaSaid{node, &c.list[i]})
		}
		c.list = nil
	}
	if len(rest) == 0 {
		return newer
	}
	at := make(map[keyspace.RangeID]int, len(rest))
	for _, s := range rest {
		at[s.says.Descriptor.Range] = -1
	}
	for i := range v.ranges {
		if _, sought := at[v.ranges[i].Range]; sought {
			at[v.ranges[i].Range] = i
		}
	}
	of := map[keyspace.NodeID]bool{}
	for _, s := range rest {
		d := &s.says.Descriptor
		if i := at[d.Range]; i >= 0 {
			newer = v.hearOf(newer, i, s.node, s.says)
		} else {
			newer, v.beside[d.Range] = append(newer, *d), v.beside[d.Range] || s.says.IsLeader
		}
		of[s.node] = true
	}
	for node := range of {
		v.recount(node, at)
	}
	return newer
}

// recount counts the ranges that the node leads, and those that it alone says it has. Its list may have two rows of a range, which counts
// once. at has the places of the ranges that hear has not found at their place in the list.
func (v *clusterView) recount(node keyspace.NodeID, at map[keyspace.RangeID]int) {
	besides := map[keyspace.RangeID]bool{}
	for i := range v.lists[node] {
		id := v.lists[node][i].Descriptor.Range
		k, apart := at[id]
		if !apart {
			continue // hear has found it among the node's replicas
		}
		if k < 0 {
			besides[id] = true
		} else if _, holds := v.ranges[k].ReplicaOn(node); !holds {
			besides[id] = true
		}
	}
	c := v.counts[node]
	c.besides, c.leads = int64(len(besides)), int64(len(v.ledBy(node)))
}

// hearOf hears what a node says of the i-th range, and appends it to newer if it is.
func (v *clusterView) hearOf(newer []keyspace.Descriptor, i int, node keyspace.NodeID, s *shard.Summary) []keyspace.Descriptor {
	if s.IsLeader {
		// One that is no member any more, or has not heard of the last change, may take itself for the leader yet.
		if _, member := v.ranges[i].ReplicaOn(node); v.led[i].by == 0 || member && !v.ranges[i].Newer(&s.Descriptor) {
			v.led[i] = lead{node, s}
		}
	}
	if s.Descriptor.Newer(&v.ranges[i]) {
		newer = append(newer, s.Descriptor)
	}
	return newer
}

// countsOf returns a node's counts, to be counted on.
func (v *clusterView) countsOf(n keyspace.NodeID) *nodeCounts {
	c := v.counts[n]
	if c == nil {
		c = &nodeCounts{alive: v.alive(n)}
		v.counts[n] = c
	}
	return c
}

// suppose makes supposed. Mostly somebody leads each range, and the lists need not be read again.
func (v *clusterView) suppose() {
	v.supposed = map[keyspace.NodeID]map[keyspace.RangeID]bool{}
	unled := map[keyspace.RangeID]bool{}
	for i := range v.led {
		if v.led[i].by == 0 {
			unled[v.ranges[i].Range] = true
		}
	}
	for id, led := range v.beside {
		if !led {
			unled[id] = true
		}
	}
	if len(unled) == 0 {
		return
	}
	for _, l := range v.lists {
		for i := range l {
			s := &l[i]
			if s.LeaderNode == 0 || !unled[s.Descriptor.Range] {
				continue
			}
			if v.supposed[s.LeaderNode] == nil {
				v.supposed[s.LeaderNode] = map[keyspace.RangeID]bool{}
			}
			v.supposed[s.LeaderNode][s.Descriptor.Range] = true
		}
	}
}

// stop finds the ranges without a quorum.
func (v *clusterView) stop() {
	v.stopped = map[keyspace.RangeID]bool{}
	closed := false
	for _, r := range v.reports {
		closed = closed || len(r.Quarantined) > 0
	}
	if !closed && !v.lacks {
		return
	}
	up := func(r keyspace.Replica) bool { return v.alive(r.Node) }
	for i := range v.ranges {
		d := &v.ranges[i]
		if closed {
			up = v.up(d)
		}
		if !d.HasQuorum(up) {
			v.stopped[d.Range] = true
		}
	}
}

// askFor returns how long a node may take to say what it has. One that is heard is busy, or has
// very many replicas, and much cannot be decided without it: it has half of what ctx leaves.
func (a *Admin) askFor(ctx context.Context, n keyspace.NodeID) time.Duration {
	if end, ok := ctx.Deadline(); ok && a.o.Peers.Alive(n) {
		return max(askTimeout, end.Sub(clock.System().Wall())/2)
	}
	return askTimeout
}

// ask has every node say what it has.
func (a *Admin) ask(ctx context.Context, v *clusterView) {
	v.lists, v.reports = map[keyspace.NodeID][]shard.Summary{}, map[keyspace.NodeID]Report{}
	v.unanswered, v.clockAhead = map[keyspace.NodeID]error{}, map[keyspace.NodeID]time.Duration{}
	var mu sync.Mutex
	var wg sync.WaitGroup
	for _, n := range v.nodes {
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(ctx, a.askFor(ctx, n.ID))
			defer cancel()
			l, err := a.o.Replicas.List(ctx, n.ID)
			if err != nil {
				mu.Lock()
				defer mu.Unlock()
				v.unanswered[n.ID] = err
				return
			}
			asked := a.o.Clock.Now()
			rep, rerr := a.report(ctx, n.ID)
			// It has read its clock at about the middle of the call.
			here := a.o.Clock.Wall().Add(-a.o.Clock.Now().Sub(asked) / 2)
			mu.Lock()
			defer mu.Unlock()
			v.lists[n.ID] = l
			if v.unanswered[n.ID] = rerr; rerr == nil {
				v.reports[n.ID] = rep
				if rep.Wall != 0 {
					v.clockAhead[n.ID] = rep.Wall.Time().Sub(here)
				}
			}
		})
	}
	wg.Wait()
	v.isolated, v.heard, v.silentSince = map[keyspace.NodeID]bool{}, map[keyspace.NodeID]bool{}, map[keyspace.NodeID]fsm.UnixMillis{}
	for _, n := range v.nodes {
		v.heard[n.ID] = a.o.Peers.Alive(n.ID)
		if silent := a.o.Peers.SilentFor(n.ID); silent > 0 {
			v.silentSince[n.ID] = fsm.UnixMillis(a.o.Clock.Wall().Add(-silent).UnixMilli())
		}
	}
	for node, r := range v.reports {
		if r.Isolated {
			v.isolated[node] = true
		}
		for _, n := range r.Hears {
			v.heard[n] = true // though this one may not hear it
		}
	}
	if len(v.isolated) == len(v.reports) {
		v.isolated = nil
	}
}

// answered says whether the node has. One that has not may be down, or late, or hang: nobody
// counts on it.
func (v *clusterView) answered(n keyspace.NodeID) bool {
	_, ok := v.lists[n]
	return ok
}

// alive says whether the node has answered, or is heard by one that has.
func (v *clusterView) alive(n keyspace.NodeID) bool { return v.answered(n) || v.heard[n] }

// dead says whether a node that is to serve neither answers nor is heard any more. A node that this one has not
// heard since its own start may be well.
func (v *clusterView) dead(n *fsm.Node) bool {
	return n.State == fsm.NodeServing && !v.alive(n.ID) && v.silentSince[n.ID] != 0
}

// placementStands says whether the placement group has a quorum, as far as its members are known.
func (v *clusterView) placementStands() bool {
	own := keyspace.Descriptor{Replicas: v.placement.Replicas}
	return len(own.Replicas) == 0 || own.HasQuorum(func(r keyspace.Replica) bool { return v.alive(r.Node) })
}

// up says whether a replica can vote as far as the answers of all nodes tell.
func (v *clusterView) up(d *keyspace.Descriptor) func(keyspace.Replica) bool {
	closed := closedOf(d, v.reports)
	return func(r keyspace.Replica) bool {
		for _, q := range closed {
			if q.Replica == r.ID {
				return false
			}
		}
		return v.alive(r.Node)
	}
}

// unsure says whether the node has not answered and may lead something all the same, as it is not
// known to be down: it is heard, or taken for a leader.
func (v *clusterView) unsure(n keyspace.NodeID) bool {
	return !v.answered(n) && (v.heard[n] || len(v.supposed[n]) > 0)
}

// leaderless returns a range without a known leader in which the silent node has a vote, 0 for
// none. The successor of a leader that was just lost may not be elected yet.
func (v *clusterView) leaderless(n keyspace.NodeID) keyspace.RangeID {
	if v.answered(n) {
		return 0
	}
	for i := range v.ranges {
		d := &v.ranges[i]
		if m, ok := d.ReplicaOn(n); ok && m.Role != keyspace.RoleLearner && v.led[i].by == 0 {
			return d.Range
		}
	}
	return 0
}

// ledBy returns the ranges that the node leads, by its own word, or else by that of others.
func (v *clusterView) ledBy(n keyspace.NodeID) map[keyspace.RangeID]bool {
	if !v.answered(n) {
		return v.supposed[n]
	}
	led := map[keyspace.RangeID]bool{}
	for i := range v.lists[n] {
		if s := &v.lists[n][i]; s.IsLeader {
			led[s.Descriptor.Range] = true
		}
	}
	return led
}

// leads counts what ledBy returns.
func (v *clusterView) leads(n keyspace.NodeID) int64 {
	if !v.answered(n) {
		return int64(len(v.supposed[n]))
	}
	if c := v.counts[n]; c != nil {
		return c.leads
	}
	return 0
}

// held returns the ranges of which the node has a replica: by the range map and their
// leaders, or by its own word.
func (v *clusterView) held(n keyspace.NodeID) []keyspace.Descriptor {
	var ds []keyspace.Descriptor
	has := map[keyspace.RangeID]bool{}
	for i := range v.ranges {
		if d := &v.ranges[i]; slices.ContainsFunc(d.Replicas, func(r keyspace.Replica) bool { return r.Node == n }) {
			ds, has[d.Range] = append(ds, *d), true
		}
	}
	for i := range v.lists[n] {
		if d := &v.lists[n][i].Descriptor; !has[d.Range] {
			ds, has[d.Range] = append(ds, *d), true
		}
	}
	return ds
}

// holds counts what held returns.
func (v *clusterView) holds(n keyspace.NodeID) int64 {
	if c := v.counts[n]; c != nil {
		return c.holds + c.besides
	}
	return 0
}

// askTimeout bounds what one node may take to answer for a list, where it is not known to live
// (askFor). The list then shows it as unreachable.
const askTimeout = 2 * time.Second

// statusTimeout bounds a question to one replica of the placement group.
const statusTimeout = time.Second
