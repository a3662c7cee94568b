package raftgroup

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/transport"
)

// heavy gives a group that many bytes, in values of 4 KiB, on every running node: the
// same everywhere, as entries would have left them.
func (r *rig) heavy(g keyspace.GroupID, bytes int) {
	r.t.Helper()
	for _, n := range r.nodes {
		if !n.up {
			continue
		}
		rng := rand.New(rand.NewPCG(uint64(g), 7))
		b := n.eng.NewBatch()
		for i := range bytes / 4096 {
			v := make([]byte, 4096)
			for k := range v {
				v[k] = byte(rng.Uint32())
			}
			r.must(b.Set(engine.GroupLocalKey(g, fmt.Appendf(nil, "bulk%05d", i)), v))
		}
		r.must(b.Commit())
		r.must(n.eng.Flush(context.Background()))
	}
}

// heavyHere counts those keys on a node.
func (n *testNode) heavyHere(g keyspace.GroupID) (keys int) {
	n.r.t.Helper()
	span := engine.KeySpan{Lower: engine.GroupLocalKey(g, []byte("bulk")), Upper: engine.GroupLocalKey(g, []byte("bull"))}
	it, err := n.eng.NewIter(engine.IterOptions{Lower: span.Lower, Upper: span.Upper})
	n.r.must(err)
	for ok := it.First(); ok; ok = it.Next() {
		keys++
	}
	n.r.must(errors.Join(it.Error(), it.Close()))
	return keys
}

// copies counts the snapshot bytes that reach a node; while it is cut, none do.
type copies struct {
	came atomic.Int64
	cut  atomic.Bool
}

func (c *copies) Load() int64 { return c.came.Load() }

type countedStream struct {
	transport.Stream
	c *copies
}

func (s countedStream) Recv(ctx context.Context) ([]byte, error) {
	if s.c.cut.Load() {
		return nil, transport.ErrUnreachable
	}
	p, err := s.Stream.Recv(ctx)
	s.c.came.Add(int64(len(p)))
	return p, err
}

// countCopies counts the snapshot bytes that reach a node in this run.
func (n *testNode) countCopies() *copies {
	var came copies
	n.r.bus.set(func(*testBus) {
		h := n.end.stream[transport.MethodRaftSnapshot]
		n.end.stream[transport.MethodRaftSnapshot] = func(ctx context.Context, from keyspace.NodeID, first []byte, s transport.Stream) error {
			return h(ctx, from, first, countedStream{s, &came})
		}
	})
	return &came
}

// TestCutCopyBeginsAnew: an interrupted snapshot starts over, whether its sender returns or
// another one takes over. The new one has the current state, and the old one leaves no file.
func TestCutCopyBeginsAnew(t *testing.T) {
	// Copies take 8 s.
	size := fewer(2<<20, 1<<20)
	rate := size / 8
	hows := []string{"changed", "another sender", "cut off"}
	for _, how := range hows[:fewer(3, 2)] {
		t.Run(how, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				r := newRig(t, 3, func(c *Config) { c.SnapshotBytesPerSecond, c.snapshotTableBytes = int64(rate), 64<<10 })
				r.startAll()
				defer r.close()
				r.bootstrap(1, 1, voters(3))
				_, f := r.cutOffFollower(1, 5)
				r.heavy(1, size)
				f.start()
				came := f.countCopies()
				r.eventually("half of the copy is there", 30*time.Second, func() bool { return came.Load() > int64(size/2) })
				l := r.leader(1)
				switch how {
				case "another sender":
					r.must(l.host.Group(1).Transfer(context.Background(), 0))
				default:
					came.cut.Store(true)
					time.Sleep(5 * time.Second)
				}
				if how == "changed" {
					for _, n := range r.nodes {
						if n == f {
							continue
						}
						b := n.eng.NewBatch()
						r.must(b.Set(engine.GroupLocalKey(1, []byte("bulk00000")), []byte("new")))
						r.must(b.Commit())
					}
				}
				came.cut.Store(false)
				r.equal(1)
				if n := f.heavyHere(1); n != size/4096 {
					t.Errorf("%d keys arrived of %d", n, size/4096)
				}
				if how == "changed" {
					if v, _, err := f.eng.Get(engine.GroupLocalKey(1, []byte("bulk00000"))); string(v) != "new" || err != nil {
						t.Errorf("what changed is %.10q, %v", v, err)
					}
				}
				if n := int(came.Load()); n < size*3/2 || n > size*2 {
					t.Errorf("%d bytes came for a half and a whole copy of %d", n, size)
				}
				left, err := f.eng.FS().List(f.eng.StagingDir())
				if err != nil || len(left) > 0 {
					t.Errorf("left behind: %v, %v", left, err)
				}
			})
		})
	}
}

// snapshotsFailed counts failures of all nodes since their starts, including snapshots
// sent to a node that is still down.
func (r *rig) snapshotsFailed() (n int64) {
	for _, node := range r.nodes {
		n += int64(testutil.ToFloat64(node.host.m.snapshotsFailed))
	}
	return n
}

// checkedCopy sends a snapshot of that size from l to a follower f that was cut off. It
// calls check for the n-th time, counted in checks, before f checks the tables and before
// it ingests them.
func (r *rig) checkedCopy(size int, check func(f *testNode, n int64)) (l, f *testNode, came *copies, checks *atomic.Int64) {
	r.t.Helper()
	r.bootstrap(1, 1, voters(3))
	l, f = r.cutOffFollower(1, 5)
	r.heavy(1, size)
	f.start()
	came, checks = f.countCopies(), &atomic.Int64{}
	sm, node := f.sms[1], f
	sm.mu.Lock()
	defer sm.mu.Unlock()
	sm.check = func() { check(node, checks.Add(1)) }
	return l, f, came, checks
}

// TestCopyIsCheckedForMinutes: a node may take minutes to check and ingest a snapshot.
// Nobody gives the snapshot up meanwhile, and the log behind it is kept.
func TestCopyIsCheckedForMinutes(t *testing.T) {
	long(t, "lasts many virtual minutes")
	const size = 1 << 20
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, nil)
		r.startAll()
		defer r.close()
		var before atomic.Int64
		_, f, came, checks := r.checkedCopy(size, func(_ *testNode, n int64) {
			if n == 1 {
				before.Store(r.snapshotsFailed())
			}
			time.Sleep(3 * stallTimeout)
		})
		for want := int64(1); want <= 2; want++ {
			r.eventually("it is checked, and then taken in", 4*stallTimeout, func() bool { return checks.Load() >= want })
			for i := range 3 {
				time.Sleep(stallTimeout * 5 / 6)
				r.write(1, fmt.Sprint(want, i))
				for _, n := range r.nodes {
					if n != f {
						r.must(n.eng.Flush(context.Background()))
						g := n.host.Group(1)
						g.w.flag(g, flagCutOff)
					}
				}
			}
		}
		r.equal(1)
		if n := came.Load(); n > size*5/4 || checks.Load() != 2 {
			t.Errorf("%d bytes came for a copy of %d, checked or taken in %d times", n, size, checks.Load())
		}
		if n := r.snapshotsFailed() - before.Load(); n > 0 {
			t.Errorf("%d snapshots failed", n)
		}
	})
}

// TestInstallThatFailsIsNotWaitedFor: the sender does not wait for a receiver whose disk
// is full during the install. That may take any time, and the sender would hold a slot
// and its log.
func TestInstallThatFailsIsNotWaitedFor(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, nil)
		r.engopt = func(o *engine.Options) { o.LowSpaceBytes = 1 << 20 }
		r.startAll()
		defer r.close()
		space := func(n *testNode, bytes uint64) {
			n.fs.SetUsage(vfs.DiskUsage{AvailBytes: bytes, TotalBytes: 1 << 30, UsedBytes: 1<<30 - bytes})
		}
		var before atomic.Int64
		before.Store(math.MaxInt64)
		_, f, _, _ := r.checkedCopy(0, func(f *testNode, n int64) {
			if n == 2 { // after the check, before the ingest
				space(f, 1<<10)
				before.Store(r.snapshotsFailed())
				time.Sleep(4 * time.Second)
			}
		})
		defer space(f, 900<<20)
		r.eventually("the sender goes", 2*stallTimeout, func() bool { return r.snapshotsFailed() > before.Load() })
		if !f.host.Group(1).Status().Receiving {
			t.Error("the copy was taken in with a full disk")
		}
		space(f, 900<<20)
		r.equal(1)
	})
}

// TestCopyOutlivesItsSender: if the sender is lost while its tables are checked, the next
// one sends the whole snapshot.
func TestCopyOutlivesItsSender(t *testing.T) {
	const size = 1 << 20
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, func(c *Config) { c.snapshotTableBytes = 64 << 10 })
		r.startAll()
		defer r.close()
		l, _, came, checks := r.checkedCopy(size, func(_ *testNode, n int64) {
			if n == 1 {
				time.Sleep(time.Minute)
			}
		})
		r.eventually("it is checked", 10*time.Second, func() bool { return checks.Load() == 1 })
		l.crash(0)
		r.eventually("it is checked again", 2*time.Minute, func() bool { return checks.Load() > 1 })
		r.equal(1)
		if n := came.Load(); n < 2*size || n > size*9/4 {
			t.Errorf("%d bytes came for two copies of %d", n, size)
		}
		l.start()
		r.equal(1)
	})
}

// TestCopiesShareTheReceiversBound: all snapshots to a node share its rate, however fast
// their senders are.
func TestCopiesShareTheReceiversBound(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		const size, rate = 1 << 20, 256 << 10
		var slow keyspace.NodeID
		r := newRig(t, 3, func(c *Config) {
			c.SnapshotSends, c.SnapshotReceives, c.SnapshotBytesPerSecond = 4, 4, 1<<30
			if c.Node == slow {
				c.SnapshotBytesPerSecond = rate
			}
		})
		r.startAll()
		defer r.close()
		r.bootstrap(1, 2, voters(3))
		r.write(1, "first")
		l := r.leader(1)
		f, other := r.nodes[1+l.id%3], r.nodes[1+(l.id+1)%3]
		if o := r.leader(2); o != other {
			r.must(o.host.Group(2).Transfer(context.Background(), other.replicas[2]))
		}
		slow = f.id
		f.crash(0)
		for g := keyspace.GroupID(1); g <= 2; g++ {
			r.write(g, "more")
			r.truncateAll(g)
			r.heavy(g, size)
		}
		f.start()
		came := f.countCopies()
		r.eventually("it begins", 10*time.Second, func() bool { return came.Load() > 0 })
		begin := time.Now()
		r.equal(1)
		r.equal(2)
		took := time.Since(begin)
		if want := 2 * size * time.Second / rate; took < want*8/10 || took > want*12/10 {
			t.Errorf("two copies of %d bytes took %v, at the bound they take %v", size, took, want)
		}
	})
}
