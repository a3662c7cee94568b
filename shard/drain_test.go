package shard

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/command"
)

// A range without quorum does not close its pipeline. All others hand their
// leaderships over meanwhile, with time to spare.
func TestDrainBesideARangeWithoutQuorum(t *testing.T) {
	virtually(t, func(t *testing.T) {
		w := newFakeWorld(t)
		defer w.stop()
		w.seq.auto = true
		w.serve(1, 5)
		for id := keyspace.RangeID(2); id < 6; id++ {
			split := command.AppendHeader(nil, command.Header{Kind: command.KindSplit, Term: 5, Generation: keyspace.Generation(id - 1)})
			split = command.AppendSplit(split, &command.Split{
				Key: []byte{'z' - byte(id)}, Child: id, ConfIndex: raftgroup.InitIndex, Replicas: testDescriptor.Replicas,
			})
			if err := w.groups.group(1).apply(raftgroup.Entry{Term: 5, Data: split}); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
			w.serve(id, 5)
		}
		stuck := make(chan error, 1)
		go func() {
			_, err := w.store.Do(context.Background(), &rangeapi.Request{Range: 1, Generation: 5, Op: &pb.PutRequest{Key: []byte("a")}})
			stuck <- err
		}()
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		if err := w.store.Drain(ctx); err == nil {
			t.Fatal("drained without quorum")
		}
		if ctx.Err() != nil {
			t.Error("the drain took all its time")
		}
		for id := keyspace.RangeID(1); id < 6; id++ {
			g := w.groups.group(id)
			g.mu.Lock()
			if got, want := g.transferred, id != 1; got != want {
				t.Errorf("range %s handed over: %t, want %t", id, got, want)
			}
			g.mu.Unlock()
		}
		w.store.Stop()
		if err := <-stuck; err == nil {
			t.Error("written without quorum")
		}
	})
}
