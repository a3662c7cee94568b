package raftgroup

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	pb "go.etcd.io/raft/v3/raftpb"

	"github.com/skeindb/skein/keyspace"
)

// TestCommitNoticesAreNotAnswered: an entry with no other behind it costs each follower
// two messages and the leader one response of each.
func TestCommitNoticesAreNotAnswered(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, nil)
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		r.write(1, "first")
		kinds := []pb.MessageType{pb.MsgApp, pb.MsgAppResp, kindCommitNotice}
		time.Sleep(10 * time.Millisecond)
		before := map[pb.MessageType]int{}
		for _, k := range kinds {
			before[k] = r.bus.counted(k)
		}
		const writes = 50
		l := r.leader(1)
		for i := range writes {
			r.must(l.propose(1, fmt.Sprintf("a%d", i)))
			time.Sleep(2 * commitNoticeDelay)
			synctest.Wait()
			last := l.host.Group(1).Status().Applied
			for _, id := range r.ids() {
				if got := r.nodes[id].host.Group(1).Status().Applied; got != last {
					t.Fatalf("node %s has applied %d of %d", id, got, last)
				}
			}
		}
		for _, k := range kinds {
			// A heartbeat may have carried a commit index first.
			if got := r.bus.counted(k) - before[k]; got > 2*writes || got < 2*writes-writes/4 {
				t.Errorf("%d messages of kind %s for %d entries", got, k, writes)
			}
		}
	})
}

// TestCommitNoticesRide: keys lie in many groups, and each write goes to another one. So no entry of the same group follows. Its
// commit notice leaves with the entries of the others, and there are no more frames than those with entries.
func TestCommitNoticesRide(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		const groups, writes, pause = 8, 80, 1500 * time.Microsecond
		r := newRig(t, 3, func(c *Config) { c.Workers = 1 })
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
		time.Sleep(100 * time.Millisecond)
		alone, behind := 0, time.Duration(0)
		r.bus.set(func(b *testBus) { alone = -b.noticesAlone[l.id] })
		for i := range writes {
			g := keyspace.GroupID(1 + i%groups)
			r.must(l.propose(g, fmt.Sprintf("a%d", i)))
			if i > groups {
				before := keyspace.GroupID(1 + (i-5)%groups) // its write was 5 pauses ago
				for _, id := range r.ids() {
					if got, want := r.nodes[id].host.Group(before).Status().Applied, l.host.Group(before).Status().Applied; got != want {
						behind += pause
					}
				}
			}
			time.Sleep(pause)
		}
		r.bus.set(func(b *testBus) { alone += b.noticesAlone[l.id] })
		// Without rides there would be two for each entry. A notice still leaves alone where its timer comes between it and the next
		// entry, which the bus's random delays decide: 3 to 22 in 300 runs.
		if alone > writes/2 {
			t.Errorf("%d frames of nothing but commit notices for %d entries", alone, writes)
		}
		if behind > 0 {
			t.Errorf("followers were behind for %v more than %v", behind, 5*pause)
		}
		time.Sleep(3 * commitNoticeDelay)
		synctest.Wait()
		r.equal(1)
	})
}

// TestLostCommitNotice: nobody learns that a notice was lost, but the next heartbeat
// repeats it.
func TestLostCommitNotice(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, nil)
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		r.write(1, "first")
		r.equal(1)
		lost := 0
		r.bus.set(func(b *testBus) {
			b.filter = func(_, _ keyspace.NodeID, m *message) bool {
				lost += boolInt(m.kind == kindCommitNotice)
				return m.kind != kindCommitNotice
			}
		})
		l := r.leader(1)
		for i := range 10 {
			r.must(l.propose(1, fmt.Sprintf("a%d", i)))
			time.Sleep(2 * l.host.cfg.TickInterval)
			synctest.Wait()
			last := l.host.Group(1).Status().Applied
			for _, id := range r.ids() {
				if got := r.nodes[id].host.Group(1).Status().Applied; got != last {
					t.Fatalf("node %s has applied %d of %d", id, got, last)
				}
			}
		}
		if lost == 0 {
			t.Error("no notice was lost")
		}
	})
}

// TestCommitNoticeForALaggingFollower: a follower that has not acknowledged the committed
// entries gets a MsgApp, whose response says what it lacks. It never gets a notice,
// because raft would panic over a commit index beyond its log.
func TestCommitNoticeForALaggingFollower(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, noSleep)
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		r.write(1, "first")
		r.equal(1)
		l := r.leader(1)
		f := r.nodes[1+l.id%3]
		entries, notices, empty := 0, 0, 0
		r.bus.set(func(b *testBus) {
			b.filter = func(_, to keyspace.NodeID, m *message) bool {
				if to != f.id {
					return true
				}
				notices += boolInt(m.kind == kindCommitNotice)
				if m.kind != pb.MsgApp {
					return true
				}
				if len(m.raft.GetEntries()) > 0 {
					entries++
					return entries > 1 // the first is lost
				}
				empty++
				return true
			}
		})
		r.must(l.propose(1, "lost"))
		time.Sleep(2 * commitNoticeDelay)
		synctest.Wait()
		if empty == 0 || notices > 0 {
			t.Errorf("%d MsgApps without entries and %d notices for a follower that lacks an entry", empty, notices)
		}
		if entries < 2 {
			t.Error("the entry was not sent again")
		}
		r.equal(1)
	})
}

// TestProbedFollowerAnswers: raft probes a follower after a message to it was lost. The
// leader asks such a follower until it responds, even if it has everything. Nothing else
// ends the probing, and the group could neither sleep nor transfer its leadership to it.
func TestProbedFollowerAnswers(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, nil)
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		r.write(1, "x")
		r.equal(1)
		l := r.leader(1)
		g := l.host.Group(1)
		inWorker(g, func() {
			for _, id := range r.ids() {
				if id != l.id {
					g.rn.ReportUnreachable(uint64(id)) // as if the replica had this number
				}
			}
		})
		r.asleep(1)
		for _, id := range r.ids() {
			if id == l.id {
				continue
			}
			if err := g.CanTransfer(t.Context(), keyspace.ReplicaID(id)); err != nil {
				t.Errorf("to node %s: %v", id, err)
			}
		}
	})
}

// TestStaleCommitNotice: an old notice, or one that is not from this term's leader,
// changes nothing and wakes nobody.
func TestStaleCommitNotice(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, nil)
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		r.write(1, "x")
		r.asleep(1)
		l := r.leader(1)
		f := r.nodes[1+l.id%3]
		g := f.host.Group(1)
		before := g.Status()
		for name, change := range map[string]func(*message){
			"of what is known":  func(*message) {},
			"from before":       func(m *message) { m.commit-- },
			"of another term":   func(m *message) { m.term++; m.commit++ },
			"of an older term":  func(m *message) { m.term--; m.commit++ },
			"of another leader": func(m *message) { m.from, m.node = 6-m.from-m.to, 6-m.node-f.id; m.commit++ },
		} {
			m := &message{group: 1, kind: kindCommitNotice, to: g.self, from: keyspace.ReplicaID(l.id), node: l.id, term: before.Term, commit: before.Commit}
			change(m)
			inWorker(g, func() { g.step(m) })
			synctest.Wait()
			if s := g.Status(); !s.Asleep || s.Commit != before.Commit || s.Term != before.Term || s.Leader != before.Leader {
				t.Errorf("notice %s: %+v, before %+v", name, s, before)
			}
			if err := f.host.Err(); err != nil {
				t.Errorf("notice %s: the host stops: %v", name, err)
			}
		}
	})
}

// TestCommitNoticeBeyondTheLog: a leader relies on entries that this log has lost.
func TestCommitNoticeBeyondTheLog(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, noSleep)
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		r.write(1, "x")
		r.equal(1)
		l := r.leader(1)
		f := r.nodes[1+l.id%3]
		g := f.host.Group(1)
		s := g.Status()
		inWorker(g, func() {
			g.step(&message{
				group: 1, kind: kindCommitNotice, to: g.self, from: keyspace.ReplicaID(l.id), node: l.id, term: s.Term, commit: s.Commit + 1,
			})
		})
		select {
		case <-f.host.Fatal():
		case <-time.After(time.Second):
			t.Fatal("it goes on")
		}
		if err := f.host.Err(); !strings.Contains(err.Error(), "old copy") {
			t.Errorf("it stops with %v", err)
		}
		f.crash(0)
	})
}

// TestLeaderStoresCommitLate: while notices wait the leader's wal does not get the commit index by itself. The next
// entry brings it along, and if none follows the notices' time does.
func TestLeaderStoresCommitLate(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, noSleep)
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		r.write(1, "first")
		time.Sleep(2 * commitNoticeDelay)
		synctest.Wait()
		l := r.leader(1)
		g := l.host.Group(1)
		stored := func() uint64 { return g.log.HardState().GetCommit() }
		if s := g.Status(); stored() != s.Commit {
			t.Fatalf("at rest the wal has commit %d of %d", stored(), s.Commit)
		}
		const entries = 8
		before, late := stored(), 0
		for i := range uint64(entries) {
			r.must(l.propose(1, fmt.Sprint("a", i)))
			synctest.Wait()
			s := g.Status()
			if s.Commit != before+i+1 || stored() < before+i || stored() > s.Commit {
				t.Errorf("entry %d: the wal has commit %d of %d", i, stored(), s.Commit)
			}
			late += boolInt(stored() < s.Commit)
		}
		if late < entries/2 { // a follower may just be asked what it has: then no notice waits
			t.Errorf("of %d entries the wal had the commit index late of %d", entries, late)
		}
		time.Sleep(2 * commitNoticeDelay)
		synctest.Wait()
		if s := g.Status(); s.Commit != before+entries || stored() != s.Commit {
			t.Errorf("after the notices the wal has commit %d of %d", stored(), s.Commit)
		}
		// Also if it leads no more.
		r.must(l.propose(1, "b"))
		r.must(g.Transfer(t.Context(), keyspace.ReplicaID(1+l.id%3)))
		time.Sleep(2 * commitNoticeDelay)
		synctest.Wait()
		if s := g.Status(); stored() != s.Commit || s.Commit < before+entries+1 {
			t.Errorf("after the end of its lead the wal has commit %d of %d", stored(), s.Commit)
		}
	})
}
