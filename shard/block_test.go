package shard

import (
	"bytes"
	"context"
	"errors"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"weak"

	"github.com/prometheus/client_golang/prometheus/testutil"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/transport"
)

// going is a request on its way.
type going struct {
	done   bool
	answer rangeapi.TxnAnswer
	err    error
}

// command sends a command and lets everything move that can.
func (w *fakeWorld) command(ctx context.Context, op rangeapi.TxnCommand) *going {
	g := &going{}
	go func() {
		g.answer, g.err = w.store.Txn(ctx, 1, 1, op)
		g.done = true
	}()
	w.settle()
	return g
}

// put is the same for a put of a client.
func (w *fakeWorld) put(ctx context.Context, key, value string) *going {
	g := &going{}
	go func() {
		_, g.err = w.store.Do(ctx, &rangeapi.Request{Range: 1, Generation: 1, Op: &pb.PutRequest{Key: []byte(key), Value: []byte(value)}})
		g.done = true
	}()
	w.settle()
	return g
}

// nameAged is the name of a transaction that is the younger the higher its age is.
func nameAged(age int) rangeapi.TxnName {
	return rangeapi.TxnName{TxnID: rangeapi.TxnID{Start: keyspace.Revision(age), Node: 1, Boot: 1, Counter: 1}, Attempt: uint64(age)}
}

func guardAt(keys ...string) (gs []rangeapi.Guard) {
	for _, k := range keys {
		gs = append(gs, rangeapi.Guard{Compare: &pb.Compare{Key: []byte(k), Target: pb.Compare_VERSION}})
	}
	return gs
}

func writeAt(keys ...string) (ws []rangeapi.Write) {
	for i, k := range keys {
		ws = append(ws, rangeapi.Write{Number: uint32(i + 1), Op: &pb.PutRequest{Key: []byte(k), Value: []byte("v")}})
	}
	return ws
}

// Transactions compare a key one after the other, so that it is always locked. A writer that
// came before them still gets the key: a client's put, an older transaction, and a transaction
// that waits for several keys in turn.
func TestComparesDoNotStarveWriters(t *testing.T) {
	for name, start := range map[string]func(w *fakeWorld) *going{
		"a put": func(w *fakeWorld) *going { return w.put(w.t.Context(), "k", "v") },
		"an older transaction": func(w *fakeWorld) *going {
			return w.command(w.t.Context(), &rangeapi.Prepare{Name: nameAged(1), Anchor: []byte("k"), Writes: writeAt("k")})
		},
		"an older transaction with two keys": func(w *fakeWorld) *going {
			return w.command(w.t.Context(), &rangeapi.Prepare{Name: nameAged(1), Anchor: []byte("j"), Writes: writeAt("j", "k")})
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newFakeWorld(t)
				w.seq.auto = true
				w.serve(1, 5)
				defer w.stop()
				keys := []string{"j", "k"}
				young := func(age int) *going {
					return w.command(t.Context(), &rangeapi.Prepare{Name: nameAged(age), Anchor: []byte("z"), WaitForOlder: true, Guards: guardAt(keys[age%2], "k")})
				}
				young(10)
				young(11)
				writer := start(w)
				if writer.done {
					t.Fatal("a writer did not wait for those who compare")
				}
				for age := 12; age < 20 && !writer.done; age++ {
					young(age)
					w.command(t.Context(), &rangeapi.Resolve{Name: nameAged(age - 2)})
				}
				if !writer.done || writer.err != nil {
					t.Errorf("a writer was kept out: %v", writer.err)
				}
				w.command(t.Context(), &rangeapi.Resolve{Name: nameAged(1)})
				if r := w.store.Replica(1); r.locks.Blocked() != 0 {
					t.Errorf("%d calls wait for nothing", r.locks.Blocked())
				}
			})
		})
	}
}

// A gateway's look at compares is no transaction of a client: it may have more operations.
func TestLooksAreWithinTheLimits(t *testing.T) {
	look := &pb.TxnRequest{}
	for range rangeapi.MaxReadOnlyCompares {
		get := []*pb.RequestOp{{Request: &pb.RequestOp_RequestRange{RequestRange: &pb.RangeRequest{Key: []byte("k"), CountOnly: true}}}}
		nested := &pb.TxnRequest{Compare: []*pb.Compare{guardAt("k")[0].Compare}, Success: get, Failure: get}
		look.Success = append(look.Success, &pb.RequestOp{Request: &pb.RequestOp_RequestTxn{RequestTxn: nested}})
	}
	limits := Limits{MaxTxnOps: 1}
	limits.fill()
	if err := rangeapi.CheckRequest(look, limits.MaxRequestBytes, limits.MaxTxnOps); err != nil {
		t.Errorf("a look: %v", err)
	}
	look.Success = append(look.Success, look.Success[0])
	if err := rangeapi.CheckRequest(look, limits.MaxRequestBytes, limits.MaxTxnOps); !errors.Is(err, kverror.TooManyOps) {
		t.Errorf("a larger one: %v", err)
	}
	put := &pb.RequestOp{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: []byte("k")}}}
	if err := rangeapi.CheckRequest(&pb.TxnRequest{Success: []*pb.RequestOp{put, put}}, limits.MaxRequestBytes, limits.MaxTxnOps); !errors.Is(err, kverror.TooManyOps) {
		t.Errorf("a transaction that writes: %v", err)
	}
}

// Commands that end locks are admitted though calls that wait for locks fill the node or the
// range. The calls that wait count like all others.
func TestLocksEndWhereNobodyIsAdmitted(t *testing.T) {
	for name, limits := range map[string]Limits{"node": {PendingBytes: 8 << 10}, "range": {RangePendingBytes: 8 << 10}} {
		for _, end := range []rangeapi.TxnCommand{
			&rangeapi.Resolve{Name: nameAged(1)}, &rangeapi.Decide{Name: nameAged(1), Anchor: []byte("k")},
			&rangeapi.Commit{Name: nameAged(1), Anchor: []byte("k"), Revision: 9},
		} {
			synctest.Test(t, func(t *testing.T) {
				w := newFakeWorldWith(t, limits)
				w.seq.auto, w.seq.last = true, 10
				w.serve(1, 5)
				defer w.stop()
				lock := w.command(t.Context(), &rangeapi.Prepare{Name: nameAged(1), Anchor: []byte("k"), Writes: writeAt("k")})
				var puts []*going
				for len(puts) < 100 && (len(puts) == 0 || !puts[len(puts)-1].done) {
					puts = append(puts, w.put(t.Context(), "k", "v"))
				}
				last := puts[len(puts)-1]
				if !errors.Is(last.err, kverror.TooManyRequests) || len(puts) < 4 {
					t.Fatalf("%s: %d puts, the last one %v", name, len(puts), last.err)
				}
				w.disk.mu.Lock()
				w.disk.overloaded = true
				w.disk.mu.Unlock()
				if c, ok := end.(*rangeapi.Commit); ok {
					c.AnchorLock = lock.answer.(*rangeapi.Prepared).Lock
				}
				if g := w.command(t.Context(), end); !g.done || g.err != nil {
					t.Errorf("%s: %T is held up: %v", name, end, g.err)
				}
				for i, g := range puts[:len(puts)-1] {
					if !g.done || g.err != nil {
						t.Errorf("%s: put %d: %v", name, i, g.err)
					}
				}
				r := w.store.Replica(1)
				if w.store.pipes.Budget.Pending() != 0 || w.store.pipes.Budget.Ending() != 0 || r.locks.BlockedBytes() != 0 || r.pipe.Status().QueuedBytes != 0 || r.locks.Blocked() != 0 {
					t.Errorf("%s: bytes are left over", name)
				}
			})
		}
	}
}

// A transaction gets the previous values of its keys within a bound. A larger one is refused
// before anything is locked. Until they are answered, the values count as read.
func TestPreviousValuesAreBounded(t *testing.T) {
	for name, ws := range map[string][]rangeapi.Write{
		"deletes": {{Number: 1, Op: &pb.DeleteRangeRequest{Key: []byte("a"), RangeEnd: []byte("z"), PrevKv: true}}},
		"puts": {
			{Number: 1, Op: &pb.PutRequest{Key: []byte("a"), PrevKv: true}},
			{Number: 2, Op: &pb.PutRequest{Key: []byte("b"), PrevKv: true}},
			{Number: 3, Op: &pb.PutRequest{Key: []byte("c"), IgnoreValue: true}},
		},
	} {
		for _, sweep := range []bool{false, true} {
			synctest.Test(t, func(t *testing.T) {
				limits := Limits{PrevBytes: 2500}
				if sweep {
					limits.MaxEntryBytes = 2000
				}
				w := newFakeWorldWith(t, limits)
				w.seq.auto = true
				w.serve(1, 5)
				defer w.stop()
				for _, k := range []string{"a", "b"} {
					w.put(t.Context(), k, strings.Repeat("v", 1000))
				}
				prepare := func(age int) *going {
					return w.command(t.Context(), &rangeapi.Prepare{Name: nameAged(age), Anchor: []byte("k"), Writes: ws})
				}
				w.put(t.Context(), "c", "v")
				if g := prepare(1); g.err != nil || !g.answer.(*rangeapi.Prepared).Held {
					t.Errorf("%s within the bound: %+v", name, g)
				}
				w.command(t.Context(), &rangeapi.Resolve{Name: nameAged(1)})
				w.put(t.Context(), "c", strings.Repeat("v", 1000))
				if g := prepare(2); !errors.Is(g.err, kverror.RequestTooLarge) {
					t.Errorf("%s beyond the bound: %+v", name, g)
				}
				r := w.store.Replica(1)
				if !r.locks.Empty() || w.store.reads.Held() != 0 {
					t.Errorf("%s: locks %v, %d bytes are read", name, &r.locks, w.store.reads.Held())
				}
				w.put(t.Context(), "c", "v")
				w.seq.auto = false
				w.put(t.Context(), "x", "v") // commands that come behind it wait for its revision
				g := prepare(3)
				if g.done || w.store.reads.Held() == 0 {
					t.Errorf("%s under way: %t, %d bytes are read", name, g.done, w.store.reads.Held())
				}
				w.seq.auto = true
				w.seq.answer(0, nil)
				w.settle()
				if !g.done || g.err != nil || w.store.reads.Held() != 0 {
					t.Errorf("%s: %+v, %d bytes are read", name, g, w.store.reads.Held())
				}
			})
		}
	}
}

// A lock does not keep the memory of its entry, which may be large. The cache of newest versions
// does not keep the memory of the lock.
func TestLocksOutliveTheirEntriesAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeWorld(t)
		w.seq.auto, w.seq.last = true, 400
		w.serve(1, 5)
		defer w.stop()
		prepare := func(age int, a, b string) {
			ws := writeAt(a, b)
			ws[1].Op.(*pb.PutRequest).Value = bytes.Repeat([]byte("v"), 100<<10)
			_, _ = w.store.Txn(t.Context(), 1, 1, &rangeapi.Prepare{Name: nameAged(age), Anchor: []byte(a), Writes: ws})
		}
		release := w.store.pipes.Pool.Hold()
		go prepare(1, "a", "b")
		go prepare(2, "c", "d")
		synctest.Wait()
		release()
		w.settle()
		r := w.store.Replica(1)
		freed := func(age int, rev keyspace.Revision) bool {
			r.mu.Lock()
			large := weak.Make(&r.locks.Named(nameAged(age))[0].Writes[1].V.Value[0])
			r.mu.Unlock()
			if g := w.command(t.Context(), &rangeapi.Resolve{Name: nameAged(age), Revision: rev}); g.err != nil {
				t.Fatal(g.err)
			}
			runtime.GC()
			return large.Value() == nil
		}
		if !freed(1, 0) {
			t.Error("a lock keeps what another one has brought")
		}
		if !freed(2, 500) {
			t.Error("the cache of newest versions keeps a lock")
		}
		if h, ok := w.store.cache.Get(r.epochs.Of([]byte("c")), []byte("c")); !ok || !h.Whole || string(h.Value) != "v" {
			t.Errorf("remembered %+v", h)
		}
	})
}

// A compacted revision cannot be pinned: a client that asks for it again and again would keep
// the range from compacting.
func TestCompactedRevisionsAreNotPinned(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeWorld(t)
		w.seq.auto, w.seq.last = true, 400
		w.serve(1, 5)
		defer w.stop()
		w.store.observe(keyspace.SequenceAnswer{Current: 400, Compacted: 300})
		r := w.store.Replica(1)
		for at, want := range map[keyspace.Revision]error{299: kverror.Compacted, 1: kverror.Compacted, -5: kverror.Compacted, 300: nil, 0: nil} {
			g := w.command(t.Context(), &rangeapi.Prepare{Name: nameAged(1), Anchor: []byte("k"), Pin: true, PinAt: at})
			if !errors.Is(g.err, want) {
				t.Errorf("a pin at %d: %v, want %v", at, g.err, want)
			}
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		if low := r.keepLocked(1000); low != 300 {
			t.Errorf("compaction is held back at %d", low)
		}
	})
}

// A leader that begins with an old lock compacts once that has ended, though nobody tells
// it of the cluster's compaction any more.
func TestNewLeaderCompactsBehindAnOldLock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeWorld(t)
		w.seq.auto, w.seq.last = true, 200
		w.serve(1, 5)
		defer w.stop()
		w.put(t.Context(), "a", "v")
		w.command(t.Context(), &rangeapi.Prepare{Name: nameAged(1), Anchor: []byte("k"), Writes: writeAt("k")})
		w.seq.last = 400
		w.put(t.Context(), "a", "v")
		wait := func() {
			for range 4 {
				time.Sleep(maintenanceRetry)
				w.settle()
			}
		}
		w.store.observe(keyspace.SequenceAnswer{Current: 401, Compacted: 300})
		wait()
		w.groups.group(1).lead(raftgroup.LeaderState{Term: 6, Leader: 2, LeaderNode: 2})
		wait()
		w.serve(1, 7)
		wait()
		if r := w.store.Replica(1); r.Show().Compacted >= 300 {
			t.Fatal("the lock does not hold compaction back")
		}
		w.command(t.Context(), &rangeapi.Resolve{Name: nameAged(1)})
		wait()
		if c := w.store.Replica(1).Show().Compacted; c != 300 {
			t.Errorf("compacted to %d", c)
		}
	})
}

// A command with an impossible revision is refused before it is in the log, where it would stop
// every replica.
func TestCommandsAtWrongRevisionsAreRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeWorld(t)
		w.seq.auto, w.seq.last = true, 200
		w.serve(1, 5)
		defer w.stop()
		w.put(t.Context(), "k", "v") // at 201
		r := w.store.Replica(1)
		name := nameAged(1)
		g := w.command(t.Context(), &rangeapi.Prepare{Name: name, Anchor: []byte("k"), Writes: writeAt("k")})
		id := g.answer.(*rangeapi.Prepared).Lock
		r.mu.Lock()
		r.locks.Find(name, id).Floor = 100 // it was evaluated where nobody had heard of 201
		r.mu.Unlock()
		for _, rev := range []keyspace.Revision{100, 150, -1} {
			for _, op := range []rangeapi.TxnCommand{
				&rangeapi.Commit{Name: name, Anchor: []byte("k"), AnchorLock: id, Revision: rev}, &rangeapi.Resolve{Name: name, Lock: id, Revision: rev},
			} {
				if g := w.command(t.Context(), op); !errors.Is(g.err, kverror.Internal) {
					t.Errorf("%T at %d: %+v", op, rev, g)
				}
			}
		}
		if g := w.command(t.Context(), &rangeapi.Commit{Name: name, Anchor: []byte("k"), AnchorLock: id, Revision: 300}); g.err != nil {
			t.Fatal(g.err)
		}
		if g := w.command(t.Context(), &rangeapi.Commit{Name: name, Anchor: []byte("k"), AnchorLock: id, Revision: 301}); !errors.Is(g.err, kverror.Internal) {
			t.Errorf("a second commit: %+v", g)
		}
	})
}

// busBetween is a bus that leads to one node.
type busBetween map[transport.Method]transport.CallHandler

func (b busBetween) HandleCall(m transport.Method, _ transport.Class, h transport.CallHandler) {
	b[m] = h
}

func (b busBetween) HandleStream(transport.Method, transport.Class, transport.StreamHandler) {}

func (b busBetween) OpenStream(context.Context, keyspace.NodeID, transport.Method, []byte) (transport.Stream, error) {
	return nil, transport.ErrUnreachable
}

func (b busBetween) Call(ctx context.Context, _ keyspace.NodeID, m transport.Method, payload []byte) ([]byte, error) {
	return b[m](ctx, 2, payload)
}

// Commands that end locks have their own method on the bus. The bus bounds the calls of each
// method, and calls that wait for locks may reach the bound.
func TestCommandsThatEndLocksComeApart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeWorld(t)
		w.seq.auto = true
		w.serve(1, 5)
		defer w.stop()
		bus, name := busBetween{}, nameAged(1)
		w.store.RegisterHandlers(bus)
		client := rangeapi.NewClient(2, nil, bus)
		for _, op := range []rangeapi.TxnCommand{
			&rangeapi.Prepare{Name: name, Anchor: []byte("k"), Pin: true}, &rangeapi.Commit{Name: name, Anchor: []byte("k"), Revision: 5}, &rangeapi.Resolve{Name: name},
			&rangeapi.Decide{Name: name, Anchor: []byte("k")}, &rangeapi.Forget{Name: name, Anchor: []byte("k")},
		} {
			way, other := transport.MethodShardTxnEnd, transport.MethodShardTxn
			if op.Kind() == rangeapi.TxnPrepare {
				way, other = other, way
			}
			handler := bus[other]
			delete(bus, other)
			var err error
			go func() { _, err = client.Txn(t.Context(), 1, 1, 1, op) }()
			w.settle()
			if err != nil {
				t.Errorf("%T by %s: %v", op, way, err)
			}
			b, err := rangeapi.AppendTxnCommand(nil, 1, 1, op)
			if err != nil {
				t.Fatal(err)
			}
			b, err = handler(t.Context(), 2, b)
			if err != nil {
				t.Fatal(err)
			}
			if _, failed, err := rangeapi.DecodeTxnAnswer(b); err != nil || !errors.Is(failed, kverror.BadRequest) {
				t.Errorf("%T by %s: %v, %v", op, other, failed, err)
			}
			bus[other] = handler
		}
	})
}

// A revision that was not allocated is not believed, whoever names it: it would be the
// node's floor, or the range's last revision, for ever. One that is only new here is.
func TestRevisionsAreNotBelievedFarAhead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeWorld(t)
		w.seq.auto, w.seq.last = true, 200
		w.serve(1, 5)
		defer w.stop()
		far := nameAged(int(farRevision))
		read := func(rev keyspace.Revision) *going {
			g := &going{}
			go func() {
				_, g.err = w.store.Do(t.Context(), &rangeapi.Request{Range: 1, Generation: 1, ReadRevision: rev, Op: &pb.RangeRequest{Key: []byte("a")}})
				g.done = true
			}()
			w.settle()
			return g
		}
		lock := w.command(t.Context(), &rangeapi.Prepare{Name: nameAged(1), Anchor: []byte("k"), Writes: writeAt("k")}).answer.(*rangeapi.Prepared).Lock
		for name, send := range map[string]func() *going{
			"a read": func() *going { return read(farRevision) },
			"a prepare": func() *going {
				return w.command(t.Context(), &rangeapi.Prepare{Name: far, Anchor: []byte("z"), Writes: writeAt("z")})
			},
			"a commit": func() *going {
				return w.command(t.Context(), &rangeapi.Commit{Name: nameAged(1), Anchor: []byte("k"), AnchorLock: lock, Revision: farRevision})
			},
			"a resolution": func() *going {
				return w.command(t.Context(), &rangeapi.Resolve{Name: nameAged(1), Lock: lock, Revision: farRevision})
			},
			"a question": func() *going {
				g := &going{done: true}
				_, g.err = w.store.Client().AwaitResolved(t.Context(), 1, &rangeapi.ResolvedRequest{Range: 1, Generation: 1, Revision: farRevision})
				return g
			},
			"a decision": func() *going {
				return w.command(t.Context(), &rangeapi.Decide{Name: rangeapi.TxnName{TxnID: nameAged(9).TxnID, Attempt: rangeapi.MaxAttempt - 1}, Anchor: []byte("k")})
			},
		} {
			if g := send(); !g.done || !errors.Is(g.err, kverror.Internal) {
				t.Errorf("%s: %+v", name, g)
			}
		}
		r := w.store.Replica(1)
		if f := w.store.Floor(); f != 200 || r.fence != 0 {
			t.Errorf("floor %d, fence %d", f, r.fence)
		}
		w.seq.last = 200 + 2*maxAhead
		if g := read(w.seq.last - 1); !g.done || g.err != nil {
			t.Errorf("a read at a revision that is new: %+v", g)
		}
		if g := w.command(t.Context(), &rangeapi.Commit{Name: nameAged(1), Anchor: []byte("k"), AnchorLock: lock, Revision: w.seq.last}); !g.done || g.err != nil {
			t.Errorf("a commit at a revision that is new: %+v", g)
		}
	})
}

// farRevision is a revision that a decoder takes and no test allocates.
const farRevision = keyspace.MaxRevision - 2

// The end of a lock wakes only the calls that can go on, so it costs no more than those. They go
// on in the order in which they came, whatever they are.
func TestWaitersAreNotAllWoken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeWorld(t)
		w.seq.auto, w.seq.last = true, 400
		w.serve(1, 5)
		defer w.stop()
		const n = 60
		prepare := func(age int, key string) *going {
			return w.command(t.Context(), &rangeapi.Prepare{Name: nameAged(age), Anchor: []byte(key), WaitForOlder: true, Guards: guardAt(key), Writes: writeAt(key)})
		}
		all := []*going{prepare(1, "k")}
		for age := 2; age <= n; age++ {
			if age%6 == 0 {
				all = append(all, w.put(t.Context(), "k", "v"))
				continue
			}
			all = append(all, prepare(age, "k"))
		}
		other := prepare(n+1, "other")
		waits := testutil.ToFloat64(w.store.metrics.pipeline.LockWaits)
		for age := 1; age <= n; age++ {
			// Behind a put, which holds nothing, the next one goes with it.
			gone := 0
			for gone < n && all[gone].done {
				gone++
			}
			if want := min(n, age+1-min(age%6, 1)); gone != want {
				t.Fatalf("before the end of lock %d the first %d are through", age, gone)
			}
			if slices.ContainsFunc(all[gone:], func(g *going) bool { return g.done }) {
				t.Fatalf("before the end of lock %d others than the first %d are through", age, gone)
			}
			w.command(t.Context(), &rangeapi.Resolve{Name: nameAged(age)})
		}
		for i, g := range all {
			if !g.done || g.err != nil {
				t.Errorf("%d: %+v", i, g)
			}
		}
		r := w.store.Replica(1)
		if again := testutil.ToFloat64(w.store.metrics.pipeline.LockWaits) - waits; again > n {
			t.Errorf("%d calls that wait were looked at %v times", n, again)
		}
		if !other.done || r.locks.Blocked() != 0 || r.locks.HasWoken() || r.locks.BlockedBytes() != 0 {
			t.Errorf("left over: %d blocked, woken %t", r.locks.Blocked(), r.locks.HasWoken())
		}
	})
}
