package placement

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
)

// nodeEffect reads the commands about nodes of TestState's stories.
func nodeEffect(t *testing.T, d *datadriven.TestData) effect {
	t.Helper()
	text := func(name string) (s string) {
		d.MaybeScanArgs(t, name, &s)
		return s
	}
	var now UnixMillis
	d.MaybeScanArgs(t, "now", (*int64)(&now))
	switch d.Cmd {
	case "node":
		o := putNode{Now: now, Node: Node{ID: keyspace.NodeID(arg(t, d, "id")), Name: text("name")}}
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
			o.Change = nodeIsAdded
		case d.HasArg("move"):
			o.Change = nodeHasMoved
		case d.HasArg("claim"):
			o.Change = nodeIsClaimed
		}
		return o
	case "state":
		o := setNodeState{Node: keyspace.NodeID(arg(t, d, "id")), From: storyState(t, text("from")), To: storyState(t, text("to")), Leave: d.HasArg("leave"), Now: now}
		if d.HasArg("beside") {
			var ids []int
			d.ScanArgs(t, "beside", &ids)
			for _, id := range ids {
				o.Beside = append(o.Beside, keyspace.NodeID(id))
			}
		}
		return o
	case "remove":
		return removeNode{Node: keyspace.NodeID(arg(t, d, "id")), Now: now}
	case "begin":
		return beginOperation{Generation: 1, Operation: Operation{Range: keyspace.RangeID(arg(t, d, "range")), Kind: OperationAdd, To: keyspace.NodeID(arg(t, d, "to"))}}
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
	for _, n := range h.s.view(0, 0, nil).NodeTable() {
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
	if err := (&Node{Attributes: []Attribute{{"b", "1"}, {"a", "1"}}}).validate(); err == nil || !strings.Contains(err.Error(), "a comes after b") {
		t.Errorf("in disorder: %v", err)
	}
}

// TestNodeStatesOverTheBus: any node puts another one into another state, all see it, and
// a node that is gone for good never comes back: neither by its own word nor by another's.
func TestNodeStatesOverTheBus(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newRig(t, 1, 7, quiet)
		r.startAll()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		at := r.nodes[6].client // it has no replica of the placement group
		must := func(err error) {
			t.Helper()
			if err != nil {
				t.Fatal(err)
			}
		}
		refused := func(err error, kind kverror.Kind, says string) {
			t.Helper()
			if !errors.Is(err, kind) || !strings.Contains(err.Error(), says) {
				t.Errorf("%v, want %v that says %q", err, kind, says)
			}
		}
		must(at.SetNodeState(ctx, 6, NodeServing, NodeDraining))
		must(at.SetNodeState(ctx, 6, NodeServing, NodeDraining)) // asked again
		refused(at.SetNodeState(ctx, 6, NodeDecommissioned, NodeServing), kverror.BadRequest, "is draining, and not decommissioned")
		must(at.SetNodeState(ctx, 6, NodeDraining, NodeDecommissioned))
		refused(at.SetNodeState(ctx, 1, NodeServing, NodeDecommissioned), kverror.BadRequest, "others have begun to leave")
		must(at.SetNodeState(ctx, 1, NodeServing, NodeDecommissioned, 6))
		refused(at.RemoveNode(ctx, 1), kverror.BadRequest, "it has a replica of the placement group")
		refused(at.RemoveNode(ctx, 2), kverror.BadRequest, "node 2 is serving")
		refused(at.RemoveNode(ctx, 9), kverror.NodeNotFound, "there is no node 9")
		must(r.nodes[5].client.Publish(ctx, Node{Name: "n6", ClientURLs: []string{"http://c"}, Attributes: []Attribute{{"zone", "a"}}}))
		must(at.RemoveNode(ctx, 6))
		must(at.RemoveNode(ctx, 6)) // asked again
		refused(r.nodes[5].client.Publish(ctx, Node{Name: "n6"}), kverror.NodeRemoved, "never let in again")
		refused(at.AddNode(ctx, Node{ID: 6, PeerURLs: []string{"http://six"}}), kverror.NodeRemoved, "never let in again")
		refused(at.SetNodeState(ctx, 6, NodeDecommissioned, NodeServing), kverror.NodeRemoved, "never let in again")
		must(at.AddNode(ctx, Node{ID: 8, PeerURLs: []string{"http://eight"}}))
		must(at.AddNode(ctx, Node{ID: 8, PeerURLs: []string{"http://eight"}})) // asked again
		refused(at.AddNode(ctx, Node{ID: 8, PeerURLs: []string{"http://other"}}), kverror.NodeExists, "node 8 is there already")
		refused(at.AddNode(ctx, Node{ID: 9, PeerURLs: []string{"http://eight"}}), kverror.PeerURLExists, "http://eight")
		refused(at.AddNode(ctx, Node{ID: 9, Attributes: []Attribute{{"zone", ""}}}), kverror.BadRequest, "no value")
		must(at.SetPeerURLs(ctx, 8, []string{"http://acht"}))
		for _, n := range r.nodes {
			checkNodes(ctx, t, n.client)
		}
		must(at.SetPaused(ctx, true))
		if v := r.leader().service.View(); !v.Paused() {
			t.Error("placement is not paused")
		}
		must(at.SetPaused(ctx, false))
		if v := r.leader().service.View(); v.Paused() {
			t.Error("placement is still paused")
		}
		r.stopAllAtOnce()
	})
}

// checkNodes: the quorum's node table and the node's own copy of it are those that the
// test has made.
func checkNodes(ctx context.Context, t *testing.T, c *Client) {
	t.Helper()
	all, err := c.NodeTable(ctx, true)
	members, merr := c.Members(ctx, true)
	if err != nil || merr != nil || len(all) != 8 || len(members) != 7 {
		t.Fatalf("%d rows and %d members, %v, %v", len(all), len(members), err, merr)
	}
	for {
		m, changed := c.WatchMap()
		if n, ok := m.Node(8); ok && n.PeerURLs[0] == "http://acht" && n.State == NodeUnstarted {
			if gone, _ := m.Node(6); gone.State != NodeRemoved || gone.Since == 0 || gone.Name != "n6" || gone.ClientURLs != nil || len(m.Nodes()) != 7 {
				t.Fatalf("the removed node is %+v among %d", gone, len(m.Nodes()))
			}
			if n, _ := m.Node(1); n.State != NodeDecommissioned || n.Since == 0 {
				t.Fatalf("the decommissioned node is %+v", n)
			}
			return
		}
		select {
		case <-changed:
		case <-ctx.Done():
			t.Fatal("the copy is not brought up to date")
		}
	}
}
