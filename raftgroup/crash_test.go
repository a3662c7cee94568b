package raftgroup

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/prometheus/client_golang/prometheus/testutil"
	pb "go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/wal"
)

// syncFS blocks or fails the fsyncs of a file system.
type syncFS struct {
	vfs.FS
	// only restricts this to files with the suffix; empty means all.
	only string
	// slow delays each write and slowSync each fsync; broken makes fsyncs fail.
	slow, slowSync atomic.Int64
	broken         atomic.Bool

	mu    sync.Mutex
	block chan struct{} // closed to let syncs continue; nil blocks none
}

type syncFile struct {
	vfs.File
	fs *syncFS
}

func (f *syncFS) wait() error {
	if f.broken.Load() {
		return errors.New("the disk is broken")
	}
	if d := f.slowSync.Load(); d > 0 {
		time.Sleep(time.Duration(d))
	}
	f.mu.Lock()
	b := f.block
	f.mu.Unlock()
	if b != nil {
		<-b
	}
	return nil
}

func (f *syncFS) hold() (release func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	b := make(chan struct{})
	f.block = b
	return sync.OnceFunc(func() {
		f.mu.Lock()
		f.block = nil
		f.mu.Unlock()
		close(b)
	})
}

func (f *syncFS) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	x, err := f.FS.Create(name, c)
	return f.file(name, x), err
}

func (f *syncFS) OpenReadWrite(name string, c vfs.DiskWriteCategory, o ...vfs.OpenOption) (vfs.File, error) {
	x, err := f.FS.OpenReadWrite(name, c, o...)
	return f.file(name, x), err
}

func (f *syncFS) ReuseForWrite(a, b string, c vfs.DiskWriteCategory) (vfs.File, error) {
	x, err := f.FS.ReuseForWrite(a, b, c)
	return f.file(b, x), err
}

func (f *syncFS) file(name string, x vfs.File) vfs.File {
	if x == nil || !strings.HasSuffix(name, f.only) {
		return x
	}
	return &syncFile{x, f}
}

func (f *syncFile) Write(p []byte) (int, error) {
	if d := f.fs.slow.Load(); d > 0 {
		time.Sleep(time.Duration(d))
	}
	return f.File.Write(p)
}

func (f *syncFile) Sync() error     { return errors.Join(f.fs.wait(), f.File.Sync()) }
func (f *syncFile) SyncData() error { return errors.Join(f.fs.wait(), f.File.SyncData()) }

func (f *syncFile) SyncTo(n int64) (bool, error) {
	if err := f.fs.wait(); err != nil {
		return false, err
	}
	return f.File.SyncTo(n)
}

// trap 21: no response of a follower about entries or votes leaves before its own fsync.
// Messages of the leader do not wait for the leader's fsync.
func TestNoAnswerBeforeFsync(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, func(c *Config) { c.LivenessTimeout = time.Hour; c.ElectionTimeout = time.Second })
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
		var releases []func()
		for id := range r.nodes {
			if id != l.id {
				releases = append(releases, slow[id].hold())
			}
		}
		var answers, appends atomic.Int64
		r.bus.set(func(b *testBus) {
			b.filter = func(from, _ keyspace.NodeID, m *message) bool {
				if m.kind == pb.MsgAppResp && !m.raft.GetReject() && from != l.id {
					answers.Add(1)
				}
				if m.kind == pb.MsgApp && len(m.raft.GetEntries()) > 0 {
					appends.Add(1)
				}
				return true
			}
		})
		r.must(l.propose(1, "second"))
		time.Sleep(300 * time.Millisecond)
		synctest.Wait()
		if answers.Load() != 0 || l.sms[1].has("second") {
			t.Fatalf("%d answers before the fsync, applied %v", answers.Load(), l.sms[1].has("second"))
		}
		if appends.Load() == 0 {
			t.Fatal("no MsgApp sent")
		}
		for _, f := range releases {
			f()
		}
		r.eventually("applied", time.Second, func() bool { return l.sms[1].has("second") })

		// The leader's own disk is slow: its followers store the entries and form the
		// quorum.
		release := slow[l.id].hold()
		r.must(l.propose(1, "third"))
		f := r.nodes[1+l.id%3]
		r.eventually("a follower has it before the leader's fsync", time.Second, func() bool {
			return f.host.Group(1).Status().Last == l.host.Group(1).Status().Last
		})
		release()
		r.eventually("applied", time.Second, func() bool { return l.sms[1].has("third") })
	})
}

// trap 24 and invariant 1: all nodes lose power at once, repeatedly, while logs are
// truncated. No acknowledged write is lost, and replicas agree.
func TestAllCrashAtOnce(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, func(c *Config) { c.MaxLagBytes = 4 << 10 })
		r.memtab = 64 << 10
		r.startAll()
		defer r.close()
		const groups = 4
		r.bootstrap(1, groups, voters(3))
		acked := map[keyspace.GroupID]uint64{}
		for round := range fewer(12, 5) {
			for i := range 10 {
				for g := keyspace.GroupID(1); g <= groups; g++ {
					l := r.leader(g)
					for range r.rng.IntN(4) {
						_ = l.propose(g, fmt.Sprintf("%d/%d/%d %0200d", round, i, g, 7))
					}
				}
				if r.rng.IntN(3) == 0 {
					for _, n := range r.nodes {
						r.must(n.eng.Flush(context.Background()))
					}
				}
				time.Sleep(time.Duration(r.rng.IntN(5)) * time.Millisecond)
			}
			synctest.Wait()
			for g := keyspace.GroupID(1); g <= groups; g++ {
				for _, n := range r.nodes {
					_, c := n.sms[g].state()
					acked[g] = max(acked[g], c)
				}
			}
			for _, n := range r.nodes {
				n.crash(r.rng.IntN(101))
			}
			r.startAll()
			for g := keyspace.GroupID(1); g <= groups; g++ {
				r.write(g, fmt.Sprintf("round %d", round))
				if _, c := r.leader(g).sms[g].state(); c <= acked[g] {
					t.Fatalf("round %d group %d: %d entries after the crash, %d were applied before", round, g, c, acked[g])
				}
			}
		}
		truncated := false
		for g := keyspace.GroupID(1); g <= groups; g++ {
			r.equal(g)
			for _, n := range r.nodes {
				base, _ := n.wal.Group(g).Base()
				truncated = truncated || base > InitIndex
			}
		}
		if !truncated {
			t.Fatal("no log was ever truncated")
		}
	})
}

// trap 57: a hard state behind the durably applied index. (The wal refuses one that is
// ahead of its log.)
func TestReconcile(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 1, nil)
		r.startAll()
		defer r.close()
		n := r.nodes[1]
		put := func(g keyspace.GroupID, a engine.Applied) {
			b := n.eng.NewBatch()
			a.Replicas = voters(3)
			r.must(b.SetApplied(g, a))
			r.must(b.Commit())
		}
		entries := func(from, to, term uint64) (es []*pb.Entry) {
			for i := from; i <= to; i++ {
				es = append(es, &pb.Entry{Index: ptr(i), Term: ptr(term), Data: []byte("x")})
			}
			return es
		}
		log := func(g keyspace.GroupID, base, baseTerm uint64, hs *pb.HardState, es []*pb.Entry) {
			b := n.wal.NewBatch()
			b.Reset(g, base, baseTerm, nil)
			b.Append(g, hs, es)
			n.wal.Submit(b, nil)
		}
		hs := func(term, vote, commit uint64) *pb.HardState {
			return &pb.HardState{Term: &term, Vote: &vote, Commit: &commit}
		}
		open := func(g keyspace.GroupID) (*Group, error) {
			return n.host.Open(g, 1, n.position(g), &testSM{n: n, group: g})
		}

		put(1, engine.Applied{Index: 15, Term: 6})
		log(1, 10, 5, hs(6, 2, 12), entries(11, 20, 6))
		g, err := open(1)
		if err != nil || g.commit != 15 || g.last != 20 || g.term != 6 {
			t.Fatalf("commit behind applied: %v %+v", err, g)
		}
		// traps 31, 32: an ingest is durable, the reset of the log is not.
		put(2, engine.Applied{Index: 30, Term: 7})
		log(2, 10, 5, hs(6, 2, 12), entries(11, 20, 6))
		if g, err = open(2); err != nil || g.commit != 30 || g.last != 30 || g.term != 7 || g.log.HardState().GetVote() != 0 {
			t.Fatalf("log ends before the record: %v %+v", err, g)
		}
		put(3, engine.Applied{Index: 15, Term: 7})
		log(3, 10, 5, hs(7, 2, 12), entries(11, 20, 6))
		if g, err = open(3); err != nil || g.last != 15 || g.log.HardState().GetVote() != 2 {
			t.Fatalf("log contradicts the record: %v %+v", err, g)
		}
		// trap 24: a gap is never ignored.
		put(4, engine.Applied{Index: 12, Term: 6})
		log(4, 15, 6, hs(6, 2, 15), entries(16, 20, 6))
		if _, err = open(4); !errors.Is(err, errCorrupt) {
			t.Fatalf("gap: %v", err)
		}
		// trap 2: a child's replica that voted before the split created it.
		log(5, 0, 0, hs(9, 3, 0), nil)
		put(5, engine.Applied{Index: InitIndex, Term: InitTerm})
		if g, err = open(5); err != nil || g.term != 9 || g.log.HardState().GetVote() != 3 || g.commit != InitIndex {
			t.Fatalf("vote before the split: %v %+v", err, g)
		}
		// Acknowledged entries whose record a crash has taken: the replica must not vote
		// as if it had none. A replica removed for good leaves a tombstone (trap 10).
		log(6, 10, 5, hs(8, 2, 12), entries(11, 20, 6))
		if _, err = open(6); !errors.Is(err, errCorrupt) || n.wal.Group(6).LastIndex() != 20 {
			t.Fatalf("a log without its record: %v", err)
		}
		log(7, 10, 5, nil, nil)
		if _, err = open(7); !errors.Is(err, errCorrupt) {
			t.Fatalf("an empty log without its record: %v", err)
		}
		// A replica without a record may have voted, but nothing else.
		log(8, 0, 0, hs(9, 3, 0), nil)
		if g, err = open(8); err != nil || g.term != 9 || g.log.HardState().GetVote() != 3 {
			t.Fatalf("vote of an empty replica: %v %+v", err, g)
		}
	})
}

// trap 30: a crash that loses the deletion of a removed replica does not revive it.
func TestRemovedStaysRemoved(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, nil)
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		r.write(1, "x")
		r.equal(1)
		n := r.nodes[3]
		r.must(n.eng.Flush(context.Background()))
		// The tombstone exists, but not the deletion.
		ctx, cancel := context.WithCancel(context.Background())
		stop := errors.New("stopped here")
		err := n.host.Remove(ctx, []keyspace.GroupID{1}, func(*engine.Batch, keyspace.GroupID) error { return stop })[1]
		cancel()
		if !errors.Is(err, stop) {
			t.Fatal(err)
		}
		delete(n.replicas, 1)
		n.crash(0)
		n.start()
		if got := n.host.Removed(); !slices.Equal(got, []keyspace.GroupID{1}) {
			t.Fatalf("removed: %v", got)
		}
		if _, err := n.host.Open(1, 3, n.position(1), &testSM{n: n, group: 1}); !errors.Is(err, ErrClosed) {
			t.Fatalf("open: %v", err)
		}
		r.must(n.host.Remove(context.Background(), []keyspace.GroupID{1}, nil)[1])
		if _, ok, _ := n.eng.Applied(1); ok {
			t.Fatal("applied record is still there")
		}
		synctest.Wait()
		if got := n.host.Removed(); len(got) != 0 {
			t.Fatalf("removed: %v", got)
		}
	})
}

// trap 30: groups that are removed together share each flush. One whose data cannot be deleted keeps
// its tombstone, and does not keep the others. A crash behind the tombstones loses none of them.
func TestRemoveTogether(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 1, nil)
		r.startAll()
		defer r.close()
		n, ids := r.nodes[1], []keyspace.GroupID{1, 2, 3, 4}
		for _, g := range ids {
			r.bootstrap(g, 1, voters(1))
			r.write(g, "x")
		}
		r.must(n.eng.Flush(context.Background()))
		removed := func(want ...keyspace.GroupID) {
			t.Helper()
			synctest.Wait()
			if got := n.host.Removed(); !slices.Equal(got, want) {
				t.Fatalf("removed are %v, want %v", got, want)
			}
		}
		synctest.Wait()
		var flushes atomic.Int64
		defer n.eng.OnDurable(func() { flushes.Add(1) })()
		stop := errors.New("stopped here")
		failed := n.host.Remove(context.Background(), ids[:3], func(_ *engine.Batch, g keyspace.GroupID) error {
			if got := n.host.Removed(); !slices.Equal(got, ids[:3]) {
				t.Errorf("%v certainly never come back while %s is deleted", got, g)
			}
			if g == 2 {
				return stop
			}
			return nil
		})
		if len(failed) != 1 || !errors.Is(failed[2], stop) {
			t.Errorf("failed are %v", failed)
		}
		removed(2)
		if got := flushes.Load(); got != 1 {
			t.Errorf("%d flushes for 3 groups", got)
		}
		for _, g := range ids {
			delete(n.replicas, g)
			if _, ok, err := n.eng.Applied(g); ok != (g == 2 || g == 4) || err != nil {
				t.Errorf("the record of group %d is there: %t, %v", g, ok, err)
			}
		}
		failed = n.host.Remove(context.Background(), []keyspace.GroupID{2, 4}, func(*engine.Batch, keyspace.GroupID) error { return stop })
		if len(failed) != 2 {
			t.Errorf("failed are %v", failed)
		}
		n.crash(0)
		n.start()
		removed(2, 4)
		var again []keyspace.GroupID
		r.must(n.host.FinishRemovals(context.Background(), func(_ *engine.Batch, g keyspace.GroupID) error {
			again = append(again, g)
			return nil
		}))
		removed()
		if !slices.Equal(again, []keyspace.GroupID{2, 4}) {
			t.Errorf("deleted again: %v", again)
		}
		n.crash(0) // it may lose that the tombstones went
		n.start()
		r.must(n.host.FinishRemovals(context.Background(), nil))
		removed()
		for _, g := range ids {
			if _, ok, err := n.eng.Applied(g); ok || err != nil {
				t.Errorf("the record of group %d is there: %t, %v", g, ok, err)
			}
		}
	})
}

// trap 22: an fsync error poisons the wal. Nothing that waited for that fsync is ever
// answered.
func TestFsyncError(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, nil)
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		r.write(1, "x")
		l := r.leader(1)
		f := r.nodes[1+l.id%3]
		before := f.host.Group(1).Status().Last
		w := f.host.workers[f.host.Group(1).w.no]
		rec := &passRecord{w: w, groups: []recordItem{{f.host.Group(1), []*pb.Message{{To: ptr(uint64(l.id))}}}}}
		w.durable(rec, wal.ErrClosed)
		w.mu.Lock()
		queued := len(w.mu.queue) - w.mu.head
		w.mu.Unlock()
		if queued != 0 || f.host.Group(1).Status().Last != before {
			t.Fatal("a failed batch was answered")
		}
	})
}

// TestPassReadsItsShare: after a restart all groups have entries to apply, and a lagging
// follower needs entries. A pass reads its share of them, and other groups continue
// meanwhile.
func TestPassReadsItsShare(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, func(c *Config) { c.Workers, c.SleepAfter, c.passReadBytes = 1, -1, 4<<10 })
		r.walopt = func(o *wal.Options) { o.EntryCacheBytes = 1 }
		r.startAll()
		defer r.close()
		const groups = 4
		r.bootstrap(1, groups, voters(3))
		for g := keyspace.GroupID(1); g <= groups; g++ {
			r.leader(g)
		}
		f := r.nodes[3]
		f.crash(0)
		pad := strings.Repeat("p", 3<<10)
		for i := range 12 {
			for g := keyspace.GroupID(1); g <= groups; g++ {
				r.write(g, fmt.Sprint(i, " ", pad))
			}
		}
		for _, n := range []*testNode{r.nodes[1], r.nodes[2]} {
			n.crash(0)
			n.start()
		}
		f.start()
		for g := keyspace.GroupID(1); g <= groups; g++ {
			r.equal(g)
		}
		putOff := 0.0
		for _, n := range r.nodes {
			putOff += testutil.ToFloat64(n.host.m.logReadsDeferred)
		}
		if putOff == 0 {
			t.Error("no pass has put a read off")
		}
	})
}

// TestBadEntryStillRunsCallbacks: an entry of a later format ends the host's progress. Callbacks behind it still run, because callers wait for them.
func TestBadEntryStillRunsCallbacks(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 1, noSleep)
		r.startAll()
		r.bootstrap(1, 1, voters(1))
		r.write(1, "x")
		n := r.nodes[1]
		defer func() { n.crash(0); r.close() }()
		g := n.host.Group(1)
		var called atomic.Bool
		inWorker(g, func() {
			data, err := proto.Marshal(&pb.ConfChangeV2{Context: []byte{confContextVersion + 1}})
			r.must(err)
			bad := &pb.Entry{Index: ptr(g.applied + 1), Term: ptr(g.term), Type: pb.EntryConfChangeV2.Enum(), Data: data}
			g.w.schedule(g, applyTask{kind: taskEntries, msg: &pb.Message{Entries: []*pb.Entry{bad}, Responses: []*pb.Message{{}}}})
			g.w.schedule(g, applyTask{kind: taskCall, call: func() { called.Store(true) }})
		})
		<-n.host.Fatal()
		synctest.Wait()
		if !called.Load() {
			t.Error("a callback behind the bad entry was never called")
		}
	})
}

// TestMalformedConfChangeDoesNothing: a change of the configuration that cannot be decoded does
// nothing on any replica, also behind a crash, and the group and its members can be changed on.
func TestMalformedConfChangeDoesNothing(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, noSleep)
		defer r.close()
		r.startAll()
		r.bootstrap(1, 1, voters(3))
		r.write(1, "before")
		g := r.leader(1).host.Group(1)
		inWorker(g, func() {
			four := uint64(4)
			data, err := proto.Marshal(&pb.ConfChangeV2{
				Changes: []*pb.ConfChangeSingle{{Type: pb.ConfChangeAddLearnerNode.Enum(), NodeId: &four}},
				Context: []byte{confContextVersion, 1, 2},
			})
			r.must(err)
			r.must(g.rn.Step(&pb.Message{Type: pb.MsgProp.Enum(), Entries: []*pb.Entry{{Type: pb.EntryConfChangeV2.Enum(), Data: data}}}))
		})
		r.write(1, "behind")
		r.equal(1)
		for _, n := range r.nodes {
			if got := testutil.ToFloat64(n.host.m.refused); got != 1 {
				t.Errorf("node %s has refused %v entries", n.id, got)
			}
			if got := n.host.Group(1).Status().Replicas; !slices.Equal(got, voters(3)) {
				t.Errorf("node %s has the members %v", n.id, got)
			}
		}
		n := r.leader(1)
		n.crash(0)
		n.start()
		r.write(1, "again")
		r.equal(1)
		lead := r.leader(1).host.Group(1)
		if err := lead.ChangeConf(t.Context(), lead.Status().Term, []ConfChange{{AddLearner, 9, 9}}, nil); err != nil {
			t.Errorf("a change behind it: %v", err)
		}
	})
}
