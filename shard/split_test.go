package shard

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/sim/simbus"
)

// snapshots is how many snapshots the node's replicas have installed in this run.
func (n *rigNode) snapshots() float64 {
	n.r.t.Helper()
	families, err := n.registry.Gather()
	n.must(err)
	for _, f := range families {
		if f.GetName() == "skein_raftgroup_snapshots_received_total" {
			return f.GetMetric()[0].GetCounter().GetValue()
		}
	}
	n.r.t.Fatal("no such metric")
	return 0
}

// Trap 8: a burst of splits under load, while one follower is slow, or dead. A split
// waits for a slow one a bounded time, and for a dead one not at all; no child reaches
// a slow one as a snapshot, and it catches up.
func TestSplitBurst(t *testing.T) {
	for name, c := range map[string]struct {
		spoil, heal func(r *rig, n *rigNode)
		limit       time.Duration
	}{
		"slow": {
			spoil: func(r *rig, n *rigNode) { r.slow(n, 400*time.Millisecond) },
			heal:  func(r *rig, _ *rigNode) { r.net.ClearFaults() },
			limit: splitLagWait + time.Second,
		},
		"dead": {
			spoil: func(_ *rig, n *rigNode) { n.crash() },
			heal:  func(_ *rig, n *rigNode) { n.start() },
			limit: splitLagWait / 2,
		},
	} {
		t.Run(name, func(t *testing.T) {
			virtually(t, func(t *testing.T) {
				r := newShardRig(t, 6, lan)
				r.startAll()
				l := r.leader(1)
				n := r.nodes[int(l.id)%3]
				c.spoil(r, n)
				time.Sleep(2 * time.Second)
				stop := make(chan struct{})
				var load sync.WaitGroup
				for i := range 2 {
					load.Go(func() { r.fill(i, stop) })
				}
				time.Sleep(time.Second)
				if lag := r.lag(l, n); lag <= splitLagEntries {
					t.Errorf("the node lags by %d entries only", lag)
				}
				var children []keyspace.RangeID
				for i := range 2 {
					begin := time.Now()
					children = append(children, r.split(string([]byte{byte('y' - i)})))
					if d := time.Since(begin); d > c.limit {
						t.Errorf("split %d took %v", i, d)
					}
				}
				for _, id := range children {
					r.leader(id)
				}
				close(stop)
				load.Wait()
				c.heal(r, n)
				time.Sleep(5 * time.Second)
				if got := n.snapshots(); got != 0 {
					t.Errorf("%v snapshots", got)
				}
				r.agree()
				r.stopAll()
			})
		})
	}
}

// Trap 28: a crash took the parent back to before its split, and left the child, which
// a snapshot had made durable meanwhile. The split that is applied again leaves the
// child's record as it is.
func TestSplitAgainBesideANewerChild(t *testing.T) {
	virtually(t, func(t *testing.T) {
		w := newFakeWorld(t)
		defer w.stop()
		newer := snapshotOf(2, 2, "m")
		b := w.engine.NewBatch()
		if err := errors.Join(b.SetApplied(keyspace.RangeID(2).Group(), newer), b.Commit()); err != nil {
			t.Fatal(err)
		}
		if err := w.groups.group(1).apply(splitEntry(5, 1, "m", 2)); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		a, ok, err := w.engine.Applied(keyspace.RangeID(2).Group())
		if err != nil || !ok || a.Index != newer.Index || !bytes.Equal(a.Payload, newer.Payload) {
			t.Errorf("the child's record is %+v (%v), it was %+v", a, err, newer)
		}
		if r := w.store.Replica(2); r == nil || r.Descriptor().Generation != 2 {
			t.Errorf("the child is not open: %v", r)
		}
	})
}

// lag is by how many entries of range 1 a follower is behind.
func (r *rig) lag(leader, n *rigNode) uint64 {
	r.t.Helper()
	g := leader.node.Load().Replica(1).group
	ps, err := g.Progress(r.t.Context())
	if err != nil {
		r.t.Fatal(err)
	}
	for _, p := range ps {
		if p.Replica.Node == n.id {
			return g.Status().Last - p.Match
		}
	}
	r.t.Fatalf("node %s is no follower", n.id)
	return 0
}

// slow makes everything to and from a node take so long.
func (r *rig) slow(n *rigNode, d time.Duration) {
	for _, o := range r.nodes {
		if o != n {
			f := simbus.Faults{Delay: simbus.Delay{Min: d, Max: d}}
			r.net.SetFaults(n.id, o.id, f)
			r.net.SetFaults(o.id, n.id, f)
		}
	}
}

// fill writes one key after the other at the nodes that lead their ranges, whatever
// comes of it.
func (r *rig) fill(client int, stop <-chan struct{}) {
	for i := 0; ; i++ {
		select {
		case <-stop:
			return
		case <-time.After(2 * time.Millisecond):
		}
		key := fmt.Appendf(nil, "%c%d", 'a'+byte(i%26), client)
		d, leaders := r.route(key)
		for _, n := range leaders {
			if s := n.node.Load(); s != nil {
				ctx, cancel := context.WithTimeout(context.Background(), time.Second)
				_, _ = s.Do(ctx, &rangeapi.Request{Range: d.Range, Generation: d.Generation, Op: &pb.PutRequest{Key: key}})
				cancel()
			}
		}
	}
}
