package raftgroup

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/prometheus/client_golang/prometheus/testutil"
	pb "go.etcd.io/raft/v3/raftpb"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/transport"
	"github.com/skeindb/skein/wal"
)

// cutOffFollower stops a follower, writes, and truncates all logs past its position.
func (r *rig) cutOffFollower(g keyspace.GroupID, writes int) (l, f *testNode) {
	r.t.Helper()
	r.write(g, "first")
	l = r.leader(g)
	f = r.nodes[1+l.id%3]
	if f.up {
		f.crash(0)
	}
	for i := range writes {
		r.write(g, fmt.Sprintf("w%d %0500d", i, 0))
	}
	r.truncateAll(g)
	return r.leader(g), f
}

// truncateAll flushes the engines and truncates without regard to followers.
func (r *rig) truncateAll(g keyspace.GroupID) {
	r.t.Helper()
	for _, n := range r.nodes {
		if !n.up {
			continue
		}
		r.must(n.eng.Flush(context.Background()))
		grp := n.host.Group(g)
		r.eventually("everything applied is durable", 5*time.Second, func() bool {
			s := grp.Status()
			return s.DurableApplied == s.Applied
		})
		grp.w.flag(grp, flagCutOff)
		r.eventually("truncated", 5*time.Second, func() bool {
			base, _ := n.wal.Group(g).Base()
			return base == grp.Status().DurableApplied
		})
	}
}

func TestSnapshotCatchesUp(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, nil)
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		_, f := r.cutOffFollower(1, 20)
		f.start()
		r.equal(1)
		if f.sms[1].done == nil || f.sms[1].done[len(f.sms[1].done)-1] != nil {
			t.Fatalf("no snapshot was installed: %v", f.sms[1].done)
		}
		// The installed snapshot survives without its sender.
		f.crash(0)
		f.start()
		r.write(1, "after")
		r.equal(1)
		r.asleep(1)
	})
}

// TestSnapshotUnderLoad: a follower cut off from the log catches up under load, without
// an endless loop of snapshots (trap 25).
func TestSnapshotUnderLoad(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, func(c *Config) { c.MaxLagBytes = 8 << 10; c.SnapshotBytesPerSecond = 512 << 10 })
		r.memtab = 32 << 10
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		_, f := r.cutOffFollower(1, 50)
		stop := make(chan struct{})
		var wg sync.WaitGroup
		wg.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				for _, n := range r.nodes {
					if n != f && n.up {
						_ = n.propose(1, fmt.Sprintf("load %d %0300d", i, 0))
						if i%50 == 0 {
							_ = n.eng.Flush(context.Background())
						}
					}
				}
				time.Sleep(10 * time.Millisecond)
			}
		})
		f.start()
		r.eventually("it follows under load", 60*time.Second, func() bool {
			l := r.leader(1).host.Group(1).Status()
			s := f.host.Group(1).Status()
			return s.Applied+20 >= l.Applied && !s.Receiving
		})
		close(stop)
		wg.Wait()
		r.equal(1)
		if n := len(f.sms[1].done); n < 1 || n > 4 {
			t.Fatalf("%d snapshots", n)
		}
		for _, n := range r.nodes {
			if base, _ := n.wal.Group(1).Base(); base < 60 {
				t.Fatalf("node %d: log begins behind %d", n.id, base)
			}
		}
	})
}

// TestSnapshotRestartAtEveryStep restarts sender or receiver at every chunk. The replica
// is never half installed, and complete in the end (traps 32, 59).
func TestSnapshotRestartAtEveryStep(t *testing.T) {
	for _, who := range []string{"sender", "receiver"} {
		for step := 1; step < 12; step += fewer(1, 3) {
			t.Run(fmt.Sprint(who, step), func(t *testing.T) {
				inBubble(t, func(t *testing.T) {
					// Each key has its own table, so there are as many chunks.
					r := newRig(t, 3, func(c *Config) { c.snapshotTableBytes = 1 })
					r.startAll()
					defer r.close()
					r.bootstrap(1, 1, voters(3))
					_, f := r.cutOffFollower(1, 5)
					var once sync.Once
					reached := make(chan struct{})
					chunks := 0
					for _, n := range r.nodes {
						if n != f {
							n.end.stall = func() {
								if chunks++; chunks == step {
									once.Do(func() { close(reached) })
									time.Sleep(time.Millisecond)
								}
							}
						}
					}
					f.start()
					select {
					case <-reached:
					case <-time.After(5 * time.Second):
						t.Fatalf("%d chunks came", chunks)
					}
					victim := f
					if who == "sender" {
						victim = r.leader(1)
					}
					victim.crash(r.rng.IntN(101))
					victim.start()
					r.write(1, "after")
					r.equal(1)
				})
			})
		}
	}
}

// trap 58: a snapshot is answered only after the flush that follows its ingest. trap 32:
// Open repairs a crash between the ingest and the log's reset.
func TestSnapshotIsDurableBeforeItIsAnswered(t *testing.T) {
	for _, moment := range []string{"answered", "installing"} {
		t.Run(moment, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				r := newRig(t, 3, nil)
				r.clones = true
				r.startAll()
				defer r.close()
				r.bootstrap(1, 1, voters(3))
				_, f := r.cutOffFollower(1, 10)
				var at uint64
				seen := make(chan struct{}, 100)
				r.bus.set(func(b *testBus) {
					b.filter = func(from, _ keyspace.NodeID, m *message) bool {
						if from == f.id && m.kind == pb.MsgAppResp && !m.raft.GetReject() && m.raft.GetIndex() > 12 {
							at = m.raft.GetIndex()
							select {
							case seen <- struct{}{}:
							default:
							}
						}
						return true
					}
				})
				f.start()
				<-seen
				// The disks as a power failure leaves them at the moment of the response,
				// or between the ingest and the reset of the log.
				clone := f.fs.Crash(0, nil)
				if moment == "installing" {
					clone = f.sms[1].disk
				}
				f.crash(0)
				f.fs = clone
				if a := applied(t, f); moment == "answered" && a.Index < at || a.Index <= InitIndex {
					t.Fatalf("answered %d, durable %d", at, a.Index)
				}
				f.start()
				r.write(1, "after")
				r.equal(1)
			})
		})
	}
}

// applied reads the applied record of group 1 from a stopped node's engine.
func applied(t *testing.T, n *testNode) engine.Applied {
	t.Helper()
	e, err := engine.Open(engine.Options{FS: n.fs, Dir: "data", Clock: n.r.clk, BallastBytes: -1, LowSpaceBytes: -1})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	a, _, err := e.Applied(1)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// TestSnapshotWaitsForCommitted: a snapshot never replaces entries that are committed
// here. Their effects beyond the group's own state, such as a split's new group, would be
// lost.
func TestSnapshotWaitsForCommitted(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, noSleep)
		r.walopt = func(o *wal.Options) { o.SegmentBytes = 4 << 20 }
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		r.write(1, "first")
		r.equal(1)
		l := r.leader(1)
		f := r.nodes[1+l.id%3]
		goOn := make(chan struct{})
		f.sms[1].slow = func() { <-goOn }
		// More than raft hands out before some of it is applied.
		const entries = 3
		for i := range entries {
			r.write(1, fmt.Sprintf("committed %d %0600000d", i, 0))
		}
		g := f.host.Group(1)
		r.eventually("committed at the follower", 5*time.Second, func() bool { return g.Status().Commit == l.host.Group(1).Status().Commit })
		r.bus.isolate(f.id, true)
		r.write(1, "later")
		f.up = false
		r.truncateAll(1)
		f.up = true
		r.bus.isolate(f.id, false)
		time.Sleep(5 * time.Second)
		close(goOn)
		r.equal(1)
		for i := range entries {
			if !f.sms[1].has(fmt.Sprintf("committed %d %0600000d", i, 0)) {
				t.Fatalf("entry %d was committed here and never applied", i)
			}
		}
		if len(f.sms[1].done) == 0 {
			t.Fatal("no snapshot came")
		}
	})
}

// lagging makes two groups with one leader and cuts off a node, which it returns stopped,
// from both logs.
func lagging(r *rig) (f *testNode) {
	r.bootstrap(1, 2, voters(3))
	r.write(1, "first")
	l := r.leader(1)
	if o := r.leader(2); o != l {
		r.must(o.host.Group(2).Transfer(context.Background(), l.replicas[2]))
	}
	f = r.nodes[1+l.id%3]
	f.crash(0)
	for g := keyspace.GroupID(1); g <= 2; g++ {
		for i := range 5 {
			r.write(g, fmt.Sprint(i))
		}
		r.truncateAll(g)
	}
	return f
}

// TestManySmallSnapshots: a node that was away gets the small snapshots of many groups in
// quick succession. A snapshot without a slot waits for one, and not as long as after a
// failure.
func TestManySmallSnapshots(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		const groups = 24
		r := newRig(t, 3, func(c *Config) { c.SnapshotSends, c.SnapshotReceives = 4, 8 })
		r.startAll()
		defer r.close()
		r.bootstrap(1, groups, voters(3))
		for g := keyspace.GroupID(1); g <= groups; g++ {
			r.write(g, "first")
		}
		f := r.nodes[3]
		f.crash(0)
		for g := keyspace.GroupID(1); g <= groups; g++ {
			r.write(g, "more")
			r.truncateAll(g)
		}
		f.start()
		received := f.host.m.snapshotsReceived
		r.eventually("it begins", 10*time.Second, func() bool { return testutil.ToFloat64(received) > 0 })
		begin := time.Now()
		for g := keyspace.GroupID(1); g <= groups; g++ {
			r.equal(g)
		}
		// Two slots at each of at most two senders, and a heartbeat for each turn.
		took, turns := time.Since(begin), groups/2
		if most := time.Duration(turns) * 150 * time.Millisecond; took > most {
			t.Errorf("%.0f snapshots took %v, want at most %v", testutil.ToFloat64(received), took, most)
		}
		// etcd's names for them are by peer.
		var sent, taken, underWay float64
		r.eventually("all are counted", 10*time.Second, func() bool {
			sent, taken, underWay = 0, 0, 0
			for _, n := range r.nodes {
				m := n.host.m
				for _, peer := range r.nodes {
					id := peer.host.cfg.Node.String()
					sent += testutil.ToFloat64(m.sends.succeeded.WithLabelValues(id))
					taken += testutil.ToFloat64(m.receives.succeeded.WithLabelValues(id))
					underWay += testutil.ToFloat64(m.sends.underWay.WithLabelValues(id)) + testutil.ToFloat64(m.receives.underWay.WithLabelValues(id))
				}
				underWay += testutil.ToFloat64(m.installing)
			}
			return sent >= groups && taken == sent && underWay == 0
		})
	})
}

// TestSnapshotReceiverHangs: a receiver that never responds holds none of the sender's
// slots for ever, and never more than half.
func TestSnapshotReceiverHangs(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, func(c *Config) { c.SnapshotSends, c.SnapshotReceives = 4, 4 })
		r.startAll()
		defer r.close()
		f := lagging(r)
		f.start()
		var began atomic.Int64
		hang := make(chan struct{})
		r.bus.set(func(*testBus) {
			f.end.stream[transport.MethodRaftSnapshot] = func(context.Context, keyspace.NodeID, []byte, transport.Stream) error {
				began.Add(1)
				<-hang
				return errors.New("it was stuck")
			}
		})
		for range 200 {
			time.Sleep(time.Second)
			synctest.Wait()
			for _, n := range r.nodes {
				n.host.snaps.mu.Lock()
				sends := len(n.host.snaps.mu.sends)
				n.host.snaps.mu.Unlock()
				if sends > 2 {
					t.Errorf("node %d sends %d snapshots at once to one node", n.id, sends)
				}
			}
		}
		if began.Load() < 3 {
			t.Errorf("%d snapshots were begun: one that hangs is never given up", began.Load())
		}
		close(hang)
	})
}

// TestSnapshotPlacesAreLeft: however many slots unresponsive nodes hold, another node
// finds some. Of n nodes that take all they can get, the last one gets what n halvings
// leave.
func TestSnapshotPlacesAreLeft(t *testing.T) {
	for _, c := range []struct {
		places int
		want   []int
	}{
		{16, []int{8, 4, 2, 1, 1, 0}},
		{5, []int{3, 1, 1, 0}},
		{4, []int{2, 1, 1, 0}},
		{1, []int{1, 0}},
	} {
		h := &Host{cfg: Config{SnapshotSends: c.places}}
		s := &snapshots{h: h}
		s.mu.sends = map[*outgoingSnapshot]struct{}{}
		for i, want := range c.want {
			node, got := keyspace.NodeID(i+1), 0
			for got <= c.places && s.addSend(&outgoingSnapshot{node: node}) {
				got++
			}
			if got != want {
				t.Errorf("of %d places node %d got %d, want %d", c.places, node, got, want)
			}
		}
	}
}

// TestSnapshotSenderHangs: a silent sender does not hold the receiver's slots.
func TestSnapshotSenderHangs(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, nil)
		r.startAll()
		defer r.close()
		f := lagging(r)
		hang := make(chan struct{})
		r.bus.set(func(*testBus) {
			for _, n := range r.nodes {
				n.end.stall = func() { <-hang }
			}
		})
		f.start()
		receives := func() int {
			f.host.snaps.mu.Lock()
			defer f.host.snaps.mu.Unlock()
			return len(f.host.snaps.mu.receives)
		}
		r.eventually("a snapshot comes", 10*time.Second, func() bool { return receives() > 0 })
		r.eventually("its place is free again", 2*stallTimeout, func() bool { return receives() == 0 })
		close(hang)
		r.equal(1)
		r.equal(2)
	})
}

// TestSnapshotRefused: if the state machine refuses (trap 6: overlapping spans), the
// sender retries at a limited rate and succeeds once it is allowed. It logs the refusal
// once.
func TestSnapshotRefused(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, nil)
		core, logs := observer.New(zap.InfoLevel)
		r.zap = zap.New(core)
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		_, f := r.cutOffFollower(1, 5)
		f.start()
		sm := f.sms[1]
		sm.mu.Lock()
		sm.refuse = errors.New("the parent has not split")
		sm.mu.Unlock()
		sends := func() (n int) {
			for _, o := range r.nodes {
				o.host.snaps.mu.Lock()
				n += len(o.host.snaps.mu.sends)
				o.host.snaps.mu.Unlock()
			}
			return n
		}
		time.Sleep(10 * time.Second)
		synctest.Wait()
		if sends() > 1 || f.host.Group(1).Status().Receiving {
			t.Fatalf("%d sends, %+v", sends(), f.host.Group(1).Status())
		}
		failed := 0.0
		for _, o := range r.nodes {
			if o != f {
				failed += testutil.ToFloat64(o.host.m.snapshotsFailed)
			}
		}
		// A node that has just started may also refuse for another reason.
		if said := logs.FilterMessage("snapshot not sent").Len(); failed < 5 || said == 0 || said > 2 {
			t.Errorf("%.0f snapshots were refused, of which the log has %d", failed, said)
		}
		sm.mu.Lock()
		sm.refuse = nil
		sm.mu.Unlock()
		r.equal(1)
	})
}

// TestSnapshotNeedsRoom: a full disk receives no snapshot. None begins, and none
// continues when the disk becomes full. The files are removed.
func TestSnapshotNeedsRoom(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, func(c *Config) { c.SnapshotBytesPerSecond = 2 << 10 })
		r.engopt = func(o *engine.Options) { o.LowSpaceBytes = 10 << 20 }
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		_, f := r.cutOffFollower(1, 200) // some seconds' worth of tables
		free := func(b uint64) {
			f.fs.SetUsage(vfs.DiskUsage{AvailBytes: b, TotalBytes: 1 << 30, UsedBytes: 1<<30 - b})
		}
		staged := func() int {
			names, err := f.fs.List("data/staging")
			r.must(err)
			return len(names)
		}
		free(9 << 20)
		f.start()
		time.Sleep(5 * time.Second)
		synctest.Wait()
		if s := f.host.Group(1).Status(); s.Receiving || staged() > 0 {
			t.Fatalf("a snapshot is received onto a full disk: %+v, %d files", s, staged())
		}
		free(900 << 20)
		r.eventually("it is received", 20*time.Second, func() bool { return staged() > 0 })
		free(9 << 20)
		r.eventually("it is given up", 3*time.Second, func() bool { return staged() == 0 && !f.host.Group(1).Status().Receiving })
		if done := f.sms[1].done; len(done) == 0 || done[len(done)-1] == nil {
			t.Fatalf("outcomes %v", done)
		}
		free(900 << 20)
		r.equal(1)
	})
}

// trap 25: a pin keeps the log behind a snapshot, and ends with its sender.
func TestPinExpires(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, noSleep)
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		for i := range 10 {
			r.write(1, fmt.Sprint(i))
		}
		l := r.leader(1)
		g := l.host.Group(1)
		inWorker(g, func() { g.trunc.pins = append(g.trunc.pins, pin{2, 15, g.w.now.Add(pinTTL)}) })
		r.must(l.eng.Flush(context.Background()))
		r.eventually("durable", time.Second, func() bool { return g.Status().DurableApplied == g.Status().Applied })
		g.w.flag(g, flagCutOff)
		synctest.Wait()
		if base, _ := g.log.Base(); base > 15 {
			t.Fatalf("truncated at %d under a pin at 15", base)
		}
		time.Sleep(pinTTL + time.Second)
		g.w.flag(g, flagCutOff)
		synctest.Wait()
		if base, _ := g.log.Base(); base != g.Status().DurableApplied {
			t.Fatalf("truncated at %d, the pin has expired", base)
		}
	})
}

// trap 25: the log behind a snapshot in flight is kept however long that takes, so the
// follower needs no second one. Everything else calls for truncation: the follower lags
// beyond the bound, everything is durable, and the wal counts as too long.
func TestSnapshotPinsItsLog(t *testing.T) {
	long(t, "lasts many virtual minutes")
	inBubble(t, func(t *testing.T) {
		// Each key has its own table of one chunk and an end.
		r := newRig(t, 3, func(c *Config) { c.MaxLagBytes = 1 << 10; c.snapshotTableBytes = 1 })
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		r.write(1, "first")
		f := r.nodes[1+r.leader(1).id%3]
		f.crash(0)
		for i := range 15 {
			r.write(1, fmt.Sprintf("w%d %0*d", i, 64<<10, 0))
		}
		r.truncateAll(1)
		l := r.leader(1)
		g := l.host.Group(1)
		at := g.Status().Applied
		const stall = pinTTL / 20
		for _, n := range r.nodes {
			n.end.stall = func() { time.Sleep(stall) }
		}
		f.start()
		receiving := func() bool { return f.host.Group(1).Status().Receiving }
		// The follower refuses the first one while it still applies its log, which the
		// sender learns after a chunk.
		r.eventually("a snapshot comes", stall+10*time.Second, receiving)
		began := time.Now()
		for i := 0; receiving(); i++ {
			r.write(1, fmt.Sprintf("more%d %02000d", i, 0))
			r.must(l.eng.Flush(context.Background()))
			g.w.flag(g, flagCutOff)
			synctest.Wait()
			if base, _ := g.log.Base(); base > at {
				t.Fatalf("after %v the log begins behind %d, and the snapshot is at %d", time.Since(began), base, at)
			}
			time.Sleep(5 * time.Second)
		}
		if took := time.Since(began); took < pinTTL*3/2 {
			t.Fatalf("the snapshot took %v, to be longer than a pin without progress", took)
		}
		r.equal(1)
		if n := len(f.sms[1].done); n != 1 {
			t.Fatalf("%d snapshots", n)
		}
	})
}

// trap 26: a dead follower and an idle group pin the wal only up to the bounds.
func TestLiveWALIsBounded(t *testing.T) {
	long(t, "fills a wal")
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, func(c *Config) { c.MaxLagBytes = 1 << 30; c.MaxWALBytes = 1 << 20 })
		r.walopt = func(o *wal.Options) { o.TargetBytes = 1 << 20 }
		r.startAll()
		defer r.close()
		r.bootstrap(1, 2, voters(3))
		r.write(2, "idle")
		r.write(1, "x")
		l := r.leader(1)
		r.nodes[1+l.id%3].crash(0)
		pad := strings.Repeat("p", 16<<10)
		for i := range 400 {
			r.write(1, fmt.Sprint(i, pad))
		}
		r.eventually("the wal is short again", 60*time.Second, func() bool {
			for _, n := range r.nodes {
				if n.up && n.wal.LiveBytes() > 3<<20 {
					return false
				}
			}
			return true
		})
		f := r.nodes[1+l.id%3]
		f.start()
		r.equal(1)
		r.equal(2)
	})
}

// TestTruncationRespectsFollowers: leader and followers keep the log for a follower that
// lags a little, so a change of leader causes no snapshots.
func TestTruncationRespectsFollowers(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, noSleep)
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		r.write(1, "x")
		l := r.leader(1)
		f := r.nodes[1+l.id%3]
		r.eventually("f has it", time.Second, func() bool { return f.sms[1].has("x") })
		had := f.host.Group(1).Status().Last
		f.crash(100)
		for i := range 30 {
			r.write(1, fmt.Sprint("y", i))
		}
		time.Sleep(time.Second)
		for _, n := range r.nodes {
			if n.up {
				r.must(n.eng.Flush(context.Background()))
			}
		}
		time.Sleep(time.Second)
		synctest.Wait()
		for _, n := range r.nodes {
			if n.up {
				if base, _ := n.wal.Group(1).Base(); base > had {
					t.Fatalf("node %d truncated at %d, a follower has %d", n.id, base, had)
				}
			}
		}
		f.start()
		r.equal(1)
		if len(f.sms[1].done) != 0 {
			t.Fatal("a snapshot for a little lag")
		}
		r.must(r.leader(1).eng.Flush(context.Background()))
		r.eventually("truncated once nobody needs it", 5*time.Second, func() bool {
			r.write(1, fmt.Sprint("z", time.Now().UnixNano()))
			r.must(r.leader(1).eng.Flush(context.Background()))
			base, _ := r.leader(1).wal.Group(1).Base()
			return base > had
		})
	})
}

func TestSnapshotHeaderRefusesNonsense(t *testing.T) {
	good := snapshotHeader{group: 1, from: 1, to: 2, term: 7, applied: engine.Applied{Index: 9, Term: 6, Replicas: voters(3)}}
	b := encodeSnapshotHeader(&good)
	if h, err := decodeSnapshotHeader(b); err != nil || h.applied.Index != 9 || len(h.applied.Replicas) != 3 {
		t.Fatalf("%+v %v", h, err)
	}
	for i := range b {
		if _, err := decodeSnapshotHeader(b[:i]); err == nil && i < len(b)-8 {
			t.Fatalf("%d of %d bytes are accepted", i, len(b))
		}
	}
	bad := good
	bad.applied.Term = 8
	if _, err := decodeSnapshotHeader(encodeSnapshotHeader(&bad)); !errors.Is(err, errSnapshotFormat) {
		t.Fatalf("applied beyond the term: %v", err)
	}
}

// TestStopBesideAnInstall: a host that stops while a snapshot waits for the applier still
// runs the callbacks behind it.
func TestStopBesideAnInstall(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, nil)
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		_, f := r.cutOffFollower(1, 10)
		f.start()
		g, sm := f.host.Group(1), f.sms[1]
		refuse := func(err error) {
			sm.mu.Lock()
			defer sm.mu.Unlock()
			sm.refuse = err
		}
		// Committed entries are applied first; then the applier is blocked.
		refuse(errors.New("not yet"))
		time.Sleep(5 * time.Second)
		goOn := make(chan struct{})
		release := sync.OnceFunc(func() { close(goOn) })
		defer release()
		inWorker(g, func() { g.w.schedule(g, applyTask{kind: taskCall, call: func() { <-goOn }}) })
		refuse(nil)
		installing := func() (is bool) {
			inWorker(g, func() { is = g.installing != nil })
			return is
		}
		r.eventually("a snapshot waits", 20*time.Second, installing)
		var called atomic.Bool
		inWorker(g, func() { g.w.schedule(g, applyTask{kind: taskCall, call: func() { called.Store(true) }}) })
		stopped := make(chan struct{})
		go func() {
			defer close(stopped)
			_ = f.host.Stop(context.Background())
		}()
		synctest.Wait()
		release()
		<-stopped
		if !called.Load() {
			t.Error("a callback behind the snapshot was never called")
		}
		f.crash(100)
		f.start()
		r.equal(1)
	})
}

// TestSnapshotWaitsForLogReset: while a snapshot's reset of the log is on its way to the
// disk, no other snapshot begins. The wait ends when the group is closed.
func TestSnapshotWaitsForLogReset(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, nil)
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		r.write(1, "x")
		r.equal(1)
		f := r.nodes[1+r.leader(1).id%3]
		g := f.host.Group(1)
		first := &incomingSnapshot{g: g, result: make(chan error, 1)}
		inWorker(g, func() {
			g.resetting = first
			next := &incomingSnapshot{g: g, head: &snapshotHeader{term: g.term, applied: engine.Applied{Index: g.commit + 9, Replicas: voters(3)}}}
			if err := g.beginReceive(next); !errors.Is(err, errSnapshotRefused) {
				t.Errorf("a second snapshot: %v", err)
			}
		})
		r.must(f.host.Close(context.Background(), 1))
		if err := <-first.result; !errors.Is(err, ErrClosed) {
			t.Errorf("closed: %v", err)
		}
		f.open(1)
	})
}
