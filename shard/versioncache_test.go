package shard

import (
	"strings"
	"testing"
	"testing/synctest"

	"github.com/prometheus/client_golang/prometheus/testutil"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/command"
	"github.com/skeindb/skein/shard/eval"
)

// TestVersionCacheEndsWithTheLeadership: another leader deletes a key that this one has
// written; back in office, this one must not go by what it remembers.
func TestVersionCacheEndsWithTheLeadership(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeWorld(t)
		defer w.stop()
		w.seq.auto = true
		g, r := w.groups.group(1), w.store.Replica(1)
		put := func(term uint64) {
			t.Helper()
			done := make(chan error)
			go func() {
				_, err := w.store.Do(t.Context(), &rangeapi.Request{Range: 1, Generation: 1, Op: &pb.PutRequest{Key: []byte("k")}})
				done <- err
			}()
			synctest.Wait()
			e := g.take(0)
			if err := g.apply(raftgroup.Entry{Term: term, Data: e.data}); err != nil {
				t.Fatal(err)
			}
			if err := <-done; err != nil {
				t.Fatal(err)
			}
		}
		version := func() int64 {
			t.Helper()
			v, ok, err := r.data.Get([]byte("k"), eval.Newest)
			if err != nil || !ok {
				t.Fatal(ok, err)
			}
			return v.Version
		}
		w.serve(1, 5)
		put(5)
		put(5)
		if got := version(); got != 2 {
			t.Fatalf("version %d after two puts", got)
		}
		if _, known := w.store.cache.Get(r.epochs.Of([]byte("k")), []byte("k")); !known {
			t.Fatal("nothing is remembered")
		}

		g.lead(raftgroup.LeaderState{Term: 6, Leader: 2, LeaderNode: 2})
		rev := w.seq.allocateLocked(keyspace.SequenceRequest{Count: 1}).First
		entry := command.AppendHeader(nil, command.Header{Kind: command.KindBatch, Term: 6, Generation: r.rec.Generation})
		entry = command.AppendBatchHeader(entry, &command.Batch{Prev: r.rec.Last, Number: 1, Hash: r.rec.Hash, First: rev, Txns: 1})
		entry = command.AppendVersion(append(entry, 1), &mvcc.Version{Key: []byte("k"), Mod: rev, Tombstone: true}, command.Prior{Lived: true})
		if err := g.apply(raftgroup.Entry{Term: 6, Data: entry}); err != nil {
			t.Fatal(err)
		}

		w.serve(1, 7)
		put(7)
		if got := version(); got != 1 {
			t.Errorf("version %d of a key that was deleted before", got)
		}
	})
}

// TestVersionCacheServesReads: a read fills the cache with the newest version alone, and what
// is in it answers no question about another revision.
func TestVersionCacheServesReads(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeWorld(t)
		defer w.stop()
		w.seq.auto = true
		g, r := w.groups.group(1), w.store.Replica(1)
		put := func(value string) {
			t.Helper()
			done := make(chan error)
			go func() {
				_, err := w.store.Do(t.Context(), &rangeapi.Request{Range: 1, Generation: 1, Op: &pb.PutRequest{Key: []byte("k"), Value: []byte(value)}})
				done <- err
			}()
			synctest.Wait()
			if err := g.apply(raftgroup.Entry{Term: 5, Data: g.take(0).data}); err != nil {
				t.Fatal(err)
			}
			if err := <-done; err != nil {
				t.Fatal(err)
			}
		}
		read := func(at keyspace.Revision, want string, hit bool) {
			t.Helper()
			before := testutil.ToFloat64(w.store.metrics.reads.CacheHits)
			resp, err := w.store.Do(t.Context(), &rangeapi.Request{
				Range: 1, Generation: 1, ReadRevision: w.seq.last, Op: &pb.RangeRequest{Key: []byte("k"), Revision: int64(at)},
			})
			if err != nil {
				t.Fatal(err)
			}
			got := resp.Op.(*pb.RangeResponse)
			if len(got.Kvs) != 1 || string(got.Kvs[0].Value) != want {
				t.Errorf("read at %d: %v, want %q", at, got.Kvs, want)
			}
			if now := testutil.ToFloat64(w.store.metrics.reads.CacheHits); (now > before) != hit {
				t.Errorf("read at %d: from memory %v, want %v", at, now > before, hit)
			}
		}
		w.serve(1, 5)
		put("one") // revision 2
		put("two") // revision 3
		read(0, "two", true)
		read(2, "one", false)
		read(0, "two", true)

		r.mu.Lock()
		r.epochs.End(w.store.cache)
		r.mu.Unlock()
		read(2, "one", false)
		read(0, "two", false)
		read(0, "two", true)
		large := strings.Repeat("x", eval.MaxCachedValueBytes+1)
		put(large)
		read(0, large, false)
		read(0, large, false)
	})
}
