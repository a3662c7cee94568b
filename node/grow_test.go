package node

import (
	"fmt"
	"testing"
	"time"

	"github.com/skeindb/skein/keyspace"
)

// A cluster grows from three nodes to nine. All serve all.
func TestAClusterGrowsThreefold(t *testing.T) {
	bubble(t, 3, nil, func(o *Options) {
		shortLog(o)
		o.MemoryBytes = 1 << 30
	}, func(r *rig) {
		r.publish(r.nodes...)
		for i := 4; i <= 9; i++ {
			n := r.joiner(fmt.Sprintf("n%d", i))
			if err := r.join(r.t.Context(), n, r.nodes[i-4]); err != nil {
				t.Fatal(err)
			}
			r.announced(n)
		}
		time.Sleep(time.Second)
		for _, n := range r.nodes {
			r.mustPut(n, "k", n.name)
			r.mustGet(r.nodes[0], "k", n.name)
			for _, o := range r.nodes {
				if o != n && !n.core.bus.Peer(o.id).Up {
					t.Errorf("node %s does not reach node %s", n.id, o.id)
				}
			}
		}
	})
}

// voters counts the voters of a group.
func voters(d *keyspace.Descriptor) (n int) {
	for _, m := range d.Replicas {
		if m.Role == keyspace.RoleVoter {
			n++
		}
	}
	return n
}

// placementVoters counts the voters of the placement group by the node's map.
func (r *rig) placementVoters(n *rigNode) int {
	r.t.Helper()
	m, err := n.core.Placement().Map(r.t.Context())
	if err != nil {
		r.t.Fatal(err)
	}
	own := m.PlacementGroup()
	return voters(&own)
}

// A cluster of three that grows to five gets five voters of the placement group, as one that five
// nodes found. Then it goes on without any two nodes, here the leader of placement and another
// voter of the first three.
func TestAGrownClusterOutlivesTwoNodes(t *testing.T) {
	bubble(t, 3, nil, shortLog, func(r *rig) {
		r.publish(r.nodes...)
		for i := 4; i <= 5; i++ {
			n := r.joiner(fmt.Sprintf("n%d", i))
			if err := r.join(r.t.Context(), n, r.nodes[0]); err != nil {
				r.t.Fatal(err)
			}
			r.announced(n)
		}
		r.wait(3*time.Minute, "five voters of the placement group", func() bool { return r.placementVoters(r.nodes[4]) == 5 })
		// The ranges have three voters: here they are to outlive the two nodes too.
		if err := r.nodes[4].core.Placement().SetReplication(r.t.Context(), 5); err != nil {
			r.t.Fatal(err)
		}
		r.wait(3*time.Minute, "five voters of each range", func() bool {
			ds, err := r.nodes[4].core.Placement().RangeMap(r.t.Context())
			return err == nil && len(ds) == 1 && voters(&ds[0]) == 5
		})
		r.mustPut(r.nodes[3], "k", "before")
		lead := r.nodes[0]
		for _, n := range r.nodes {
			if n.id == lead.core.Placement().Leader() {
				lead = n
			}
		}
		other := r.nodes[0]
		if other == lead {
			other = r.nodes[1]
		}
		r.crash(lead, other)
		for _, n := range r.nodes {
			if n.core != nil {
				r.wait(20*time.Second, "puts again", func() bool {
					_, err := n.put(r.t.Context(), "k", n.name)
					return err == nil
				})
			}
		}
	})
}

// An operator of seven nodes gives the placement group seven voters, and takes two away again. What
// was asked for stays, and what would be undone is refused.
func TestVotersOfPlacementByHand(t *testing.T) {
	bubble(t, 7, nil, shortLog, func(r *rig) {
		r.publish(r.nodes...)
		admin := r.nodes[6].core.Admin()
		change := func(from, to string, want int) {
			r.t.Helper()
			if _, err := admin.MovePlacement(r.t.Context(), from, to); err != nil {
				r.t.Fatal(err)
			}
			held := func() int { return r.placementVoters(r.nodes[0]) }
			idle := func() bool {
				ops, err := r.nodes[0].core.Placement().Operations(r.t.Context())
				return err == nil && len(ops) == 0
			}
			r.wait(time.Minute, fmt.Sprintf("%d voters", want), func() bool { return idle() && held() == want })
			time.Sleep(40 * time.Second)
			if n := held(); n != want {
				r.t.Fatalf("from %q to %q: later there are %d voters, want %d", from, to, n, want)
			}
			r.mustPut(r.nodes[6], "k", "v")
		}
		time.Sleep(5 * time.Second) // all hear each other
		lead := r.nodes[0].core.Placement().Leader().String()
		change("", "6", 6)
		change("", "7", 7)
		change(lead, "", 6)
		change("6", "", 5)
		if _, err := admin.MovePlacement(r.t.Context(), "7", ""); err == nil {
			r.t.Error("one more than is to be was removed")
		}
	})
}
