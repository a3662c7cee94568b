package shard

import (
	"context"
	"fmt"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/rangeapi"
)

// instantGroup commits and applies at once, in a goroutine of its own.
type instantGroup struct {
	*fakeGroup
	entries chan raftgroup.Entry
}

func (g *instantGroup) Propose(term uint64, data []byte, _ func(error)) error {
	g.entries <- raftgroup.Entry{Term: term, Data: data}
	return nil
}

// benchWorld is a node whose range 1 has a log without disk and peers.
func benchWorld(b *testing.B) *fakeWorld {
	b.Helper()
	w := newLeasedWorld(b, Limits{}, "auto")
	w.leases.known[7] = 1
	w.seq.auto = true
	g := &instantGroup{fakeGroup: w.groups.group(1), entries: make(chan raftgroup.Entry, 1024)}
	r := w.store.Replica(1)
	r.mu.Lock()
	r.group = g
	r.mu.Unlock()
	w.serve(1, 5)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for e := range g.entries {
			if err := g.apply(e); err != nil {
				b.Error(err)
			}
		}
	}()
	b.Cleanup(func() {
		w.store.Stop()
		close(g.entries)
		<-done
		w.leases.wg.Wait()
		if err := w.engine.Close(); err != nil {
			b.Error(err)
		}
	})
	return w
}

// BenchmarkPut is what a put costs between arrival and answer, beside the log: 64
// callers per processor write values of 256 bytes.
func BenchmarkPut(b *testing.B) { benchPut(b, 0) }

// BenchmarkPutWithLease is the same with keys that are attached to a lease.
func BenchmarkPutWithLease(b *testing.B) { benchPut(b, 7) }

func benchPut(b *testing.B, lease int64) {
	b.Helper()
	w := benchWorld(b)
	value := make([]byte, 256)
	b.SetParallelism(64)
	b.ReportAllocs()
	b.RunParallel(func(p *testing.PB) {
		for i := 0; p.Next(); i++ {
			req := &rangeapi.Request{Range: 1, Generation: 1, Op: &pb.PutRequest{Key: fmt.Appendf(nil, "key-%08d", i%100000), Value: value, Lease: lease}}
			if _, err := w.store.Do(context.Background(), req); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// BenchmarkGet is a read of one key at a revision under the lease.
func BenchmarkGet(b *testing.B) {
	w := benchWorld(b)
	put := &rangeapi.Request{Range: 1, Generation: 1, Op: &pb.PutRequest{Key: []byte("k"), Value: make([]byte, 256)}}
	if _, err := w.store.Do(context.Background(), put); err != nil {
		b.Fatal(err)
	}
	req := &rangeapi.Request{Range: 1, Generation: 1, ReadRevision: 2, Op: &pb.RangeRequest{Key: []byte("k")}}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := w.store.Do(context.Background(), req); err != nil {
			b.Fatal(err)
		}
	}
}
