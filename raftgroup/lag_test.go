package raftgroup

import (
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	pb "go.etcd.io/raft/v3/raftpb"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/wal"
)

// trap 17: a replica with too much to apply does not campaign, since raft would scan all
// of it. By raft's own rule a replica with an unapplied configuration change does not
// either. Both campaign once they have applied.
func TestLaggardDoesNotCampaign(t *testing.T) {
	tests := map[string]func(r *rig, l *testNode){
		"many entries": func(r *rig, l *testNode) {
			for i := range campaignLagMax + 100 {
				r.must(l.propose(1, fmt.Sprint(i)))
				if i%500 == 0 {
					time.Sleep(10 * time.Millisecond)
				}
			}
		},
		"a change": func(r *rig, _ *testNode) { r.must(r.change(1, ConfChange{AddLearner, 9, 9})) },
	}
	for name, load := range tests {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				r := newRig(t, 3, func(c *Config) { c.LivenessTimeout, c.SleepAfter = time.Hour, -1 })
				r.startAll()
				defer r.close()
				r.bootstrap(1, 1, voters(3))
				r.write(1, "first")
				l := r.leader(1)
				f := r.nodes[1+l.id%3]
				g := f.host.Group(1)
				gate := make(chan struct{})
				open := sync.OnceFunc(func() { close(gate) })
				defer open()
				synctest.Wait() // f applies nothing now
				f.sms[1].slow = func() { <-gate }
				load(r, l)
				synctest.Wait() // the leader has accepted all of it
				want := l.host.Group(1).Status().Last
				r.eventually("it is told what is committed", 5*time.Second, func() bool { return g.Status().Commit >= want })
				var asked atomic.Int64
				r.bus.set(func(b *testBus) {
					b.filter = func(from, _ keyspace.NodeID, m *message) bool {
						if from == f.id && (m.kind == pb.MsgPreVote || m.kind == pb.MsgVote) {
							asked.Add(1)
						}
						return true
					}
				})
				r.bus.isolate(f.id, true)
				term := g.Status().Term
				g.Campaign()
				time.Sleep(10 * time.Second)
				synctest.Wait()
				if st := g.Status(); asked.Load() != 0 || st.Term != term {
					t.Fatalf("it campaigned %d times, with %d applied of %d", asked.Load(), st.Applied, st.Commit)
				}
				open()
				r.eventually("it campaigns when it has applied", 20*time.Second, func() bool { return asked.Load() > 0 })
				r.bus.isolate(f.id, false)
				r.equal(1)
			})
		})
	}
}

// TestFresherVoterCampaigns: the chosen candidate may lack an entry that the other voter has. That one then campaigns in its
// place, and not after raft's random timeout. Every second round has it so, whoever is chosen.
func TestFresherVoterCampaigns(t *testing.T) {
	for round := range keyspace.NodeID(20) {
		lacks := round % 2
		t.Run(fmt.Sprint(round), func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				r := newRig(t, 3, func(c *Config) { c.LivenessTimeout, c.SleepAfter = time.Hour, -1 })
				r.startAll()
				defer r.close()
				r.bootstrap(1, 1, voters(3))
				r.write(1, "first")
				r.equal(1)
				l := r.leader(1)
				f := r.nodes[1+(l.id+lacks)%3]
				r.bus.set(func(b *testBus) {
					b.filter = func(_, to keyspace.NodeID, m *message) bool { return to != f.id || m.kind != pb.MsgApp }
				})
				r.write(1, "second")
				r.bus.set(func(b *testBus) { b.filter = nil })
				r.bus.isolate(l.id, true)
				term, silent := l.host.Group(1).Status().Term, time.Now()
				r.eventually("another leads", 20*time.Second, func() bool {
					for id, n := range r.nodes {
						if s, is := n.sms[1].leads(); is && s.Ready && s.Term > term && id != l.id {
							return true
						}
					}
					return false
				})
				if took := time.Since(silent); took > 1500*time.Millisecond {
					t.Errorf("nobody led for %v", took)
				}
			})
		})
	}
}

// trap 17: the entries that raft scans before it campaigns are read even if the pass has
// read its share: raft cannot continue without them.
func TestCampaignReadsBeyondItsShare(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, func(c *Config) { c.LivenessTimeout, c.SleepAfter, c.passReadBytes = time.Hour, -1, 1 })
		r.walopt = func(o *wal.Options) { o.EntryCacheBytes = 1 }
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		r.write(1, "first")
		r.equal(1)
		l := r.leader(1)
		f := r.nodes[1+l.id%3]
		g := f.host.Group(1)
		gate := make(chan struct{})
		f.sms[1].slow = func() { <-gate }
		for i := range 20 {
			r.write(1, fmt.Sprint(i))
		}
		r.eventually("it is told what is committed", 5*time.Second, func() bool { return g.Status().Commit == l.host.Group(1).Status().Commit })
		term, reads := g.Status().Term, testutil.ToFloat64(f.host.m.logReads)
		inWorker(g, func() {
			g.w.readBytes = 1 << 20
			_ = g.rn.ForgetLeader()
			_ = g.rn.Campaign()
		})
		if testutil.ToFloat64(f.host.m.logReads) == reads {
			t.Error("it has not looked through what it has to apply")
		}
		close(gate)
		r.eventually("it campaigns", 5*time.Second, func() bool { return r.leader(1).host.Group(1).Status().Term >= term })
		r.write(1, "last")
		r.equal(1)
	})
}

// trap 20: a new leader overwrites the tail of a follower whose disk is still writing an
// older append of the same indexes. The log shows the newer entries at once. No response
// mentions them before they are durable, and completion of the older append does not
// count for them.
func TestOverwriteUnderAppend(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 5, func(c *Config) { c.LivenessTimeout, c.SleepAfter = time.Hour, -1 })
		var slow [6]*syncFS
		for id, n := range r.nodes {
			slow[id] = &syncFS{FS: n.fs}
			n.wfs = slow[id]
		}
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(5))
		r.write(1, "first")
		r.equal(1)
		l := r.leader(1)
		f := r.nodes[1+l.id%5]
		old, term := l.host.Group(1).Status().Last, l.host.Group(1).Status().Term
		cut := func(a keyspace.NodeID, is bool) {
			r.bus.set(func(b *testBus) {
				for id := range r.nodes {
					if id != l.id && id != f.id {
						b.cut[[2]keyspace.NodeID{a, id}], b.cut[[2]keyspace.NodeID{id, a}] = is, is
					}
				}
			})
		}
		cut(l.id, true)
		cut(f.id, true)
		release := slow[f.id].hold()
		defer release()
		for i := range 5 {
			r.must(l.propose(1, fmt.Sprint("lost ", i)))
		}
		r.eventually("the follower writes them", time.Second, func() bool { return f.host.Group(1).Status().Last == old+5 })
		r.bus.isolate(l.id, true)
		var claimed atomic.Uint64
		r.bus.set(func(b *testBus) {
			b.filter = func(from, _ keyspace.NodeID, m *message) bool {
				if from == f.id && m.kind == pb.MsgAppResp && !m.raft.GetReject() && m.raft.GetIndex() > old {
					claimed.Store(m.raft.GetIndex())
				}
				return true
			}
		})
		r.eventually("another leads", 20*time.Second, func() bool {
			for id, n := range r.nodes {
				if s, is := n.sms[1].leads(); is && s.Ready && s.Term > term && id != l.id {
					return n.propose(1, "kept") == nil
				}
			}
			return false
		})
		cut(f.id, false)
		log := f.wal.Group(1)
		r.eventually("the tail is overwritten", 5*time.Second, func() bool {
			at, err := log.Term(old + 1)
			return err == nil && at > term
		})
		last := log.LastIndex()
		ents, err := log.Entries(old+1, last+1, 1<<20)
		r.must(err)
		for _, e := range ents {
			if e.GetTerm() <= term || strings.HasPrefix(string(e.GetData()), "lost") {
				t.Fatalf("entry %d of term %d: %q", e.GetIndex(), e.GetTerm(), e.GetData())
			}
		}
		time.Sleep(time.Second)
		synctest.Wait()
		if i := claimed.Load(); i != 0 {
			t.Fatalf("it claims to have stored %d", i)
		}
		release()
		r.eventually("applied", 5*time.Second, func() bool { return f.sms[1].has("kept") })
		r.bus.isolate(l.id, false)
		f.crash(0)
		f.start()
		r.write(1, "last")
		r.equal(1)
		for _, d := range f.sms[1].data {
			if strings.HasPrefix(d, "lost") {
				t.Fatalf("applied %q", d)
			}
		}
	})
}

// TestVoteIsAskedForAfterOwnVote: a candidate asks for votes only after its own vote is
// durable. Raft counts any quorum. A candidate that lost its own vote in a crash could be
// elected again in that term by the same voters, with another log.
func TestVoteIsAskedForAfterOwnVote(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, func(c *Config) { c.LivenessTimeout, c.SleepAfter = time.Hour, -1 })
		var slow [4]*syncFS
		for id, n := range r.nodes {
			slow[id] = &syncFS{FS: n.fs}
			n.wfs = slow[id]
		}
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		r.write(1, "first")
		r.equal(1)
		l := r.leader(1)
		term := l.host.Group(1).Status().Term
		var asked atomic.Int64
		r.bus.set(func(b *testBus) {
			b.filter = func(_, _ keyspace.NodeID, m *message) bool {
				if m.kind == pb.MsgVote {
					asked.Add(1)
				}
				return true
			}
		})
		for id := range r.nodes {
			if id != l.id {
				defer slow[id].hold()()
			}
		}
		r.bus.isolate(l.id, true)
		time.Sleep(10 * time.Second)
		synctest.Wait()
		tried := false
		for id, n := range r.nodes {
			tried = tried || id != l.id && n.host.Group(1).Status().Term > term
		}
		if !tried || asked.Load() != 0 {
			t.Errorf("somebody campaigned: %t; votes were asked for %d times while no disk had stored one", tried, asked.Load())
		}
	})
}
