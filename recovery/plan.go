package recovery

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/raftgroup"
)

// initIndex is where a new range begins.
const initIndex = raftgroup.InitIndex

// The verdicts on a group.
const (
	// Kept: enough voters survive. The group is left as it is.
	Kept = "kept"
	// Safe: its majority is lost, but all that was ever acknowledged survives.
	Safe = "safe"
	// Doubtful: writes may be lost that only nodes have acknowledged which are gone.
	Doubtful = "may have lost writes"
	// Unusable: survivors have copies, and none of them can be used. What other ranges do not have of its span is Lost.
	Unusable = "no usable copy"
	// Lost: no copy survives.
	Lost = "lost"
	// Covered: other ranges have held all of its span since. Its copies go.
	Covered = "covered"
)

// DefaultBump is how far above the highest known revision the next one is: more than was under way
// anywhere, since the sequencer's ceiling is at most 100,000 ahead.
const DefaultBump keyspace.Revision = 1_000_000

const (
	// termBump is how far the terms of new entries are above all that survivors know. Nodes that are gone
	// may have held a few elections of which no survivor heard.
	termBump = 1000
	// idBump is the same for ids of ranges and replicas.
	idBump = 1_000_000
	// generationBump is the same for generations.
	generationBump = 1000
	// newReplicas is how many replicas an empty range gets, where so many nodes survive.
	newReplicas = 3
)

// PlanOptions are what the operator says.
type PlanOptions struct {
	// Dead are the nodes that never come back, by name or id.
	Dead []string
	// AcceptLost allows empty ranges where no copy survives.
	AcceptLost bool
	// Bump is how far the revision rises; 0 is DefaultBump.
	Bump keyspace.Revision
}

// Plan says what is done on which node.
type Plan struct {
	Format uint64 `json:"format"`
	Kind   string `json:"kind"`
	// ID is the hash of all the rest.
	ID      string `json:"id"`
	Cluster id     `json:"cluster"`
	// Survivors and Dead are all nodes of the cluster.
	Survivors []NodeRow `json:"survivors"`
	Dead      []NodeRow `json:"dead"`
	// Highest is the highest revision that a survivor knows. The next one is above Ceiling. Compacted is 0
	// where history is complete.
	Highest   keyspace.Revision `json:"highest"`
	Ceiling   keyspace.Revision `json:"ceiling"`
	Compacted keyspace.Revision `json:"compacted"`
	// Term is that of all new entries.
	Term uint64 `json:"term"`
	// Groups are the verdicts, that on placement first.
	Groups []Verdict `json:"groups"`
	// Map is the new one.
	Map         []RangeRow         `json:"map"`
	NextRange   keyspace.RangeID   `json:"next_range"`
	NextReplica keyspace.ReplicaID `json:"next_replica"`
	// Nodes are what is done on each survivor.
	Nodes []Orders `json:"nodes"`
}

// Verdict says what becomes of a group.
type Verdict struct {
	Range   keyspace.RangeID `json:"range"`
	Verdict string           `json:"verdict"`
	Why     string           `json:"why"`
	// Node has the copy that goes on; 0 where none does.
	Node  id  `json:"node"`
	Start key `json:"start"`
	End   key `json:"end"`
	// NoSpan says that the span is not known: no copy can be read, and the map does not have the range.
	NoSpan bool `json:"no_span,omitempty"`
}

// Orders are what is done on one node.
type Orders struct {
	Node id `json:"node"`
	// Expect is how the node's groups must still be.
	Expect []Expect `json:"expect"`
	// Sole become their groups' only voters; Drop go; Leave go too, behind a part of their tails.
	Sole  []Sole  `json:"sole"`
	Drop  []Drop  `json:"drop"`
	Leave []Leave `json:"leave,omitempty"`
	// Placement says that this node's replica of placement goes on, with the new map.
	Placement bool `json:"placement,omitempty"`
}

// Expect is the state of a group for which the plan was made.
type Expect struct {
	Range keyspace.RangeID `json:"range"`
	Last  Position         `json:"last"`
	Term  uint64           `json:"term"`
}

// Sole is a replica that becomes its group's only voter.
type Sole struct {
	Range   keyspace.RangeID   `json:"range"`
	Replica keyspace.ReplicaID `json:"replica"`
	// Release ends the merge that binds the range, 0 for none.
	Release uint64 `json:"release,omitempty"`
	// Splits are made in this order, from right to left.
	Splits []Cut `json:"splits,omitempty"`
	// Generation and ConfIndex are those behind the tail, for which the cuts are made.
	Generation keyspace.Generation `json:"generation"`
	ConfIndex  uint64              `json:"conf_index"`
}

// Cut is a split at a key. What is behind it becomes the range Child, or goes if that is dropped here.
type Cut struct {
	Key   key              `json:"key"`
	Child keyspace.RangeID `json:"child"`
}

// Drop is a replica that goes, and never comes back.
type Drop struct {
	Range   keyspace.RangeID   `json:"range"`
	Replica keyspace.ReplicaID `json:"replica"`
	// Log says that there is nothing of it but a log.
	Log bool `json:"log,omitempty"`
}

// Leave is a replica that goes behind the entry at Through: a split that makes a replica which stays.
type Leave struct {
	Range   keyspace.RangeID   `json:"range"`
	Replica keyspace.ReplicaID `json:"replica"`
	Through uint64             `json:"through"`
}

// ErrNothing says that no group needs a recovery, and that no survivor waits for a node that is gone.
var ErrNothing = errors.New("recovery: every group has the majority of its voters among the survivors: start them, and remove the dead nodes with skein node decommission")

// planner makes a Plan.
type planner struct {
	o      PlanOptions
	in     []*Collected
	plan   *Plan
	names  map[id]string
	groups map[keyspace.RangeID]*group
	orders map[id]*Orders
	placed *Placement // of the chosen replica of placement
	// phantoms are the copies that doubtSplits has sorted out.
	phantoms map[*Copy]bool
	// next are ids to give out.
	nextRange   keyspace.RangeID
	nextReplica keyspace.ReplicaID
	generation  keyspace.Generation
}

// MakePlan decides what becomes of each group. It depends on its arguments alone. Where it returns a
// plan and an error, the plan cannot be applied, and says why.
func MakePlan(in []*Collected, o PlanOptions) (*Plan, error) {
	p := &planner{o: o, in: slices.Clone(in), plan: &Plan{}, names: map[id]string{}, groups: map[keyspace.RangeID]*group{}, orders: map[id]*Orders{}, phantoms: map[*Copy]bool{}}
	if p.o.Bump == 0 {
		p.o.Bump = DefaultBump
	}
	for i, c := range p.in {
		own := *c
		own.Copies = slices.Clone(c.Copies) // doubtSplits writes there
		p.in[i] = &own
	}
	slices.SortFunc(p.in, func(a, b *Collected) int { return cmp.Compare(a.Node, b.Node) })
	for _, c := range p.in {
		p.names[c.Node] = c.Name
	}
	for _, c := range p.in {
		if c.Placement != nil {
			for _, n := range c.Placement.Nodes {
				p.names[n.Node] = n.Name
			}
		}
	}
	if err := p.check(); err != nil {
		return nil, err
	}
	p.gather()
	p.doubtSplits()
	if err := p.nodes(); err != nil {
		return nil, err
	}
	if err := p.judge(); err != nil {
		return nil, err
	}
	p.numbers()
	lost := p.cover()
	if lost != nil && !errors.Is(lost, ErrLostSpans) {
		return nil, lost
	}
	p.order() // also where spans are lost: people read what becomes of the rest
	if lost != nil {
		return p.plan, lost
	}
	_, err := p.plan.Encode()
	return p.plan, err
}

// nodeName names a node for people: by the name if one is known, and the id.
func (p *planner) nodeName(n id) string { return (&NodeRow{Node: n, Name: p.names[n]}).text() }

// check refuses what cannot be files of one cluster's survivors.
func (p *planner) check() error {
	if len(p.in) == 0 {
		return errors.New("recovery: no file of skein recover collect is given: collect from each node that survives")
	}
	if p.o.Bump < 0 || p.o.Bump > 1<<52 {
		return fmt.Errorf("recovery: --bump-revision %d is not between 1 and 2^52", p.o.Bump)
	}
	seen := map[id]bool{}
	for _, c := range p.in {
		switch {
		case c.Cluster != p.in[0].Cluster:
			return fmt.Errorf("recovery: node %s is of cluster %s and node %s of cluster %s: give the files of one cluster",
				p.nodeName(p.in[0].Node), keyspace.ClusterID(p.in[0].Cluster), p.nodeName(c.Node), keyspace.ClusterID(c.Cluster))
		case seen[c.Node]:
			return fmt.Errorf("recovery: node %s is given twice: one of the two files is stale; give the newer one alone", p.nodeName(c.Node))
		case c.Interrupted != "":
			return fmt.Errorf("recovery: plan %s was only half applied on node %s: run skein recover apply with it again", c.Interrupted, p.nodeName(c.Node))
		}
		seen[c.Node] = true
	}
	p.plan.Cluster = p.in[0].Cluster
	return p.checkTogether()
}

// checkTogether refuses a plan that was applied to some of the directories and not to the others: what it has written
// looks newer than all that the others have done since.
func (p *planner) checkTogether() error {
	for _, c := range p.in {
		for _, o := range p.in {
			if slices.Contains(c.Awaits, o.Node) && o.Plan != c.Plan {
				return fmt.Errorf("recovery: plan %s was applied on node %s, and not on node %s: apply it there too, then collect again. "+
					"If apply refuses there because the node has run since, leave out the file of one of the two, and name that node with --dead: "+
					"what node %[3]s has written since is only there, and what goes on from node %[2]s by the plan only here", c.Plan, p.nodeName(c.Node), p.nodeName(o.Node))
			}
		}
	}
	return nil
}

// gather sorts the copies by group.
func (p *planner) gather() {
	for _, c := range p.in {
		o := &Orders{Node: c.Node}
		p.orders[c.Node] = o
		for i := range c.Copies {
			x := &c.Copies[i]
			g := p.groups[x.Range]
			if g == nil {
				g = &group{rng: x.Range}
				p.groups[x.Range] = g
			}
			g.copies = append(g.copies, located{c.Node, x})
			if x.Unusable == "" {
				o.Expect = append(o.Expect, Expect{x.Range, x.Last, x.Term})
			}
		}
	}
}

// doubtSplits sorts out copies of ranges that may never have been made: the split is in the tail of a
// copy that is not the newest of its group, nobody knows that it was committed, and the newest copy has
// not seen it. For by the argument at judge the newest one has all that was committed before its end.
func (p *planner) doubtSplits() {
	for again := true; again; { // who is made by a copy that counts no more does not count either
		again = false
		for _, g := range p.groups {
			for _, l := range g.copies {
				m := l.copy.Made
				if m == nil || m.Certain || l.copy.Unusable != "" || p.groups[m.Parent] == nil {
					continue
				}
				n := p.groups[m.Parent].newest()
				never := n != nil && n.node != l.node && n.copy.End.Generation < m.Generation
				if never || p.groups[m.Parent].unusableOn(l.node) {
					l.copy.Unusable, again = fmt.Sprintf("made by a split of range %s that was never committed", m.Parent), true
					p.phantoms[l.copy] = true
				}
			}
		}
	}
}

// foundation says on what a group's generation stands. With the same generation, the firmer one has held
// the keys of both.
type foundation int

const (
	// committed: a committed entry gave it.
	committed foundation = iota
	// tentative: an entry gave it that may not be committed, but becomes so by what goes on from here.
	tentative
	// unheard: so too, and the newest copy of the parent does not have that entry. If that copy is of the same
	// generation, it may have split otherwise.
	unheard
)

// foundation weighs the group. A copy with a record of its own proves that the split was committed which has made
// it, whatever its state. That the newest copy of the parent has none of the child beside it proves nothing: it may be
// from a snapshot.
func (p *planner) foundation(g *group) foundation {
	parent, heard := keyspace.RangeID(0), false
	for _, l := range g.copies {
		m := l.copy.Made
		if m == nil || m.Certain {
			if g.chosen != nil && g.chosen.copy.Tentative {
				return tentative
			}
			return committed
		}
		if o := p.groups[m.Parent]; o != nil && l.copy.Unusable == "" {
			n := o.newest()
			heard = heard || n != nil && n.node == l.node
		}
		parent = m.Parent
	}
	if parent != 0 && !heard {
		return unheard
	}
	return tentative
}

// nodes says who survives and who is dead. Each node of the cluster must be one or the other.
func (p *planner) nodes() error {
	own := p.groups[0]
	if own == nil || own.newest() == nil {
		return errors.New("recovery: no survivor has a copy of the placement group, and with it the map, users and leases of the cluster: restore a backup into a new cluster")
	}
	chosen := own.newest().node
	for _, c := range p.in {
		if c.Node == chosen {
			p.placed = c.Placement
		}
	}
	if p.placed == nil {
		return fmt.Errorf("recovery: the file of node %s has a copy of placement without its state: collect anew", p.nodeName(chosen))
	}
	byName := map[string]id{}
	collected := map[id]bool{}
	for _, c := range p.in {
		collected[c.Node] = true
	}
	for _, n := range p.placed.Nodes {
		byName[strings.ToLower(n.Node.node().String())] = n.Node
	}
	for _, n := range p.placed.Nodes {
		if n.Name != "" && n.State != "removed" {
			byName[n.Name] = n.Node
		}
	}
	dead := map[id]bool{}
	for _, name := range p.o.Dead {
		n, ok := byName[name]
		switch {
		case !ok:
			return fmt.Errorf("recovery: --dead %s: the cluster has no such node; it has %s", name, strings.Join(slices.Sorted(maps.Keys(byName)), ", "))
		case collected[n]:
			return fmt.Errorf("recovery: node %s is named by --dead and has a file: if it survives do not name it, otherwise leave its file out", name)
		}
		dead[n] = true
	}
	for _, n := range p.placed.Nodes {
		switch {
		case dead[n.Node]:
			p.plan.Dead = append(p.plan.Dead, n)
		case collected[n.Node]:
			p.plan.Survivors = append(p.plan.Survivors, n)
		case n.State != "removed" && n.State != "unstarted" && n.State != "unstarted learner":
			return fmt.Errorf("recovery: node %s is neither collected nor dead: collect from it, or name it with --dead if it never comes back", n.text())
		}
	}
	for n := range collected {
		if !slices.ContainsFunc(p.plan.Survivors, func(r NodeRow) bool { return r.Node == n && r.State != "removed" }) {
			return fmt.Errorf("recovery: node %s is no member of the cluster by the newest map: leave its file out", p.nodeName(n))
		}
	}
	return nil
}

// judge decides on each group by itself.
func (p *planner) judge() error {
	needed := false
	for _, g := range p.groups {
		if err := g.judge(p.nodeName, func(n keyspace.NodeID) bool { return p.neverHeld(g, id(n)) }); err != nil {
			return err
		}
		if g.chosen == nil {
			// Whether somebody is missing is not known. Of what is none, and of a log alone, nobody is.
			needed = needed || slices.ContainsFunc(g.copies, func(l located) bool { return l.copy.Replica != 0 && !p.phantoms[l.copy] })
			continue
		}
		if g.stands = p.foundation(g); g.stands == unheard {
			// Copies of what may never have been made prove nothing. If all else is kept, the nodes decide it themselves.
			g.verdict, g.why = Doubtful, "a split makes it that may never have been committed: the newest copy of its parent does not have it"
			continue
		}
		needed = needed || g.verdict != Kept
	}
	for _, r := range p.placed.Ranges {
		if p.groups[r.Range] == nil {
			needed = true
		}
	}
	if !needed && !p.awaitsLost() {
		return ErrNothing
	}
	return nil
}

// awaitsLost says that a plan that was applied before has a node wait at its start for one that is none of the survivors. Only
// a plan without that one ends the wait.
func (p *planner) awaitsLost() bool {
	return slices.ContainsFunc(p.in, func(c *Collected) bool {
		return slices.ContainsFunc(c.Awaits, func(n id) bool { return p.orders[n] == nil })
	})
}

// neverHeld says that a survivor has certainly never stored an entry of the group. It has no copy of it, and a copy of
// another range has the group's first key there, of a generation below the group's: that copy has not come to the split
// that made the group. No node has two ranges with the same key, for each key the generation only grows, and a range has
// its first key until it is absorbed, by one of a higher generation. A replica that a crash has taken back behind that
// split has it in its tail still.
//
// A generation that may not be committed is at most one too high where a split gave it. Where an absorb did, it may be
// any number too high, and the keys are those of two ranges: then it proves nothing.
func (p *planner) neverHeld(g *group, n id) bool {
	if p.orders[n] == nil || slices.ContainsFunc(g.copies, func(l located) bool { return l.node == n }) {
		return false
	}
	e, generation := &g.chosen.copy.End, g.chosen.copy.End.Generation
	if g.chosen.copy.Tentative {
		if len(g.chosen.copy.Absorbs) > 0 {
			return false
		}
		generation-- // see cover
	}
	for _, o := range p.groups {
		for _, l := range o.copies {
			c := l.copy
			if l.node != n || c.Range == 0 || c.Unusable != "" || c.Tentative {
				continue
			}
			if c.End.span().Contains(e.Start) && c.End.Generation < generation {
				return true
			}
		}
	}
	return false
}

// numbers sets what must be above all that was ever given out.
func (p *planner) numbers() {
	highest, term := p.placed.Ceiling, uint64(0)
	p.nextRange, p.nextReplica = p.placed.NextRange, p.placed.NextReplica
	for _, c := range p.in {
		if c.Placement != nil {
			highest = max(highest, c.Placement.Ceiling)
			p.nextRange, p.nextReplica = max(p.nextRange, c.Placement.NextRange), max(p.nextReplica, c.Placement.NextReplica)
		}
		for i := range c.Copies {
			x := &c.Copies[i]
			highest, term = max(highest, x.Revision), max(term, x.Term, x.Last.Term, x.Applied.Term, x.SequencerTerm)
			p.nextRange, p.nextReplica = max(p.nextRange, x.Range+1), max(p.nextReplica, x.Replica+1)
			for _, m := range x.End.Members {
				p.nextReplica = max(p.nextReplica, m.Replica+1)
			}
			p.generation = max(p.generation, x.End.Generation)
		}
	}
	for _, r := range p.placed.Ranges {
		p.generation = max(p.generation, r.Generation)
	}
	p.generation += generationBump
	p.nextRange, p.nextReplica = p.nextRange+idBump, p.nextReplica+idBump
	p.plan.Highest, p.plan.Ceiling, p.plan.Term = highest, highest+p.o.Bump, term+termBump
}

// order writes down what is done where, and the verdicts.
func (p *planner) order() {
	lossy := false
	for _, rng := range slices.Sorted(maps.Keys(p.groups)) {
		g := p.groups[rng]
		if rng == 0 && g.verdict == Kept {
			g.verdict, g.why = Safe, "the majority of its voters survives; one of them goes on, with the new map"
		}
		if g.chosen == nil {
			p.plan.Groups = append(p.plan.Groups, p.saysUnusable(g))
			continue
		}
		if g.covered {
			p.plan.Groups = append(p.plan.Groups, g.says())
			continue
		}
		lossy = lossy || g.verdict == Doubtful
		p.plan.Groups = append(p.plan.Groups, g.says())
		switch o := p.orders[g.chosen.node]; {
		case rng == 0:
			o.Placement = true
		case g.verdict != Kept:
			o.Sole = append(o.Sole, g.sole())
		}
	}
	for _, v := range p.plan.Groups {
		lossy = lossy || v.Verdict == Lost
	}
	slices.SortStableFunc(p.plan.Groups, func(a, b Verdict) int {
		return cmp.Or(cmp.Compare(boolInt(a.Verdict == Lost), boolInt(b.Verdict == Lost)), cmp.Compare(a.Range, b.Range))
	})
	if lossy {
		p.plan.Compacted = p.plan.Ceiling
	}
	p.plan.NextRange, p.plan.NextReplica = p.nextRange, p.nextReplica
	for _, c := range p.in {
		p.leave(c)
		o := p.orders[c.Node]
		slices.SortFunc(o.Drop, func(a, b Drop) int { return cmp.Or(cmp.Compare(a.Range, b.Range), cmp.Compare(b.Replica, a.Replica)) })
		p.plan.Nodes = append(p.plan.Nodes, *o)
	}
}

// stays says whether the copy goes on.
func (p *planner) stays(l located) bool {
	g := p.groups[l.copy.Range]
	if l.copy.Unusable != "" || g.chosen == nil {
		return false
	}
	return !g.covered && (g.verdict == Kept || g.chosen.copy == l.copy)
}

// leave has all copies of a node go that do not stay. One whose tail makes another range's copy that is needed here
// applies its tail so far. A frozen range stays where the tail of the range that absorbs it needs it:
// that tail ends it.
func (p *planner) leave(c *Collected) {
	o := p.orders[c.Node]
	through := map[keyspace.RangeID]uint64{}
	absorbed := map[keyspace.RangeID]bool{}
	for again := true; again; { // a copy that is needed may need another one
		again = false
		for i := range c.Copies {
			x := &c.Copies[i]
			if !p.stays(located{c.Node, x}) && through[x.Range] == 0 {
				continue
			}
			for _, r := range x.Absorbs {
				absorbed[r] = true
			}
			if m := x.Made; m != nil && through[m.Parent] < m.Index {
				through[m.Parent], again = m.Index, true
			}
		}
	}
	var gone []*Copy
	for i := range c.Copies {
		if x := &c.Copies[i]; !p.stays(located{c.Node, x}) {
			gone = append(gone, x)
		}
	}
	for _, x := range gone {
		switch {
		case x.Replica == 0 || absorbed[x.Range]:
		case through[x.Range] > 0:
			o.Leave = append(o.Leave, Leave{Range: x.Range, Replica: x.Replica, Through: through[x.Range]})
		default:
			o.Drop = append(o.Drop, Drop{Range: x.Range, Replica: x.Replica, Log: x.Made != nil})
		}
	}
}

// located is a copy on a node.
type located struct {
	node id
	copy *Copy
}

// group is all survivors' copies of a group.
type group struct {
	rng     keyspace.RangeID
	copies  []located
	verdict string
	why     string
	chosen  *located
	stands  foundation
	// covered says that other ranges have all of its span after it.
	covered bool
	// cuts are the splits that leave the range what is its own, and end is its own then.
	cuts []Cut
	end  []byte
}

// unusableOn says whether the node has a copy that cannot be used.
func (g *group) unusableOn(n id) bool {
	return slices.ContainsFunc(g.copies, func(l located) bool { return l.node == n && l.copy.Unusable != "" })
}

// newest returns the usable copy with the newest log, nil if there is none: by the term of the last
// entry, then by its index. Copies that are as new as each other are alike.
func (g *group) newest() (n *located) {
	for i := range g.copies {
		if l := &g.copies[i]; l.copy.Unusable == "" && (n == nil || l.copy.Last.after(n.copy.Last)) {
			n = l
		}
	}
	return n
}

// judge decides what is known of the group.
//
// An entry is acknowledged only when a quorum of the configuration in force stores it. A set of
// survivors that is in every quorum therefore has each acknowledged entry on one of its members, and
// then the member with the newest log has it. For let e be an entry of term t that was acknowledged, s a
// survivor that stores it, and m the survivor with the newest log, so that m's last term is that of s at
// least, and t at least. If it is t, m's entries of term t are a prefix of those that the leader of t made, and
// m is not shorter than s: m has e. If it is above t, the leader of m's last term was elected by a quorum and so had e
// below its own entries, by raft's leader completeness, and m's log is the same as that leader's up to its last
// entry.
//
// The configuration in force is one of those in m: the last that is known to be committed, or one
// behind it in the log. For a later one is an entry too. It was acknowledged under the one before it, so m has it
// by the same argument, for as long as the survivors are in every quorum of each.
//
// A voter on a survivor that has never stored an entry of the group (neverHeld) has acknowledged none. So only the
// majorities without it count. It may have voted, for whoever had what such a majority has stored.
//
// A joint configuration acknowledges with a majority of both halves. So it is enough to be in every
// majority of one of them.
func (g *group) judge(name func(id) string, neverHeld func(keyspace.NodeID) bool) error {
	g.chosen = g.newest()
	if g.chosen == nil {
		g.verdict, g.why = Unusable, g.unusable(name)
		return nil
	}
	g.verdict, g.why = Kept, "the majority of its voters survives"
	for _, ms := range g.chosen.copy.InForce {
		rs, err := replicasOf(ms)
		if err != nil {
			return fmt.Errorf("recovery: %s: %w", groupName(g.rng), err)
		}
		alive := func(half []keyspace.ReplicaID) (n int) {
			for _, l := range g.copies {
				if l.copy.Unusable == "" && slices.Contains(half, l.copy.Replica) {
					n++
				}
			}
			return n
		}
		// gone are the voters that may have acknowledged something that no survivor has.
		gone := func(half []keyspace.ReplicaID) (n int) {
			for _, r := range rs {
				held := slices.ContainsFunc(g.copies, func(l located) bool { return l.copy.Unusable == "" && l.copy.Replica == r.ID })
				if slices.Contains(half, r.ID) && !held && !neverHeld(r.Node) {
					n++
				}
			}
			return n
		}
		a, b := halves(rs)
		na, nb := alive(a), alive(b)
		if quorum := na > len(a)/2 && nb > len(b)/2; quorum {
			continue
		}
		lost, of := len(a)-na, len(a)
		if len(b)-nb > lost {
			lost, of = len(b)-nb, len(b)
		}
		// In every majority is who leaves less than one to the others.
		if gone(a) < len(a)/2+1 || gone(b) < len(b)/2+1 {
			if g.verdict == Kept {
				g.verdict, g.why = Safe, g.safe(lost, of, gone(a) < len(a)-na || gone(b) < len(b)-nb)
			}
			continue
		}
		g.verdict, g.why = Doubtful, fmt.Sprintf("%d of %d voters are gone: they alone may have acknowledged writes", lost, of)
	}
	if g.verdict == Kept && g.chosen.copy.End.Merge != 0 {
		g.verdict, g.why = Safe, "the majority of its voters survives, and a merge that binds it is ended here"
	}
	if g.verdict == Kept && g.chosen.copy.Unsettled && g.rng != 0 {
		g.verdict, g.why = Safe, "the majority of its voters survives, and the fate of a change of its members or span is decided here"
	}
	return nil
}

func (g *group) safe(lost, of int, never bool) string {
	if never {
		return fmt.Sprintf("%d of %d voters are gone or never had a copy, and every majority of those that had one had a survivor", lost, of)
	}
	return fmt.Sprintf("%d of %d voters are gone, and every majority had a survivor", lost, of)
}

func (g *group) unusable(name func(id) string) string {
	var why []string
	for _, l := range g.copies {
		why = append(why, fmt.Sprintf("that of node %s: %s", name(l.node), l.copy.Unusable))
	}
	return "no copy can be used: " + strings.Join(why, "; ")
}

// halves returns the voters of both halves of a configuration; they are equal where it is not joint.
func halves(rs []keyspace.Replica) (in, out []keyspace.ReplicaID) {
	for _, r := range rs {
		switch r.Role {
		case keyspace.RoleVoter:
			in, out = append(in, r.ID), append(out, r.ID)
		case keyspace.RoleVoterIncoming:
			in = append(in, r.ID)
		case keyspace.RoleVoterOutgoing, keyspace.RoleVoterDemoting:
			out = append(out, r.ID)
		case keyspace.RoleLearner:
		}
	}
	return in, out
}

func (g *group) says() Verdict {
	e := &g.chosen.copy.End
	if g.covered {
		why := "other ranges have held all of its span since"
		if g.stands == unheard {
			why = "it is made by a split that was never committed, and other ranges have all of its span"
		}
		return Verdict{Range: g.rng, Verdict: Covered, Why: why, Start: e.Start, End: e.End}
	}
	return Verdict{Range: g.rng, Verdict: g.verdict, Why: g.why, Node: g.chosen.node, Start: e.Start, End: key(g.end)}
}

// saysUnusable is the verdict on a group of which no copy can be used. Its span is the last that a copy or the map knows.
func (p *planner) saysUnusable(g *group) Verdict {
	v := Verdict{Range: g.rng, Verdict: Unusable, Why: g.why, NoSpan: true}
	generation := keyspace.Generation(0)
	for _, l := range g.copies {
		if e := &l.copy.End; e.Generation > generation {
			v.Start, v.End, v.NoSpan, generation = e.Start, e.End, false, e.Generation
		}
	}
	for i := range p.placed.Ranges {
		if r := &p.placed.Ranges[i]; r.Range == g.rng && r.Generation > generation {
			v.Start, v.End, v.NoSpan = r.Start, r.End, false
		}
	}
	lost := slices.ContainsFunc(p.plan.Groups, func(o Verdict) bool {
		return o.Verdict == Lost && (&keyspace.Span{Start: o.Start, End: o.End}).Overlaps(keyspace.Span{Start: v.Start, End: v.End})
	})
	if !v.NoSpan && !lost {
		v.Verdict, v.Why = Covered, "other ranges have all of its span; "+g.why
	}
	return v
}

// sole is what is done with the chosen copy.
func (g *group) sole() Sole {
	c := g.chosen.copy
	return Sole{Range: g.rng, Replica: c.Replica, Release: c.End.Merge, Splits: g.cuts, Generation: c.End.Generation, ConfIndex: c.End.ConfIndex}
}
