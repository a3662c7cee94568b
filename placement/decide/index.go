package decide

import (
	"cmp"
	"slices"

	"github.com/google/btree"

	"github.com/skeindb/skein/keyspace"
)

// orderDegree is the fan-out of the orders of nodes.
const orderDegree = 16

// unknownCapacity stands in for the capacity of a node that reports none.
const unknownCapacity = 1 << 40

func newOrder(less func(a, b *node) bool) *btree.BTreeG[*node] { return btree.NewG(orderDegree, less) }

func newZone(name string) *zone {
	byFill := func(a, b *node) bool {
		return a.in.fill < b.in.fill || a.in.fill == b.in.fill && a.ID < b.ID
	}
	return &zone{name: name, fill: newOrder(byFill), roomy: newOrder(byFill), receivers: newOrder(byFill)}
}

func compare[T cmp.Ordered](a, b T) int { return cmp.Compare(a, b) }

// gone says that a replica in this role will not be there when the configuration that is
// under way has been left.
func gone(role keyspace.Role) bool {
	return role == keyspace.RoleVoterOutgoing || role == keyspace.RoleVoterDemoting
}

// cost is what one replica of the range counts.
func (c *Cluster) cost(r *rng) int64 { return r.Bytes + c.settings.RangeCost }

// plannedLeader returns the node that leads when the operation under way has ended.
func (r *rng) plannedLeader() keyspace.NodeID {
	if r.op != nil && r.op.Lead != 0 && r.op.Range == r.Descriptor.Range {
		return r.op.Lead
	}
	return r.Leader
}

// plannedOn says whether the node has a replica when the operation under way has ended.
func (r *rng) plannedOn(id keyspace.NodeID) bool {
	if op := r.op; op != nil && op.Range == r.Descriptor.Range {
		if op.To == id {
			return true
		}
		if op.From == id && (op.Kind == MoveReplica || op.Kind == RemoveReplica) {
			return false
		}
	}
	is, ok := r.Descriptor.ReplicaOn(id)
	return ok && !gone(is.Role)
}

// place puts the range into the lists of its nodes and adds what it weighs to them.
func (c *Cluster) place(r *rng) {
	for _, is := range r.Descriptor.Replicas {
		c.sit(r, is.Node)
	}
	if r.op != nil && r.op.To != 0 && r.op.Range == r.Descriptor.Range && r.seatOf(r.op.To) == nil {
		c.sit(r, r.op.To)
	}
	c.weigh(r, 1)
}

// unplace undoes place.
func (c *Cluster) unplace(r *rng) {
	c.weigh(r, -1)
	for _, s := range r.seats {
		n := s.node
		last := n.replicas[len(n.replicas)-1]
		n.replicas[s.at] = last
		last.seatOf(n.ID).at = s.at
		n.replicas[len(n.replicas)-1] = nil
		n.replicas = n.replicas[:len(n.replicas)-1]
	}
	r.seats = r.seats[:0]
}

func (c *Cluster) sit(r *rng, id keyspace.NodeID) {
	n := c.nodeOf(id)
	r.seats = append(r.seats, seat{n, len(n.replicas)})
	n.replicas = append(n.replicas, r)
}

func (r *rng) seatOf(id keyspace.NodeID) *seat {
	for i := range r.seats {
		if r.seats[i].node.ID == id {
			return &r.seats[i]
		}
	}
	return nil
}

// weigh adds the range to what its nodes carry by plan, sign times.
func (c *Cluster) weigh(r *rng, sign int) {
	lead := r.plannedLeader()
	for _, s := range r.seats {
		if r.plannedOn(s.node.ID) {
			s.node.bytes += int64(sign) * c.cost(r)
			s.node.count += sign
			c.touch(s.node)
		}
		if s.node.ID == lead {
			s.node.load += int64(sign) * r.Load
			s.node.leaders += sign
			c.touch(s.node)
		}
	}
}

// attach notes that the operation is under way.
func (c *Cluster) attach(r, other *rng, op *Operation) {
	c.unplace(r)
	r.op = op
	c.place(r)
	c.setNeed(r, None)
	if other != nil {
		other.op = op
		c.setNeed(other, None)
	}
	c.occupy(op, 1)
}

// detach undoes attach.
func (c *Cluster) detach(r *rng) {
	op := r.op
	if op == nil {
		return
	}
	if op.Range != r.Descriptor.Range {
		// A merge is noted at both ranges, and counted at the left one.
		if left, ok := c.ranges[op.Range]; ok {
			c.detach(left)
		}
		return
	}
	c.occupy(op, -1)
	c.unplace(r)
	r.op = nil
	c.place(r)
	if other, ok := c.ranges[op.Other]; ok && other.op == op {
		other.op = nil
	}
}

// occupy counts the operation where it is bounded, sign times.
func (c *Cluster) occupy(op *Operation, sign int) {
	c.underWay += sign
	if op.Reason == QuorumRisk || op.Reason == Repair {
		c.repairs += sign
	}
	balance := 0
	if op.Reason >= Bytes {
		balance = sign
	}
	if !op.copies() {
		if n, ok := c.nodes[op.Source]; ok {
			n.tasks += sign
			if op.Kind == Merge {
				n.merging += sign
			}
			c.touch(n)
		}
		return
	}
	bytes := int64(sign) * op.Bytes
	if n, ok := c.nodes[op.To]; ok {
		n.receiving, n.receivingBytes, n.balanceIn = n.receiving+sign, n.receivingBytes+bytes, n.balanceIn+balance
		c.touch(n)
	}
	if n, ok := c.nodes[op.Source]; ok {
		n.sending, n.sendingBytes, n.balanceOut = n.sending+sign, n.sendingBytes+bytes, n.balanceOut+balance
		c.touch(n)
	}
}

// touch notes that the node's place in the orders may have changed.
func (c *Cluster) touch(n *node) {
	if !n.dirty {
		n.dirty = true
		c.dirty = append(c.dirty, n)
	}
}

// reindex brings the orders and sums up to date.
func (c *Cluster) reindex() {
	for _, n := range c.dirty {
		n.dirty = false
		c.unindex(n)
		if c.nodes[n.ID] == n && n.known {
			c.index(n)
		}
	}
	c.dirty = c.dirty[:0]
}

func (n *node) live() bool { return n.known && !n.Silent }

// takes says whether the node may be given replicas and leaders at all.
func (n *node) takes() bool { return n.known && n.Takes() }

func (n *node) weight() int64 {
	if n.Capacity > 0 {
		return n.Capacity
	}
	return unknownCapacity
}

// fits says whether the node has memory for another replica, and so many more bytes leave its disk below
// where that counts as full.
func (c *Cluster) fits(n *node, more int64) bool {
	return !n.Full && (n.Capacity == 0 || float64(max(n.bytes, n.Used)+more) <= c.settings.FullAt*float64(n.Capacity))
}

// unindex takes the node out of the orders and sums.
func (c *Cluster) unindex(n *node) {
	was := n.in
	n.in = indexed{}
	if was.counted {
		n.zone.weight -= was.weight
		n.zone.bytes -= was.bytes
		c.sum.weight -= was.weight
		c.sum.bytes -= was.bytes
		c.sum.count -= was.count
		c.sum.counted--
	}
	if !was.live {
		return
	}
	// The orders compare what they hold.
	n.in = was
	n.zone.fill.Delete(n)
	c.byLoad.Delete(n)
	c.byLeaders.Delete(n)
	if was.room {
		n.zone.roomy.Delete(n)
	}
	if was.receiver {
		n.zone.receivers.Delete(n)
	}
	n.in = indexed{}
	c.sum.load -= was.load
	c.sum.leaders -= was.leaders
	c.sum.live--
}

// index puts the node into the orders and sums, as it is now. Silent nodes count for the shares
// until they are dead, so that a pause of a zone moves nothing. Isolated nodes always count,
// since they keep their replicas.
func (c *Cluster) index(n *node) {
	w := n.weight()
	is := indexed{
		counted: n.State == Serving && !n.dead, live: n.takes(),
		fill: float64(n.bytes) / float64(w), weight: w,
		bytes: n.bytes, load: n.load, leaders: n.leaders, count: n.count,
	}
	is.room = is.live && c.fits(n, 0)
	is.receiver = is.room && c.settings.bears(n.receiving, n.receivingBytes)
	n.in = is
	if is.counted {
		n.zone.weight += w
		n.zone.bytes += is.bytes
		c.sum.weight += w
		c.sum.bytes += is.bytes
		c.sum.count += is.count
		c.sum.counted++
	}
	if !is.live {
		n.hot = false
		return
	}
	n.zone.fill.ReplaceOrInsert(n)
	c.byLoad.ReplaceOrInsert(n)
	c.byLeaders.ReplaceOrInsert(n)
	if is.room {
		n.zone.roomy.ReplaceOrInsert(n)
	}
	if is.receiver {
		n.zone.receivers.ReplaceOrInsert(n)
	}
	c.sum.load += is.load
	c.sum.leaders += is.leaders
	c.sum.live++
	if n.hot && float64(n.load) <= c.restLoad() {
		n.hot = false
	}
}

func (c *Cluster) restLoad() float64 { return c.loadAt(c.settings.LoadRest) }

// highLoad and restLoad are the loads of a node at which taking load from it begins and
// ends.
func (c *Cluster) highLoad() float64 { return c.loadAt(c.settings.LoadBand) }

func (c *Cluster) loadAt(part float64) float64 {
	mean := float64(c.sum.load) / float64(max(1, c.sum.live))
	return mean*(1+part) + float64(c.settings.MinLoad)
}

// nodeOf returns the node, also where only a replica has named it so far: then it is
// one of which nothing was heard.
func (c *Cluster) nodeOf(id keyspace.NodeID) *node {
	n, ok := c.nodes[id]
	if !ok {
		n = &node{Node: Node{ID: id, State: Decommissioning, Silent: true, SilentSince: c.now}, zone: c.zoneOf("")}
		c.nodes[id] = n
		c.noteSilence(n)
	}
	return n
}

// left and right return the neighbours, nil where there is none.
func (c *Cluster) left(r *rng) *rng {
	if len(r.Descriptor.Span.Start) == 0 {
		return nil
	}
	return c.byEnd[string(r.Descriptor.Span.Start)]
}

func (c *Cluster) right(r *rng) *rng {
	if len(r.Descriptor.Span.End) == 0 {
		return nil
	}
	return c.byStart[string(r.Descriptor.Span.End)]
}

// noteSilence keeps the list of silent nodes.
func (c *Cluster) noteSilence(n *node) {
	n.dead, n.swept = false, false
	c.silent = listed(c.silent, n, n.Silent)
}

// zoneOf returns the zone of that name.
func (c *Cluster) zoneOf(name string) *zone {
	at, found := slices.BinarySearchFunc(c.zones, name, func(z *zone, name string) int {
		return compare(z.name, name)
	})
	if !found {
		c.zones = slices.Insert(c.zones, at, newZone(name))
	}
	return c.zones[at]
}

// listed returns the nodes, in the order of their ids, with or without n.
func listed(nodes []*node, n *node, in bool) []*node {
	at, found := slices.BinarySearchFunc(nodes, n.ID, func(a *node, id keyspace.NodeID) int {
		return compare(a.ID, id)
	})
	switch {
	case in && !found:
		return slices.Insert(nodes, at, n)
	case !in && found:
		return slices.Delete(nodes, at, at+1)
	}
	return nodes
}
