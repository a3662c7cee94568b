package raftgroup

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	pb "go.etcd.io/raft/v3/raftpb"

	"github.com/skeindb/skein/keyspace"
)

// readAnswer is the outcome of a ReadIndex.
type readAnswer struct {
	index uint64
	err   error
}

func startRead(g *Group) chan readAnswer {
	ch := make(chan readAnswer, 1)
	g.ReadIndex(func(index uint64, err error) { ch <- readAnswer{index, err} })
	return ch
}

// lose makes the bus lose messages of a kind.
func (r *rig) lose(kind pb.MessageType, to keyspace.NodeID) {
	r.bus.set(func(b *testBus) {
		b.filter = func(_, at keyspace.NodeID, m *message) bool { return m.kind != kind || at != to }
	})
}

// TestConfirmedReadExpires: a leader has confirmed a read's index, but the follower
// cannot apply it because it is cut off from the log. The read neither waits for ever nor
// escapes the bound.
func TestConfirmedReadExpires(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, func(c *Config) { c.SleepAfter = -1; c.MaxReads = 3 })
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		r.write(1, "x")
		l := r.leader(1)
		f := r.nodes[1+l.id%3]
		r.lose(pb.MsgApp, f.id)
		r.write(1, "y")
		g := f.host.Group(1)
		var reads []chan readAnswer
		for range 3 {
			reads = append(reads, startRead(g))
			time.Sleep(200 * time.Millisecond)
		}
		if a := <-startRead(g); !errors.Is(a.err, ErrFull) {
			t.Fatalf("beyond the bound: %+v", a)
		}
		for _, c := range reads {
			select {
			case a := <-c:
				if !errors.Is(a.err, ErrNoLeader) {
					t.Fatalf("%+v", a)
				}
			case <-time.After(5 * time.Second):
				t.Fatal("a confirmed read hangs")
			}
		}
		synctest.Wait()
		if n := g.public.readers.Load(); n != 0 {
			t.Fatalf("%d readers are counted, none waits", n)
		}
	})
}

// TestReadExpiresOnAStalledHost: a host whose disk hangs does not tick its groups, but
// reads still end.
func TestReadExpiresOnAStalledHost(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, noSleep)
		slow := &syncFS{FS: r.nodes[1].fs}
		r.nodes[1].wfs = slow
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		r.write(1, "x")
		release := slow.hold()
		defer release()
		n := r.nodes[1]
		r.eventually("stalled", 10*time.Second, n.host.DiskStalled)
		r.bus.isolate(1, true)
		select {
		case a := <-startRead(n.host.Group(1)):
			if !errors.Is(a.err, ErrNoLeader) {
				t.Fatalf("%+v", a)
			}
		case <-time.After(5 * time.Second):
			t.Fatal("a read hangs on a stalled host")
		}
	})
}

// TestReadBesideRemovalOfTheOtherVoter: a round may wait for responses of a voter that is
// removed.
func TestReadBesideRemovalOfTheOtherVoter(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 2, func(c *Config) { c.SleepAfter = -1; c.NoLeaseReads = true })
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(2))
		r.write(1, "x")
		l := r.leader(1)
		g := l.host.Group(1)
		r.lose(pb.MsgHeartbeatResp, l.id)
		read := startRead(g)
		synctest.Wait()
		r.must(g.ChangeConf(context.Background(), g.Status().Term, []ConfChange{{Type: RemoveReplica, Replica: keyspace.ReplicaID(3 - l.id)}}, nil))
		synctest.Wait()
		select {
		case a := <-read:
			r.must(a.err)
		default:
			t.Fatal("a sole voter's read waits for a voter that is gone")
		}
	})
}

// trap 37: a restarted sole voter does not know its commit index until it has committed
// an entry in its new term.
func TestReadAtARestartedSoleVoter(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 1, noSleep)
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(1))
		for range 10 {
			r.write(1, "x")
			acked := r.nodes[1].host.Group(1).Status().Applied
			r.nodes[1].crash(0)
			r.nodes[1].start()
			a := <-startRead(r.nodes[1].host.Group(1))
			r.must(a.err)
			if a.index < acked {
				t.Fatalf("read at %d, acknowledged up to %d before the restart", a.index, acked)
			}
		}
	})
}

// TestReadIndexOfClosedGroupIsAnswered: reads of a closed group are answered even if the
// worker has long reused its pass's memory when the pool reaches them.
func TestReadIndexOfClosedGroupIsAnswered(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 1, nil)
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(1))
		g := r.nodes[1].host.Group(1)
		release := make(chan struct{})
		g.w.call(g, func() { g.w.schedule(g, applyTask{kind: taskCall, call: func() { <-release }}) })
		answered := make(chan error, 2)
		g.public.readers.Add(2)
		g.w.call(g, func() {
			ask := readWaiter{done: func(_ uint64, err error) { answered <- err }}
			k := &work{reads: []readWaiter{ask, ask}}
			g.refuse(k)
			k.reset()
			close(release)
		})
		for range 2 {
			if err := <-answered; !errors.Is(err, ErrClosed) {
				t.Errorf("a question to a closed group: %v, want %v", err, ErrClosed)
			}
		}
	})
}
