package node

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement"
	"github.com/skeindb/skein/router"
	"github.com/skeindb/skein/shard"
	"github.com/skeindb/skein/transport"
)

// admin answers operators' questions about the whole cluster.
type admin struct{ c *Core }

// report is what a node says of itself for the list of nodes.
type report struct {
	Bytes int64
}

func (c *Core) report() report {
	total, _ := c.engine.DiskBytes()
	return report{Bytes: total + c.wal.LiveBytes()}
}

// askTimeout bounds what one node may take to answer for a list; it is then listed
// as unreachable.
const askTimeout = 2 * time.Second

// lists asks every node for its replicas, at the same time. Nodes that do not
// answer are missing.
func (a admin) lists(ctx context.Context, nodes []placement.Node) map[keyspace.NodeID][]shard.Summary {
	var mu sync.Mutex
	var wg sync.WaitGroup
	all := make(map[keyspace.NodeID][]shard.Summary)
	for _, n := range nodes {
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(ctx, askTimeout)
			defer cancel()
			l, err := a.c.shards.Client().List(ctx, n.ID)
			if err != nil {
				return
			}
			mu.Lock()
			all[n.ID] = l
			mu.Unlock()
		})
	}
	wg.Wait()
	return all
}

// quorumTimeout bounds the wait for a quorum's word on who is a node. An operator who
// looks why there is no quorum must not be left without an answer.
const quorumTimeout = 3 * time.Second

// members returns the node table: the quorum's, or else what this node knew last.
func (a admin) members(ctx context.Context) (nodes []placement.Node, stale bool, err error) {
	asked, cancel := context.WithTimeout(ctx, quorumTimeout)
	defer cancel()
	if nodes, err = a.c.client.Members(asked, true); err == nil || ctx.Err() != nil {
		return nodes, false, err
	}
	if m, _ := a.c.client.WatchMap(); m != nil {
		return m.Nodes(), true, nil
	}
	return nil, false, err
}

// cluster returns the node table and the range map, which is always what this node
// knew last.
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

// Ranges implements adminapi.Backend. The leader's own word about its range counts
// before the map's.
func (a admin) Ranges(ctx context.Context) (*adminpb.RangeListResponse, error) {
	nodes, descs, stale, err := a.cluster(ctx)
	if err != nil {
		return nil, err
	}
	lists := a.lists(ctx, nodes)
	byName := names(nodes)
	out := make([]*adminpb.Range, 0, len(descs))
	led := make(map[keyspace.RangeID]shard.Summary)
	leaders := make(map[keyspace.RangeID]keyspace.NodeID)
	for node, l := range lists {
		for _, s := range l {
			if s.IsLeader {
				led[s.Descriptor.Range], leaders[s.Descriptor.Range] = s, node
			}
		}
	}
	for i := range descs {
		s, ok := led[descs[i].Range]
		if !ok {
			out = append(out, rangeRow(&descs[i], byName, "", -1, 0, "unreachable"))
			continue
		}
		state := "awake"
		if s.Asleep {
			state = "asleep"
		}
		out = append(out, rangeRow(&s.Descriptor, byName, byName[leaders[descs[i].Range]], s.Keys, s.Bytes, state))
	}
	return &adminpb.RangeListResponse{Ranges: out, Stale: stale}, nil
}

func rangeRow(d *keyspace.Descriptor, byName map[keyspace.NodeID]string, leader string, keys, bytes int64, state string) *adminpb.Range {
	r := &adminpb.Range{
		Id: uint64(d.Range), Generation: uint64(d.Generation), Start: d.Span.Start, End: d.Span.End,
		Leader: leader, Keys: keys, Bytes: bytes, State: state,
	}
	for _, rep := range d.Replicas {
		r.Replicas = append(r.Replicas, byName[rep.Node])
	}
	return r
}

// splitTimeout bounds a split by command, and splitPause lies between attempts to
// find the range's leader.
const (
	splitTimeout = 15 * time.Second
	splitPause   = 50 * time.Millisecond
)

// SplitRange implements adminapi.Backend.
func (a admin) SplitRange(ctx context.Context, key []byte) (left, right *adminpb.Range, err error) {
	ctx, cancel := context.WithTimeout(ctx, splitTimeout)
	defer cancel()
	nodes, err := a.c.client.Members(ctx, false)
	if err != nil {
		return nil, nil, err
	}
	ds, leader, err := a.split(ctx, key)
	if err != nil {
		return nil, nil, err
	}
	if len(ds) != 2 {
		return nil, nil, kverror.New(kverror.Internal, "a split at %q gave %d ranges", key, len(ds))
	}
	a.c.router.Learn(ds...)
	byName := names(nodes)
	row := func(d *keyspace.Descriptor) *adminpb.Range {
		return rangeRow(d, byName, byName[leader], -1, 0, "awake")
	}
	return row(&ds[0]), row(&ds[1]), nil
}

// split asks the leader of the key's range, wherever it is, to split it. It is
// repeated only where nothing was proposed.
func (a admin) split(ctx context.Context, key []byte) ([]keyspace.Descriptor, keyspace.NodeID, error) {
	for turn := 0; ; turn++ {
		l, err := a.c.router.Locate(ctx, keyspace.Single(key))
		if err != nil {
			return nil, 0, err
		}
		d := &l[0].Descriptor
		if string(d.Span.Start) == string(key) {
			return nil, 0, &adminapi.Refusal{
				Reason:   fmt.Sprintf("range %s begins at %q already", d.Range, key),
				NextStep: "nothing is left to do, or choose another key (skein range list shows the borders)",
			}
		}
		node := l[0].Leader
		if node == 0 || turn%2 == 1 {
			node = d.Replicas[turn/2%len(d.Replicas)].Node
		}
		ds, err := a.c.shards.Client().Split(ctx, node, d.Range, d.Generation, key)
		if err == nil {
			return ds, node, nil
		}
		e := kverror.Of(err)
		if e.Retry() != kverror.RetryRouter || ctx.Err() != nil {
			return nil, 0, err
		}
		a.c.router.Learn(e.Descriptors...)
		if e.Leader != 0 {
			a.c.router.Led(d.Range, e.Leader)
		}
		if clock.Sleep(ctx, a.c.o.Clock, splitPause) != nil {
			return nil, 0, err
		}
	}
}

// ShowRange implements adminapi.Backend.
func (a admin) ShowRange(ctx context.Context, id keyspace.RangeID) (*adminpb.RangeShowResponse, error) {
	nodes, descs, _, err := a.cluster(ctx) // each replica speaks for itself
	if err != nil {
		return nil, err
	}
	i := slices.IndexFunc(descs, func(d keyspace.Descriptor) bool { return d.Range == id })
	if i < 0 {
		return nil, &adminapi.Refusal{Reason: fmt.Sprintf("there is no range %s", id), NextStep: "skein range list shows the ranges"}
	}
	d, byName := &descs[i], names(nodes)
	resp := &adminpb.RangeShowResponse{Replicas: make([]*adminpb.ReplicaState, len(d.Replicas))}
	leader, state, keys, bytes := "", "unreachable", int64(-1), int64(0)
	var mu sync.Mutex
	var wg sync.WaitGroup
	for i, rep := range d.Replicas {
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(ctx, askTimeout)
			defer cancel()
			s := &adminpb.ReplicaState{Node: byName[rep.Node], ReplicaId: uint64(rep.ID), Role: roleName(rep.Role)}
			st, err := a.c.shards.Client().Show(ctx, rep.Node, id)
			var text []byte
			if err == nil {
				text, err = json.Marshal(st)
			}
			mu.Lock()
			defer mu.Unlock()
			resp.Replicas[i] = s
			if err != nil {
				s.Error = err.Error()
				return
			}
			s.StateJson = string(text)
			if st.Serving {
				leader, state, bytes = s.Node, "awake", st.Bytes
				if st.Counted {
					keys = st.Keys
				}
				if st.Raft.Asleep {
					state = "asleep"
				}
			}
		})
	}
	wg.Wait()
	resp.Range = rangeRow(d, byName, leader, keys, bytes, state)
	return resp, nil
}

func roleName(r keyspace.Role) string {
	switch r {
	case keyspace.RoleVoter:
		return "voter"
	case keyspace.RoleLearner:
		return "learner"
	case keyspace.RoleVoterIncoming:
		return "incoming voter"
	case keyspace.RoleVoterOutgoing:
		return "outgoing voter"
	case keyspace.RoleVoterDemoting:
		return "demoting voter"
	}
	return fmt.Sprintf("role %d", r)
}

// Nodes implements adminapi.Backend.
func (a admin) Nodes(ctx context.Context) (*adminpb.NodeListResponse, error) {
	nodes, stale, err := a.members(ctx)
	if err != nil {
		return nil, err
	}
	lists := a.lists(ctx, nodes)
	out := make([]*adminpb.Node, len(nodes))
	for i, n := range nodes {
		l, alive := lists[n.ID]
		row := &adminpb.Node{Id: n.ID.String(), Name: n.Name, PeerUrls: n.PeerURLs, ClientUrls: n.ClientURLs, Alive: alive, Ranges: int64(len(l))}
		for _, s := range l {
			if s.IsLeader {
				row.Leaders++
			}
		}
		if alive { // the others have had their time to answer
			if rep, err := a.askReport(ctx, n.ID); err == nil {
				row.Bytes = rep.Bytes
			}
		}
		out[i] = row
	}
	return &adminpb.NodeListResponse{Nodes: out, Stale: stale}, nil
}

func (a admin) askReport(ctx context.Context, node keyspace.NodeID) (r report, err error) {
	if node == a.c.o.Self {
		return a.c.report(), nil
	}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	b, err := a.c.bus.Call(ctx, node, transport.MethodNodeAdmin, []byte{adminReport})
	if err != nil {
		return r, err
	}
	return r, json.Unmarshal(b, &r)
}

var _ router.Ranges = (*shard.Client)(nil)
