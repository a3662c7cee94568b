// Package simulate runs the decisions of package decide on a simulated cluster: nodes fail and
// join, ranges grow, and copies take their time, all in simulated seconds. It decides nothing
// itself. It executes the decisions, reports changes as nodes would, and counts what the
// decisions cost and whether each one was allowed. Simulated leaders split their ranges as
// leaders do, by the bounds of package shard/load and the samples of package keyspace/divide.
//
// A second is one step: copies go on at what sender and receiver have for each of theirs,
// operations without a copy take one step, elections three. Report has its measurements. Its
// stories are golden files: the same calls with the same seed give the same report.
package simulate

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/keyspace/divide"
	"github.com/skeindb/skein/placement/decide"
)

const (
	// step is the simulated time between two rounds of decisions.
	step = time.Second
	// electionTime is how long a range has no leader when its leader's node fails.
	electionTime = 3 * time.Second
	// reportEvery is how often loads that change are reported.
	reportEvery = 10 * time.Second
	// undoWindow is the time within which a move back counts as thrashing.
	undoWindow = 30 * time.Minute
)

// Config is a cluster as it is when the simulation begins.
type Config struct {
	Nodes, Zones, Ranges int
	// Bytes and Load are those of a range; with Mixed they are from a quarter to seven
	// quarters of that.
	Bytes, Load int64
	Mixed       bool
	// Scattered puts replicas on nodes drawn at random, whatever zones they are in; else
	// they are spread evenly.
	Scattered bool
	// Voters of each range; 0 is the replication factor.
	Voters   int
	Capacity int64
	// CopyRate is what a node sends and what it receives, in bytes a second.
	CopyRate int64
	Settings decide.Settings
	Seed     uint64
}

// World is a simulated cluster.
type World struct {
	cluster  *decide.Cluster
	settings decide.Settings
	random   *rand.Rand
	copyRate int64
	capacity int64
	now      clock.Time

	nodes   []*machine // by id - 1
	ranges  []*span    // by id - 1; nil where merged away
	living  int        // of ranges
	nextRep keyspace.ReplicaID
	closed  map[keyspace.ReplicaID]bool // in quarantine
	tasks   []*task
	elect   []clock.Time // when to elect leaders for ranges without
	warm    []*span      // ranges whose reported load is not their load, and restless ones

	Report Report
	// Trace gets each operation as it is decided and each split, and why, if it is not nil.
	Trace func(at clock.Time, what, why string)
}

// machine is a node.
type machine struct {
	decide.Node
	up                 bool
	deaf               bool // no copy gets to it
	sending, receiving int
}

// span is a range as its replicas know it.
type span struct {
	parent   keyspace.RangeID
	from, to uint64 // positions in the keyspace; its keys are these in big-endian
	d        keyspace.Descriptor
	leader   keyspace.NodeID
	bytes    int64
	load     int64 // what it is
	reported int64
	warm     bool
	born     clock.Time
	shape    divide.Shape
	hot      hotRange
	task     *task
	events   []event
}

// event is a replica or a lead that left a node.
type event struct {
	node keyspace.NodeID
	at   clock.Time
	lead bool
}

// task is an operation that is executed.
type task struct {
	op   decide.Operation
	g    *span
	left int64 // bytes to copy
	at   stage
	gone bool
}

type stage uint8

const (
	stageCopy stage = iota
	stageLast
)

// New returns a world with the cluster of the configuration in it.
func New(cfg Config) *World {
	w := &World{
		cluster:  decide.New(cfg.Settings, cfg.Seed, 0),
		settings: cfg.Settings,
		random:   rand.New(rand.NewPCG(cfg.Seed, 2)),
		copyRate: cfg.CopyRate,
		capacity: cfg.Capacity,
		closed:   map[keyspace.ReplicaID]bool{},
	}
	for i := range cfg.Nodes {
		w.Join(ZoneName(i%cfg.Zones), cfg.Capacity)
	}
	voters := cfg.Voters
	if voters == 0 {
		voters = cfg.Settings.ReplicationFactor
	}
	width := math.MaxUint64/uint64(cfg.Ranges) + 1
	for i := range cfg.Ranges {
		g := &span{from: uint64(i) * width, to: uint64(i+1) * width, bytes: w.around(cfg.Bytes, cfg.Mixed), load: w.around(cfg.Load, cfg.Mixed)}
		if i == cfg.Ranges-1 {
			g.to = 0
		}
		g.reported = g.load
		g.d = keyspace.Descriptor{Range: keyspace.RangeID(i + 1), Generation: 1, Span: spanOf(g.from, g.to), ConfIndex: 1}
		for _, n := range w.seats(i, voters, cfg) {
			g.d.Replicas = append(g.d.Replicas, w.replica(n, keyspace.RoleVoter))
		}
		g.leader = g.d.Replicas[(i/max(1, cfg.Nodes))%voters].Node
		w.ranges = append(w.ranges, g)
		w.living++
		w.put(g)
	}
	w.Mark()
	return w
}

// ZoneName returns the name of the i-th zone.
func ZoneName(i int) string { return string(rune('a' + i)) }

// around returns a size, or one around it.
func (w *World) around(size int64, mixed bool) int64 {
	if !mixed {
		return size
	}
	return size/4 + w.random.Int64N(size*3/2+1)
}

// seats returns the nodes of the i-th range.
func (w *World) seats(i, voters int, cfg Config) []*machine {
	out := make([]*machine, 0, voters)
	if cfg.Scattered {
		for _, at := range w.random.Perm(cfg.Nodes)[:voters] {
			out = append(out, w.nodes[at])
		}
		return out
	}
	for k := range voters {
		// Neighbouring nodes are in different zones.
		out = append(out, w.nodes[(i*voters+k)%cfg.Nodes])
	}
	return out
}

func (w *World) replica(n *machine, role keyspace.Role) keyspace.Replica {
	w.nextRep++
	return keyspace.Replica{ID: w.nextRep, Node: n.ID, Role: role}
}

// spanOf returns the span between two positions; 0 is the end of the keyspace too.
func spanOf(from, to uint64) keyspace.Span {
	var s keyspace.Span
	if from != 0 {
		s.Start = binary.BigEndian.AppendUint64(nil, from)
	}
	if to != 0 {
		s.End = binary.BigEndian.AppendUint64(nil, to)
	}
	return s
}

// put reports the range as it is.
func (w *World) put(g *span) {
	var closed []decide.Quarantined
	for _, r := range g.d.Replicas {
		if w.closed[r.ID] {
			closed = append(closed, decide.Quarantined{Replica: r.ID, Reason: "rot"})
		}
	}
	w.cluster.PutRange(decide.Range{Descriptor: g.d, Leader: g.leader, Bytes: g.bytes, Load: g.reported, Born: g.born, Quarantined: closed})
}

// Join adds a node.
func (w *World) Join(zone string, capacity int64) keyspace.NodeID {
	n := &machine{Node: decide.Node{ID: keyspace.NodeID(len(w.nodes) + 1), Zone: zone, Capacity: capacity}, up: true}
	w.nodes = append(w.nodes, n)
	w.cluster.PutNode(n.Node)
	return n.ID
}

// Set changes what the operator wants of a node.
func (w *World) Set(id keyspace.NodeID, state decide.NodeState) {
	n := w.node(id)
	n.State = state
	w.cluster.PutNode(n.Node)
}

// SetSettings changes the cluster's settings.
func (w *World) SetSettings(s decide.Settings) {
	w.settings = s
	w.cluster.Set(s)
}

// Cluster returns the decisions' view of the world.
func (w *World) Cluster() *decide.Cluster { return w.cluster }

func (w *World) node(id keyspace.NodeID) *machine { return w.nodes[id-1] }

func (w *World) rangeOf(id keyspace.RangeID) *span { return w.ranges[id-1] }

// Fail stops nodes.
func (w *World) Fail(ids ...keyspace.NodeID) {
	for _, id := range ids {
		n := w.node(id)
		n.up, n.Silent, n.SilentSince = false, true, w.now
		w.cluster.PutNode(n.Node)
	}
	w.elect = append(w.elect, w.now.Add(electionTime))
}

// Heal starts nodes again.
func (w *World) Heal(ids ...keyspace.NodeID) {
	for _, id := range ids {
		n := w.node(id)
		n.up, n.Silent = true, false
		w.cluster.PutNode(n.Node)
	}
	w.elect = append(w.elect, w.now.Add(electionTime))
}

// Quarantine puts a range's voter on a node in quarantine, if the others outside of it are a quorum yet,
// and the range is not being merged. It says whether it did.
func (w *World) Quarantine(id keyspace.RangeID, on keyspace.NodeID) bool {
	g := w.rangeOf(id)
	if g == nil || g.task != nil && g.task.op.Kind == decide.Merge {
		return false
	}
	is, ok := g.d.ReplicaOn(on)
	voters := w.voters(g)
	open := slices.DeleteFunc(slices.Clone(voters), func(r keyspace.Replica) bool { return w.closed[r.ID] })
	if !ok || is.Role != keyspace.RoleVoter || w.closed[is.ID] || len(open)-1 <= len(voters)/2 {
		return false
	}
	w.closed[is.ID] = true
	w.put(g)
	w.elect = append(w.elect, w.now.Add(electionTime))
	return true
}

// live says whether the replica answers.
func (w *World) live(r keyspace.Replica) bool { return w.node(r.Node).up && !w.closed[r.ID] }

// leads says whether the range has a leader that answers.
func (w *World) leads(g *span) bool {
	is, ok := g.d.ReplicaOn(g.leader)
	return ok && w.live(is)
}

// Isolate has nodes hear hardly any other, or with false hear all again. The decisions
// still hear them.
func (w *World) Isolate(isolated bool, ids ...keyspace.NodeID) {
	for _, id := range ids {
		n := w.node(id)
		if n.Isolated != isolated {
			n.Isolated, n.IsolatedSince = isolated, w.now
		}
		n.deaf = n.deaf && isolated
		w.cluster.PutNode(n.Node)
	}
}

// Deafen isolates nodes that do not hear any leader either: copies to them never come.
func (w *World) Deafen(ids ...keyspace.NodeID) {
	w.Isolate(true, ids...)
	for _, id := range ids {
		w.node(id).deaf = true
	}
}

// handOver has isolated nodes give up what they lead, where another voter can have it.
func (w *World) handOver() {
	if !slices.ContainsFunc(w.nodes, func(n *machine) bool { return n.up && n.Isolated }) {
		return
	}
	for _, g := range w.ranges {
		if g == nil || !w.leads(g) || !w.node(g.leader).Isolated {
			continue
		}
		heirs := slices.DeleteFunc(w.liveVoters(g), func(id keyspace.NodeID) bool { return w.node(id).Isolated })
		if len(heirs) > 0 && w.hasQuorum(g) {
			w.Report.HandedOver++
			w.lead(g, heirs[w.random.IntN(len(heirs))])
			w.put(g)
		}
	}
}

// InZone returns the nodes of a zone.
func (w *World) InZone(zone string) []keyspace.NodeID {
	var out []keyspace.NodeID
	for _, n := range w.nodes {
		if n.Zone == zone {
			out = append(out, n.ID)
		}
	}
	return out
}

// SetLoad changes the load of a range and what its sample will look like.
func (w *World) SetLoad(id keyspace.RangeID, load int64, shape divide.Shape) {
	g := w.rangeOf(id)
	g.load, g.shape = load, shape
	w.watch(g)
}

// watch lets the range be measured and reported until its load is the one that was reported,
// and its leader has no need to split it.
func (w *World) watch(g *span) {
	if !g.warm {
		g.warm = true
		w.warm = append(w.warm, g)
	}
}

// Grow changes the size of a range.
func (w *World) Grow(id keyspace.RangeID, bytes int64) {
	g := w.rangeOf(id)
	g.bytes = bytes
	w.put(g)
	w.watch(g)
}

// reportLoads reports the loads that have changed, smoothed as their leaders would.
func (w *World) reportLoads() {
	keep := w.warm[:0]
	for _, g := range w.warm {
		if w.ranges[g.d.Range-1] != g {
			continue
		}
		was := g.reported
		g.reported += (g.load - g.reported) / 2
		if diff := g.load - g.reported; diff < 10 && diff > -10 {
			g.reported = g.load
		}
		w.measure(g)
		if g.warm = g.reported != g.load || w.restless(g); g.warm {
			keep = append(keep, g)
		}
		if g.reported != was {
			w.put(g)
		}
	}
	w.warm = keep
}

// electLeaders gives ranges whose leader is down another one, where there is a quorum.
func (w *World) electLeaders() {
	for _, g := range w.ranges {
		if g == nil || w.leads(g) {
			continue
		}
		live := w.liveVoters(g)
		was := g.leader
		g.leader, g.hot = 0, hotRange{}
		if w.hasQuorum(g) {
			g.leader = live[w.random.IntN(len(live))]
		}
		if g.leader != was {
			w.put(g)
		}
	}
}

func votes(role keyspace.Role) bool {
	return role == keyspace.RoleVoter || role == keyspace.RoleVoterIncoming
}

// liveVoters returns the nodes that may lead the range.
func (w *World) liveVoters(g *span) []keyspace.NodeID {
	var out []keyspace.NodeID
	for _, r := range g.d.Replicas {
		if votes(r.Role) && w.live(r) {
			out = append(out, r.Node)
		}
	}
	return out
}

// hasQuorum says whether a majority lives, in both halves of a joint configuration.
func (w *World) hasQuorum(g *span) bool {
	var was, wasLive, is, isLive int
	for _, r := range g.d.Replicas {
		live := 0
		if w.live(r) {
			live = 1
		}
		if votes(r.Role) {
			is, isLive = is+1, isLive+live
		}
		if r.Role != keyspace.RoleLearner && r.Role != keyspace.RoleVoterIncoming {
			was, wasLive = was+1, wasLive+live
		}
	}
	return isLive > is/2 && wasLive > was/2
}

// Run lets time pass.
func (w *World) Run(d time.Duration) {
	for end := w.now.Add(d); w.now < end; {
		w.Step()
	}
}

// RunQuiet lets time pass until nothing has been under way for so long, at most limit;
// it says whether that came to be.
func (w *World) RunQuiet(quiet, limit time.Duration) bool {
	begin := w.now
	for w.now.Sub(begin) < limit {
		w.Step()
		if len(w.tasks) == 0 && w.now.Sub(max(w.Report.lastEnd, begin)) >= quiet {
			return true
		}
	}
	return false
}

// Step lets one step of time pass.
func (w *World) Step() {
	w.now = w.now.Add(step)
	if len(w.elect) > 0 && w.elect[0] <= w.now {
		w.elect = w.elect[1:]
		w.electLeaders()
	}
	w.handOver()
	if time.Duration(w.now)%reportEvery == 0 {
		w.reportLoads()
	}
	w.work()
	w.splitDue()
	round := w.cluster.Decide(w.now)
	for _, a := range round.Abandon {
		if t := w.rangeOf(a.Range).task; t != nil {
			w.end(t, false)
		}
	}
	for i := range round.Operations {
		w.start(&round.Operations[i])
	}
}

// trace tells Trace what is done, and why.
func (w *World) trace(why, what string, args ...any) {
	if w.Trace != nil {
		w.Trace(w.now, fmt.Sprintf(what, args...), why)
	}
}

// String says what time it is.
func (w *World) String() string {
	return fmt.Sprintf("%v: %d nodes, %d ranges", time.Duration(w.now), len(w.nodes), w.living)
}
