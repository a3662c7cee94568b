package placement

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/fsm"
)

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
		must(at.SetNodeState(ctx, 6, fsm.NodeServing, fsm.NodeDraining))
		must(at.SetNodeState(ctx, 6, fsm.NodeServing, fsm.NodeDraining)) // asked again
		refused(at.SetNodeState(ctx, 6, fsm.NodeDecommissioned, fsm.NodeServing), kverror.BadRequest, "is draining, and not decommissioned")
		must(at.SetNodeState(ctx, 6, fsm.NodeDraining, fsm.NodeDecommissioned))
		refused(at.SetNodeState(ctx, 1, fsm.NodeServing, fsm.NodeDecommissioned), kverror.BadRequest, "others have begun to leave")
		must(at.SetNodeState(ctx, 1, fsm.NodeServing, fsm.NodeDecommissioned, 6))
		refused(at.RemoveNode(ctx, 1), kverror.BadRequest, "it has a replica of the placement group")
		refused(at.RemoveNode(ctx, 2), kverror.BadRequest, "node 2 is serving")
		refused(at.RemoveNode(ctx, 9), kverror.NodeNotFound, "there is no node 9")
		must(r.nodes[5].client.Publish(ctx, fsm.Node{Name: "n6", ClientURLs: []string{"http://c"}, Attributes: []fsm.Attribute{{Key: "zone", Value: "a"}}}))
		must(at.RemoveNode(ctx, 6))
		must(at.RemoveNode(ctx, 6)) // asked again
		refused(r.nodes[5].client.Publish(ctx, fsm.Node{Name: "n6"}), kverror.NodeRemoved, "never admitted again")
		refused(at.AddNode(ctx, fsm.Node{ID: 6, PeerURLs: []string{"http://six"}}), kverror.NodeRemoved, "never admitted again")
		refused(at.SetNodeState(ctx, 6, fsm.NodeDecommissioned, fsm.NodeServing), kverror.NodeRemoved, "never admitted again")
		must(at.AddNode(ctx, fsm.Node{ID: 8, PeerURLs: []string{"http://eight"}}))
		must(at.AddNode(ctx, fsm.Node{ID: 8, PeerURLs: []string{"http://eight"}})) // asked again
		refused(at.AddNode(ctx, fsm.Node{ID: 8, PeerURLs: []string{"http://other"}}), kverror.NodeExists, "node 8 is there already")
		refused(at.AddNode(ctx, fsm.Node{ID: 9, PeerURLs: []string{"http://eight"}}), kverror.PeerURLExists, "http://eight")
		refused(at.AddNode(ctx, fsm.Node{ID: 9, Attributes: []fsm.Attribute{{Key: "zone", Value: ""}}}), kverror.BadRequest, "no value")
		must(at.SetPeerURLs(ctx, 8, []string{"http://acht"}))
		for _, n := range r.nodes {
			checkNodes(ctx, t, n.client)
		}
		must(at.SetPaused(ctx, true))
		if v := r.leader().service.View(); !v.Paused() {
			t.Error("placement is not paused")
		}
		settings, _, err := at.Settings(ctx)
		since := PausedSince(settings)
		if err != nil || r.nodes[6].clock.Wall().Sub(since.Time()).Abs() > time.Minute {
			t.Errorf("paused since %v, %v", since, err)
		}
		time.Sleep(time.Second)
		must(at.SetPaused(ctx, true)) // asked again
		if settings, _, err := at.Settings(ctx); err != nil || PausedSince(settings) != since {
			t.Errorf("paused since %v and once more since %v, %v", since, PausedSince(settings), err)
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
		if n, ok := m.Node(8); ok && n.PeerURLs[0] == "http://acht" && n.State == fsm.NodeUnstarted {
			if gone, _ := m.Node(6); gone.State != fsm.NodeRemoved || gone.Since == 0 || gone.Name != "n6" || gone.ClientURLs != nil || len(m.Nodes()) != 7 {
				t.Fatalf("the removed node is %+v among %d", gone, len(m.Nodes()))
			}
			if n, _ := m.Node(1); n.State != fsm.NodeDecommissioned || n.Since == 0 {
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
