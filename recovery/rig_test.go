package recovery_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.uber.org/goleak"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/simdisk"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/node"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/recovery"
	"github.com/skeindb/skein/sim/simbus"
	"github.com/skeindb/skein/transport"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// rig is a cluster of Cores in a bubble of virtual time, on a simulated bus and memory disks.
type rig struct {
	t      *testing.T
	net    *simbus.Network
	nodes  []*machine
	splits [][]byte
	rng    *rand.Rand
	// operators ends the calls of operators, which are within the process and must not outlive the stores.
	operators func()
}

// machine is a node's disk and the Core that runs on it, nil while none does.
type machine struct {
	id   keyspace.NodeID
	disk *simdisk.Disk
	core *node.Core
}

func bubble(t *testing.T, n int, splits []string, test func(r *rig)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		r := &rig{t: t, rng: rand.New(rand.NewPCG(7, uint64(n)))}
		for _, s := range splits {
			r.splits = append(r.splits, []byte(s))
		}
		r.net = simbus.New(1, simbus.Faults{Delay: simbus.Delay{Min: 100 * time.Microsecond, Max: 400 * time.Microsecond}})
		for i := range n {
			r.nodes = append(r.nodes, &machine{id: keyspace.NodeID(i + 1), disk: simdisk.New()})
		}
		t.Cleanup(func() {
			for _, m := range r.nodes {
				if m.core != nil {
					m.core.Crash()
				}
			}
		})
		r.start(r.nodes...)
		test(r)
	})
}

func (r *rig) options(m *machine) node.Options {
	core, logs := observer.New(zap.WarnLevel)
	r.t.Cleanup(func() {
		if r.t.Failed() {
			for _, e := range logs.All() {
				r.t.Logf("node %s %s %s %v", m.id, e.Time.Format("04:05.000"), e.Message, e.ContextMap())
			}
		}
	})
	o := node.Options{
		Cluster: 0xc1, Self: m.id, SplitKeys: r.splits,
		FS: m.disk, DataDir: "data", WALDir: "data/wal", Clock: clock.Virtual(),
		NewBus: func(c transport.Config) (node.Bus, error) {
			b, err := r.net.NewBus(c)
			if err != nil {
				return nil, err // not a typed nil
			}
			return b, nil
		},
		Heartbeat: 100 * time.Millisecond, Election: time.Second, RequestTimeout: 7 * time.Second,
		MaxRequestBytes: 256 << 10, MaxTxnOps: 128, MemoryBytes: 96 << 20, WALSegmentBytes: 1 << 20,
		Logger: zap.New(core),
	}
	for i := range r.nodes {
		o.Founders = append(o.Founders, fsm.Node{
			ID: keyspace.NodeID(i + 1), Name: fmt.Sprintf("n%d", i+1), PeerURLs: []string{fmt.Sprintf("http://n%d:2380", i+1)},
		})
	}
	return o
}

func (r *rig) start(ms ...*machine) {
	r.t.Helper()
	errs := make([]error, len(ms))
	var wg sync.WaitGroup
	for i, m := range ms {
		wg.Go(func() { m.core, errs[i] = node.Open(r.t.Context(), r.options(m)) })
	}
	wg.Wait()
	for i, err := range errs {
		if err != nil {
			ms[i].core = nil
			r.t.Fatalf("start node %s: %v", ms[i].id, err)
		}
	}
}

// crash cuts the power of nodes in one moment. Their disks keep half of what was not synced.
func (r *rig) crash(ms ...*machine) {
	for _, m := range ms {
		r.net.Crash(m.id)
	}
	for _, m := range ms {
		m.disk = m.disk.Crash(50, r.rng)
	}
	if r.operators != nil {
		r.operators()
		r.operators = nil
	}
	for _, m := range ms {
		c := m.core
		m.core = nil
		c.Crash()
	}
}

func (m *machine) dir() recovery.Dir {
	return recovery.Dir{FS: m.disk, Data: "data", Clock: clock.Virtual(), WALSegmentBytes: 1 << 20}
}

// collect collects from the nodes, each file through its bytes.
func (r *rig) collect(ms ...*machine) (all []*recovery.Collected) {
	r.t.Helper()
	for _, m := range ms {
		c, err := recovery.Collect(m.dir())
		if err != nil {
			r.t.Fatalf("collect from node %s: %v", m.id, err)
		}
		if want := fmt.Sprintf("n%d (%[1]d)", m.id); c.NodeName() != want {
			r.t.Errorf("collected from node %q, want %q", c.NodeName(), want)
		}
		b, err := c.Encode()
		if err == nil {
			c, err = recovery.DecodeCollected(b)
		}
		if err != nil {
			r.t.Fatal(err)
		}
		all = append(all, c)
	}
	return all
}

func (r *rig) plan(in []*recovery.Collected, o recovery.PlanOptions) *recovery.Plan {
	r.t.Helper()
	p, err := recovery.MakePlan(in, o)
	if err != nil {
		r.t.Fatalf("plan: %v", err)
	}
	b, err := p.Encode()
	if err == nil {
		p, err = recovery.DecodePlan(b)
	}
	if err != nil {
		r.t.Fatal(err)
	}
	return p
}

func (r *rig) apply(p *recovery.Plan, ms ...*machine) {
	r.t.Helper()
	for _, m := range ms {
		if _, err := recovery.Apply(r.t.Context(), m.dir(), p, time.Now()); err != nil {
			r.t.Fatalf("apply on node %s: %v", m.id, err)
		}
	}
}

// wait waits until cond holds, for at most limit.
func (r *rig) wait(limit time.Duration, what string, cond func() bool) {
	r.t.Helper()
	start := time.Now()
	for !cond() {
		if time.Since(start) > limit {
			r.t.Fatalf("not within %v: %s", limit, what)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

func (m *machine) put(ctx context.Context, key, value string) (int64, error) {
	resp, err := m.core.KV().Put(ctx, &pb.PutRequest{Key: []byte(key), Value: []byte(value)})
	return resp.GetHeader().GetRevision(), err
}

func (m *machine) get(ctx context.Context, key string) (value string, err error) {
	resp, err := m.core.KV().Range(ctx, &pb.RangeRequest{Key: []byte(key)})
	for _, kv := range resp.GetKvs() {
		value = string(kv.GetValue())
	}
	return value, err
}

// writers put keys by all nodes until stop is called. What they know of their writes is kept.
type writers struct {
	mu sync.Mutex
	// acked has for each key the value that was acknowledged last, tried all that were ever sent, and
	// revisions those that were answered.
	acked     map[string]string
	tried     map[string][]string
	revisions map[int64]string
	cancel    context.CancelFunc
	wg        sync.WaitGroup
}

func (r *rig) write(keys []string, ms ...*machine) *writers {
	ctx, cancel := context.WithCancel(r.t.Context())
	w := &writers{acked: map[string]string{}, tried: map[string][]string{}, revisions: map[int64]string{}, cancel: cancel}
	for i, k := range keys {
		m := ms[i%len(ms)]
		kv := m.core.KV()
		w.wg.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				v := fmt.Sprintf("%s=%d", k, n)
				w.mu.Lock()
				w.tried[k] = append(w.tried[k], v)
				w.mu.Unlock()
				resp, err := kv.Put(ctx, &pb.PutRequest{Key: []byte(k), Value: []byte(v)})
				w.mu.Lock()
				if err == nil {
					w.acked[k] = v
					if was, ok := w.revisions[resp.GetHeader().GetRevision()]; ok {
						r.t.Errorf("revision %d was given to %s and to %s", resp.GetHeader().GetRevision(), was, v)
					}
					w.revisions[resp.GetHeader().GetRevision()] = v
				}
				w.mu.Unlock()
				time.Sleep(5 * time.Millisecond)
			}
		})
	}
	return w
}

func (w *writers) stop() {
	w.cancel()
	w.wg.Wait()
}

// verdictOf returns the verdict on the range that has the key.
func verdictOf(p *recovery.Plan, key string) string {
	for _, v := range p.Groups {
		s := keyspace.Span{Start: v.Start, End: v.End}
		if v.Verdict == recovery.Covered {
			continue
		}
		if (v.Range != 0 || v.Verdict == recovery.Lost) && s.Contains([]byte(key)) {
			return v.Verdict
		}
	}
	return "none"
}

// check checks what the plan has promised, once the survivors run.
func (r *rig) check(p *recovery.Plan, w *writers, ms ...*machine) {
	r.t.Helper()
	defer func() {
		if r.t.Failed() {
			r.dump(p, ms...)
		}
	}()
	count := map[string]int{}
	for k, want := range w.acked {
		var got string
		r.wait(time.Minute, "key "+k+" is answered", func() bool {
			ctx, cancel := context.WithTimeout(r.t.Context(), 5*time.Second)
			defer cancel()
			var err error
			got, err = ms[0].get(ctx, k)
			return err == nil
		})
		verdict := verdictOf(p, k)
		count[verdict]++
		at := slices.Index(w.tried[k], got)
		switch verdict {
		case recovery.Safe, recovery.Kept:
			if at < slices.Index(w.tried[k], want) {
				r.t.Errorf("%s: the range is %s, and %q is there, %q was acknowledged", k, verdict, got, want)
			}
		case recovery.Doubtful:
			if got != "" && at < 0 {
				r.t.Errorf("%s: %q was never written", k, got)
			}
		case recovery.Lost:
			if got != "" {
				r.t.Errorf("%s: the range is lost, and %q is there", k, got)
			}
		default:
			r.t.Errorf("%s: no verdict", k)
		}
	}
	r.t.Logf("plan %s: keys by verdict %v, ceiling %d, highest %d", p.ID, count, p.Ceiling, p.Highest)
	for k := range w.acked {
		m := ms[r.rng.IntN(len(ms))]
		var rev int64
		r.wait(time.Minute, "key "+k+" is written", func() bool {
			ctx, cancel := context.WithTimeout(r.t.Context(), 5*time.Second)
			defer cancel()
			var err error
			rev, err = m.put(ctx, k, "after")
			return err == nil
		})
		if keyspace.Revision(rev) <= p.Ceiling {
			r.t.Errorf("%s is written at revision %d, the plan says above %d", k, rev, p.Ceiling)
		}
		if was, ok := w.revisions[rev]; ok {
			r.t.Errorf("revision %d again: it was %s", rev, was)
		}
		w.revisions[rev] = "after"
	}
}

// dump says what the plan was and what the nodes have made of it.
func (r *rig) dump(p *recovery.Plan, ms ...*machine) {
	var b strings.Builder
	_ = p.Write(&b)
	for _, row := range p.Map {
		fmt.Fprintf(&b, "row %+v\n", row)
	}
	for _, n := range p.Nodes {
		fmt.Fprintf(&b, "node %x sole %+v drop %+v\n", uint64(n.Node), n.Sole, n.Drop)
	}
	for _, m := range ms {
		list, err := m.core.Ranges().List(context.Background(), m.id)
		fmt.Fprintf(&b, "node %s %v\n", m.id, err)
		for _, s := range list {
			st, err := m.core.Ranges().Show(context.Background(), m.id, s.Descriptor.Range)
			fmt.Fprintf(&b, "  %s leads %v: %+v %v\n", s.Descriptor.Range, s.IsLeader, st, err)
		}
		if d, err := m.core.Placement().Map(context.Background()); err == nil {
			for _, d := range d.Descriptors() {
				fmt.Fprintf(&b, "  map %s %d %s %v\n", d.Range, d.Generation, d.Span, d.Replicas)
			}
		}
	}
	r.t.Log(b.String())
}
