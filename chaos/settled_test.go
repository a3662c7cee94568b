package chaos

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/api/adminpb"
)

// voters is how many replicas each range must have.
const voters = 3

// census is the cluster's report on itself.
type census struct {
	ranges     []*adminpb.Range // in the order in which they were listed
	replicas   map[uint64][]*adminpb.ReplicaState
	nodes      []*adminpb.Node
	operations []*adminpb.Operation
}

// newAdmin is a client of the admin service of all nodes.
func newAdmin(urls []string) (*adminapi.Client, error) { return adminapi.NewClient(urls, nil) }

// takeCensus asks the cluster.
func takeCensus(ctx context.Context, admin *adminapi.Client) (*census, error) {
	ctx, cancel := context.WithTimeout(ctx, collectPatience)
	defer cancel()
	c := &census{replicas: map[uint64][]*adminpb.ReplicaState{}}
	l, err := admin.RangeList(ctx)
	if err != nil {
		return nil, err
	}
	c.ranges = l.GetRanges()
	for _, r := range c.ranges {
		shown, err := admin.RangeShow(ctx, r.GetId())
		if err != nil {
			return nil, err
		}
		c.replicas[r.GetId()] = shown.GetReplicas()
	}
	n, err := admin.NodeList(ctx)
	if err != nil {
		return nil, err
	}
	c.nodes = n.GetNodes()
	ops, err := admin.OperationList(ctx)
	if err != nil {
		return nil, err
	}
	if ops.GetStale() {
		return nil, errors.New("no quorum of the placement group says what is under way")
	}
	c.operations = ops.GetOperations()
	return c, nil
}

// covers says whether ranges, in the order of their spans, cover the keyspace exactly once.
func covers(ranges []*adminpb.Range) (bad []string) {
	var at []byte
	ids := map[uint64]bool{}
	for i, r := range ranges {
		if !bytes.Equal(r.GetStart(), at) {
			bad = append(bad, fmt.Sprintf("range %d begins at %q, and the one before it ends at %q", r.GetId(), r.GetStart(), at))
		}
		if len(r.GetEnd()) == 0 != (i == len(ranges)-1) {
			bad = append(bad, fmt.Sprintf("range %d of %d, %d, ends at %q", i+1, len(ranges), r.GetId(), r.GetEnd()))
		}
		if ids[r.GetId()] {
			bad = append(bad, fmt.Sprintf("range %d is there twice", r.GetId()))
		}
		ids[r.GetId()] = true
		at = r.GetEnd()
	}
	if len(ranges) == 0 {
		bad = append(bad, "there is no range")
	}
	return bad
}

// replicaState is the part of replicas that is compared.
type replicaState struct {
	Applied    struct{ Index, Term uint64 }
	Hash       string
	Descriptor struct {
		Generation uint64
		Span       struct{ Start, End []byte }
	}
}

// equal says how the replicas of a range differ from each other and from the map.
func equal(r *adminpb.Range, replicas []*adminpb.ReplicaState, want int) (bad []string) {
	if len(replicas) != want {
		bad = append(bad, fmt.Sprintf("range %d has %d replicas", r.GetId(), len(replicas)))
	}
	var first replicaState
	for i, rep := range replicas {
		var st replicaState
		if err := json.Unmarshal([]byte(rep.GetStateJson()), &st); err != nil || rep.GetError() != "" {
			bad = append(bad, fmt.Sprintf("the replica of range %d on %s: %v %s", r.GetId(), rep.GetNode(), err, rep.GetError()))
			continue
		}
		if i == 0 {
			first = st
		}
		if st.Hash == "" || st.Applied.Index == 0 || st.Applied != first.Applied || st.Hash != first.Hash {
			bad = append(bad, fmt.Sprintf("range %d on %s and %s: %+v and %+v", r.GetId(), replicas[0].GetNode(), rep.GetNode(), first, st))
		}
		if d := st.Descriptor; d.Generation != r.GetGeneration() || !bytes.Equal(d.Span.Start, r.GetStart()) || !bytes.Equal(d.Span.End, r.GetEnd()) {
			bad = append(bad, fmt.Sprintf("range %d is %v, and on %s %+v", r.GetId(), r, rep.GetNode(), d))
		}
		if rep.GetRole() != "voter" {
			bad = append(bad, fmt.Sprintf("the replica of range %d on %s is a %s", r.GetId(), rep.GetNode(), rep.GetRole()))
		}
	}
	return bad
}

// wrong says how a cluster differs from one at rest. At rest the map covers the keyspace
// once and nothing is under way. Each range has all its replicas and they are equal. No
// node holds a replica that the map does not give it.
func (c *census) wrong(want int) (bad []string) {
	bad = covers(c.ranges)
	held := map[string]int64{}
	for _, r := range c.ranges {
		bad = append(bad, equal(r, c.replicas[r.GetId()], want)...)
		for _, rep := range c.replicas[r.GetId()] {
			held[rep.GetNode()]++
		}
	}
	for _, n := range c.nodes {
		if n.GetRanges() != held[n.GetName()] {
			bad = append(bad, fmt.Sprintf("%s holds %d replicas, and the map gives it %d", n.GetName(), n.GetRanges(), held[n.GetName()]))
		}
	}
	for _, o := range c.operations {
		bad = append(bad, fmt.Sprintf("under way: %s", o))
	}
	return bad
}

// learners says which replicas are no voters.
func (c *census) learners() (found []string) {
	for _, r := range c.ranges {
		for _, rep := range c.replicas[r.GetId()] {
			if rep.GetRole() != "voter" {
				found = append(found, fmt.Sprintf("the replica of range %d on %s is a %s", r.GetId(), rep.GetNode(), rep.GetRole()))
			}
		}
	}
	return found
}

// tidied waits for a moment without learners. A split during a move leaves a learner,
// which placement removes by a decision of its own. It does not while decisions are
// paused.
func (s *storm) tidied(ctx context.Context) {
	term := s.c.still.term(stormPatience, "the end of what splits have left behind")
	for ; ; wait(ctx, 200*time.Millisecond) {
		c, err := takeCensus(ctx, s.c.admin)
		if err == nil && len(c.learners()) == 0 {
			s.measure("no learner is left after", term.took())
			return
		}
		if term.over() {
			var found []string
			if err == nil {
				found = c.learners()
			}
			s.c.late("placement: %v after the last split: %q, %v", term.took(), found, err)
			return
		}
	}
}

// settled waits until the cluster is at rest, and says how long that took.
func (s *storm) settled(ctx context.Context, healed time.Time) {
	term := s.c.still.term(stormPatience, "rest")
	for {
		c, err := takeCensus(ctx, s.c.admin)
		var bad []string
		if err == nil {
			if bad = c.wrong(voters); len(bad) == 0 {
				s.measure(fmt.Sprintf("%d ranges at rest, none on a node that is not to have it, after healing", len(c.ranges)), time.Since(healed))
				return
			}
		}
		if term.over() {
			s.c.verdict(err != nil, "at rest: %v after the last write: %q, %v", term.took(), bad, err)
			return
		}
		wait(ctx, 500*time.Millisecond)
	}
}

// wellCensus is a cluster of two ranges at rest.
func wellCensus() *census {
	state := func(start, end string) string {
		st := map[string]any{
			"applied": map[string]any{"Index": 7, "Term": 2}, "hash": "abc",
			"descriptor": map[string]any{"Generation": 3, "Span": map[string]any{"Start": []byte(start), "End": []byte(end)}},
		}
		text, err := json.Marshal(st)
		if err != nil {
			panic(err)
		}
		return string(text)
	}
	c := &census{replicas: map[uint64][]*adminpb.ReplicaState{}}
	for i, span := range [][2]string{{"", "m"}, {"m", ""}} {
		id := uint64(i + 1)
		c.ranges = append(c.ranges, &adminpb.Range{Id: id, Generation: 3, Start: []byte(span[0]), End: []byte(span[1])})
		for _, n := range []string{"n1", "n2", "n3"} {
			c.replicas[id] = append(c.replicas[id], &adminpb.ReplicaState{Node: n, Role: "voter", StateJson: state(span[0], span[1])})
		}
	}
	for _, n := range []string{"n1", "n2", "n3"} {
		c.nodes = append(c.nodes, &adminpb.Node{Name: n, Ranges: 2, Alive: true})
	}
	c.nodes = append(c.nodes, &adminpb.Node{Name: "n4", Alive: true})
	return c
}

// A cluster at rest is accepted, and each kind of error in one is found.
func TestCensusFindsWhatIsWrong(t *testing.T) {
	if bad := wellCensus().wrong(voters); len(bad) > 0 {
		t.Fatalf("a cluster at rest: %q", bad)
	}
	spoilState := func(c *census, f func(st map[string]any)) {
		rep := c.replicas[2][1]
		var st map[string]any
		if err := json.Unmarshal([]byte(rep.StateJson), &st); err != nil {
			t.Fatal(err)
		}
		f(st)
		text, err := json.Marshal(st)
		if err != nil {
			t.Fatal(err)
		}
		rep.StateJson = string(text)
	}
	for what, spoil := range map[string]func(c *census){
		"a gap in the map":          func(c *census) { c.ranges[1].Start = []byte("n") },
		"an overlap in the map":     func(c *census) { c.ranges[1].Start = []byte("k") },
		"a range twice":             func(c *census) { c.ranges[1].Id = 1 },
		"the end is missing":        func(c *census) { c.ranges = c.ranges[:1] },
		"an end in the middle":      func(c *census) { c.ranges[0].End = nil },
		"no range":                  func(c *census) { c.ranges = nil },
		"a replica too few":         func(c *census) { c.replicas[1] = c.replicas[1][:2] },
		"a replica is silent":       func(c *census) { c.replicas[1][2].Error = "unreachable" },
		"a learner is left":         func(c *census) { c.replicas[1][2].Role = "learner" },
		"an orphan":                 func(c *census) { c.nodes[3].Ranges = 1 },
		"a node lacks a replica":    func(c *census) { c.nodes[0].Ranges = 1 },
		"an operation is under way": func(c *census) { c.operations = append(c.operations, &adminpb.Operation{Id: 1}) },
		"another hash":              func(c *census) { spoilState(c, func(st map[string]any) { st["hash"] = "abd" }) },
		"a replica lags": func(c *census) {
			spoilState(c, func(st map[string]any) { st["applied"] = map[string]any{"Index": 6, "Term": 2} })
		},
		"a replica has another span": func(c *census) {
			spoilState(c, func(st map[string]any) {
				st["descriptor"] = map[string]any{"Generation": 2, "Span": map[string]any{"Start": []byte("m"), "End": []byte("x")}}
			})
		},
	} {
		c := wellCensus()
		spoil(c)
		if len(c.wrong(voters)) == 0 {
			t.Errorf("%s: nothing is found", what)
		}
	}
	c := wellCensus()
	c.replicas[2][1].Role = "learner"
	if found := c.learners(); !slices.Equal(found, []string{"the replica of range 2 on n2 is a learner"}) {
		t.Errorf("learners: %q", found)
	}
	if bad := wellCensus().wrong(5); !slices.Contains(bad, "range 1 has 3 replicas") {
		t.Errorf("three replicas where five are to be: %q", bad)
	}
}
