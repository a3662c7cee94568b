package node

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/internal/simdisk"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/node/join"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/transport"
)

// operator is an operator at one node of a rig.
type operator struct {
	r    *rig
	core *Core
	a    adminapi.Backend
}

func (r *rig) operator(n *rigNode) *operator { return &operator{r, n.core, n.core.Admin()} }

// does asks for a change that is made.
func (k *operator) does(change adminapi.NodeChange, node string) *adminpb.Node {
	k.r.t.Helper()
	n, err := k.a.ChangeNode(k.r.t.Context(), change, node)
	if err != nil {
		k.r.t.Fatalf("%s %s: %v", change, node, err)
	}
	return n
}

// refused asks for a change that is refused with these words, and with a next step.
func (k *operator) refused(change adminapi.NodeChange, node, reason, next string) {
	k.r.t.Helper()
	_, err := k.a.ChangeNode(k.r.t.Context(), change, node)
	k.wants(string(change)+" "+node, err, reason, next)
}

// wants has an answer be a refusal with these words, and with a next step.
func (k *operator) wants(what string, err error, reason, next string) {
	k.r.t.Helper()
	var r *adminapi.Refusal
	if !errors.As(err, &r) || !strings.Contains(r.Reason, reason) || !strings.Contains(r.NextStep, next) {
		k.r.t.Errorf("%s: %v, want a refusal that says %q and then %q", what, err, reason, next)
	}
}

func (k *operator) node(name string) *adminpb.Node {
	k.r.t.Helper()
	l, err := k.a.Nodes(k.r.t.Context())
	if err != nil {
		k.r.t.Fatal(err)
	}
	i := slices.IndexFunc(l.GetNodes(), func(n *adminpb.Node) bool { return n.GetName() == name })
	if i < 0 {
		k.r.t.Fatalf("no node %s among %v", name, l.GetNodes())
	}
	return l.GetNodes()[i]
}

// TestNodeStates: all nodes see an order that an operator gives at one of them. An order
// that makes no sense is refused with advice.
func TestNodeStates(t *testing.T) {
	const ranges = 4
	bubble(t, 3, borders(ranges), nil, func(r *rig) {
		r.spread(r.nodes[0], ranges, "v")
		k := r.operator(r.nodes[0])
		was := k.node("n2")
		if was.GetState() != "serving" || was.GetRanges() != ranges || !was.GetPlacement() {
			r.t.Fatalf("at first: %v", was)
		}
		if n := k.does(adminapi.Drain, "n2"); n.GetState() != "draining" || n.GetRanges() != ranges {
			r.t.Errorf("drained: %v", n)
		}
		k.does(adminapi.Drain, "n2") // again
		for _, n := range r.nodes {
			if is := r.operator(n).node("n2"); is.GetState() != "draining" || is.GetSinceUnixMs() == 0 {
				r.t.Errorf("at node %s: %v", n.id, is)
			}
			if m, _ := n.core.client.WatchMap(); m == nil {
				r.t.Errorf("node %s has no map", n.id)
			}
		}
		k.refused(adminapi.Drain, "n3", "once it is stopped beside n2 there is no quorum of the placement group", "skein node undrain")
		k.refused(adminapi.Recommission, "n2", "is draining", "skein node undrain n2")
		l, err := k.a.Ranges(r.t.Context(), &adminpb.RangeListRequest{})
		if err != nil {
			r.t.Fatal(err)
		}
		id := keyspace.RangeID(l.GetRanges()[0].GetId())
		k.wants("a leader that would give it up at once", k.a.TransferLeader(r.t.Context(), id, "n2"), "n2 is draining", "skein node undrain n2")
		k.wants("the same of the placement group", k.a.TransferPlacement(r.t.Context(), "n2"), "n2 is draining", "skein node undrain n2")
		_, err = k.a.MoveRange(r.t.Context(), id, "n1", "n2")
		k.wants("a replica", err, "n2 is draining", "skein node undrain n2")
		k.refused(adminapi.Remove, "n2", "is draining", "skein node decommission n2")
		k.refused(adminapi.Decommission, "n2", "need as many nodes, and 2 others take replicas", "add a node")
		k.refused(adminapi.Drain, "n7", `there is no node "n7"`, "skein node list")
		k.does(adminapi.Undrain, "n2")
		k.does(adminapi.Recommission, "3") // by its id; it serves already
		if err := k.a.Pause(r.t.Context(), true); err != nil {
			r.t.Fatal(err)
		}
		k.refused(adminapi.Drain, "n3", "placement is paused", "skein placement resume")
		if l, err := k.a.Operations(r.t.Context()); err != nil || !l.GetPaused() {
			r.t.Errorf("paused: %v, %v", l, err)
		}
		if err := k.a.Pause(r.t.Context(), false); err != nil {
			r.t.Fatal(err)
		}
		k.does(adminapi.Drain, "n3")
	})
}

// TestTwoDrainsAtOnce: each of two nodes may be drained, and not both. If two orders to
// different nodes come in the same instant, one is refused with the reason.
func TestTwoDrainsAtOnce(t *testing.T) {
	bubble(t, 3, nil, nil, func(r *rig) {
		r.mustPut(r.nodes[0], "a", "v")
		errs := make([]error, 2)
		var wg sync.WaitGroup
		for i, name := range []string{"n2", "n3"} {
			wg.Go(func() { _, errs[i] = r.operator(r.nodes[i]).a.ChangeNode(r.t.Context(), adminapi.Drain, name) })
		}
		wg.Wait()
		k := r.operator(r.nodes[0])
		switch {
		case errs[0] == nil && errs[1] == nil, errs[0] != nil && errs[1] != nil:
			r.t.Fatalf("n2: %v, n3: %v", errs[0], errs[1])
		case errs[0] == nil:
			k.wants("the second", errs[1], "once it is stopped beside n2 there is no quorum", "skein node undrain n2")
		default:
			k.wants("the second", errs[0], "once it is stopped beside n3 there is no quorum", "skein node undrain n3")
		}
	})
}

// TestWhatIsHeldUpSaysWhy: what has come in the way since a node was drained, or decommissioned, is
// shown as long as it holds something.
func TestWhatIsHeldUpSaysWhy(t *testing.T) {
	bubble(t, 4, nil, nil, func(r *rig) {
		r.publish(r.nodes...)
		r.mustPut(r.nodes[0], "a", "v")
		r.pause()
		k := r.operator(r.nodes[0])
		state := func(id keyspace.NodeID, to fsm.NodeState, beside ...keyspace.NodeID) {
			if err := r.nodes[0].core.client.SetNodeState(r.t.Context(), id, fsm.NodeServing, to, beside...); err != nil {
				r.t.Fatal(err)
			}
		}
		state(1, fsm.NodeDraining)
		state(2, fsm.NodeDecommissioned, 1)
		s, err := k.a.ShowNode(r.t.Context(), r.nodes[0].id.String())
		if err != nil || s.GetNode().GetLeaders() == 0 || !strings.Contains(s.GetDrain().GetReason(), "placement is paused") {
			r.t.Errorf("drained, and held up: %v, %v", s, err)
		}
		s, err = k.a.ShowNode(r.t.Context(), r.nodes[1].id.String())
		if err != nil || s.GetNode().GetRanges() == 0 || !strings.Contains(s.GetDecommission().GetReason(), "placement is paused") {
			r.t.Errorf("decommissioned, and held up: %v, %v", s, err)
		}
	})
}

// TestWhatWaitsForASilentNodeSaysSo: nothing but repair touches a range with a replica on a node
// that does not answer, and before that counts as lost nothing is refused either.
func TestWhatWaitsForASilentNodeSaysSo(t *testing.T) {
	bubble(t, 5, nil, nil, func(r *rig) {
		r.mustPut(r.nodes[1], "a", "v")
		r.crash(r.nodes[2])
		k := r.operator(r.nodes[1])
		r.wait(time.Minute, "it is known to be down", func() bool { return !k.core.alive(3) })
		k.does(adminapi.Decommission, "n1")
		time.Sleep(30 * time.Second)
		s, err := k.a.ShowNode(r.t.Context(), "n1")
		why := s.GetDecommission()
		if err != nil || s.GetNode().GetRanges() != 1 || why.GetReason() != "range 1 has a replica on node n3 too, which does not answer" ||
			!strings.HasPrefix(why.GetNextStep(), "bring node n3 back, or wait until it counts as lost") {
			r.t.Errorf("%v, %v", s, err)
		}
		r.start(r.nodes[2])
		r.wait(time.Minute, "it holds nothing", func() bool { return k.node("n1").GetRanges() == 0 })
		if s, err := k.a.ShowNode(r.t.Context(), "n1"); err != nil || s.GetDecommission() != nil {
			r.t.Errorf("when it is over: %v, %v", s, err)
		}
	})
}

// TestDrainBesideASilentNode: what would stop ranges is refused, and says who is missing.
func TestDrainBesideASilentNode(t *testing.T) {
	bubble(t, 3, nil, nil, func(r *rig) {
		r.mustPut(r.nodes[0], "a", "v")
		r.crash(r.nodes[2])
		k := r.operator(r.nodes[0])
		for range 100 {
			if !k.node("n3").GetAlive() {
				break
			}
			time.Sleep(100 * time.Millisecond)
		}
		k.refused(adminapi.Drain, "n2", "no quorum of one range (1), since node n3 is silent", "bring that back")
		k.refused(adminapi.Decommission, "n2", "and 1 others take replicas", "add 2")
		k.does(adminapi.Drain, "n3") // it stands still already
		r.crash(r.nodes[1])
		for _, change := range []adminapi.NodeChange{adminapi.Undrain, adminapi.Drain} { // as this node knew it last, n3 is drained
			if _, err := k.a.ChangeNode(r.t.Context(), change, "n3"); !errors.Is(err, kverror.NoLeader) {
				r.t.Errorf("%s without a quorum: %v", change, err)
			}
		}
	})
}

// lateBus loses the answers of one node to who asks for what it has, while late.
type lateBus struct {
	Bus
	of   keyspace.NodeID
	late *atomic.Bool
}

// Call implements Bus.
func (b lateBus) Call(ctx context.Context, to keyspace.NodeID, m transport.Method, payload []byte) ([]byte, error) {
	if to == b.of && m == transport.MethodShardAdmin && b.late.Load() && bytes.Contains(payload, []byte(`"list"`)) {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return b.Bus.Call(ctx, to, m, payload)
}

// TestDrainOfANodeThatAnswersLate: a node lives and does not say in time what it leads. Nobody
// is told that it leads nothing, or that it is down.
func TestDrainOfANodeThatAnswersLate(t *testing.T) {
	late := &atomic.Bool{}
	slow := func(o *Options) {
		bus := o.NewBus
		o.NewBus = func(c transport.Config) (Bus, error) {
			b, err := bus(c)
			return lateBus{b, 1, late}, err
		}
	}
	bubble(t, 3, nil, slow, func(r *rig) {
		n1 := r.nodes[0]
		r.mustPut(n1, "a", "v")
		if len(n1.led()) != 1 {
			r.t.Fatal("node 1 was to lead the range")
		}
		k := r.operator(r.nodes[1])
		r.wait(time.Minute, "they hear each other", func() bool { return k.core.alive(1) && k.core.alive(3) })
		if h := k.core.report().Hears; !slices.Contains(h, 1) || !slices.Contains(h, 3) || len(h) != 2 {
			r.t.Errorf("node 2 hears %v", h)
		}
		late.Store(true)
		const reason, next = "it has not answered in time", "try again in a moment"
		k.refused(adminapi.Drain, "n1", reason, next)
		k.refused(adminapi.Decommission, "n1", reason, next)
		show := func() *adminpb.NodeShowResponse {
			r.t.Helper()
			s, err := k.a.ShowNode(r.t.Context(), "n1")
			if err != nil {
				r.t.Fatal(err)
			}
			return s
		}
		is := show()
		k.wants("shown before", asRefusal(is.GetDrain()), reason, next)
		if n := is.GetNode(); !n.GetAlive() || n.GetLeaders() != 1 || !is.GetRanges()[0].GetLeads() {
			r.t.Errorf("it was to live, and to lead as others say: %v", is)
		}
		late.Store(false)
		k.does(adminapi.Drain, "n1")
		r.wait(time.Minute, "it leads nothing", func() bool { n := k.node("n1"); return n.GetLeaders() == 0 && !n.GetPlacementLeader() })
		if is := show(); is.GetDrain() != nil {
			r.t.Errorf("drained: %v", is)
		}
		late.Store(true)
		k.wants("drained, and late", asRefusal(show().GetDrain()), reason, next)
		r.crash(n1)
		r.wait(time.Minute, "it is known to be down", func() bool { return !k.core.alive(1) })
		if is := show(); is.GetDrain() != nil || is.GetNode().GetAlive() {
			r.t.Errorf("it is down, and leads nothing: %v", is)
		}
	})
}

func asRefusal(r *adminpb.Refusal) error {
	if r == nil {
		return nil
	}
	return &adminapi.Refusal{Reason: r.GetReason(), NextStep: r.GetNextStep()}
}

// TestDrainBesideIsolatedNodes: a node that hears hardly any other answers, and gets neither
// leaders nor replicas. Replicas and leaderships without another target prevent a node
// from being drained or emptied.
func TestDrainBesideIsolatedNodes(t *testing.T) {
	const ranges = 5
	bubble(t, 5, borders(ranges), nil, func(r *rig) {
		r.spread(r.nodes[0], ranges, "v")
		k := r.operator(r.nodes[0])
		for _, n := range []keyspace.NodeID{4, 5} { // they hear node 1 alone
			for from := keyspace.NodeID(2); from <= 5; from++ {
				if from != n {
					r.net.Cut(from, n)
				}
			}
		}
		time.Sleep(time.Minute)
		for _, n := range []string{"n4", "n5"} {
			if is := k.node(n); !is.GetAlive() || is.GetLeaders() > 0 {
				r.t.Fatalf("%s was to answer, and to lead nothing: %v", n, is)
			}
		}
		k.refused(adminapi.Drain, "n1", ": node n4, node n5 hears hardly any other node", "let node n4, node n5 hear the others first")
		k.refused(adminapi.Decommission, "n1", "and 2 others take replicas", "add a node")
		// An isolated leader hands over to a voter that hears more: to make it one is refused.
		l, err := k.a.Ranges(r.t.Context(), &adminpb.RangeListRequest{Node: "n5"})
		if err != nil || len(l.GetRanges()) == 0 {
			r.t.Fatalf("ranges of n5: %v, %v", l, err)
		}
		for _, to := range []struct {
			what string
			err  error
		}{
			{"a leader that would hand back", k.a.TransferLeader(r.t.Context(), keyspace.RangeID(l.GetRanges()[0].GetId()), "n5")},
			{"the same of the placement group", k.a.TransferPlacement(r.t.Context(), "n5")},
		} {
			k.wants(to.what, to.err, "n5 hears hardly any other node", "let it hear the others")
		}
		r.wantEtcd("the same by etcd's command", etcdNode{k.core}.MoveLeader(r.t.Context(), 5), rpctypes.ErrGRPCBadLeaderTransferee)
		k.does(adminapi.Drain, "n5") // it has nothing that others would have to lead
	})
}

// TestTheOnlyNodeStays: nobody could take over from it.
func TestTheOnlyNodeStays(t *testing.T) {
	bubble(t, 1, nil, nil, func(r *rig) {
		r.mustPut(r.nodes[0], "a", "v")
		k := r.operator(r.nodes[0])
		k.refused(adminapi.Drain, "n1", "it has the only replica of one range (1)", "add 2")
		k.refused(adminapi.Decommission, "n1", "and 0 others take replicas", "add a node")
		s, err := k.a.ShowNode(r.t.Context(), "n1")
		if err != nil || len(s.GetRanges()) != 1 || !s.GetRanges()[0].GetLeads() || s.GetDrain() == nil || s.GetDecommission() == nil {
			r.t.Errorf("%v, %v", s, err)
		}
	})
}

// TestANodeIsRemoved: a node that holds nothing is decommissioned and removed. From then
// on no node has it in its list, and it is not admitted again, neither as it is nor with an
// empty disk.
func TestANodeIsRemoved(t *testing.T) {
	bubble(t, 4, nil, nil, func(r *rig) {
		r.mustPut(r.nodes[0], "a", "v")
		last := r.nodes[3]
		r.publish(last)
		k := r.operator(r.nodes[0])
		if n := k.node("n"); n.GetRanges() != 0 || n.GetPlacement() {
			r.t.Fatalf("the fourth node holds something: %v", n)
		}
		k.does(adminapi.Decommission, "4")
		k.refused(adminapi.Drain, "4", "is decommissioned", "skein node recommission")
		k.does(adminapi.Recommission, "4")
		k.refused(adminapi.Remove, "4", "is serving", "skein node decommission")
		k.does(adminapi.Decommission, "4")
		if n := k.does(adminapi.Remove, "4"); n.GetState() != "removed" {
			r.t.Errorf("removed: %v", n)
		}
		for _, change := range []adminapi.NodeChange{adminapi.Drain, adminapi.Decommission, adminapi.Recommission, adminapi.Remove} {
			k.refused(change, "4", "was removed from the cluster at", "add a new node")
		}
		if l, err := k.a.Nodes(r.t.Context()); err != nil || len(l.GetNodes()) != 3 {
			r.t.Errorf("%v, %v", l, err)
		}
		// It is started again as it was, and stops when it hears.
		last.core.Crash()
		last.set(nil)
		r.start(last)
		r.publish(last)
		select {
		case <-last.core.Fatal():
			if err := last.core.Err(); !strings.Contains(err.Error(), "never admitted again") {
				r.t.Errorf("it stopped, since %v", err)
			}
		case <-time.After(time.Minute):
			r.t.Error("it goes on")
		}
		last.core.Crash()
		last.set(nil)
		// With --join it is told before it opens its directory, and knows for sure too.
		if _, err := r.joinerOf(last, r.nodes[0], last.disk).Find(r.t.Context()); !errors.Is(err, join.ErrRemoved) {
			r.t.Errorf("with --join: %v", err)
		}
		last.disk = newMemDisk(simdisk.New())
		c, err := Open(context.Background(), r.optionsOf(last))
		if err == nil {
			c.Crash()
		}
		if err == nil || !strings.Contains(err.Error(), "never admitted again") {
			r.t.Errorf("with an empty disk: %v", err)
		}
	})
}

// TestAnUnstartedNode: a row that was made for a node which has not come yet can be
// removed, and asked for nothing else.
func TestAnUnstartedNode(t *testing.T) {
	bubble(t, 1, nil, nil, func(r *rig) {
		r.mustPut(r.nodes[0], "a", "v")
		if err := r.nodes[0].core.client.AddNode(r.t.Context(), fsm.Node{ID: 9, Name: "n9", PeerURLs: []string{"http://n9:2380"}}); err != nil {
			r.t.Fatal(err)
		}
		k := r.operator(r.nodes[0])
		for _, change := range []adminapi.NodeChange{adminapi.Drain, adminapi.Undrain, adminapi.Decommission, adminapi.Recommission} {
			k.refused(change, "n9", "is unstarted", "etcdctl member remove 9")
		}
		k.does(adminapi.Remove, "n9")
	})
}

// TestRangesOfANodeAndAKey: the list shows only what it is asked for, and what is under
// way.
func TestRangesOfANodeAndAKey(t *testing.T) {
	const ranges = 4
	bubble(t, 4, borders(ranges), nil, func(r *rig) {
		r.spread(r.nodes[0], ranges, "v")
		a := r.nodes[0].core.Admin()
		all, err := a.Ranges(r.t.Context(), &adminpb.RangeListRequest{})
		if err != nil || len(all.GetRanges()) != ranges {
			r.t.Fatalf("%v, %v", all, err)
		}
		list := func(q *adminpb.RangeListRequest) (ids []uint64) {
			l, err := a.Ranges(r.t.Context(), q)
			if err != nil {
				r.t.Errorf("%v: %v", q, err)
			}
			for _, g := range l.GetRanges() {
				ids = append(ids, g.GetId())
				if len(g.GetMembers()) != 3 || g.GetMembers()[0].GetRole() != "voter" || g.GetLeader() == "" {
					r.t.Errorf("%v", g)
				}
			}
			return ids
		}
		for _, n := range []string{"n1", "n2", "n3", "n4"} {
			var want []uint64
			for _, g := range all.GetRanges() {
				if slices.Contains(g.GetReplicas(), n) {
					want = append(want, g.GetId())
				}
			}
			if got := list(&adminpb.RangeListRequest{Node: n}); len(want) != 3 || !slices.Equal(got, want) {
				r.t.Errorf("of %s: %v, want %v", n, got, want)
			}
		}
		for i := range ranges {
			if got := list(&adminpb.RangeListRequest{Key: []byte(keyOf(i))}); len(got) != 1 || got[0] != uint64(i+1) {
				r.t.Errorf("of %s: %v", keyOf(i), got)
			}
		}
		if got := list(&adminpb.RangeListRequest{Key: []byte{}}); len(got) != 1 || got[0] != 1 {
			r.t.Errorf("of the empty key: %v", got)
		}
		var refused *adminapi.Refusal
		if _, err := a.Ranges(r.t.Context(), &adminpb.RangeListRequest{Node: "n9"}); !errors.As(err, &refused) {
			r.t.Errorf("of no node: %v", err)
		}
	})
}

// TestADrainedNodeIsEmptied: what an operator asks of a node comes to its end: drained it
// leads nothing, decommissioned it holds nothing, and is removed.
func TestADrainedNodeIsEmptied(t *testing.T) {
	const ranges = 6
	bubble(t, 4, borders(ranges), nil, func(r *rig) {
		r.spread(r.nodes[0], ranges, "v")
		k := r.operator(r.nodes[0])
		until := func(what string, done func(*adminpb.Node) bool) {
			r.t.Helper()
			for range 300 {
				if done(k.node("n2")) {
					return
				}
				time.Sleep(time.Second)
			}
			r.t.Fatalf("%s: %v", what, k.node("n2"))
		}
		held := k.node("n2").GetRanges()
		if held == 0 {
			r.t.Fatal("n2 holds nothing to begin with")
		}
		k.does(adminapi.Drain, "n2")
		until("drain", func(n *adminpb.Node) bool { return n.GetLeaders() == 0 })
		if now := k.node("n2"); now.GetRanges() != held {
			r.t.Errorf("drained, it holds %d replicas instead of %d", now.GetRanges(), held)
		}
		k.does(adminapi.Decommission, "n2")
		until("decommission", func(n *adminpb.Node) bool { return n.GetRanges() == 0 })
		if n := k.node("n2"); !n.GetPlacement() {
			k.does(adminapi.Remove, "n2")
		}
	})
}

// TestSplitOutlivesItsLeader: a border that an operator sets stays, even if the leader that is
// to split the range dies and its success is unknown at first.
func TestSplitOutlivesItsLeader(t *testing.T) {
	bubble(t, 3, nil, nil, func(r *rig) {
		r.mustPut(r.nodes[0], "a", "v")
		for i := range 12 {
			key := []byte{'k', byte('a' + i)}
			k := r.operator(r.nodes[0])
			led := -1
			r.wait(30*time.Second, "somebody leads", func() bool {
				l, err := k.a.Ranges(r.t.Context(), &adminpb.RangeListRequest{Key: key})
				if err != nil {
					r.t.Fatal(err)
				}
				led = slices.IndexFunc(r.nodes, func(n *rigNode) bool {
					return len(l.GetRanges()) == 1 && l.GetRanges()[0].GetLeader() == fmt.Sprintf("n%d", n.id)
				})
				return led >= 0
			})
			asked := r.operator(r.nodes[(led+1)%len(r.nodes)])
			var wait sync.WaitGroup
			wait.Go(func() {
				if _, _, err := asked.a.SplitRange(r.t.Context(), key); err != nil {
					r.t.Errorf("split at %q: %v", key, err)
				}
			})
			time.Sleep(time.Duration(i) * 250 * time.Microsecond)
			r.crash(r.nodes[led])
			wait.Wait()
			r.start(r.nodes[led])
			r.wait(10*time.Second, "the border is kept", func() bool {
				l, err := asked.a.Ranges(r.t.Context(), &adminpb.RangeListRequest{Key: key})
				return err == nil && len(l.GetRanges()) == 1 && l.GetRanges()[0].GetKept() && bytes.Equal(l.GetRanges()[0].GetStart(), key)
			})
		}
	})
}
