package decide

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"

	"github.com/google/btree"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
)

// Range is what is known of a range.
type Range struct {
	Descriptor keyspace.Descriptor
	// Leader is the node that leads it, 0 where nobody is known to.
	Leader keyspace.NodeID
	Bytes  int64
	// Load is puts and reads a second, smoothed by who reports it.
	Load int64
	// Born is when it was made, last split or last merged; 0 is not known, and counts as
	// the moment at which this state began.
	Born clock.Time
	// Kept says that somebody wants it to begin where it does: it is not merged with its
	// left neighbour.
	Kept bool
	// Quarantined are the replicas in quarantine, by their nodes' word. They stay in it until they
	// are replaced.
	Quarantined []Quarantined
}

// Quarantined is a replica that its node keeps closed, as package raftgroup does it: it neither votes
// nor leads nor copies anything, though its node lives.
type Quarantined struct {
	Replica keyspace.ReplicaID
	Reason  string
}

// node is a Node with what it carries by plan, which is with all operations under way
// as if they had ended well.
type node struct {
	Node
	zone     *zone
	known    bool // there was a PutNode; else only a replica names it
	dead     bool // silent for longer than NodeDeadAfter
	swept    bool // operations that wait for it are abandoned
	queued   bool // its ranges are to be reviewed
	replicas []*rng

	bytes   int64 // with RangeCost for each replica
	count   int
	load    int64 // of the ranges that it leads
	leaders int

	receiving, sending, tasks    int
	merging                      int // of tasks
	balanceIn, balanceOut        int
	receivingBytes, sendingBytes int64

	dirty bool
	// What the orders and sums hold of it now.
	in      indexed
	hot     bool // load has been above the band, and not below the rest since
	hotAt   clock.Time
	hotLoad float64 // its load then, less what was moved away since
	far     outside // of the band of bytes
	uneven  outside // of that of leaders
	retryAt [reasons]clock.Time
}

// indexed is what indexes and sums hold of a node.
type indexed struct {
	counted, live, room, receiver bool
	fill                          float64
	weight, bytes, load           int64
	leaders, count                int
}

// zone is the nodes with one value of the zone attribute.
type zone struct {
	name      string
	fill      *btree.BTreeG[*node] // live ones by bytes to capacity
	roomy     *btree.BTreeG[*node] // those of them that are not full
	receivers *btree.BTreeG[*node] // those of these that can take a copy now
	weight    int64                // of those that count
	bytes     int64
	target    float64 // fill that its nodes should have
}

// rng is a Range with what was found out about it.
type rng struct {
	Range
	op    *Operation
	seats []seat // its nodes, those of the operation under way included
	slot  int    // in Cluster.all

	need     Reason
	needPos  int
	retryAt  clock.Time
	movedAt  clock.Time      // 0: never
	left     keyspace.NodeID // from where that took it
	ledAt    clock.Time
	led      keyspace.NodeID // who led it last, also while nobody does; 0: unknown
	turnedAt clock.Time      // when another node came to lead it, whoever decided that; 0: never
	evened   keyspace.NodeID // to which its lead went last to make leads even; 0: it went for another reason
	mate     *rng            // the neighbour with which it is being merged, step by step
	calmAt   clock.Time      // since when it and its right neighbour are small and cold; 0: they are not
	failed   failures
	vain     []keyspace.NodeID // to which no copy came, since the last that did
	was      pace              // before the operation under way was decided
}

// pace is what keeps a range from being changed again soon, as a decision has changed it. It is
// restored if nothing comes of the decision.
type pace struct {
	movedAt clock.Time
	left    keyspace.NodeID
	ledAt   clock.Time
	evened  keyspace.NodeID
	mate    *rng
}

// seat is a range's place in the list of a node.
type seat struct {
	node *node
	at   int
}

// Cluster is all that is known, kept in the orders that decisions need.
// It belongs to one goroutine.
type Cluster struct {
	settings Settings
	random   *rand.Rand
	began    clock.Time
	now      clock.Time

	nodes  map[keyspace.NodeID]*node
	silent []*node // by id
	alone  []*node // those that are isolated, by id
	zones  []*zone // by name
	ranges map[keyspace.RangeID]*rng
	all    []*rng // in no order; the patrol walks it
	patrol int
	// patrolAt is when the patrol goes on.
	patrolAt clock.Time
	byStart  map[string]*rng
	byEnd    map[string]*rng

	queues    [reasons]queue
	stale     []*node // whose ranges are to be reviewed
	reviewed  int     // bounds the replicas that a round reviews for them
	dirty     []*node // whose place in the orders has changed
	byLoad    *btree.BTreeG[*node]
	byLeaders *btree.BTreeG[*node]

	sum struct {
		bytes, weight, load int64
		count, leaders      int
		counted, live       int
	}
	underWay int
	repairs  int
	gatherTo keyspace.NodeID
	round    []Operation
}

// New returns a cluster of which nothing is known yet. The seed decides between equals.
func New(s Settings, seed uint64, now clock.Time) *Cluster {
	return &Cluster{
		settings: s,
		random:   rand.New(rand.NewPCG(seed, 1)),
		began:    now,
		reviewed: reviewed,
		now:      now,
		nodes:    map[keyspace.NodeID]*node{},
		ranges:   map[keyspace.RangeID]*rng{},
		byStart:  map[string]*rng{},
		byEnd:    map[string]*rng{},
		byLoad: newOrder(func(a, b *node) bool {
			return a.in.load < b.in.load || a.in.load == b.in.load && a.ID < b.ID
		}),
		byLeaders: newOrder(func(a, b *node) bool {
			return a.in.leaders < b.in.leaders || a.in.leaders == b.in.leaders && a.ID < b.ID
		}),
	}
}

// Set changes the settings. What they change for ranges is found as the patrol passes.
func (c *Cluster) Set(s Settings) {
	s.RangeCost = c.settings.RangeCost // it is in every sum
	c.settings = s
	for _, z := range c.zones {
		z.fill.Ascend(func(n *node) bool { c.touch(n); return true })
	}
}

// Gather says which node the leads of ranges in use go to, if it has a voter of them: the one with
// the sequencer, while it has little to do. A put asks the sequencer from the node that leads its
// range, which is a function call there, and a round trip elsewhere. 0 is none: load is
// spread evenly.
func (c *Cluster) Gather(to keyspace.NodeID) {
	if to == c.gatherTo {
		return
	}
	// What had come there may go at once.
	if was := c.nodes[c.gatherTo]; was != nil {
		for _, r := range was.replicas {
			if r.Leader == was.ID {
				r.ledAt = 0
			}
		}
	}
	c.gatherTo = to
}

// PutNode takes what is known of a node now.
func (c *Cluster) PutNode(n Node) {
	if n.ID == 0 {
		panic("decide: a node with id 0")
	}
	have := c.nodeOf(n.ID)
	had := have.Node
	first := !have.known
	have.Node, have.known = n, true
	if have.zone.name != n.Zone {
		c.unindex(have)
		have.zone = c.zoneOf(n.Zone)
	}
	c.touch(have)
	c.alone = listed(c.alone, have, n.Isolated)
	if had.Silent != n.Silent || first {
		c.noteSilence(have)
	}
	if first || had.Silent != n.Silent || had.Isolated != n.Isolated || had.State != n.State || had.Zone != n.Zone {
		c.reviewLater(have)
	}
}

// RemoveNode forgets a node. Replicas that are still there count as on a node that has
// been silent from now on.
func (c *Cluster) RemoveNode(id keyspace.NodeID) {
	n, ok := c.nodes[id]
	if !ok {
		return
	}
	c.PutNode(Node{ID: id, Zone: n.Zone, State: Decommissioning, Silent: true, SilentSince: c.now})
	n.known = false
	if len(n.replicas) == 0 {
		c.unindex(n)
		n.Silent = false
		c.noteSilence(n)
		delete(c.nodes, id)
	}
}

// Holds says whether a range has a replica on the node, or an operation puts one there.
func (c *Cluster) Holds(id keyspace.NodeID) bool {
	n, ok := c.nodes[id]
	return ok && len(n.replicas) > 0
}

func (c *Cluster) reviewLater(n *node) {
	if !n.queued {
		n.queued = true
		c.stale = append(c.stale, n)
	}
}

// PutRange takes the newest knowledge of a range, and ignores copies that are older.
func (c *Cluster) PutRange(g Range) {
	d := &g.Descriptor
	if d.Range == 0 || len(d.Replicas) == 0 {
		panic(fmt.Sprintf("decide: range %s with replicas %v", d.Range, d.Replicas))
	}
	if g.Born == 0 {
		g.Born = c.began
	}
	r, ok := c.ranges[d.Range]
	if ok {
		if r.Descriptor.Newer(d) {
			return
		}
		c.unplace(r)
		c.forgetSpan(r)
		if r.Leader != 0 && g.Leader != 0 && r.Leader != g.Leader {
			r.turnedAt = max(c.now, 1)
		}
		if led := cmp.Or(g.Leader, r.led); led != r.led {
			r.led = led
			if led != r.evened {
				r.evened = 0
			}
		}
		r.Range = g
	} else {
		r = &rng{Range: g, slot: len(c.all), needPos: -1, led: g.Leader}
		c.ranges[d.Range] = r
		c.all = append(c.all, r)
	}
	c.byStart[string(d.Span.Start)] = r
	c.byEnd[string(d.Span.End)] = r
	c.place(r)
	c.noteCalm(r)
	if l := c.left(r); l != nil {
		c.noteCalm(l)
	}
	c.reviewWithLeft(r)
}

// RemoveRange forgets a range, which another one has absorbed.
func (c *Cluster) RemoveRange(id keyspace.RangeID) {
	r, ok := c.ranges[id]
	if !ok {
		return
	}
	if r.op != nil && r.op.Range != id {
		r.op = nil // its neighbour has not finished with it
	}
	c.detach(r)
	c.unplace(r)
	c.forgetSpan(r)
	if r.mate != nil {
		r.mate.movedAt = max(r.mate.movedAt, r.movedAt)
	}
	r.part()
	c.queues[r.need].remove(r)
	delete(c.ranges, id)
	last := c.all[len(c.all)-1]
	c.all[r.slot], last.slot = last, r.slot
	c.all = c.all[:len(c.all)-1]
}

// forgetSpan takes the range out of the index by key, where it is still the one there.
func (c *Cluster) forgetSpan(r *rng) {
	if s := string(r.Descriptor.Span.Start); c.byStart[s] == r {
		delete(c.byStart, s)
	}
	if e := string(r.Descriptor.Span.End); c.byEnd[e] == r {
		delete(c.byEnd, e)
	}
}

// Begin notes an operation that this state has not decided: an earlier leader of placement left
// it, or an operator asked for it. A merge without Other has come so far that the other range
// is gone.
func (c *Cluster) Begin(op Operation) error {
	r, ok := c.ranges[op.Range]
	if !ok {
		return fmt.Errorf("begin %s: the range is not known", op.String())
	}
	if r.op != nil {
		return fmt.Errorf("begin %s: %s is under way", op.String(), r.op.String())
	}
	var other *rng
	if op.Kind == Merge && op.Other != 0 {
		other, ok = c.ranges[op.Other]
		if !ok || other.op != nil {
			return fmt.Errorf("begin %s: range %s is not known or busy", op.String(), op.Other)
		}
	}
	if op.copies() && op.Bytes == 0 {
		op.Bytes = r.Bytes // what was begun by others does not say it
	}
	c.attach(r, other, &op)
	return nil
}

// Finish says that the operation on the range has ended. What it has done comes, or has
// come, by PutRange. After one that failed the range is left alone for Patience.
func (c *Cluster) Finish(id keyspace.RangeID, now clock.Time, done bool) {
	r, ok := c.ranges[id]
	if !ok || r.op == nil {
		return
	}
	c.now = max(c.now, now)
	op := r.op
	switch {
	case op.copies() && done:
		r.vain = nil
	case op.copies():
		if slices.Contains(r.vain, op.To) {
			r.vain = nil // all have had their turn
		}
		r.vain = append(r.vain, op.To)
	}
	if !done {
		r.retryAt = c.now.Add(c.settings.Patience)
		if r.evened != r.Leader {
			r.evened = 0
		}
		c.noteFailure(r, op)
	}
	c.detach(r)
	c.reviewWithLeft(r)
	if other, ok := c.ranges[op.Other]; ok {
		c.reviewWithLeft(other)
	}
}

// Refuse says that the operation on the range, which was decided here, was not begun, and
// never will be. What was to keep others from following it soon is taken back. With wait
// the range is left alone for Patience, since to decide the same once more would help
// nobody; without, what has changed meanwhile is decided upon at once.
func (c *Cluster) Refuse(id keyspace.RangeID, now clock.Time, wait bool) {
	r, ok := c.ranges[id]
	if !ok || r.op == nil {
		return
	}
	op := r.op
	if from := c.nodes[op.Source]; op.Reason == Load && from != nil {
		from.hotLoad += float64(r.Load)
	}
	c.Finish(id, now, !wait)
	r.movedAt, r.left, r.ledAt, r.evened = r.was.movedAt, r.was.left, r.was.ledAt, r.was.evened
	if r.was.mate == nil {
		r.part()
	}
	c.reviewWithLeft(r)
}

// UnderWay returns the operation under way on the range.
func (c *Cluster) UnderWay(id keyspace.RangeID) (Operation, bool) {
	if r, ok := c.ranges[id]; ok && r.op != nil {
		return *r.op, true
	}
	return Operation{}, false
}
