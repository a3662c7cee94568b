package node

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
)

// trap 65: once one node has answered Compact, every node refuses reads of older
// revisions in every range at once, within transactions too. No node may lag. At the
// compacted revision and above all nodes go on answering.
func TestCompactedIsKnownEverywhereAtOnce(t *testing.T) {
	const ranges = 4
	bubble(t, 3, borders(ranges), nil, func(r *rig) {
		ctx := r.t.Context()
		for round := range 12 {
			gateway := r.nodes[round%3]
			for i := range ranges {
				r.mustPut(gateway, keyOf(i), "old")
			}
			at := r.mustPut(gateway, keyOf(round%ranges), fmt.Sprint("new ", round))
			if round%4 == 3 {
				time.Sleep(30 * time.Second) // ranges may be asleep
			}
			if _, err := gateway.core.KV().Compact(ctx, &pb.CompactionRequest{Revision: at}); err != nil {
				r.t.Fatalf("compact at %d: %v", at, err)
			}
			for i := range ranges {
				for _, n := range r.nodes {
					for rev, want := range map[int64]error{at - 1: kverror.Compacted, at: nil} {
						get := &pb.RangeRequest{Key: []byte(keyOf(i)), Revision: rev}
						_, err := n.core.KV().Range(ctx, get)
						if !errors.Is(err, want) {
							r.t.Errorf("round %d: node %s reads %s at %d, compacted at %d: %v", round, n.id, get.Key, rev, at, err)
						}
						ops := []*pb.RequestOp{{Request: &pb.RequestOp_RequestRange{RequestRange: get}}}
						if _, err = n.core.KV().Txn(ctx, &pb.TxnRequest{Success: ops}); !errors.Is(err, want) {
							r.t.Errorf("round %d: node %s reads %s in a txn at %d, compacted at %d: %v", round, n.id, get.Key, rev, at, err)
						}
						put := &pb.PutRequest{Key: []byte(keyOf(i) + "/beside")}
						ops = append(ops, &pb.RequestOp{Request: &pb.RequestOp_RequestPut{RequestPut: put}})
						if _, err = n.core.KV().Txn(ctx, &pb.TxnRequest{Success: ops}); !errors.Is(err, want) {
							r.t.Errorf("round %d: node %s reads %s in a txn that writes at %d, compacted at %d: %v", round, n.id, get.Key, rev, at, err)
						}
					}
				}
			}
		}
		r.stop(r.nodes...)
	})
}

// garbage counts the versions on a node's disk that compaction at a revision lets go.
func (n *rigNode) garbage(t *testing.T, compacted int64) int64 {
	t.Helper()
	b := n.core.engine.NewBatch()
	defer b.Close()
	res, err := mvcc.RemoveOld(n.core.engine, b, mvcc.RemoveOptions{
		Compacted: keyspace.Revision(compacted), MaxVisits: math.MaxInt64, MaxDeletes: math.MaxInt64,
	})
	if err != nil {
		t.Fatalf("node %s: %v", n.id, err)
	}
	return res.Removed
}

// splitAt splits the range that holds the key at it.
func (r *rig) splitAt(key string) {
	for _, n := range r.nodes {
		for _, s := range n.summaries() {
			if s.IsLeader && s.Descriptor.Span.Contains([]byte(key)) {
				if _, err := n.core.Ranges().Split(r.t.Context(), n.id, s.Descriptor.Range, s.Descriptor.Generation, []byte(key)); err != nil {
					r.t.Errorf("split at %s: %v", key, err)
				}
				return
			}
		}
	}
	r.t.Errorf("nobody leads %s", key)
}

// A physical compaction is answered once no replica of any range holds what it lets go:
// not the leaders' alone, and also where ranges split meanwhile or it was compacted
// before.
func TestPhysicalCompactionIsAnsweredWhenNothingIsLeft(t *testing.T) {
	const ranges = 5
	bubble(t, 3, borders(ranges), func(o *Options) { o.RemoveBatch = 3 }, func(r *rig) {
		var at int64
		for round := range 4 {
			for i := range ranges * 20 {
				at = r.mustPut(r.nodes[i%3], keyOf(i%ranges), fmt.Sprint(round, i))
			}
			r.mustRemove(r.nodes[round%3], keyOf(round))
			at++
			if g := r.nodes[0].garbage(r.t, at); g < ranges*19 {
				r.t.Fatalf("round %d: %d versions to let go of", round, g)
			}
			compact := &pb.CompactionRequest{Revision: at, Physical: true}
			done := make(chan struct{})
			go func() {
				defer close(done)
				if round == 2 {
					r.splitAt(keyOf(3) + "/split")
				}
			}()
			if round == 3 {
				if _, err := r.nodes[1].core.KV().Compact(r.t.Context(), &pb.CompactionRequest{Revision: at}); err != nil {
					r.t.Fatalf("compact: %v", err)
				}
			}
			resp, err := r.nodes[round%3].core.KV().Compact(r.t.Context(), compact)
			for _, n := range r.nodes {
				if g := n.garbage(r.t, at-1); g != 0 {
					r.t.Errorf("round %d: %d versions are left on node %s", round, g, n.id)
				}
			}
			<-done
			switch {
			case round == 3 && !errors.Is(err, kverror.Compacted):
				r.t.Errorf("compacted again: %v", err)
			case round < 3 && (err != nil || resp.GetHeader().GetRevision() != at):
				r.t.Errorf("round %d at %d: %v, %v", round, at, resp, err)
			}
		}
		r.stop(r.nodes...)
	})
}

// A physical compaction waits for the transactions that may still read what it removes, and
// not for revisions that they have pinned. That holds for an endless series of transactions
// over ranges that only they use. etcdctl waits 5 s for an answer.
func TestPhysicalCompactionBehindTransactions(t *testing.T) {
	bubble(t, 3, borders(4), nil, func(r *rig) {
		ctx, cancel := context.WithCancel(r.t.Context())
		defer cancel()
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			put := func(i, n int) *pb.RequestOp {
				p := &pb.PutRequest{Key: []byte(keyOf(i)), Value: []byte(fmt.Sprint(n))}
				return &pb.RequestOp{Request: &pb.RequestOp_RequestPut{RequestPut: p}}
			}
			read := &pb.RequestOp{Request: &pb.RequestOp_RequestRange{RequestRange: &pb.RangeRequest{Key: []byte(keyOf(2))}}}
			for n := 0; ctx.Err() == nil; n++ {
				ops := []*pb.RequestOp{put(0, n), put(1, n), read}
				if _, err := r.nodes[n%3].core.KV().Txn(r.t.Context(), &pb.TxnRequest{Success: ops}); err != nil {
					r.t.Errorf("transaction %d: %v", n, err)
				}
			}
		}()
		for round := range 6 {
			for i := range 4 {
				r.mustPut(r.nodes[i%3], keyOf(i), fmt.Sprint(round))
			}
			at := r.mustPut(r.nodes[0], keyOf(2), "newer")
			if round == 5 {
				cancel()
				<-ended // its pins are still there
			}
			begun := time.Now()
			_, err := r.nodes[round%3].core.KV().Compact(r.t.Context(), &pb.CompactionRequest{Revision: at, Physical: true})
			if took := time.Since(begun); err != nil || took > time.Second {
				r.t.Errorf("round %d: a physical compaction took %v: %v", round, took, err)
			}
			for _, n := range r.nodes {
				if g := n.garbage(r.t, at-1); g != 0 {
					r.t.Errorf("round %d: %d versions are left on node %s", round, g, n.id)
				}
			}
		}
		r.stop(r.nodes...)
	})
}

// How long a removal took is that of the node: its ranges hear of the compaction one by
// one, and each goes in steps.
func TestRemovalIsMeasuredOncePerCompaction(t *testing.T) {
	const ranges = 5
	var mu sync.Mutex
	var all []*prometheus.Registry // in any order
	pause := 20 * time.Millisecond
	bubble(t, 3, borders(ranges), func(o *Options) {
		reg := prometheus.NewRegistry()
		mu.Lock()
		all = append(all, reg)
		mu.Unlock()
		o.Registry, o.RemoveBatch, o.RemovePause = reg, 3, pause
	}, func(r *rig) {
		for round := range 2 {
			var at int64
			for i := range ranges * 20 {
				at = r.mustPut(r.nodes[i%3], keyOf(i%ranges), fmt.Sprint(i))
			}
			if _, err := r.nodes[0].core.KV().Compact(r.t.Context(), &pb.CompactionRequest{Revision: at, Physical: true}); err != nil {
				r.t.Fatal(err)
			}
			time.Sleep(5 * time.Second)
			for i, reg := range all {
				n, millis := observed(r.t, reg, "etcd_debugging_mvcc_db_compaction_total_duration_milliseconds")
				if least := float64(ranges*20/3) * float64(pause.Milliseconds()); n != uint64(round+1) || millis < float64(n)*least/2 || millis > float64(n)*least*3 {
					r.t.Errorf("node %d: %d removals of %v ms in all, about %v each", i, n, millis, least)
				}
			}
		}
		r.stop(r.nodes...)
	})
}

// observed returns how often a histogram was observed, and the sum.
func observed(t *testing.T, reg *prometheus.Registry, name string) (uint64, float64) {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == name {
			h := f.GetMetric()[0].GetHistogram()
			return h.GetSampleCount(), h.GetSampleSum()
		}
	}
	t.Fatalf("there is no %s", name)
	return 0, 0
}

// A node that does not live keeps no physical compaction waiting; it removes when it is
// back. Without a quorum nothing is compacted, and the client hears so in time.
func TestPhysicalCompactionDoesNotWaitForTheDead(t *testing.T) {
	bubble(t, 3, borders(2), nil, func(r *rig) {
		fill := func() (at int64) {
			for i := range 20 {
				at = r.mustPut(r.nodes[0], keyOf(i%2), "x")
			}
			return at
		}
		compact := func(at int64) error {
			ctx, cancel := context.WithTimeout(r.t.Context(), 20*time.Second)
			defer cancel()
			_, err := r.nodes[0].core.KV().Compact(ctx, &pb.CompactionRequest{Revision: at, Physical: true})
			return err
		}
		fill()
		r.crash(r.nodes[2])
		first := fill()
		if err := compact(first); err != nil {
			r.t.Fatalf("with one node down: %v", err)
		}
		for _, n := range r.nodes[:2] {
			if g := n.garbage(r.t, first); g != 0 {
				r.t.Errorf("%d versions are left on node %s", g, n.id)
			}
		}
		r.start(r.nodes[2])
		r.wait(30*time.Second, "the node removes what was compacted while it was down", func() bool {
			return r.nodes[2].garbage(r.t, first) == 0
		})
		second := fill()
		r.crash(r.nodes[1], r.nodes[2])
		begun := time.Now()
		r.wantKind("without a quorum", compact(second), kverror.Timeout)
		if took := time.Since(begun); took > rigTimeout+time.Second {
			r.t.Errorf("that took %v", took)
		}
		r.start(r.nodes[1], r.nodes[2])
		r.stop(r.nodes...)
	})
}

// Old versions go also where nobody asks for anything: a node that leads idle ranges
// hears of a compaction by itself.
func TestIdleRangesAreCompacted(t *testing.T) {
	const ranges = 6
	bubble(t, 3, borders(ranges), nil, func(r *rig) {
		var at int64
		for i := range ranges * 10 {
			at = r.mustPut(r.nodes[0], keyOf(i%ranges), "x")
		}
		if _, err := r.nodes[1].core.KV().Compact(r.t.Context(), &pb.CompactionRequest{Revision: at}); err != nil {
			r.t.Fatal(err)
		}
		r.wait(2*time.Minute, "all nodes have removed old versions", func() bool {
			for _, n := range r.nodes {
				if n.garbage(r.t, at) != 0 {
					return false
				}
			}
			return true
		})
		r.stop(r.nodes...)
	})
}

// What etcd answers at the edges.
func TestCompactionsAtTheEdges(t *testing.T) {
	bubble(t, 3, borders(2), nil, func(r *rig) {
		compact := func(n *rigNode, at int64, physical bool) (int64, error) {
			resp, err := n.core.KV().Compact(r.t.Context(), &pb.CompactionRequest{Revision: at, Physical: physical})
			return resp.GetHeader().GetRevision(), err
		}
		_, err := compact(r.nodes[0], -1, true)
		r.wantKind("below everything", err, kverror.Compacted)
		_, err = compact(r.nodes[0], 2, true)
		r.wantKind("the future of an empty store", err, kverror.FutureRevision)
		if rev, err := compact(r.nodes[0], 0, true); err != nil || rev != 1 {
			r.t.Errorf("the revision 0 once: %d, %v", rev, err)
		}
		_, err = compact(r.nodes[1], 0, false)
		r.wantKind("the revision 0 again", err, kverror.Compacted)

		r.mustPut(r.nodes[0], keyOf(0), "a")
		last := r.mustPut(r.nodes[1], keyOf(1), "b")
		_, err = compact(r.nodes[2], last+1, true)
		r.wantKind("the next revision", err, kverror.FutureRevision)
		if rev, err := compact(r.nodes[2], last, false); err != nil || rev != last {
			r.t.Errorf("the current revision: %d, %v", rev, err)
		}
		for _, n := range r.nodes {
			_, err = compact(n, last, false)
			r.wantKind("the current revision again", err, kverror.Compacted)
			r.mustGet(n, keyOf(0), "a")
			r.mustGet(n, keyOf(1), "b")
		}
		r.stop(r.nodes...)
	})
}

// The flags --auto-compaction-*: versions older than a period are removed and no
// others, even if the leader changes meanwhile.
func TestAutomaticCompaction(t *testing.T) {
	bubble(t, 3, borders(2), func(o *Options) { o.KeepPeriod = time.Minute }, func(r *rig) {
		readable := func(n *rigNode, at int64) bool {
			_, err := n.core.KV().Range(r.t.Context(), &pb.RangeRequest{Key: []byte(keyOf(0)), Revision: at})
			if err != nil && !errors.Is(err, kverror.Compacted) {
				r.t.Fatalf("read at %d: %v", at, err)
			}
			return err == nil
		}
		old := r.mustPut(r.nodes[0], keyOf(0), "1")
		r.mustPut(r.nodes[1], keyOf(0), "2")
		time.Sleep(57 * time.Second)
		if !readable(r.nodes[2], old) {
			r.t.Error("compacted before the period was over")
		}
		for _, n := range r.nodes {
			if n.core.client.Leader() == n.id {
				r.crash(n)
				r.start(n)
				break
			}
		}
		time.Sleep(30 * time.Second)
		young := r.mustPut(r.nodes[2], keyOf(0), "3")
		time.Sleep(40 * time.Second)
		for _, n := range r.nodes {
			if readable(n, old) || !readable(n, young) {
				r.t.Errorf("node %s: revision %d readable: %t, %d: %t", n.id, old, readable(n, old), young, readable(n, young))
			}
		}
		r.stop(r.nodes...)
	})
}

// Removal goes in steps of --compaction-batch-limit with pauses between them, and keeps
// nobody waiting.
func TestRemovalIsPaced(t *testing.T) {
	const batch, pause = 10, 20 * time.Millisecond
	puts := fewer(600, 200)
	bubble(t, 3, nil, func(o *Options) { shortLog(o); o.RemoveBatch, o.RemovePause = batch, pause }, func(r *rig) {
		var at int64
		for range puts {
			at = r.mustPut(r.nodes[0], keyOf(0), "x")
		}
		begun, done := time.Now(), make(chan time.Duration)
		go func() {
			if _, err := r.nodes[1].core.KV().Compact(r.t.Context(), &pb.CompactionRequest{Revision: at, Physical: true}); err != nil {
				r.t.Errorf("compact: %v", err)
			}
			done <- time.Since(begun)
		}()
		for {
			before := time.Now()
			r.mustPut(r.nodes[2], keyOf(1), "y")
			if took := time.Since(before); took > 50*time.Millisecond {
				r.t.Errorf("a put took %v while versions were removed", took)
			}
			select {
			case took := <-done:
				if least := time.Duration(puts/batch-1) * pause; took < least || took > 3*least {
					r.t.Errorf("the removal of %d versions took %v, in steps of %d with pauses of %v", puts-1, took, batch, pause)
				}
				r.stop(r.nodes...)
				return
			default:
			}
		}
	})
}
