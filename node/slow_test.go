package node

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/rangeapi"
	slow "github.com/skeindb/skein/rangeapi/stages"
)

const slowRanges = 6

// told serves a request as the gateway n does for a client, and says where its time went.
func (n *rigNode) told(ctx context.Context, serve func(ctx context.Context) error) (slow.Slow, error) {
	watch := clock.StartStopwatch()
	call := slow.NewCall(ctx, watch, false)
	err := serve(call)
	s, _ := call.Slow(n.id, watch.Elapsed())
	return s, err
}

// toldPut is told of a put.
func (n *rigNode) toldPut(ctx context.Context, key string) (slow.Slow, error) {
	return n.told(ctx, func(ctx context.Context) error {
		_, err := n.put(ctx, key, "v")
		return err
	})
}

// wantCause checks what a request says of itself: the words, the stage that took longest and how long at least, and that
// the parts are its whole time.
func (r *rig) wantCause(what string, s slow.Slow, err error, stage string, least time.Duration, words ...string) {
	r.t.Helper()
	if err != nil {
		r.t.Errorf("%s: %v", what, err)
	}
	var sum, spent time.Duration
	for _, p := range s.Parts {
		if sum += p.Took; p.Name == stage {
			spent = p.Took
		}
	}
	// Records have whole microseconds.
	if off := s.Took - sum; off < 0 || off > time.Millisecond || spent < least {
		r.t.Errorf("%s: %v in %s of %v, want %v; all are %v", what, spent, stage, s.Took, least, s.Parts)
	}
	for _, w := range words {
		if !strings.Contains(s.Cause, w) {
			r.t.Errorf("%s: %q says nothing of %q", what, s.Cause, w)
		}
	}
}

// sequencer returns the node that allocates revisions, and leads some range, and the others.
func (r *rig) sequencer() (leader *rigNode, others []*rigNode) {
	for _, n := range r.nodes {
		if n.id == r.nodes[0].core.client.Leader() {
			leader = n
		} else {
			others = append(others, n)
		}
	}
	return leader, others
}

// spanOf returns the range that holds the key.
func (r *rig) spanOf(key string) keyspace.Descriptor {
	r.t.Helper()
	at, err := r.nodes[0].core.router.Locate(r.t.Context(), keyspace.Single([]byte(key)))
	if err != nil {
		r.t.Fatal(err)
	}
	return at[0].Descriptor
}

// Who waits for the lock of a transaction over several ranges is told which, at the leader and at another gateway, for a
// put, a get and a part of another transaction. One that gives up leaves its record with the leader.
func TestALockIsNamed(t *testing.T) {
	bubble(t, 3, borders(slowRanges), nil, func(r *rig) {
		r.spread(r.nodes[0], slowRanges, "before")
		leader, other := r.nodes[0], r.nodes[1]
		i := r.ledBy(leader, slowRanges)
		key, d := keyOf(i), r.spanOf(keyOf(i))
		elsewhere := keyOf(r.ledBy(other, slowRanges))
		// As a coordinator does that is slow to decide. Nobody asks about its lock within half a second.
		name := rangeapi.TxnName{TxnID: rangeapi.TxnID{Start: 2, Node: other.id, Boot: other.core.boot, Counter: 1 << 20}, Attempt: 1 << 20}
		lock := func() (unlock func()) {
			r.t.Helper()
			name.Counter++
			got, err := other.core.shards.Client().Txn(r.t.Context(), leader.id, d.Range, d.Generation, &rangeapi.Prepare{
				Name: name, Anchor: []byte(key), Writes: []rangeapi.Write{{Number: 1, Op: &pb.PutRequest{Key: []byte(key), Value: []byte("locked")}}},
			})
			p, ok := got.(*rangeapi.Prepared)
			if err != nil || !ok || !p.Held {
				r.t.Fatalf("%+v, %v", got, err)
			}
			r.mustPut(other, elsewhere, "raises the revision above the lock's floor: a read at that has nothing to wait for")
			return func() {
				if _, err := other.core.shards.Client().Txn(r.t.Context(), leader.id, d.Range, d.Generation, &rangeapi.Resolve{Name: name, Lock: p.Lock}); err != nil {
					r.t.Error(err)
				}
			}
		}
		for _, at := range []*rigNode{leader, other} {
			for what, serve := range map[string]func(ctx context.Context) error{
				"put": func(ctx context.Context) error { _, err := at.put(ctx, key, "v"); return err },
				"get": func(ctx context.Context) error { _, err := at.get(ctx, key); return err },
				"transaction": func(ctx context.Context) error {
					_, err := at.core.KV().Txn(ctx, &pb.TxnRequest{Success: []*pb.RequestOp{putOp(key, "v"), putOp(elsewhere, "v")}})
					return err
				},
			} {
				unlock := lock()
				timer := time.AfterFunc(400*time.Millisecond, unlock)
				s, err := at.told(r.t.Context(), serve)
				if timer.Stop() {
					r.t.Fatalf("%s at node %s did not wait for the lock", what, at.id)
				}
				r.wantCause(fmt.Sprintf("a %s at node %s", what, at.id), s, err, slow.Blocked.String(), 350*time.Millisecond,
					"ms for the lock of transaction "+name.String()+" in range "+d.Range.String())
				if s.Range != d.Range {
					r.t.Errorf("range %s, want %s", s.Range, d.Range)
				}
			}
		}
		unlock := lock()
		ctx, cancel := context.WithTimeout(r.t.Context(), 300*time.Millisecond)
		defer cancel()
		s, err := other.toldPut(ctx, key)
		if err == nil || !strings.Contains(s.Cause, fmt.Sprintf("no answer for range %s from node %s", d.Range, leader.id)) {
			r.t.Errorf("a put that gave up: %v, %+v", err, s)
		}
		unlock()
		r.wait(time.Second, "the leader keeps what it knows of the put", func() bool { return len(leader.core.slow.All()) > 0 })
		kept, err := leader.core.Admin().Slow(r.t.Context())
		if err != nil || len(kept.GetCalls()) != 1 || len(kept.GetMissing()) != 0 {
			r.t.Fatalf("%v, %v", kept, err)
		}
		if c := kept.GetCalls()[0]; c.GetMethod() != "put" || c.GetNodeName() != "n1" || !strings.Contains(c.GetCause(), "for the lock of transaction "+name.String()) {
			r.t.Errorf("%v", c)
		}
	})
}

// With one follower cut off, a put waits for the other one, which is named. A leader whose own disk is behind both
// is named itself.
func TestTheQuorumsLastIsNamed(t *testing.T) {
	bubble(t, 3, borders(slowRanges), nil, func(r *rig) {
		r.spread(r.nodes[0], slowRanges, "before")
		leader, others := r.sequencer()
		key := keyOf(r.ledBy(leader, slowRanges))
		release := leader.disk.stall()
		timer := time.AfterFunc(300*time.Millisecond, release)
		s, err := leader.toldPut(r.t.Context(), key)
		r.wantCause("the leader's disk is slow", s, err, slow.Disk.String(), 250*time.Millisecond, "disk of node "+leader.id.String())
		if timer.Stop() {
			r.t.Error("the put did not wait for the disk")
		}
		cut, late := others[0], others[1]
		r.net.Cut(leader.id, cut.id)
		release = late.disk.stall()
		timer = time.AfterFunc(300*time.Millisecond, release)
		s, err = leader.toldPut(r.t.Context(), key)
		r.wantCause("a follower is cut off, and the other one's disk is slow", s, err, slow.Quorum.String(), 250*time.Millisecond,
			"quorum: node "+late.id.String()+" last")
		if timer.Stop() {
			r.t.Error("the put did not wait for the other follower")
		}
		r.net.HealAll()
	})
	bubble(t, 1, nil, nil, func(r *rig) {
		n := r.nodes[0]
		r.mustPut(n, "k", "before")
		release := n.disk.stall()
		timer := time.AfterFunc(300*time.Millisecond, release)
		s, err := n.toldPut(r.t.Context(), "k")
		r.wantCause("a single node with a slow disk", s, err, slow.Quorum.String(), 250*time.Millisecond, "quorum: the disk of node 1 last")
		if timer.Stop() {
			r.t.Error("the put did not wait for the disk")
		}
	})
}

// While a range has no leader its requests are sent again and again: the range, the time and the last refusal are named.
func TestAMissingLeaderIsNamed(t *testing.T) {
	bubble(t, 3, borders(slowRanges), nil, func(r *rig) {
		r.spread(r.nodes[0], slowRanges, "before")
		sequencer, others := r.sequencer()
		leader := others[0]
		key := keyOf(r.ledBy(leader, slowRanges))
		d := r.spanOf(key)
		r.crash(leader)
		s, err := sequencer.told(r.t.Context(), func(ctx context.Context) error {
			_, err := sequencer.get(ctx, key)
			return err
		})
		r.wantCause("the leader is gone", s, err, slow.Retries, 200*time.Millisecond, "no leader known for range "+d.Range.String())
		if s.Retries == 0 {
			r.t.Errorf("%+v", s)
		}
		r.start(leader)
	})
}

// The slow requests of all nodes are there at each, and a node that is gone is missing.
func TestSlowRequestsOfAllNodes(t *testing.T) {
	bubble(t, 3, nil, nil, func(r *rig) {
		r.mustPut(r.nodes[0], "k", "v")
		for _, n := range r.nodes {
			n.core.slow.Add(slow.Slow{Unix: int64(n.id), Method: "/etcdserverpb.KV/Put", Range: 1, Took: 70 * time.Millisecond, Cause: "quorum: node 3 last", Retries: 2, RequestBytes: 9})
		}
		got, err := r.nodes[1].core.Admin().Slow(r.t.Context())
		if err != nil || len(got.GetCalls()) != 3 || len(got.GetMissing()) > 0 {
			r.t.Fatalf("%v, %v", got, err)
		}
		for _, c := range got.GetCalls() {
			if c.GetNodeName() != fmt.Sprintf("n%d", c.GetNode()) || c.GetAtUnixNanos() != int64(c.GetNode()) || c.GetMicros() != 70_000 || c.GetCause() != "quorum: node n3 last" {
				r.t.Errorf("%v", c)
			}
		}
		r.crash(r.nodes[2])
		got, err = r.nodes[1].core.Admin().Slow(r.t.Context())
		if err != nil || len(got.GetCalls()) != 2 || len(got.GetMissing()) != 1 || got.GetMissing()[0].GetNode() != "n3" {
			r.t.Errorf("%v, %v", got, err)
		}
		r.start(r.nodes[2])
	})
}
