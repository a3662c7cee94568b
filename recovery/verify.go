package recovery

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"slices"

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

// Verify returns what is not as the plan says in the running cluster, nothing if all is: every key has a
// range with a leader, replicas at the same place have the same hash, no dead node holds what the plan
// has repaired, and revisions are above the ceiling. A cluster that has just started needs a moment.
func Verify(ctx context.Context, c Cluster, p *Plan) (wrong []string, err error) {
	list, err := c.RangeList(ctx)
	if err != nil {
		return nil, err
	}
	if list.GetStale() {
		wrong = append(wrong, "placement has no leader: what follows is the last that the asked node knew")
	}
	ranges := slices.Clone(list.GetRanges())
	slices.SortFunc(ranges, func(a, b *adminpb.Range) int { return bytes.Compare(a.GetStart(), b.GetStart()) })
	var rows []RangeRow
	for _, r := range ranges {
		rows = append(rows, RangeRow{Start: key(r.GetStart()), End: key(r.GetEnd())})
	}
	for _, s := range gaps(rows) {
		wrong = append(wrong, fmt.Sprintf("no range answers for %s", s))
	}
	place, err := c.PlacementShow(ctx)
	if err != nil {
		return wrong, err
	}
	for _, x := range place.GetReplicas() {
		if p.gone(x.GetNode(), x.GetReplicaId()) {
			wrong = append(wrong, onDead("the placement group", x.GetReplicaId(), x.GetNode()))
		}
	}
	for _, r := range ranges {
		if r.GetLeader() == "" || r.GetState() == "unreachable" {
			wrong = append(wrong, fmt.Sprintf("range %d has no leader", r.GetId()))
			continue
		}
		show, err := c.RangeShow(ctx, r.GetId())
		if err != nil {
			return wrong, err
		}
		wrong = append(wrong, hashes(show, r.GetId())...)
		if !p.repairs(keyspace.RangeID(r.GetId())) {
			continue
		}
		for _, x := range show.GetReplicas() {
			if p.gone(x.GetNode(), x.GetReplicaId()) {
				wrong = append(wrong, onDead(fmt.Sprintf("range %d", r.GetId()), x.GetReplicaId(), x.GetNode()))
			}
		}
	}
	rev, err := c.Revision(ctx)
	if err != nil {
		return wrong, err
	}
	if rev < p.Ceiling {
		wrong = append(wrong, fmt.Sprintf("the revision is %d, and must not be below the plan's ceiling %d", rev, p.Ceiling))
	}
	return wrong, nil
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

func onDead(what string, r uint64, node string) string {
	return fmt.Sprintf("%s: replica %d is on %s, which never comes back by the plan: a node was started before apply had run on all survivors", what, r, node)
}

// hashes compares the replicas of a range that have applied the same entries.
func hashes(show *adminpb.RangeShowResponse, r uint64) (wrong []string) {
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
			wrong = append(wrong, fmt.Sprintf("range %d: replicas at entry %d have the hashes %s and %s", r, s.Applied.Index, o.Hash, s.Hash))
		}
		at[s.Applied.Index] = s
	}
	return wrong
}
