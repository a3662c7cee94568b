package operate

import (
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
	// without a known range. led is what the leaders say, leaders who they are.
	ranges  []keyspace.Descriptor
	missing []keyspace.Span
	led     map[keyspace.RangeID]*shard.Summary
	leaders map[keyspace.RangeID]keyspace.NodeID
	// at has the index of each range in ranges, on those of the ranges with a replica on a node.
	at map[keyspace.RangeID]int
	on map[keyspace.NodeID][]int
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
	v.hearLeaders()
	v.ranges, v.missing = cover(v.said(mapped))
	v.index()
	v.stopped = map[keyspace.RangeID]bool{}
	for i := range v.ranges {
		if d := &v.ranges[i]; !d.HasQuorum(v.up(d)) {
			v.stopped[d.Range] = true
		}
	}
	return nil
}

// said returns the map's descriptors and those of replicas that are newer, or not in it. Nearly all are the map's.
func (v *clusterView) said(mapped []keyspace.Descriptor) []keyspace.Descriptor {
	known := make(map[keyspace.RangeID]*keyspace.Descriptor, len(mapped))
	for i := range mapped {
		known[mapped[i].Range] = &mapped[i]
	}
	all := slices.Clip(mapped) // which is not written to
	for _, l := range v.lists {
		for i := range l {
			if d := &l[i].Descriptor; known[d.Range] == nil || d.Newer(known[d.Range]) {
				all = append(all, *d)
			}
		}
	}
	return all
}

// index makes at and on.
func (v *clusterView) index() {
	v.at, v.on = make(map[keyspace.RangeID]int, len(v.ranges)), map[keyspace.NodeID][]int{}
	for i := range v.ranges {
		v.at[v.ranges[i].Range] = i
		for _, r := range v.ranges[i].Replicas {
			v.on[r.Node] = append(v.on[r.Node], i)
		}
	}
}

// hearLeaders takes from the lists who leads, or is taken for who does.
func (v *clusterView) hearLeaders() {
	v.led, v.leaders = map[keyspace.RangeID]*shard.Summary{}, map[keyspace.RangeID]keyspace.NodeID{}
	for node, l := range v.lists {
		for i := range l {
			if s := &l[i]; s.IsLeader {
				v.led[s.Descriptor.Range], v.leaders[s.Descriptor.Range] = s, node
			}
		}
	}
	v.supposed = map[keyspace.NodeID]map[keyspace.RangeID]bool{}
	for _, l := range v.lists {
		for i := range l {
			s := &l[i]
			if _, led := v.leaders[s.Descriptor.Range]; led || s.LeaderNode == 0 {
				continue
			}
			if v.supposed[s.LeaderNode] == nil {
				v.supposed[s.LeaderNode] = map[keyspace.RangeID]bool{}
			}
			v.supposed[s.LeaderNode][s.Descriptor.Range] = true
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
		if m, ok := d.ReplicaOn(n); ok && m.Role != keyspace.RoleLearner && v.leaders[d.Range] == 0 {
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
	for _, s := range v.lists[n] {
		if s.IsLeader {
			led[s.Descriptor.Range] = true
		}
	}
	return led
}

// held returns the ranges of which the node has a replica: by the range map and their
// leaders, or by its own word.
func (v *clusterView) held(n keyspace.NodeID) []keyspace.Descriptor {
	var ds []keyspace.Descriptor
	for _, i := range v.on[n] {
		ds = append(ds, v.ranges[i])
	}
	v.besides(n, func(d *keyspace.Descriptor) { ds = append(ds, *d) })
	return ds
}

// holds counts what held returns.
func (v *clusterView) holds(n keyspace.NodeID) int64 {
	count := len(v.on[n])
	v.besides(n, func(*keyspace.Descriptor) { count++ })
	return int64(count)
}

// besides has yield see the ranges of which a node has a replica by its own word alone.
func (v *clusterView) besides(n keyspace.NodeID, yield func(*keyspace.Descriptor)) {
	for i := range v.lists[n] {
		d := &v.lists[n][i].Descriptor
		if at, ok := v.at[d.Range]; ok {
			if _, holds := v.ranges[at].ReplicaOn(n); holds {
				continue
			}
		}
		yield(d)
	}
}

func (a *Admin) report(ctx context.Context, node keyspace.NodeID) (Report, error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	return a.o.Peers.Report(ctx, node)
}

// askTimeout bounds what one node may take to answer for a list, where it is not known to live
// (askFor). The list then shows it as unreachable.
const askTimeout = 2 * time.Second

// statusTimeout bounds a question to one replica of the placement group.
const statusTimeout = time.Second
