package shard

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/rangeapi"
)

// A pass whose turn is over sends what it has on its way, and evaluates the rest afterwards: a
// crowd is not answered as late as its last. Each one is evaluated once, and all are answered.
func TestPassSendsWhatItHas(t *testing.T) {
	for _, c := range []struct {
		name  string
		turn  time.Duration
		first func(int) bool
	}{
		{"the turn is long", time.Hour, func(n int) bool { return n == 100 }},
		{"the turn is over at once", -1, func(n int) bool { return n > 0 && n <= evaluateLook }},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newFakeWorldWith(t, Limits{EvaluateTurn: c.turn})
				defer w.stop()
				w.serve(1, 5)
				release := w.node.pool.hold()
				done := make(chan error, 100)
				for i := range 100 {
					go func() {
						_, err := w.node.Do(t.Context(), &rangeapi.Request{Range: 1, Generation: 1, Op: &pb.PutRequest{Key: fmt.Appendf(nil, "k%d", i)}})
						done <- err
					}()
				}
				synctest.Wait()
				release()
				synctest.Wait()
				var asked []int
				for len(w.seq.asks) > 0 {
					asked = append(asked, w.seq.asks[0].req.Count)
					w.seq.answer(0, nil)
					synctest.Wait()
				}
				total := 0
				for _, n := range asked {
					total += n
				}
				if len(asked) == 0 || !c.first(asked[0]) || total != 100 {
					t.Errorf("revisions were asked for %v", asked)
				}
				for g := w.groups.group(1); len(g.log) > 0; {
					if err := g.apply(entryOf(g.take(0))); err != nil {
						t.Fatal(err)
					}
				}
				for range 100 {
					if err := <-done; err != nil {
						t.Error(err)
					}
				}
			})
		})
	}
}

// Where the group has handed the lead over and the replica has not heard of it yet, nothing is
// evaluated: its revisions would be nobody's.
func TestTransferEndsWithTheLead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeWorld(t)
		defer w.stop()
		w.serve(1, 5)
		handed := make(chan error, 1)
		go func() { handed <- w.node.Replica(1).TransferTo(t.Context(), 2) }()
		synctest.Wait()
		put := make(chan error, 1)
		go func() {
			_, err := w.node.Do(t.Context(), &rangeapi.Request{Range: 1, Generation: 1, Op: &pb.PutRequest{Key: []byte("k")}})
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
