package join

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement"
	"github.com/skeindb/skein/placement/fsm"
)

// fakeGroup is a placement group that is not there. A method that no test needs panics.
type fakeGroup struct {
	Placement
	nodes  []fsm.Node
	quorum error // of whoever asks a quorum
	claim  error
	// claimed are the directories that rows were given to.
	claimed []uint64
	publish []error
}

func (g *fakeGroup) WatchMap() (*fsm.Map, <-chan struct{}) { return nil, nil }

func (g *fakeGroup) NodeTable(context.Context, bool) ([]fsm.Node, error) {
	return g.nodes, g.quorum
}

func (g *fakeGroup) PlacementGroup(context.Context) (placement.Status, error) {
	return placement.Status{}, g.quorum
}

func (g *fakeGroup) ClaimNode(_ context.Context, _ keyspace.NodeID, instance uint64) error {
	g.claimed = append(g.claimed, instance)
	return g.claim
}

func (g *fakeGroup) Publish(context.Context, fsm.Node) error {
	err := g.publish[0]
	g.publish = g.publish[1:]
	return err
}

// asking returns the admission of node 1, which asks peers 2 and up; peers answer by round, and
// say nothing once their answers are used up, or with nil.
func asking(founders int, answers map[keyspace.NodeID][]*Check) *Admission {
	o := Options{
		Cluster: 0xc1, Self: 1, Instance: 7, DataDir: "data", WALDir: "wal", Founders: founders,
		Clock: clock.Virtual(), Logger: zap.NewNop(),
	}
	next := map[keyspace.NodeID]chan *Check{}
	for id, all := range answers {
		o.Others = append(o.Others, id)
		next[id] = make(chan *Check, len(all))
		for _, a := range all {
			next[id] <- a
		}
	}
	o.Ask = func(ctx context.Context, peer keyspace.NodeID, _ []byte) ([]byte, error) {
		select {
		case a := <-next[peer]:
			if a != nil {
				return json.Marshal(a)
			}
		default:
		}
		return nil, errors.New("it does not answer")
	}
	o.UndoBootstrap = func(_ context.Context, holds keyspace.ReplicaID) error {
		if holds != 4 {
			return errors.New("another replica was meant")
		}
		return errUndone
	}
	return New(o)
}

var errUndone = errors.New("undone")

// TestRequest: what peers answer admits a node, refuses it for good, or has it wait.
func TestRequest(t *testing.T) {
	nothing, unsure := &Check{Node: 1}, &Check{Node: 1, Unsure: true}
	for _, tc := range []struct {
		what     string
		founders int
		answers  map[keyspace.NodeID][]*Check
		want     string // in the error; "" is admitted
	}{
		{"a majority of three founders", 3, map[keyspace.NodeID][]*Check{2: {nothing}, 3: nil}, ""},
		{"a founder that hears nobody", 3, map[keyspace.NodeID][]*Check{2: nil, 3: nil}, "deadline"},
		{"a founder beside one that knows that the cluster has run", 3, map[keyspace.NodeID][]*Check{2: {nothing, nothing, nothing}, 3: {unsure}}, "deadline"},
		{"two of five founders", 5, map[keyspace.NodeID][]*Check{2: {nothing}, 3: nil, 4: nil, 5: nil}, "deadline"},
		{"its row has served", 3, map[keyspace.NodeID][]*Check{2: {nothing}, 3: {{Known: true}}}, "has run before"},
		{"it was removed", 0, map[keyspace.NodeID][]*Check{2: {{Removed: true}}}, "never admitted again"},
		{"another directory came first", 0, map[keyspace.NodeID][]*Check{2: {{Other: true}}}, "another directory has been admitted as node 1"},
		{"nobody knows it", 0, map[keyspace.NodeID][]*Check{2: {{Absent: true}}}, "has no node 1"},
		{"it joins, and one has no quorum at first", 0, map[keyspace.NodeID][]*Check{2: {unsure, unsure, {Member: true}}}, ""},
		{"it joins, and nobody settles it", 0, map[keyspace.NodeID][]*Check{2: {nothing}}, "deadline"},
		{"it joins, and hears nobody", 0, map[keyspace.NodeID][]*Check{2: nil}, "deadline"},
		{"a founder whose group has moved on", 3, map[keyspace.NodeID][]*Check{2: {{Member: true, Moved: true, Holds: 4}}, 3: nil}, "undone"},
		{"it joins, and knows nobody", 0, nil, "knows none of its nodes"},
		{"the only founder", 1, nil, ""},
	} {
		t.Run(tc.what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				err := asking(tc.founders, tc.answers).Request(ctx)
				if (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
					t.Errorf("%v, want %q", err, tc.want)
				}
			})
		})
	}
}

// TestTheOnlyFounderHearsOfALaterNode: it has lost its disk, and bootstraps nothing.
func TestTheOnlyFounderHearsOfALaterNode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := asking(1, nil)
		time.AfterFunc(aloneTimeout/2, func() { a.UnknownCame(4) })
		if err := a.Request(t.Context()); err == nil || !strings.Contains(err.Error(), "has run before") {
			t.Error(err)
		}
	})
}

// A knock has the only founder listen on, for as long as there are knocks and longer than the pause between two dials of a node
// that was down. It founds when nothing follows. Without any knock it listens for a moment, and not at all where nobody can
// know it. Where datagrams do not reach it, it listens as long as behind a knock. It warns once.
func TestTheOnlyFounderListensOn(t *testing.T) {
	knocks := func(a *Admission) {
		for range 100 {
			time.Sleep(aloneTimeout / 2)
			a.Knocked(4)
		}
	}
	for _, tc := range []struct {
		what             string
		surely, noKnocks bool
		visit            func(a *Admission)
		took             time.Duration
		warns            int
		error            bool
	}{
		{"nobody", false, false, func(*Admission) {}, aloneTimeout, 0, false},
		{"nobody can come", true, false, func(a *Admission) { a.Knocked(4) }, 0, 0, false},
		{"knocks that nothing follows", false, false, knocks, 100*aloneTimeout/2 + knockedTimeout, 1, false},
		{"nobody can knock", false, true, func(*Admission) {}, knockedTimeout, 0, false},
		{"knocks where none were expected", false, true, knocks, 100*aloneTimeout/2 + knockedTimeout, 1, false},
		{"a knock before it listens", false, false, func(a *Admission) { a.Knocked(4) }, knockedTimeout, 1, false},
		{"a dial late behind a knock", false, false, func(a *Admission) {
			a.Knocked(4)
			time.Sleep(knockedTimeout - time.Millisecond)
			a.UnknownCame(4)
		}, knockedTimeout - time.Millisecond, 1, true},
	} {
		t.Run(tc.what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := asking(1, nil)
				core, warned := observer.New(zap.WarnLevel)
				a.o.SurelyNew, a.o.NoKnocks, a.o.Logger = tc.surely, tc.noKnocks, zap.New(core)
				go tc.visit(a)
				synctest.Wait()
				began := time.Now()
				err := a.Request(t.Context())
				if took := time.Since(began); took != tc.took || (err != nil) != tc.error {
					t.Errorf("%v after %v, want %v", err, took, tc.took)
				}
				if n := warned.FilterMessageSnippet("looks for it").Len(); n != tc.warns {
					t.Errorf("it warns %d times, want %d", n, tc.warns)
				}
				if a.Alone() == tc.error {
					t.Error("it does not know whether it has bootstrapped the cluster")
				}
			})
		})
	}
}

// TestAnswer: a peer answers by the node table as a quorum has it. Its own copy counts only against
// the asker.
func TestAnswer(t *testing.T) {
	row := func(state fsm.NodeState, instance uint64, urls ...string) []fsm.Node {
		return []fsm.Node{{ID: 9, State: state, Instance: instance, ClientURLs: urls}}
	}
	for _, tc := range []struct {
		what    string
		group   fakeGroup
		own     []fsm.Node // the node table of the peer's store
		pending bool       // the peer is not admitted itself
		want    Check
		claims  bool
	}{
		{what: "a member that has not started", group: fakeGroup{nodes: row(fsm.NodeUnstarted, 7)}, want: Check{Member: true}, claims: true},
		{what: "a member that has served", group: fakeGroup{nodes: row(fsm.NodeServing, 7, "http://c")}, want: Check{Known: true}},
		{what: "a member of another directory", group: fakeGroup{nodes: row(fsm.NodeUnstarted, 8)}, want: Check{Other: true}},
		{what: "another directory claims it first", group: fakeGroup{nodes: row(fsm.NodeUnstarted, 0), claim: kverror.NodeExists}, want: Check{Member: true, Other: true}, claims: true},
		{what: "a removed one", group: fakeGroup{nodes: row(fsm.NodeRemoved, 0)}, want: Check{Removed: true}},
		{what: "nobody", want: Check{Absent: true}},
		{what: "no quorum", group: fakeGroup{quorum: kverror.NoLeader}, want: Check{Unsure: true}},
		{what: "no quorum, and the peer's store speaks against it", group: fakeGroup{quorum: kverror.NoLeader}, own: row(fsm.NodeServing, 7, "http://c"), want: Check{Known: true}},
		{what: "a peer that is not admitted", pending: true, want: Check{Instance: 7}},
	} {
		t.Run(tc.what, func(t *testing.T) {
			a := New(Options{
				Self: 2, Nodes: tc.own, Clock: clock.Virtual(), Logger: zap.NewNop(), Placement: &tc.group,
				View: func() *fsm.View { return &fsm.View{} }, LogsEmpty: func() bool { return false },
			})
			if !tc.pending {
				a.SetAdmitted()
			}
			got := a.check(t.Context(), Check{Node: 9, Instance: 7, Known: tc.pending})
			if tc.want.Node = 9; !got.Unsure {
				tc.want.Instance = 7
			}
			if got != tc.want || (len(tc.group.claimed) > 0) != tc.claims {
				t.Errorf("%+v, want %+v; claimed for %v", got, tc.want, tc.group.claimed)
			}
		})
	}
}

// TestAnnounce: a node publishes its row until it is there, or hears that it cannot go on.
func TestAnnounce(t *testing.T) {
	for _, tc := range []struct {
		errs []error
		want string
	}{
		{[]error{kverror.NoLeader, kverror.NoLeader, nil}, ""},
		{[]error{kverror.NoLeader, kverror.NodeRemoved}, "never admitted again"},
		{[]error{kverror.NodeExists}, "another directory"},
	} {
		synctest.Test(t, func(t *testing.T) {
			g := &fakeGroup{publish: tc.errs}
			a := New(Options{Self: 1, Clock: clock.Virtual(), Logger: zap.NewNop(), Placement: g})
			err := a.Announce(t.Context(), fsm.Node{ID: 1})
			if (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) || len(g.publish) > 0 {
				t.Errorf("%v, want %q; %d answers are left", err, tc.want, len(g.publish))
			}
		})
	}
}
