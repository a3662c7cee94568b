package operate

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/decide"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/shard"
)

// ShowRange implements adminapi.Backend. The map may be late: what replicas have newer goes
// before it.
func (a *Admin) ShowRange(ctx context.Context, id keyspace.RangeID) (*adminpb.RangeShowResponse, error) {
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
	said := saidBy(&d, all)
	for i := range said {
		resp.Replicas = append(resp.Replicas, replicaState(&said[i], byName))
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
		leader, state, size = byName[st.Node], StateMerging, st.Bytes
	}
	resp.Range = rangeRow(&d, byName, leader, keys, size, state)
	// A node that has just started has not heard all others, and those that answer live.
	alive := func(n keyspace.NodeID) bool {
		return a.o.Peers.Alive(n) || slices.ContainsFunc(all, func(s shown) bool { return s.of.Node == n && s.err == nil })
	}
	if !d.HasQuorum(func(r keyspace.Replica) bool { return alive(r.Node) && !inQuarantine(r, said) }) {
		resp.Range.Leader, resp.Range.State, resp.Range.WaitsFor = "", adminapi.StateNoQuorum, waitsFor(&d, byName, alive)
	}
	if st := leading(&d, all); st != nil && st.Load != nil && resp.Range.GetLeader() != "" {
		resp.Range.WritesPerSecond, resp.Range.ReadsPerSecond, resp.Range.WriteBytesPerSecond = st.Load.WritesPerSecond, st.Load.ReadsPerSecond, st.Load.BytesPerSecond
	}
	for i := range said {
		markQuarantined(resp.Range, said[i].closed)
	}
	resp.Range.Kept = a.kept(d.Span.Start)
	if ops, _ := a.operations(ctx, stale); len(ops) > 0 { // the replicas speak for themselves without it
		if i := slices.IndexFunc(ops, func(o fsm.Operation) bool { return o.Range == id }); i >= 0 {
			resp.Range.Operation = operationRow(&ops[i], byName)
		}
	}
	return resp, nil
}

// noRange returns a refusal for a range that the map lacks, with the range it merges into.
func (a *Admin) noRange(ctx context.Context, id keyspace.RangeID, stale bool) error {
	ops, _ := a.operations(ctx, stale)
	i := slices.IndexFunc(ops, func(o fsm.Operation) bool { return o.Right == id && o.Phase == fsm.MergeCommitted })
	if i >= 0 {
		return &adminapi.Refusal{
			Reason:   fmt.Sprintf("range %s is being merged into range %s", id, ops[i].Range),
			NextStep: fmt.Sprintf("skein range show %s shows what it becomes", ops[i].Range),
		}
	}
	return &adminapi.Refusal{Reason: fmt.Sprintf("there is no range %s", id), NextStep: "skein range list shows the ranges"}
}

// showRounds bounds how often those are asked who hold a range by what the last ones have said.
const showRounds = 3

// showAll asks all replicas that the range has by the descriptor, at the same time.
func (a *Admin) showAll(ctx context.Context, d *keyspace.Descriptor) []shown {
	all := make([]shown, len(d.Replicas))
	var wg sync.WaitGroup
	for i, rep := range d.Replicas {
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(ctx, askTimeout)
			defer cancel()
			st, err := a.o.Replicas.Show(ctx, rep.Node, d.Range)
			all[i] = shown{of: rep, state: st, err: err}
			if r, rerr := a.report(ctx, rep.Node); rerr == nil {
				all[i].closed = closedOf(&keyspace.Descriptor{Range: d.Range, Replicas: []keyspace.Replica{rep}}, map[keyspace.NodeID]Report{rep.Node: r})
			}
		})
	}
	wg.Wait()
	return all
}

// shown is what one replica of a range says of itself.
type shown struct {
	of    keyspace.Replica
	state *shard.Status
	err   error
	// closed has the replica if it is in quarantine.
	closed []decide.Quarantined
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

// leading returns the state of the range's leader, nil if none answered. A leader with an older
// descriptor than another replica or the map was deposed and does not know it yet.
func leading(d *keyspace.Descriptor, all []shown) *shard.Status {
	var lead *shard.Status
	for _, s := range all {
		if s.err == nil && s.state.Serving && !d.Newer(&s.state.Descriptor) && (lead == nil || s.state.Raft.Term > lead.Raft.Term) {
			lead = s.state
		}
	}
	return lead
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

// inQuarantine says whether the replica's node keeps it closed.
func inQuarantine(r keyspace.Replica, said []shown) bool {
	return slices.ContainsFunc(said, func(s shown) bool { return s.of.ID == r.ID && len(s.closed) > 0 })
}

var errNotAsked = errors.New("it came to the range while its replicas were asked: ask again")

func replicaState(s *shown, byName map[keyspace.NodeID]string) *adminpb.ReplicaState {
	row := &adminpb.ReplicaState{Node: byName[s.of.Node], ReplicaId: uint64(s.of.ID), Role: roleName(s.of.Role)}
	text, err := []byte(nil), s.err
	if err == nil {
		text, err = json.Marshal(s.state)
	}
	if row.StateJson = string(text); err != nil {
		row.Error = err.Error()
	}
	if len(s.closed) > 0 {
		row.Error = "in quarantine: " + s.closed[0].Reason
	}
	return row
}
