package raftgroup

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	pb "go.etcd.io/raft/v3/raftpb"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
)

// inWorker runs f in the group's worker and waits for it.
func inWorker(g *Group, f func()) {
	done := make(chan struct{})
	if g.w.call(g, func() { f(); close(done) }) {
		<-done
	}
}

// noSleep keeps the group from sleeping.
func noSleep(c *Config) { c.SleepAfter = -1 }

func (r *rig) leased(g keyspace.GroupID) (*testNode, uint64) {
	r.t.Helper()
	l := r.leader(g)
	grp := l.host.Group(g)
	r.eventually("lease", 5*time.Second, func() bool { return grp.LeaseHeld(grp.Status().Term) })
	return l, grp.Status().Term
}

// TestLeaseIsExclusive: no two nodes hold a valid lease at the same time, through
// partitions, crashes and the maximum clock drift (traps 35, 36, 39, 62).
func TestLeaseIsExclusive(t *testing.T) {
	for _, drift := range []float64{0, 0.05} {
		t.Run(fmt.Sprint(drift), func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				r := newRig(t, 3, func(c *Config) { c.MaxClockDrift = drift })
				if drift > 0 {
					r.nodes[1].rate, r.nodes[2].rate, r.nodes[3].rate = 1-drift/2, 1+drift/2.1, 1
				}
				r.startAll()
				defer r.close()
				r.bootstrap(1, 1, voters(3))
				held, changes, last := 0, 0, uint64(0)
				for step := range 3000 {
					time.Sleep(10 * time.Millisecond)
					synctest.Wait()
					holders, term := 0, uint64(0)
					for _, n := range r.nodes {
						if n.up {
							g := n.host.Group(1)
							if tm, until, ok := g.Lease(); ok && g.h.cfg.Clock.Now() < until {
								holders++
								term = tm
							}
						}
					}
					if holders > 1 {
						t.Fatalf("step %d: %d leases\n%s", step, holders, r.dump())
					}
					if held += holders; holders == 1 && term != last {
						changes, last = changes+1, term
					}
					switch victim := r.nodes[keyspace.NodeID(1+r.rng.IntN(3))]; {
					case step%37 == 5:
						r.bus.isolate(victim.id, true)
					case step%37 == 25:
						for id := range r.nodes {
							r.bus.isolate(id, false)
						}
					case step%211 == 100 && victim.up:
						victim.crash(r.rng.IntN(101))
						victim.start()
					case step%50 == 0:
						for _, n := range r.nodes {
							n.host.Group(1).Wake()
						}
					case step%97 == 0:
						for _, n := range r.nodes {
							n.host.Group(1).Campaign()
						}
					}
				}
				if held < 500 || changes < 3 {
					t.Fatalf("lease held in %d of 3000 steps, by %d leaders: nothing was tested", held, changes)
				}
			})
		})
	}
}

// trap 35: a leader that was paused does not trust its lease when it continues, although
// nothing in it has run since.
func TestPausedLeader(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, noSleep)
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		l, term := r.leased(1)
		g := l.host.Group(1)
		resume := make(chan struct{})
		g.w.call(g, func() { <-resume })
		time.Sleep(950 * time.Millisecond)
		if g.LeaseHeld(term) {
			t.Fatal("a paused leader believes its lease")
		}
		r.eventually("another leader", 10*time.Second, func() bool { return r.leader(1) != l })
		other := r.leader(1)
		r.must(other.propose(1, "meanwhile"))
		r.eventually("written", time.Second, func() bool { return other.sms[1].has("meanwhile") })
		if g.LeaseHeld(term) {
			t.Fatal("a paused leader believes its lease")
		}
		close(resume)
		r.eventually("it follows", 5*time.Second, func() bool { return !g.Status().IsLeader })
	})
}

// trap 60: a transfer gives the lease up before MsgTimeoutNow can leave, and for the rest
// of the term, even if it fails.
func TestTransferGivesUpLease(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, noSleep)
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		l, term := r.leased(1)
		g := l.host.Group(1)
		var held *message
		r.bus.set(func(b *testBus) {
			b.filter = func(_, _ keyspace.NodeID, m *message) bool {
				if m.kind == pb.MsgTimeoutNow {
					held = m
					return false
				}
				return true
			}
		})
		err := g.Transfer(context.Background(), 0)
		if !errors.Is(err, ErrTransferFailed) {
			t.Fatalf("transfer: %v", err)
		}
		if held == nil {
			t.Fatal("no MsgTimeoutNow")
		}
		for range 30 {
			time.Sleep(100 * time.Millisecond)
			if g.LeaseHeld(term) {
				t.Fatal("lease held again in the term of a transfer")
			}
		}
		index := make(chan error, 1)
		g.ReadIndex(func(_ uint64, err error) { index <- err })
		if err := <-index; err != nil {
			t.Fatalf("ReadIndex: %v", err)
		}
		// The late message immediately elects another leader, in a new term.
		r.bus.set(func(b *testBus) { b.filter = nil })
		to := r.nodes[keyspace.NodeID(held.to)]
		tg := to.host.Group(1)
		tg.w.deliver([]routed{{tg, held}})
		r.eventually("the late transfer elects", time.Second, func() bool { return tg.Status().IsLeader })
		if term2 := tg.Status().Term; term2 <= term {
			t.Fatalf("term %d after %d", term2, term)
		}
	})
}

// TestNoLeaseBeforeTheTermsFirstEntryIsApplied: a leader has no lease before it has
// applied an entry of its own term, even if all followers respond. Until then it may not
// have applied acknowledged entries.
func TestNoLeaseBeforeTheTermsFirstEntryIsApplied(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, noSleep)
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		r.write(1, "acknowledged")
		r.equal(1)
		l, _ := r.leased(1)
		to := r.nodes[1+l.id%3]
		g := to.host.Group(1)
		applies := make(chan struct{})
		apply := sync.OnceFunc(func() { close(applies) })
		defer apply()
		to.sms[1].slow = func() { <-applies }
		r.must(l.host.Group(1).Transfer(context.Background(), to.replicas[1]))
		for i := range 10 { // not for long: followers replace a leader that applies nothing
			time.Sleep(100 * time.Millisecond)
			if st := g.Status(); !st.IsLeader || st.Commit <= st.Applied {
				t.Fatalf("after round %d it is to lead, with what is to be applied: %+v", i, st)
			}
			if term, until, ok := g.Lease(); ok {
				t.Fatalf("lease until %d in term %d, with nothing applied in it", until, term)
			}
		}
		apply()
		if n, _ := r.leased(1); n != to {
			t.Fatalf("node %d leads", n.id)
		}
	})
}

func TestTransfer(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, nil)
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		r.write(1, "x")
		for range 5 {
			l := r.leader(1)
			to := keyspace.ReplicaID(1 + l.id%3)
			start := time.Now()
			r.must(l.host.Group(1).Transfer(context.Background(), to))
			if n := r.leader(1); n.id != keyspace.NodeID(to) {
				t.Fatalf("leader on node %d, want %d", n.id, to)
			}
			if d := time.Since(start); d > 200*time.Millisecond {
				t.Fatalf("transfer took %v", d)
			}
			time.Sleep(3 * time.Second) // asleep by then; a transfer wakes it
		}
	})
}

// trap 69: changes of a follower's term and leader do not release it from its promise.
// trap 36: neither does a restart or being rebuilt in memory.
func TestPromiseIsTheHosts(t *testing.T) {
	vote := func(g *Group, from keyspace.ReplicaID, term uint64, ctx string) *message {
		m := &message{group: g.id, kind: pb.MsgPreVote, to: g.self, from: from, term: term, node: keyspace.NodeID(from)}
		m.raft = &pb.Message{
			Type: pb.MsgPreVote.Enum(), To: ptr(uint64(g.self)), From: ptr(uint64(from)), Term: ptr(term),
			Index: ptr(uint64(1000)), LogTerm: ptr(term), Context: []byte(ctx),
		}
		return m
	}
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, noSleep)
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		l, term := r.leased(1)
		f := r.nodes[1+l.id%3]
		other := keyspace.ReplicaID(6 - l.id - f.id)
		var granted int
		r.bus.set(func(b *testBus) {
			b.filter = func(from, _ keyspace.NodeID, m *message) bool {
				if (m.kind == pb.MsgPreVoteResp || m.kind == pb.MsgVoteResp) && !m.raft.GetReject() && from == f.id {
					granted++
				}
				return m.kind != pb.MsgPreVoteResp && m.kind != pb.MsgVoteResp
			}
		})
		g := f.host.Group(1)
		r.bus.isolate(l.id, true)
		start := time.Now()
		inWorker(g, func() {
			// A late answer to a pre-vote of a higher term makes raft forget its leader.
			_ = g.rn.Step(&pb.Message{
				Type: pb.MsgPreVoteResp.Enum(), Reject: ptr(true), From: ptr(uint64(other)), To: ptr(uint64(g.self)), Term: ptr(term + 7),
			})
			_ = g.rn.ForgetLeader()
		})
		ask := func() int {
			before := granted
			g.w.deliver([]routed{{g, vote(g, other, term+20, "")}})
			time.Sleep(10 * time.Millisecond)
			synctest.Wait()
			return granted - before
		}
		if ask() != 0 {
			t.Fatal("a forgotten leader released the promise")
		}
		// Rebuilt in memory: closed and opened again.
		r.must(f.host.Close(context.Background(), 1))
		g = f.open(1)
		if ask() != 0 {
			t.Fatal("a rebuilt replica voted against its promise")
		}
		// A restart: the embargo counts from it.
		f.crash(100)
		f.start()
		g = f.host.Group(1)
		restarted := time.Now()
		for time.Since(restarted) < 980*time.Millisecond {
			if ask() != 0 {
				t.Fatalf("vote %v after the restart", time.Since(restarted))
			}
			inWorker(g, func() { g.campaignWhenFree() })
			if s := g.Status(); s.Term > term+19 {
				t.Fatalf("campaigned %v after the restart", time.Since(restarted))
			}
		}
		time.Sleep(30 * time.Millisecond)
		if ask() == 0 {
			t.Fatalf("no vote %v after the promise", time.Since(start))
		}
	})
}

// trap 62: a burst of ticks after a stall does not make a follower campaign before its
// promise ends.
func TestTickBurst(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, noSleep)
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		l, _ := r.leased(1)
		f := r.nodes[1+l.id%3]
		g := f.host.Group(1)
		preVotes := r.bus.counted(pb.MsgPreVote)
		r.bus.isolate(l.id, true)
		synctest.Wait()
		inWorker(g, func() {
			for range 200 {
				g.tick()
			}
		})
		time.Sleep(time.Millisecond)
		synctest.Wait()
		if n := r.bus.counted(pb.MsgPreVote); n != preVotes {
			t.Fatalf("%d pre-votes after a burst of ticks", n-preVotes)
		}
		r.eventually("it campaigns when its promise has ended", 5*time.Second, func() bool {
			return r.bus.counted(pb.MsgPreVote) > preVotes
		})
	})
}

// trap 70: a response to an old heartbeat does not extend a later promise, and the host's
// bytes never reach raft's ReadIndex.
func TestLateAnswer(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, noSleep)
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		l, term := r.leased(1)
		g := l.host.Group(1)
		for id := range r.nodes {
			if id != l.id {
				r.bus.isolate(id, true)
			}
		}
		_, until, _ := g.Lease()
		time.Sleep(500 * time.Millisecond)
		inWorker(g, func() {
			old := g.w.now.Add(-450 * time.Millisecond)
			for id := range r.nodes {
				if id == l.id {
					continue
				}
				m := &message{
					group: 1, kind: pb.MsgHeartbeatResp, to: g.self, from: keyspace.ReplicaID(id), node: id,
					term: term, promise: time.Second,
				}
				m.raft = &pb.Message{
					Type: pb.MsgHeartbeatResp.Enum(), To: ptr(uint64(g.self)), From: ptr(uint64(id)), Term: ptr(term),
					Context: binary.LittleEndian.AppendUint64(nil, uint64(old)),
				}
				g.step(m)
				if len(m.raft.GetContext()) != 0 {
					t.Errorf("raft was given the host's bytes: %x", m.raft.GetContext())
				}
			}
		})
		synctest.Wait()
		_, renewed, _ := g.Lease()
		if want := until.Add(100 * time.Millisecond); renewed > want {
			t.Fatalf("an old answer moved the lease from %d to %d", until, renewed)
		}
		// Responses to this host from an earlier term do not count in this one.
		inWorker(g, func() {
			m := &message{
				group: 1, kind: pb.MsgHeartbeatResp, to: g.self, from: 1 + g.self%3, term: term - 1, promise: time.Second,
				node: keyspace.NodeID(1 + g.self%3),
			}
			m.raft = &pb.Message{
				Type: pb.MsgHeartbeatResp.Enum(), To: ptr(uint64(g.self)), From: ptr(uint64(m.from)), Term: ptr(term - 1),
				Context: binary.LittleEndian.AppendUint64(nil, uint64(g.w.now)),
			}
			g.step(m)
		})
		synctest.Wait()
		if _, u, ok := g.Lease(); ok && u > renewed {
			t.Fatal("an answer of an earlier term moved the lease")
		}
		// Numbers that this host never sent are no responses.
		inWorker(g, func() {
			m := &message{
				group: 1, kind: pb.MsgHeartbeatResp, to: g.self, from: 1 + g.self%3, term: term, promise: time.Second,
				node: keyspace.NodeID(1 + g.self%3),
			}
			m.raft = &pb.Message{
				Type: pb.MsgHeartbeatResp.Enum(), To: ptr(uint64(g.self)), From: ptr(uint64(m.from)), Term: ptr(term),
				Context: binary.LittleEndian.AppendUint64(nil, uint64(g.w.now.Add(time.Hour))),
			}
			g.step(m)
		})
		if _, u, ok := g.Lease(); ok && u > renewed {
			t.Fatal("an answer from the future moved the lease")
		}
	})
}

// trap 71: the voter promises less than the leader is configured for.
func TestShorterPromise(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		n := 0
		r := newRig(t, 3, func(c *Config) {
			c.SleepAfter = -1
			c.LivenessTimeout = time.Second
			if n++; n == 1 {
				c.ElectionTimeout = 5 * time.Second
			}
		})
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		r.write(1, "x")
		l := r.leader(1)
		if l.id != 1 {
			r.must(l.host.Group(1).Transfer(context.Background(), 1))
			l = r.leader(1)
		}
		if l.id != 1 {
			t.Fatalf("leader on node %d", l.id)
		}
		g := l.host.Group(1)
		// The transfer gave node 1 a new term with a lease of its own.
		r.eventually("lease", 5*time.Second, func() bool { return g.LeaseHeld(g.Status().Term) })
		_, until, _ := g.Lease()
		if left := until.Sub(g.h.cfg.Clock.Now()); left > time.Second {
			t.Fatalf("lease of %v on promises of 1s", left)
		}
		// A restart with a shorter timeout still keeps the longest promise.
		l.crash(0)
		l.start()
		if l.host.cfg.ElectionTimeout != time.Second {
			t.Fatalf("timeout %v", l.host.cfg.ElectionTimeout)
		}
		if left := l.host.embargo.Sub(l.host.cfg.Clock.Now()); left < 4900*time.Millisecond {
			t.Fatalf("embargo of %v after a promise of 5s", left)
		}
	})
}

// A host that has run with a shorter election timeout for as long as the longest promise has no
// promise left that is longer. From then on the next start's embargo is the shorter one.
func TestEmbargoShrinks(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		election := 5 * time.Second
		r := newRig(t, 1, func(c *Config) {
			c.ElectionTimeout, c.LivenessTimeout = election, time.Second
		})
		n := r.nodes[1]
		embargo := func() time.Duration { return n.host.embargo.Sub(n.host.cfg.Clock.Now()) }
		restart := func(timeout, want time.Duration) {
			t.Helper()
			election = timeout
			n.crash(0)
			n.start()
			if got := embargo(); got != want {
				t.Fatalf("embargo of %v, want %v", got, want)
			}
		}
		r.startAll()
		defer r.close()
		restart(time.Second, 5*time.Second)
		time.Sleep(4900 * time.Millisecond)
		synctest.Wait()
		restart(time.Second, 5*time.Second) // a promise of 5 s may have been made just before the first restart
		time.Sleep(5100 * time.Millisecond)
		synctest.Wait()
		restart(time.Second, time.Second)
		// A longer one is stored before it is promised, and shrinks again.
		restart(3*time.Second, time.Second)
		restart(2*time.Second, 3*time.Second)
		time.Sleep(3100 * time.Millisecond)
		synctest.Wait()
		restart(time.Second, 2*time.Second)
		// Nothing is taken back from a run that promises as long as any before.
		restart(2*time.Second, 2*time.Second)
		time.Sleep(time.Minute)
		synctest.Wait()
		restart(time.Second, 2*time.Second)
	})
}

// TestForbiddenMessages: MsgTransferLeader and MsgProp from the bus are malformed frames.
func TestForbiddenMessages(t *testing.T) {
	for _, typ := range []pb.MessageType{
		pb.MsgTransferLeader, pb.MsgProp, pb.MsgHup, pb.MsgBeat, pb.MsgSnap, pb.MsgForgetLeader, pb.MsgStorageAppendResp,
		pb.MsgUnreachable, pb.MsgCheckQuorum, pb.MsgSnapStatus, pb.MsgStorageApply,
	} {
		b := appendMessageHead(appendFrameHeader(nil, time.Second), 1, typ, 1, 2, 3)
		_, rest, err := frameKind(b)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := decodeMessages(2, rest); !errors.Is(err, errFrame) {
			t.Errorf("%s: %v", typ, err)
		}
	}
}

// TestNoLeaseReads: with NoLeaseReads there is never a lease, and reads use ReadIndex.
func TestNoLeaseReads(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, func(c *Config) { c.NoLeaseReads = true })
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		for i := range 5 {
			r.write(1, fmt.Sprint(i))
			g := r.leader(1).host.Group(1)
			if _, _, ok := g.Lease(); ok {
				t.Fatal("lease")
			}
			ch := make(chan error, 1)
			g.ReadIndex(func(_ uint64, err error) { ch <- err })
			r.must(<-ch)
		}
	})
}

// TestReadIndex reads at a new leader, on followers, across a leader change and without a
// leader (trap 37). Earlier writes are applied when it answers.
func TestReadIndex(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, nil)
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		read := func(n *testNode) error {
			ch := make(chan error, 1)
			n.host.Group(1).ReadIndex(func(index uint64, err error) {
				if err == nil && n.sms[1].applied.Index < index {
					err = fmt.Errorf("applied %d, read index %d", n.sms[1].applied.Index, index)
				}
				ch <- err
			})
			return <-ch
		}
		for i := range 10 {
			data := fmt.Sprintf("w%d", i)
			r.write(1, data)
			if i == 5 {
				time.Sleep(5 * time.Second) // asleep
			}
			for _, n := range r.nodes {
				if err := read(n); err != nil {
					t.Fatal(err)
				}
				if !n.sms[1].has(data) {
					t.Fatalf("node %d: read without %s", n.id, data)
				}
			}
		}
		// Lost requests are repeated.
		l := r.leader(1)
		f := r.nodes[1+l.id%3]
		lost := 0
		r.bus.set(func(b *testBus) {
			b.filter = func(_, _ keyspace.NodeID, m *message) bool {
				if m.kind == pb.MsgReadIndex && lost < 2 {
					lost++
					return false
				}
				return true
			}
		})
		r.must(read(f))
		if lost != 2 {
			t.Fatalf("%d questions lost", lost)
		}
		// The leader dies while the request is under way.
		r.bus.set(func(b *testBus) {
			b.filter = func(_, _ keyspace.NodeID, m *message) bool { return m.kind != pb.MsgReadIndex }
		})
		ch := make(chan error, 1)
		f.host.Group(1).ReadIndex(func(_ uint64, err error) { ch <- err })
		time.Sleep(50 * time.Millisecond)
		l.crash(0)
		r.bus.set(func(b *testBus) { b.filter = nil })
		r.must(<-ch)
		// Without a quorum the read fails.
		for _, n := range r.nodes {
			if n != f && n.up {
				n.crash(0)
			}
		}
		if err := read(f); !errors.Is(err, ErrNoLeader) {
			t.Fatalf("without a quorum: %v", err)
		}
	})
}

// TestReadIndexAtALeaderThatSleeps: a lost request is repeated early enough that a reader
// in a sleeping group does not take the leader for dead. A leader that does not know of a
// reader does not put the group to sleep without it: the reader would have nobody to ask.
func TestReadIndexAtALeaderThatSleeps(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, nil)
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		r.write(1, "first")
		l := r.leader(1)
		var lostUntil time.Time
		lost, notices, votes := 0, 0, 0
		r.bus.set(func(b *testBus) {
			b.filter = func(_, _ keyspace.NodeID, m *message) bool {
				notices += boolInt(m.kind == kindSleep)
				votes += boolInt(m.kind == pb.MsgPreVote || m.kind == pb.MsgVote)
				if m.kind == pb.MsgReadIndex && time.Now().Before(lostUntil) {
					lost++
					return false
				}
				return true
			}
		})
		read := func(f *testNode, without time.Duration) {
			t.Helper()
			r.bus.set(func(*testBus) { lost, notices, votes, lostUntil = 0, 0, 0, time.Now().Add(without) })
			ch, asked := make(chan error, 1), time.Now()
			f.host.Group(1).ReadIndex(func(_ uint64, err error) { ch <- err })
			r.must(<-ch)
			if took := time.Since(asked) - without; took > 500*time.Millisecond {
				t.Fatalf("the question was answered %v after questions are lost no more", took)
			}
			r.bus.set(func(*testBus) {
				if lost < 2 || votes != 0 || notices == 0 && without > time.Second {
					t.Fatalf("%d questions lost, %d notices of sleep, %d questions for votes", lost, notices, votes)
				}
			})
		}
		// Each round hits another moment of the ticks, between two of the leader's
		// sleeps. Otherwise one follower would campaign and the other would wait for it.
		for i := range 20 {
			f := r.nodes[1+(l.id+keyspace.NodeID(i%2))%3]
			time.Sleep(2*time.Second + time.Duration(i)*37*time.Millisecond)
			r.asleep(1)
			read(f, 500*time.Millisecond)
			r.write(1, fmt.Sprint(i))
			read(f, 2500*time.Millisecond)
		}
	})
}

func TestMarginAndStamp(t *testing.T) {
	c := Config{TickInterval: 100 * time.Millisecond, MaxClockDrift: 0.01}
	if m := c.margin(time.Second); m != 110*time.Millisecond {
		t.Fatalf("margin %v", m)
	}
	g := &Group{w: &worker{now: 77}}
	shared := []byte("raftctx8")
	a, b := &pb.Message{Context: shared}, &pb.Message{Context: shared}
	g.stampHeartbeat(a)
	g.stampHeartbeat(b)
	if &a.Context[0] == &b.Context[0] || !bytes.Equal(a.Context[8:], shared) || !bytes.Equal(shared, []byte("raftctx8")) {
		t.Fatal("heartbeats share a context")
	}
}

// steppedClock is a clock whose wall clock somebody sets.
type steppedClock struct {
	clock.Clock
	ahead *atomic.Int64
}

func (c steppedClock) Wall() time.Time { return c.Clock.Wall().Add(time.Duration(c.ahead.Load())) }

// TestLeasesAreDroppedAfterAPause: a wall clock that jumps ahead says that the machine was
// paused while its monotonic clock stood still. Leases are dropped, and are back once followers
// have answered new heartbeats. A clock that is set back, or by little, drops
// nothing.
func TestLeasesAreDroppedAfterAPause(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		var ahead atomic.Int64
		r := newRig(t, 3, func(c *Config) {
			noSleep(c)
			c.Clock = steppedClock{c.Clock, &ahead}
		})
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		l, term := r.leased(1)
		g := l.host.Group(1)
		// held says whether the lease holds all the time in the ticks that follow.
		held := func(ticks int) bool {
			for range 20 * ticks {
				time.Sleep(l.host.cfg.TickInterval / 20)
				synctest.Wait()
				if !g.LeaseHeld(term) {
					return false
				}
			}
			return true
		}
		election := l.host.ElectionTimeout()
		step := func(by time.Duration) { ahead.Add(int64(by)) }
		if !held(5) {
			t.Fatal("the lease does not hold at first")
		}
		for _, c := range []struct {
			what  string
			by    time.Duration
			drops bool
		}{
			{"by less than the margin", l.host.cfg.margin(election) - time.Millisecond, false},
			{"back", -time.Hour, false},
			{"ahead by less than a lease", election - time.Millisecond, true},
			{"ahead", 2 * election, true},
			{"ahead again", time.Hour, true},
		} {
			// No heartbeat is answered meanwhile: what is not dropped holds by the old answers.
			r.bus.isolate(l.id, true)
			step(c.by)
			if got := !held(2); got != c.drops {
				t.Errorf("the wall clock steps %s: leases are dropped: %t", c.what, got)
			}
			r.bus.isolate(l.id, false)
			r.eventually("the lease again", election, func() bool { return g.LeaseHeld(term) })
			if !held(10) {
				t.Errorf("the wall clock steps %s: the lease does not hold afterwards", c.what)
			}
		}
		l.host.DropLeases("a test")
		if g.LeaseHeld(term) {
			t.Error("a dropped lease holds")
		}
		r.eventually("the lease again", election, func() bool { return g.LeaseHeld(term) })
	})
}

// TestHeartbeatsFromBeforeADropDoNotCount: answers that were under way while leases were
// dropped bring none back.
func TestHeartbeatsFromBeforeADropDoNotCount(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, noSleep)
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		l, term := r.leased(1)
		g := l.host.Group(1)
		r.bus.set(func(b *testBus) { b.slow = 45 * time.Millisecond })
		time.Sleep(l.host.cfg.TickInterval + 60*time.Millisecond) // a heartbeat has come, its answer is under way
		l.host.DropLeases("a test")
		dropped := l.host.cfg.Clock.Now()
		for !g.LeaseHeld(term) {
			time.Sleep(time.Millisecond)
			synctest.Wait()
		}
		if after := l.host.cfg.Clock.Now().Sub(dropped); after < 90*time.Millisecond {
			t.Errorf("the lease is back after %v, and a round trip takes 90 ms", after)
		}
	})
}
