package recovery

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/keyspace"
)

// fakeCluster answers as it is told.
type fakeCluster struct {
	ranges    map[uint64][]*adminpb.ReplicaState
	placement []*adminpb.PlacementReplica
	revision  keyspace.Revision
	leader    string
	stale     bool
	showFails error
	readFails error
}

func (c *fakeCluster) RangeList(context.Context) (*adminpb.RangeListResponse, error) {
	l := &adminpb.RangeListResponse{Stale: c.stale}
	for r := range c.ranges {
		row := &adminpb.Range{Id: r, Leader: c.leader, Replicas: []string{"n1", "n3"}, Start: []byte(fmt.Sprint(r)), End: []byte(fmt.Sprint(r + 1))}
		if r == 1 {
			row.Start = nil
		}
		if int(r) == len(c.ranges) {
			row.End = nil
		}
		l.Ranges = append(l.Ranges, row)
	}
	return l, nil
}

func (c *fakeCluster) RangeShow(_ context.Context, r uint64) (*adminpb.RangeShowResponse, error) {
	return &adminpb.RangeShowResponse{Replicas: c.ranges[r]}, c.showFails
}

func (c *fakeCluster) PlacementShow(context.Context) (*adminpb.PlacementShowResponse, error) {
	return &adminpb.PlacementShowResponse{Replicas: c.placement}, nil
}

func (c *fakeCluster) Revision(context.Context) (keyspace.Revision, error) {
	return c.revision, c.readFails
}

// What is not as the plan says is told. A kept range may have a replica on a dead node for a while, and a new node
// may have a dead one's name.
func TestVerify(t *testing.T) {
	p := &Plan{
		Ceiling: 100, NextReplica: 1000, Survivors: []NodeRow{{1, "n1", "serving"}}, Dead: []NodeRow{{2, "n2", "serving"}, {3, "", "serving"}},
		Groups: []Verdict{{Verdict: Safe, Node: 1}, {Range: 1, Verdict: Kept}, {Range: 2, Verdict: Safe}, {Range: 9, Verdict: Covered}},
		Map:    []RangeRow{{Range: 1}, {Range: 2}, {Range: 3, New: true}},
	}
	on := func(node string, r uint64) *adminpb.ReplicaState {
		return &adminpb.ReplicaState{Node: node, ReplicaId: r}
	}
	hash := func(node string, index int, h string) *adminpb.ReplicaState {
		return &adminpb.ReplicaState{Node: node, ReplicaId: 1001, StateJson: fmt.Sprintf(`{"applied": {"index": %d, "term": 2}, "hash": %q}`, index, h)}
	}
	healthy := func() *fakeCluster {
		return &fakeCluster{
			ranges: map[uint64][]*adminpb.ReplicaState{
				1: {on("n1", 1), on("n2", 2)}, 2: {on("n1", 1), on("n2", 1000)}, 3: {on("n1", 2)},
			},
			placement: []*adminpb.PlacementReplica{{Node: "n1", ReplicaId: 1}, {Node: "n2", ReplicaId: 1001}},
			revision:  100, leader: "n1",
		}
	}
	for _, c := range []struct {
		name   string
		change func(*fakeCluster)
		want   []string
		// waits says that it may pass.
		waits bool
	}{
		{"healthy", func(*fakeCluster) {}, nil, false},
		{"a dead node in a repaired range", func(c *fakeCluster) { c.ranges[2][1] = on("n2", 999) }, []string{"replica 999 is on n2, which never comes back"}, false},
		{"a dead node in a range made anew", func(c *fakeCluster) { c.ranges[3] = append(c.ranges[3], on("n2", 5)) }, []string{"replica 5 is on n2"}, false},
		{"a dead node in placement", func(c *fakeCluster) { c.placement[1].ReplicaId = 2 }, []string{"placement group: replica 2 is on n2"}, false},
		{"hashes", func(c *fakeCluster) {
			c.ranges[1] = []*adminpb.ReplicaState{hash("n1", 7, "a"), hash("n2", 7, "b"), hash("n3", 8, "c")}
		}, []string{"replicas at entry 7"}, false},
		{"a gap", func(c *fakeCluster) { delete(c.ranges, 1) }, []string{"no range answers for"}, false},
		{"no leader", func(c *fakeCluster) { c.leader = "" }, []string{"range 1 [\"\", \"2\") has no leader yet: its replicas are on n1, n3", "range 2 ", "range 3 "}, true},
		{"a range that cannot be asked", func(c *fakeCluster) { c.showFails = errors.New("no") }, []string{"cannot be asked yet: no"}, true},
		{"no read is answered", func(c *fakeCluster) { c.readFails = errors.New("no") }, []string{"no linearizable read is answered yet: no"}, true},
		{"placement without a leader", func(c *fakeCluster) { c.stale = true }, []string{"It goes on from n1 (1)"}, true},
		{"an old revision", func(c *fakeCluster) { c.revision = 99 }, []string{"the revision is 99"}, false},
	} {
		f := healthy()
		c.change(f)
		found, err := Verify(t.Context(), f, p)
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		wrong, none := found.Wrong, found.Waits
		if c.waits {
			wrong, none = none, wrong
		}
		if len(none) > 0 {
			t.Errorf("%s: besides %q", c.name, none)
		}
		for _, w := range c.want {
			if !slices.ContainsFunc(wrong, func(s string) bool { return strings.Contains(s, w) }) {
				t.Errorf("%s: %q lacks %q", c.name, wrong, w)
			}
		}
		if c.want == nil && len(wrong) > 0 {
			t.Errorf("%s: %q", c.name, wrong)
		}
	}
}
