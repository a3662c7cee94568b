package node

import (
	"context"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
)

const hangRanges = 6

// A node whose disk hangs loses its leaderships within a few election timeouts,
// including the sequencer's. Nobody reads old values meanwhile. When the disk comes
// back the node takes part again.
func TestHangingDisk(t *testing.T) {
	for _, holds := range []string{"sequencer", "no sequencer"} {
		t.Run(holds, func(t *testing.T) {
			bubble(t, 3, borders(hangRanges), nil, func(r *rig) {
				hung := r.nodes[0]
				r.spread(hung, hangRanges, "before")
				leader := hung.core.client.Leader()
				for _, n := range r.nodes {
					if (n.id == leader) == (holds == "sequencer") {
						hung = n
						break
					}
				}
				testHangingDisk(r, hung)
			})
		})
	}
}

func testHangingDisk(r *rig, hung *rigNode) {
	t := r.t
	t.Helper()
	other := r.nodes[hung.id%3]
	mine := r.ledBy(hung, hangRanges)
	stopProbe := r.probe(hung, other, mine)
	time.Sleep(300 * time.Millisecond)
	release := hung.disk.stall()
	defer release()
	start := time.Now()
	// The hung node may answer anything to a put to a range that it leads.
	var puts sync.WaitGroup
	for range 8 {
		puts.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), rigTimeout)
			defer cancel()
			_, _ = hung.put(ctx, keyOf(mine), "before")
		})
	}
	defer r.tellOnFailure()
	took := r.wait(5*rigElection, "the others lead everything", func() bool {
		return other.core.client.Leader() != hung.id && len(r.ledByOthers(hung)) == hangRanges
	})
	t.Logf("node %s lost its leaderships after %v", hung.id, took)
	for i := range hangRanges {
		r.mustPut(other, keyOf(i), "meanwhile")
	}
	t.Logf("every range was written %v after the disk hung", time.Since(start))
	time.Sleep(300 * time.Millisecond)
	stopProbe()
	puts.Wait()
	for i := range hangRanges {
		r.mustPut(other, keyOf(i), "new")
		r.noStaleRead(hung, i)
	}
	if led := hung.led(); len(led) > 0 {
		t.Errorf("node %s with its hanging disk leads %s", hung.id, strings.Join(led, " "))
	}
	time.Sleep(8 * time.Second)
	release()
	r.wait(5*rigElection, "the others hear from the node", func() bool { return other.core.alive(hung.id) })
	for i := range hangRanges {
		r.mustPut(hung, keyOf(i), "after")
		r.checkAll("after", i)
	}
	r.caughtUp(20 * time.Second)
	if err := hung.core.Err(); err != nil {
		t.Errorf("the node gave up: %v", err)
	}
	r.stop(r.nodes...)
}

// Once a node knows that its disk hangs, it takes no more puts to the ranges that it
// still leads. They go to the next leader, and none waits for the request timeout.
func TestHangingDiskRefusesPuts(t *testing.T) {
	bubble(t, 3, borders(hangRanges), nil, func(r *rig) {
		hung := r.nodes[0]
		r.spread(hung, hangRanges, "before")
		mine := r.ledBy(hung, hangRanges)
		release := hung.disk.stall()
		defer release()
		r.wait(3*rigElection, "the node notices", hung.core.host.DiskStalled)
		for _, at := range r.nodes {
			start := time.Now()
			r.mustPut(at, keyOf(mine), "new")
			if took := time.Since(start); took > 4*rigElection {
				r.t.Errorf("a put through node %s took %v", at.id, took)
			}
		}
		release()
		r.caughtUp(20 * time.Second)
		r.stop(r.nodes...)
	})
}

// probePatience is how long a probe waits for an answer, probePause its pause.
const (
	probePatience = 100 * time.Millisecond
	probePause    = 3 * time.Millisecond
)

// probe increments a key at one node and reads it at another, through the gateway and
// at the node's own replica. A read must not miss a put that was acknowledged before
// the read began. The returned function ends it.
func (r *rig) probe(reads, writes *rigNode, span int) (stop func()) {
	key := keyOf(span) + "/probe"
	ctx, cancel := context.WithCancel(r.t.Context())
	var acked atomic.Int64
	var answers [2]int64
	var wg sync.WaitGroup
	wg.Go(func() {
		for i := int64(1); ctx.Err() == nil; i++ {
			put, cancel := context.WithTimeout(ctx, probePatience)
			if _, err := writes.put(put, key, strconv.FormatInt(i, 10)); err == nil {
				acked.Store(i)
			}
			cancel()
			_ = clock.Sleep(ctx, clock.Virtual(), probePause)
		}
	})
	for way, read := range []func(ctx context.Context, key string) (string, error){reads.get, reads.getLocal} {
		wg.Go(func() {
			for ctx.Err() == nil {
				floor := acked.Load()
				reading, cancel := context.WithTimeout(ctx, probePatience)
				value, err := read(reading, key)
				cancel()
				got, _ := strconv.ParseInt(value, 10, 64)
				if err == nil && got < floor {
					r.t.Errorf("node %s answered %d after %d was acknowledged", reads.id, got, floor)
				}
				if err == nil {
					answers[way]++
				}
				_ = clock.Sleep(ctx, clock.Virtual(), probePause)
			}
		})
	}
	return func() {
		cancel()
		wg.Wait()
		r.t.Logf("%d puts, %d reads through the gateway, %d at the replica", acked.Load(), answers[0], answers[1])
		if acked.Load() < 100 || answers[0] < 100 {
			r.t.Errorf("the probe has proved nothing: %d puts, %v reads", acked.Load(), answers)
		}
	}
}

// getLocal reads a key linearizably at the node's own replica, past the gateway.
func (n *rigNode) getLocal(ctx context.Context, key string) (value string, err error) {
	ctx, cancel := context.WithTimeout(ctx, probePatience)
	defer cancel()
	err = kverror.RangeNotHere
	m, _ := n.core.client.WatchMap()
	for _, d := range m.Descriptors() {
		if !d.Span.Contains([]byte(key)) {
			continue
		}
		var resp *rangeapi.Response
		if resp, err = n.core.shards.Do(ctx, &rangeapi.Request{
			Range: d.Range, Generation: d.Generation, Op: &pb.RangeRequest{Key: []byte(key)},
		}); err == nil {
			for _, kv := range resp.Op.(*pb.RangeResponse).GetKvs() {
				value = string(kv.GetValue())
			}
		}
	}
	return value, err
}

// tellOnFailure logs what each node says of each replica, if the test has failed.
func (r *rig) tellOnFailure() {
	if !r.t.Failed() {
		return
	}
	for _, n := range r.nodes {
		for _, rep := range n.core.shards.Replicas() {
			r.t.Logf("node %s: %+v", n.id, rep.Show().Raft)
		}
	}
}

// ledByOthers returns the ranges that other nodes lead.
func (r *rig) ledByOthers(but *rigNode) map[keyspace.RangeID]keyspace.NodeID {
	leaders := map[keyspace.RangeID]keyspace.NodeID{}
	for _, n := range r.nodes {
		for _, s := range n.summaries() {
			if s.IsLeader && n != but {
				leaders[s.Descriptor.Range] = n.id
			}
		}
	}
	return leaders
}

// noStaleRead reads a key that was last set to "new", at the gateway of the node and
// at its own replica, past the gateway.
func (r *rig) noStaleRead(n *rigNode, span int) {
	r.t.Helper()
	if got, err := n.get(r.t.Context(), keyOf(span)); err == nil && got != "new" {
		r.t.Errorf("node %s answers %q for %s", n.id, got, keyOf(span))
	} else if err != nil {
		r.t.Logf("read through node %s: %v", n.id, err)
	}
	if got, err := n.getLocal(r.t.Context(), keyOf(span)); err == nil {
		r.t.Errorf("the replica of node %s, whose disk hangs, answers %q", n.id, got)
	}
}
