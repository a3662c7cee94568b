package node

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
)

// hash asks a node for the hash at a revision.
func (r *rig) hash(n *rigNode, at int64) *pb.HashKVResponse {
	r.t.Helper()
	h, err := n.core.KV().HashKV(r.t.Context(), &pb.HashKVRequest{Revision: at})
	if err != nil {
		r.t.Fatalf("hash at %d on node %s: %v", at, n.id, err)
	}
	return h
}

// wantHash wants the hash from every node.
func (r *rig) wantHash(when string, at int64, want uint32) {
	r.t.Helper()
	for _, n := range r.nodes {
		if h := r.hash(n, at); h.GetHash() != want || h.GetHashRevision() != at {
			r.t.Errorf("%s: node %s has the hash %#x at %d, want %#x at %d", when, n.id, h.GetHash(), h.GetHashRevision(), want, at)
		}
	}
}

// The hash at a revision is the same on all nodes, with and without replicas of their own. It stays
// what it was while ranges split, merge and move, and while later writes go on.
func TestHashIsTheSameEverywhere(t *testing.T) {
	const ranges = 3
	bubble(t, 3, borders(ranges), nil, func(r *rig) {
		value := make([]byte, 200<<10)
		for i := range 100 { // several parts for each range
			r.mustPut(r.nodes[i%3], fmt.Sprintf("%s%d", keyOf(i%ranges), i), string(value))
		}
		r.mustRemove(r.nodes[1], keyOf(1)+"4")
		at := r.mustPut(r.nodes[1], keyOf(1), "last")
		first := r.hash(r.nodes[0], 0)
		if first.GetHashRevision() != at || first.GetCompactRevision() != -1 || first.GetHeader().GetRevision() != at || first.GetHash() == 0 {
			r.t.Fatalf("%v at %d", first, at)
		}
		want := first.GetHash()
		if before := r.hash(r.nodes[0], at-1); before.GetHash() == want {
			r.t.Error("a put does not change the hash")
		}
		r.wantHash("at first", at, want)
		r.mustPut(r.nodes[0], keyOf(0), "later")
		r.wantHash("with later writes", at, want)
		var meanwhile sync.WaitGroup
		nodes := r.nodes
		for i := range fewer(40, 10) { // hashes under way while the ranges change
			meanwhile.Go(func() {
				time.Sleep(time.Duration(i) * fewer(2*time.Second, 8*time.Second))
				h, err := nodes[i%3].core.KV().HashKV(r.t.Context(), &pb.HashKVRequest{Revision: at})
				if err == nil && h.GetHash() != want {
					r.t.Errorf("meanwhile: %#x, want %#x", h.GetHash(), want)
				}
			})
		}
		var right atomic.Uint64
		merge := r.splitForMerge("k0000/m", &right)
		r.splitAt("k0001/x4")
		r.wantHash("after a split", at, want)
		merge()
		r.wantHash("after a merge", at, want)
		n := r.joiner("n4")
		if err := r.join(r.t.Context(), n, r.nodes[1]); err != nil {
			r.t.Fatal(err)
		}
		r.announced(n)
		r.nodes = append(r.nodes[:3:3], n)
		r.wantHash("on a node without replicas", at, want)
		r.mustMove(1, r.nodes[2], n)
		r.wantHash("after a move", at, want)
		meanwhile.Wait()

		// The compaction rule changes the hash, and is the same everywhere however far each has removed.
		now := r.mustPut(r.nodes[0], keyOf(0), "again")
		if _, err := r.nodes[1].core.KV().Compact(r.t.Context(), &pb.CompactionRequest{Revision: at}); err != nil {
			r.t.Fatal(err)
		}
		h := r.hash(r.nodes[0], now)
		if h.GetCompactRevision() != at {
			r.t.Errorf("%v, compacted at %d", h, at)
		}
		r.wantHash("while versions go", now, h.GetHash())
		time.Sleep(time.Minute)
		r.wantHash("when they are gone", now, h.GetHash())

		_, err := n.core.KV().HashKV(r.t.Context(), &pb.HashKVRequest{Revision: at - 1})
		r.wantKind("a compacted revision", err, kverror.Compacted)
		_, err = n.core.KV().HashKV(r.t.Context(), &pb.HashKVRequest{Revision: now + 1})
		r.wantKind("a future revision", err, kverror.FutureRevision)
		ctx, cancel := context.WithCancel(r.t.Context())
		cancel()
		if _, err = n.core.KV().HashKV(ctx, &pb.HashKVRequest{}); err == nil || !errors.Is(kverror.Of(err), kverror.Canceled) {
			r.t.Errorf("cancelled: %v", err)
		}
		r.stop(r.nodes...)
	})
}

// A compaction that removes versions in the middle of a hash does not make it wrong: it begins anew.
func TestHashDuringCompactions(t *testing.T) {
	bubble(t, 3, borders(3), func(o *Options) { o.RemoveBatch = 1 }, func(r *rig) {
		var at int64
		for i := range 200 {
			at = r.mustPut(r.nodes[i%3], keyOf(i%3), fmt.Sprint(i))
			if i%20 != 19 {
				continue
			}
			if _, err := r.nodes[1].core.KV().Compact(r.t.Context(), &pb.CompactionRequest{Revision: at - 5}); err != nil {
				r.t.Fatal(err)
			}
			got := map[uint32]bool{}
			for _, n := range r.nodes {
				h := r.hash(n, at)
				if h.GetCompactRevision() != at-5 {
					r.t.Errorf("%v, compacted at %d", h, at-5)
				}
				got[h.GetHash()] = true
			}
			if len(got) != 1 {
				r.t.Errorf("at %d the nodes have %d hashes", at, len(got))
			}
		}
		r.stop(r.nodes...)
	})
}

// spoil changes one byte of a key's version on the node's disk.
func (n *rigNode) spoil(t *testing.T, key string, at int64) {
	t.Helper()
	v, ok, err := mvcc.Get(n.core.engine, []byte(key), keyspace.Revision(at))
	if err != nil || !ok {
		t.Fatal(ok, err)
	}
	v.Value[0] ^= 1
	b := n.core.engine.NewBatch()
	defer b.Close()
	if err := errors.Join(mvcc.Put(b, &v), b.Commit()); err != nil {
		t.Fatal(err)
	}
}

// A replica of which one byte differs makes the hash of its node another one, and nobody else's.
func TestHashShowsADifferentByte(t *testing.T) {
	bubble(t, 3, borders(2), nil, func(r *rig) {
		at := r.mustPut(r.nodes[0], keyOf(1), "value")
		r.caughtUp(5 * time.Second)
		want := r.hash(r.nodes[0], at).GetHash()
		r.wantHash("before", at, want)
		bad := r.nodes[2]
		bad.spoil(r.t, keyOf(1), at)
		for _, n := range r.nodes {
			if h := r.hash(n, at).GetHash(); (h == want) == (n == bad) {
				r.t.Errorf("node %s has the hash %#x, before %#x", n.id, h, want)
			}
		}
		r.stop(r.nodes...)
	})
}

// With --corrupt-check-time a replica whose data differs from that of two others goes into quarantine,
// whether it leads or not. Its node has the alarm CORRUPT until the replica is replaced, and nobody else.
func TestScrub(t *testing.T) {
	if testing.Short() {
		t.Skip("twelve hours of three nodes: ten minutes with the race detector")
	}
	for _, leads := range []bool{true, false} {
		t.Run(fmt.Sprint("leads ", leads), func(t *testing.T) {
			bubble(t, 3, borders(2), func(o *Options) { o.ScrubEvery = time.Hour }, func(r *rig) {
				r.spread(r.nodes[0], 2, "value")
				at := r.mustPut(r.nodes[0], keyOf(1), "value")
				r.caughtUp(5 * time.Second)
				r.pause() // nobody replaces it
				var bad *rigNode
				for _, n := range r.nodes {
					if s := n.summaries()[1]; s.IsLeader == leads {
						bad = n
					}
				}
				time.Sleep(2 * time.Hour)
				for _, n := range r.nodes {
					if a := (etcdAlarms{n.core}).Known(); len(a) > 0 {
						r.t.Fatalf("node %s, before: %v", n.id, a)
					}
				}
				bad.spoil(r.t, keyOf(1), at)
				r.wait(2*time.Hour, "it is in quarantine", func() bool { return len(bad.core.host.Quarantined()) > 0 })
				time.Sleep(2 * time.Hour)
				for _, n := range r.nodes {
					a := (etcdAlarms{n.core}).Known()
					if n != bad && len(a) > 0 || n == bad && (len(a) != 1 || a[0].Type != pb.AlarmType_CORRUPT || a[0].Member != n.id) {
						r.t.Errorf("node %s: %v", n.id, a)
					}
				}
				if q := bad.core.host.Quarantined(); len(q) != 1 {
					r.t.Errorf("in quarantine: %v", q)
				}
				r.checkAll("value", 1)
				if err := r.nodes[0].core.client.SetPaused(r.t.Context(), false); err != nil {
					r.t.Fatal(err)
				}
				r.wait(10*time.Minute, "it is replaced", func() bool { return len((etcdAlarms{bad.core}).Known()) == 0 })
				r.checkAll("value", 1)
				r.stop(r.nodes...)
			})
		})
	}
}
