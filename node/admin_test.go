package node

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/shard"
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
			l, err := admin{n.core}.Ranges(r.t.Context(), &adminpb.RangeListRequest{})
			if err != nil || len(l.GetRanges()) != 1 || l.GetStale() {
				r.t.Fatalf("list at node %s: %v, %v", n.id, l, err)
			}
			s, err := admin{n.core}.ShowRange(r.t.Context(), 1)
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
			l, err := admin{n.core}.Nodes(r.t.Context())
			if err != nil || len(l.GetNodes()) != 3 || l.GetStale() {
				r.t.Fatalf("with a quorum: %v, %v", l, err)
			}
		}
		r.crash(r.nodes[1:]...)
		ctx, cancel := context.WithTimeout(r.t.Context(), 10*time.Second)
		defer cancel()
		nodes, err := admin{r.nodes[0].core}.Nodes(ctx)
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
		list, err := admin{r.nodes[0].core}.Ranges(ctx, &adminpb.RangeListRequest{})
		if err != nil || len(list.GetRanges()) != ranges || !list.GetStale() {
			r.t.Fatalf("ranges without a quorum: %v, %v", list, err)
		}
	})
}

// TestPlacementWithoutQuorum: who holds the placement group, what is under way and what is set
// is still said, by what a replica knew last, at a node that has one and at one that has none;
// and that it may be old.
func TestPlacementWithoutQuorum(t *testing.T) {
	bubble(t, 4, nil, nil, func(r *rig) {
		r.pause()
		if err := (admin{r.nodes[0].core}).SetMergeAfter(r.t.Context(), new(time.Hour)); err != nil {
			r.t.Fatal(err)
		}
		time.Sleep(time.Second)  // the first one has heard of it
		r.crash(r.nodes[1:3]...) // the fourth one has no replica of the group
		for _, n := range []*rigNode{r.nodes[0], r.nodes[3]} {
			ctx, cancel := context.WithTimeout(r.t.Context(), 10*time.Second)
			p, err := admin{n.core}.PlacementGroup(ctx)
			cancel()
			if err != nil || !p.GetStale() || len(p.GetReplicas()) != 3 || p.GetMergeAfterMs() != time.Hour.Milliseconds() || !p.GetReplication().GetPaused() {
				r.t.Errorf("the group at node %s: %v, %v", n.id, p, err)
			}
			ctx, cancel = context.WithTimeout(r.t.Context(), 10*time.Second)
			ops, err := admin{n.core}.Operations(ctx)
			cancel()
			if err != nil || !ops.GetStale() || !ops.GetPaused() {
				r.t.Errorf("operations at node %s: %v, %v", n.id, ops, err)
			}
		}
		r.start(r.nodes[1:3]...)
		r.wait(time.Minute, "there is a quorum again", func() bool {
			p, err := admin{r.nodes[3].core}.PlacementGroup(r.t.Context())
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
				_, _, err := admin{gateway.core}.SplitRange(r.t.Context(), []byte("k"))
				if took := time.Since(start); err != nil || took > 6*rigElection { // an election may need a second round
					r.t.Errorf("the split beside node %s took %v: %v", leader.id, took, err)
				}
				ctx, cancel := context.WithTimeout(r.t.Context(), 3*rigElection)
				defer cancel()
				d := leader.summaries()[0].Descriptor
				if heir := (admin{gateway.core}).leaderBeside(ctx, leader.id, &d); heir == 0 || heir == leader.id {
					r.t.Errorf("beside node %s leads node %s", leader.id, heir)
				}
				r.net.HealAll()
			})
		})
	}
}

// TestWhoLeadsWhatIsShown: a range is shown by the word of its newest leader, and one that has
// not what another replica has, or the map, is none.
func TestWhoLeadsWhatIsShown(t *testing.T) {
	says := func(node keyspace.NodeID, conf, term uint64, serving bool) shown {
		return shown{state: &shard.Status{Node: node, Serving: serving, Raft: raftgroup.Status{Term: term}, Descriptor: keyspace.Descriptor{Range: 1, ConfIndex: conf}}}
	}
	silent := shown{err: kverror.NoLeader}
	for _, tc := range []struct {
		what   string
		mapped uint64
		all    []shown
		conf   uint64
		leader keyspace.NodeID
	}{
		{"the map is late", 10, []shown{says(1, 20, 5, true), says(2, 10, 5, false), silent}, 20, 1},
		{"the leader was replaced and has not heard of it", 10, []shown{says(1, 10, 5, true), says(2, 20, 6, false), silent}, 20, 0},
		{"the map knows of it", 20, []shown{says(1, 10, 5, true), silent}, 20, 0},
		{"two say that they lead", 20, []shown{says(1, 20, 5, true), says(2, 20, 6, true)}, 20, 2},
		{"nobody answers", 10, []shown{silent}, 10, 0},
	} {
		d := newest(keyspace.Descriptor{Range: 1, ConfIndex: tc.mapped}, tc.all)
		leader := keyspace.NodeID(0)
		if st := leading(&d, tc.all); st != nil {
			leader = st.Node
		}
		if d.ConfIndex != tc.conf || leader != tc.leader {
			t.Errorf("%s: led by %s as of %d, want %s as of %d", tc.what, leader, d.ConfIndex, tc.leader, tc.conf)
		}
	}
}

// TestWhoIsShown: a range's replicas are those of the range that is shown, and what is shown of
// them is what they have said; of one that nobody has asked, that.
func TestWhoIsShown(t *testing.T) {
	held := func(ids ...keyspace.ReplicaID) keyspace.Descriptor {
		d := keyspace.Descriptor{Range: 1, ConfIndex: uint64(len(ids))}
		for _, id := range ids {
			d.Replicas = append(d.Replicas, keyspace.Replica{ID: id, Node: keyspace.NodeID(id % 10), Role: keyspace.RoleVoter})
		}
		return d
	}
	var all []shown
	was := held(1, 2, 13)
	for _, m := range was.Replicas {
		m.Role = keyspace.RoleLearner // since then it votes
		all = append(all, shown{of: m, state: &shard.Status{Node: m.Node}})
	}
	now := held(2, 13, 4, 3) // the one on node 3 is another one
	for i, s := range saidBy(&now, all) {
		asked := i < 2
		if s.of != now.Replicas[i] || (s.state != nil) != asked || (s.err == nil) != asked || asked && s.state.Node != s.of.Node {
			t.Errorf("replica %d is shown as %+v", i, s)
		}
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
				a := admin{r.nodes[3].core}
				d := r.nodes[0].summaries()[0].Descriptor
				first, to := r.nodes[d.Replicas[0].Node-1], d.Replicas[2].Node // the order in which they are asked
				if len(first.led()) == 0 {
					r.t.Fatalf("of %v the first one was to lead", d)
				}
				r.wait(time.Minute, "they hear each other", func() bool { return a.c.alive(to) && a.c.alive(first.id) })
				hinder(r, first)
				start := time.Now()
				err := a.TransferLeader(r.t.Context(), d.Range, fmt.Sprintf("n%d", to))
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
