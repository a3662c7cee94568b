package raftgroup

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"go.etcd.io/raft/v3"
	pb "go.etcd.io/raft/v3/raftpb"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/wal"
)

// TestHangingStoreCostsLeadership: a stalled store costs the leaderships as a stalled wal
// does, because entries would be proposed and never applied. Only the tables' disk hangs
// here; the wal's does not.
func TestHangingStoreCostsLeadership(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, nil)
		r.memtab = 64 << 10
		var tables [4]*syncFS
		for id, n := range r.nodes {
			tables[id] = &syncFS{FS: n.fs, only: ".sst"}
			n.efs = tables[id]
		}
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		r.write(1, "first")
		l := r.leader(1)
		release := tables[l.id].hold()
		defer release()
		pad := strings.Repeat("p", 16<<10)
		for i := range 60 {
			_ = l.propose(1, fmt.Sprint(i, pad))
			time.Sleep(2 * time.Millisecond)
		}
		r.eventually("the host notices", 3*time.Second, l.host.DiskStalled)
		if s := l.host.Group(1).Status(); s.IsLeader {
			if err := l.host.Group(1).Propose(s.Term, []byte("stuck"), func(error) { t.Error("dropped after a refusal") }); !errors.Is(err, ErrNotLeader) {
				t.Errorf("a proposal at a leader whose store hangs: %v", err)
			}
			if n := testutil.ToFloat64(l.host.m.applyStalled); n != 1 {
				t.Errorf("metric says %v", n)
			}
		} else {
			t.Error("the leadership ended before the host had noticed")
		}
		other := r.nodes[1+l.id%3]
		r.eventually("another node leads", 5*time.Second, func() bool {
			return r.leader(1) != l && !l.host.Group(1).Status().IsLeader
		})
		if other.host.Liveness(l.id) {
			t.Error("the others take the node for healthy")
		}
		r.write(1, "meanwhile")
		time.Sleep(10 * time.Second)
		if l.host.Group(1).Status().IsLeader {
			t.Error("it leads again with its store hanging")
		}
		release()
		r.eventually("the node is healthy", 3*time.Second, func() bool { return !l.host.DiskStalled() && other.host.Liveness(l.id) })
		r.equal(1)
	})
}

// TestHangingDiskOfSoleVoter: a sole voter with a hanging disk has nobody to yield to. It
// accepts proposals within their bounds and applies them when the disk makes progress
// again.
func TestHangingDiskOfSoleVoter(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 1, nil)
		n := r.nodes[1]
		disk := &syncFS{FS: n.fs}
		n.wfs = disk
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(1))
		r.write(1, "first")
		release := disk.hold()
		defer release()
		r.must(n.propose(1, "caught"))
		r.eventually("the host notices", 3*time.Second, n.host.DiskStalled)
		r.must(n.propose(1, "meanwhile"))
		release()
		r.eventually("applied", 3*time.Second, func() bool { return n.sms[1].has("caught") && n.sms[1].has("meanwhile") })
	})
}

// TestFailureCostsLeadership: a wal or state machine that has failed has nothing pending.
// Its node must not keep its leaderships until it is down.
func TestFailureCostsLeadership(t *testing.T) {
	for _, what := range []string{"wal", "apply"} {
		t.Run(what, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				r := newRig(t, 3, noSleep)
				var disks [4]*syncFS
				for id, n := range r.nodes {
					disks[id] = &syncFS{FS: n.fs}
					n.wfs = disks[id]
				}
				r.startAll()
				r.bootstrap(1, 1, voters(3))
				r.write(1, "first")
				l := r.leader(1)
				defer func() { l.crash(0); r.close() }()
				if what == "wal" {
					disks[l.id].broken.Store(true)
				} else {
					l.host.fail(errors.New("it cannot be applied"))
				}
				_ = l.propose(1, "x")
				r.eventually("another leads", 4*l.host.ElectionTimeout(), func() bool {
					for _, n := range r.nodes {
						if n != l && n.host.Group(1).Status().IsLeader {
							return true
						}
					}
					return false
				})
				if other := r.nodes[1+l.id%3]; other.host.Liveness(l.id) {
					t.Error("the others take the node for healthy")
				}
			})
		})
	}
}

// TestLongQueueKeepsLeadership: a wal with a long queue is busy, not stalled. Giving up
// leadership would only lengthen the queue.
func TestLongQueueKeepsLeadership(t *testing.T) {
	long(t, "fills a long queue")
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, nil)
		disk := &syncFS{FS: r.nodes[1].fs}
		r.nodes[1].wfs = disk
		r.walopt = func(o *wal.Options) { o.MaxBatchBytes = 32 << 10 }
		r.startAll()
		defer r.close()
		r.bootstrap(1, 8, voters(3))
		l := r.nodes[1]
		for g := keyspace.GroupID(1); g <= 8; g++ {
			if o := r.leader(g); o != l {
				r.must(o.host.Group(g).Transfer(t.Context(), l.replicas[g]))
			}
			r.write(g, "first")
		}
		disk.slowSync.Store(int64(80 * time.Millisecond))
		pad := strings.Repeat("p", 30<<10)
		for i := range 12 { // their fsyncs end before the wal gives up at its close
			for g := keyspace.GroupID(1); g <= 8; g++ {
				_ = l.propose(g, fmt.Sprint(i, pad))
			}
			time.Sleep(time.Millisecond)
		}
		var longest time.Duration
		for range 300 {
			time.Sleep(10 * time.Millisecond)
			_, pending := l.wal.Progress()
			if longest = max(longest, pending); l.host.DiskStalled() {
				t.Fatalf("taken for stalled with batches waiting for %v", pending)
			}
		}
		if longest < 2*time.Second {
			t.Errorf("batches waited for %v: the test proves nothing", longest)
		}
	})
}

// TestSlowStoreKeepsLeadership: a slow store stalls commits just as long but costs no
// leadership, because the other nodes are no faster.
func TestSlowStoreKeepsLeadership(t *testing.T) {
	long(t, "fills a slow store")
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, nil)
		r.memtab = 256 << 10
		var tables [4]*syncFS
		for id, n := range r.nodes {
			tables[id] = &syncFS{FS: n.fs, only: ".sst"}
			n.efs = tables[id]
		}
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		r.write(1, "first")
		l := r.leader(1)
		term := l.host.Group(1).Status().Term
		for _, fs := range tables[1:] {
			fs.slow.Store(int64(600 * time.Millisecond))
		}
		var longest time.Duration
		noise := make([]byte, 16<<10)
		for range 400 {
			for i := 0; i < len(noise); i += 8 {
				binary.LittleEndian.PutUint64(noise[i:], r.rng.Uint64())
			}
			_ = l.propose(1, string(noise))
			time.Sleep(50 * time.Millisecond)
			for _, a := range l.host.appliers {
				longest = max(longest, a.pending(l.host.cfg.Clock.Now()))
			}
			if l.host.DiskStalled() {
				t.Fatal("taken for a store that hangs")
			}
		}
		if longest < 2*time.Second {
			t.Errorf("commits were held up for %v: the test proves nothing", longest)
		}
		if s := l.host.Group(1).Status(); !s.IsLeader || s.Term != term {
			t.Errorf("led in term %d, now %+v", term, s)
		}
		for _, fs := range tables[1:] {
			fs.slow.Store(0)
		}
		r.equal(1)
	})
}

// TestFollowerQueueIsBounded: a follower whose wal cannot keep up drops entries beyond
// its queue's bound. It catches up when the disk recovers.
func TestFollowerQueueIsBounded(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		const queue, groups = 128 << 10, 8
		r := newRig(t, 3, func(c *Config) { c.MaxPeerInflightBytes = maxSizePerMsg })
		var slow [4]*syncFS
		var regs [4]*prometheus.Registry
		for id, n := range r.nodes {
			slow[id] = &syncFS{FS: n.fs}
			n.wfs = slow[id]
		}
		id := keyspace.NodeID(0)
		r.walopt = func(o *wal.Options) {
			id++ // nodes start in the order of their ids
			regs[id] = prometheus.NewRegistry()
			o.QueueBytes, o.Metrics = queue, wal.NewMetrics(regs[id])
		}
		r.startAll()
		defer r.close()
		r.bootstrap(1, groups, voters(3))
		for g := range groups {
			r.write(keyspace.GroupID(1+g), "first")
		}
		f := r.nodes[3]
		for _, g := range f.host.Groups() {
			if s := g.Status(); s.IsLeader {
				r.must(g.Transfer(t.Context(), 1))
			}
		}
		release := slow[f.id].hold()
		defer release()
		pad := strings.Repeat("p", 16<<10)
		var most float64
		for i := range fewer(30, 15) {
			for g := range groups {
				l := r.leader(keyspace.GroupID(1 + g))
				_ = l.propose(keyspace.GroupID(1+g), fmt.Sprint(i, pad))
			}
			time.Sleep(5 * time.Millisecond)
			synctest.Wait()
			most = max(most, gauge(t, regs[f.id], "skein_wal_queue_bytes"))
		}
		// A frame is accepted as a whole.
		if limit := float64(queue + 2*frameBytesMax); most > limit || most < queue {
			t.Errorf("%v bytes in the follower's queue, bound %v", most, queue)
		}
		if testutil.ToFloat64(f.host.m.overloadDropped) == 0 {
			t.Error("nothing was dropped: the test proves nothing")
		}
		if r.bus.counted(pb.MsgApp) == 0 {
			t.Error("no MsgApp was sent")
		}
		release()
		for g := range groups {
			r.equal(keyspace.GroupID(1 + g))
		}
	})
}

// gauge returns the value of a gauge without labels.
func gauge(t *testing.T, reg *prometheus.Registry, name string) float64 {
	t.Helper()
	all, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range all {
		if f.GetName() == name {
			return f.GetMetric()[0].GetGauge().GetValue()
		}
	}
	t.Fatalf("no metric %s", name)
	return 0
}

// TestKilledLeadersAreReplaced: when a node that leads groups dies, one replica of each
// campaigns as soon as its promise has ended. It does not wait for raft's random
// timeouts, which last up to two election timeouts.
func TestKilledLeadersAreReplaced(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		const groups = 12
		r := newRig(t, 3, func(c *Config) { c.SleepAfter = -1 })
		r.startAll()
		defer r.close()
		r.bootstrap(1, groups, voters(3))
		for g := range keyspace.GroupID(groups) {
			r.write(g+1, "first")
		}
		var took []time.Duration
		for round := range fewer(11, 7) {
			dead := r.leader(1)
			time.Sleep(1700*time.Millisecond + time.Duration(round)*17*time.Millisecond)
			dead.crash(0)
			start := time.Now()
			for g := range keyspace.GroupID(groups) {
				r.leader(g + 1)
			}
			took = append(took, time.Since(start))
			dead.start()
			time.Sleep(3 * time.Second)
		}
		// Without a chosen candidate at least one of twelve groups drew a long timeout nearly each time.
		cfg := r.nodes[1].host.cfg
		if slices.Max(took) > cfg.ElectionTimeout+4*cfg.TickInterval {
			t.Errorf("until all groups lead again: %v", took)
		}
	})
}

// TestRefusedVoteIsAskedForAgain: the chosen candidate has missed the last heartbeats of a leader, so the other voter's promise ends later
// than its own. It is elected all the same soon after that promise ends, in one election.
func TestRefusedVoteIsAskedForAgain(t *testing.T) {
	refused := 0.0
	for round := range 18 {
		missed, offset := round%3, time.Duration(round/3)*17*time.Millisecond
		inBubble(t, func(t *testing.T) {
			r := newRig(t, 3, func(c *Config) { c.SleepAfter = -1 })
			for _, id := range r.ids() {
				r.nodes[id].start()
				time.Sleep(offset) // their ticks are not at the same time
			}
			defer r.close()
			r.bootstrap(1, 1, voters(3))
			r.write(1, "first")
			dead := r.leader(1)
			g, node := dead.host.Group(1), dead.host.cfg.Node
			term, tick := g.Status().Term, dead.host.cfg.TickInterval
			var others []keyspace.Replica
			for _, v := range *g.public.replicas.Load() {
				if v.Node != node {
					others = append(others, v)
				}
			}
			slices.SortFunc(others, func(a, b keyspace.Replica) int { return cmp.Compare(a.ID, b.ID) })
			chosen := others[mix(1)%2]
			time.Sleep(2 * time.Second)
			r.bus.set(func(b *testBus) {
				b.filter = func(from, to keyspace.NodeID, m *message) bool {
					return from != node || to != chosen.Node || m.kind != pb.MsgHeartbeat
				}
			})
			time.Sleep(time.Duration(missed)*tick + tick/2)
			dead.crash(0)
			start := time.Now()
			next := r.leader(1)
			if took, most := time.Since(start), dead.host.cfg.ElectionTimeout+4*tick; took > most {
				t.Errorf("round %d: %d heartbeats were missed: a leader after %v, want %v at most", round, missed, took, most)
			}
			if by, got := next.host.cfg.Node, next.host.Group(1).Status().Term; by != chosen.Node || got != term+1 {
				t.Errorf("round %d: %d heartbeats were missed: node %s leads in term %d, want node %s in term %d", round, missed, by, got, chosen.Node, term+1)
			}
			refused += testutil.ToFloat64(r.nodes[others[1-mix(1)%2].Node].host.m.voteRefused)
		})
	}
	if refused < 6 {
		t.Errorf("%v votes were refused", refused)
	}
}

// TestNobodyContestsTheChosen: the other replicas give the chosen candidate a head start,
// so no vote is split: each lost leader raises its group's term by one. Raft's shortest
// timeout, which one replica in ten draws, ends with the promises.
func TestNobodyContestsTheChosen(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		const groups = 24
		r := newRig(t, 3, func(c *Config) { c.SleepAfter = -1 })
		r.startAll()
		defer r.close()
		r.bootstrap(1, groups, voters(3))
		for g := range keyspace.GroupID(groups) {
			r.write(g+1, "first")
		}
		lost := 0
		rounds := fewer(8, 4)
		for round := range rounds {
			dead := r.leader(1)
			terms := map[keyspace.GroupID]uint64{}
			for g := keyspace.GroupID(1); g <= groups; g++ {
				if r.leader(g) == dead {
					terms[g] = dead.host.Group(g).Status().Term
				}
			}
			// Each round hits another phase of the survivors' ticks.
			time.Sleep(1700*time.Millisecond + time.Duration(round)*17*time.Millisecond)
			dead.crash(0)
			for g, term := range terms {
				if now := r.leader(g).host.Group(g).Status().Term; now != term+1 {
					t.Errorf("round %d: group %s is led in term %d after its leader of term %d was lost", round, g, now, term)
				}
				lost++
			}
			dead.start()
			time.Sleep(3 * time.Second)
		}
		if lost < rounds*groups/4 {
			t.Errorf("only %d leaders were lost", lost)
		}
	})
}

// TestIsolatedLeaderHandsOver: a leader that hears only one follower keeps leading by
// raft's rules, while only that follower can reach it. It hands leadership over to the
// follower, which the others hear. If the two are cut off together there is nobody to
// take over.
func TestIsolatedLeaderHandsOver(t *testing.T) {
	for _, bridge := range []bool{true, false} {
		t.Run(fmt.Sprintf("bridge=%t", bridge), func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				const groups = 6
				r := newRig(t, 6, nil)
				r.startAll()
				defer r.close()
				r.bootstrap(1, groups, voters(3))
				for g := range keyspace.GroupID(groups) {
					r.write(g+1, "first")
				}
				l := r.leader(1)
				f := r.nodes[1+l.id%3]
				var led []keyspace.GroupID
				for g := keyspace.GroupID(1); g <= groups; g++ {
					if r.leader(g) == l {
						led = append(led, g)
					}
				}
				time.Sleep(2 * time.Second)
				r.bus.set(func(b *testBus) {
					for o := range b.nodes {
						for _, n := range []*testNode{l, f} {
							cut := o != l.id && o != f.id && (n == l || !bridge)
							b.cut[[2]keyspace.NodeID{n.id, o}], b.cut[[2]keyspace.NodeID{o, n.id}] = cut, cut
						}
					}
				})
				leads := func(n *testNode) bool {
					return !slices.ContainsFunc(led, func(g keyspace.GroupID) bool { return !n.host.Group(g).Status().IsLeader })
				}
				if !bridge {
					time.Sleep(10 * time.Second)
					if !leads(l) {
						t.Errorf("node %s and its follower are cut off together, and it does not lead %v", l.id, led)
					}
					return
				}
				// Usually the follower that hears both sides, which gets the leadership.
				// But the third one, which does not hear the leader, may campaign at just
				// that moment.
				heard := func() bool {
					return !slices.ContainsFunc(led, func(g keyspace.GroupID) bool {
						return !slices.ContainsFunc(voters(3), func(v keyspace.Replica) bool {
							return v.Node != l.id && r.nodes[v.Node].host.Group(g).Status().IsLeader
						})
					})
				}
				r.eventually("one that all others hear leads", 4*l.host.ElectionTimeout(), heard)
				for _, g := range led {
					r.write(g, "meanwhile")
				}
				terms := func() (all []uint64) {
					for _, g := range led {
						all = append(all, f.host.Group(g).Status().Term)
					}
					return all
				}
				time.Sleep(10 * time.Second)
				before := terms()
				time.Sleep(10 * time.Second)
				if after := terms(); !heard() || !slices.Equal(before, after) {
					t.Errorf("one that all others hear leads each of %v: %t; terms %v, 10 s later %v", led, heard(), before, after)
				}
			})
		})
	}
}

// TestCandidateDeposesNoSleeper: two nodes do not hear each other, and the third hears
// both. A group that one of the two leads sleeps. The other one campaigns again and
// again, and each time wakes the third one's replica. That replica asks its leader for a
// sign of life, even if its first request is lost, and does not take silence for death.
func TestCandidateDeposesNoSleeper(t *testing.T) {
	testSleepersKeepTheirLeaders(t, func(r *rig, _ keyspace.GroupID) {
		lost := map[[2]uint64]bool{}
		r.bus.set(func(b *testBus) {
			b.cut[[2]keyspace.NodeID{1, 2}], b.cut[[2]keyspace.NodeID{2, 1}] = true, true
			b.filter = func(from, _ keyspace.NodeID, m *message) bool {
				if m.kind != kindWake {
					return true
				}
				k := [2]uint64{uint64(from), uint64(m.group)}
				lost[k] = !lost[k]
				return !lost[k]
			}
		})
	})
}

// TestWokenFollowersDeposeNoSleeper: followers that wake because their leader's node
// briefly seemed dead ask their leader too.
func TestWokenFollowersDeposeNoSleeper(t *testing.T) {
	testSleepersKeepTheirLeaders(t, func(r *rig, groups keyspace.GroupID) {
		for g := keyspace.GroupID(1); g <= groups; g++ {
			l := r.leader(g)
			for _, n := range r.nodes {
				if n != l {
					inWorker(n.host.Group(g), n.host.Group(g).wakePaced)
				}
			}
		}
	})
}

// TestWokenFollowerHearsItsLeader: a follower that knows no leader is woken, and hears of one in the same visit. It does not
// campaign against that one.
func TestWokenFollowerHearsItsLeader(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		const groups = 12
		// The one that would campaign if the leader were lost.
		candidate := func(g keyspace.GroupID) keyspace.NodeID { return keyspace.NodeID(1 + mix(uint64(g))%3) }
		r := newRig(t, 3, nil)
		r.startAll()
		defer r.close()
		r.bootstrap(1, groups, voters(3))
		for g := keyspace.GroupID(1); g <= groups; g++ {
			r.write(g, "first")
			if l := r.leader(g); l.id == candidate(g) {
				grp := l.host.Group(g)
				r.must(grp.Transfer(t.Context(), 0))
			}
		}
		time.Sleep(3 * time.Second) // they sleep, and no heartbeat comes between
		for g := keyspace.GroupID(1); g <= groups; g++ {
			l := r.leader(g)
			f := r.nodes[candidate(g)].host.Group(g)
			term, from := l.host.Group(g).Status().Term, l.host.Group(g).self
			inWorker(f, func() { _ = f.rn.ForgetLeader() })
			inWorker(f, func() {
				f.step(&message{group: g, kind: pb.MsgApp, to: f.self, from: from, term: term, node: l.id, raft: &pb.Message{
					Type: pb.MsgApp.Enum(), To: ptr(uint64(f.self)), From: ptr(uint64(from)), Term: ptr(term),
					Index: ptr(f.commit), LogTerm: ptr(f.appliedTerm), Commit: ptr(f.commit),
				}})
				f.wakePaced()
				if s := f.rn.BasicStatus(); s.Lead != uint64(from) || s.RaftState != raft.StateFollower {
					t.Errorf("group %s: state %s, leader %d, want a follower of %d", g, s.RaftState, s.Lead, from)
				}
			})
		}
	})
}

func testSleepersKeepTheirLeaders(t *testing.T, happens func(r *rig, groups keyspace.GroupID)) {
	inBubble(t, func(t *testing.T) {
		const groups = 12
		r := newRig(t, 3, nil)
		r.startAll()
		defer r.close()
		r.bootstrap(1, groups, voters(3))
		for g := range keyspace.GroupID(groups) {
			r.write(g+1, "first")
		}
		leaders := func() (all []string) {
			for g := keyspace.GroupID(1); g <= groups; g++ {
				l := r.leader(g)
				all = append(all, fmt.Sprintf("%s in term %d", l.id, l.host.Group(g).Status().Term))
			}
			return all
		}
		time.Sleep(3 * time.Second)
		for g := keyspace.GroupID(1); g <= groups; g++ {
			if s := r.leader(g).host.Group(g).Status(); !s.Asleep {
				t.Fatalf("group %s does not sleep: %+v", g, s)
			}
		}
		before := leaders()
		happens(r, groups)
		time.Sleep(time.Minute)
		if after := leaders(); !slices.Equal(before, after) {
			t.Errorf("the groups' leaders were\n%v, and a minute later\n%v", before, after)
		}
	})
}

// TestIsolatedLeaderHandsOverToAReachablePeer: an isolated leader hands leadership over
// to a replica that also hears it, even if another connected one exists.
func TestIsolatedLeaderHandsOverToAReachablePeer(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 6, nil)
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		r.write(1, "first")
		l := r.leader(1)
		deaf, hears := r.nodes[1+l.id%3], r.nodes[1+(l.id+1)%3]
		if deaf.id > hears.id {
			deaf, hears = hears, deaf
		}
		time.Sleep(2 * time.Second)
		r.bus.set(func(b *testBus) {
			for o := range b.nodes {
				if o != l.id && o != deaf.id && o != hears.id {
					b.cut[[2]keyspace.NodeID{l.id, o}], b.cut[[2]keyspace.NodeID{o, l.id}] = true, true
				}
			}
			b.cut[[2]keyspace.NodeID{l.id, deaf.id}] = true
		})
		r.eventually("who hears the leader leads", 6*l.host.ElectionTimeout(), func() bool { return hears.host.Group(1).Status().IsLeader })
		if !hears.host.Liveness(l.id) || hears.host.Connected(l.id) || l.host.Connected(l.id) || !hears.host.Connected(hears.id) {
			t.Errorf("node %s is heard: %t; it is central to node %s: %t, to itself: %t; node %s to itself: %t", l.id, hears.host.Liveness(l.id),
				hears.id, hears.host.Connected(l.id), l.host.Connected(l.id), hears.id, hears.host.Connected(hears.id))
		}
		r.write(1, "meanwhile")
	})
}

// TestNodesWithoutACommonGroupKnowOfEachOther: nodes without a common group still know
// whether the other one lives. A node that has lost its last replica still serves
// clients.
func TestNodesWithoutACommonGroupKnowOfEachOther(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, nil)
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(2))
		r.write(1, "first")
		know := func(of keyspace.NodeID) bool {
			for _, n := range r.nodes {
				if n.id != of && !n.host.Liveness(of) {
					return false
				}
			}
			return true
		}
		for id := range r.nodes {
			r.eventually(fmt.Sprintf("all know that node %s lives", id), 3*time.Second, func() bool { return know(id) })
		}
		time.Sleep(5 * time.Second)
		for id := range r.nodes {
			if !know(id) {
				t.Errorf("after a while not all know that node %s lives", id)
			}
		}
		r.nodes[3].crash(0)
		r.eventually("the others notice that one is gone", 3*time.Second, func() bool {
			return !r.nodes[1].host.Liveness(3) && !r.nodes[2].host.Liveness(3)
		})
		r.nodes[3].start()
		r.eventually("and that it is back", 3*time.Second, func() bool { return know(3) })
	})
}

// TestLivenessMessagesRide: each node hears each other one about once in an interval, and never after more than one and a half. Messages go with heartbeats and their answers, and as answers to each other: each pair of nodes speaks once in
// an interval. A node whose ticker stands still falls silent, though its other goroutines run.
func TestLivenessMessagesRide(t *testing.T) {
	for _, beats := range []string{"none", "at even ticks", "at odd ticks"} {
		t.Run("heartbeats "+beats, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				ticks, held := make(chan struct{}), make(chan struct{})
				close(ticks)
				var gate atomic.Pointer[chan struct{}]
				gate.Store(&ticks)
				r := newRig(t, 3, func(c *Config) {
					if c.Node == 3 {
						c.Needed = func() keyspace.NodeID { <-*gate.Load(); return 0 }
					}
				})
				for _, id := range r.ids() {
					r.nodes[id].start()
					time.Sleep(37 * time.Millisecond) // their ticks are not at the same time
				}
				defer r.close()
				defer close(held)
				interval := r.nodes[1].host.cfg.livenessInterval()
				if beats != "none" {
					r.bootstrap(keyspace.PlacementGroup, 1, voters(3))
					if beats == "at odd ticks" {
						time.Sleep(interval / 2)
					}
					r.write(keyspace.PlacementGroup, "first")
				}
				time.Sleep(3 * time.Second)
				var mu sync.Mutex
				count, exchanges := map[[2]keyspace.NodeID]int{}, 0
				last, spoke := map[[2]keyspace.NodeID]time.Time{}, map[[2]keyspace.NodeID]time.Time{}
				r.bus.set(func(b *testBus) {
					b.filter = func(from, to keyspace.NodeID, m *message) bool {
						mu.Lock()
						defer mu.Unlock()
						now, way, pair := time.Now(), [2]keyspace.NodeID{from, to}, [2]keyspace.NodeID{min(from, to), max(from, to)}
						if m.group == 0 && m.raft == nil {
							if d := now.Sub(last[way]); count[way] > 0 && d > interval*3/2 {
								t.Errorf("node %s sends node %s nothing for %v", from, to, d)
							}
							last[way] = now
							count[way]++
						}
						if !spoke[pair].Equal(now) {
							spoke[pair] = now
							exchanges++
						}
						return true
					}
				})
				const intervals = 100
				time.Sleep(intervals * interval)
				mu.Lock()
				for way, n := range count {
					if n < intervals*3/4 || n > intervals*5/4 {
						t.Errorf("%d messages from node %s to node %s in %d intervals", n, way[0], way[1], intervals)
					}
				}
				if len(count) != 6 || exchanges > 3*intervals*11/10 {
					t.Errorf("%d exchanges in %d intervals for %v messages, want one for each pair and interval", exchanges, intervals, count)
				}
				mu.Unlock()
				r.bus.set(func(b *testBus) { b.filter = nil })
				gate.Store(&held)
				r.eventually("the others take node 3 for dead", 3*time.Second, func() bool {
					return !r.nodes[1].host.Liveness(3) && !r.nodes[2].host.Liveness(3)
				})
			})
		})
	}
}

// TestLeaderWithoutTheNeededNodeHandsOver: leaders need a node (Config.Needed). A leader
// that does not hear it hands leadership over to a replica that does, and no node takes it
// back. If nobody hears the needed node, nobody hands over.
func TestLeaderWithoutTheNeededNodeHandsOver(t *testing.T) {
	for _, heard := range []bool{true, false} {
		t.Run(fmt.Sprintf("heard by others=%t", heard), func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				const needed = keyspace.NodeID(4)
				r := newRig(t, 5, func(c *Config) { c.Needed = func() keyspace.NodeID { return needed } })
				r.startAll()
				defer r.close()
				r.bootstrap(1, 1, voters(3))
				r.write(1, "first")
				l := r.leader(1)
				time.Sleep(2 * time.Second)
				r.bus.set(func(b *testBus) {
					for o := range b.nodes {
						if o == l.id || !heard && o != needed {
							b.cut[[2]keyspace.NodeID{needed, o}], b.cut[[2]keyspace.NodeID{o, needed}] = true, true
						}
					}
				})
				if !heard {
					time.Sleep(10 * time.Second)
					if now := r.leader(1); now != l || len(l.host.Relays(needed)) != 0 || l.host.Heard(needed) {
						t.Errorf("nobody hears node %s: node %s leads, and node %s led before", needed, now.id, l.id)
					}
					return
				}
				r.eventually("another node leads", 4*l.host.ElectionTimeout(), func() bool { return !l.host.Group(1).Status().IsLeader })
				var relays []keyspace.NodeID
				for o := range keyspace.NodeID(5) {
					if o+1 != l.id && o+1 != needed {
						relays = append(relays, o+1)
					}
				}
				if got := l.host.Relays(needed); !slices.Equal(got, relays) || l.host.Liveness(needed) || !l.host.Heard(needed) {
					t.Errorf("node %s knows %v as relays to node %s, want %v; heard directly: %t, at all: %t",
						l.id, got, needed, relays, l.host.Liveness(needed), l.host.Heard(needed))
				}
				r.write(1, "meanwhile")
				led := r.leader(1)
				time.Sleep(10 * time.Second)
				if now := r.leader(1); now != led || !led.host.Connected(led.id) || led.host.Connected(l.id) {
					t.Errorf("node %s leads after node %s; connected: %t, and node %s: %t", now.id, led.id, led.host.Connected(led.id), l.id, led.host.Connected(l.id))
				}
			})
		})
	}
}

// TestDeadNodeIsNotReached: whom nobody hears is not reached, also in a cluster of two nodes,
// where nobody else could hear it. Whom at least half of the others hear is.
func TestDeadNodeIsNotReached(t *testing.T) {
	for _, nodes := range []int{2, 3, 5} {
		inBubble(t, func(t *testing.T) {
			r := newRig(t, nodes, nil)
			r.startAll()
			defer r.close()
			n, far := r.nodes[1].host, keyspace.NodeID(nodes)
			r.eventually("all live", 5*time.Second, func() bool { return n.Liveness(far) && n.Reached(far) })
			time.Sleep(2 * n.ElectionTimeout())
			reached := func(deaf int) bool {
				r.bus.set(func(b *testBus) {
					clear(b.cut)
					for o := keyspace.NodeID(1); int(o) <= deaf; o++ {
						b.cut[[2]keyspace.NodeID{far, o}], b.cut[[2]keyspace.NodeID{o, far}] = true, true
					}
				})
				time.Sleep(3 * n.ElectionTimeout())
				return n.Reached(far)
			}
			if others := nodes - 1; reached(others) || n.Heard(far) {
				t.Errorf("%d nodes: one that nobody hears counts as reached", nodes)
			}
			for deaf := 1; deaf < nodes-1; deaf++ {
				if want := 2*(nodes-1-deaf) >= nodes-2; reached(deaf) != want || !n.Heard(far) {
					t.Errorf("%d nodes: one that %d do not hear is reached: %t", nodes, deaf, !want)
				}
			}
		})
	}
}

// TestLeaderWithoutQuorumGivesUp: the links from a leader to both followers break while its
// group sleeps. The followers elect another leader as soon as they miss the leader's node, and
// the old one does not wait for a client to learn of it. The leader keeps the lead where nobody
// could take it over, or where a quorum answers its heartbeats. So the death of nodes wakes no
// groups that cannot go on.
func TestLeaderWithoutQuorumGivesUp(t *testing.T) {
	for _, c := range []struct {
		name   string
		config func(*Config)
		happen func(r *rig, l, f1, f2 *testNode)
		lost   bool
	}{
		{"asleep, links broken", nil, func(r *rig, l, f1, f2 *testNode) { r.cutLinks(l, f1, f2) }, true},
		{"woken, links broken", nil, func(r *rig, l, f1, f2 *testNode) {
			r.cutLinks(l, f1, f2)
			time.Sleep(l.host.cfg.LivenessTimeout * 3 / 4)
			l.host.Group(1).Wake()
		}, true},
		{"asleep, one link broken", nil, func(r *rig, l, f1, _ *testNode) { r.cutLinks(l, f1) }, false},
		{"asleep, nodes dead", nil, func(_ *rig, _, f1, f2 *testNode) { f1.crash(0); f2.crash(0) }, false},
		{"awake, liveness messages lost", func(c *Config) { c.SleepAfter = -1 }, func(r *rig, l, f1, f2 *testNode) {
			r.bus.set(func(b *testBus) {
				b.filter = func(from, to keyspace.NodeID, m *message) bool {
					return to != l.id || from != f1.id && from != f2.id || m.raft != nil || m.kind != 0
				}
			})
		}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				r := newRig(t, 5, c.config)
				r.startAll()
				defer r.close()
				r.bootstrap(1, 1, voters(3))
				r.write(1, "first")
				l, term := r.leased(1)
				time.Sleep(10 * time.Second)
				g := l.host.Group(1)
				asleep := g.Status().Asleep
				if asleep != (l.host.cfg.SleepAfter > 0) {
					t.Fatalf("%+v", g.Status())
				}
				f1, f2 := r.nodes[1+l.id%3], r.nodes[1+(l.id+1)%3]
				begin := time.Now()
				c.happen(r, l, f1, f2)
				if c.lost {
					timeout := l.host.cfg.LivenessTimeout + 6*l.host.cfg.livenessInterval()
					r.eventually("it gives the lead up", timeout-time.Since(begin), func() bool { return !g.Status().IsLeader })
					if _, leads := l.sms[1].leads(); leads {
						t.Error("the state machine is not told")
					}
					r.eventually("another leads", 2*l.host.ElectionTimeout(), func() bool {
						return f1.host.Group(1).Status().IsLeader || f2.host.Group(1).Status().IsLeader
					})
					r.write(1, "meanwhile")
					r.bus.set(func(b *testBus) { clear(b.cut) })
					r.equal(1)
					return
				}
				time.Sleep(5 * l.host.cfg.LivenessTimeout)
				if s := g.Status(); !s.IsLeader || s.Term != term || s.Asleep != asleep && !f1.up {
					t.Errorf("led in term %d, asleep %t; then %+v", term, asleep, s)
				}
			})
		})
	}
}

// cutLinks breaks the links between the node and others, in both directions.
func (r *rig) cutLinks(n *testNode, others ...*testNode) {
	r.bus.set(func(b *testBus) {
		for _, o := range others {
			b.cut[[2]keyspace.NodeID{n.id, o.id}], b.cut[[2]keyspace.NodeID{o.id, n.id}] = true, true
		}
	})
}

// TestLivenessRidesOnceInAnInterval: many groups send frames all the time. A liveness message goes with one of them in an interval, also
// where it answers the peer's meanwhile.
func TestLivenessRidesOnceInAnInterval(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 2, nil)
		for _, id := range r.ids() {
			r.nodes[id].start()
		}
		defer r.close()
		interval := r.nodes[1].host.cfg.livenessInterval()
		time.Sleep(10 * interval)
		var sent [3]atomic.Int64
		r.bus.set(func(b *testBus) {
			b.filter = func(from, _ keyspace.NodeID, m *message) bool {
				if m.group == 0 && m.raft == nil {
					sent[from].Add(1)
				}
				return true
			}
		})
		const intervals, frames = 100, 40
		for range intervals * frames {
			for from := keyspace.NodeID(1); from <= 2; from++ { // one and then the other
				h := r.nodes[from].host
				h.peers.tell(3-from, h.cfg.Clock.Now(), dueAlong)
				time.Sleep(interval / frames / 2)
			}
		}
		for from := 1; from <= 2; from++ {
			if n := sent[from].Load(); n < intervals*9/10 || n > intervals*3/2 {
				t.Errorf("node %d sent %d messages in %d intervals", from, n, intervals)
			}
		}
	})
}
