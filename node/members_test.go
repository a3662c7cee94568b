package node

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/node/operate"
	"github.com/skeindb/skein/placement/fsm"
)

// wantEtcd checks an error as an etcd client gets it, which goes by its text.
func (r *rig) wantEtcd(what string, err, want error) {
	r.t.Helper()
	if got := rpctypes.Error(kverror.GRPC(err)); !errors.Is(got, rpctypes.Error(want)) {
		r.t.Errorf("%s: %v, want %v", what, got, want)
	}
}

func memberWith(ms []*pb.Member, id uint64) *pb.Member {
	for _, m := range ms {
		if m.GetID() == id {
			return m
		}
	}
	return nil
}

// etcd's clients add, move and remove members, which then join; the errors are etcd's.
func TestMembers(t *testing.T) {
	bubble(t, 3, nil, nil, func(r *rig) {
		r.publish(r.nodes...)
		ctx, m := r.t.Context(), r.nodes[1].core.Members(1, true)
		added, all, err := m.MemberAdd(ctx, []string{peerURL("n4")}, false)
		if err != nil || len(all) != 4 || added.GetName() != "" || added.GetIsLearner() || memberWith(all, added.GetID()).GetName() != "" {
			r.t.Fatalf("added %v of %v, %v", added, all, err)
		}
		_, _, err = m.MemberAdd(ctx, []string{peerURL("n4")}, false)
		r.wantEtcd("the same in the same second", err, rpctypes.ErrGRPCMemberExist)
		time.Sleep(2 * time.Second)
		_, _, err = m.MemberAdd(ctx, []string{"http://x:1", peerURL("n4")}, false)
		r.wantEtcd("a peer URL that is taken", err, rpctypes.ErrGRPCPeerURLExist)

		// It joins as the member that was added, and has its name from then on.
		n := r.joiner("n4")
		if err := r.join(ctx, n, r.nodes[0]); err != nil || uint64(n.id) != added.GetID() {
			r.t.Fatalf("it joins as %s, %v", n.id, err)
		}
		r.announced(n)
		all, err = m.MemberList(ctx, true)
		if got := memberWith(all, added.GetID()); err != nil || got.GetName() != "n4" || len(got.GetClientURLs()) != 1 {
			r.t.Errorf("after its start: %v, %v", got, err)
		}
		all, err = m.MemberUpdate(ctx, n.id, []string{"http://elsewhere:1"})
		if got := memberWith(all, added.GetID()); err != nil || fmt.Sprint(got.GetPeerURLs()) != "[http://elsewhere:1]" {
			r.t.Errorf("after it has moved: %v, %v", got, err)
		}
		r.announced(n) // what it was started with is not what the cluster was told
		if rows := r.rows("n4"); fmt.Sprint(rows[0].PeerURLs) != "[http://elsewhere:1]" {
			r.t.Errorf("after its next start: %v", rows)
		}
		_, err = m.MemberUpdate(ctx, n.id, []string{peerURL("n2")})
		r.wantEtcd("to where another one is", err, rpctypes.ErrGRPCPeerURLExist)
		_, err = m.MemberUpdate(ctx, 99, []string{"http://y:1"})
		r.wantEtcd("nobody moves", err, rpctypes.ErrGRPCMemberNotFound)
		_, err = m.MemberPromote(ctx, n.id)
		r.wantEtcd("an ordinary member is promoted", err, rpctypes.ErrGRPCMemberNotLearner)
		_, err = m.MemberPromote(ctx, 99)
		r.wantEtcd("nobody is promoted", err, rpctypes.ErrGRPCMemberNotFound)
		_, err = m.MemberRemove(ctx, 99)
		r.wantEtcd("nobody is removed", err, rpctypes.ErrGRPCMemberNotFound)
		if all, err = m.MemberRemove(ctx, n.id); err != nil || len(all) != 3 {
			r.t.Errorf("removed: %v, %v", all, err)
		}
		_, err = m.MemberRemove(ctx, n.id)
		r.wantEtcd("removed again", err, rpctypes.ErrGRPCMemberNotFound)
		_, err = m.MemberUpdate(ctx, n.id, []string{"http://y:1"})
		r.wantEtcd("one that was removed moves", err, rpctypes.ErrGRPCMemberNotFound)
		// One that has never started goes at once.
		added, _, err = m.MemberAdd(ctx, []string{peerURL("n5")}, false)
		if err == nil {
			all, err = m.MemberRemove(ctx, keyspace.NodeID(added.GetID()))
		}
		if err != nil || len(all) != 3 {
			r.t.Errorf("removed before its start: %v, %v", all, err)
		}
	})
}

// A learner serves, and gets nothing before it is promoted.
func TestLearners(t *testing.T) {
	bubble(t, 3, nil, nil, func(r *rig) {
		r.publish(r.nodes...)
		r.pause()
		ctx, m := r.t.Context(), r.nodes[0].core.Members(1, true)
		added, _, err := m.MemberAdd(ctx, []string{peerURL("n4")}, true)
		if err != nil || !added.GetIsLearner() {
			r.t.Fatalf("added %v, %v", added, err)
		}
		_, _, err = m.MemberAdd(ctx, []string{peerURL("n5")}, true)
		r.wantEtcd("another learner", err, rpctypes.ErrGRPCTooManyLearners)
		_, err = m.MemberPromote(ctx, keyspace.NodeID(added.GetID()))
		r.wantEtcd("promoted before its start", err, rpctypes.ErrGRPCLearnerNotReady)
		n := r.joiner("n4")
		if err := r.join(ctx, n, r.nodes[0]); err != nil || uint64(n.id) != added.GetID() {
			r.t.Fatalf("it joins as %s, %v", n.id, err)
		}
		r.announced(n)
		r.mustPut(n, "k", "v")
		r.wait(time.Minute, "it knows itself as a learner", func() bool { return etcdNode{n.core}.Status().Learner })
		r.wait(time.Minute, "a move to it is refused for that", func() bool {
			_, err := r.nodes[0].core.Admin().MoveRange(ctx, 1, "1", n.id.String())
			return err != nil && strings.Contains(err.Error(), "is learner")
		})
		// It has told of itself through the feed of placement; that the ranges' node hears it
		// too takes a moment more.
		var all []*pb.Member
		r.wait(time.Minute, "it is promoted", func() bool {
			all, err = m.MemberPromote(ctx, n.id)
			return !errors.Is(err, rpctypes.ErrGRPCLearnerNotReady)
		})
		if err != nil || memberWith(all, added.GetID()).GetIsLearner() {
			r.t.Fatalf("promoted: %v, %v", all, err)
		}
		r.mustMove(1, r.nodes[0], n)
		_, err = m.MemberPromote(ctx, n.id)
		r.wantEtcd("promoted again", err, rpctypes.ErrGRPCMemberNotLearner)
	})
}

// removed removes a member as etcdctl does, again and again while it takes longer than the
// request timeout, and wants it gone within limit.
func (r *rig) removed(limit time.Duration, via *rigNode, id keyspace.NodeID) {
	r.t.Helper()
	m := via.core.Members(1, true)
	r.wait(limit, "the member is removed", func() bool {
		ctx, cancel := context.WithTimeout(r.t.Context(), rigTimeout)
		defer cancel()
		all, err := m.MemberRemove(ctx, id)
		if err != nil && kverror.Of(err).Kind == kverror.NodeNotFound {
			return true // between two requests
		}
		if err != nil && !errors.Is(err, kverror.Timeout) && !errors.Is(err, operate.ErrStillRemoving) {
			r.t.Fatalf("remove member %s: %v", id, err)
		}
		return err == nil && memberWith(all, uint64(id)) == nil
	})
}

// A member that holds replicas, of the placement group too, is removed under load: others
// take them over, and no put fails. Without other nodes a range gets one replica less. The
// last member stays, and so does one whose ranges would lose their quorum.
func TestAMemberThatHoldsReplicasIsRemoved(t *testing.T) {
	const ranges = 4
	bubble(t, 4, borders(ranges), shortLog, func(r *rig) {
		r.publish(r.nodes...)
		r.spread(r.nodes[1], ranges, "v")
		stop := r.load(r.nodes[1:]...)
		gone := r.nodes[0]
		// A request that ends before the node is empty says what goes on, in etcd's form.
		// It looks once: in a little more time the node may well be empty.
		soon, cancel := context.WithTimeout(r.t.Context(), 49*time.Millisecond)
		_, err := r.nodes[1].core.Members(1, true).MemberRemove(soon, gone.id)
		cancel()
		if s := status.Convert(kverror.GRPC(err)); s.Code() != codes.Unavailable || !strings.HasPrefix(s.Message(), "etcdserver: request timed out, ") || !strings.Contains(s.Message(), "again") {
			r.t.Errorf("removed in no time: %v", err)
		}
		r.removed(5*time.Minute, r.nodes[1], gone.id)
		if puts, failed := stop(); failed > 0 || puts < 10 {
			r.t.Errorf("%d of %d puts failed", failed, puts)
		}
		select {
		case <-gone.core.Fatal():
		case <-time.After(time.Minute):
			r.t.Fatal("it goes on")
		}
		r.crash(gone)
		want := func(replicas int) {
			r.t.Helper()
			for _, d := range r.groups(r.nodes[2]) {
				if len(d.Replicas) != replicas {
					r.t.Errorf("group %d has %v", d.Range, d.Replicas)
				}
			}
		}
		want(3)
		r.removed(5*time.Minute, r.nodes[3], r.nodes[1].id)
		want(2)
		r.crash(r.nodes[1])
		r.mustGet(r.nodes[2], keyOf(1), "v")

		m := r.nodes[2].core.Members(1, true)
		_, err = m.MemberRemove(r.t.Context(), gone.id)
		r.wantEtcd("a member that is removed already", err, rpctypes.ErrGRPCMemberNotFound)

		// Of two one does not answer.
		r.crash(r.nodes[3])
		r.wait(time.Minute, "it is known to be down", func() bool { return !r.nodes[2].core.alive(r.nodes[3].id) })
		ctx, cancel := context.WithTimeout(r.t.Context(), rigTimeout)
		defer cancel()
		if _, err := m.MemberRemove(ctx, r.nodes[3].id); err == nil {
			r.t.Error("a member was removed without a quorum")
		}
		r.start(r.nodes[3])
		r.wait(time.Minute, "it is back", func() bool { return r.nodes[2].core.alive(r.nodes[3].id) })
		r.removed(5*time.Minute, r.nodes[2], r.nodes[3].id)
		want(1)
		r.crash(r.nodes[3])
		_, err = m.MemberRemove(r.t.Context(), r.nodes[2].id)
		r.wantEtcd("the last member", err, rpctypes.ErrMemberNotEnoughStarted)
		r.mustPut(r.nodes[2], keyOf(1), "alone")
	})
}

// Nobody has to ask again: a member that was not empty when its removal's time was over is
// removed when it is, by whoever leads placement then. One that is decommissioned by command
// stays in the list, until somebody removes it.
func TestAMemberIsRemovedWithoutAskingAgain(t *testing.T) {
	const ranges = 4
	bubble(t, 5, borders(ranges), shortLog, func(r *rig) {
		r.publish(r.nodes...)
		r.spread(r.nodes[1], ranges, "v")
		lead := func() *rigNode { return r.nodes[r.nodes[4].core.client.Leader()-1] }
		kept, gone := r.nodes[4], r.nodes[3]
		if err := kept.core.client.SetNodeState(r.t.Context(), kept.id, fsm.NodeServing, fsm.NodeDecommissioned); err != nil {
			r.t.Fatal(err)
		}
		// What is left of a MemberRemove that has ended at once.
		if err := r.nodes[0].core.client.LeaveNode(r.t.Context(), gone.id, fsm.NodeServing, kept.id); err != nil {
			r.t.Fatal(err)
		}
		k := r.operator(r.nodes[1])
		for _, n := range []*rigNode{kept, gone} {
			if s, err := k.a.ShowNode(r.t.Context(), n.id.String()); err != nil || s.GetNode().GetLeaves() != (n == gone) {
				r.t.Errorf("%v, %v: only %s leaves", s.GetNode(), err, gone.id)
			}
		}
		next := r.nodes[lead().id%3]
		if err := (etcdNode{lead().core}).MoveLeader(r.t.Context(), next.id); err != nil {
			r.t.Fatal(err)
		}
		state := func(id keyspace.NodeID) fsm.NodeState {
			m, _ := next.core.client.WatchMap()
			n, _ := m.Node(id)
			return n.State
		}
		r.wait(5*time.Minute, "it is removed", func() bool { return state(gone.id) == fsm.NodeRemoved })
		// The waiting command says that, and not that the node is unknown.
		_, err := k.a.ShowNode(r.t.Context(), gone.id.String())
		if refusal := (*adminapi.Refusal)(nil); !errors.As(err, &refusal) || !refusal.Removed {
			r.t.Errorf("a look at what has left: %v", err)
		}
		time.Sleep(time.Minute)
		if got := state(kept.id); got != fsm.NodeDecommissioned {
			r.t.Errorf("the one decommissioned by command is %s", got)
		}
		r.removed(time.Minute, next, kept.id)
		// In a cluster of three no other node can take the replicas of one over. The other two
		// go on without it.
		gone = r.nodes[next.id%3]
		if err := next.core.client.LeaveNode(r.t.Context(), gone.id, fsm.NodeServing); err != nil {
			r.t.Fatal(err)
		}
		r.wait(5*time.Minute, "one of three is removed", func() bool { return state(gone.id) == fsm.NodeRemoved })
		r.mustGet(next, keyOf(1), "v")
	})
}

// One of three members is down. Another one is not removed: no node can take its place, and the
// rest has no quorum without it. It serves on.
func TestAMemberIsNotRemovedBesideOneThatIsDown(t *testing.T) {
	bubble(t, 3, nil, nil, func(r *rig) {
		r.publish(r.nodes...)
		r.crash(r.nodes[2])
		r.wait(time.Minute, "it is known to be down", func() bool { return !r.nodes[0].core.alive(r.nodes[2].id) })
		ctx, cancel := context.WithTimeout(r.t.Context(), rigTimeout)
		defer cancel()
		_, err := r.nodes[0].core.Members(1, true).MemberRemove(ctx, r.nodes[1].id)
		r.wantEtcd("one of the two that are left", err, rpctypes.ErrGRPCUnhealthy)
		m, _ := r.nodes[0].core.client.WatchMap()
		if row, _ := m.Node(r.nodes[1].id); row.State != fsm.NodeServing {
			r.t.Errorf("after that it is %s", row.State)
		}
	})
}

// Without the strict check etcd removes it, and the rest stands still. Here the removal begins, and
// waits until the rest has a quorum without the member.
func TestAMemberIsRemovedOnlyWithAQuorumOfTheRest(t *testing.T) {
	bubble(t, 3, nil, nil, func(r *rig) {
		r.publish(r.nodes...)
		r.mustPut(r.nodes[0], "k", "before")
		r.crash(r.nodes[2])
		r.wait(time.Minute, "it is known to be down", func() bool { return !r.nodes[0].core.alive(r.nodes[2].id) })
		remove := func() error {
			ctx, cancel := context.WithTimeout(r.t.Context(), rigTimeout)
			defer cancel()
			_, err := r.nodes[0].core.Members(1, false).MemberRemove(ctx, r.nodes[1].id)
			return err
		}
		if err := remove(); !errors.Is(err, operate.ErrStillRemoving) {
			r.t.Errorf("one of the two that are left: %v", err)
		}
		for range 60 {
			r.mustPut(r.nodes[0], "k", "after")
			time.Sleep(time.Second)
		}
		for _, d := range r.groups(r.nodes[0]) {
			if len(d.Replicas) != 3 {
				r.t.Errorf("group %d has %v", d.Range, d.Replicas)
			}
		}
		r.start(r.nodes[2])
		r.wait(5*time.Minute, "it is removed", func() bool { return remove() == nil })
		r.crash(r.nodes[1])
		r.mustGet(r.nodes[0], "k", "after")
		r.mustPut(r.nodes[2], "k", "later")
	})
}

// Right after the start no member has heard the others. With the strict check nothing is removed then,
// as in etcd. Without it the member goes at once, and the others have its replicas.
func TestAMemberIsRemovedRightAfterTheStart(t *testing.T) {
	const ranges = 4
	bubble(t, 4, borders(ranges), shortLog, func(r *rig) {
		ctx, cancel := context.WithTimeout(r.t.Context(), rigTimeout)
		defer cancel()
		_, err := r.nodes[0].core.Members(1, true).MemberRemove(ctx, r.nodes[1].id)
		r.wantEtcd("with the strict check", err, rpctypes.ErrGRPCUnhealthy)
		if r.nodes[0].core.alive(r.nodes[2].id) {
			r.t.Error("the others are heard already")
		}
		all, err := r.nodes[0].core.Members(1, false).MemberRemove(ctx, r.nodes[1].id)
		if err != nil || len(all) != 3 {
			r.t.Fatalf("without it: %v, %v", all, err)
		}
		r.crash(r.nodes[1])
		r.spread(r.nodes[2], ranges, "v")
		for _, d := range r.groups(r.nodes[2]) {
			if _, has := d.ReplicaOn(r.nodes[1].id); has || len(d.Replicas) != 3 {
				r.t.Errorf("group %d has %v", d.Range, d.Replicas)
			}
		}
	})
}

// All members are removed at a time, each while the others serve yet: one stays, and serves on.
func TestAllMembersAreRemovedAtOnce(t *testing.T) {
	bubble(t, 3, nil, nil, func(r *rig) {
		r.publish(r.nodes...)
		r.wait(time.Minute, "all are heard", func() bool {
			return !slices.ContainsFunc(r.nodes, func(n *rigNode) bool {
				return slices.ContainsFunc(r.nodes, func(o *rigNode) bool { return !n.core.alive(o.id) })
			})
		})
		ctx, cancel := context.WithTimeout(r.t.Context(), time.Minute)
		defer cancel()
		var wg sync.WaitGroup
		errs := make([]error, len(r.nodes))
		for i, n := range r.nodes {
			wg.Go(func() { _, errs[i] = n.core.Members(1, true).MemberRemove(ctx, n.id) })
		}
		wg.Wait()
		stays := slices.IndexFunc(errs, func(err error) bool { return err != nil })
		if stays < 0 {
			r.t.Fatal("all were removed")
		}
		for i, err := range errs {
			if i == stays {
				r.wantEtcd("the last one", err, rpctypes.ErrMemberNotEnoughStarted)
			} else if err != nil {
				r.t.Errorf("member %s: %v", r.nodes[i].id, err)
			}
		}
		r.mustPut(r.nodes[stays], "k", "v")
	})
}

// One of four members is down for a moment, and another one is removed. No range has a replica
// less for that. Replicas of the removed member move to the one that is down, or wait, as long
// as it may come back. And nothing is begun that would never end.
func TestAMemberIsRemovedBesideOneThatComesBack(t *testing.T) {
	const ranges = 4
	bubble(t, 4, borders(ranges), shortLog, func(r *rig) {
		r.publish(r.nodes...)
		r.spread(r.nodes[1], ranges, "v")
		m, gone, away := r.nodes[1].core.Members(1, true), r.nodes[0], r.nodes[3]
		remove := func() error {
			ctx, cancel := context.WithTimeout(r.t.Context(), rigTimeout)
			defer cancel()
			_, err := m.MemberRemove(ctx, gone.id)
			return err
		}
		r.pause()
		r.wantEtcd("while placement is paused", remove(), operate.ErrRemovePaused)
		if err := r.nodes[1].core.client.SetPaused(r.t.Context(), false); err != nil {
			r.t.Fatal(err)
		}
		r.crash(away)
		r.wait(time.Minute, "it is known to be down", func() bool { return !r.nodes[1].core.alive(away.id) })
		voters := func(what string) {
			r.t.Helper()
			for _, d := range r.groups(r.nodes[1]) {
				if len(d.Replicas) < 3 {
					r.t.Errorf("%s, group %d has %v", what, d.Range, d.Replicas)
				}
			}
		}
		if err := remove(); !errors.Is(err, operate.ErrStillRemoving) {
			r.t.Errorf("removed beside one that is down: %v", err)
		}
		time.Sleep(time.Minute)
		voters("while one is down")
		r.start(away)
		r.removed(5*time.Minute, r.nodes[1], gone.id)
		voters("when it is back")
		r.mustGet(r.nodes[2], keyOf(1), "v")
	})
}

// groups returns all ranges and the placement group, as the node knows them.
func (r *rig) groups(n *rigNode) []keyspace.Descriptor {
	r.t.Helper()
	m, err := n.core.client.Map(r.t.Context())
	if err != nil {
		r.t.Fatal(err)
	}
	return append(m.Descriptors(), m.PlacementGroup())
}

// A member of four that is down is removed, and one of three while another is down is not.
func TestAMemberThatIsDownIsRemoved(t *testing.T) {
	const ranges = 4
	bubble(t, 4, borders(ranges), shortLog, func(r *rig) {
		r.publish(r.nodes...)
		r.spread(r.nodes[1], ranges, "v")
		gone := r.nodes[3]
		r.crash(gone)
		r.wait(time.Minute, "it is known to be down", func() bool { return !r.nodes[0].core.alive(gone.id) })
		r.removed(5*time.Minute, r.nodes[0], gone.id)
		r.spread(r.nodes[2], ranges, "w")
		r.crash(r.nodes[2])
		r.wait(time.Minute, "another one is known to be down", func() bool { return !r.nodes[0].core.alive(r.nodes[2].id) })
		r.removed(5*time.Minute, r.nodes[1], r.nodes[2].id)
		for i := range ranges {
			r.mustGet(r.nodes[0], keyOf(i), "w")
		}
	})
}

// The leadership of the placement group, which to etcd's clients is the cluster's, moves to
// another of its voters, and nowhere else.
func TestMoveLeader(t *testing.T) {
	bubble(t, 4, nil, nil, func(r *rig) {
		r.mustPut(r.nodes[0], "k", "v")
		c := r.nodes[0].core
		r.wait(time.Minute, "there is a leader", func() bool { return c.client.Leader() != 0 })
		lead := r.nodes[c.client.Leader()-1]
		to := 1 + lead.id%3
		for what, id := range map[string]keyspace.NodeID{"nobody": 99, "one without a vote": 4} {
			r.wantEtcd(what, etcdNode{lead.core}.MoveLeader(r.t.Context(), id), rpctypes.ErrGRPCBadLeaderTransferee)
		}
		if err := (etcdNode{lead.core}).MoveLeader(r.t.Context(), lead.id); err != nil {
			r.t.Errorf("to itself: %v", err)
		}
		r.wait(time.Minute, "it is heard, and hears", func() bool { return lead.core.host.Connected(to) })
		k := r.operator(r.nodes[3])
		name := fmt.Sprintf("n%d", to)
		k.does(adminapi.Drain, name)
		r.wantEtcd("to one that is drained", etcdNode{lead.core}.MoveLeader(r.t.Context(), to), rpctypes.ErrGRPCBadLeaderTransferee)
		k.does(adminapi.Undrain, name)
		if err := (etcdNode{lead.core}).MoveLeader(r.t.Context(), to); err != nil {
			r.t.Fatal(err)
		}
		if got := lead.core.client.Leader(); got != to {
			r.t.Errorf("node %s leads, want %s", got, to)
		}
		r.mustPut(r.nodes[3], "k", "w")
		// By one that has no replica of the group, to which raft says nothing.
		ctx, cancel := context.WithTimeout(r.t.Context(), rigTimeout)
		defer cancel()
		if err := (etcdNode{r.nodes[3].core}).MoveLeader(ctx, lead.id); err != nil {
			r.t.Errorf("by node %s: %v", r.nodes[3].id, err)
		}
	})
}
