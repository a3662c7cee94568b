package decide

import (
	"fmt"
	"slices"

	"github.com/skeindb/skein/keyspace"
)

// hold is why something that is needed is not done now.
type hold uint8

const (
	free hold = iota
	holdLimit
	holdLater
	holdLeader
	holdBusy
	holdTargets
	holdNodes
	holdLead
	holdZone
)

var holdNames = [...]string{
	"nothing holds it up",
	"as many operations as allowed are under way in the cluster",
	"an attempt has failed, and it is tried again a little later",
	"nobody is known to lead the range",
	"its leader's node has as much to do as it may",
	"every node that may take a replica receives as many as it may",
	"no live node with room is without a replica of it: add a node, or free space on disks or memory for replicas",
	"no live replica can take the lead: undrain a node that has one, or bring it back",
	"every other way would put two replicas into one zone",
}

// String returns the hold in words.
func (h hold) String() string { return holdNames[h] }

// choose returns the node that should get another replica of the range, when the one on
// from (which may be nil) ends. Zones with the fewest replicas of the range come first,
// and where these are only busy, it waits: a worse place would have to be left again.
func (c *Cluster) choose(r *rng, from *node) (*node, hold) { return c.chooseBut(r, from, nil) }

// elsewhere is choose, and passes over the nodes to which no copy of the range came, which the
// leader may not reach, as long as there is another one. Then each of them has its turn again.
func (c *Cluster) elsewhere(r *rng, from *node) (*node, hold) {
	if to, h := c.chooseBut(r, from, r.vain); h != holdNodes {
		return to, h
	}
	return c.choose(r, from)
}

// chooseBut is choose without some nodes.
func (c *Cluster) chooseBut(r *rng, from *node, but []keyspace.NodeID) (*node, hold) {
	least := -1
	for _, z := range c.zones {
		if c.usable(z, r, but) {
			if k := r.inZone(z, from); least < 0 || k < least {
				least = k
			}
		}
	}
	if least < 0 {
		return nil, holdNodes
	}
	var best *node
	for _, z := range c.zones {
		if !c.usable(z, r, but) || r.inZone(z, from) != least {
			continue
		}
		if n := c.emptiest(z, r, but); n != nil && (best == nil || n.in.fill < best.in.fill) {
			best = n
		}
	}
	if best == nil {
		return nil, holdTargets
	}
	return best, free
}

// emptiest returns the zone's emptiest node, but for some, that can take a copy of the range now.
func (c *Cluster) emptiest(z *zone, r *rng, but []keyspace.NodeID) *node {
	var found *node
	looked := 0
	z.receivers.Ascend(func(n *node) bool {
		looked++
		if !slices.Contains(but, n.ID) && r.seatOf(n.ID) == nil && c.fits(n, c.cost(r)) {
			found = n
			return false
		}
		return looked < maxLook
	})
	return found
}

// lead returns the node that leads the range, where it can be told to do something.
func (c *Cluster) lead(r *rng) (*node, hold) {
	n := c.nodes[r.Leader]
	if n != nil {
		if _, closed := r.closedOn(n); closed {
			return nil, holdLeader // the report of its successor is on its way
		}
	}
	switch {
	case r.Leader == 0 || n == nil || !n.live():
		return nil, holdLeader
	case c.underWay >= c.settings.MaxOperations:
		return nil, holdLimit
	case r.retryAt > c.now:
		return nil, holdLater
	}
	return n, free
}

// sender returns the range's leader where it can send one more copy.
func (c *Cluster) sender(r *rng) (*node, hold) {
	n, h := c.lead(r)
	if h == free && !c.settings.bears(n.sending, n.sendingBytes) {
		return nil, holdBusy
	}
	return n, h
}

// worker returns the range's leader where it can take one more operation without a copy.
func (c *Cluster) worker(r *rng) (*node, hold) {
	n, h := c.lead(r)
	if h == free && n.tasks >= c.settings.NodeTasks {
		return nil, holdBusy
	}
	return n, h
}

// where names a node, and its zone if there are several.
func (c *Cluster) where(n *node) string {
	if len(c.zones) < 2 {
		return fmt.Sprintf("node %s", n.ID)
	}
	return fmt.Sprintf("node %s in zone %q", n.ID, n.zone.name)
}
