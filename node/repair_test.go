package node

import (
	"fmt"
	"testing"
	"time"

	"github.com/skeindb/skein/keyspace"
)

// rigDead is --node-dead-after of the tests below.
const rigDead = 20 * time.Second

func deadSoon(o *Options) {
	shortLog(o)
	o.NodeDeadAfter = rigDead
}

// replicated says what of the map is not as it should be: each range has so many voters,
// all on the given nodes, and nobody holds anything else.
func (r *rig) replicated(voters int, on ...*rigNode) error {
	there := map[keyspace.NodeID]*rigNode{}
	for _, n := range on {
		there[n.id] = n
	}
	ds, err := on[0].core.client.RangeMap(r.t.Context())
	if err != nil {
		return err
	}
	member := map[keyspace.RangeID]keyspace.Descriptor{}
	for _, d := range ds {
		member[d.Range] = d
		good := len(d.Replicas) == voters
		for _, m := range d.Replicas {
			good = good && m.Role == keyspace.RoleVoter && there[m.Node] != nil
		}
		if !good {
			return fmt.Errorf("range %s has the replicas %v", d.Range, d.Replicas)
		}
	}
	for _, n := range r.nodes {
		if n.core == nil {
			continue
		}
		for _, s := range n.summaries() {
			d := member[s.Descriptor.Range]
			if _, ok := d.ReplicaOn(n.id); !ok {
				return fmt.Errorf("node %s holds range %s, which has the replicas %v", n.id, d.Range, d.Replicas)
			}
		}
	}
	ops, err := on[0].core.client.Operations(r.t.Context())
	if err == nil && len(ops) > 0 {
		err = fmt.Errorf("under way: %+v", ops)
	}
	return err
}

// settle waits until replicated finds nothing.
func (r *rig) settle(limit time.Duration, what string, voters int, on ...*rigNode) {
	r.t.Helper()
	began := time.Now()
	for {
		err := r.replicated(voters, on...)
		if err == nil {
			return
		}
		if time.Since(began) > limit {
			r.t.Fatalf("%s: not within %v: %v", what, limit, err)
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// where returns on which nodes each range has its replicas.
func (r *rig) where(n *rigNode) string {
	ds, err := n.core.client.RangeMap(r.t.Context())
	if err != nil {
		r.t.Fatal(err)
	}
	var all []string
	for _, d := range ds {
		all = append(all, fmt.Sprint(d.Range, d.Replicas))
	}
	return fmt.Sprint(all)
}

// The replicas of a lost node are rebuilt on the rest, unless it is back in time. Nothing that
// was acknowledged is lost, and when the node comes back it gives up what it has and takes its
// share again.
func TestLostNodeIsRepaired(t *testing.T) {
	const ranges = 6
	bubble(t, 5, borders(ranges), deadSoon, func(r *rig) {
		r.spread(r.nodes[0], ranges, "1")
		before := r.where(r.nodes[0])
		r.crash(r.nodes[4])
		time.Sleep(rigDead - 5*time.Second)
		r.start(r.nodes[4])
		time.Sleep(rigDead)
		if after := r.where(r.nodes[0]); after != before {
			r.t.Fatalf("a node was back in time, and replicas went from %s to %s", before, after)
		}
		r.crash(r.nodes[4])
		time.Sleep(5 * time.Second)
		r.spread(r.nodes[1], ranges, "2")
		left := r.nodes[:4]
		r.settle(rigDead+time.Minute, "repair", 3, left...)
		for i := range ranges {
			r.mustGet(r.nodes[i%4], keyOf(i), "2")
		}
		r.start(r.nodes[4])
		r.wait(15*time.Minute, "the node takes its share again", func() bool {
			return len(r.nodes[4].summaries()) >= 2 && r.replicated(3, r.nodes...) == nil
		})
		r.caughtUp(10 * time.Second)
		for i := range ranges {
			r.mustGet(r.nodes[4], keyOf(i), "2")
		}
	})
}
