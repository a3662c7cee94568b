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

// TestCommitNewsAreNotAnswered: an entry that no other follows costs each follower two
// messages and the leader one answer of each.
func TestCommitNewsAreNotAnswered(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, nil)
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		r.write(1, "first")
		kinds := []pb.MessageType{pb.MsgApp, pb.MsgAppResp, kindNews}
		time.Sleep(10 * time.Millisecond)
		before := map[pb.MessageType]int{}
		for _, k := range kinds {
			before[k] = r.bus.counted(k)
		}
		const writes = 50
		l := r.leader(1)
		for i := range writes {
			r.must(l.propose(1, fmt.Sprintf("a%d", i)))
			time.Sleep(2 * newsDelay)
			synctest.Wait()
			last := l.host.Group(1).Status().Applied
			for _, id := range r.ids() {
				if got := r.nodes[id].host.Group(1).Status().Applied; got != last {
					t.Fatalf("node %s has applied %d of %d", id, got, last)
				}
			}
		}
		for _, k := range kinds {
			// A heartbeat may have told of a commit first.
			if got := r.bus.counted(k) - before[k]; got > 2*writes || got < 2*writes-writes/4 {
				t.Errorf("%d messages of kind %s for %d entries", got, k, writes)
			}
		}
	})
}

// TestLostCommitNews: nobody hears that news was lost; the next heartbeat says it again.
func TestLostCommitNews(t *testing.T) {
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
				lost += boolInt(m.kind == kindNews)
				return m.kind != kindNews
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
			t.Error("no news was lost")
		}
	})
}

// TestNewsForAFollowerThatLags: who has not acknowledged what is committed gets a MsgApp,
// whose answer says what it lacks, and never news: raft would panic over a commit index
// beyond its log.
func TestNewsForAFollowerThatLags(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, noSleep)
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		r.write(1, "first")
		r.equal(1)
		l := r.leader(1)
		f := r.nodes[1+l.id%3]
		entries, news, empty := 0, 0, 0
		r.bus.set(func(b *testBus) {
			b.filter = func(_, to keyspace.NodeID, m *message) bool {
				if to != f.id {
					return true
				}
				news += boolInt(m.kind == kindNews)
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
		time.Sleep(2 * newsDelay)
		synctest.Wait()
		if empty == 0 || news > 0 {
			t.Errorf("%d MsgApps without entries and %d news for a follower that lacks an entry", empty, news)
		}
		if entries < 2 {
			t.Error("the entry was not sent again")
		}
		r.equal(1)
	})
}

// TestProbedFollowerAnswers: a follower that has everything, and that raft probes since
// something to it was lost, is asked until it has answered: nothing else ends that, and the
// group would neither sleep nor hand its leadership to it.
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
					g.rn.ReportUnreachable(uint64(id)) // of which the replica has the number
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

// TestOldNews: what is not newer, or not the leader's of this term, changes nothing and
// wakes nobody.
func TestOldNews(t *testing.T) {
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
			m := &message{group: 1, kind: kindNews, to: g.self, from: keyspace.ReplicaID(l.id), node: l.id, term: before.Term, commit: before.Commit}
			change(m)
			inWorker(g, func() { g.receive(m) })
			synctest.Wait()
			if s := g.Status(); !s.Asleep || s.Commit != before.Commit || s.Term != before.Term || s.Leader != before.Leader {
				t.Errorf("news %s: %+v, before %+v", name, s, before)
			}
			if err := f.host.Err(); err != nil {
				t.Errorf("news %s: the host stops: %v", name, err)
			}
		}
	})
}

// TestNewsOfWhatWasForgotten: a leader counts on entries that are not there.
func TestNewsOfWhatWasForgotten(t *testing.T) {
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
			g.receive(&message{
				group: 1, kind: kindNews, to: g.self, from: keyspace.ReplicaID(l.id), node: l.id, term: s.Term, commit: s.Commit + 1,
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
