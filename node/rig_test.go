package node

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/simdisk"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/node/join"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/shard"
	"github.com/skeindb/skein/sim/simbus"
	"github.com/skeindb/skein/transport"
)

// The tests with a rig run whole Cores in one bubble of virtual time, on a
// simulated bus and on memory disks.

const (
	rigHeartbeat = 100 * time.Millisecond
	rigElection  = time.Second
	// rigTimeout is etcd's request timeout for that election timeout.
	rigTimeout = 7 * time.Second
)

// rig is a cluster of Cores.
type rig struct {
	t     *testing.T
	net   *simbus.Network
	nodes []*rigNode
	// options may change what a Core is made of.
	options func(*Options)
	// founderCount is how many of the nodes are founders; the others join the cluster.
	founderCount int
	splits       [][]byte
	rng          *rand.Rand
}

// rigNode is a machine and the Core that runs on it, nil while none does.
type rigNode struct {
	id   keyspace.NodeID
	disk *memDisk
	// name and seat are those of a node that joins: its name, and the membership that it
	// was told last. A founder has neither.
	name string
	seat *join.Membership
	// mu orders those who change core behind those who ask for it beside them.
	mu   sync.Mutex
	core *Core
}

func (n *rigNode) set(c *Core) {
	n.mu.Lock()
	n.core = c
	n.mu.Unlock()
}

// bubble runs a test with a new rig of n running nodes in a bubble, and ends the
// nodes that it leaves behind.
func bubble(t *testing.T, n int, splits [][]byte, change func(*Options), test func(r *rig)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		r := &rig{t: t, founderCount: n, splits: splits, options: change, rng: rand.New(rand.NewPCG(1, uint64(n)))}
		r.net = simbus.New(1, simbus.Faults{Delay: simbus.Delay{Min: 100 * time.Microsecond, Max: 400 * time.Microsecond}})
		for i := range n {
			r.nodes = append(r.nodes, &rigNode{id: keyspace.NodeID(i + 1), disk: newMemDisk(simdisk.New())})
		}
		t.Cleanup(func() {
			for _, n := range r.nodes {
				if n.core != nil {
					n.core.Crash()
				}
			}
		})
		r.start(r.nodes...)
		test(r)
	})
}

// long skips a test with -short, for the reason given: it takes much of the processor's time.
func long(t *testing.T, reason string) {
	t.Helper()
	if testing.Short() {
		t.Skip(reason)
	}
}

// fewer is how much a test does of something: usual, or fewer with -short.
func fewer[N int | time.Duration](usual, short N) N {
	if testing.Short() {
		return short
	}
	return usual
}

// shortLog has segments that hold no large entries.
func shortLog(o *Options) { o.WALSegmentBytes, o.MaxRequestBytes = 256<<10, 64<<10 }

// borders returns n-1 keys that divide keys of the form k0000 into n spans.
func borders(n int) [][]byte {
	var keys [][]byte
	for i := 1; i < n; i++ {
		keys = append(keys, fmt.Appendf(nil, "k%04d", i))
	}
	return keys
}

// keyOf is a key of the i-th of the spans of borders.
func keyOf(i int) string { return fmt.Sprintf("k%04d/x", i) }

func (r *rig) founders() []fsm.Node {
	var all []fsm.Node
	for _, n := range r.nodes[:r.founderCount] {
		all = append(all, fsm.Node{ID: n.id, Name: fmt.Sprintf("n%d", n.id), PeerURLs: []string{fmt.Sprintf("http://n%d:2380", n.id)}})
	}
	return all
}

// start starts nodes at the same time.
func (r *rig) start(nodes ...*rigNode) {
	r.t.Helper()
	errs := make([]error, len(nodes))
	var wg sync.WaitGroup
	for i, n := range nodes {
		o := r.optionsOf(n) // one after the other: tests write what they keep into maps
		wg.Go(func() {
			var c *Core
			c, errs[i] = Open(r.t.Context(), o)
			n.set(c)
		})
	}
	wg.Wait()
	for i, err := range errs {
		if err != nil {
			r.t.Fatalf("start node %s: %v", nodes[i].id, err)
		}
	}
}

func (r *rig) optionsOf(n *rigNode) Options {
	core, logs := observer.New(zap.WarnLevel)
	r.t.Cleanup(func() {
		if r.t.Failed() {
			for _, e := range logs.All() {
				r.t.Logf("node %s %s %s %v", n.id, e.Time.Format("04:05.000"), e.Message, e.ContextMap())
			}
		}
	})
	o := Options{
		Cluster: 0xc1, Self: n.id, Founders: r.founders(), SplitKeys: r.splits,
		FS: n.disk, DataDir: "data", WALDir: "wal", Clock: clock.Virtual(),
		NewBus: func(c transport.Config) (Bus, error) {
			b, err := r.net.NewBus(c)
			if err != nil {
				return nil, err // not a typed nil
			}
			return b, nil
		},
		Heartbeat: rigHeartbeat, Election: rigElection, RequestTimeout: rigTimeout,
		MaxRequestBytes: 256 << 10, MaxTxnOps: 128, MemoryBytes: 96 << 20, WALSegmentBytes: 1 << 20,
		Logger: zap.New(core),
	}
	if n.seat != nil {
		o.Cluster, o.Founders, o.Peers = n.seat.Cluster, n.seat.Founders, n.seat.Peers
	}
	if r.options != nil {
		r.options(&o)
	}
	return o
}

// stop stops nodes in order, at the same time.
func (r *rig) stop(nodes ...*rigNode) {
	r.t.Helper()
	errs := make([]error, len(nodes))
	var wg sync.WaitGroup
	for i, n := range nodes {
		wg.Go(func() { errs[i] = n.core.Stop(context.Background()) })
	}
	wg.Wait()
	for i, n := range nodes {
		n.core = nil
		if errs[i] != nil {
			r.t.Errorf("stop node %s: %v", n.id, errs[i])
		}
	}
}

// crash cuts the power of nodes in one moment. Their disks keep half of what was
// not synced.
func (r *rig) crash(nodes ...*rigNode) {
	for _, n := range nodes {
		r.net.Crash(n.id)
	}
	for _, n := range nodes {
		n.disk = n.disk.crash(50, r.rng)
	}
	for _, n := range nodes {
		c := n.core
		n.set(nil)
		c.Crash()
	}
}

// put puts a key at a gateway. It returns the revision.
func (n *rigNode) put(ctx context.Context, key, value string) (int64, error) {
	resp, err := n.core.KV().Put(ctx, &pb.PutRequest{Key: []byte(key), Value: []byte(value)})
	return resp.GetHeader().GetRevision(), err
}

// get reads a key at a gateway, linearizably.
func (n *rigNode) get(ctx context.Context, key string) (value string, err error) {
	resp, err := n.core.KV().Range(ctx, &pb.RangeRequest{Key: []byte(key)})
	for _, kv := range resp.GetKvs() {
		value = string(kv.GetValue())
	}
	return value, err
}

// remove deletes a key at a gateway.
func (n *rigNode) remove(ctx context.Context, key string) (deleted int64, err error) {
	resp, err := n.core.KV().DeleteRange(ctx, &pb.DeleteRangeRequest{Key: []byte(key)})
	return resp.GetDeleted(), err
}

func (r *rig) mustPut(n *rigNode, key, value string) int64 {
	r.t.Helper()
	rev, err := n.put(r.t.Context(), key, value)
	if err != nil {
		r.t.Fatalf("put %s at node %s: %v", key, n.id, err)
	}
	return rev
}

func (r *rig) mustGet(n *rigNode, key, want string) {
	r.t.Helper()
	if got, err := n.get(r.t.Context(), key); err != nil || got != want {
		r.t.Fatalf("get %s at node %s: %q, %v; want %q", key, n.id, got, err, want)
	}
}

func (r *rig) mustRemove(n *rigNode, key string) {
	r.t.Helper()
	if deleted, err := n.remove(r.t.Context(), key); err != nil || deleted != 1 {
		r.t.Fatalf("delete %s at node %s: %d deleted, %v", key, n.id, deleted, err)
	}
}

// wantKind checks an error by its kind.
func (r *rig) wantKind(what string, err error, want kverror.Kind) {
	r.t.Helper()
	if err == nil || kverror.Of(err).Kind != want {
		r.t.Errorf("%s: %v, want %v", what, err, want)
	}
}

// wait waits until cond holds, for at most limit, and returns how long that took.
func (r *rig) wait(limit time.Duration, what string, cond func() bool) time.Duration {
	r.t.Helper()
	start := time.Now()
	for !cond() {
		if time.Since(start) > limit {
			r.t.Fatalf("not within %v: %s", limit, what)
		}
		time.Sleep(50 * time.Millisecond)
	}
	return time.Since(start)
}

// summaries are the replicas of a node, by their own word.
func (n *rigNode) summaries() []shard.Summary { return n.core.shards.List() }

// led returns the start keys of the ranges that the node says that it leads.
func (n *rigNode) led() (starts []string) {
	for _, s := range n.summaries() {
		if s.IsLeader {
			starts = append(starts, string(s.Descriptor.Span.Start))
		}
	}
	return starts
}

// spread puts the value to every one of the spans of borders.
func (r *rig) spread(n *rigNode, ranges int, value string) {
	r.t.Helper()
	for i := range ranges {
		r.mustPut(n, keyOf(i), value)
	}
}

// caughtUp waits until all replicas of each range are at the same place with the
// same hash.
func (r *rig) caughtUp(limit time.Duration) {
	r.t.Helper()
	type state struct {
		index, term uint64
		hash        string
	}
	r.wait(limit, "all replicas are equal", func() bool {
		seen := map[keyspace.RangeID]state{}
		for _, n := range r.nodes {
			for _, rep := range n.core.shards.Replicas() {
				st := rep.Show()
				s := state{st.Applied.Index, st.Applied.Term, st.Hash}
				if have, ok := seen[st.Descriptor.Range]; ok && have != s {
					return false
				}
				seen[st.Descriptor.Range] = s
			}
		}
		return true
	})
}
