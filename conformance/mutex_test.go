package conformance

import (
	"context"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
)

const (
	lockers  = 12
	lockings = 12 // of each
	// Once in so many times a holder's session ends instead of an unlock.
	deaths = 5
)

// sessionKey is the key of a session below a prefix, in package concurrency's form.
func sessionKey(prefix string, s *concurrency.Session) string {
	return fmt.Sprintf("%s/%x", prefix, s.Lease())
}

// critical is a section that only one client may be in at a time.
type critical struct {
	holder atomic.Int64
	// token is the fencing revision of the last holder. Of the holder.
	token int64
	// entered counts. Of the holder.
	entered int
}

// enter checks that nobody else is in, and that the revision is above all before.
func (c *critical) enter(t *testing.T, who int, token int64) {
	t.Helper()
	if !c.holder.CompareAndSwap(0, int64(who)) {
		t.Errorf("%d enters while %d is in", who, c.holder.Load())
	}
	if token <= c.token {
		t.Errorf("%d enters with revision %d after %d", who, token, c.token)
	}
	c.token = token
	c.entered++
}

func (c *critical) leave(t *testing.T, who int) {
	t.Helper()
	if !c.holder.CompareAndSwap(int64(who), 0) {
		t.Errorf("%d leaves, but %d is in", who, c.holder.Load())
	}
}

// Mutual exclusion is checked by a shared counter that everybody reads and writes in
// turn, by the holders' fencing revisions, and by what clients in one process see of
// each other.
func TestMutex(t *testing.T) {
	t.Parallel()
	r, ctx := newRig(t, lockers)
	var in critical
	var workers sync.WaitGroup
	for i, client := range r.clients {
		workers.Go(func() {
			s := r.session(t, client, "lock")
			for n := 0; n < lockings && s != nil && ctx.Err() == nil; n++ {
				dies := (i+n)%deaths == 0
				lockOnce(ctx, t, &in, s, i+1, dies)
				if dies {
					s = r.session(t, client, "lock")
				}
			}
			if s != nil {
				s.Close()
			}
		})
	}
	workers.Wait()
	if in.entered != lockers*lockings {
		t.Errorf("the lock was held %d times of %d", in.entered, lockers*lockings)
	}
	if n, err := count(ctx, r.clients[0]); err != nil || n != in.entered {
		t.Errorf("the counter is %d, %v; the lock was held %d times", n, err, in.entered)
	}
	if got, err := r.clients[0].Get(ctx, "lock/", clientv3.WithPrefix()); err != nil || got.Count != 0 {
		t.Errorf("%v keys are left, %v", got, err)
	}
	if r.splits.Load() < lockers {
		t.Errorf("only %d splits", r.splits.Load())
	}
	t.Logf("held %d times, %d splits", in.entered, r.splits.Load())
}

// lockOnce takes the lock, counts, and unlocks it or dies.
func lockOnce(ctx context.Context, t *testing.T, in *critical, s *concurrency.Session, who int, dies bool) {
	t.Helper()
	m := concurrency.NewMutex(s, "lock")
	if err := m.Lock(ctx); err != nil {
		t.Errorf("%d: lock: %v", who, err)
		return
	}
	client := s.Client()
	mine, err := client.Get(ctx, m.Key())
	if err != nil || len(mine.Kvs) != 1 {
		t.Errorf("%d holds the lock without a key: %v, %v", who, mine, err)
		return
	}
	in.enter(t, who, mine.Kvs[0].CreateRevision)
	n, err := count(ctx, client)
	if err == nil {
		err = add(ctx, client, m, n+1)
	}
	if err != nil {
		t.Errorf("%d: count: %v", who, err)
	}
	in.leave(t, who)
	if !dies {
		err = m.Unlock(ctx)
	} else {
		err = s.Close()
	}
	if err != nil {
		t.Errorf("%d: give back: %v", who, err)
	}
	if err := add(ctx, client, m, -1); err == nil {
		t.Errorf("%d wrote under a lock that it had given back", who)
	}
}

// count reads the shared counter.
func count(ctx context.Context, client *clientv3.Client) (int, error) {
	got, err := client.Get(ctx, "counter")
	if err != nil || len(got.Kvs) == 0 {
		return 0, err
	}
	return strconv.Atoi(string(got.Kvs[0].Value))
}

// add sets the shared counter if the lock is held.
func add(ctx context.Context, client *clientv3.Client, m *concurrency.Mutex, n int) error {
	resp, err := client.Txn(ctx).If(m.IsOwner()).Then(clientv3.OpPut("counter", strconv.Itoa(n))).Commit()
	if err == nil && !resp.Succeeded {
		err = fmt.Errorf("the lock is lost at revision %d", resp.Header.Revision)
	}
	return err
}

// A holder that dies silently holds the lock as long as its lease, and no longer. By
// then the waiting client's key is in another range.
func TestMutexOfADeadHolder(t *testing.T) {
	t.Parallel()
	r, ctx := newRig(t, 2)
	// The servers extend it to what their elections demand.
	dead, err := concurrency.NewSession(r.clients[0], concurrency.WithTTL(1))
	if err != nil {
		t.Fatal(err)
	}
	m := concurrency.NewMutex(dead, "lock")
	if err := m.Lock(ctx); err != nil {
		t.Fatal(err)
	}
	dead.Orphan()
	began := time.Now() // taken before the question, whose answer may take its time
	ttl, err := r.clients[1].TimeToLive(ctx, dead.Lease())
	if err != nil || ttl.TTL < 1 {
		t.Fatalf("%+v, %v", ttl, err)
	}
	s := r.session(t, r.clients[1], "lock")
	next := concurrency.NewMutex(s, "lock")
	if err := next.Lock(ctx); err != nil {
		t.Fatal(err)
	}
	// TTL is in whole seconds, rounded down: the lease had at least that long left.
	if took := time.Since(began); took < time.Duration(ttl.TTL-1)*time.Second {
		t.Errorf("the next one had the lock %v after a lease had %d s to go", took, ttl.TTL)
	}
	if err := add(ctx, r.clients[0], m, 1); err == nil {
		t.Error("the dead one wrote under its lock")
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}
