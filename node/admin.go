package node

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/router"
	"github.com/skeindb/skein/shard"
	"github.com/skeindb/skein/transport"
)

// admin answers operators' questions about the whole cluster.
type admin struct{ c *Core }

// report is what a node says of itself for the list of nodes.
type report struct {
	Bytes int64
	// Capacity and Used are the bytes of the disk with its data, 0 where the file system
	// does not say.
	Capacity, Used int64
	// Lonely says that it has heard fewer than half of the other nodes for a while, so that it
	// hands over what it leads. It is its own word: what its liveness messages say changes for
	// a moment with each start, which is no reason to refuse anything.
	Lonely bool
	// Hears are the other nodes that it hears.
	Hears []keyspace.NodeID
}

func (c *Core) report() report {
	total, _ := c.engine.DiskBytes()
	r := report{Bytes: total + c.wal.LiveBytes(), Lonely: !c.host.Connected(c.o.Self)}
	if u, err := c.o.FS.GetDiskUsage(c.o.DataDir); err == nil {
		r.Capacity, r.Used = int64(min(u.TotalBytes, math.MaxInt64)), int64(min(u.UsedBytes, math.MaxInt64))
	}
	if m, _ := c.client.WatchMap(); m != nil {
		for _, n := range m.NodeTable() {
			if n.ID != c.o.Self && c.alive(n.ID) {
				r.Hears = append(r.Hears, n.ID)
			}
		}
	}
	return r
}

// askTimeout bounds what one node may take to answer for a list, where it is not known to live
// (askFor); it is then listed as unreachable.
const askTimeout = 2 * time.Second

func rangeRow(d *keyspace.Descriptor, byName map[keyspace.NodeID]string, leader string, keys, bytes int64, state string) *adminpb.Range {
	r := &adminpb.Range{
		Id: uint64(d.Range), Generation: uint64(d.Generation), Start: d.Span.Start, End: d.Span.End,
		Leader: leader, Keys: keys, Bytes: bytes, State: state, ConfIndex: d.ConfIndex,
	}
	for _, rep := range d.Replicas {
		r.Replicas = append(r.Replicas, byName[rep.Node])
		r.Members = append(r.Members, &adminpb.Replica{Node: byName[rep.Node], ReplicaId: uint64(rep.ID), Role: roleName(rep.Role)})
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
	if err := a.c.client.KeepBorder(ctx, key); err != nil {
		return nil, nil, &adminapi.Refusal{
			Reason:   fmt.Sprintf("a range begins at %q now, but placement does not know yet that it is to stay: %v", key, err),
			NextStep: "repeat the command when placement has a leader, or the range is merged with its neighbour if both stay small and cold",
		}
	}
	byName := names(nodes)
	row := func(d *keyspace.Descriptor) *adminpb.Range {
		return rangeRow(d, byName, byName[leader], -1, 0, "awake")
	}
	left, right = row(&ds[0]), row(&ds[1])
	left.Kept, right.Kept = a.kept(ds[0].Span.Start), true
	return left, right, nil
}

// kept says whether somebody has set that a range begins at the key, by the map as this node
// knows it.
func (a admin) kept(key []byte) bool {
	m, _ := a.c.client.WatchMap()
	if m == nil {
		return false
	}
	g := m.Lookup(key)
	return g.Kept && bytes.Equal(g.Descriptor.Span.Start, key)
}

// split asks the leader of the key's range, wherever it is, to split it. It is repeated also
// where nobody knows whether the range is split by now, as where its leader has died: each
// attempt names the range's generation, so that one of them at most does it.
func (a admin) split(ctx context.Context, key []byte) ([]keyspace.Descriptor, keyspace.NodeID, error) {
	var unsure error                  // what an attempt ended with whose fate is unknown
	var whole []byte                  // the first key of the range that it was to split
	failed := func(err error) error { // the earlier one says more than that there is no leader
		if unsure != nil {
			return unsure
		}
		return err
	}
	for turn := 0; ; turn++ {
		l, err := a.c.router.Locate(ctx, keyspace.Single(key))
		if err != nil {
			return nil, 0, failed(err)
		}
		d := &l[0].Descriptor
		if string(d.Span.Start) == string(key) && unsure != nil {
			left, err := a.c.router.Locate(ctx, keyspace.Single(whole))
			if err != nil {
				return nil, 0, unsure
			}
			return []keyspace.Descriptor{left[0].Descriptor, *d}, l[0].Leader, nil
		}
		if string(d.Span.Start) == string(key) {
			if len(key) > 0 {
				if err := a.c.client.KeepBorder(ctx, key); err != nil {
					return nil, 0, err // whoever made it, it is to stay
				}
			}
			return nil, 0, &adminapi.Refusal{
				Reason:   fmt.Sprintf("range %s begins at %q already", d.Range, key),
				NextStep: "nothing is left to do: it stays until it is merged by command. Or choose another key (skein range list shows the borders)",
			}
		}
		node := l[0].Leader
		if node == 0 || turn%2 == 1 {
			node = d.Replicas[turn/2%len(d.Replicas)].Node
		}
		ds, heir, err := a.splitAt(ctx, node, d, key)
		if err == nil {
			return ds, node, nil
		}
		if heir != 0 {
			a.c.router.Led(d.Range, heir)
			turn = -1 // it is asked next
		}
		e := kverror.Of(err)
		if ctx.Err() == nil && e.Kind != kverror.Internal && e.Fate() == kverror.Unknown {
			unsure, whole = err, d.Span.Start
		} else if e.Retry() != kverror.RetryRouter || ctx.Err() != nil {
			return nil, 0, failed(err)
		}
		a.c.router.Learn(e.Descriptors...)
		if e.Leader != 0 {
			a.c.router.Led(d.Range, e.Leader)
		}
		if clock.Sleep(ctx, a.c.o.Clock, splitPause) != nil {
			return nil, 0, failed(err)
		}
	}
}

// shown is what one replica of a range says of itself.
type shown struct {
	of    keyspace.Replica
	state *shard.Status
	err   error
}

// showAll asks all replicas that the range has by the descriptor, at the same time.
func (a admin) showAll(ctx context.Context, d *keyspace.Descriptor) []shown {
	all := make([]shown, len(d.Replicas))
	var wg sync.WaitGroup
	for i, rep := range d.Replicas {
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(ctx, askTimeout)
			defer cancel()
			st, err := a.c.shards.Admin().Show(ctx, rep.Node, d.Range)
			all[i] = shown{rep, st, err}
		})
	}
	wg.Wait()
	return all
}

// newest returns the newest of the descriptor and what replicas have.
func newest(d keyspace.Descriptor, all []shown) keyspace.Descriptor {
	for _, s := range all {
		if s.err == nil && s.state.Descriptor.Newer(&d) {
			d = s.state.Descriptor
		}
	}
	return d
}

// leading returns the state of the range's leader, nil where none answered. One that has not
// what others have, or what somebody has heard of, does not lead any more, and knows it not yet.
func leading(d *keyspace.Descriptor, all []shown) *shard.Status {
	var lead *shard.Status
	for _, s := range all {
		if s.err == nil && s.state.Serving && !d.Newer(&s.state.Descriptor) && (lead == nil || s.state.Raft.Term > lead.Raft.Term) {
			lead = s.state
		}
	}
	return lead
}

// stateMerging is what a range is from the commit of its merge until it has absorbed the other
// half: its leader serves its own half, and who wants the other one waits.
const stateMerging = "merging"

// half says whether what a replica bound to the merge has is but the half of what the range is
// since the merge's commit; merge is 0 where it is bound to none.
func half(d, has *keyspace.Descriptor, merge uint64) bool {
	return merge != 0 && d.Generation > has.Generation
}

// absorbing returns the state of the leader of a range that is being merged, nil where there is
// none.
func absorbing(d *keyspace.Descriptor, all []shown) *shard.Status {
	for _, s := range all {
		if s.err == nil && s.state.Serving && half(d, &s.state.Descriptor, s.state.Merge) {
			return s.state
		}
	}
	return nil
}

// saidBy returns what the replicas of the descriptor have said, of all that were asked. One that
// the range got since was not.
func saidBy(d *keyspace.Descriptor, all []shown) []shown {
	said := make([]shown, 0, len(d.Replicas))
	for _, rep := range d.Replicas {
		s := shown{err: errNotAsked}
		if i := slices.IndexFunc(all, func(s shown) bool { return s.of.ID == rep.ID }); i >= 0 {
			s = all[i]
		}
		s.of = rep
		said = append(said, s)
	}
	return said
}

var errNotAsked = errors.New("it came to the range while its replicas were asked: ask again")

// showRounds bounds how often those are asked who hold a range by what the last ones have said.
const showRounds = 3

// splitAt asks one node to split the range, as atLeader has it asked.
func (a admin) splitAt(ctx context.Context, node keyspace.NodeID, d *keyspace.Descriptor, key []byte) (ds []keyspace.Descriptor, heir keyspace.NodeID, err error) {
	heir, err = a.atLeader(ctx, node, d, func(ctx context.Context) (err error) {
		ds, err = a.c.shards.Admin().Split(ctx, node, d.Range, d.Generation, key)
		return err
	})
	return ds, heir, err
}

// atLeader has something asked of the node that is taken for the range's leader. It gives up
// where another replica knows of another leader, and returns that: a node that is silent never
// answers, nor does a leader that is cut off, which takes what it is asked all the same. No limit
// of time does instead, since a leader waits a while for followers that lag.
func (a admin) atLeader(ctx context.Context, node keyspace.NodeID, d *keyspace.Descriptor, ask func(context.Context) error) (heir keyspace.NodeID, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	found := make(chan keyspace.NodeID, 1)
	go func() {
		found <- a.leaderBeside(ctx, node, d)
		cancel()
	}()
	err = ask(ctx)
	cancel()
	return <-found, err
}

// leaderBeside looks twice in an election timeout, until ctx ends, whether a replica knows of
// another leader than the node that says so itself, and returns it: a replica that lags may
// name one that led before.
func (a admin) leaderBeside(ctx context.Context, node keyspace.NodeID, d *keyspace.Descriptor) keyspace.NodeID {
	for clock.Sleep(ctx, a.c.o.Clock, a.c.o.Election/2) == nil {
		for _, m := range d.Replicas {
			if m.Node == node {
				continue
			}
			asked, cancel := clock.WithTimeout(ctx, a.c.o.Clock, a.c.o.Election)
			_, leader, err := a.c.shards.Admin().Look(asked, m.Node, d.Range)
			if err == nil && leader != 0 && leader != node && leader != m.Node {
				m.Node = leader
				_, leader, err = a.c.shards.Admin().Look(asked, leader, d.Range)
			}
			cancel()
			if err == nil && leader == m.Node {
				return leader
			}
		}
	}
	return 0
}

// ShowRange implements adminapi.Backend. The map may be late: what replicas have newer goes
// before it.
func (a admin) ShowRange(ctx context.Context, id keyspace.RangeID) (*adminpb.RangeShowResponse, error) {
	nodes, descs, stale, err := a.cluster(ctx)
	if err != nil {
		return nil, err
	}
	i := slices.IndexFunc(descs, func(d keyspace.Descriptor) bool { return d.Range == id })
	if i < 0 {
		return nil, a.noRange(ctx, id, stale)
	}
	d, byName := descs[i], names(nodes)
	var all []shown
	for range showRounds {
		all = a.showAll(ctx, &d)
		was := d
		if d = newest(d, all); !d.Newer(&was) {
			break
		}
	}
	resp := &adminpb.RangeShowResponse{}
	for _, s := range saidBy(&d, all) {
		resp.Replicas = append(resp.Replicas, replicaState(&s, byName))
	}
	leader, state, keys, size := "", "unreachable", int64(-1), int64(0)
	if st := leading(&d, all); st != nil {
		leader, state, size = byName[st.Node], "awake", st.Bytes
		if st.Counted {
			keys = st.Keys
		}
		if st.Raft.Asleep {
			state = "asleep"
		}
	} else if st := absorbing(&d, all); st != nil {
		leader, state, size = byName[st.Node], stateMerging, st.Bytes
	}
	resp.Range = rangeRow(&d, byName, leader, keys, size, state)
	resp.Range.Kept = a.kept(d.Span.Start)
	if ops, _ := a.operations(ctx, stale); len(ops) > 0 { // the replicas speak for themselves without it
		if i := slices.IndexFunc(ops, func(o placement.Operation) bool { return o.Range == id }); i >= 0 {
			resp.Range.Operation = operationRow(&ops[i], byName)
		}
	}
	return resp, nil
}

// noRange says that the map has not the range, and where its keys are going if that is known.
func (a admin) noRange(ctx context.Context, id keyspace.RangeID, stale bool) error {
	ops, _ := a.operations(ctx, stale)
	i := slices.IndexFunc(ops, func(o placement.Operation) bool { return o.Right == id && o.Phase == placement.MergeCommitted })
	if i >= 0 {
		return &adminapi.Refusal{
			Reason:   fmt.Sprintf("range %s is being merged into range %s", id, ops[i].Range),
			NextStep: fmt.Sprintf("skein range show %s shows what it becomes", ops[i].Range),
		}
	}
	return &adminapi.Refusal{Reason: fmt.Sprintf("there is no range %s", id), NextStep: "skein range list shows the ranges"}
}

func replicaState(s *shown, byName map[keyspace.NodeID]string) *adminpb.ReplicaState {
	row := &adminpb.ReplicaState{Node: byName[s.of.Node], ReplicaId: uint64(s.of.ID), Role: roleName(s.of.Role)}
	text, err := []byte(nil), s.err
	if err == nil {
		text, err = json.Marshal(s.state)
	}
	if row.StateJson = string(text); err != nil {
		row.Error = err.Error()
	}
	return row
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

var _ router.Ranges = (*rangeapi.Client)(nil)
