package shard

import (
	"bytes"
	"context"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/command"
)

// The lock table is compared with a list of everything that is held.
// anAttempt is that of the transactions that one test has alone.
var anAttempt = rangeapi.TxnName{TxnID: rangeapi.TxnID{Start: 300, Node: 0xabc, Boot: 0x0102030405060708, Counter: 4}, Attempt: 9}

func TestLockTableEqualsAList(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	var total atomic.Int64
	table := newLockTable(&total)
	var all []*held
	key := func() []byte { return []byte{byte('a' + rng.IntN(6))} }
	span := func() keyspace.Span {
		a, b := key(), key()
		switch {
		case rng.IntN(2) == 0:
			return keyspace.Single(a)
		case bytes.Compare(a, b) < 0:
			return keyspace.Span{Start: a, End: b}
		}
		return keyspace.Span{Start: a}
	}
	for step := range 5000 {
		if len(all) > 0 && rng.IntN(2) == 0 {
			i := rng.IntN(len(all))
			table.remove(all[i])
			all = slices.Delete(all, i, i+1)
		} else if len(all) < 12 {
			l := &command.Lock{ID: rangeapi.LockID{Range: keyspace.RangeID(step)}, Floor: keyspace.Revision(rng.IntN(10))}
			l.Name.Counter = uint64(rng.IntN(4))
			for range 1 + rng.IntN(3) {
				l.Spans = append(l.Spans, command.LockSpan{Span: span(), Mode: command.LockMode(rng.IntN(3))})
			}
			all = append(all, &held{Lock: l})
			table.add(all[len(all)-1])
		}
		s, self, at := span(), rangeapi.TxnName{TxnID: rangeapi.TxnID{Counter: uint64(rng.IntN(4))}}, keyspace.Revision(rng.IntN(10))
		writes := rng.IntN(2) == 0
		conflict, reader := false, false
		for _, h := range all {
			for _, p := range h.Spans {
				if p.Span.Overlaps(s) && h.Name != self {
					conflict = conflict || writes || p.Mode != command.Shared
					reader = reader || p.Mode != command.Shared && h.Floor < at
				}
			}
		}
		if got := table.conflict(s, writes, self); (got.h != nil) != conflict {
			t.Fatalf("step %d: conflict %v at %s, want %t", step, got, s, conflict)
		}
		if got := table.reader(s, at, self); (got != nil) != reader {
			t.Fatalf("step %d: reader %v at %s, want %t", step, got, s, reader)
		}
	}
	for _, h := range all {
		table.remove(h)
	}
	if !table.empty() || table.pieces.keys.Len() != 0 || len(table.pieces.spans) != 0 || total.Load() != 0 {
		t.Fatalf("left over: %+v", table)
	}
}

// Changes of the live-key count that come late are counted at the revision that they
// have.
func TestLateChangesOfTheCount(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	var l liveCounter
	changes := map[keyspace.Revision]int64{}
	var late []delta
	var live int64
	rev := keyspace.Revision(1)
	for step := range 8000 {
		var d []delta
		for range rng.IntN(3) {
			rev++
			d = append(d, delta{rev, rng.Int64N(5) - 2})
			if rng.IntN(4) == 0 {
				late = append(late, d[len(d)-1])
				d = d[:len(d)-1]
			}
		}
		if len(late) > 0 && rng.IntN(3) == 0 {
			i := rng.IntN(len(late))
			d = append(d, late[i])
			late = slices.Delete(late, i, i+1)
		}
		for _, x := range d {
			changes[x.rev] += x.n
			live += x.n
		}
		l.apply(d)
		if step%16 != 0 {
			continue
		}
		at := max(1, rev-keyspace.Revision(rng.IntN(2000)))
		got, ok := l.at(at, live)
		want := int64(0)
		for r, n := range changes {
			if r <= at {
				want += n
			}
		}
		if ok && got != want {
			t.Fatalf("step %d: %d at %d, want %d", step, got, at, want)
		}
	}
	if len(l.deltas) > maxDeltas {
		t.Fatalf("%d changes are kept", len(l.deltas))
	}
}

// fakePusher answers pushes by a table.
type fakePusher struct {
	mu       sync.Mutex
	live     bool
	decided  *rangeapi.Decided
	pushed   int
	finished int
	// stuck says that no attempt can be finished, since a range of it has no leader.
	stuck bool
	// reads answers whether transactions read below a revision; nil is that none does.
	reads func(below keyspace.Revision) (bool, error)
}

func (p *fakePusher) Reads(_ context.Context, below keyspace.Revision) (bool, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.reads == nil {
		return false, nil
	}
	return p.reads(below)
}

func (p *fakePusher) Push(context.Context, rangeapi.TxnName, []byte) (bool, *rangeapi.Decided, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.pushed++
	return p.live, p.decided, nil
}

func (p *fakePusher) Finish(context.Context, rangeapi.TxnName, *rangeapi.Decided) (bool, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.finished++
	if p.stuck {
		return false, kverror.NoLeader
	}
	return p.live, nil
}

// Whoever leads asks for what became of old locks: nobody needs to meet them. One of a
// transaction whose coordinator is at it stays, one that the record does not list is
// aborted (trap 66).
func TestOldLocksArePushed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &fakePusher{live: true}
		w := newFakeWorld(t)
		w.node.cfg.Txns = p
		w.seq.auto = true
		w.serve(1, 5)
		defer w.stop()
		do := func(op rangeapi.TxnOp) rangeapi.TxnAnswer {
			var a rangeapi.TxnAnswer
			var err error
			done := make(chan struct{})
			go func() {
				defer close(done)
				a, err = w.node.Txn(t.Context(), 1, 1, op)
			}()
			w.settle()
			<-done
			if err != nil {
				t.Fatal(err)
			}
			return a
		}
		put := []rangeapi.Write{{Number: 1, Op: &pb.PutRequest{Key: []byte("k"), Value: []byte("v")}}}
		do(&rangeapi.Prepare{Name: anAttempt, Anchor: []byte("k"), Writes: put})
		r := w.node.Replica(1)
		held := func() int {
			r.mu.Lock()
			defer r.mu.Unlock()
			if r.locks == nil {
				return 0
			}
			return len(r.locks.all)
		}
		time.Sleep(5 * time.Second)
		w.settle()
		if p.pushed < 3 || held() != 1 {
			t.Fatalf("%d pushes, %d locks", p.pushed, held())
		}
		p.mu.Lock()
		p.live, p.decided = false, &rangeapi.Decided{Revision: 400, Locks: []rangeapi.LockRef{{ID: rangeapi.LockID{Range: 99}}}}
		p.mu.Unlock()
		for range 8 {
			time.Sleep(pushTick)
			w.settle()
		}
		if v, ok, err := mvcc.Get(w.engine, []byte("k"), 1000); ok || err != nil || held() != 0 {
			t.Fatalf("%+v %v, %d locks", v, err, held())
		}
		other := anAttempt
		other.Attempt++
		lock := do(&rangeapi.Prepare{Name: other, Anchor: []byte("k"), Writes: put}).(*rangeapi.Prepared).Lock
		w.seq.mu.Lock()
		w.seq.last = 400
		w.seq.mu.Unlock()
		do(&rangeapi.Commit{Name: other, Anchor: []byte("k"), AnchorLock: lock, Revision: 400, Locks: []rangeapi.LockRef{{ID: lock}}})
		for range 20 {
			time.Sleep(pushTick)
			w.settle()
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		if v, ok, err := mvcc.Get(w.engine, []byte("k"), 1000); !ok || v.Mod != 400 || err != nil || p.finished == 0 || r.locks != nil {
			t.Fatalf("%+v %v, %d finished, %v", v, err, p.finished, r.locks)
		}
		w.node.pushes.mu.Lock()
		defer w.node.pushes.mu.Unlock()
		if w.node.pushes.ticking {
			t.Fatal("it looks for locks though there are none")
		}
	})
}

// A transaction that is committed has its record in a range that holds other locks of it, as
// one that sweeps or one that came of a merge. They are ended though the record's own end
// hangs on a range that nobody reaches.
func TestLocksBesideTheirRecordArePushed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &fakePusher{stuck: true}
		w := newFakeWorld(t)
		w.node.cfg.Txns = p
		w.seq.auto = true
		w.serve(1, 5)
		defer w.stop()
		do := func(op rangeapi.TxnOp) rangeapi.TxnAnswer {
			t.Helper()
			done := make(chan rangeapi.TxnAnswer, 1)
			go func() {
				a, err := w.node.Txn(t.Context(), 1, 1, op)
				if err != nil {
					t.Error(err)
				}
				done <- a
			}()
			w.settle()
			return <-done
		}
		lock := func(key string) rangeapi.LockID {
			put := []rangeapi.Write{{Number: 1, Op: &pb.PutRequest{Key: []byte(key), Value: []byte("v")}}}
			return do(&rangeapi.Prepare{Name: anAttempt, Anchor: []byte("k"), Writes: put}).(*rangeapi.Prepared).Lock
		}
		anchor, other := lock("k"), lock("o")
		w.seq.mu.Lock()
		w.seq.last = 400
		w.seq.mu.Unlock()
		all := []rangeapi.LockRef{{ID: rangeapi.LockID{Range: 99}}, {ID: anchor}, {ID: other}}
		p.decided = &rangeapi.Decided{Revision: 400, Locks: all}
		do(&rangeapi.Commit{Name: anAttempt, Anchor: []byte("k"), AnchorLock: anchor, Revision: 400, Locks: all})
		for range 20 {
			time.Sleep(pushTick)
			w.settle()
		}
		if v, ok, err := mvcc.Get(w.engine, []byte("o"), 1000); !ok || v.Mod != 400 || err != nil {
			t.Errorf("%+v %t %v", v, ok, err)
		}
		r := w.node.Replica(1)
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.locks == nil || len(r.locks.all) != 0 || len(r.locks.records) != 1 {
			t.Errorf("left are %+v", r.locks)
		}
	})
}

// settle commits what is proposed until nothing moves.
func (w *fakeWorld) settle() {
	g := w.groups.group(1)
	for synctest.Wait(); ; synctest.Wait() {
		g.mu.Lock()
		n := len(g.log)
		g.mu.Unlock()
		if n == 0 {
			return
		}
		e := g.take(0)
		if err := g.apply(entryOf(e)); err != nil {
			w.t.Fatal(err)
		}
	}
}
