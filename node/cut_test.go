package node

import (
	"fmt"
	"maps"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/backup/block"
	"github.com/skeindb/skein/dataapi"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/placement/fsm"
)

// raised waits until the cluster has the version in which there are holds.
func (r *rig) raised() {
	r.t.Helper()
	for i, n := range r.nodes {
		n.core.Announce(r.t.Context(), fsm.Node{Name: fmt.Sprintf("n%d", i+1), PeerURLs: []string{fmt.Sprintf("http://n%d:2380", i+1)}, ClientURLs: []string{"http://c"}})
	}
	r.wait(time.Minute, "the cluster version", func() bool {
		m, err := r.nodes[0].core.Placement().Map(r.t.Context())
		return err == nil && m.ClusterVersion >= keyspace.VersionData
	})
}

// cut makes a cut by a node.
func (r *rig) cut(n *rigNode, from keyspace.Revision) *dataapi.Cut {
	r.t.Helper()
	c, err := n.core.Cuts().Cut(r.t.Context(), dataapi.CutOptions{Owner: "a test", From: from})
	if err != nil {
		r.t.Fatalf("cut by node %s: %v", n.id, err)
	}
	return c
}

// read returns what a cut has: how many versions, the sum over them, and the values of those that live.
func (n *rigNode) read(r *rig, c mvcc.Cut) (sum block.Sum, values map[string]string, err error) {
	values = map[string]string{}
	last := ""
	err = n.core.Cuts().Read(r.t.Context(), c, mvcc.VersionCursor{}, nil, func(v *mvcc.Version) error {
		if v.Mod > c.At {
			return fmt.Errorf("version %d of %q in a cut at %d", v.Mod, v.Key, c.At)
		}
		if k := string(v.Key); k != last && !v.Tombstone {
			values[k] = string(v.Value)
		}
		last = string(v.Key)
		sum.Add(v)
		return nil
	}, func(*mvcc.VersionCursor) error { return nil })
	return sum, values, err
}

// Cuts are exact while money moves between ranges, which split, merge and move, and while clients compact: a bank's sum is
// right at each cut's revision, every node reads the same, and it stays what it was as long as it is held.
func TestCutsOfABank(t *testing.T) {
	const ranges, accounts, each = 3, 12, 100
	bubble(t, 3, borders(ranges), func(o *Options) { o.RemoveBatch = 50 }, func(r *rig) {
		r.raised()
		account := func(i int) string { return fmt.Sprintf("%s/%d", keyOf(i%ranges), i) }
		for i := range accounts {
			r.mustPut(r.nodes[i%3], account(i), strconv.Itoa(each))
		}
		stop := make(chan struct{})
		var clients sync.WaitGroup
		end := sync.OnceFunc(func() {
			close(stop)
			clients.Wait()
		})
		defer end()
		var moved, compacted atomic.Int64
		for c := range 3 {
			clients.Go(func() { r.transfers(r.nodes[c], c, accounts, account, stop, &moved) })
		}
		clients.Go(func() { r.compactions(r.nodes[1], stop, &compacted) })
		var right atomic.Uint64
		var held []*dataapi.Cut
		sums := map[fsm.HoldID]block.Sum{}
		check := func(when string) {
			r.t.Helper()
			time.Sleep(2 * time.Second)
			c := r.cut(r.nodes[len(held)%len(r.nodes)], 0)
			held = append(held, c)
			for _, n := range r.nodes {
				for _, c := range held {
					_, values, err := n.read(r, mvcc.Cut{Select: mvcc.SelectLatest, At: c.Revision})
					if err != nil {
						r.t.Fatalf("%s: node %s reads at %d: %v", when, n.id, c.Revision, err)
					}
					total := 0
					for i := range accounts {
						has, err := strconv.Atoi(values[account(i)])
						total += has
						if err != nil {
							r.t.Errorf("%s: node %s has %q in account %d at %d", when, n.id, values[account(i)], i, c.Revision)
						}
					}
					if total != accounts*each {
						r.t.Errorf("%s: node %s has %d at %d", when, n.id, total, c.Revision)
					}
					sum, _, err := n.read(r, mvcc.Cut{Select: mvcc.SelectKept, At: c.Revision, After: max(c.Compacted, 0)})
					if err != nil {
						r.t.Fatalf("%s: node %s reads the history at %d: %v", when, n.id, c.Revision, err)
					}
					if first, known := sums[c.Hold]; known && first != sum {
						r.t.Errorf("%s: node %s reads %v at %d, the first one was %v", when, n.id, sum, c.Revision, first)
					}
					sums[c.Hold] = sum
				}
			}
		}
		check("at first")
		merge := r.splitForMerge("k0000/m", &right)
		r.splitAt("k0001/x/5")
		check("after a split")
		merge()
		check("after a merge")
		n := r.joiner("n4")
		if err := r.join(r.t.Context(), n, r.nodes[1]); err != nil {
			r.t.Fatal(err)
		}
		r.announced(n)
		check("with a node without replicas")
		r.wait(10*time.Minute, "replicas move to the new node", func() bool { return len(n.summaries()) > 1 })
		check("after a move")
		r.increments(held)
		end()
		if moved.Load() < 50 || compacted.Load() < 5 {
			r.t.Errorf("only %d transfers and %d compactions", moved.Load(), compacted.Load())
		}
		for _, c := range held {
			if err := r.nodes[0].core.Cuts().Release(r.t.Context(), c.Hold); err != nil {
				r.t.Error(err)
			}
		}
		r.stop(r.nodes...)
	})
}

// increments applies what has changed between two cuts to the first one's state: that is the second one's.
func (r *rig) increments(held []*dataapi.Cut) {
	r.t.Helper()
	_, state, err := r.nodes[0].read(r, mvcc.Cut{Select: mvcc.SelectLatest, At: held[0].Revision})
	if err != nil {
		r.t.Fatal(err)
	}
	for i := range held[1:] {
		before, c := held[i], held[i+1]
		_, changed, err := r.nodes[i%3].read(r, mvcc.Cut{Select: mvcc.SelectChanges, At: c.Revision, After: before.Revision})
		if err != nil {
			r.t.Fatal(err)
		}
		maps.Copy(state, changed)
		_, want, err := r.nodes[i%3].read(r, mvcc.Cut{Select: mvcc.SelectLatest, At: c.Revision})
		if err != nil || !maps.Equal(state, want) {
			r.t.Errorf("after %d, the changes up to %d give %v, want %v, %v", before.Revision, c.Revision, state, want, err)
		}
	}
}

// transfers moves money between accounts, most of which are in different ranges, until stop.
func (r *rig) transfers(n *rigNode, seed, accounts int, account func(int) string, stop <-chan struct{}, moved *atomic.Int64) {
	for i := seed; ; i++ {
		select {
		case <-stop:
			return
		case <-time.After(50 * time.Millisecond):
		}
		from, to := i*5%accounts, (i*7+1)%accounts
		if from == to {
			continue
		}
		txn := &pb.TxnRequest{}
		for _, change := range []struct{ who, by int }{{from, -1}, {to, 1}} {
			resp, err := n.core.KV().Range(r.t.Context(), &pb.RangeRequest{Key: []byte(account(change.who))})
			if err != nil || len(resp.GetKvs()) != 1 {
				break
			}
			kv := resp.GetKvs()[0]
			has, _ := strconv.Atoi(string(kv.GetValue()))
			txn.Compare = append(txn.Compare, &pb.Compare{Target: pb.Compare_MOD, Key: kv.GetKey(), TargetUnion: &pb.Compare_ModRevision{ModRevision: kv.GetModRevision()}})
			txn.Success = append(txn.Success, &pb.RequestOp{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: kv.GetKey(), Value: []byte(strconv.Itoa(has + change.by))}}})
		}
		if len(txn.GetSuccess()) != 2 {
			continue
		}
		if resp, err := n.core.KV().Txn(r.t.Context(), txn); err == nil && resp.GetSucceeded() {
			moved.Add(1)
		}
	}
}

// compactions compacts all but the last revisions, again and again until stop.
func (r *rig) compactions(n *rigNode, stop <-chan struct{}, compacted *atomic.Int64) {
	for {
		select {
		case <-stop:
			return
		case <-time.After(200 * time.Millisecond):
		}
		now, _, err := n.core.router.Present(r.t.Context())
		if err != nil {
			continue
		}
		if _, err := n.core.KV().Compact(r.t.Context(), &pb.CompactionRequest{Revision: int64(now - 2), Physical: compacted.Load()%2 == 0}); err == nil {
			compacted.Add(1)
		}
	}
}

// Trap 118: the hold of a dead backup expires, and what it kept goes. Who goes on reading by it is told so, and so is
// who renews it.
func TestHoldExpires(t *testing.T) {
	bubble(t, 3, borders(2), nil, func(r *rig) {
		r.raised()
		at := r.mustPut(r.nodes[0], keyOf(0), "old")
		c := r.cut(r.nodes[0], 0)
		if int64(c.Revision) != at || c.Compacted != -1 || c.Held != 0 {
			t.Fatalf("%+v, the last write was at %d", c, at)
		}
		for i := range 5 {
			at = r.mustPut(r.nodes[1], keyOf(0), strconv.Itoa(i))
		}
		r.mustRemove(r.nodes[0], keyOf(0))
		if _, err := r.nodes[2].core.KV().Compact(r.t.Context(), &pb.CompactionRequest{Revision: at, Physical: true}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(50 * time.Minute)
		old := mvcc.Cut{Select: mvcc.SelectAll, At: c.Revision}
		for _, n := range r.nodes {
			if _, values, err := n.read(r, old); err != nil || values[keyOf(0)] != "old" {
				t.Errorf("node %s, held: %v, %v", n.id, values, err)
			}
		}
		_, err := r.nodes[2].core.KV().Range(r.t.Context(), &pb.RangeRequest{Key: []byte(keyOf(0)), Revision: int64(c.Revision)})
		r.wantKind("a client's read of what is compacted", err, kverror.Compacted)
		if _, err := r.nodes[1].core.Cuts().Renew(r.t.Context(), c.Hold, 0); err != nil {
			t.Fatal(err)
		}
		time.Sleep(50 * time.Minute)
		if _, _, err := r.nodes[0].read(r, old); err != nil {
			t.Errorf("renewed: %v", err)
		}
		time.Sleep(15 * time.Minute)
		for _, n := range r.nodes {
			_, _, err := n.read(r, old)
			r.wantKind("expired", err, kverror.HoldEnded)
		}
		_, err = r.nodes[1].core.Cuts().Renew(r.t.Context(), c.Hold, 0)
		r.wantKind("renewed too late", err, kverror.HoldEnded)
		_, err = r.nodes[1].core.Cuts().Cut(r.t.Context(), dataapi.CutOptions{From: 2})
		r.wantKind("from what is compacted", err, kverror.Compacted)
		r.stop(r.nodes...)
	})
}
