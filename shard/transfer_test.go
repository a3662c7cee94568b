package shard

import (
	"testing"
	"testing/synctest"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/rangeapi"
)

// The group hands the lead over before the replica hears of it. Nothing is evaluated in between:
// its revisions would be nobody's.
func TestTransferEndsWithTheLead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeWorld(t)
		defer w.stop()
		w.serve(1, 5)
		handed := make(chan error, 1)
		go func() { handed <- w.store.Replica(1).TransferTo(t.Context(), 2) }()
		synctest.Wait()
		put := make(chan error, 1)
		go func() {
			_, err := w.store.Do(t.Context(), &rangeapi.Request{Range: 1, Generation: 1, Op: &pb.PutRequest{Key: []byte("k")}})
			put <- err
		}()
		synctest.Wait()
		if len(w.seq.asks) > 0 || len(handed) > 0 {
			t.Errorf("%d revisions are asked for, and the transfer is over: %t", len(w.seq.asks), len(handed) > 0)
		}
		w.groups.group(1).lead(raftgroup.LeaderState{Term: 6, Leader: 2, LeaderNode: 2})
		if err := <-handed; err != nil {
			t.Error(err)
		}
		if err := <-put; kverror.Of(err).Kind != kverror.NotLeader {
			t.Error(err)
		}
	})
}
