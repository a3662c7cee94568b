package shard

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/rangeapi"
)

// anAttempt is that of the transactions that one test has alone.
var anAttempt = rangeapi.TxnName{TxnID: rangeapi.TxnID{Start: 300, Node: 0xabc, Boot: 0x0102030405060708, Counter: 4}, Attempt: 9}

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
		w.store.cfg.Txns = p
		w.seq.auto = true
		w.serve(1, 5)
		defer w.stop()
		do := func(op rangeapi.TxnCommand) rangeapi.TxnAnswer {
			var a rangeapi.TxnAnswer
			var err error
			done := make(chan struct{})
			go func() {
				defer close(done)
				a, err = w.store.Txn(t.Context(), 1, 1, op)
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
		r := w.store.Replica(1)
		held := func() int {
			r.mu.Lock()
			defer r.mu.Unlock()
			n, _ := r.locks.Len()
			return n
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
		if v, ok, err := mvcc.Get(w.engine, []byte("k"), 1000); !ok || v.Mod != 400 || err != nil || p.finished == 0 || !r.locks.Empty() {
			t.Fatalf("%+v %v, %d finished, %v", v, err, p.finished, &r.locks)
		}
		w.store.pushes.mu.Lock()
		defer w.store.pushes.mu.Unlock()
		if w.store.pushes.ticking {
			t.Fatal("it looks for locks though there are none")
		}
	})
}

// A committed transaction has its record in a range with other locks of it, because of a sweep or
// a merge. These locks end although the record's own end needs a range that nobody reaches.
func TestLocksBesideTheirRecordArePushed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &fakePusher{stuck: true}
		w := newFakeWorld(t)
		w.store.cfg.Txns = p
		w.seq.auto = true
		w.serve(1, 5)
		defer w.stop()
		do := func(op rangeapi.TxnCommand) rangeapi.TxnAnswer {
			t.Helper()
			done := make(chan rangeapi.TxnAnswer, 1)
			go func() {
				a, err := w.store.Txn(t.Context(), 1, 1, op)
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
		r := w.store.Replica(1)
		r.mu.Lock()
		defer r.mu.Unlock()
		if locks, records := r.locks.Len(); locks != 0 || records != 1 {
			t.Errorf("left are %d locks and %d records", locks, records)
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
