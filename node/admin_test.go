package node

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/keyspace"
)

// TestRangeFigures: list and show say the same of a range at every node: its live keys
// at once, and what it takes of the leader's disk once it is there.
func TestRangeFigures(t *testing.T) {
	bubble(t, 3, nil, nil, func(r *rig) {
		const keys = 12
		for i := range keys {
			r.mustPut(r.nodes[0], fmt.Sprint("k", i), "a value of some length")
		}
		r.mustRemove(r.nodes[0], "k0")
		look := func(n *rigNode) (list, show *adminpb.Range) {
			l, err := n.core.Admin().Ranges(r.t.Context(), &adminpb.RangeListRequest{})
			if err != nil || len(l.GetRanges()) != 1 || l.GetStale() {
				r.t.Fatalf("list at node %s: %v, %v", n.id, l, err)
			}
			s, err := n.core.Admin().ShowRange(r.t.Context(), 1)
			if err != nil {
				r.t.Fatalf("show at node %s: %v", n.id, err)
			}
			return l.GetRanges()[0], s.GetRange()
		}
		want := func(onDisk bool) {
			r.t.Helper()
			for _, n := range r.nodes {
				list, show := look(n)
				for what, got := range map[string]*adminpb.Range{"list": list, "show": show} {
					if got.GetKeys() != keys-1 || got.GetBytes() > 0 != onDisk || got.GetLeader() == "" {
						r.t.Errorf("%s at node %s: %v, want %d keys, on disk %t", what, n.id, got, keys-1, onDisk)
					}
				}
				if list.GetBytes() != show.GetBytes() {
					r.t.Errorf("node %s: list says %d bytes, show says %d", n.id, list.GetBytes(), show.GetBytes())
				}
			}
		}
		want(false)
		for _, n := range r.nodes {
			if err := n.core.engine.Flush(r.t.Context()); err != nil {
				r.t.Fatal(err)
			}
		}
		want(true)
	})
}

// TestListsWithoutQuorum: the last of three nodes still says which nodes and ranges
// there are, and that it is an old answer, within a command's time.
func TestListsWithoutQuorum(t *testing.T) {
	const ranges = 2
	bubble(t, 3, borders(ranges), nil, func(r *rig) {
		r.spread(r.nodes[0], ranges, "v")
		for _, n := range r.nodes {
			l, err := n.core.Admin().Nodes(r.t.Context())
			if err != nil || len(l.GetNodes()) != 3 || l.GetStale() {
				r.t.Fatalf("with a quorum: %v, %v", l, err)
			}
		}
		r.crash(r.nodes[1:]...)
		ctx, cancel := context.WithTimeout(r.t.Context(), 10*time.Second)
		defer cancel()
		nodes, err := r.nodes[0].core.Admin().Nodes(ctx)
		if err != nil || len(nodes.GetNodes()) != 3 || !nodes.GetStale() {
			r.t.Fatalf("nodes without a quorum: %v, %v", nodes, err)
		}
		for i, n := range nodes.GetNodes() {
			if n.GetAlive() != (i == 0) {
				r.t.Errorf("node %s: alive %t", n.GetId(), n.GetAlive())
			}
		}
		ctx, cancel = context.WithTimeout(r.t.Context(), 10*time.Second)
		defer cancel()
		list, err := r.nodes[0].core.Admin().Ranges(ctx, &adminpb.RangeListRequest{})
		if err != nil || len(list.GetRanges()) != ranges || !list.GetStale() {
			r.t.Fatalf("ranges without a quorum: %v, %v", list, err)
		}
	})
}

// TestPlacementWithoutQuorum: without a quorum the commands still show the placement group,
// its operations and its settings, by what a replica knew last. They say that this may be old.
// That holds at a node with a replica and at one without.
func TestPlacementWithoutQuorum(t *testing.T) {
	bubble(t, 4, nil, nil, func(r *rig) {
		r.pause()
		if err := r.nodes[0].core.Admin().SetMergeAfter(r.t.Context(), new(time.Hour)); err != nil {
			r.t.Fatal(err)
		}
		time.Sleep(time.Second)  // the first one has heard of it
		r.crash(r.nodes[1:3]...) // the fourth one has no replica of the group
		for _, n := range []*rigNode{r.nodes[0], r.nodes[3]} {
			ctx, cancel := context.WithTimeout(r.t.Context(), 10*time.Second)
			p, err := n.core.Admin().PlacementGroup(ctx)
			cancel()
			if err != nil || !p.GetStale() || len(p.GetReplicas()) != 3 || p.GetMergeAfterMs() != time.Hour.Milliseconds() || !p.GetReplication().GetPaused() {
				r.t.Errorf("the group at node %s: %v, %v", n.id, p, err)
			}
			ctx, cancel = context.WithTimeout(r.t.Context(), 10*time.Second)
			ops, err := n.core.Admin().Operations(ctx)
			cancel()
			if err != nil || !ops.GetStale() || !ops.GetPaused() {
				r.t.Errorf("operations at node %s: %v, %v", n.id, ops, err)
			}
		}
		r.start(r.nodes[1:3]...)
		r.wait(time.Minute, "there is a quorum again", func() bool {
			p, err := r.nodes[3].core.Admin().PlacementGroup(r.t.Context())
			return err == nil && !p.GetStale() && p.GetLeader() != ""
		})
	})
}

// TestSplitBesideALostLeader: a split finds the range's new leader soon after there is one,
// however the old one was lost.
func TestSplitBesideALostLeader(t *testing.T) {
	for what, lose := range map[string]func(r *rig, leader, gateway keyspace.NodeID){
		"nobody reaches it": func(r *rig, leader, _ keyspace.NodeID) { r.net.Partition(leader) },
		"it stands still":   func(r *rig, leader, _ keyspace.NodeID) { r.net.Pause(leader) },
		// It takes the split, and cannot tell that it will never come to its end.
		"the gateway alone reaches it": func(r *rig, leader, gateway keyspace.NodeID) {
			r.net.Partition(leader)
			r.net.Heal(leader, gateway)
			r.net.Heal(gateway, leader)
		},
	} {
		t.Run(what, func(t *testing.T) {
			bubble(t, 4, nil, nil, func(r *rig) {
				r.mustPut(r.nodes[0], "a", "v")
				var leader, gateway *rigNode
				for _, n := range r.nodes {
					if len(n.led()) > 0 {
						leader = n
					} else if len(n.summaries()) == 0 {
						gateway = n
					}
				}
				lose(r, leader.id, gateway.id)
				start := time.Now()
				_, _, err := gateway.core.Admin().SplitRange(r.t.Context(), []byte("k"))
				if took := time.Since(start); err != nil || took > 6*rigElection { // an election may need a second round
					r.t.Errorf("the split beside node %s took %v: %v", leader.id, took, err)
				}
				r.net.HealAll()
			})
		})
	}
}

// TestTransferBesideASilentReplica: that one replica does not answer costs the hand-over to
// another a moment, and not its time; nor does a leader that takes the order and cannot carry it
// out.
func TestTransferBesideASilentReplica(t *testing.T) {
	for what, hinder := range map[string]func(r *rig, first *rigNode){
		"it stands still": func(r *rig, first *rigNode) { r.net.Pause(first.id) },
		"the gateway alone reaches it": func(r *rig, first *rigNode) {
			r.net.Partition(first.id)
			r.net.Heal(first.id, 4)
			r.net.Heal(4, first.id)
		},
	} {
		t.Run(what, func(t *testing.T) {
			bubble(t, 4, nil, nil, func(r *rig) {
				r.mustPut(r.nodes[0], "a", "v")
				r.pause()
				gateway := r.nodes[3].core
				d := r.nodes[0].summaries()[0].Descriptor
				first, to := r.nodes[d.Replicas[0].Node-1], d.Replicas[2].Node // the order in which they are asked
				if len(first.led()) == 0 {
					r.t.Fatalf("of %v the first one was to lead", d)
				}
				r.wait(time.Minute, "they hear each other", func() bool { return gateway.alive(to) && gateway.alive(first.id) })
				hinder(r, first)
				start := time.Now()
				err := gateway.Admin().TransferLeader(r.t.Context(), d.Range, fmt.Sprintf("n%d", to))
				if took := time.Since(start); err != nil || took > 6*rigElection { // an election may need a second round
					r.t.Errorf("it took %v: %v", took, err)
				}
				if len(r.nodes[to-1].led()) != 1 {
					r.t.Errorf("node %s does not lead", to)
				}
				r.net.HealAll()
			})
		})
	}
}
