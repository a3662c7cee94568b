package operate

import (
	"cmp"
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/rangeapi/stages"
	"github.com/skeindb/skein/router"
	"github.com/skeindb/skein/shard"
	"github.com/skeindb/skein/shard/load"
	"github.com/skeindb/skein/shard/load/heat"
)

// fake is a cluster that is not there: what an Admin asks it answers from its fields. A method
// that no test needs panics.
type fake struct {
	Placement
	Replicas
	Routes

	nodes  []fsm.Node
	ranges []keyspace.Descriptor
	group  placement.Status
	// quorum is the error of whoever asks a quorum.
	quorum error
	// looks is whom each node takes for the leader of any range; nobody answers for the others.
	looks map[keyspace.NodeID]keyspace.NodeID
	// dead are the nodes that do not live.
	dead map[keyspace.NodeID]bool
	// mute are those that live and do not answer for what they say of themselves.
	mute map[keyspace.NodeID]bool
	// aside are those that live and that few others hear.
	aside map[keyspace.NodeID]bool
	// silentFor is how long the dead nodes are silent, 12 s by default; unheard says that they were never heard.
	silentFor time.Duration
	unheard   bool
	// states are the changes of nodes that were made.
	states []fsm.NodeState
	// begun are the operations that were begun; begin is the error of whoever begins one.
	begun []fsm.Operation
	begin error
	// rates is the load of the range, by whoever leads it.
	rates load.Rates
	// settings are the cluster's.
	settings []fsm.Setting
	// quarantined are replicas of the nodes.
	quarantined map[keyspace.NodeID][]Quarantined
	// reports are what nodes say, beside what is the same of all; nil for nothing.
	reports map[keyspace.NodeID]Report
	// asked counts the questions to other nodes for what they say of themselves.
	asked atomic.Int64
	// known is the map of the asked node, nil for none.
	known *fsm.Map
	// before is called before a change of a node is made, and may refuse it.
	before func() error
	// heat, if set, may refuse a node's heat map. It is called from many goroutines.
	heat func(keyspace.NodeID) error
}

// newFake returns n nodes that serve and hold the placement group and one range, which node 1
// leads.
func newFake(n keyspace.NodeID) *fake {
	f := &fake{group: placement.Status{Leader: 1}, looks: map[keyspace.NodeID]keyspace.NodeID{}, dead: map[keyspace.NodeID]bool{}}
	d := keyspace.Descriptor{Range: 1, Generation: 1}
	for id := keyspace.NodeID(1); id <= n; id++ {
		f.nodes = append(f.nodes, fsm.Node{ID: id, Name: "n" + id.String(), State: fsm.NodeServing})
		d.Replicas = append(d.Replicas, keyspace.Replica{ID: keyspace.ReplicaID(id), Node: id, Role: keyspace.RoleVoter})
		f.looks[id] = 1
	}
	f.ranges, f.group.Replicas = []keyspace.Descriptor{d}, d.Replicas
	return f
}

func (f *fake) admin() *Admin {
	return New(Options{
		Self: 1, Clock: clock.Virtual(), Election: time.Second, Heartbeat: 100 * time.Millisecond, Logger: zap.NewNop(),
		Placement: f, Replicas: f, Routes: f, Peers: f, Served: f,
	})
}

func (f *fake) SilentFor(n keyspace.NodeID) time.Duration {
	if f.dead[n] && !f.unheard {
		return cmp.Or(f.silentFor, 12*time.Second)
	}
	return 0
}

func (f *fake) Alive(n keyspace.NodeID) bool   { return !f.dead[n] }
func (f *fake) Reached(n keyspace.NodeID) bool { return !f.dead[n] && !f.aside[n] }
func (f *fake) Central(n keyspace.NodeID) bool { return !f.dead[n] }

// Slow is told by no node.
func (f *fake) Slow(context.Context, keyspace.NodeID) ([]stages.Slow, error) { return nil, nil }

func (f *fake) Report(_ context.Context, n keyspace.NodeID) (Report, error) {
	if n != 1 {
		f.asked.Add(1)
	}
	if f.dead[n] || f.mute[n] {
		return Report{}, kverror.Timeout
	}
	r := f.reports[n]
	r.Bytes, r.Quarantined = 1, f.quarantined[n]
	return r, nil
}

// Heat is of one request at the node's name in each column.
func (f *fake) Heat(_ context.Context, n keyspace.NodeID, q heat.Query) (*heat.Grid, error) {
	if f.heat != nil {
		if err := f.heat(n); err != nil {
			return nil, err
		}
	}
	g := &heat.Grid{Starts: [][]byte{[]byte("n" + n.String())}, End: []byte("n" + n.String() + "/")}
	for range q.Columns {
		g.Counts = append(g.Counts, heat.Counts{Writes: uint64(n)})
	}
	return g, nil
}

func (f *fake) Members(context.Context, bool) ([]fsm.Node, error) { return f.nodes, f.quorum }

func (f *fake) NodeTable(context.Context, bool) ([]fsm.Node, error)     { return f.nodes, f.quorum }
func (f *fake) WatchMap() (*fsm.Map, <-chan struct{})                   { return f.known, nil }
func (f *fake) KnownHolds() []fsm.Hold                                  { return nil }
func (f *fake) RangeMap(context.Context) ([]keyspace.Descriptor, error) { return f.ranges, nil }
func (f *fake) Status(context.Context) (placement.Status, error)        { return f.group, nil }

func (f *fake) LastOperations(context.Context) ([]fsm.Operation, error) { return nil, nil }
func (f *fake) LastSettings(context.Context) ([]fsm.Setting, error)     { return f.settings, nil }

func (f *fake) Operations(context.Context) ([]fsm.Operation, error) { return nil, f.quorum }
func (f *fake) Settings(context.Context) ([]fsm.Setting, keyspace.Revision, error) {
	return f.settings, 0, f.quorum
}

func (f *fake) PlacementGroup(context.Context) (placement.Status, error) { return f.group, f.quorum }

func (f *fake) BeginOperation(_ context.Context, o fsm.Operation) (fsm.Operation, error) {
	if f.begin == nil {
		f.begun = append(f.begun, o)
	}
	return o, f.begin
}

func (f *fake) SetNodeState(_ context.Context, _ keyspace.NodeID, _, to fsm.NodeState, _ ...keyspace.NodeID) error {
	if f.before != nil {
		if err := f.before(); err != nil {
			return err
		}
	}
	f.states = append(f.states, to)
	return nil
}

func (f *fake) List(_ context.Context, n keyspace.NodeID) ([]shard.Summary, error) {
	if f.dead[n] {
		return nil, kverror.Timeout
	}
	return []shard.Summary{{Descriptor: f.ranges[0], LeaderNode: f.looks[n], IsLeader: f.looks[n] == n, Rates: f.rates}}, nil
}

func (f *fake) Look(ctx context.Context, n keyspace.NodeID, _ keyspace.RangeID) (keyspace.Descriptor, keyspace.NodeID, error) {
	leader, ok := f.looks[n]
	if !ok {
		<-ctx.Done()
		return keyspace.Descriptor{}, 0, ctx.Err()
	}
	return f.ranges[0], leader, nil
}

func (f *fake) Led(keyspace.RangeID, keyspace.NodeID) {}
func (f *fake) Learn(...keyspace.Descriptor)          {}
func (f *fake) Locate(context.Context, keyspace.Span) ([]router.Located, error) {
	return []router.Located{{Descriptor: f.ranges[0], Leader: 1}}, nil
}

// Split is taken and never answered, as by a leader that is cut off.
func (f *fake) Split(ctx context.Context, _ keyspace.NodeID, _ keyspace.RangeID, _ keyspace.Generation, _ []byte) ([]keyspace.Descriptor, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

// TestLeaderBesideOneThatIsCutOff: the leader is the node that says so itself, and not one that
// a lagging replica names. A caller whose leader never answers learns of the other one.
func TestLeaderBesideOneThatIsCutOff(t *testing.T) {
	for _, tc := range []struct {
		what  string
		looks map[keyspace.NodeID]keyspace.NodeID
		want  keyspace.NodeID
	}{
		{"another leads", map[keyspace.NodeID]keyspace.NodeID{1: 1, 2: 2, 3: 2}, 2},
		{"it leads", map[keyspace.NodeID]keyspace.NodeID{1: 1, 2: 1, 3: 1}, 0},
		{"one replica lags", map[keyspace.NodeID]keyspace.NodeID{1: 1, 2: 3, 3: 1}, 0},
		{"nobody answers", nil, 0},
	} {
		t.Run(tc.what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFake(3)
				f.looks = tc.looks
				a := f.admin()
				ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
				defer cancel()
				if got := a.leaderBeside(ctx, 1, &f.ranges[0]); got != tc.want {
					t.Errorf("beside node 1 leads node %s, want %s", got, tc.want)
				}
				begun := time.Now()
				_, heir, err := a.splitAt(ctx, 1, &f.ranges[0], []byte("k"))
				if took := time.Since(begun); err == nil || heir != tc.want || tc.want != 0 && took > time.Second {
					t.Errorf("after %v: heir %s, %v", took, heir, err)
				}
			})
		})
	}
}

// TestDrainWhileOthersBegin: a drain that is refused because others have begun to leave is
// decided anew, by what is so then.
func TestDrainWhileOthersBegin(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake(5)
		a, looks := f.admin(), 0
		f.before = func() error {
			if looks++; looks == 1 {
				f.nodes[1].State = fsm.NodeDraining
				return kverror.New(kverror.BadRequest, "node 2 leaves")
			}
			return nil
		}
		row, err := a.ChangeNode(t.Context(), "drain", "n3")
		if err != nil || row.GetState() != "draining" || looks != 2 {
			t.Fatalf("%v, %v after %d attempts", row, err, looks)
		}
		// Three of five are too many.
		f.nodes[2].State = fsm.NodeDraining
		if _, err := a.ChangeNode(t.Context(), "drain", "n4"); err == nil || len(f.states) != 1 {
			t.Errorf("the third of five: %v, made: %v", err, f.states)
		}
	})
}

// TestTimeOfABusyNode: a living node has half of the command's time to answer. A dead one has a
// fixed, short time.
func TestTimeOfABusyNode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake(2)
		f.dead[2] = true
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		if d := f.admin().askFor(ctx, 1); d != 5*time.Second {
			t.Errorf("it lives, and has %v of 10s", d)
		}
		if d := f.admin().askFor(ctx, 2); d != askTimeout {
			t.Errorf("it does not live, and has %v", d)
		}
	})
}

// TestAMemberThatIsTakenBackStays: whoever waits for its removal is told that it serves.
func TestAMemberThatIsTakenBackStays(t *testing.T) {
	f := newFake(3)
	m := f.admin().Members(1, true)
	if err := m.stays(t.Context(), 2); kverror.Of(err).Kind != kverror.BadRequest {
		t.Errorf("a member that serves: %v", err)
	}
	f.nodes[1].State = fsm.NodeDecommissioned
	if err := m.stays(t.Context(), 2); err != nil {
		t.Errorf("one that still leaves: %v", err)
	}
}
