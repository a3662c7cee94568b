package shard

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/rangeapi"
)

// doubtRig is a range with so many replicas that wrote something and has come to rest. Node 1 leads.
type doubtRig struct {
	*rig
	m *walker
}

func newDoubtRig(t *testing.T, replicas int) *doubtRig {
	t.Helper()
	r := newWideRig(t, 9, lan, 4)
	r.desc.Replicas = r.desc.Replicas[:replicas]
	for _, n := range r.nodes[replicas:] {
		n.bootstrapped = true
	}
	r.startAll()
	d := &doubtRig{r, &walker{r: r, last: 100}}
	d.m.lead("k", 1)
	d.put("k", "before")
	time.Sleep(time.Second)
	return d
}

// corrupt has a node's replica count another hash than it has applied.
func (d *doubtRig) corrupt(n *rigNode, by uint64) {
	r := n.node.Load().Replica(1)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.rec.Hash += by
	r.applying.rec.Hash += by
}

// try sends one write and says how it ended, or that it has not.
func (d *doubtRig) try(value string) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_, err := d.do(ctx, "k", &rangeapi.Request{Op: &pb.PutRequest{Key: []byte("k"), Value: []byte(value)}})
	return err
}

// readsHere says whether the node answers a serializable read of its own.
func (n *rigNode) readsHere() bool {
	_, _, ok := n.node.Load().ResolvedHere(1, 1)
	return ok
}

func (d *doubtRig) expect(what string, quarantined ...keyspace.NodeID) {
	d.t.Helper()
	var got []keyspace.NodeID
	for _, n := range d.nodes {
		if n.node.Load() == nil {
			continue
		}
		if _, ok := n.host.Quarantined()[keyspace.RangeID(1).Group()]; ok {
			got = append(got, n.id)
		}
	}
	if !slices.Equal(got, quarantined) {
		d.t.Errorf("%s: in quarantine are %v, want %v", what, got, quarantined)
	}
}

// A replica whose hash differs from two others' goes into quarantine, whether it leads or not. The range
// is served all the time, what was acknowledged stays, and nobody doubts any more.
func TestMinorityIsQuarantined(t *testing.T) {
	for _, bad := range []keyspace.NodeID{1, 3} {
		t.Run(fmt.Sprint(bad), func(t *testing.T) {
			virtually(t, func(t *testing.T) {
				d := newDoubtRig(t, 3)
				defer d.stopAll()
				d.corrupt(d.nodes[bad-1], 1<<40)
				if bad == 1 {
					d.m.lead("k", 2) // a new leadership counts from what its replica has
					d.m.lead("k", 1)
				}
				last, longest := "", time.Duration(0)
				for i := range 100 {
					value, began := fmt.Sprint(i), time.Now()
					d.put("k", value)
					last, longest = value, max(longest, time.Since(began))
				}
				if longest > 3*time.Second {
					t.Errorf("a write took %s", longest)
				}
				time.Sleep(2 * time.Second)
				d.expect("in the end", bad)
				if got := d.get("k"); got != last {
					t.Errorf("k is %q, and %q was acknowledged", got, last)
				}
				for _, n := range d.nodes[:3] {
					if got := n.readsHere(); got != (n.id != bad) {
						t.Errorf("node %s reads: %t", n.id, got)
					}
				}
			})
		})
	}
}

// Without a majority of equal hashes nobody knows who is right. Then nobody answers, and says why. No
// replica is lost. The range is served again once a majority agrees.
func TestNobodyKnowsWhoIsRight(t *testing.T) {
	served := func(d *doubtRig) {
		d.t.Helper()
		var err error
		for range 20 {
			if err = d.try("again"); err == nil {
				time.Sleep(2 * time.Second)
				return
			}
			time.Sleep(500 * time.Millisecond)
		}
		d.t.Fatal(err)
	}
	silent := func(d *doubtRig) {
		d.t.Helper()
		var err error
		for range 20 { // the first one may be answered still
			err = d.try("unanswered")
			time.Sleep(500 * time.Millisecond)
		}
		if e := kverror.Of(err); err == nil || e.Kind != kverror.Corrupt {
			d.t.Errorf("a write: %v", err)
		}
		for _, n := range d.nodes {
			if n.node.Load() != nil && n.node.Load().Replica(1) != nil && n.readsHere() {
				d.t.Errorf("node %s reads", n.id)
			}
		}
		d.expect("nobody knows")
	}
	t.Run("one of three is away", func(t *testing.T) {
		virtually(t, func(t *testing.T) {
			d := newDoubtRig(t, 3)
			defer d.stopAll()
			d.nodes[1].crash()
			d.corrupt(d.nodes[2], 1)
			silent(d)
			d.nodes[1].start()
			served(d)
			d.expect("it is back", 3)
		})
	})
	t.Run("two", func(t *testing.T) {
		virtually(t, func(t *testing.T) {
			d := newDoubtRig(t, 2)
			defer d.stopAll()
			d.corrupt(d.nodes[1], 1)
			silent(d)
			// The operator takes the leader for right: another voter, which is copied from it, says so too.
			d.m.until("k", func(k keyspace.Descriptor, lead *rigNode) (bool, error) {
				own, ok := k.ReplicaOn(3)
				switch {
				case !ok:
					d.m.last++
					return false, d.m.change(lead, &k, raftgroup.ConfChange{Type: raftgroup.AddLearner, Replica: d.m.last, Node: 3})
				case own.Role == keyspace.RoleVoter:
					return true, nil
				}
				return false, d.m.change(lead, &k, raftgroup.ConfChange{Type: raftgroup.Promote, Replica: own.ID})
			})
			served(d)
			d.expect("a third voter", 2)
		})
	})
	t.Run("three", func(t *testing.T) {
		virtually(t, func(t *testing.T) {
			d := newDoubtRig(t, 3)
			defer d.stopAll()
			d.corrupt(d.nodes[1], 1)
			d.corrupt(d.nodes[2], 2)
			silent(d)
			// A replica on another node is copied from the leader.
			d.m.replaceOn("k", 3, 4)
			served(d)
			d.expect("two agree", 2)
		})
	})
}
