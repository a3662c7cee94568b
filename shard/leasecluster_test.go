package shard

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
)

// rigLeases has the records of leases for all nodes. Its answers take a moment, and wait
// while the lease is being revoked.
type rigLeases struct {
	wg sync.WaitGroup
	mu sync.Mutex
	// Guarded by mu.
	rng     *rand.Rand
	last    keyspace.LeaseIncarnation
	records map[keyspace.LeaseID]*rigLease
	changed chan struct{}
}

type rigLease struct {
	incarnation keyspace.LeaseIncarnation
	revoking    bool
}

func newRigLeases(seed uint64) *rigLeases {
	return &rigLeases{rng: rand.New(rand.NewPCG(seed, 5)), records: map[keyspace.LeaseID]*rigLease{}, changed: make(chan struct{})}
}

func (f *rigLeases) changedLocked() {
	close(f.changed)
	f.changed = make(chan struct{})
}

func (f *rigLeases) Register(lease keyspace.LeaseID, _ keyspace.Span, done func(keyspace.LeaseRegistration, error)) {
	f.mu.Lock()
	there, back := time.Duration(f.rng.Int64N(int64(5*time.Millisecond))), time.Duration(f.rng.Int64N(int64(30*time.Millisecond)))
	fails := f.rng.IntN(20) == 0
	f.mu.Unlock()
	f.wg.Go(func() {
		time.Sleep(there)
		f.mu.Lock()
		for f.records[lease] != nil && f.records[lease].revoking {
			ch := f.changed
			f.mu.Unlock()
			<-ch
			f.mu.Lock()
		}
		var err error = kverror.LeaseNotFound
		var got keyspace.LeaseRegistration
		if rec := f.records[lease]; rec != nil {
			got.Incarnation, err = rec.incarnation, nil
		}
		f.mu.Unlock()
		if fails {
			err = kverror.New(kverror.Timeout, "placement is away")
		}
		time.Sleep(back)
		done(got, err)
	})
}

func (f *rigLeases) grant(lease keyspace.LeaseID) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.last++
	f.records[lease] = &rigLease{incarnation: f.last}
}

// revoking locks the record, and ended removes it.
func (f *rigLeases) revoking(lease keyspace.LeaseID) keyspace.LeaseIncarnation {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.records[lease].revoking = true
	return f.records[lease].incarnation
}

func (f *rigLeases) ended(lease keyspace.LeaseID) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.records, lease)
	f.changedLocked()
}

// command takes a command at the range that holds the key, again until it is answered.
func (r *rig) command(ctx context.Context, key string, op rangeapi.TxnCommand) (rangeapi.TxnAnswer, keyspace.Descriptor, error) {
	for ctx.Err() == nil {
		d, leaders := r.route([]byte(key))
		for _, n := range leaders {
			s := n.node.Load()
			if s == nil {
				continue
			}
			a, err := s.Txn(ctx, d.Range, d.Generation, op)
			if err == nil {
				return a, d, nil
			}
			if errors.Is(err, kverror.Conflict) {
				return nil, d, err
			}
		}
		time.Sleep(10 * time.Millisecond)
	}
	return nil, keyspace.Descriptor{}, ctx.Err()
}

// eachRange calls f with the first key of every range.
func (r *rig) eachRange(f func(key string) (keyspace.Descriptor, error)) error {
	for key := "\x00"; ; {
		d, err := f(key)
		if err != nil {
			return err
		}
		if len(d.Span.End) == 0 {
			return nil
		}
		key = string(d.Span.End)
	}
}

// revokeApart revokes a lease range by range.
func (r *rig) revokeApart(ctx context.Context, lease keyspace.LeaseID, i keyspace.LeaseIncarnation) error {
	return r.eachRange(func(key string) (keyspace.Descriptor, error) {
		_, d, err := r.command(ctx, key, &rangeapi.Revoke{Lease: lease, Incarnation: i})
		return d, err
	})
}

// revokeTogether revokes a lease in all ranges at one revision.
func (r *rig) revokeTogether(ctx context.Context, lease keyspace.LeaseID, i keyspace.LeaseIncarnation, name rangeapi.TxnName) error {
	resolve := func(op *rangeapi.Resolve, span keyspace.Span) error {
		return r.eachRange(func(key string) (keyspace.Descriptor, error) {
			if d, nodes := r.route([]byte(key)); len(nodes) > 0 {
				if _, meets := d.Span.Intersect(span); !meets {
					return d, nil
				}
			}
			for {
				a, d, err := r.command(ctx, key, op)
				if err != nil || !a.(*rangeapi.Resolved).More {
					return d, err
				}
			}
		})
	}
	for ctx.Err() == nil {
		name.Attempt++
		changes := false
		var locks []rangeapi.LockRef
		err := r.eachRange(func(key string) (keyspace.Descriptor, error) {
			a, d, err := r.command(ctx, key, &rangeapi.Prepare{Name: name, Anchor: []byte{0}, Revoke: lease, Incarnation: i})
			if err == nil {
				p := a.(*rangeapi.Prepared)
				changes = changes || p.Changes
				locks = append(locks, rangeapi.LockRef{ID: p.Lock, Span: d.Span})
			}
			return d, err
		})
		if err != nil {
			if err := resolve(&rangeapi.Resolve{Name: name}, keyspace.Span{}); err != nil {
				return err
			}
			continue
		}
		// A prepare whose answer was lost has left another lock, which is aborted.
		all := func(rev keyspace.Revision) error {
			for _, l := range locks {
				op := &rangeapi.Resolve{Name: name, Lock: l.ID, Revision: rev}
				if rev == 0 {
					op.Detach, op.Incarnation = lease, i
				}
				if err := resolve(op, l.Span); err != nil {
					return err
				}
			}
			return resolve(&rangeapi.Resolve{Name: name}, keyspace.Span{})
		}
		if !changes {
			err := all(0)
			if errors.Is(err, kverror.Conflict) {
				continue
			}
			return err
		}
		got := make(chan keyspace.SequenceAnswer, 1)
		r.seq.Sequence(keyspace.SequenceRequest{Range: 1, Count: 1}, func(a keyspace.SequenceAnswer) { got <- a })
		rev := (<-got).First
		a, _, err := r.command(ctx, "\x00", &rangeapi.Commit{Name: name, AnchorLock: locks[0].ID, Anchor: []byte{0}, Revision: rev, Locks: locks})
		if err != nil {
			return err
		}
		if a.(*rangeapi.Decided).Revision == 0 {
			if err := resolve(&rangeapi.Resolve{Name: name}, keyspace.Span{}); err != nil {
				return err
			}
			continue
		}
		if err := all(rev); err != nil {
			return err
		}
		_, _, err = r.command(ctx, "\x00", &rangeapi.Forget{Name: name, Anchor: []byte{0}})
		return err
	}
	return ctx.Err()
}

// attach puts one key to a lease; 0 is none.
func (r *rig) attach(ctx context.Context, key string, lease keyspace.LeaseID) error {
	_, err := r.do(ctx, key, &rangeapi.Request{Op: &pb.PutRequest{Key: []byte(key), Lease: int64(lease)}})
	return err
}

// attachedNow reads which keys are attached to the lease.
func (r *rig) attachedNow(ctx context.Context, t *testing.T, lease keyspace.LeaseID) (keys []string) {
	t.Helper()
	err := r.eachRange(func(key string) (keyspace.Descriptor, error) {
		d, p, err := r.readRange(ctx, key)
		// The range may have been split since: what it is now is read.
		for err != nil && ctx.Err() == nil {
			d, p, err = r.readRange(ctx, key)
		}
		if err != nil {
			return d, err
		}
		for _, kv := range p.Op.(*pb.RangeResponse).Kvs {
			if kv.Lease == int64(lease) {
				keys = append(keys, string(kv.Key))
			}
		}
		return d, nil
	})
	if err != nil {
		t.Fatalf("read the keys of lease %d: %v", lease, err)
	}
	return keys
}

// readRange reads all keys of the range that has the key.
func (r *rig) readRange(ctx context.Context, key string) (keyspace.Descriptor, *rangeapi.Response, error) {
	d, _ := r.route([]byte(key))
	op := &pb.RangeRequest{Key: d.Span.Start, RangeEnd: d.Span.End}
	if len(op.Key) == 0 {
		op.Key = []byte{0}
	}
	if len(op.RangeEnd) == 0 {
		op.RangeEnd = []byte{0}
	}
	// do asks again until its time has come, also who has the wrong span.
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	p, err := r.do(ctx, key, &rangeapi.Request{Op: op})
	return d, p, err
}

// checkAllLeases holds all replicas against the invariant of leases.
func (r *rig) checkAllLeases() {
	r.t.Helper()
	for _, n := range r.nodes {
		for _, p := range n.node.Load().Replicas() {
			checkLeases(r.t, n.engine, p)
		}
	}
}

// Keys are attached to leases while these are revoked, ranges split and nodes crash: a
// revoked lease has no key until it is granted anew, and index and attachments stay true.
func TestLeasesThroughCrashes(t *testing.T) {
	for _, seed := range seeds() {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newShardRig(t, seed, lan)
				r.leases = newRigLeases(seed)
				r.maxLag = 8 << 10
				for lease := range keyspace.LeaseID(3) {
					r.leases.grant(lease + 1)
				}
				r.startAll()
				r.leader(1)
				r.leaseLoad(t, seed)
				r.agree()
				r.checkAllLeases()
				r.stopAll()
				r.leases.wg.Wait()
			})
		})
	}
}

// leaseLoad attaches and revokes while nodes crash and ranges split.
func (r *rig) leaseLoad(t *testing.T, seed uint64) {
	t.Helper()
	stop := make(chan struct{})
	stopped := func() bool {
		select {
		case <-stop:
			return true
		default:
			return false
		}
	}
	var wg sync.WaitGroup
	attached, missing := 0, 0
	var mu sync.Mutex
	for c := range 4 {
		rng := rand.New(rand.NewPCG(seed, uint64(100+c)))
		wg.Go(func() {
			for !stopped() {
				ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
				err := r.attach(ctx, fmt.Sprintf("k%d", rng.IntN(20)), keyspace.LeaseID(rng.IntN(4)))
				cancel()
				mu.Lock()
				if err == nil {
					attached++
				} else if errors.Is(err, kverror.LeaseNotFound) {
					missing++
				}
				mu.Unlock()
				time.Sleep(time.Duration(rng.Int64N(int64(20 * time.Millisecond))))
			}
		})
	}
	revoked := 0
	wg.Go(func() {
		rng := rand.New(rand.NewPCG(seed, 99))
		name := rangeapi.TxnName{TxnID: rangeapi.TxnID{Start: 1, Node: 9, Boot: 1, Counter: 1}}
		for ; !stopped(); revoked++ {
			lease := keyspace.LeaseID(1 + rng.IntN(3))
			i := r.leases.revoking(lease)
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			var err error
			if rng.IntN(2) == 0 {
				err = r.revokeApart(ctx, lease, i)
			} else {
				name.Counter++
				err = r.revokeTogether(ctx, lease, i, name)
			}
			if err != nil {
				t.Errorf("revoke lease %d: %v", lease, err)
			}
			r.leases.ended(lease)
			if keys := r.attachedNow(ctx, t, lease); len(keys) > 0 {
				t.Errorf("revoke %d: lease %d of incarnation %d is gone and has keys %q", revoked, lease, i, keys)
			}
			cancel()
			time.Sleep(time.Duration(rng.Int64N(int64(50 * time.Millisecond))))
			r.leases.grant(lease)
			time.Sleep(time.Duration(rng.Int64N(int64(200 * time.Millisecond))))
		}
	})
	for _, key := range []string{"k4", "k15"} {
		time.Sleep(700 * time.Millisecond)
		n := r.nodes[r.rng.IntN(3)]
		n.crash()
		time.Sleep(1500 * time.Millisecond)
		n.start()
		r.split(key)
		r.leader(1)
	}
	time.Sleep(2 * time.Second)
	close(stop)
	wg.Wait()
	if attached < 100 || missing == 0 || revoked < 5 {
		t.Errorf("%d attached, %d refused, %d revoked", attached, missing, revoked)
	}
	t.Logf("%d attached, %d refused, %d revoked", attached, missing, revoked)
}

// A follower that is cut off has an index of its own, old one; a snapshot replaces it.
func TestSnapshotReplacesTheIndex(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newShardRig(t, 1, lan)
		r.leases = newRigLeases(1)
		r.maxLag = 64 << 10
		for lease := range keyspace.LeaseID(3) {
			r.leases.grant(lease + 1)
		}
		r.startAll()
		leader := r.leader(1)
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
		defer cancel()
		attach := func(lease keyspace.LeaseID, keys ...string) {
			for _, k := range keys {
				// Again where the node that it was sent through is cut off.
				err := r.attach(ctx, k, lease)
				for ; err != nil && ctx.Err() == nil; err = r.attach(ctx, k, lease) {
				}
				if err != nil {
					t.Fatalf("attach %s to %d: %v", k, lease, err)
				}
			}
		}
		attach(1, "a", "b", "c", "x", "y")
		attach(2, "d", "e", "z")
		time.Sleep(2 * time.Second)
		away := r.nodes[int(leader.id)%3]
		r.net.Partition(away.id)
		attach(0, "a", "x")
		attach(3, "b", "f", "w")
		if err := r.revokeTogether(ctx, 2, r.leases.revoking(2), rangeapi.TxnName{TxnID: rangeapi.TxnID{Start: 1, Node: 9, Boot: 1, Counter: 1}}); err != nil {
			t.Fatal(err)
		}
		r.leases.ended(2)
		r.leader(r.split("m"))
		attach(1, "v")
		for i := range 40 {
			r.put(fmt.Sprintf("a%d", i), string(make([]byte, 8<<10)))
			r.put(fmt.Sprintf("x%d", i), string(make([]byte, 8<<10)))
		}
		for _, n := range r.nodes {
			if n != away {
				if err := n.engine.Flush(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
		}
		time.Sleep(5 * time.Second)
		r.net.HealAll()
		time.Sleep(20 * time.Second)
		r.agree()
		r.checkAllLeases()
		for _, n := range r.nodes {
			all := map[string]keyspace.LeaseID{}
			for _, a := range allAttached(t, n.engine) {
				all[string(a.key)] = a.to
			}
			if got := fmt.Sprint(all); got != "map[b:3 c:1 f:3 v:1 w:3 y:1]" {
				t.Errorf("node %s: the index is %s", n.id, got)
			}
		}
		r.stopAll()
		r.leases.wg.Wait()
	})
}
