package raftgroup

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	pb "go.etcd.io/raft/v3/raftpb"
)

func TestReplication(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, nil)
		r.startAll()
		defer r.close()
		r.bootstrap(1, 3, voters(3))
		for i := range 20 {
			r.write(1, fmt.Sprintf("a%d", i))
			r.write(2, fmt.Sprintf("b%d", i))
		}
		r.equal(1)
		r.equal(2)
	})
}

func TestSingleVoter(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 1, nil)
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(1))
		r.write(1, "x")
		n := r.nodes[1]
		g := n.host.Group(1)
		term := g.Status().Term
		if !g.LeaseHeld(term) {
			t.Fatal("a sole voter that leads has no lease")
		}
		r.eventually("it sleeps", time.Minute, func() bool { return g.Status().Asleep })
		if g.LeaseHeld(term) {
			t.Fatal("a sole voter that sleeps has a lease")
		}
		r.write(1, "z")
		if g.Status().Term != term || !g.LeaseHeld(term) {
			t.Fatal("a sole voter that has woken has no lease")
		}
		n.crash(0)
		n.start()
		start := time.Now()
		r.write(1, "y")
		if d := time.Since(start); d > 500*time.Millisecond {
			t.Fatalf("a sole voter took %v to lead again", d)
		}
	})
}

func TestProposeErrors(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, nil)
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		l := r.leader(1)
		g := l.host.Group(1)
		term := g.Status().Term
		if err := g.Propose(term+1, []byte("x"), nil); !errors.Is(err, ErrNotLeader) {
			t.Fatalf("another term: %v", err)
		}
		if err := g.Propose(term, nil, nil); !errors.Is(err, ErrTooLarge) {
			t.Fatalf("empty: %v", err)
		}
		for _, id := range r.ids() {
			if n := r.nodes[id]; n != l {
				if err := n.host.Group(1).Propose(term, []byte("x"), nil); !errors.Is(err, ErrNotLeader) {
					t.Fatalf("follower: %v", err)
				}
			}
		}
		if err := l.host.Close(context.Background(), 1); err != nil {
			t.Fatal(err)
		}
		if err := g.Propose(term, []byte("x"), nil); !errors.Is(err, ErrNotLeader) {
			t.Fatalf("closed: %v", err)
		}
	})
}

func TestLeaderChangeAfterCrash(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, nil)
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		for i := range 10 {
			r.write(1, fmt.Sprintf("before%d", i))
			l := r.leader(1)
			l.crash(0)
			r.write(1, fmt.Sprintf("without%d", i))
			l.start()
			r.write(1, fmt.Sprintf("after%d", i))
			synctest.Wait()
		}
		r.equal(1)
	})
}

// TestCommitIndexCostsNoFsync: an entry costs each replica one fsync. The commit index,
// which followers learn afterwards, costs none.
func TestCommitIndexCostsNoFsync(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, nil)
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		r.write(1, "first")
		syncs := func() (all [3]uint64) {
			for i, id := range r.ids() {
				all[i], _ = r.nodes[id].wal.Progress()
			}
			return all
		}
		before := syncs()
		const writes = 20
		for i := range writes {
			r.write(1, fmt.Sprintf("a%d", i))
			time.Sleep(20 * time.Millisecond) // the followers learn the commit index
		}
		r.equal(1)
		for i, n := range syncs() {
			// An idle wal is asked to prove that its disk makes progress.
			if got := n - before[i]; got < writes || got > writes+writes/4 {
				t.Errorf("node %s: %d fsyncs for %d entries", r.ids()[i], got, writes)
			}
		}
	})
}

// TestCommitNoticesTravelWithEntries: while entries follow one another, a follower gets
// one message for each and not two. After the last entry it soon gets a commit notice.
func TestCommitNoticesTravelWithEntries(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, nil)
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		r.write(1, "first")
		time.Sleep(10 * time.Millisecond)
		sent := r.bus.counted(pb.MsgApp)
		const writes = 50
		l := r.leader(1)
		for i := range writes {
			r.must(l.propose(1, fmt.Sprintf("a%d", i)))
			synctest.Wait()
			time.Sleep(commitNoticeDelay / 4)
		}
		last := l.host.Group(1).Status().Applied
		time.Sleep(commitNoticeDelay + commitNoticeDelay/2)
		synctest.Wait()
		for _, id := range r.ids() {
			if got := r.nodes[id].host.Group(1).Status().Applied; got < last {
				t.Errorf("node %s has applied %d of %d by now", id, got, last)
			}
		}
		// Two followers. The last notices travel alone, as may those that a heartbeat
		// delayed.
		if got := r.bus.counted(pb.MsgApp) - sent; got > 2*writes+writes/2 {
			t.Errorf("%d MsgApps for %d entries", got, writes)
		}
	})
}
