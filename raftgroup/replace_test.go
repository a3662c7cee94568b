package raftgroup

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/skeindb/skein/keyspace"
)

// traps 4, 27: a replica is closed while appends of its old object are on their way to
// the disk. It is neither opened again nor removed before they are durable.
func TestReopenUnderAppend(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, func(c *Config) { c.LivenessTimeout = time.Hour; c.SleepAfter = -1 })
		var slow [4]*syncFS
		for id, n := range r.nodes {
			slow[id] = &syncFS{FS: n.fs}
			n.wfs = slow[id]
		}
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		r.write(1, "first")
		l := r.leader(1)
		for round := range 5 {
			f := r.nodes[1+l.id%3]
			release := slow[f.id].hold()
			for i := range 10 {
				_ = l.propose(1, fmt.Sprint(round, "/", i))
			}
			time.Sleep(20 * time.Millisecond)
			// If it were reopened, it would take the log's contents for durable and say
			// so.
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
			for range 2 {
				if err := f.host.Close(ctx, 1); !errors.Is(err, context.DeadlineExceeded) {
					t.Fatalf("close before the fsync: %v", err)
				}
			}
			if err := f.host.Remove(ctx, []keyspace.GroupID{1}, nil)[1]; !errors.Is(err, context.DeadlineExceeded) {
				t.Fatalf("remove before the fsync: %v", err)
			}
			cancel()
			if _, err := f.host.Open(1, f.replicas[1], f.position(1), f.sms[1]); !errors.Is(err, ErrExists) {
				t.Fatalf("open before the fsync: %v", err)
			}
			release()
			r.must(f.host.Close(context.Background(), 1))
			g := f.open(1)
			if g.last < g.commit {
				t.Fatalf("last %d, commit %d", g.last, g.commit)
			}
			for i := range 10 {
				_ = l.propose(1, fmt.Sprint(round, "//", i))
			}
			time.Sleep(20 * time.Millisecond)
			r.write(1, fmt.Sprint("round ", round))
			r.equal(1)
			l = r.leader(1)
		}
	})
}

// TestOpenAtTheSameTime: of two concurrent Opens of a group only one reads its log and
// record. The other would reset the log under an open replica.
func TestOpenAtTheSameTime(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, nil)
		r.startAll()
		defer r.close()
		n := r.nodes[1]
		b := n.eng.NewBatch()
		r.must(n.host.Bootstrap(b, 1, voters(3), nil))
		r.must(b.Commit())
		sm := &testSM{n: n, group: 1}
		r.must(n.host.reserve(1)) // as the other Open has
		if _, err := n.host.Open(1, 1, n.position(1), sm); !errors.Is(err, ErrExists) {
			t.Fatalf("second open: %v", err)
		}
		if n.wal.Group(1).Exists() {
			t.Fatal("it has begun the log")
		}
		if err := n.host.Remove(context.Background(), []keyspace.GroupID{1}, nil)[1]; !errors.Is(err, ErrExists) {
			t.Fatalf("remove: %v", err)
		}
		n.host.unreserve(1)
		if _, err := n.host.Open(1, 1, Position{}, sm); err == nil || n.host.Group(1) != nil {
			t.Fatalf("a state machine that is older than the record: %v", err)
		}
		_, err := n.host.Open(1, 1, n.position(1), sm)
		r.must(err)
	})
}

// trap 49: dropped is called if and only if a proposal certainly was not appended. A
// dropped proposal never appears, and an applied one was never reported as dropped.
func TestDroppedOrUnknown(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, nil)
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		r.leader(1)
		r.bus.set(func(b *testBus) { b.slow = 4 * time.Millisecond }) // a transfer takes a while
		var mu sync.Mutex
		dropped := map[string]bool{}
		n, drops := 0, 0
		for step := range 600 {
			for _, node := range r.nodes {
				g := node.host.Group(1)
				if g == nil {
					continue
				}
				data := fmt.Sprintf("p%d", n)
				n++
				err := g.Propose(g.Status().Term, []byte(data), func(error) {
					mu.Lock()
					defer mu.Unlock()
					dropped[data] = true
					drops++
				})
				if err != nil {
					mu.Lock()
					dropped[data] = true
					mu.Unlock()
				}
			}
			time.Sleep(3 * time.Millisecond)
			switch step % 60 {
			case 10:
				l := r.leader(1)
				go func() { _ = l.host.Group(1).Transfer(context.Background(), 0) }()
			case 30:
				r.bus.isolate(keyspace.NodeID(1+step%3), true)
			case 50:
				for id := range r.nodes {
					r.bus.isolate(id, false)
				}
			}
		}
		for id := range r.nodes {
			r.bus.isolate(id, false)
		}
		r.write(1, "end")
		r.equal(1)
		mu.Lock()
		defer mu.Unlock()
		for _, node := range r.nodes {
			seen := map[string]bool{}
			for _, d := range node.sms[1].data {
				if dropped[d] {
					t.Fatalf("node %d applied %s, which was reported dropped", node.id, d)
				}
				if d != "end" && seen[d] {
					t.Fatalf("node %d applied %s twice", node.id, d)
				}
				seen[d] = true
			}
		}
		if drops == 0 {
			t.Fatal("nothing was ever dropped")
		}
	})
}

// TestBounds: a full byte budget is reported at once, and room comes back.
func TestBounds(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, func(c *Config) { c.MaxGroupInflightBytes = 10 << 10; c.MaxProposalBytes = 15 << 10; c.MaxReads = 3 })
		r.startAll()
		defer r.close()
		r.bootstrap(1, 2, voters(3))
		for g := keyspace.GroupID(1); g <= 2; g++ {
			l := r.leader(g)
			r.must(transferTo(l, g, 1))
			r.leader(g)
		}
		n := r.nodes[1]
		for id := range r.nodes {
			r.bus.isolate(id, true)
		}
		data := string(make([]byte, 1<<10))
		fill := func(g keyspace.GroupID) (count int) {
			for {
				err := n.propose(g, data)
				if errors.Is(err, ErrFull) {
					return count
				}
				r.must(err)
				count++
			}
		}
		if a, b := fill(1), fill(2); a != 9 || b != 5 {
			t.Fatalf("%d and %d proposals of 1 KiB fit", a, b)
		}
		var full atomic.Int64
		for range 5 {
			n.host.Group(1).ReadIndex(func(_ uint64, err error) {
				if errors.Is(err, ErrFull) {
					full.Add(1)
				}
			})
		}
		time.Sleep(time.Millisecond)
		synctest.Wait()
		if full.Load() != 2 {
			t.Fatalf("%d of 5 reads refused", full.Load())
		}
		for id := range r.nodes {
			r.bus.isolate(id, false)
		}
		r.eventually("everything is released", 20*time.Second, func() bool {
			return n.host.proposals.Load() == 0 && n.host.Group(1).inflight.Load() == 0
		})
		r.write(1, "x")
		for _, n := range r.nodes {
			if v := n.host.inbound.Load(); v != 0 {
				t.Fatalf("node %d: %d inbound bytes left", n.id, v)
			}
		}
	})
}

func transferTo(l *testNode, g keyspace.GroupID, to keyspace.ReplicaID) error {
	if keyspace.ReplicaID(l.id) == to {
		return nil
	}
	return l.host.Group(g).Transfer(context.Background(), to)
}

// TestInboundBudget: an exhausted inbound budget loses only entries.
func TestInboundBudget(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, func(c *Config) { c.MaxInboundBytes = 4 << 10 })
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		l := r.leader(1)
		term := l.host.Group(1).Status().Term
		f := r.nodes[1+l.id%3]
		stop := make(chan struct{})
		f.host.Group(1).w.call(f.host.Group(1), func() { <-stop })
		for i := range 200 {
			_ = l.propose(1, fmt.Sprintf("%d %01000d", i, 0))
			time.Sleep(time.Millisecond)
		}
		if v := f.host.inbound.Load(); v > 4<<10+2000 {
			t.Fatalf("%d bytes wait for a worker", v)
		}
		close(stop)
		r.write(1, "x")
		r.equal(1)
		if s := r.leader(1).host.Group(1).Status(); s.Term != term {
			t.Fatalf("term %d after %d", s.Term, term)
		}
	})
}

// TestStopAnswersEverybody: a stop answers all proposals and reads under way.
func TestStopAnswersEverybody(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, nil)
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		l := r.leader(1)
		g := l.host.Group(1)
		r.bus.isolate(l.id, true)
		var answers atomic.Int64
		for range 10 {
			g.ReadIndex(func(_ uint64, err error) {
				if !errors.Is(err, ErrStopped) {
					t.Errorf("read: %v", err)
				}
				answers.Add(1)
			})
		}
		go func() {
			err := g.ChangeConf(context.Background(), g.Status().Term, []ConfChange{{AddLearner, 9, 9}}, nil)
			if !errors.Is(err, ErrUnknownFate) {
				t.Errorf("change: %v", err)
			}
			answers.Add(1)
		}()
		time.Sleep(10 * time.Millisecond)
		l.stop()
		synctest.Wait()
		if answers.Load() != 11 {
			t.Fatalf("%d answers of 11", answers.Load())
		}
		if err := g.Propose(6, []byte("x"), nil); err == nil {
			t.Fatal("a stopped host takes proposals")
		}
		l.start()
		r.bus.isolate(l.id, false)
		r.write(1, "x")
	})
}
