package recovery

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/keyspace"
)

// Cluster is a running cluster as Verify asks it.
type Cluster interface {
	// RangeList, RangeShow and PlacementShow are the admin service's.
	RangeList(ctx context.Context) (*adminpb.RangeListResponse, error)
	RangeShow(ctx context.Context, id uint64) (*adminpb.RangeShowResponse, error)
	PlacementShow(ctx context.Context) (*adminpb.PlacementShowResponse, error)
	// Revision is that of a linearizable read.
	Revision(ctx context.Context) (keyspace.Revision, error)
}

// Findings are what Verify has found.
type Findings struct {
	// Wrong is what the plan does not allow. It does not pass by itself.
	Wrong []string
	// Waits is what a cluster that has just started still lacks, and what therefore could not be checked.
	Waits []string
}

func (f *Findings) wrong(format string, args ...any) {
	f.Wrong = append(f.Wrong, fmt.Sprintf(format, args...))
}

func (f *Findings) waits(format string, args ...any) {
	f.Waits = append(f.Waits, fmt.Sprintf(format, args...))
}

// Verify compares the running cluster with the plan: every key has a range with a leader, replicas at the same place have
// the same hash, no dead node holds what the plan has repaired, and revisions are above the ceiling. It goes on where one
// question has no answer yet; an error says that the cluster cannot be asked at all.
func Verify(ctx context.Context, c Cluster, p *Plan) (*Findings, error) {
	f := &Findings{}
	list, err := c.RangeList(ctx)
	if err != nil {
		return nil, err
	}
	if list.GetStale() {
		f.waits("the placement group has no leader yet: the ranges below are the last that the asked node knew. It goes on from %s: is that node up?", p.goesOn(0))
	}
	ranges := slices.Clone(list.GetRanges())
	slices.SortFunc(ranges, func(a, b *adminpb.Range) int { return bytes.Compare(a.GetStart(), b.GetStart()) })
	var rows []RangeRow
	for _, r := range ranges {
		rows = append(rows, RangeRow{Start: key(r.GetStart()), End: key(r.GetEnd())})
	}
	for _, s := range gaps(rows) {
		f.wrong("no range answers for %s", s)
	}
	if place, err := c.PlacementShow(ctx); err != nil {
		f.waits("the placement group cannot be asked yet: %v", err)
	} else {
		for _, x := range place.GetReplicas() {
			if p.gone(x.GetNode(), x.GetReplicaId()) {
				f.onDead("the placement group", x.GetReplicaId(), x.GetNode())
			}
		}
	}
	for _, r := range ranges {
		p.verifyRange(ctx, c, r, f)
	}
	switch rev, err := c.Revision(ctx); {
	case err != nil:
		f.waits("no linearizable read is answered yet: %v", err)
	case rev < p.Ceiling:
		f.wrong("the revision is %d, and must not be below the plan's ceiling %d", rev, p.Ceiling)
	}
	return f, nil
}

func (p *Plan) verifyRange(ctx context.Context, c Cluster, r *adminpb.Range, f *Findings) {
	what := fmt.Sprintf("range %d %s", r.GetId(), keyspace.Span{Start: r.GetStart(), End: r.GetEnd()})
	if r.GetLeader() == "" || r.GetState() == "unreachable" {
		f.waits("%s has no leader yet: its replicas are on %s. Are these nodes up?", what, strings.Join(r.GetReplicas(), ", "))
		return
	}
	show, err := c.RangeShow(ctx, r.GetId())
	if err != nil {
		f.waits("%s cannot be asked yet: %v", what, err)
		return
	}
	hashes(show, what, f)
	if !p.repairs(keyspace.RangeID(r.GetId())) {
		return
	}
	for _, x := range show.GetReplicas() {
		if p.gone(x.GetNode(), x.GetReplicaId()) {
			f.onDead(what, x.GetReplicaId(), x.GetNode())
		}
	}
}

// goesOn names the node from which a group goes on.
func (p *Plan) goesOn(r keyspace.RangeID) string {
	for _, v := range p.Groups {
		if v.Range == r && v.Node != 0 {
			return p.nodeName(v.Node)
		}
	}
	return "nobody"
}

// repairs says whether the plan changes the range: then none of its replicas is on a dead node. A kept one loses
// those later, by placement.
func (p *Plan) repairs(r keyspace.RangeID) bool {
	kept := slices.ContainsFunc(p.Groups, func(v Verdict) bool { return v.Range == r && v.Verdict == Kept })
	return !kept && slices.ContainsFunc(p.Map, func(row RangeRow) bool { return row.Range == r })
}

// gone says whether the replica is one that a dead node had. A new node may have such a node's name, but
// no such replica.
func (p *Plan) gone(node string, r uint64) bool {
	return node != "" && r < uint64(p.NextReplica) && slices.ContainsFunc(p.Dead, func(n NodeRow) bool { return n.Name == node })
}

func (f *Findings) onDead(what string, r uint64, node string) {
	f.wrong("%s: replica %d is on %s, which never comes back by the plan: a node has come back that the plan does not know. Stop it, and keep its disk", what, r, node)
}

// hashes compares the replicas of a range that have applied the same entries.
func hashes(show *adminpb.RangeShowResponse, what string, f *Findings) {
	type state struct {
		Applied struct{ Index, Term uint64 } `json:"applied"`
		Hash    string                       `json:"hash"`
	}
	at := map[uint64]state{}
	for _, x := range show.GetReplicas() {
		var s state
		if x.GetStateJson() == "" || json.Unmarshal([]byte(x.GetStateJson()), &s) != nil {
			continue // it is silent, or being made
		}
		if o, ok := at[s.Applied.Index]; ok && o.Hash != s.Hash {
			f.wrong("%s: replicas at entry %d have the hashes %s and %s", what, s.Applied.Index, o.Hash, s.Hash)
		}
		at[s.Applied.Index] = s
	}
}
