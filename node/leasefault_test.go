package node

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/sim/simclock"
)

// holder is a client with a lease, which it renews for a while and then forgets or
// revokes. It has keys in every range.
type holder struct {
	r   *rig
	rng *rand.Rand
	id  int64
	ttl time.Duration
	// alive is until when the lease certainly lives: its TTL after the call of the last
	// acknowledged keepalive. revoked says that the holder has asked for its end.
	alive   time.Time
	revoked bool
	// keys are those whose puts were acknowledged.
	keys map[string]bool
	// whole is a revision at which all keys were there.
	whole int64
	acked int
}

// gateway returns a node that runs.
func (h *holder) gateway() *Core {
	for {
		if c := h.r.nodes[h.rng.IntN(len(h.r.nodes))].running(); c != nil {
			return c
		}
		if h.r.t.Context().Err() != nil {
			runtime.Goexit() // the test has failed
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// live is the life of a holder.
func (h *holder) live(ctx context.Context, ranges int, until time.Time) {
	for time.Now().Before(until) {
		asked := time.Now()
		resp, err := h.gateway().Leases().Grant(bounded(ctx), &pb.LeaseGrantRequest{TTL: int64(h.ttl / time.Second)})
		if err == nil {
			h.id, h.alive = resp.GetID(), asked.Add(h.ttl)
			break
		}
	}
	for i := range ranges {
		key := fmt.Sprintf("%s%d/%d", keyOf(i), h.id, i)
		put := &pb.PutRequest{Key: []byte(key), Lease: h.id}
		if resp, err := h.gateway().KV().Put(bounded(ctx), put); err == nil {
			h.keys[key], h.whole = true, resp.GetHeader().GetRevision()
		} else if kverror.Of(err).Kind == kverror.LeaseNotFound {
			h.gone("a put")
		}
		h.renew(ctx)
	}
	for time.Now().Before(until) {
		time.Sleep(h.ttl / 4)
		h.renew(ctx)
	}
	if h.rng.IntN(2) == 0 {
		h.revoked = true
		_, _ = h.gateway().Leases().Revoke(bounded(ctx), &pb.LeaseRevokeRequest{ID: h.id}, nil) // it expires, if not
	}
}

// bounded is a request's patience: the test's own end is far.
func bounded(ctx context.Context) context.Context {
	ctx, cancel := context.WithTimeout(ctx, rigTimeout)
	context.AfterFunc(ctx, cancel)
	return ctx
}

func (h *holder) renew(ctx context.Context) {
	asked := time.Now()
	resp, err := h.gateway().Leases().KeepAlive(bounded(ctx), &pb.LeaseKeepAliveRequest{ID: h.id})
	switch {
	case err != nil:
	case resp.GetTTL() == 0:
		h.gone("a keepalive")
	default:
		h.acked++
		h.alive = asked.Add(h.ttl)
	}
}

// gone is evidence that the lease has ended.
func (h *holder) gone(what string) {
	if early := time.Until(h.alive); early > 0 && !h.revoked {
		h.r.t.Errorf("%s finds lease %d gone %v too early", what, h.id, early)
	}
}

// changes are the revisions that have events, in order. A new sequencer skips up to
// 10,000 revisions. Reads there see the state before the gap.
func (r *rig) changes(to int64) (revisions []int64) {
	r.t.Helper()
	for next := keyspace.Revision(2); next <= keyspace.Revision(to); {
		var err error
		next, err = mvcc.History(r.nodes[0].core.Store(), mvcc.HistoryOptions{From: next, To: keyspace.Revision(to), KeysOnly: true}, func(v *mvcc.Version) error {
			if rev := int64(v.Mod); len(revisions) == 0 || rev > revisions[len(revisions)-1] {
				revisions = append(revisions, rev)
			}
			return nil
		})
		if err != nil {
			r.t.Fatal(err)
		}
	}
	return revisions
}

// check walks all revisions from the one at which all keys were put: all of them are
// there, or none is any more.
func (h *holder) check(ctx context.Context, changes []int64) {
	for _, rev := range changes {
		if rev < h.whole {
			continue
		}
		resp, err := h.r.nodes[0].core.KV().Range(ctx, &pb.RangeRequest{Key: []byte{0}, RangeEnd: []byte{0}, Revision: rev})
		if err != nil {
			h.r.t.Fatal(err)
		}
		n := 0
		for _, kv := range resp.GetKvs() {
			if kv.GetLease() == h.id && h.keys[string(kv.GetKey())] {
				n++
			}
		}
		if n == 0 {
			return
		}
		if n != len(h.keys) {
			h.r.t.Errorf("at revision %d there are %d of the %d keys of lease %d", rev, n, len(h.keys), h.id)
			return
		}
	}
	h.r.t.Errorf("the keys of lease %d outlive it", h.id)
}

// TestLeasesThroughFaults: holders renew leases with keys in several ranges while nodes
// crash, are cut off, are stopped as by SIGSTOP and hand leaderships over. No lease ends
// early, none leaves a key, and the keys of one go at one revision.
func TestLeasesThroughFaults(t *testing.T) {
	const ranges, holders = 4, 8
	for seed := range uint64(1) {
		clocks := map[keyspace.NodeID]*simclock.Clock{}
		var mu sync.Mutex
		clocked := func(o *Options) {
			mu.Lock()
			defer mu.Unlock()
			if clocks[o.Self] == nil {
				clocks[o.Self] = simclock.New(time.Duration(o.Self)*time.Hour, 1+(float64(o.Self)-2)*0.001)
			}
			o.Clock = clocks[o.Self]
		}
		bubble(t, 3, borders(ranges), clocked, func(r *rig) {
			ctx := r.t.Context()
			rng := rand.New(rand.NewPCG(seed, 9))
			end := time.Now().Add(30 * time.Second)
			var all []*holder
			var wg sync.WaitGroup
			for i := range holders {
				h := &holder{r: r, rng: rand.New(rand.NewPCG(seed, uint64(i))), ttl: time.Duration(4+2*i) * time.Second, keys: map[string]bool{}}
				all = append(all, h)
				wg.Go(func() { h.live(ctx, ranges, end.Add(-time.Duration(i)*3*time.Second)) })
			}
			for time.Now().Before(end) {
				time.Sleep(time.Duration(1+rng.IntN(3)) * time.Second)
				r.leaseFault(rng, clocks)
			}
			wg.Wait()
			time.Sleep(45 * time.Second)
			r.spread(r.nodes[0], ranges, "serves")
			keys, err := r.nodes[1].core.KV().Range(ctx, &pb.RangeRequest{Key: []byte{0}, RangeEnd: []byte{0}})
			if err != nil {
				r.t.Fatal(err)
			}
			for _, kv := range keys.GetKvs() {
				if kv.GetLease() != 0 {
					r.t.Errorf("key %q is left of lease %d", kv.GetKey(), kv.GetLease())
				}
			}
			list, err := r.nodes[2].core.Leases().Leases(ctx, nil)
			if err != nil || len(list.GetLeases()) != 0 {
				r.t.Errorf("leases that are left: %v, %v", list, err)
			}
			r.caughtUp(20 * time.Second)
			changes := r.changes(keys.GetHeader().GetRevision())
			acked := 0
			for _, h := range all {
				acked += h.acked
				h.check(ctx, changes)
			}
			if acked < 50 {
				r.t.Errorf("%d keepalives were acknowledged", acked)
			}
		})
	}
}

// leaseFault does something to one node, most often to the one that leads placement.
func (r *rig) leaseFault(rng *rand.Rand, clocks map[keyspace.NodeID]*simclock.Clock) {
	n := r.nodes[rng.IntN(len(r.nodes))]
	if rng.IntN(3) > 0 {
		n = r.placementLeader()
	}
	span := time.Duration(500+rng.IntN(7000)) * time.Millisecond
	switch rng.IntN(4) {
	case 0:
		r.crash(n)
		time.Sleep(span / 2)
		r.start(n)
	case 1:
		r.net.Partition(n.id)
		time.Sleep(span)
		r.net.HealAll()
	case 2:
		clocks[n.id].StepWall(time.Hour)
		clocks[n.id].Pause()
		r.net.Pause(n.id)
		time.Sleep(span)
		r.net.Resume(n.id)
		clocks[n.id].Resume()
	case 3:
		ids := slices.Sorted(maps.Keys(clocks))
		_ = n.core.Placement().TransferLeader(bounded(r.t.Context()), ids[rng.IntN(len(ids))]) // it stays where it is, if not
	}
}
