package shard

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/internal/simdisk"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/transport"
)

// killer ends one node, or all nodes, at a step of the victim. A step is a change on its
// disks, or a raft message to another node.
type killer struct {
	victim *rigNode
	others bool // all end, not the victim alone
	rng    *rand.Rand
	nodes  []*rigNode

	mu sync.Mutex
	// Guarded by mu.
	at, steps int // at is 0 while nobody is to end
	killed    bool
	what      string
	disks     map[*rigNode]*simdisk.Disk
}

func (k *killer) ends(n *rigNode) bool { return k.others || n == k.victim }

// step counts one and says whether the node goes on.
func (k *killer) step(n *rigNode, what string) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.killed {
		return !k.ends(n)
	}
	if k.at == 0 || n != k.victim {
		return true
	}
	if k.steps++; k.steps != k.at {
		return true
	}
	k.killed, k.what = true, what
	for _, o := range k.nodes {
		if k.ends(o) {
			// All or nothing: Pebble counts on a directory that does not keep its newest entry
			// without the one before.
			k.disks[o] = o.fs.Crash(100*k.rng.IntN(2), k.rng)
		}
	}
	return false
}

// unless calls f if the end has not come.
func (k *killer) unless(f func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.killed {
		f()
	}
}

func (k *killer) dead() (dead bool) {
	dead = true
	k.unless(func() { dead = false })
	return dead
}

// arm begins to count; with 0 nobody ends any more.
func (k *killer) arm(at int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.at, k.steps, k.killed = at, 0, false
}

func (k *killer) disk(n *rigNode) vfs.FS {
	if k == nil {
		return n.fs
	}
	return errorfs.Wrap(n.fs, errorfs.InjectorFunc(func(op errorfs.Op) error {
		if op.Kind.ReadOrWrite() == errorfs.OpIsWrite {
			k.step(n, fmt.Sprintf("%v %s", op.Kind, op.Path))
		}
		return nil
	}))
}

func (k *killer) mouth(n *rigNode) raftgroup.Bus {
	if k == nil {
		return n.bus
	}
	return mouth{n.bus, k, n}
}

// mouth is a bus whose words are steps.
type mouth struct {
	raftgroup.Bus
	k *killer
	n *rigNode
}

func (m mouth) Send(to keyspace.NodeID, method transport.Method, order uint64, payload []byte) error {
	if !m.k.step(m.n, fmt.Sprintf("word to node %s", to)) {
		return transport.ErrNoRoute
	}
	return m.Bus.Send(to, method, order, payload)
}

// One node, or by turns all of them, is killed at each step around a split: when the split is
// proposed, stored, sent, applied and flushed, and when the child elects and is written (traps 2,
// 7, 28). Afterwards parent and child cover the span once, whether the split happened or not.
// No acknowledged write is lost. A run takes every 16th step, from a random one
// on; SKEIN_TEST_STRIDE=1 takes all.
func TestKillAroundASplit(t *testing.T) {
	stride := 16
	if s, err := strconv.Atoi(os.Getenv("SKEIN_TEST_STRIDE")); err == nil {
		stride = s
	}
	for _, leads := range []bool{true, false} {
		t.Run(fmt.Sprintf("leader=%t", leads), func(t *testing.T) {
			at, splits, wholes := 1+rand.IntN(stride), 0, 0
			for ; !t.Failed(); at += stride {
				killed, isSplit := killAroundASplit(t, at, leads, at/stride%2 == 0)
				if !killed {
					break
				}
				if isSplit {
					splits++
				} else {
					wholes++
				}
			}
			if at < 40 || splits == 0 || wholes == 0 && leads && stride == 1 {
				t.Errorf("%d steps, in %d lives the range was split, in %d not", at, splits, wholes)
			}
		})
	}
}

func killAroundASplit(t *testing.T, at int, leads, others bool) (killed, isSplit bool) {
	t.Helper()
	virtually(t, func(t *testing.T) {
		r := newShardRig(t, uint64(at), lan)
		k := &killer{others: others, rng: rand.New(rand.NewPCG(uint64(at), 5)), nodes: r.nodes, disks: map[*rigNode]*simdisk.Disk{}}
		for _, n := range r.nodes {
			n.killer = k
		}
		r.startAll()
		l := r.leader(1)
		acked := map[string]string{}
		put := func(key, value string) {
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
			defer cancel()
			for ctx.Err() == nil && !k.dead() {
				_, err := r.do(ctx, key, &rangeapi.Request{Op: &pb.PutRequest{Key: []byte(key), Value: []byte(value)}})
				if err == nil {
					k.unless(func() { acked[key] = value })
					return
				}
			}
		}
		put("a", "1")
		put("x", "1")
		if k.victim = l; !leads {
			k.victim = r.nodes[int(l.id)%3]
		}
		k.arm(at)
		var answered bool
		split, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		_, err := l.node.Load().Replica(1).Split(split, 0, []byte("m"))
		cancel()
		k.unless(func() { answered = err == nil })
		put("x", "2")
		put("a", "2")
		for _, n := range r.nodes {
			if !k.dead() {
				n.must(n.engine.Flush(t.Context()))
			}
		}
		put("x", "3")
		if killed = k.dead(); killed {
			isSplit = k.finish(r, acked, answered)
		}
		r.stopAll()
	})
	return killed, isSplit
}

// finish goes on with what the disks have left, and judges.
func (k *killer) finish(r *rig, acked map[string]string, answered bool) (isSplit bool) {
	r.t.Helper()
	for n := range k.disks {
		n.crash()
		n.fs = k.disks[n]
	}
	r.t.Logf("ended at step %d: %s", k.at, k.what)
	k.arm(0)
	for n := range k.disks {
		n.start()
	}
	r.leader(1)
	for key, want := range acked {
		if got := r.get(key); got < want {
			r.t.Errorf("%s = %q, %q was acknowledged", key, got, want)
		}
	}
	r.put("a", "9")
	r.put("x", "9")
	time.Sleep(time.Second)
	synctest.Wait()
	r.agree()
	ds := map[keyspace.RangeID]keyspace.Descriptor{}
	for _, p := range r.nodes[0].node.Load().Replicas() {
		ds[p.id] = p.Descriptor()
	}
	switch {
	case len(ds) == 1 && len(ds[1].Span.End) == 0 && !answered:
	case len(ds) == 2 && string(ds[1].Span.End) == "m":
		isSplit = true
	default:
		r.t.Errorf("the ranges are %v, the split was answered: %t", ds, answered)
	}
	return isSplit
}
