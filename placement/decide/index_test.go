package decide

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
)

// TestIndexesFollowChanges makes random changes and compares all that is kept up to date
// with what it comes to when it is counted anew.
func TestIndexesFollowChanges(t *testing.T) {
	for seed := range uint64(20) {
		random := rand.New(rand.NewPCG(seed, 4))
		set := Defaults()
		set.MaxOperations = 12
		c := New(set, seed, 0)
		now, conf := clock.Time(0), uint64(0)
		for range 400 {
			now = now.Add(time.Duration(random.IntN(60)) * time.Second)
			change(c, random, now, &conf)
			if random.IntN(3) == 0 {
				c.Decide(now)
			}
			c.reindex()
			if err := c.recount(); err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
		}
	}
}

// change makes one random change.
func change(c *Cluster, random *rand.Rand, now clock.Time, conf *uint64) {
	node := keyspace.NodeID(1 + random.IntN(12))
	id := 1 + random.IntN(40)
	switch random.IntN(9) {
	case 0, 1:
		n := Node{ID: node, Zone: fmt.Sprint(random.IntN(3)), State: NodeState(random.IntN(3)), Capacity: random.Int64N(3) << 30, Isolated: random.IntN(4) == 0}
		if random.IntN(3) == 0 {
			n.Silent, n.SilentSince = true, now
		}
		c.PutNode(n)
	case 2:
		c.RemoveNode(node)
	case 3:
		c.RemoveRange(keyspace.RangeID(id))
	case 4:
		c.Finish(keyspace.RangeID(id), now, random.IntN(2) == 0)
	case 5:
		c.Refuse(keyspace.RangeID(id), now, random.IntN(2) == 0)
	default:
		*conf++
		d := keyspace.Descriptor{Range: keyspace.RangeID(id), Generation: 1, ConfIndex: *conf}
		d.Span = keyspace.Span{Start: fmt.Appendf(nil, "%03d", id), End: fmt.Appendf(nil, "%03d", id+1)}
		for k, at := range random.Perm(12)[:3+random.IntN(2)] {
			role := keyspace.RoleVoter
			if k > 1 {
				role = keyspace.Role(random.IntN(int(keyspace.RoleVoterDemoting) + 1))
			}
			d.Replicas = append(d.Replicas, keyspace.Replica{ID: keyspace.ReplicaID(*conf*10) + keyspace.ReplicaID(k), Node: keyspace.NodeID(1 + at), Role: role})
		}
		c.PutRange(Range{
			Descriptor: d, Leader: d.Replicas[random.IntN(2)].Node, Bytes: random.Int64N(300 << 20), Load: random.Int64N(3000),
			Born: now.Add(-time.Duration(random.IntN(7200)) * time.Second),
		})
	}
}

// recount compares what is kept of nodes, queues and sums with the ranges themselves.
func (c *Cluster) recount() error {
	type carries struct {
		bytes, load, receivingBytes, sendingBytes              int64
		count, leaders, receiving, sending, tasks, merging, on int
	}
	want := map[keyspace.NodeID]*carries{}
	of := func(id keyspace.NodeID) *carries {
		if want[id] == nil {
			want[id] = &carries{}
		}
		return want[id]
	}
	under := 0
	for i, r := range c.all {
		if r.slot != i || c.ranges[r.Descriptor.Range] != r {
			return fmt.Errorf("range %s is at %d, not %d", r.Descriptor.Range, i, r.slot)
		}
		if q := c.queues[r.need].items; r.need != None && (r.needPos >= len(q) || q[r.needPos] != r) {
			return fmt.Errorf("range %s is not at %d in the queue of %s", r.Descriptor.Range, r.needPos, r.need)
		}
		if r.op != nil && r.need != None {
			return fmt.Errorf("range %s is queued for %s while %s is under way", r.Descriptor.Range, r.need, r.op)
		}
		for _, s := range r.seats {
			if s.node.replicas[s.at] != r {
				return fmt.Errorf("range %s is not at %d of node %s", r.Descriptor.Range, s.at, s.node.ID)
			}
			w := of(s.node.ID)
			w.on++
			if r.plannedOn(s.node.ID) {
				w.bytes += c.cost(r)
				w.count++
			}
			if r.plannedLeader() == s.node.ID {
				w.load += r.Load
				w.leaders++
			}
		}
		if op := r.op; op != nil && op.Range == r.Descriptor.Range {
			under++
			if op.copies() {
				of(op.To).receiving++
				of(op.To).receivingBytes += op.Bytes
				of(op.Source).sending++
				of(op.Source).sendingBytes += op.Bytes
			} else {
				of(op.Source).tasks++
				if op.Kind == Merge {
					of(op.Source).merging++
				}
			}
		}
	}
	if under != c.underWay {
		return fmt.Errorf("%d operations are under way, %d are counted", under, c.underWay)
	}
	var bytes int64
	live := 0
	for id, n := range c.nodes {
		got := carries{
			n.bytes, n.load, n.receivingBytes, n.sendingBytes, n.count, n.leaders, n.receiving, n.sending, n.tasks, n.merging, len(n.replicas),
		}
		if w := of(id); got != *w {
			return fmt.Errorf("node %s carries %+v, counted are %+v", id, *w, got)
		}
		if n.takes() {
			live++
		}
		if slices.Contains(c.alone, n) != n.Isolated {
			return fmt.Errorf("node %s is isolated: %t, and those are %v", id, n.Isolated, c.alone)
		}
		if n.known && n.State == Serving && !n.dead {
			bytes += n.bytes
		}
	}
	if bytes != c.sum.bytes || live != c.sum.live || live != c.byLoad.Len() || live != c.byLeaders.Len() {
		return fmt.Errorf("%d live nodes and %d bytes, summed are %d and %d, ordered %d and %d",
			live, bytes, c.sum.live, c.sum.bytes, c.byLoad.Len(), c.byLeaders.Len())
	}
	return nil
}

// TestPatrolIsPaced: a round for each operation that ends reviews what has changed, not
// thousands of other ranges each time.
func TestPatrolIsPaced(t *testing.T) {
	c := New(Defaults(), 1, 0)
	for id := range patrolled + 1 {
		c.PutRange(Range{Descriptor: keyspace.Descriptor{
			Range: keyspace.RangeID(id + 1), Generation: 1, Replicas: []keyspace.Replica{{ID: 1, Node: 1}},
			Span: keyspace.Span{Start: fmt.Appendf(nil, "%05d", id), End: fmt.Appendf(nil, "%05d", id+1)},
		}})
	}
	now := clock.Time(0)
	for range 10 {
		c.Decide(now)
		if c.patrol != patrolled {
			t.Fatalf("patrolled to %d after %v, want %d", c.patrol, now.Sub(0), patrolled)
		}
		now = now.Add(patrolEvery / 10)
	}
	if c.Decide(now); c.patrol != patrolled-1 {
		t.Errorf("patrolled to %d after %v, want %d", c.patrol, now.Sub(0), patrolled-1)
	}
}

// TestBackAmongMany: a node that counted as lost is back, in a round that has more replicas to
// review than it does. Its ranges are not repaired.
func TestBackAmongMany(t *testing.T) {
	c := New(Defaults(), 1, 0)
	c.settings.MaxOperations, c.reviewed = 4, 1<<10
	for id := range c.reviewed + 8 {
		d := keyspace.Descriptor{
			Range: keyspace.RangeID(id + 1), Generation: 1,
			Span: keyspace.Span{Start: fmt.Appendf(nil, "%06d", id), End: fmt.Appendf(nil, "%06d", id+1)},
		}
		first := keyspace.NodeID(1)
		if id >= c.reviewed {
			first = 4
		}
		for k := range keyspace.NodeID(3) {
			d.Replicas = append(d.Replicas, keyspace.Replica{ID: keyspace.ReplicaID(first + k), Node: first + k})
		}
		c.PutRange(Range{Descriptor: d, Leader: first + 1, Bytes: 1 << 20})
	}
	put := func(id keyspace.NodeID, silent bool) { c.PutNode(Node{ID: id, Silent: silent}) }
	for id := range keyspace.NodeID(6) {
		put(id+1, id == 3)
	}
	now := clock.Time(c.settings.NodeDeadAfter)
	for range 10 {
		c.Decide(now)
	}
	if n := c.Pending()[QuorumRisk]; n == 0 {
		t.Fatalf("pending are %v, want ranges at risk", c.Pending())
	}
	for i := range c.all {
		c.Finish(c.all[i].Descriptor.Range, now, false)
	}
	put(1, true)
	put(1, false)
	put(4, false)
	for _, op := range c.Decide(now).Operations {
		if op.Reason == QuorumRisk {
			t.Errorf("decided %v, and every node is live", &op)
		}
	}
}
