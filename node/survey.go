package node

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement"
	"github.com/skeindb/skein/shard"
)

// survey is what all nodes say at about one moment, for an operator.
type survey struct {
	// nodes is the node table, without those that were removed: these are gone.
	nodes, gone []placement.Node
	byName      map[keyspace.NodeID]string
	// lists are the replicas that each node says it has, reports what it says of itself;
	// nodes that do not answer have none.
	lists   map[keyspace.NodeID][]shard.Summary
	reports map[keyspace.NodeID]report
	// heard are the nodes that live as far as this one knows, or one that answers. A loaded one, or one with very many
	// replicas, is heard and has not answered in time.
	heard map[keyspace.NodeID]bool
	// supposed are ranges that nobody says it leads itself, by the node that others take for the
	// leader.
	supposed map[keyspace.NodeID]map[keyspace.RangeID]bool
	// lonely are the nodes that answer and hear fewer than half of the others. As for who
	// decides, where that is so of every node it says nothing of one: there are none then.
	lonely map[keyspace.NodeID]bool
	// ranges is the range map in key order, with what replicas have newer before the map's;
	// missing are the keys of which nobody has said who holds them now. led is what the leaders
	// say, leaders who they are.
	ranges  []keyspace.Descriptor
	missing []keyspace.Span
	led     map[keyspace.RangeID]shard.Summary
	leaders map[keyspace.RangeID]keyspace.NodeID
	// placement is the placement group's state, without replicas where nobody could say.
	placement  placement.Status
	operations map[keyspace.RangeID]placement.Operation
	// settings are the cluster's, none where nobody could say.
	settings []placement.Setting
	// stale says that no quorum could be asked for the node table, the operations or the
	// settings: they are what somebody knew last.
	stale bool
}

// survey asks all nodes, at the same time.
func (a admin) survey(ctx context.Context) (*survey, error) {
	table, stale, err := a.nodeTable(ctx)
	if err != nil {
		return nil, err
	}
	v := &survey{operations: map[keyspace.RangeID]placement.Operation{}, stale: stale}
	for _, n := range table {
		if n.State == placement.NodeRemoved {
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
	v.placement, _ = a.c.client.Status(status)
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

// wholeTimeout bounds how long nodes are asked again where keys are missing from what they
// say, wholePause lies between the first two times, and each later pause is twice as long up to
// wholePauseMax. A split or a merge is heard of everywhere a moment after it.
const (
	wholeTimeout  = 3 * time.Second
	wholePause    = 20 * time.Millisecond
	wholePauseMax = 500 * time.Millisecond
)

// surveyWhole is survey, made again while keys are missing from what nodes say, for a while.
func (a admin) surveyWhole(ctx context.Context) (*survey, error) {
	v, err := a.survey(ctx)
	if err != nil {
		return nil, err
	}
	return v.whole(ctx, a.c.o.Clock, func(ctx context.Context) (*survey, error) {
		again := *v
		return &again, a.look(ctx, &again)
	}), nil
}

// whole returns the survey, or a later one by look, which has all keys in a range; where none
// does in time, the last one: with half of the time that ctx has left the answer still comes.
func (v *survey) whole(ctx context.Context, c clock.Clock, look func(context.Context) (*survey, error)) *survey {
	limit := wholeTimeout
	if end, ok := ctx.Deadline(); ok {
		limit = min(limit, end.Sub(clock.System().Wall())/2)
	}
	ctx, cancel := clock.WithTimeout(ctx, c, limit)
	defer cancel()
	for pause := wholePause; len(v.missing) > 0 && clock.Sleep(ctx, c, pause) == nil; pause = min(2*pause, wholePauseMax) {
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
func (a admin) look(ctx context.Context, v *survey) error {
	mapped, err := a.c.client.RangeMap(ctx)
	if err != nil {
		return err
	}
	a.ask(ctx, v)
	v.hearLeaders()
	said := slices.Clone(mapped)
	for _, l := range v.lists {
		for _, s := range l {
			said = append(said, s.Descriptor)
		}
	}
	v.ranges, v.missing = cover(said)
	return nil
}

// hearLeaders takes from the lists who leads, or is taken for who does.
func (v *survey) hearLeaders() {
	v.led, v.leaders = map[keyspace.RangeID]shard.Summary{}, map[keyspace.RangeID]keyspace.NodeID{}
	for node, l := range v.lists {
		for _, s := range l {
			if s.IsLeader {
				v.led[s.Descriptor.Range], v.leaders[s.Descriptor.Range] = s, node
			}
		}
	}
	v.supposed = map[keyspace.NodeID]map[keyspace.RangeID]bool{}
	for _, l := range v.lists {
		for _, s := range l {
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
func (a admin) askFor(ctx context.Context, n keyspace.NodeID) time.Duration {
	if end, ok := ctx.Deadline(); ok && a.c.alive(n) {
		return max(askTimeout, end.Sub(clock.System().Wall())/2)
	}
	return askTimeout
}

// ask has every node say what it has.
func (a admin) ask(ctx context.Context, v *survey) {
	v.lists, v.reports = map[keyspace.NodeID][]shard.Summary{}, map[keyspace.NodeID]report{}
	var mu sync.Mutex
	var wg sync.WaitGroup
	for _, n := range v.nodes {
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(ctx, a.askFor(ctx, n.ID))
			defer cancel()
			l, err := a.c.shards.Admin().List(ctx, n.ID)
			if err != nil {
				return
			}
			rep, rerr := a.askReport(ctx, n.ID)
			mu.Lock()
			defer mu.Unlock()
			v.lists[n.ID] = l
			if rerr == nil {
				v.reports[n.ID] = rep
			}
		})
	}
	wg.Wait()
	v.lonely, v.heard = map[keyspace.NodeID]bool{}, map[keyspace.NodeID]bool{}
	for _, n := range v.nodes {
		v.heard[n.ID] = a.c.alive(n.ID)
	}
	for node, r := range v.reports {
		if r.Lonely {
			v.lonely[node] = true
		}
		for _, n := range r.Hears {
			v.heard[n] = true // though this one may not hear it
		}
	}
	if len(v.lonely) == len(v.reports) {
		v.lonely = nil
	}
}

// quorumTimeout bounds the wait for a quorum's word on who is a node. An operator who
// looks why there is no quorum must not be left without an answer.
const quorumTimeout = 3 * time.Second

// nodeTable returns the node table, with those that were removed: the quorum's, or else
// what this node knew last.
func (a admin) nodeTable(ctx context.Context) (nodes []placement.Node, stale bool, err error) {
	asked, cancel := context.WithTimeout(ctx, quorumTimeout)
	defer cancel()
	if nodes, err = a.c.client.NodeTable(asked, true); err == nil || ctx.Err() != nil {
		return nodes, false, err
	}
	if m, _ := a.c.client.WatchMap(); m != nil {
		return m.NodeTable(), true, nil
	}
	return nil, false, err
}

// members is nodeTable without those that were removed.
func (a admin) members(ctx context.Context) (nodes []placement.Node, stale bool, err error) {
	nodes, stale, err = a.nodeTable(ctx)
	return slices.DeleteFunc(nodes, func(n placement.Node) bool { return n.State == placement.NodeRemoved }), stale, err
}

// operations returns the operations under way: a quorum's word, or with stale what a replica
// of the placement group knew last.
func (a admin) operations(ctx context.Context, stale bool) ([]placement.Operation, error) {
	if stale {
		ctx, cancel := context.WithTimeout(ctx, statusTimeout)
		defer cancel()
		return a.c.client.LastOperations(ctx)
	}
	ctx, cancel := context.WithTimeout(ctx, quorumTimeout)
	defer cancel()
	return a.c.client.Operations(ctx)
}

// settings returns the cluster's settings, by whose word as operations.
func (a admin) settings(ctx context.Context, stale bool) ([]placement.Setting, error) {
	if stale {
		ctx, cancel := context.WithTimeout(ctx, statusTimeout)
		defer cancel()
		return a.c.client.LastSettings(ctx)
	}
	ctx, cancel := context.WithTimeout(ctx, quorumTimeout)
	defer cancel()
	s, _, err := a.c.client.Settings(ctx)
	return s, err
}

// cluster returns the members and the range map, which is always what this node knew last.
func (a admin) cluster(ctx context.Context) (_ []placement.Node, _ []keyspace.Descriptor, stale bool, err error) {
	nodes, stale, err := a.members(ctx)
	if err != nil {
		return nil, nil, false, err
	}
	descs, err := a.c.client.RangeMap(ctx)
	return nodes, descs, stale, err
}

func names(nodes []placement.Node) map[keyspace.NodeID]string {
	m := make(map[keyspace.NodeID]string, len(nodes))
	for _, n := range nodes {
		m[n.ID] = n.Name
	}
	return m
}

// answered says whether the node has. One that has not may be down, or late, or hang: nobody
// counts on it.
func (v *survey) answered(n keyspace.NodeID) bool {
	_, ok := v.lists[n]
	return ok
}

// alive says whether the node has answered, or is heard by one that has.
func (v *survey) alive(n keyspace.NodeID) bool { return v.answered(n) || v.heard[n] }

// unsure says whether the node has not answered and may lead something all the same, as it is not
// known to be down: it is heard, or taken for a leader.
func (v *survey) unsure(n keyspace.NodeID) bool {
	return !v.answered(n) && (v.heard[n] || len(v.supposed[n]) > 0)
}

// leaderless returns a range that the node has a vote in, nobody says he leads, and the node may,
// where it has not answered; 0 where there is none. Whoever has just been lost is not yet replaced.
func (v *survey) leaderless(n keyspace.NodeID) keyspace.RangeID {
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

// ledBy returns the ranges that the node leads: by its own word, or by that of others where it
// has not answered.
func (v *survey) ledBy(n keyspace.NodeID) map[keyspace.RangeID]bool {
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

// row is the node as operators see it.
func (v *survey) row(n *placement.Node) *adminpb.Node {
	r := &adminpb.Node{
		Id: n.ID.String(), Name: n.Name, PeerUrls: n.PeerURLs, ClientUrls: n.ClientURLs,
		Alive: v.alive(n.ID), Bytes: v.reports[n.ID].Bytes, State: n.State.String(), SinceUnixMs: int64(n.Since), Leaves: n.Leaves,
		Ranges: int64(len(v.held(n.ID))), Leaders: int64(len(v.ledBy(n.ID))), PlacementLeader: v.placement.Leader == n.ID,
	}
	for _, a := range n.Attributes {
		r.Attributes = append(r.Attributes, &adminpb.Attribute{Key: a.Key, Value: a.Value})
	}
	r.Placement = slices.ContainsFunc(v.placement.Replicas, func(m keyspace.Replica) bool { return m.Node == n.ID })
	return r
}

// held returns the ranges of which the node has a replica: by the range map and their
// leaders, or by its own word.
func (v *survey) held(n keyspace.NodeID) []keyspace.Descriptor {
	var ds []keyspace.Descriptor
	in := map[keyspace.RangeID]bool{}
	for i := range v.ranges {
		if _, ok := v.ranges[i].ReplicaOn(n); ok {
			ds = append(ds, v.ranges[i])
			in[v.ranges[i].Range] = true
		}
	}
	for _, s := range v.lists[n] {
		if !in[s.Descriptor.Range] {
			ds = append(ds, s.Descriptor)
		}
	}
	return ds
}

// rangeRow is the range as operators see it.
func (v *survey) rangeRow(d *keyspace.Descriptor) *adminpb.Range {
	leader, state, keys, bytes := "", "unreachable", int64(-1), int64(0)
	if s, ok := v.led[d.Range]; ok {
		leader, state, keys, bytes = v.byName[v.leaders[d.Range]], "awake", s.Keys, s.Bytes
		switch {
		case half(d, &s.Descriptor, s.Merge):
			state, keys = stateMerging, -1
		case s.Asleep:
			state = "asleep"
		}
	}
	r := rangeRow(d, v.byName, leader, keys, bytes, state)
	if o, ok := v.operations[d.Range]; ok {
		r.Operation = operationRow(&o, v.byName)
	}
	return r
}

// Ranges implements adminapi.Backend.
func (a admin) Ranges(ctx context.Context, q *adminpb.RangeListRequest) (*adminpb.RangeListResponse, error) {
	v, err := a.surveyWhole(ctx)
	if err != nil {
		return nil, err
	}
	var on keyspace.NodeID
	if q.GetNode() != "" {
		if on, err = nodeNamed(v.nodes, q.GetNode()); err != nil {
			return nil, err
		}
	}
	out := &adminpb.RangeListResponse{Stale: v.stale}
	for _, m := range v.missing {
		if q.Key == nil || m.Contains(q.Key) {
			out.Missing = append(out.Missing, &adminpb.KeySpan{Start: m.Start, End: m.End})
		}
	}
	for i := range v.ranges {
		d := &v.ranges[i]
		_, there := d.ReplicaOn(on)
		if (on == 0 || there) && (q.Key == nil || d.Span.Contains(q.Key)) {
			row := v.rangeRow(d)
			row.Kept = a.kept(d.Span.Start)
			out.Ranges = append(out.Ranges, row)
		}
	}
	return out, nil
}

// Nodes implements adminapi.Backend.
func (a admin) Nodes(ctx context.Context) (*adminpb.NodeListResponse, error) {
	v, err := a.survey(ctx)
	if err != nil {
		return nil, err
	}
	out := &adminpb.NodeListResponse{Stale: v.stale}
	for i := range v.nodes {
		out.Nodes = append(out.Nodes, v.row(&v.nodes[i]))
	}
	return out, nil
}
