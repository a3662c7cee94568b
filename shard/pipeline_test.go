package shard

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
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
						_, err := w.node.Do(t.Context(), &Request{Range: 1, Generation: 1, Op: &pb.PutRequest{Key: fmt.Appendf(nil, "k%d", i)}})
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
