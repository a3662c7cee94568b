package fsm

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/internal/testkit"
)

// nodeEffect reads the commands about nodes of TestState's stories.
func nodeEffect(t *testing.T, d *datadriven.TestData) Effect {
	t.Helper()
	text := func(name string) (s string) {
		d.MaybeScanArgs(t, name, &s)
		return s
	}
	var now UnixMillis
	d.MaybeScanArgs(t, "now", (*int64)(&now))
	switch d.Cmd {
	case "node":
		o := PutNode{Now: now, Node: Node{ID: keyspace.NodeID(testkit.Arg(t, d, "id")), Name: text("name")}}
		d.MaybeScanArgs(t, "instance", &o.Node.Instance)
		if u := text("client"); u != "" {
			o.Node.ClientURLs = []string{u}
		}
		if u := text("peer"); u != "" {
			o.Node.PeerURLs = []string{u}
		}
		var err error
		if o.Node.Attributes, err = ParseAttributes(text("attributes")); err != nil {
			t.Fatal(err)
		}
		switch {
		case d.HasArg("add"):
			o.Change = NodeIsAdded
		case d.HasArg("move"):
			o.Change = NodeHasMoved
		case d.HasArg("claim"):
			o.Change = NodeIsClaimed
		}
		return o
	case "state":
		o := SetNodeState{Node: keyspace.NodeID(testkit.Arg(t, d, "id")), From: storyState(t, text("from")), To: storyState(t, text("to")), Leave: d.HasArg("leave"), Now: now}
		if d.HasArg("beside") {
			var ids []int
			d.ScanArgs(t, "beside", &ids)
			for _, id := range ids {
				o.Beside = append(o.Beside, keyspace.NodeID(id))
			}
		}
		return o
	case "remove":
		return RemoveNode{Node: keyspace.NodeID(testkit.Arg(t, d, "id")), Now: now}
	case "begin":
		return BeginOperation{Generation: 1, Operation: Operation{Range: keyspace.RangeID(testkit.Arg(t, d, "range")), Kind: OperationAdd, To: keyspace.NodeID(testkit.Arg(t, d, "to"))}}
	}
	return nil
}

func storyState(t *testing.T, name string) NodeState {
	t.Helper()
	for i, s := range nodeStates {
		if s == name {
			return NodeState(i)
		}
	}
	t.Fatalf("no state %q", name)
	return 0
}

func (h *stateStory) printNodes() string {
	var b strings.Builder
	for _, n := range h.s.View(0, 0, nil).NodeTable() {
		fmt.Fprintf(&b, "node %d %q %s since %d, peers %v, clients %v, attributes %v", n.ID, n.Name, n.State, n.Since, n.PeerURLs, n.ClientURLs, n.Attributes)
		if n.Leaves {
			b.WriteString(", leaves")
		}
		if n.Instance != 0 {
			fmt.Fprintf(&b, ", instance %x", n.Instance)
		}
		b.WriteByte('\n')
	}
	return b.String()
}

func TestParseAttributes(t *testing.T) {
	long := strings.Repeat("x", 257)
	var many []string
	for i := range 33 {
		many = append(many, fmt.Sprintf("k%d=v", i))
	}
	for _, tc := range []struct{ in, want, err string }{
		{in: "", want: "[]"},
		{in: "zone=a", want: "[{zone a}]"},
		{in: " zone=a , rack=r-1,", want: "[{rack r-1} {zone a}]"},
		{in: "zone", err: `attribute "zone" is not of the form KEY=VALUE`},
		{in: "zone=", err: `attribute "zone=" has no key or no value`},
		{in: "=a", err: `attribute "=a" has no key or no value`},
		{in: "zone=a=b", err: `attribute "zone=a=b" has other characters than letters`},
		{in: "z\x00=a", err: "has other characters than letters"},
		{in: "zone=a,zone=b", err: "attribute zone is given twice"},
		{in: long[:65] + "=a", err: "has 65 bytes, at most 64"},
		{in: "a=" + long, err: "has 257 bytes, at most 256"},
		{in: strings.Join(many, ","), err: "33 attributes, at most 32"},
	} {
		as, err := ParseAttributes(tc.in)
		switch {
		case tc.err != "" && (err == nil || !strings.Contains(err.Error(), tc.err)):
			t.Errorf("%q: %v, want %s", tc.in, err, tc.err)
		case tc.err == "" && (err != nil || fmt.Sprint(as) != tc.want):
			t.Errorf("%q: %v, %v, want %s", tc.in, as, err, tc.want)
		}
	}
	if err := (&Node{Attributes: []Attribute{{"b", "1"}, {"a", "1"}}}).Validate(); err == nil || !strings.Contains(err.Error(), "a comes after b") {
		t.Errorf("in disorder: %v", err)
	}
}

// A cluster may replace its nodes for ever: the rows of the nodes that were removed longest ago are
// forgotten. A node whose row is gone is admitted no more than one whose row is there.
func TestRemovedRowsAreForgotten(t *testing.T) {
	b := Bootstrap{Cluster: 0xc1, Nodes: []Node{{ID: 1, Name: "n1"}}, PlacementReplicas: 1}
	s := b.FirstState(firstIndex)
	index := uint64(firstIndex)
	apply := func(e Effect) error {
		index++
		return s.Apply(index, e).Err
	}
	must := func(e Effect) {
		t.Helper()
		if err := apply(e); err != nil {
			t.Fatal(err)
		}
	}
	const first, last = 2, 2 + 2*maxRemovedRows
	for id := keyspace.NodeID(first); id <= last; id++ {
		must(PutNode{Change: NodeIsAdded, Node: Node{ID: id}})
		// The clock of whoever removes the last ones is behind.
		must(RemoveNode{Node: id, Now: UnixMillis(min(id, last-10))})
	}
	removed := 0
	for _, n := range s.View(0, 0, nil).NodeTable() {
		if n.State == NodeRemoved {
			removed++
		}
	}
	if removed != maxRemovedRows {
		t.Errorf("%d rows of removed nodes, want %d", removed, maxRemovedRows)
	}
	for _, id := range []keyspace.NodeID{first, first + 1, last - 1, last} {
		if err := apply(PutNode{Change: NodePublishes, Node: Node{ID: id, ClientURLs: []string{"http://x"}}}); !errors.Is(err, kverror.NodeRemoved) {
			t.Errorf("node %s publishes itself after it was removed: %v", id, err)
		}
		if err := apply(PutNode{Change: NodeIsClaimed, Node: Node{ID: id, Instance: 7}}); err == nil {
			t.Errorf("node %s is claimed after it was removed", id)
		}
	}
	must(PutNode{Change: NodePublishes, Node: Node{ID: 1, Name: "n1", ClientURLs: []string{"http://x"}}})
}
