package decide

import (
	"fmt"
	"slices"
	"strings"

	"github.com/skeindb/skein/keyspace"
)

// Refusal says why a node cannot be drained or decommissioned, and what to do.
type Refusal struct {
	Node keyspace.NodeID
	// What was refused: "drained" or "decommissioned".
	What    string
	Why, Do string
}

// Error returns the refusal in one sentence.
func (r *Refusal) Error() string {
	return fmt.Sprintf("node %s cannot be %s: %s; %s", r.Node, r.What, r.Why, r.Do)
}

// maxNamed bounds the nodes and ranges that a refusal names.
const maxNamed = 3

// CanDrain returns nil where the node can give up its leaders and then be stopped, and
// else a *Refusal. The settings of the node itself play no part.
func (c *Cluster) CanDrain(id keyspace.NodeID) error {
	n, ok := c.nodes[id]
	if !ok || !n.known {
		return &Refusal{id, "drained", "it is not a node of this cluster", "list the nodes"}
	}
	refuse := func(why, do string) error { return &Refusal{id, "drained", why, do} }
	var stop, only []keyspace.RangeID
	missing := map[keyspace.NodeID]bool{}
	for _, r := range n.replicas {
		if !r.votes(n) {
			continue
		}
		t := c.count(r)
		switch {
		case t.voters == 1:
			only = append(only, r.Descriptor.Range)
		case n.live() && t.spare < 1:
			stop = append(stop, r.Descriptor.Range)
			for _, s := range r.seats {
				if !s.node.live() {
					missing[s.node.ID] = true
				}
			}
		}
	}
	switch {
	case len(only) > 0:
		return refuse("it has the only replica of "+named(only), c.moreReplicas(n, "decommission it instead, or raise the replication factor", 1))
	case len(stop) > 0 && len(missing) > 0:
		return refuse("without it there is no quorum of "+named(stop)+", since "+nodesNamed(missing)+" is silent",
			"bring that back, or wait until its replicas are rebuilt")
	case len(stop) > 0:
		return refuse("without it there is no quorum of "+named(stop), c.moreReplicas(n, "raise the replication factor to 3", safeFactor-1))
	case n.leaders > 0 && c.others(n) == 0:
		return refuse("no other node is there to lead", "add a node, or have another one serve again")
	}
	return c.canLeadElsewhere(n)
}

// safeFactor is the least number of voters that outlives the loss of one.
const safeFactor = 3

// moreReplicas says what has to be done so that the node's ranges can do without it. raise is the
// advice for ranges that are set to too few voters. It takes as many other nodes as nodes says.
func (c *Cluster) moreReplicas(n *node, raise string, nodes int) string {
	short := safeFactor - c.others(n)
	if n.in.live {
		short-- // it keeps its own
	}
	switch {
	case c.settings.ReplicationFactor < safeFactor && c.others(n) < nodes:
		return c.missing(nodes-c.others(n), n) + ", and then " + raise
	case c.settings.ReplicationFactor < safeFactor:
		return raise
	case short > 0:
		return c.missing(short, n) + ": ranges get more voters by themselves then"
	default:
		return "wait until ranges have as many voters as they are to have"
	}
}

// canLeadElsewhere says which ranges that the node leads have nobody else to lead them.
func (c *Cluster) canLeadElsewhere(n *node) error {
	var stuck []keyspace.RangeID
	unfit := map[keyspace.NodeID]*node{}
	for _, r := range n.replicas {
		if r.Leader != n.ID || c.heir(r, n, nil) != nil {
			continue
		}
		stuck = append(stuck, r.Descriptor.Range)
		for _, s := range r.seats {
			if s.node != n && !s.node.takes() {
				unfit[s.node.ID] = s.node
			}
		}
	}
	if len(stuck) == 0 {
		return nil
	}
	why, do := unfitWords(unfit)
	return &Refusal{n.ID, "drained", "nobody else can lead " + named(stuck) + why, do}
}

// unfitWords says of nodes that take neither leaders nor replicas why, and what has each of
// them do so again: one is enough.
func unfitWords(nodes map[keyspace.NodeID]*node) (why, do string) {
	var whys, dos []string
	for _, kind := range []struct {
		is       func(*node) bool
		why, how string
	}{
		{func(n *node) bool { return n.Silent && n.State == Serving }, "is silent", "bring %s back"},
		{func(n *node) bool { return n.Silent && n.State != Serving }, "is silent, and drained or decommissioned", "bring %s back and undrain or recommission it"},
		{func(n *node) bool { return !n.Silent && n.State == Draining }, "is drained too", "undrain %s first"},
		{func(n *node) bool { return !n.Silent && n.State == Decommissioning }, "is decommissioned", "recommission %s first"},
		{func(n *node) bool { return !n.Silent && n.State == Serving }, "hears hardly any other node", "let %s hear the others first"},
	} {
		ids := map[keyspace.NodeID]bool{}
		for id, n := range nodes {
			if kind.is(n) {
				ids[id] = true
			}
		}
		if len(ids) > 0 {
			whys = append(whys, nodesNamed(ids)+" "+kind.why)
			dos = append(dos, fmt.Sprintf(kind.how, nodesNamed(ids)))
		}
	}
	if len(whys) == 0 {
		return "", "add a node"
	}
	return ": " + strings.Join(whys, "; "), strings.Join(dos, ", or ")
}

// CanDecommission returns nil where the node's replicas can go to others, and else a
// *Refusal.
func (c *Cluster) CanDecommission(id keyspace.NodeID) error {
	n, ok := c.nodes[id]
	if !ok || !n.known {
		return &Refusal{id, "decommissioned", "it is not a node of this cluster", "list the nodes"}
	}
	refuse := func(why, do string, args ...any) error {
		return &Refusal{id, "decommissioned", why, fmt.Sprintf(do, args...)}
	}
	c.reindex()
	var stopped []keyspace.RangeID
	voters := 0
	for _, r := range n.replicas {
		t := c.count(r)
		voters = max(voters, t.voters)
		if t.spare < 0 {
			stopped = append(stopped, r.Descriptor.Range)
		}
	}
	need := min(max(voters, 1), c.settings.ReplicationFactor)
	others, lower := c.others(n), ""
	if others > 0 {
		lower = ", or lower the replication factor"
	}
	switch {
	case len(stopped) > 0:
		return refuse(named(stopped)+" would be lost: it is below its quorum",
			"bring back its other nodes first")
	case len(n.replicas) > 0 && others < need:
		return refuse(fmt.Sprintf("%d voters of each range need as many nodes, and %d others take replicas", need, others),
			"%s", c.missing(need-others, n)+lower)
	}
	if room := c.roomWithout(n); room < n.bytes {
		return refuse(fmt.Sprintf("it has %d MiB, and the others have room for %d MiB", n.bytes>>20, max(0, room)>>20)+c.declining(n),
			"%s", c.orMemory("add a node, or delete data", n))
	}
	if r := c.homeless(n); r != nil {
		return refuse(fmt.Sprintf("no node without a replica of range %s has room for its %d MiB", r.Descriptor.Range, r.Bytes>>20)+c.declining(n),
			"%s", c.orMemory("add a node, or free space", n))
	}
	if others, left := c.zonesWithout(n); left && others < need {
		return refuse(fmt.Sprintf("it is the last node of zone %q, and in the %d others replicas would share a zone", n.zone.name, others),
			"add a node in zone %q first", n.zone.name)
	}
	return nil
}

// others counts the nodes besides n that take replicas.
func (c *Cluster) others(n *node) int {
	c.reindex()
	if n.in.live {
		return c.sum.live - 1
	}
	return c.sum.live
}

// roomWithout returns the bytes that nodes besides n can take.
func (c *Cluster) roomWithout(n *node) int64 {
	var room int64
	for _, z := range c.zones {
		z.fill.Ascend(func(o *node) bool {
			if o != n && !o.Full {
				room += max(0, int64(c.settings.FullAt*float64(o.weight()))-max(o.bytes, o.Used))
			}
			return true
		})
	}
	return room
}

// homeless returns a range of the node that none of the emptiest nodes could take. One that is just being moved to the
// node needs none: it has its replicas elsewhere.
func (c *Cluster) homeless(n *node) *rng {
	for _, r := range n.replicas {
		elsewhere := 0
		for _, is := range r.Descriptor.Replicas {
			if o := c.nodes[is.Node]; o != n && o.in.live {
				elsewhere++
			}
		}
		if elsewhere >= c.settings.ReplicationFactor {
			continue
		}
		home := slices.ContainsFunc(c.zones, func(z *zone) bool { return c.usable(z, r, nil) })
		if t := c.count(r); !home && t.voters <= c.settings.ReplicationFactor {
			return r
		}
	}
	return nil
}

// zonesWithout counts the zones that have live nodes besides n, and says whether n's
// zone is left empty.
func (c *Cluster) zonesWithout(n *node) (others int, left bool) {
	left = true
	for _, z := range c.zones {
		k := z.fill.Len()
		if z == n.zone && n.in.live {
			k--
		}
		if k > 0 {
			others++
			left = left && z != n.zone
		}
	}
	return others, left && others > 0
}

// named names a few of the ranges.
func named(ids []keyspace.RangeID) string {
	slices.Sort(ids)
	var b strings.Builder
	fmt.Fprintf(&b, "%d ranges (", len(ids))
	if len(ids) == 1 {
		b.Reset()
		b.WriteString("one range (")
	}
	for i, id := range ids[:min(maxNamed, len(ids))] {
		if i > 0 {
			b.WriteString(", ")
		}
		b.WriteString(id.String())
	}
	if len(ids) > maxNamed {
		b.WriteString(" …")
	}
	return b.String() + ")"
}

// orMemory returns what makes room on disks. If a node is full of replicas, it adds what makes room in
// memory. The node but does not count.
func (c *Cluster) orMemory(disks string, but *node) string {
	full := map[keyspace.NodeID]bool{}
	for id, n := range c.nodes {
		if n.takes() && n.Full && n != but {
			full[id] = true
		}
	}
	if len(full) == 0 {
		return disks
	}
	return "raise --memory-budget-bytes on " + nodesNamed(full) + ", full of replicas, or " + disks
}

// declining names the nodes besides but that are given no replicas and says why, behind a colon; "" where there are none.
func (c *Cluster) declining(but *node) string {
	var all []string
	for d := DeclinesSilent; int(d) < len(declineWords); d++ {
		ids := map[keyspace.NodeID]bool{}
		for id, n := range c.nodes {
			if n.known && n != but && c.declines(n) == d {
				ids[id] = true
			}
		}
		if len(ids) > 0 {
			all = append(all, nodesNamed(ids)+" "+d.String())
		}
	}
	if len(all) == 0 {
		return ""
	}
	return ": " + strings.Join(all, "; ")
}

// declines is Declines, and counts what placement has put on the node's disk too, as fits does.
func (c *Cluster) declines(n *node) Decline {
	if d := n.Declines(&c.settings); d != Accepts || c.fits(n, 0) {
		return d
	}
	return DeclinesDisk
}

// nodesNamed names a few of the nodes.
func nodesNamed(ids map[keyspace.NodeID]bool) string {
	var all []keyspace.NodeID
	for id := range ids {
		all = append(all, id)
	}
	slices.Sort(all)
	var names []string
	for _, id := range all[:min(maxNamed, len(all))] {
		names = append(names, "node "+id.String())
	}
	if len(all) > maxNamed {
		names = append(names, "…")
	}
	return strings.Join(names, ", ")
}

// missing says what makes up for so many nodes besides but that do not take replicas.
func (c *Cluster) missing(more int, but *node) string {
	silent, leaving, isolated := map[keyspace.NodeID]bool{}, map[keyspace.NodeID]bool{}, map[keyspace.NodeID]bool{}
	for id, n := range c.nodes {
		switch {
		case !n.known, n == but:
		case n.State != Serving:
			leaving[id] = true
		case n.Silent:
			silent[id] = true
		case n.Isolated:
			isolated[id] = true
		}
	}
	do := "add a node"
	if more != 1 {
		do = fmt.Sprintf("add %d nodes", more)
	}
	if len(leaving) > 0 {
		do = "take back " + nodesNamed(leaving) + ", or " + do
	}
	if len(isolated) > 0 {
		do = "let " + nodesNamed(isolated) + " hear the others, or " + do
	}
	if len(silent) > 0 {
		do = "bring back " + nodesNamed(silent) + ", or " + do
	}
	return do
}
