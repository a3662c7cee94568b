package conformance

import (
	"context"
	"fmt"
	"sync"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
)

const (
	candidates = 9
	terms      = 8 // of each
)

// seen is what one observer received: values in order, each with its revision and that
// of the leader's key.
type seen struct {
	leader, revision []int64
	values           []string
}

// There is one leader at a time, each with a higher revision than those before.
// Observers at all nodes receive what leaders have proclaimed, in that order.
func TestElection(t *testing.T) {
	t.Parallel()
	r, ctx := newRig(t, candidates)
	observing, stop := context.WithCancel(ctx)
	defer stop()
	var observers, workers sync.WaitGroup
	told := make([]seen, 3)
	for i := range told {
		observers.Go(func() { told[i].observe(observing, r.session(t, r.clients[i], "election")) })
	}
	var in critical
	// said is who proclaimed what, by the leader's revision. Of the leader.
	said := map[int64]map[string]bool{}
	for i, client := range r.clients {
		workers.Go(func() {
			s := r.session(t, client, "election")
			for n := 0; n < terms && s != nil && ctx.Err() == nil; n++ {
				dies := (i+n)%deaths == 0
				leadOnce(ctx, t, &in, said, s, i+1, dies)
				if dies {
					s = r.session(t, client, "election")
				}
			}
			if s != nil {
				s.Close()
			}
		})
	}
	workers.Wait()
	stop()
	observers.Wait()
	if in.entered != candidates*terms {
		t.Errorf("%d terms of %d", in.entered, candidates*terms)
	}
	for i := range told {
		told[i].check(t, said)
	}
	t.Logf("%d terms, %d splits, observed %d %d %d values", in.entered, r.splits.Load(), len(told[0].values), len(told[1].values), len(told[2].values))
}

// leadOnce is a candidate until it leads, proclaims something, and resigns or dies.
func leadOnce(ctx context.Context, t *testing.T, in *critical, said map[int64]map[string]bool, s *concurrency.Session, who int, dies bool) {
	t.Helper()
	e := concurrency.NewElection(s, "election")
	first, second := fmt.Sprintf("%d campaigns", who), fmt.Sprintf("%d leads", who)
	if err := e.Campaign(ctx, first); err != nil {
		t.Errorf("%d: campaign: %v", who, err)
		return
	}
	in.enter(t, who, e.Rev())
	said[e.Rev()] = map[string]bool{first: true, second: true}
	if err := e.Proclaim(ctx, second); err != nil {
		t.Errorf("%d: proclaim: %v", who, err)
	}
	now, err := e.Leader(ctx)
	if err != nil || string(now.Kvs[0].Value) != second || now.Kvs[0].CreateRevision != e.Rev() {
		t.Errorf("%d leads since revision %d, but the leader is %v, %v", who, e.Rev(), now, err)
	}
	in.leave(t, who)
	if !dies {
		err = e.Resign(ctx)
	} else {
		err = s.Close()
	}
	if err != nil {
		t.Errorf("%d: resign: %v", who, err)
	}
}

func (o *seen) observe(ctx context.Context, s *concurrency.Session) {
	if s == nil {
		return
	}
	defer s.Close()
	for resp := range concurrency.NewElection(s, "election").Observe(ctx) {
		o.take(resp)
	}
}

func (o *seen) take(resp *clientv3.GetResponse) {
	kv := resp.Kvs[0]
	o.leader = append(o.leader, kv.CreateRevision)
	o.revision = append(o.revision, kv.ModRevision)
	o.values = append(o.values, string(kv.Value))
}

// check compares what an observer received with what was proclaimed. An observer may
// miss leaders, as etcd's does. A leader's key may be older than the last word of the
// leader before.
func (o *seen) check(t *testing.T, said map[int64]map[string]bool) {
	t.Helper()
	if len(o.values) == 0 {
		t.Error("an observer received nothing")
	}
	for i, v := range o.values {
		if !said[o.leader[i]][v] {
			t.Errorf("an observer received %q from the leader since %d, which said %v", v, o.leader[i], said[o.leader[i]])
		}
		if i > 0 && (o.leader[i] < o.leader[i-1] || o.leader[i] == o.leader[i-1] && o.revision[i] < o.revision[i-1]) {
			t.Errorf("an observer received %d at %d after %d at %d", o.leader[i], o.revision[i], o.leader[i-1], o.revision[i-1])
		}
	}
}
