package raftgroup

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	pb "go.etcd.io/raft/v3/raftpb"

	"github.com/skeindb/skein/keyspace"
)

func (r *rig) change(g keyspace.GroupID, changes ...ConfChange) error {
	r.t.Helper()
	l := r.leader(g)
	grp := l.host.Group(g)
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	return grp.ChangeConf(ctx, grp.Status().Term, changes, []byte("new members"))
}

func (r *rig) roles(g keyspace.GroupID) string {
	rs := slices.Clone(r.leader(g).host.Group(g).Status().Replicas)
	slices.SortFunc(rs, func(a, b keyspace.Replica) int { return int(a.ID) - int(b.ID) })
	s := ""
	for _, x := range rs {
		s += fmt.Sprintf("%d@%d:%d ", x.ID, x.Node, x.Role)
	}
	return s
}

// addReplica opens an empty replica of the group on a fresh node.
func (n *testNode) addReplica(g keyspace.GroupID, id keyspace.ReplicaID) {
	n.replicas[g] = id
	n.open(g)
}

// TestReplaceReplica replaces a replica: learner, snapshot, joint change, removal (traps
// 14, 15).
func TestReplaceReplica(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 4, nil)
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		for i := range 10 {
			r.write(1, fmt.Sprint("w", i))
		}
		r.must(r.change(1, ConfChange{AddLearner, 4, 4}))
		// Not caught up: no replica is there to promote.
		if err := r.change(1, ConfChange{Type: Promote, Replica: 4}); !errors.Is(err, ErrNotCaughtUp) {
			t.Fatalf("promotion of an empty replica: %v", err)
		}
		r.nodes[4].addReplica(1, 4)
		r.equal(1)
		l := r.leader(1)
		victim := keyspace.ReplicaID(1 + l.id%3)
		swap := []ConfChange{{Type: Promote, Replica: 4}, {Type: RemoveReplica, Replica: victim}}
		r.eventually("the learner is caught up", 10*time.Second, func() bool {
			err := r.change(1, swap...)
			if err != nil && !errors.Is(err, ErrNotCaughtUp) {
				t.Fatal(err)
			}
			return err == nil
		})
		st := r.leader(1).host.Group(1).Status()
		if len(st.Replicas) != 3 || slices.ContainsFunc(st.Replicas, func(x keyspace.Replica) bool {
			return x.ID == victim || x.Role != keyspace.RoleVoter
		}) {
			t.Fatalf("after the swap: %v", st.Replicas)
		}
		a, _, err := r.leader(1).eng.Applied(1)
		r.must(err)
		if !slices.Equal(a.Replicas, st.Replicas) || a.ConfIndex == InitIndex {
			t.Fatalf("applied record: %+v", a)
		}
		r.must(r.nodes[keyspace.NodeID(victim)].host.Remove(context.Background(), []keyspace.GroupID{1}, nil)[1])
		delete(r.nodes[keyspace.NodeID(victim)].sms, 1)
		r.write(1, "after")
		r.equal(1)
	})
}

// trap 15: a learner is promoted only if it has nearly everything and was heard from
// lately. It is not enough that it once had everything, or that everything was sent to
// it.
func TestPromotionNeedsAPresentLearner(t *testing.T) {
	for _, c := range []struct {
		name   string
		lost   pb.MessageType // to or from the learner
		writes int
		is     func(p Progress, commit uint64) bool
	}{
		{"lags", pb.MsgApp, promoteLagMax + 50, func(p Progress, commit uint64) bool {
			return p.Active && p.Replicating && p.Match+promoteLagMax < commit
		}},
		{"is silent", pb.MsgHeartbeatResp, 0, func(p Progress, commit uint64) bool {
			return !p.Active && p.Replicating && p.Match == commit
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				r := newRig(t, 4, noSleep)
				r.startAll()
				defer r.close()
				r.bootstrap(1, 1, voters(3))
				r.write(1, "first")
				r.must(r.change(1, ConfChange{AddLearner, 4, 4}))
				r.nodes[4].addReplica(1, 4)
				r.equal(1)
				promote := ConfChange{Type: Promote, Replica: 4}
				learner := func() (p Progress, commit uint64) {
					g := r.leader(1).host.Group(1)
					inWorker(g, func() {
						ps, err := g.progress()
						r.must(err)
						p, commit = ps[slices.IndexFunc(ps, func(p Progress) bool { return p.Replica.ID == 4 })], g.commit
					})
					return p, commit
				}
				r.bus.set(func(b *testBus) {
					b.filter = func(from, to keyspace.NodeID, m *message) bool { return from != 4 && to != 4 || m.kind != c.lost }
				})
				for i := range c.writes {
					r.write(1, fmt.Sprint("w", i))
				}
				r.eventually(c.name, 10*time.Second, func() bool { return c.is(learner()) })
				if err := r.change(1, promote); !errors.Is(err, ErrNotCaughtUp) {
					p, commit := learner()
					t.Fatalf("promotion of a learner that %s: %v; %+v, committed %d", c.name, err, p, commit)
				}
				r.bus.set(func(b *testBus) { b.filter = nil })
				r.eventually("it is promoted", 10*time.Second, func() bool {
					err := r.change(1, promote)
					if err != nil && !errors.Is(err, ErrNotCaughtUp) {
						t.Fatal(err)
					}
					return err == nil
				})
			})
		})
	}
}

func TestConfChangesThatAreRefused(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, nil)
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		l := r.leader(1)
		self, other := keyspace.ReplicaID(l.id), keyspace.ReplicaID(1+l.id%3)
		for _, c := range []struct {
			changes []ConfChange
			want    error
		}{
			{nil, ErrConfInvalid},
			// traps 12, 79: a leader is transferred away first.
			{[]ConfChange{{Type: RemoveReplica, Replica: self}}, ErrRemovesLeader},
			{[]ConfChange{{Type: Demote, Replica: self}}, ErrRemovesLeader},
			{[]ConfChange{{Type: RemoveReplica, Replica: 77}}, ErrConfInvalid},
			{[]ConfChange{{Type: Promote, Replica: other}}, ErrConfInvalid},
			{[]ConfChange{{AddLearner, 9, l.id}}, ErrConfInvalid},
			{[]ConfChange{{AddLearner, 9, 0}}, ErrConfInvalid},
			{[]ConfChange{{AddLearner, other, 9}}, ErrConfInvalid},
			{[]ConfChange{{AddLearner, 9, 9}, {AddLearner, 10, 10}}, ErrConfInvalid},
			{[]ConfChange{{Type: Demote, Replica: other}, {Type: RemoveReplica, Replica: other}}, ErrConfInvalid},
			{[]ConfChange{{Type: 99, Replica: other}}, ErrConfInvalid},
		} {
			if err := r.change(1, c.changes...); !errors.Is(err, c.want) {
				t.Errorf("%v: %v, want %v", c.changes, err, c.want)
			}
		}
		g := l.host.Group(1)
		if err := g.ChangeConf(context.Background(), g.Status().Term+1, []ConfChange{{AddLearner, 9, 9}}, nil); !errors.Is(err, ErrNotLeader) {
			t.Errorf("another term: %v", err)
		}
		r.write(1, "fine")
	})
}

// trap 13: the leader changes between entering and leaving a joint configuration.
func TestJointIsLeftAfterLeaderChange(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 4, nil)
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		r.write(1, "x")
		r.must(r.change(1, ConfChange{AddLearner, 4, 4}))
		r.nodes[4].addReplica(1, 4)
		r.equal(1)
		l := r.leader(1)
		victim := keyspace.ReplicaID(1 + l.id%3)
		// The leader's last message enters the joint configuration. The one that would
		// leave it is lost with the leader.
		r.bus.set(func(b *testBus) {
			b.filter = func(from, _ keyspace.NodeID, m *message) bool {
				if m.kind != pb.MsgApp || from != l.id {
					return true
				}
				for _, e := range m.raft.GetEntries() {
					if e.GetType() == pb.EntryConfChangeV2 && len(e.GetData()) == 0 {
						return false
					}
				}
				return true
			}
		})
		done := make(chan error, 1)
		g := l.host.Group(1)
		term := g.Status().Term
		go func() {
			done <- g.ChangeConf(context.Background(), term,
				[]ConfChange{{Type: Promote, Replica: 4}, {Type: Demote, Replica: victim}}, nil)
		}()
		joint := func(n *testNode) bool {
			return slices.ContainsFunc(n.host.Group(1).Status().Replicas, func(x keyspace.Replica) bool {
				return x.Role == keyspace.RoleVoterIncoming
			})
		}
		r.eventually("all are joint", 5*time.Second, func() bool {
			for _, n := range r.nodes {
				if !joint(n) {
					return false
				}
			}
			return true
		})
		l.crash(0)
		if err := <-done; !errors.Is(err, ErrUnknownFate) && !errors.Is(err, ErrStopped) {
			t.Fatalf("change: %v", err)
		}
		r.bus.set(func(b *testBus) { b.filter = nil })
		r.eventually("the new leader leaves it", 20*time.Second, func() bool { return !joint(r.leader(1)) })
		rs := r.leader(1).host.Group(1).Status().Replicas
		for _, x := range rs {
			want := keyspace.RoleVoter
			if x.ID == victim {
				want = keyspace.RoleLearner
			}
			if x.Role != want {
				t.Fatalf("%v", rs)
			}
		}
		l.start() // trap 16: restart between commit and apply
		r.write(1, "after")
		r.equal(1)
		r.asleep(1)
	})
}

// traps 12, 79: a voter that the joint configuration demotes becomes leader in it. It
// hands leadership over before the configuration ends, so the group never waits for an
// election timeout.
func TestJointLeaderHandsOver(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 4, noSleep)
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		r.write(1, "x")
		r.must(r.change(1, ConfChange{AddLearner, 4, 4}))
		r.nodes[4].addReplica(1, 4)
		r.equal(1)
		l := r.leader(1)
		v := r.nodes[1+l.id%3]
		g := l.host.Group(1)
		r.bus.set(func(b *testBus) {
			b.filter = func(from, _ keyspace.NodeID, m *message) bool {
				leave := m.kind == pb.MsgApp && slices.ContainsFunc(m.raft.GetEntries(), func(e *pb.Entry) bool {
					return e.GetType() == pb.EntryConfChangeV2 && len(e.GetData()) == 0
				})
				stands := m.kind == pb.MsgPreVote || m.kind == pb.MsgVote && string(m.raft.GetContext()) != transferVoteBytes
				return !leave && (!stands || from == v.id)
			}
		})
		done := make(chan error, 1)
		go func() {
			done <- g.ChangeConf(context.Background(), g.Status().Term,
				[]ConfChange{{Type: Promote, Replica: 4}, {Type: Demote, Replica: v.replicas[1]}}, nil)
		}()
		role := func(id keyspace.ReplicaID, on *testNode) keyspace.Role {
			c := configurationOf(on.host.Group(1).Status().Replicas, 0)
			x, _ := c.find(id)
			return x.Role
		}
		r.eventually("joint", 5*time.Second, func() bool { return role(v.replicas[1], v) == keyspace.RoleVoterDemoting })
		l.crash(0)
		if err := <-done; err == nil {
			t.Fatal("the change is through")
		}
		r.eventually("it has led", 20*time.Second, func() bool {
			v.host.Group(1).Campaign()
			synctest.Wait()
			v.sms[1].mu.Lock()
			defer v.sms[1].mu.Unlock()
			return slices.ContainsFunc(v.sms[1].changes, func(s LeaderState) bool { return s.IsLeader })
		})
		r.bus.set(func(b *testBus) { b.filter = nil })
		last := time.Now()
		r.eventually("another leads", 20*time.Second, func() bool {
			if v.host.Group(1).Status().IsLeader {
				last = time.Now()
			}
			for _, n := range r.nodes {
				if n.up && n != v && n.host.Group(1).Status().IsLeader {
					return true
				}
			}
			return false
		})
		if d := time.Since(last); d > 300*time.Millisecond {
			t.Fatalf("nobody led for %v", d)
		}
		r.eventually("the joint configuration is left", 5*time.Second, func() bool {
			return role(v.replicas[1], r.leader(1)) == keyspace.RoleLearner
		})
		r.write(1, "after")
	})
}

// trap 9: a removed replica that missed its removal does not disturb the group, and is
// told.
func TestRemovedReplicaIsHarmless(t *testing.T) {
	for _, noPreVote := range []bool{false, true} {
		t.Run(fmt.Sprintf("NoPreVote=%t", noPreVote), func(t *testing.T) { testRemovedReplicaIsHarmless(t, noPreVote) })
	}
}

func testRemovedReplicaIsHarmless(t *testing.T, noPreVote bool) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, func(c *Config) { c.NoPreVote = noPreVote })
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		r.write(1, "x")
		l := r.leader(1)
		f := r.nodes[1+l.id%3]
		r.bus.isolate(f.id, true)
		r.must(r.change(1, ConfChange{Type: RemoveReplica, Replica: keyspace.ReplicaID(f.id)}))
		term := r.leader(1).host.Group(1).Status().Term
		r.bus.isolate(f.id, false)
		f.host.Group(1).Wake()
		r.eventually("it is told", 20*time.Second, func() bool {
			f.mu.Lock()
			defer f.mu.Unlock()
			return len(f.removed) > 0
		})
		delete(f.sms, 1)
		wakes := 0
		for range 100 {
			time.Sleep(200 * time.Millisecond)
			synctest.Wait()
			if !f.host.Group(1).Status().Asleep {
				wakes++
			}
		}
		s := l.host.Group(1).Status()
		if s.Term != term || !s.IsLeader {
			t.Fatalf("disturbed: %+v, term was %d", s, term)
		}
		if wakes > 20 {
			t.Fatalf("the removed replica was awake %d times of 100", wakes)
		}
		if !s.Asleep {
			t.Fatal("the group cannot sleep")
		}
		r.write(1, "y")
	})
}

// trap 10: a node that is removed and added again has a new replica. Messages to the old
// replica do not reach it.
func TestReplicaComesBackAsAnother(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, nil)
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		r.write(1, "x")
		l := r.leader(1)
		f := r.nodes[1+l.id%3]
		old := keyspace.ReplicaID(f.id)
		r.must(r.change(1, ConfChange{Type: RemoveReplica, Replica: old}))
		r.must(f.host.Remove(context.Background(), []keyspace.GroupID{1}, nil)[1])
		r.must(r.change(1, ConfChange{AddLearner, 9, f.id}))
		f.addReplica(1, 9)
		r.equal(1)
		g := f.host.Group(1)
		before := g.Status()
		r.must(f.host.handleMessages(l.id, appendRaftMessage(appendFrameHeader(nil, time.Second), 1, &pb.Message{
			Type: pb.MsgHeartbeat.Enum(), To: ptr(uint64(old)), From: ptr(uint64(l.id)), Term: ptr(before.Term + 50), Context: make([]byte, 8),
		})[2:]))
		synctest.Wait()
		if s := g.Status(); s.Term != before.Term {
			t.Fatalf("a message for replica %d reached %d", old, s.Replica)
		}
		r.eventually("promoted", 10*time.Second, func() bool { return r.change(1, ConfChange{Type: Promote, Replica: 9}) == nil })
		r.write(1, "y")
		r.equal(1)
		f.crash(0)
		f.start()
		r.write(1, "z")
		r.equal(1)
	})
}

// TestGrowAndShrink grows one replica to five and shrinks it to one again, under writes
// and restarts.
func TestGrowAndShrink(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 5, nil)
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(1))
		r.write(1, "x")
		for id := keyspace.NodeID(2); id <= 5; id++ {
			r.must(r.change(1, ConfChange{AddLearner, keyspace.ReplicaID(id), id}))
			r.nodes[id].addReplica(1, keyspace.ReplicaID(id))
			r.eventually("promoted", 20*time.Second, func() bool {
				err := r.change(1, ConfChange{Type: Promote, Replica: keyspace.ReplicaID(id)})
				return err == nil
			})
			r.write(1, fmt.Sprint("with ", id))
			victim := r.nodes[keyspace.NodeID(1+r.rng.IntN(int(id)))]
			victim.crash(r.rng.IntN(101))
			victim.start()
			r.write(1, fmt.Sprint("again ", id))
			r.equal(1)
		}
		for id := keyspace.NodeID(5); id > 1; id-- {
			r.eventually("removed", 30*time.Second, func() bool {
				err := r.change(1, ConfChange{Type: RemoveReplica, Replica: keyspace.ReplicaID(id)})
				if errors.Is(err, ErrRemovesLeader) {
					l := r.leader(1)
					_ = l.host.Group(1).Transfer(context.Background(), 0)
				}
				return err == nil
			})
			n := r.nodes[id]
			r.must(n.host.Remove(context.Background(), []keyspace.GroupID{1}, nil)[1])
			delete(n.replicas, 1)
			delete(n.sms, 1)
			r.write(1, fmt.Sprint("without ", id))
		}
		if s := r.roles(1); s != "1@1:0 " {
			t.Fatalf("roles %s", s)
		}
	})
}

// TestSoleVoterWithPendingChange: a sole voter with an unapplied configuration change in
// its log keeps the embargo, because another replica may lead with its promise.
func TestSoleVoterWithPendingChange(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 2, nil)
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(1))
		r.write(1, "x")
		n := r.nodes[1]
		r.must(n.eng.Flush(context.Background()))
		r.must(r.change(1, ConfChange{AddLearner, 2, 2}))
		r.nodes[2].addReplica(1, 2)
		r.eventually("promoted", 20*time.Second, func() bool { return r.change(1, ConfChange{Type: Promote, Replica: 2}) == nil })
		r.write(1, "y")
		n.crash(0)
		n.start()
		g := n.host.Group(1)
		var alone bool
		inWorker(g, func() { alone = g.sleep.soleVoter })
		if alone {
			t.Fatal("a replica with changes in its log takes itself for the sole voter")
		}
		r.write(1, "z")
		r.equal(1)
	})
}
