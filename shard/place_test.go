package shard

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/rangeapi"
)

// A late word that a proposal was dropped is about its own term. What a later
// leadership left behind is answered by the log.
func TestLateDropKeepsOtherTerms(t *testing.T) {
	virtually(t, func(t *testing.T) {
		w := newFakeWorld(t)
		defer w.stop()
		w.seq.auto = true
		w.serve(1, 5)
		g := w.groups.group(1)
		errs := make([]chan error, 2)
		for i := range errs {
			term := uint64(5 + 2*i)
			// Ready without an applied entry, which would have told the older one's fate.
			g.lead(raftgroup.LeaderState{Term: term, Leader: 1, LeaderNode: 1, IsLeader: true, Ready: true})
			errs[i] = make(chan error, 1)
			go func() {
				_, err := w.store.Do(context.Background(), &rangeapi.Request{Range: 1, Generation: 1, Op: &pb.PutRequest{Key: []byte("a")}})
				errs[i] <- err
			}()
			synctest.Wait()
			g.lead(raftgroup.LeaderState{Term: term + 1, Leader: 2, LeaderNode: 2})
		}
		g.take(0).dropped(raftgroup.ErrDropped)
		if err := <-errs[0]; !errors.Is(err, kverror.Dropped) {
			t.Errorf("the dropped write: %v", err)
		}
		if st := w.store.Replica(1).Show(); st.LostBatches != 1 || st.NodePendingBytes == 0 {
			t.Errorf("%d batches are lost, %d bytes under way; the one of term 7 is", st.LostBatches, st.NodePendingBytes)
		}
		e := g.take(0)
		if err := g.apply(raftgroup.Entry{Term: e.term, Data: e.data}); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		select {
		case err := <-errs[1]:
			if err != nil {
				t.Errorf("the write of term 7: %v", err)
			}
		default:
			t.Error("the write of term 7 is not answered")
		}
		if st := w.store.Replica(1).Show(); st.LostBatches != 0 || st.NodePendingBytes != 0 {
			t.Errorf("%d batches are lost, %d bytes under way", st.LostBatches, st.NodePendingBytes)
		}
	})
}

// A read is not answered if the leadership ended or changed meanwhile: a snapshot may have removed
// versions before the replica's record shows it.
func TestReadEndsWithLeadership(t *testing.T) {
	virtually(t, func(t *testing.T) {
		w := newFakeWorld(t)
		defer w.stop()
		w.seq.auto = true
		w.serve(1, 5)
		r, g := w.store.Replica(1), w.groups.group(1)
		req := &rangeapi.Request{Range: 1, Generation: 1, Op: &pb.RangeRequest{Key: []byte("a")}}
		bounds := keyspace.Single([]byte("a"))
		lead, err := r.awaitOlder(t.Context(), req, bounds, 1, &waits{})
		if err != nil {
			t.Fatal(err)
		}
		check := func(want error) {
			t.Helper()
			if err := r.checkRead(req, bounds, lead, 1, 0); !errors.Is(err, want) {
				t.Errorf("got %v, want %v", err, want)
			}
		}
		check(nil)
		g.lead(raftgroup.LeaderState{Term: 6, Leader: 2, LeaderNode: 2})
		check(errAgain)
		if _, err := w.store.Do(t.Context(), req); !errors.Is(err, kverror.NotLeader) {
			t.Errorf("the read that starts over: %v", err)
		}
		w.serve(1, 7)
		check(errAgain)
	})
}
