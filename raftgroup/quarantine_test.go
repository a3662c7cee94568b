package raftgroup

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/skeindb/skein/keyspace"
)

// A leader that cannot apply an entry goes into quarantine: it hands over and is closed. The group
// goes on, and so do the node's other groups. Neither a restart nor anybody's message opens it.
// It gives no vote. When its replica is removed, the group can come back with another one.
func TestQuarantine(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, noSleep)
		defer r.close()
		r.startAll()
		// All of one worker and applier share batches.
		const groups = 12
		r.bootstrap(1, groups, voters(3))
		for g := keyspace.GroupID(1); g <= groups; g++ {
			r.write(g, "before")
		}
		bad := r.leader(1)
		sm := bad.sms[1]
		sm.mu.Lock()
		sm.broken = errors.New("a block is bad")
		sm.mu.Unlock()
		began := time.Now()
		for g := keyspace.GroupID(1); g <= groups; g++ {
			r.write(g, "behind")
		}
		// The others need no election timeout to find that the leader is gone.
		if d := time.Since(began); d > 2*time.Second {
			t.Errorf("the group stood still for %v", d)
		}
		if r.leader(1) == bad {
			t.Error("a replica in quarantine leads")
		}
		r.eventually("closed", time.Minute, func() bool { return bad.host.Group(1) == nil })
		if err := bad.host.Err(); err != nil {
			t.Errorf("the host has failed: %v", err)
		}
		q, ok := bad.host.Quarantined()[1]
		if !ok || q.Replica != bad.replicas[1] || !strings.Contains(q.Reason, "a block is bad") || len(sm.closed) != 1 {
			t.Errorf("quarantine %+v %v, told %q", q, ok, sm.closed)
		}
		if got := testutil.ToFloat64(bad.host.m.quarantined); got != 1 {
			t.Errorf("the metric counts %v", got)
		}
		for g := keyspace.GroupID(2); g <= groups; g++ {
			r.equal(g)
		}

		time.Sleep(time.Second) // the note is durable
		synctest.Wait()
		bad.crash(0)
		bad.start()
		if len(bad.sms[1].closed) != 1 || bad.host.Group(1) != nil {
			t.Errorf("after a crash: told %q, open %v", bad.sms[1].closed, bad.host.Group(1) != nil)
		}
		r.write(1, "after the crash")
		time.Sleep(10 * time.Second)
		if bad.sms[1].has("after the crash") || len(bad.unknown) > 0 {
			t.Errorf("a replica in quarantine applies, or peers ask for it: %v", bad.unknown)
		}
		for g := keyspace.GroupID(2); g <= groups; g++ {
			r.write(g, "after the crash")
			r.equal(g)
		}

		// Its vote would make a quorum.
		lead := r.leader(1)
		lead.stop()
		time.Sleep(20 * time.Second)
		synctest.Wait()
		for _, n := range r.nodes {
			if n.up && n.host.Group(1) != nil {
				if l, is := n.sms[1].leads(); is {
					t.Errorf("node %s leads with a vote of a replica in quarantine: %+v", n.id, l)
				}
			}
		}
		lead.start()
		l := r.leader(1)
		out := []ConfChange{{Type: RemoveReplica, Replica: bad.replicas[1]}}
		if err := l.host.Group(1).ChangeConf(context.Background(), l.host.Group(1).Status().Term, out, nil); err != nil {
			t.Fatal(err)
		}
		if failed := bad.host.Remove(context.Background(), []keyspace.GroupID{1}, nil); len(failed) > 0 {
			t.Fatal(failed)
		}
		if len(bad.host.Quarantined()) > 0 {
			t.Errorf("removed, and still in quarantine: %v", bad.host.Quarantined())
		}
		delete(bad.replicas, 1)
		delete(bad.sms, 1)
		bad.crash(0)
		bad.start()
		if len(bad.host.Quarantined()) > 0 {
			t.Errorf("after another crash: %v", bad.host.Quarantined())
		}
		r.must(bad.host.FinishRemovals(context.Background(), nil))
		bad.replicas[1] = 4
		bad.open(1)
		l = r.leader(1)
		add := []ConfChange{{AddLearner, 4, bad.id}}
		if err := l.host.Group(1).ChangeConf(context.Background(), l.host.Group(1).Status().Term, add, nil); err != nil {
			t.Fatal(err)
		}
		r.write(1, "at last")
		r.equal(1)
	})
}

// A replica is removed while it goes into quarantine. No note of that outlives the removal.
func TestRemovedOnTheWayIntoQuarantine(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, noSleep)
		defer r.close()
		r.startAll()
		r.bootstrap(1, 1, voters(3))
		r.write(1, "x")
		bad := r.nodes[1+r.leader(1).id%3]
		removed := make(chan struct{})
		bad.sms[1].closing = func() { <-removed }
		bad.host.Quarantine(1, "a block is bad")
		if failed := bad.host.Remove(context.Background(), []keyspace.GroupID{1}, nil); len(failed) > 0 {
			t.Fatal(failed)
		}
		close(removed)
		time.Sleep(time.Second)
		delete(bad.replicas, 1)
		delete(bad.sms, 1)
		for _, when := range []string{"then", "after a restart"} {
			if q := bad.host.Quarantined(); len(q) > 0 || testutil.ToFloat64(bad.host.m.quarantined) != 0 {
				t.Errorf("%s: %v in quarantine", when, q)
			}
			bad.stop()
			bad.start()
		}
	})
}

// A replica that cannot be read is kept closed from the start. It refuses everything that its owner
// may ask, and a crash does not open it.
func TestKeptClosed(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, noSleep)
		defer r.close()
		r.startAll()
		r.bootstrap(1, 1, voters(3))
		r.write(1, "x")
		bad := r.nodes[1+r.leader(1).id%3]
		r.must(bad.host.Close(context.Background(), 1))
		bad.host.KeepClosed(1, bad.replicas[1], "its records cannot be read")
		g := bad.open(1)
		if len(bad.sms[1].closed) != 1 || bad.host.Group(1) != nil {
			t.Errorf("told %q, open %t", bad.sms[1].closed, bad.host.Group(1) != nil)
		}
		ctx := context.Background()
		if err := g.ChangeConf(ctx, 1, []ConfChange{{AddLearner, 9, 9}}, nil); !errors.Is(err, ErrClosed) {
			t.Errorf("a change of members: %v", err)
		}
		if err := g.Transfer(ctx, 0); !errors.Is(err, ErrClosed) {
			t.Errorf("a transfer: %v", err)
		}
		if err := g.CanTransfer(ctx, 0); !errors.Is(err, ErrClosed) {
			t.Errorf("whether a transfer can be: %v", err)
		}
		if _, err := g.Progress(ctx); !errors.Is(err, ErrClosed) {
			t.Errorf("progress: %v", err)
		}
		if err := g.Propose(1, []byte("y"), nil); !errors.Is(err, ErrNotLeader) {
			t.Errorf("a proposal: %v", err)
		}
		read := make(chan error, 1)
		g.ReadIndex(func(_ uint64, err error) { read <- err })
		if err := <-read; !errors.Is(err, ErrClosed) {
			t.Errorf("a read index: %v", err)
		}
		g.Wake()
		g.Campaign()
		synctest.Wait()
		bad.crash(0)
		bad.start()
		if q := bad.host.Quarantined()[1]; q.Replica != bad.replicas[1] || bad.host.Group(1) != nil {
			t.Errorf("after a crash: %+v, open %t", q, bad.host.Group(1) != nil)
		}
		r.write(1, "without it")
	})
}
