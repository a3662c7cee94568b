package raftgroup

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	pb "go.etcd.io/raft/v3/raftpb"

	"github.com/skeindb/skein/keyspace"
)

// asleep waits until all running replicas of the group sleep.
func (r *rig) asleep(g keyspace.GroupID) {
	r.t.Helper()
	r.eventually(fmt.Sprintf("group %s sleeps", g), 30*time.Second, func() bool {
		for _, n := range r.nodes {
			if n.up && n.sms[g] != nil && !n.host.Group(g).Status().Asleep {
				return false
			}
		}
		return true
	})
}

func TestSleepAndWake(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, nil)
		r.startAll()
		defer r.close()
		r.bootstrap(1, 3, voters(3))
		r.write(1, "x")
		l, term := r.leased(1)
		for g := range keyspace.GroupID(3) {
			r.asleep(g + 1)
		}
		if l.host.Group(1).LeaseHeld(term) {
			t.Fatal("a sleeping leader holds a lease")
		}
		before := r.bus.counted(pb.MsgHeartbeat)
		time.Sleep(time.Minute)
		synctest.Wait()
		if n := r.bus.counted(pb.MsgHeartbeat); n != before {
			t.Fatalf("%d heartbeats while all groups sleep", n-before)
		}
		if r.leader(1) != l || l.host.Group(1).Status().Term != term {
			t.Fatal("a sleeping group has changed its leader")
		}
		// A proposal wakes it, without an election.
		start := time.Now()
		r.write(1, "y")
		if d := time.Since(start); d > 100*time.Millisecond || l.host.Group(1).Status().Term != term {
			t.Fatalf("a write to a sleeping group took %v", d)
		}
		r.asleep(1)
		// So does a client at a follower.
		f := r.nodes[1+l.id%3]
		f.host.Group(1).Wake()
		r.eventually("the leader is awake and has a lease", time.Second, func() bool { return l.host.Group(1).LeaseHeld(term) })
		r.asleep(1)
		r.equal(1)
	})
}

func TestSystemGroupsNeverSleep(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, nil)
		r.startAll()
		defer r.close()
		r.bootstrap(keyspace.PlacementGroup, 1, voters(3))
		l, _ := r.leased(keyspace.PlacementGroup)
		time.Sleep(time.Minute)
		synctest.Wait()
		g := l.host.Group(keyspace.PlacementGroup)
		if s := g.Status(); s.Asleep || !g.LeaseHeld(s.Term) {
			t.Fatalf("%+v", s)
		}
		if g.w != l.host.workers[0] {
			t.Fatal("a system group shares a worker")
		}
	})
}

// An idle system group sends half of its heartbeats. It keeps its lease all the time, and a leader's death is
// noticed as soon as with all of them.
func TestIdleSystemGroupSparesHeartbeats(t *testing.T) {
	perMinute := func(r *rig) int {
		before := r.bus.counted(pb.MsgHeartbeat)
		time.Sleep(time.Minute)
		synctest.Wait()
		return r.bus.counted(pb.MsgHeartbeat) - before
	}
	for name, noLease := range map[string]bool{"with leases": false, "without": true} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				r := newRig(t, 3, func(c *Config) { c.NoLeaseReads = noLease })
				r.startAll()
				defer r.close()
				r.bootstrap(keyspace.PlacementGroup, 1, voters(3))
				l := r.leader(keyspace.PlacementGroup)
				cfg := &l.host.cfg
				time.Sleep(10 * cfg.ElectionTimeout)
				all := 2 * int(time.Minute/cfg.TickInterval)
				n := perMinute(r)
				if noLease {
					if n < all-all/20 {
						t.Fatalf("%d heartbeats in a minute; without leases none of %d is spared", n, all)
					}
					return
				}
				if n < all*9/20 || n > all*11/20 {
					t.Fatalf("%d heartbeats in a minute, want half of %d", n, all)
				}
				g := l.host.Group(keyspace.PlacementGroup)
				term := g.Status().Term
				for range 1000 {
					time.Sleep(7 * time.Millisecond)
					if !g.LeaseHeld(term) {
						t.Fatal("the lease lapsed between two heartbeats")
					}
				}
				l.crash(0)
				r.eventually("another leader", 2*cfg.ElectionTimeout+5*cfg.TickInterval, func() bool {
					for _, o := range r.nodes {
						if o.up && o.host.Group(keyspace.PlacementGroup).Status().IsLeader {
							return true
						}
					}
					return false
				})
			})
		})
	}
}

// A group that is used sends every heartbeat, also if it is used as rarely as in two of three ticks.
func TestUsedSystemGroupSendsAllHeartbeats(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, nil)
		r.startAll()
		defer r.close()
		r.bootstrap(keyspace.PlacementGroup, 1, voters(3))
		l, _ := r.leased(keyspace.PlacementGroup)
		tick := l.host.cfg.TickInterval
		before, began := r.bus.counted(pb.MsgHeartbeat), time.Now()
		for i := range 400 {
			r.must(l.propose(keyspace.PlacementGroup, fmt.Sprint(i)))
			time.Sleep(3 * tick / 2)
		}
		ticks := int(time.Since(began) / tick)
		if n := r.bus.counted(pb.MsgHeartbeat) - before; n < 2*ticks*19/20 {
			t.Fatalf("%d heartbeats in %d ticks to two followers", n, ticks)
		}
	})
}

// trap 39: the node of a sleeping group's leader dies, is cut off, or restarts.
func TestSleepersWithoutLeader(t *testing.T) {
	lose := map[string]func(r *rig, l *testNode){
		"dies":     func(_ *rig, l *testNode) { l.crash(0) },
		"cut off":  func(r *rig, l *testNode) { r.bus.isolate(l.id, true) },
		"restarts": func(_ *rig, l *testNode) { l.crash(0); l.start() },
	}
	for name, f := range lose {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				r := newRig(t, 3, nil)
				r.startAll()
				defer r.close()
				r.bootstrap(1, 1, voters(3))
				r.write(1, "x")
				l, term := r.leased(1)
				r.asleep(1)
				time.Sleep(10 * time.Second)
				f(r, l)
				r.eventually("another leader, without a client's help", 8*time.Second, func() bool {
					n := r.leader(1)
					return n.host.Group(1).Status().Term > term
				})
				r.write(1, "y")
				r.bus.isolate(l.id, false)
				r.equal(1)
			})
		})
	}
}

// trap 61: the leader has stepped down while its node lives and the others sleep. A
// sleeper that is asked for its vote does not refuse it for ever.
func TestLeaderSteppedDown(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, nil)
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		r.write(1, "x")
		l, term := r.leased(1)
		r.asleep(1)
		g := l.host.Group(1)
		// A vote of a higher term raises the sleeping leader's term but elects nobody.
		inWorker(g, func() {
			_ = g.rn.Step(&pb.Message{
				Type: pb.MsgVoteResp.Enum(), From: ptr(uint64(1 + l.id%3)), To: ptr(uint64(g.self)), Term: ptr(term + 3), Reject: ptr(true),
			})
		})
		synctest.Wait()
		if g.Status().IsLeader {
			t.Fatal("still leads")
		}
		// Without its vote the others need each other's, and one of them still sleeps.
		r.bus.set(func(b *testBus) {
			b.filter = func(from, to keyspace.NodeID, m *message) bool {
				return m.kind != pb.MsgPreVote && m.kind != pb.MsgVote || from != l.id && to != l.id
			}
		})
		f := r.nodes[1+l.id%3]
		f.host.Group(1).Wake()
		r.eventually("a leader", 6*time.Second, func() bool {
			for _, n := range r.nodes {
				if s := n.host.Group(1).Status(); s.IsLeader && s.Term > term {
					return true
				}
			}
			return false
		})
		r.write(1, "y")
		r.equal(1)
	})
}

// trap 77: a sleeping leader that receives pre-votes answers with a heartbeat. One whose
// term was raised while it slept is ticked again.
func TestSleepingLeaderIsAsked(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, nil)
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		r.write(1, "x")
		l, term := r.leased(1)
		r.asleep(1)
		time.Sleep(5 * time.Second)
		f := r.nodes[1+l.id%3]
		f.host.Group(1).Campaign()
		r.eventually("it follows again", 5*time.Second, func() bool {
			s := f.host.Group(1).Status()
			return s.LeaderNode == l.id && s.Term == term
		})
		r.asleep(1)
		// All others agree that another replica should lead.
		for _, n := range r.nodes {
			if n != l {
				n.host.Group(1).Campaign()
			}
		}
		r.write(1, "y")
		r.asleep(1)
		r.equal(1)
	})
}

// TestYoungLeaderIsNotLost: clients that wake followers do not depose a leader whose node
// is too young to have sent a liveness message.
func TestYoungLeaderIsNotLost(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, nil)
		r.startAll()
		defer r.close()
		const groups = 8
		r.bootstrap(1, groups, voters(3))
		first := r.nodes[1]
		for g := keyspace.GroupID(1); g <= groups; g++ {
			first.host.Group(g).Campaign()
		}
		for range 100 {
			time.Sleep(500 * time.Microsecond)
			for g := keyspace.GroupID(1); g <= groups; g++ {
				r.nodes[2].host.Group(g).Wake()
				r.nodes[3].host.Group(g).Wake()
			}
		}
		for g := keyspace.GroupID(1); g <= groups; g++ {
			if s := first.host.Group(g).Status(); !s.IsLeader || s.Term != InitTerm+1 {
				t.Errorf("group %s: %+v", g, s)
			}
		}
	})
}

// trap 41: a group sleeps although a dead follower lags; its return wakes the group.
func TestLaggingFollowerReturns(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, nil)
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		r.write(1, "x")
		l := r.leader(1)
		f := r.nodes[1+l.id%3]
		f.crash(0)
		for i := range 10 {
			r.write(1, fmt.Sprint("y", i))
		}
		r.asleep(1)
		time.Sleep(20 * time.Second)
		f.start()
		r.equal(1)
		r.asleep(1)
		// The same, cut off instead of dead: no restart reveals it.
		r.bus.isolate(f.id, true)
		r.eventually("it counts as dead", 5*time.Second, func() bool { return !l.host.Liveness(f.id) })
		for i := range 10 {
			r.write(1, fmt.Sprint("z", i))
		}
		r.eventually("the rest sleeps", 20*time.Second, func() bool { return r.leader(1).host.Group(1).Status().Asleep })
		r.bus.isolate(f.id, false)
		r.equal(1)
	})
}

// trap 41: a group stays awake while a live follower lags, a proposal cannot be
// replicated, or nobody confirms a read. A sleeping group resends nothing, so the work
// would wait for ever.
func TestNobodySleepsOverWork(t *testing.T) {
	for name, hold := range map[string]func(r *rig, l, f *testNode){
		"a lagging follower": func(r *rig, l, f *testNode) {
			r.lose(pb.MsgApp, f.id)
			r.write(1, "more")
		},
		"a proposal": func(r *rig, l, _ *testNode) {
			r.bus.set(func(b *testBus) {
				b.filter = func(_, _ keyspace.NodeID, m *message) bool { return m.kind != pb.MsgApp }
			})
			r.must(l.propose(1, "more"))
		},
		"a read": func(r *rig, l, f *testNode) {
			r.bus.set(func(b *testBus) {
				b.filter = func(_, to keyspace.NodeID, m *message) bool { return m.kind != pb.MsgHeartbeatResp }
			})
			startRead(l.host.Group(1))
		},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				r := newRig(t, 3, nil)
				r.startAll()
				defer r.close()
				r.bootstrap(1, 1, voters(3))
				r.write(1, "x")
				r.asleep(1)
				l := r.leader(1)
				g := l.host.Group(1)
				hold(r, l, r.nodes[1+l.id%3])
				for range 25 {
					time.Sleep(100 * time.Millisecond)
					if s := g.Status(); s.IsLeader && s.Asleep {
						t.Fatalf("it sleeps: %+v", s)
					}
				}
				r.bus.set(func(b *testBus) { b.filter = nil })
				r.asleep(1)
				r.equal(1)
			})
		})
	}
}

// TestSleepNotices: a notice that arrives after the leader woke, or that names more than
// the follower has, puts no replica to sleep.
func TestSleepNotices(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, noSleep)
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		r.write(1, "x")
		l, term := r.leased(1)
		f := r.nodes[1+l.id%3]
		g := f.host.Group(1)
		notice := func(change func(*message)) bool {
			m := &message{group: 1, kind: kindSleep, to: g.self, from: keyspace.ReplicaID(l.id), node: l.id, term: term}
			inWorker(g, func() {
				m.commit, m.number = g.commit, g.promise.answered
				change(m)
				g.step(m)
			})
			asleep := g.Status().Asleep
			g.Wake()
			synctest.Wait()
			return asleep
		}
		if !notice(func(*message) {}) {
			t.Fatal("a good notice is ignored")
		}
		if notice(func(m *message) { m.number-- }) {
			t.Fatal("a notice from before an answered heartbeat")
		}
		if notice(func(m *message) { m.commit++ }) {
			t.Fatal("a notice of more than there is")
		}
		if notice(func(m *message) { m.term++ }) || notice(func(m *message) { m.term-- }) {
			t.Fatal("a notice of another term")
		}
		if notice(func(m *message) { m.from, m.node = 6-m.from-g.self, 6-m.node-f.id }) {
			t.Fatal("a notice of somebody else")
		}
	})
}

// trap 40: a node with many leaders dies. The wake-ups of its groups are paced, and the
// heartbeats of an awake group pass meanwhile.
func TestPacedWakeUps(t *testing.T) {
	groups, pace := keyspace.GroupID(fewer(1000, 240)), fewer(300, 80)
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, func(c *Config) { c.WakesPerSecond = pace })
		r.startAll()
		defer r.close()
		r.bootstrap(1, int(groups), voters(3))
		r.bootstrap(keyspace.PlacementGroup, 1, voters(3))
		r.eventually("all have leaders and sleep", 60*time.Second, func() bool {
			for g := keyspace.GroupID(1); g <= groups; g++ {
				s := r.nodes[1].host.Group(g).Status()
				if s.Leader == 0 || !s.Asleep {
					return false
				}
			}
			return true
		})
		led := map[keyspace.NodeID]int{}
		for g := keyspace.GroupID(1); g <= groups; g++ {
			led[r.nodes[1].host.Group(g).Status().LeaderNode]++
		}
		for _, id := range r.ids() {
			if led[id] < int(groups)/5 {
				t.Fatalf("leaders are not spread: %v", led)
			}
		}
		victim := r.nodes[1+r.leader(keyspace.PlacementGroup).id%3]
		l := r.leader(keyspace.PlacementGroup)
		term := l.host.Group(keyspace.PlacementGroup).Status().Term
		lost := led[victim.id]
		victim.crash(0)
		start := time.Now()
		survivor := r.nodes[1+victim.id%3]
		woken, most := 0, 0
		for {
			time.Sleep(100 * time.Millisecond)
			synctest.Wait()
			n := 0
			for g := keyspace.GroupID(1); g <= groups; g++ {
				if s := survivor.host.Group(g).Status(); s.LeaderNode != 0 && s.LeaderNode != victim.id {
					n++
				}
			}
			n -= int(groups) - lost
			most = max(most, n-woken)
			if woken = n; woken == lost {
				break
			}
			if time.Since(start) > 30*time.Second {
				t.Fatalf("%d of %d groups have a leader again", woken, lost)
			}
			if s := l.host.Group(keyspace.PlacementGroup).Status(); s.Term != term {
				t.Fatal("an awake group lost its leader")
			}
		}
		if most > pace*2/3 {
			t.Fatalf("%d groups woke within 100ms, the pace is %d a second", most, pace)
		}
		t.Logf("%d groups of a dead node had leaders again after %v", lost, time.Since(start))
	})
}

// TestStalledDisk: a node with a stalled disk loses its leaderships although its network
// and process are fine. It takes part again when the disk recovers.
func TestStalledDisk(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, nil)
		var slow [4]*syncFS
		for id, n := range r.nodes {
			slow[id] = &syncFS{FS: n.fs}
			n.wfs = slow[id]
		}
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		r.bootstrap(keyspace.PlacementGroup, 1, voters(3))
		r.write(1, "x")
		for _, id := range []keyspace.GroupID{1, keyspace.PlacementGroup} {
			l := r.leader(id)
			term := l.host.Group(id).Status().Term
			r.asleep(1)
			release := slow[l.id].hold()
			r.eventually("another leader", 10*time.Second, func() bool {
				n := r.leader(id)
				return n != l && n.host.Group(id).Status().Term > term
			})
			if !l.host.DiskStalled() {
				t.Fatal("a host does not notice its stalled disk")
			}
			if l.host.Group(id).LeaseHeld(term) {
				t.Fatal("a lease on a stalled disk")
			}
			release()
			r.eventually("the node lives again", 10*time.Second, func() bool {
				return !l.host.DiskStalled() && r.leader(id).host.Liveness(l.id)
			})
			r.write(1, fmt.Sprint("y", id))
			r.equal(1)
		}
	})
}

// TestStalledDiskUnderLoad: a leader with a stalled disk loses its group under load too.
// Followers count every MsgApp as a sign of life, so the proposals must not keep them
// loyal.
func TestStalledDiskUnderLoad(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, nil)
		var slow [4]*syncFS
		for id, n := range r.nodes {
			slow[id] = &syncFS{FS: n.fs}
			n.wfs = slow[id]
		}
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		r.write(1, "x")
		l := r.leader(1)
		release := slow[l.id].hold()
		defer release()
		r.eventually("another leader", 5*r.nodes[l.id].host.cfg.ElectionTimeout, func() bool {
			_ = l.propose(1, "late") // its outcome does not matter
			return r.leader(1) != l
		})
		r.write(1, "y")
		release()
		r.write(1, "z")
		r.equal(1)
	})
}

// trap 1: of messages for a replica that is not here, votes are kept and entries dropped.
// Unknown is told, at a bounded rate.
func TestVoteBuffer(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, nil)
		r.startAll()
		defer r.close()
		// Two of the three replicas exist; the third node has not applied the split.
		rs := voters(3)
		for _, rep := range rs {
			n := r.nodes[rep.Node]
			b := n.eng.NewBatch()
			r.must(n.host.Bootstrap(b, 7, rs, nil))
			r.must(b.Commit())
		}
		var dropVotes atomic.Bool
		dropVotes.Store(true)
		r.bus.set(func(b *testBus) {
			b.filter = func(from, to keyspace.NodeID, m *message) bool {
				isVote := m.kind == pb.MsgVoteResp || m.kind == pb.MsgPreVoteResp
				return !(dropVotes.Load() && isVote && from != 3)
			}
		})
		for _, id := range []keyspace.NodeID{1, 2} {
			r.nodes[id].replicas[7] = keyspace.ReplicaID(id)
			r.nodes[id].open(7)
		}
		time.Sleep(3 * time.Second)
		synctest.Wait()
		n := r.nodes[3]
		n.mu.Lock()
		told := len(n.unknown)
		n.mu.Unlock()
		if told == 0 || told > 4 {
			t.Fatalf("Unknown was told %d times in three election timeouts", told)
		}
		n.replicas[7] = 3
		n.open(7)
		r.eventually("the buffered pre-vote counts", 100*time.Millisecond, func() bool {
			return r.bus.counted(pb.MsgPreVoteResp) > 0
		})
		dropVotes.Store(false)
		r.write(7, "x")
		r.equal(7)
	})
	t.Run("bounded", func(t *testing.T) {
		var p voteBuffer
		p.init()
		m := NewMetrics(nil)
		for i := range 2 * bufferedGroupsMax {
			for from := range 2 * bufferedPerGroupMax {
				p.add([]*message{{group: keyspace.GroupID(i + 1), to: 1, from: keyspace.ReplicaID(from + 2), kind: pb.MsgVote, term: uint64(i)}}, 5, time.Second, m)
			}
		}
		if len(p.groups) != bufferedGroupsMax || len(p.take(1, 1)) != bufferedPerGroupMax {
			t.Fatalf("%d groups buffered", len(p.groups))
		}
		p.add([]*message{
			{group: 9, to: 2, from: 3, kind: pb.MsgVote, term: 4},
			{group: 9, to: 2, from: 3, kind: pb.MsgVote, term: 6},
			{group: 9, to: 2, from: 3, kind: pb.MsgVote, term: 5},
			{group: 9, to: 2, from: 3, kind: pb.MsgApp, term: 7},
		}, 5, time.Second, m)
		if vs := p.take(9, 2); len(vs) != 1 || vs[0].term != 6 {
			t.Fatalf("buffered %v", vs)
		}
		p.expire(6)
		if len(p.groups) != 0 {
			t.Fatalf("%d groups after expiry", len(p.groups))
		}
	})
}

// TestSleepWithFewTicks: with the shortest election timeout a third of it is less than
// three ticks. Nevertheless no follower's requests keep a leader awake, even if its node
// ticks at half the rate.
func TestSleepWithFewTicks(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, func(c *Config) {
			c.TickInterval = 200 * time.Millisecond
			if c.Node == 1 {
				c.TickInterval = 400 * time.Millisecond
			}
			c.ElectionTimeout = 5 * c.TickInterval
		})
		r.startAll()
		defer r.close()
		r.bootstrap(1, 3, voters(3))
		r.write(1, "x")
		if l := r.leader(1); l.id != 1 {
			r.must(l.host.Group(1).Transfer(context.Background(), 1))
		}
		for g := range keyspace.GroupID(3) {
			r.asleep(g + 1)
		}
	})
}

// TestLearnerThatMissedTheNotice: a learner that missed the notice cannot campaign to
// find out. It asks the leader and sleeps with the next notice.
func TestLearnerThatMissedTheNotice(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 4, nil)
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		r.write(1, "x")
		r.must(r.change(1, ConfChange{AddLearner, 4, 4}))
		r.nodes[4].addReplica(1, 4)
		r.equal(1)
		missed := false
		r.bus.set(func(b *testBus) {
			b.filter = func(_, to keyspace.NodeID, m *message) bool {
				if m.kind == kindSleep && to == 4 && !missed {
					missed = true
					return false
				}
				return true
			}
		})
		r.eventually("all sleep", 20*time.Second, func() bool {
			for _, n := range r.nodes {
				if !n.host.Group(1).Status().Asleep {
					return false
				}
			}
			return missed
		})
	})
}

// TestLateWords delivers late messages: from a leader of an older term, from a peer's
// previous run.
func TestLateWords(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, nil)
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		r.write(1, "x")
		l := r.leader(1)
		f := r.nodes[1+l.id%3]
		g := f.host.Group(1)
		synctest.Wait()
		inWorker(g, func() {
			g.onRemoved(&message{group: 1, kind: kindRemoved, to: g.self, from: 77, term: g.appliedTerm - 1})
			if g.sleep.removed {
				t.Error("silenced by a leader of before what is applied here")
			}
		})
		// A leader's hint that a replica is removed reaches one that a late message has
		// made a follower of that leader. It must not fall asleep as a led replica that
		// never hears from anybody.
		inWorker(g, func() {
			g.onRemoved(&message{group: 1, kind: kindRemoved, to: g.self, from: g.lead, node: l.id, term: g.term})
		})
		synctest.Wait() // the worker publishes its status at the end of a pass
		if s := g.Status(); !s.Asleep || s.Leader != 0 {
			t.Errorf("a replica that was removed: %+v", s)
		}
		p := &f.host.peers
		p.heard(l.id, liveness{boot: 101, sequence: 1, healthy: true})
		p.heard(l.id, liveness{boot: 102, sequence: 1, healthy: true})
		p.heard(l.id, liveness{boot: 101, sequence: 9, healthy: true})
		if b := p.boot(l.id); b != 102 {
			t.Errorf("a late message of run 101 is taken for a restart: %d", b)
		}
	})
}

// TestDeliverIsBounded: the number of messages that a group's worker has not processed is
// bounded too.
func TestDeliverIsBounded(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 1, nil)
		r.startAll()
		defer r.close()
		h := r.nodes[1].host
		w, g := newWorker(h, 1), &Group{h: h}
		w.mu.inPass = true // one that does not end
		app := routed{g, &message{kind: pb.MsgApp, bytes: 7}}
		for range groupMessagesMax {
			w.deliver([]routed{{g, &message{kind: pb.MsgHeartbeat}}})
		}
		h.inbound.Add(7)
		w.deliver([]routed{app})
		if n := len(g.work.msgs); n != groupMessagesMax || h.inbound.Load() != 0 {
			t.Fatalf("%d messages wait, %d bytes", n, h.inbound.Load())
		}
	})
}

// TestProposalWakesWithoutHeartbeats: in a group that is written to, the entries wake the
// followers. The heartbeat follows with a tick, and then the lease.
func TestProposalWakesWithoutHeartbeats(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, nil)
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		r.write(1, "x")
		const rounds = 10
		beats := 0
		for i := range rounds {
			r.asleep(1)
			l := r.leader(1)
			time.Sleep(l.host.cfg.TickInterval * time.Duration(i) / rounds) // at any moment between two ticks
			beat, entries := r.bus.counted(pb.MsgHeartbeat), r.bus.counted(pb.MsgApp)
			r.must(l.propose(1, fmt.Sprint("more ", i)))
			time.Sleep(2 * commitNoticeDelay)
			synctest.Wait()
			last := l.host.Group(1).Status().Applied
			for _, id := range r.ids() {
				if s := r.nodes[id].host.Group(1).Status(); s.Asleep || s.Applied != last {
					t.Errorf("node %s, where %d is applied: %+v", l.id, last, s)
				}
			}
			if got := r.bus.counted(pb.MsgApp) - entries; got != 2 {
				t.Errorf("%d MsgApps, want one for each follower", got)
			}
			beats += r.bus.counted(pb.MsgHeartbeat) - beat
			time.Sleep(l.host.cfg.TickInterval)
			synctest.Wait()
			if r.bus.counted(pb.MsgHeartbeat) == beat {
				t.Error("no heartbeat after a tick")
			}
			if _, _, ok := l.host.Group(1).Lease(); !ok {
				t.Error("no lease after a tick")
			}
		}
		if beats > rounds/2 { // of a tick in between
			t.Errorf("%d heartbeats within %v of %d proposals", beats, 2*commitNoticeDelay, rounds)
		}
	})
}

// crowd has a host put every idle group to sleep as soon as it may.
func crowd(c *Config) { c.AwakeFree = -1 }

// read is a ReadIndex of the group on the node.
func (r *rig) read(n *testNode, g keyspace.GroupID) error {
	done := make(chan error, 1)
	n.host.Group(g).ReadIndex(func(_ uint64, err error) { done <- err })
	return <-done
}

// TestCrowdedGroupSleepsAtOnce: on a host with many awake groups one that has got an entry sleeps again without a tick or a
// heartbeat, and its followers have applied the entry.
func TestCrowdedGroupSleepsAtOnce(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, crowd)
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		r.write(1, "first")
		r.asleep(1)
		l := r.leader(1)
		heartbeats, wakes := r.bus.counted(pb.MsgHeartbeat), r.bus.counted(kindWake)
		const writes = 20
		for i := range writes {
			r.write(1, fmt.Sprint("a", i))
			time.Sleep(20 * time.Millisecond) // more than a commit notice waits, less than a tick
			synctest.Wait()
			last := l.host.Group(1).Status().Last
			for _, id := range r.ids() {
				if s := r.nodes[id].host.Group(1).Status(); !s.Asleep || s.Applied != last {
					t.Fatalf("write %d, node %s: asleep %v, applied %d of %d", i, id, s.Asleep, s.Applied, last)
				}
			}
		}
		if n, w := r.bus.counted(pb.MsgHeartbeat)-heartbeats, r.bus.counted(kindWake)-wakes; n > 0 || w > 0 {
			t.Errorf("%d heartbeats and %d wake messages for %d entries", n, w, writes)
		}
		r.equal(1)
	})
}

// TestCrowdedGroupIsRead: a group that somebody reads keeps its lease until its ticks let it sleep.
func TestCrowdedGroupIsRead(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, crowd)
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		r.write(1, "first")
		r.asleep(1)
		l := r.leader(1)
		g := l.host.Group(1)
		for name, first := range map[string]func(){
			"read, then written": func() {
				r.must(r.read(l, 1))
				r.write(1, "x")
			},
			"written, then read": func() {
				if err := l.propose(1, "y"); err != nil { // the read comes before the group can sleep
					t.Fatal(err)
				}
				r.must(r.read(l, 1))
			},
		} {
			first()
			time.Sleep(20 * time.Millisecond)
			synctest.Wait()
			if s := g.Status(); s.Asleep || !g.LeaseHeld(s.Term) {
				t.Errorf("%s: asleep %v, and the lease is held: %v", name, s.Asleep, g.LeaseHeld(s.Term))
			}
			ticks := l.host.cfg.idleTicks()
			time.Sleep(time.Duration(ticks-2) * l.host.cfg.TickInterval)
			synctest.Wait()
			if s := g.Status(); s.Asleep {
				t.Errorf("%s: asleep after %d of %d ticks", name, ticks-2, ticks)
			}
			time.Sleep(3 * l.host.cfg.TickInterval)
			synctest.Wait()
			if s := g.Status(); !s.Asleep {
				t.Errorf("%s: awake after %d ticks", name, ticks+1)
			}
		}
	})
}

// TestCrowdedGroupWithALaggard: a follower that lives and lacks an entry keeps its group awake, and the group sleeps when it has it.
func TestCrowdedGroupWithALaggard(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, func(c *Config) { c.LivenessTimeout = time.Hour; crowd(c) })
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		r.write(1, "first")
		r.asleep(1)
		l := r.leader(1)
		f := r.nodes[1+l.id%3]
		r.bus.isolate(f.id, true)
		r.write(1, "x")
		time.Sleep(300 * time.Millisecond)
		synctest.Wait()
		if l.host.Group(1).Status().Asleep {
			t.Fatal("the leader sleeps while a living follower lacks an entry")
		}
		r.bus.isolate(f.id, false)
		r.asleep(1)
		r.equal(1)
	})
}

// TestCrowdedGroupWithALateAnswer: a follower whose answers take longer than a commit notice waits gets the commit index with a
// message that it answers again. The group sleeps at its first answer, and the second one wakes nobody.
func TestCrowdedGroupWithALateAnswer(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, crowd)
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		r.write(1, "first")
		r.asleep(1)
		l := r.leader(1)
		r.bus.set(func(b *testBus) {
			b.slowFrom = map[keyspace.NodeID]time.Duration{1 + l.id%3: 3 * commitNoticeDelay}
		})
		heartbeats, answers := r.bus.counted(pb.MsgHeartbeat), r.bus.counted(pb.MsgAppResp)
		const writes = 10
		for i := range writes {
			r.must(l.propose(1, fmt.Sprint("a", i)))
			time.Sleep(30 * time.Millisecond)
			synctest.Wait()
			if s := l.host.Group(1).Status(); !s.Asleep || s.Applied != s.Last {
				t.Fatalf("write %d: asleep %v, applied %d of %d", i, s.Asleep, s.Applied, s.Last)
			}
		}
		// A tick may come while an entry is under way. A second answer that wakes would make two for each entry.
		if n := r.bus.counted(pb.MsgHeartbeat) - heartbeats; n > writes {
			t.Errorf("%d heartbeats for %d entries", n, writes)
		}
		if n := r.bus.counted(pb.MsgAppResp) - answers; n <= 2*writes {
			t.Errorf("only %d answers to %d entries: none came twice", n, writes)
		}
		r.equal(1)
	})
}

// TestCrowdedGroupsWhoseNoticesRide: commit notices that leave with the entries of other groups let their groups sleep too.
func TestCrowdedGroupsWhoseNoticesRide(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		const groups, writes = 8, 80
		r := newRig(t, 3, func(c *Config) { c.Workers = 1; crowd(c) })
		r.startAll()
		defer r.close()
		r.bootstrap(1, groups, voters(3))
		l := r.nodes[1]
		for g := range keyspace.GroupID(groups) {
			r.write(g+1, "first")
			if at := r.leader(g + 1); at != l {
				r.must(at.host.Group(g+1).Transfer(t.Context(), l.host.Group(g+1).self))
			}
		}
		for g := range keyspace.GroupID(groups) {
			r.asleep(g + 1)
		}
		heartbeats := r.bus.counted(pb.MsgHeartbeat)
		for i := range writes {
			r.must(l.propose(keyspace.GroupID(1+i%groups), fmt.Sprint("a", i)))
			time.Sleep(1500 * time.Microsecond)
		}
		time.Sleep(3 * commitNoticeRideMax)
		synctest.Wait()
		for g := range keyspace.GroupID(groups) {
			for _, id := range r.ids() {
				if s := r.nodes[id].host.Group(g + 1).Status(); !s.Asleep {
					t.Errorf("node %s: group %s is awake", id, s.Group)
				}
			}
		}
		// Two ticks come meanwhile, each to the few groups that have just got an entry.
		if n := r.bus.counted(pb.MsgHeartbeat) - heartbeats; n > 2*groups {
			t.Errorf("%d heartbeats for %d entries", n, writes)
		}
	})
}

// TestCrowdedFollowsTheTicks: a host learns at its ticks how many of its groups are awake.
func TestCrowdedFollowsTheTicks(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		const groups = 8
		r := newRig(t, 3, func(c *Config) { c.AwakeFree = groups / 2 })
		r.startAll()
		defer r.close()
		r.bootstrap(1, groups, voters(3))
		for g := range keyspace.GroupID(groups) {
			r.write(g+1, "first")
		}
		for g := range keyspace.GroupID(groups) {
			r.asleep(g + 1)
		}
		h := r.nodes[1].host
		time.Sleep(2 * h.cfg.TickInterval)
		if synctest.Wait(); h.crowded() {
			t.Fatalf("crowded while all groups sleep: %d ticks", h.sleepTicks.Load())
		}
		for g := range keyspace.GroupID(groups) {
			h.Group(g + 1).Wake()
		}
		time.Sleep(2 * h.cfg.TickInterval)
		if synctest.Wait(); !h.crowded() {
			t.Fatalf("not crowded with %d awake groups of %d", groups, groups/2)
		}
	})
}

func TestSleepTicks(t *testing.T) {
	for _, c := range []struct {
		after       time.Duration
		free, awake int
		want        int64
	}{
		{time.Second, 64, 0, 10},
		{time.Second, 64, 64, 10},
		{time.Second, 64, 65, 9},
		{time.Second, 64, 128, 5},
		{time.Second, 64, 1 << 20, sleepTicksMin},
		{time.Second, -1, 0, sleepTicksMin},
		{150 * time.Millisecond, 64, 0, 2},
		{100 * time.Millisecond, 64, 1 << 20, 1},
	} {
		cfg := Config{TickInterval: 100 * time.Millisecond, SleepAfter: c.after, AwakeFree: c.free}
		if got := cfg.sleepTicks(c.awake); got != c.want {
			t.Errorf("%v with %d awake groups of %d: %d ticks, want %d", c.after, c.awake, c.free, got, c.want)
		}
	}
}
