package node_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/api/adminpb"
)

// Under load an operator splits a range and merges the halves again, twenty times. No request
// fails, and no acknowledged write is lost. A watcher gets every version of every key once
// and in order. How long writes to the two ranges stand still is logged.
func TestMergesByCommand(t *testing.T) {
	c := newProcesses(t)
	c.startAll()
	c.ready()
	op, err := adminapi.NewClient([]string{c.nodes[2].client}, nil)
	if err != nil {
		t.Fatal(err)
	}
	h := newHistory()
	ctx, cancel := context.WithCancel(t.Context())
	var busy sync.WaitGroup
	all := c.clientOf(c.nodes...)
	for w := range 6 {
		busy.Go(func() { h.write(ctx, t, all, w, 2*time.Millisecond) })
	}
	watching, stop := context.WithCancel(t.Context())
	var told sync.WaitGroup
	told.Go(func() { everyVersion(watching, t, c.clientOf(c.nodes[1])) })
	p := &prober{c: all}
	busy.Go(func() { p.run(ctx) })
	o := &operatorAt{t: t, c: op}
	var stood []time.Duration
	for range 20 {
		left := o.halve("\x01probe")
		p.reset()
		o.merge(left)
		stood = append(stood, p.longest())
	}
	slices.Sort(stood)
	t.Logf("writes to the two ranges stood still for %v in the median, %v at most", stood[len(stood)/2], stood[len(stood)-1])
	o.refuseMerges()
	cancel()
	busy.Wait()
	stop()
	told.Wait()
	if len(h.failed) > 0 || len(p.failed) > 0 {
		t.Errorf("of %d puts failed %v, of the probe's %v", h.count(), h.failed, p.failed)
	}
	h.verify(t, c.clientOf(c.nodes[0]), c.clientOf(c.nodes[2]))
}

// halve splits the range of a key there, and returns the one that keeps what is below.
func (o *operatorAt) halve(key string) (left uint64) {
	o.t.Helper()
	s, err := o.c.RangeSplit(o.t.Context(), []byte(key))
	if err != nil {
		o.t.Fatalf("split at %q: %v", key, err)
	}
	return s.GetLeft().GetId()
}

// merge merges a range with its right neighbour. A merge that was given up, since a busy
// node did not follow in time, is asked for again.
func (o *operatorAt) merge(left uint64) {
	o.t.Helper()
	for range 10 {
		ctx, cancel := context.WithTimeout(o.t.Context(), time.Minute)
		m, err := o.c.RangeMerge(ctx, left)
		if err == nil {
			err = o.c.AwaitOperation(ctx, m.GetOperation().GetId())
		}
		cancel()
		if err != nil {
			o.t.Fatalf("merge range %d: %v", left, err)
		}
		right := m.GetOperation().GetRight()
		if !slices.ContainsFunc(o.ranges(), func(r *adminpb.Range) bool { return r.GetId() == right }) {
			return
		}
		o.t.Logf("merge %d was given up", m.GetOperation().GetId())
	}
	o.t.Fatalf("range %d is not merged after ten attempts", left)
}

func (o *operatorAt) refuseMerges() {
	last := o.ranges()[len(o.ranges())-1]
	for what, id := range map[string]uint64{"the last range": last.GetId(), "no range": 999} {
		_, err := o.c.RangeMerge(o.t.Context(), id)
		var refused *adminapi.Refusal
		if !errors.As(err, &refused) || strings.TrimSpace(refused.NextStep) == "" {
			o.t.Errorf("merge of %s: %v", what, err)
		}
	}
}

// prober puts keys on both sides of where the ranges are cut, one after the other, and
// remembers the slowest one.
type prober struct {
	c *clientv3.Client

	mu sync.Mutex
	// Guarded by mu.
	slowest time.Duration
	failed  []error
}

func (p *prober) run(ctx context.Context) {
	for i := 0; ctx.Err() == nil; i++ {
		key := []string{"\x01proba", "\x01probe"}[i%2]
		begin := time.Now()
		_, err := p.c.Put(context.WithoutCancel(ctx), key, "v")
		took := time.Since(begin)
		p.mu.Lock()
		p.slowest = max(p.slowest, took)
		if err != nil {
			p.failed = append(p.failed, err)
		}
		p.mu.Unlock()
	}
}

func (p *prober) reset() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.slowest = 0
}

func (p *prober) longest() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.slowest
}

// everyVersion watches everything until ctx ends, and checks that of each key every version
// comes, once and in order.
func everyVersion(ctx context.Context, t *testing.T, c *clientv3.Client) {
	t.Helper()
	versions := map[string]int64{}
	events, last := 0, int64(0)
	for r := range c.Watch(ctx, "\x00", clientv3.WithFromKey(), clientv3.WithRev(1)) {
		if err := r.Err(); err != nil {
			t.Errorf("the watch ended: %v", err)
		}
		for _, e := range r.Events {
			events++
			key := string(e.Kv.Key)
			if e.Kv.ModRevision < last || e.Kv.Version != versions[key]+1 {
				t.Errorf("key %q: version %d at revision %d follows version %d, revision %d", key, e.Kv.Version, e.Kv.ModRevision, versions[key], last)
			}
			versions[key], last = e.Kv.Version, e.Kv.ModRevision
		}
	}
	if events == 0 {
		t.Error("the watcher was told nothing")
	}
}
