package node_test

import (
	"context"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// watched is what one client's watcher was told.
type watched struct {
	name string
	mu   sync.Mutex
	// Guarded by mu: values by revision, and the last revision.
	values map[int64]string
	last   int64
	err    string
}

// watch follows all keys from a revision on until ctx ends. clientv3 goes on by itself
// where a node is lost.
func (w *watched) watch(ctx context.Context, cl *clientv3.Client, from int64) {
	for resp := range cl.Watch(ctx, "", clientv3.WithPrefix(), clientv3.WithRev(from), clientv3.WithPrevKV()) {
		w.mu.Lock()
		if err := resp.Err(); err != nil && ctx.Err() == nil {
			w.err = err.Error()
		}
		for _, e := range resp.Events {
			if e.Kv.ModRevision <= w.last {
				w.err = "out of order or twice"
			}
			if (e.PrevKv == nil) != e.IsCreate() || e.PrevKv != nil && e.PrevKv.Version+1 != e.Kv.Version {
				w.err = "the version before is wrong"
			}
			w.last = e.Kv.ModRevision
			w.values[w.last] = string(e.Kv.Value)
		}
		w.mu.Unlock()
	}
}

func (w *watched) reached(rev int64) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.last >= rev || w.err != ""
}

// Watchers at every node, from the beginning and from later on, are told every
// acknowledged put once and in order, while one node after the other is killed with -9
// under load.
func TestWatchersUnderKills(t *testing.T) {
	c := serving(t)
	h := newHistory()
	writing, stopWriting := context.WithCancel(t.Context())
	watching, stopWatching := context.WithCancel(t.Context())
	defer stopWatching()
	all := c.clientOf(c.nodes...)
	var writers, watchers sync.WaitGroup
	for w := range 8 {
		writers.Go(func() { h.write(writing, t, all, w, 2*time.Millisecond) })
	}
	var ws []*watched
	begin := func(name string, from int64, nodes ...*process) {
		w := &watched{name: name, values: map[int64]string{}}
		ws = append(ws, w)
		cl := c.clientOf(nodes...)
		watchers.Go(func() { w.watch(watching, cl, from) })
	}
	for _, n := range c.nodes {
		begin("at "+n.name, 2, n)
	}
	begin("anywhere", 2, c.nodes...)
	rng := rand.New(rand.NewPCG(uint64(time.Now().UnixNano()), 3))
	for round := range 3 {
		time.Sleep(time.Second + time.Duration(rng.IntN(500))*time.Millisecond)
		c.nodes[round].kill()
		begin("later", 2, c.nodes...)
		time.Sleep(2 * time.Second)
		c.start(c.nodes[round])
	}
	time.Sleep(time.Second)
	stopWriting()
	writers.Wait()
	last := int64(0)
	for rev := range h.revisions {
		last = max(last, rev)
	}
	stopped := time.Now()
	for _, w := range ws {
		for end := time.Now().Add(30 * time.Second); !w.reached(last) && time.Now().Before(end); {
			time.Sleep(20 * time.Millisecond)
		}
		t.Logf("%s has everything %v after the last put", w.name, time.Since(stopped).Round(time.Millisecond))
		w.mu.Lock()
		missing := 0
		for rev, value := range h.revisions {
			if w.values[rev] != value {
				missing++
			}
		}
		if w.err != "" || missing > 0 {
			t.Errorf("%s: %q, %d of %d puts are missing, the last revision is %d of %d", w.name, w.err, missing, len(h.revisions), w.last, last)
		}
		w.mu.Unlock()
	}
	stopWatching()
	watchers.Wait()
	t.Logf("%d puts, %d watchers, failed: %v", h.count(), len(ws), h.failed)
}
