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
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement"
	"github.com/skeindb/skein/shard"
	"github.com/skeindb/skein/sim/simdisk"
	"github.com/skeindb/skein/transport"
)

// keeper is an operator at one node of a rig.
type keeper struct {
	r *rig
	a admin
}

func (r *rig) keeper(n *rigNode) *keeper { return &keeper{r, admin{n.core}} }

// does asks for a change that is made.
func (k *keeper) does(change adminapi.NodeChange, node string) *adminpb.Node {
	k.r.t.Helper()
	n, err := k.a.ChangeNode(k.r.t.Context(), change, node)
	if err != nil {
		k.r.t.Fatalf("%s %s: %v", change, node, err)
	}
	return n
}

// refused asks for a change that is refused with these words, and with a next step.
func (k *keeper) refused(change adminapi.NodeChange, node, reason, next string) {
	k.r.t.Helper()
	_, err := k.a.ChangeNode(k.r.t.Context(), change, node)
	k.wants(string(change)+" "+node, err, reason, next)
}

// wants has an answer be a refusal with these words, and with a next step.
func (k *keeper) wants(what string, err error, reason, next string) {
	k.r.t.Helper()
	var r *adminapi.Refusal
	if !errors.As(err, &r) || !strings.Contains(r.Reason, reason) || !strings.Contains(r.NextStep, next) {
		k.r.t.Errorf("%s: %v, want a refusal that says %q and then %q", what, err, reason, next)
	}
}

func (k *keeper) node(name string) *adminpb.Node {
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

// TestNodeStates: what an operator asks of a node at one node is seen at all of them, and
// what makes no sense is refused with what to do instead.
func TestNodeStates(t *testing.T) {
	const ranges = 4
	bubble(t, 3, borders(ranges), nil, func(r *rig) {
		r.spread(r.nodes[0], ranges, "v")
		k := r.keeper(r.nodes[0])
		was := k.node("n2")
		if was.GetState() != "serving" || was.GetRanges() != ranges || !was.GetPlacement() {
			r.t.Fatalf("at first: %v", was)
		}
		if n := k.does(adminapi.Drain, "n2"); n.GetState() != "draining" || n.GetRanges() != ranges {
			r.t.Errorf("drained: %v", n)
		}
		k.does(adminapi.Drain, "n2") // again
		for _, n := range r.nodes {
			if is := r.keeper(n).node("n2"); is.GetState() != "draining" || is.GetSinceUnixMs() == 0 {
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

// TestTwoDrainsAtOnce: each of two nodes may be drained, and not both. What is asked of different
// nodes in the same instant is refused to one of them, with the reason.
func TestTwoDrainsAtOnce(t *testing.T) {
	bubble(t, 3, nil, nil, func(r *rig) {
		r.mustPut(r.nodes[0], "a", "v")
		errs := make([]error, 2)
		var wg sync.WaitGroup
		for i, name := range []string{"n2", "n3"} {
			wg.Go(func() { _, errs[i] = r.keeper(r.nodes[i]).a.ChangeNode(r.t.Context(), adminapi.Drain, name) })
		}
		wg.Wait()
		k := r.keeper(r.nodes[0])
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
		k := r.keeper(r.nodes[0])
		state := func(id keyspace.NodeID, to placement.NodeState, beside ...keyspace.NodeID) {
			if err := r.nodes[0].core.client.SetNodeState(r.t.Context(), id, placement.NodeServing, to, beside...); err != nil {
				r.t.Fatal(err)
			}
		}
		state(1, placement.NodeDraining)
		state(2, placement.NodeDecommissioned, 1)
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
		k := r.keeper(r.nodes[1])
		r.wait(time.Minute, "it is known to be down", func() bool { return !k.a.c.alive(3) })
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
		k := r.keeper(r.nodes[0])
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

// Call implements transport's bus.
func (b lateBus) Call(ctx context.Context, to keyspace.NodeID, m transport.Method, payload []byte) ([]byte, error) {
	if to == b.of && m == transport.MethodShardAdmin && b.late.Load() && bytes.Contains(payload, []byte(`"list"`)) {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return b.Bus.Call(ctx, to, m, payload)
}

// TestDrainOfANodeThatAnswersLate: nobody is told that a node leads nothing, or stands still, which
// lives and has not said in time what it leads.
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
		k := r.keeper(r.nodes[1])
		r.wait(time.Minute, "they hear each other", func() bool { return k.a.c.alive(1) && k.a.c.alive(3) })
		if h := k.a.c.report().Hears; !slices.Contains(h, 1) || !slices.Contains(h, 3) || len(h) != 2 {
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
		ctx, cancel := context.WithTimeout(r.t.Context(), 10*time.Second)
		defer cancel()
		if d := k.a.askFor(ctx, 1); d < 4*time.Second || d > 5*time.Second {
			r.t.Errorf("it has %v of 10s to say what it has", d)
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
		r.wait(time.Minute, "it is known to be down", func() bool { return !k.a.c.alive(1) })
		if is := show(); is.GetDrain() != nil || is.GetNode().GetAlive() {
			r.t.Errorf("it is down, and leads nothing: %v", is)
		}
		if d := k.a.askFor(ctx, 1); d != askTimeout {
			r.t.Errorf("it is down, and has %v to say what it has", d)
		}
	})
}

func asRefusal(r *adminpb.Refusal) error {
	if r == nil {
		return nil
	}
	return &adminapi.Refusal{Reason: r.GetReason(), NextStep: r.GetNextStep()}
}

// TestWhoIsTakenForALeaderIsNotDown: a node that this one does not hear may lead what others hear
// of, until one of them says that it leads that itself.
func TestWhoIsTakenForALeaderIsNotDown(t *testing.T) {
	at := func(leader, self keyspace.NodeID) []shard.Summary {
		return []shard.Summary{{Descriptor: keyspace.Descriptor{Range: 7}, LeaderNode: leader, IsLeader: leader == self}}
	}
	for _, tc := range []struct {
		what       string
		heard      bool
		two, three keyspace.NodeID // whom they take for the leader of the range
		leads      int
		unsure     bool
		leaderless bool
	}{
		{what: "it is down", two: 0, three: 3},
		{what: "it is heard, and another leads", heard: true, two: 1, three: 3, unsure: true},
		{what: "it is heard, and nobody knows of a leader", heard: true, unsure: true},
		{what: "another hears it", two: 0, three: 1, leads: 1, unsure: true},
		{what: "one has not heard yet who leads now", two: 1, three: 3},
		{what: "it is down, and has no successor yet", leaderless: true},
	} {
		v := surveyOf(3)
		delete(v.lists, 1)
		v.lists[2], v.lists[3] = at(tc.two, 2), at(tc.three, 3)
		v.heard = map[keyspace.NodeID]bool{1: tc.heard}
		v.hearLeaders()
		v.ranges = []keyspace.Descriptor{{Range: 7, Replicas: []keyspace.Replica{{ID: 1, Node: 1}, {ID: 2, Node: 2}, {ID: 3, Node: 3}}}}
		if leads := len(v.ledBy(1)); leads != tc.leads || v.unsure(1) != tc.unsure || v.row(&v.nodes[0]).GetLeaders() != int64(tc.leads) {
			t.Errorf("%s: it leads %d, unsure %t", tc.what, leads, v.unsure(1))
		}
		if err := v.mayDrain(&v.nodes[0], 0); (err != nil) != (tc.unsure || tc.leaderless) {
			t.Errorf("%s: %v", tc.what, err)
		}
	}
}

// TestPlacementWaitsForWhomItsLeaderMisses: what is said to be waited for goes by what the leader of
// placement hears, whoever else hears more.
func TestPlacementWaitsForWhomItsLeaderMisses(t *testing.T) {
	v := surveyOf(3)
	v.heard = map[keyspace.NodeID]bool{2: true, 3: true}
	v.placement.Leader = 1
	if v.silent(1) || v.silent(2) || v.silent(3) {
		t.Error("somebody is silent where all are heard")
	}
	v.reports = map[keyspace.NodeID]report{1: {Hears: []keyspace.NodeID{2}}}
	if v.silent(1) || v.silent(2) || !v.silent(3) {
		t.Error("the leader of placement misses node 3 alone")
	}
}

// TestDrainBesideLonelyNodes: a node that hears hardly any other answers, and gets neither
// leaders nor replicas. What only such ones could take keeps a node from being drained, or
// emptied.
func TestDrainBesideLonelyNodes(t *testing.T) {
	const ranges = 5
	bubble(t, 5, borders(ranges), nil, func(r *rig) {
		r.spread(r.nodes[0], ranges, "v")
		k := r.keeper(r.nodes[0])
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
		// A lonely leader hands over to a voter that hears more: to make it one is refused.
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
		r.wantEtcd("the same by etcd's command", self{k.a.c}.MoveLeader(r.t.Context(), 5), rpctypes.ErrGRPCBadLeaderTransferee)
		k.does(adminapi.Drain, "n5") // it has nothing that others would have to lead
	})
}

// TestLonelyNodesTakeNothingOfPlacement: neither its leadership nor a replica of it.
func TestLonelyNodesTakeNothingOfPlacement(t *testing.T) {
	v := &survey{byName: map[keyspace.NodeID]string{2: "n2", 3: "n3"}, lists: map[keyspace.NodeID][]shard.Summary{}, placement: placement.Status{Leader: 1}}
	for id := keyspace.NodeID(1); id <= 4; id++ {
		v.nodes = append(v.nodes, placement.Node{ID: id, Name: "n" + id.String(), State: placement.NodeServing})
		v.lists[id] = nil
		if id < 4 {
			v.placement.Replicas = append(v.placement.Replicas, keyspace.Replica{ID: keyspace.ReplicaID(id), Node: id})
		}
	}
	for _, tc := range []struct {
		lonely              []keyspace.NodeID
		drain, decommission string
	}{
		{lonely: []keyspace.NodeID{2}},
		{lonely: []keyspace.NodeID{2, 3}, drain: "nobody else can lead the placement group: n2, n3"},
		{lonely: []keyspace.NodeID{4}, decommission: "no other node serves that could take it"},
	} {
		v.lonely = map[keyspace.NodeID]bool{}
		for _, id := range tc.lonely {
			v.lonely[id] = true
		}
		for _, of := range []struct {
			err  error
			want string
		}{{v.mayDrain(&v.nodes[0], 0), tc.drain}, {v.mayDecommission(&v.nodes[0], 0), tc.decommission}} {
			if got := fmt.Sprint(of.err); (of.err != nil) != (of.want != "") || !strings.Contains(got, of.want) {
				t.Errorf("beside lonely %v: %v, want %q", tc.lonely, of.err, of.want)
			}
		}
	}
}

// TestNobodyLeavesWhileThePlacementGroupIsUnknown: what the node is to it may be what keeps it.
func TestNobodyLeavesWhileThePlacementGroupIsUnknown(t *testing.T) {
	v := surveyOf(4)
	v.placement = placement.Status{}
	for what, err := range map[string]error{"drained": v.mayDrain(&v.nodes[0], 0), "decommissioned": v.mayDecommission(&v.nodes[0], 0)} {
		if want := "n1 cannot be " + what + ": who holds the placement group is not known"; err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

// TestNobodyLeavesWhileKeysAreMissing: a range that nobody has told whole may be what keeps it.
func TestNobodyLeavesWhileKeysAreMissing(t *testing.T) {
	v := surveyOf(5)
	v.ranges, v.missing = cover([]keyspace.Descriptor{rangeOf(1, 1, "", "-"), rangeOf(9, 2, "m", "-")})
	if len(v.missing) != 1 {
		t.Fatalf("missing are %v", v.missing)
	}
	for what, err := range map[string]error{"drained": v.mayDrain(&v.nodes[0], 0), "decommissioned": v.mayDecommission(&v.nodes[0], 0)} {
		if want := "n1 cannot be " + what + ": who holds some of the keys is not known now"; err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

// surveyOf is that of so many nodes, which all answer and hold the placement group.
func surveyOf(nodes keyspace.NodeID) *survey {
	v := &survey{byName: map[keyspace.NodeID]string{}, lists: map[keyspace.NodeID][]shard.Summary{}}
	for id := keyspace.NodeID(1); id <= nodes; id++ {
		name := "n" + id.String()
		v.nodes, v.lists[id], v.byName[id] = append(v.nodes, placement.Node{ID: id, Name: name, State: placement.NodeServing}), nil, name
		v.placement.Replicas = append(v.placement.Replicas, keyspace.Replica{ID: keyspace.ReplicaID(id), Node: id, Role: keyspace.RoleVoter})
	}
	return v
}

// TestWhatTakesNodesBack: a refusal names what helps with each node that is away. To undrain
// one that is silent does not.
func TestWhatTakesNodesBack(t *testing.T) {
	for _, tc := range []struct {
		two, three placement.NodeState
		silent     keyspace.NodeID
		want       string
	}{
		{two: placement.NodeDraining, three: placement.NodeDecommissioned, want: "take n2 back first (skein node undrain n2), or take n3 back first (skein node recommission n3)"},
		{two: placement.NodeDraining, three: placement.NodeServing, silent: 3, want: "bring n3 back, which does not answer, or take n2 back first (skein node undrain n2)"},
		{two: placement.NodeDraining, three: placement.NodeDraining, silent: 3, want: "bring n3 back, which does not answer, and take it back (skein node undrain n3), or take n2 back first (skein node undrain n2)"},
	} {
		v := surveyOf(5)
		v.nodes[1].State, v.nodes[2].State = tc.two, tc.three
		delete(v.lists, tc.silent)
		var r *adminapi.Refusal
		if err := v.mayDrain(&v.nodes[0], 0); !errors.As(err, &r) || r.NextStep != tc.want {
			t.Errorf("%v, want %q", err, tc.want)
		}
		group := v.placement.Replicas
		v.placement.Replicas = []keyspace.Replica{group[0], group[3], group[4]}
		// Of five replicas the silent one alone stops nothing.
		v.ranges = []keyspace.Descriptor{{Range: 9, Generation: 1, Replicas: group}}
		r = nil
		if err := v.mayDrain(&v.nodes[0], 0); !errors.As(err, &r) || !strings.HasSuffix(r.Reason, "beside n2, n3 there is no quorum of range 9") || r.NextStep != tc.want {
			t.Errorf("of a range: %v, want %q", err, tc.want)
		}
	}
}

// TestPlacementHasRoomForWhoIsDecommissioned: each voter of the placement group that is to go
// needs another node, but those above the least.
func TestPlacementHasRoomForWhoIsDecommissioned(t *testing.T) {
	for _, tc := range []struct {
		what     string
		nodes    keyspace.NodeID
		voters   int
		from, to keyspace.NodeID // of the group's operation under way
		leave    keyspace.NodeID // beside node 1
		room     bool
	}{
		{what: "one is free", nodes: 4, voters: 3, room: true},
		{what: "none is free", nodes: 3, voters: 3},
		{what: "the free one is for another that goes", nodes: 4, voters: 3, leave: 2},
		{what: "two are free", nodes: 5, voters: 3, leave: 2, room: true},
		{what: "two were free, and one of them is being filled for the other", nodes: 5, voters: 3, leave: 2, from: 2, to: 4, room: true},
		{what: "one more than the least", nodes: 4, voters: 4, room: true},
		{what: "one more than the least, and two go", nodes: 4, voters: 4, leave: 2},
		{what: "one that serves gives its vote up, and can take another", nodes: 4, voters: 4, from: 2, room: true},
		{what: "the free one is being filled for one that goes", nodes: 4, voters: 3, leave: 2, from: 2, to: 4},
		{what: "it goes already", nodes: 4, voters: 3, from: 1, to: 4, room: true},
		{what: "one more is being made", nodes: 4, voters: 3, to: 4, room: true},
	} {
		v := &survey{lists: map[keyspace.NodeID][]shard.Summary{}, byName: map[keyspace.NodeID]string{}}
		for id := keyspace.NodeID(1); id <= tc.nodes; id++ {
			n := placement.Node{ID: id, Name: "n" + id.String(), State: placement.NodeServing}
			if id == tc.leave {
				n.State = placement.NodeDecommissioned
			}
			v.nodes, v.lists[id] = append(v.nodes, n), nil
			m := keyspace.Replica{ID: keyspace.ReplicaID(id), Node: id, Role: keyspace.RoleVoter}
			if id == tc.to {
				m.Role = keyspace.RoleLearner
			}
			if int(id) <= tc.voters || id == tc.to {
				v.placement.Replicas = append(v.placement.Replicas, m)
			}
		}
		if o := (placement.Operation{Range: placement.OwnGroup, Kind: placement.OperationMove, From: tc.from, To: tc.to}); tc.from+tc.to > 0 {
			if tc.from == 0 {
				o.Kind = placement.OperationAdd
			}
			if tc.to == 0 {
				o.Kind = placement.OperationRemove
			}
			v.operations = map[keyspace.RangeID]placement.Operation{placement.OwnGroup: o}
		}
		err := v.mayDecommission(&v.nodes[0], 0)
		if tc.room != (err == nil) || err != nil && !strings.Contains(err.Error(), "no other node serves that could take it") {
			t.Errorf("%s: %v", tc.what, err)
		}
	}
}

// TestTheOnlyNodeStays: nobody could take over from it.
func TestTheOnlyNodeStays(t *testing.T) {
	bubble(t, 1, nil, nil, func(r *rig) {
		r.mustPut(r.nodes[0], "a", "v")
		k := r.keeper(r.nodes[0])
		k.refused(adminapi.Drain, "n1", "it has the only replica of one range (1)", "add 2")
		k.refused(adminapi.Decommission, "n1", "and 0 others take replicas", "add a node")
		s, err := k.a.ShowNode(r.t.Context(), "n1")
		if err != nil || len(s.GetRanges()) != 1 || !s.GetRanges()[0].GetLeads() || s.GetDrain() == nil || s.GetDecommission() == nil {
			r.t.Errorf("%v, %v", s, err)
		}
	})
}

// TestANodeIsRemoved: a node that holds nothing is decommissioned and removed. From then
// on no node has it in its list, and it is let in no more: neither as it is nor with an
// empty disk.
func TestANodeIsRemoved(t *testing.T) {
	bubble(t, 4, nil, nil, func(r *rig) {
		r.mustPut(r.nodes[0], "a", "v")
		last := r.nodes[3]
		r.publish(last)
		k := r.keeper(r.nodes[0])
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
			if err := last.core.Err(); !strings.Contains(err.Error(), "never let in again") {
				r.t.Errorf("it stopped, since %v", err)
			}
		case <-time.After(time.Minute):
			r.t.Error("it goes on")
		}
		last.core.Crash()
		last.set(nil)
		last.disk = newMemDisk(simdisk.New())
		c, err := Open(context.Background(), r.optionsOf(last))
		if err == nil {
			c.Crash()
		}
		if err == nil || !strings.Contains(err.Error(), "never let in again") {
			r.t.Errorf("with an empty disk: %v", err)
		}
	})
}

// TestAnUnstartedNode: a row that was made for a node which has not come yet can be
// removed, and asked for nothing else.
func TestAnUnstartedNode(t *testing.T) {
	bubble(t, 1, nil, nil, func(r *rig) {
		r.mustPut(r.nodes[0], "a", "v")
		if err := r.nodes[0].core.client.AddNode(r.t.Context(), placement.Node{ID: 9, Name: "n9", PeerURLs: []string{"http://n9:2380"}}); err != nil {
			r.t.Fatal(err)
		}
		k := r.keeper(r.nodes[0])
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
		a := admin{r.nodes[0].core}
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

// TestPlan: of each state, where each change leads or what is to be done instead.
func TestPlan(t *testing.T) {
	for _, tc := range []struct {
		state                                              placement.NodeState
		drain, undrain, decommission, recommission, remove string
	}{
		{placement.NodeUnstarted, "start it", "start it", "start it", "start it", "removed"},
		{placement.NodeUnstartedLearner, "start it", "start it", "start it", "start it", "removed"},
		{placement.NodeLearner, "stop it as it is", "etcdctl member promote", "decommissioned", "etcdctl member promote", "skein node decommission"},
		{placement.NodeServing, "draining", "serving", "decommissioned", "serving", "skein node decommission"},
		{placement.NodeDraining, "draining", "serving", "decommissioned", "skein node undrain", "skein node decommission"},
		{placement.NodeDecommissioned, "skein node recommission", "skein node recommission", "decommissioned", "serving", "removed"},
	} {
		for change, want := range map[adminapi.NodeChange]string{
			adminapi.Drain: tc.drain, adminapi.Undrain: tc.undrain, adminapi.Decommission: tc.decommission,
			adminapi.Recommission: tc.recommission, adminapi.Remove: tc.remove,
		} {
			to, err := plan(change, &placement.Node{ID: 9, Name: "n9", State: tc.state})
			got := to.String()
			var r *adminapi.Refusal
			if errors.As(err, &r) {
				got = r.NextStep
			}
			if !strings.Contains(got, want) {
				t.Errorf("%s a node that is %s: %s, want %s", change, tc.state, got, want)
			}
		}
	}
}

func TestStopsWithout(t *testing.T) {
	group := func(nodes ...keyspace.NodeID) (g []keyspace.Replica) {
		for _, n := range nodes {
			g = append(g, keyspace.Replica{ID: keyspace.ReplicaID(n), Node: n})
		}
		return g
	}
	learner := append(group(1, 2, 3), keyspace.Replica{ID: 4, Node: 4, Role: keyspace.RoleLearner})
	for _, tc := range []struct {
		group []keyspace.Replica
		node  keyspace.NodeID
		away  []keyspace.NodeID
		want  bool
	}{
		{group: nil, node: 1},
		{group: group(1), node: 1, want: true},
		{group: group(1), node: 2},
		{group: group(1, 2), node: 1, want: true},
		{group: group(1, 2, 3), node: 1},
		{group: group(1, 2, 3), node: 1, away: []keyspace.NodeID{2}, want: true},
		{group: group(1, 2, 3), node: 4, away: []keyspace.NodeID{2, 3}},
		{group: group(1, 2, 3), node: 0, away: []keyspace.NodeID{2}},
		{group: group(1, 2, 3), node: 0, away: []keyspace.NodeID{2, 3}, want: true},
		{group: group(1, 2, 3, 4, 5), node: 5, away: []keyspace.NodeID{1}},
		{group: learner, node: 1},
		{group: learner, node: 4, away: []keyspace.NodeID{1, 2}},
	} {
		away := func(n keyspace.NodeID) bool { return slices.Contains(tc.away, n) }
		if got := stopsWithout(tc.group, tc.node, away); got != tc.want {
			t.Errorf("%v without %s and %v: %t", tc.group, tc.node, tc.away, got)
		}
	}
}

// TestADrainedNodeIsEmptied: what an operator asks of a node comes to its end: drained it
// leads nothing, decommissioned it holds nothing, and is removed.
func TestADrainedNodeIsEmptied(t *testing.T) {
	const ranges = 6
	bubble(t, 4, borders(ranges), nil, func(r *rig) {
		r.spread(r.nodes[0], ranges, "v")
		k := r.keeper(r.nodes[0])
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

// TestSplitOutlivesItsLeader: a border that somebody sets stays, also where the leader that is
// to split the range dies, and nobody knows at first whether it has.
func TestSplitOutlivesItsLeader(t *testing.T) {
	bubble(t, 3, nil, nil, func(r *rig) {
		r.mustPut(r.nodes[0], "a", "v")
		for i := range 12 {
			key := []byte{'k', byte('a' + i)}
			k := r.keeper(r.nodes[0])
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
			asked := r.keeper(r.nodes[(led+1)%len(r.nodes)])
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
			r.wait(10*time.Second, "the border is kept", func() bool { return asked.a.kept(key) })
		}
	})
}
