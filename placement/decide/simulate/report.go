package simulate

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/decide"
)

// Report is what was done since the last Mark, and what it cost.
type Report struct {
	since, lastEnd clock.Time
	// Done counts the operations that have ended well, by what they were and why.
	Done map[what]int
	// Moves are replicas that were copied, Copied their bytes; Transfers are leads that
	// an operation gave to another node.
	Moves, Transfers int
	Copied           int64
	// SplitsBySize and SplitsByLoad are the ranges that their leaders have split.
	SplitsBySize, SplitsByLoad int
	// Minimum is a lower bound of the moves that were needed: the replicas that were lost or
	// had to leave, and the largest replicas that bring every node into its band.
	Minimum int
	// MovesUndone and TransfersUndone are those that went back, within half an hour, to
	// a node that the range's replica or lead had left.
	MovesUndone, TransfersUndone int
	// HandedOver counts the leads that isolated nodes have given up by themselves.
	HandedOver int
	Failed     int
	Violated   int
	Violations []string
}

// what is a kind of operation and why it was done.
type what struct {
	Kind   decide.Kind
	Reason decide.Reason
}

// Mark begins a new report.
func (w *World) Mark() {
	w.Report = Report{since: w.now, lastEnd: w.now, Done: map[what]int{}}
}

// Plan finds out the minimum of moves for what is to come.
func (w *World) Plan() { w.Report.Minimum = w.minimum() }

func (r *Report) count(op *decide.Operation) {
	r.Done[what{op.Kind, op.Reason}]++
	if op.Kind == decide.AddReplica || op.Kind == decide.MoveReplica {
		r.Moves++
		r.Copied += op.Bytes
	}
	if op.Kind == decide.TransferLeader {
		r.Transfers++
	}
}

// left notes that a replica or the lead has left a node, came that it has come to one.
func (r *Report) left(g *span, node keyspace.NodeID, now clock.Time, lead bool) {
	g.events = slices.DeleteFunc(g.events, func(e event) bool { return now.Sub(e.at) > undoWindow })
	g.events = append(g.events, event{node, now, lead})
}

func (r *Report) came(g *span, node keyspace.NodeID, now clock.Time, lead bool) {
	for _, e := range g.events {
		// Replicas that moved before the last Mark do not count: the world has changed since.
		if e.node != node || e.lead != lead || e.at < r.since || now.Sub(e.at) > undoWindow {
			continue
		}
		if lead {
			r.TransfersUndone++
		} else {
			r.MovesUndone++
		}
		return
	}
}

// minimum is a lower bound of the moves that bring the cluster in order. It counts the moves
// that rebuild what is lost. To these it adds the moves that bring every node into its band, or
// those that spread replicas over zones, whichever are more.
func (w *World) minimum() int {
	lost, sharing := 0, 0
	have := make([]int64, len(w.nodes))
	var total, missing int64
	replicas := 0
	for _, g := range w.ranges {
		if g == nil || !w.hasQuorum(g) {
			continue
		}
		size := g.bytes + w.settings.RangeCost
		sharing += w.beyondZones(g)
		for _, r := range g.d.Replicas {
			n := w.node(r.Node)
			if n.State == decide.Draining {
				continue
			}
			total += size
			replicas++
			if !n.up || n.State == decide.Decommissioning {
				lost++
				missing -= size // it goes where it is missing most
				continue
			}
			have[r.Node-1] += size
		}
	}
	one := total / int64(max(replicas, 1))
	takers := 0
	for i, share := range w.shares(total) {
		least := share - max(int64(w.settings.Band*float64(share)), one)
		if d := least - have[i]; d > 0 {
			missing += d
			takers++
		}
	}
	return lost + max(sharing, w.largest(missing, takers))
}

// largest returns how many of the largest replicas make up so many bytes. A node is
// given no range twice.
func (w *World) largest(bytes int64, takers int) int {
	var sizes []int64
	for _, g := range w.ranges {
		for range min(takers, w.settings.ReplicationFactor) {
			if g != nil {
				sizes = append(sizes, g.bytes+w.settings.RangeCost)
			}
		}
	}
	slices.SortFunc(sizes, func(a, b int64) int { return cmp.Compare(b, a) })
	moves := 0
	for moves < len(sizes) && bytes > 0 {
		bytes -= sizes[moves]
		moves++
	}
	return moves
}

// beyondZones returns how many replicas of the range must go to another zone.
func (w *World) beyondZones(g *span) int {
	count := map[string]int{}
	for _, n := range w.nodes[:min(len(w.nodes), maxZones)] {
		count[n.Zone] = 0
	}
	for _, r := range g.d.Replicas {
		count[w.node(r.Node).Zone]++
	}
	most := (len(g.d.Replicas) + len(count) - 1) / len(count)
	beyond := 0
	for _, k := range count {
		beyond += max(0, k-most)
	}
	return beyond
}

// maxZones bounds the zones: the first nodes are in all of them.
const maxZones = 16

// shares returns what each node should have of so many bytes: by capacity, but no zone
// more than an even spread of replicas brings there.
func (w *World) shares(total int64) []int64 {
	out := make([]int64, len(w.nodes))
	zones := map[string]float64{}
	for _, n := range w.nodes {
		if n.up && n.State == decide.Serving {
			zones[n.Zone] += float64(n.Capacity)
		}
	}
	factor := w.settings.ReplicationFactor
	each := (factor + len(zones) - 1) / max(len(zones), 1)
	most := float64(total) * float64(each) / float64(factor)
	left, full := float64(total), map[string]float64{}
	for again := true; again; {
		again = false
		weight := 0.0
		for z, c := range zones {
			if full[z] == 0 {
				weight += c
			}
		}
		for _, z := range slices.Sorted(maps.Keys(zones)) {
			if full[z] == 0 && left*zones[z]/weight > most*(1+1e-9) {
				full[z], left, again = most, left-most, true
				break
			}
		}
		if !again {
			for i, n := range w.nodes {
				if !n.up || n.State != decide.Serving {
					continue
				}
				part := left * float64(n.Capacity) / weight
				if full[n.Zone] > 0 {
					part = most * float64(n.Capacity) / zones[n.Zone]
				}
				out[i] = int64(part)
			}
		}
	}
	return out
}

// Converged returns how long after the last Mark the last operation has ended.
func (r *Report) Converged() time.Duration { return r.lastEnd.Sub(r.since) }

// Beyond returns the moves beyond the minimum, in percent of it.
func (r *Report) Beyond() float64 {
	if r.Minimum == 0 {
		return 0
	}
	return 100 * (float64(r.Moves) - float64(r.Minimum)) / float64(r.Minimum)
}

// String returns the report as golden files show it.
func (r *Report) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "last operation ended after %v\n", r.Converged())
	fmt.Fprintf(&b, "moves: %d, %.1f GiB", r.Moves, float64(r.Copied)/(1<<30))
	if r.Minimum > 0 {
		fmt.Fprintf(&b, "; the least is %d: %+.1f %%", r.Minimum, r.Beyond())
	}
	fmt.Fprintf(&b, "\ntransfers: %d\n", r.Transfers)
	keys := slices.SortedFunc(maps.Keys(r.Done), func(x, y what) int {
		return cmp.Or(cmp.Compare(x.Reason, y.Reason), cmp.Compare(x.Kind, y.Kind))
	})
	for _, k := range keys {
		fmt.Fprintf(&b, "  %s: %s %d\n", k.Reason, k.Kind, r.Done[k])
	}
	if r.SplitsBySize+r.SplitsByLoad > 0 {
		fmt.Fprintf(&b, "split by their leaders: %d by size, %d by load\n", r.SplitsBySize, r.SplitsByLoad)
	}
	fmt.Fprintf(&b, "undone within %v: %d moves, %d transfers\n", undoWindow, r.MovesUndone, r.TransfersUndone)
	if r.HandedOver > 0 {
		fmt.Fprintf(&b, "handed over by isolated nodes: %d\n", r.HandedOver)
	}
	if r.Failed > 0 {
		fmt.Fprintf(&b, "given up: %d\n", r.Failed)
	}
	if r.Violated > 0 {
		fmt.Fprintf(&b, "NOT ALLOWED: %d\n  %s\n", r.Violated, strings.Join(r.Violations, "\n  "))
	}
	return b.String()
}

// Balance is how equal the serving nodes are: the least and the most that one has.
type Balance struct {
	Nodes                    int
	BytesMin, BytesMax       float64 // in parts of the mean
	LeadersMin, LeadersMax   int
	LoadMax                  float64 // in parts of the mean
	Under, Stopped, Together int     // ranges with too few live voters, below their quorum, with voters that share a zone
}

// Balance looks at the whole world.
func (w *World) Balance() Balance {
	bytes := make([]int64, len(w.nodes))
	loads := make([]int64, len(w.nodes))
	leaders := make([]int, len(w.nodes))
	var b Balance
	for _, g := range w.ranges {
		if g == nil {
			continue
		}
		for _, r := range g.d.Replicas {
			bytes[r.Node-1] += g.bytes + w.settings.RangeCost
		}
		if g.leader != 0 {
			leaders[g.leader-1]++
			loads[g.leader-1] += g.load
		}
		if len(w.liveVoters(g)) < w.settings.ReplicationFactor {
			b.Under++
		}
		if !w.hasQuorum(g) {
			b.Stopped++
		}
		if w.sharing(g.d.Replicas, 0, 0) > 0 {
			b.Together++
		}
	}
	var all, load int64
	first := true
	for i, n := range w.nodes {
		if !n.up || n.State != decide.Serving {
			continue
		}
		b.Nodes++
		all += bytes[i]
		load += loads[i]
		if first {
			b.BytesMin, b.BytesMax, b.LoadMax = float64(bytes[i]), float64(bytes[i]), float64(loads[i])
			b.LeadersMin, b.LeadersMax = leaders[i], leaders[i]
			first = false
		}
		b.BytesMin, b.BytesMax = min(b.BytesMin, float64(bytes[i])), max(b.BytesMax, float64(bytes[i]))
		b.LeadersMin, b.LeadersMax = min(b.LeadersMin, leaders[i]), max(b.LeadersMax, leaders[i])
		b.LoadMax = max(b.LoadMax, float64(loads[i]))
	}
	mean, meanLoad := float64(all)/float64(max(b.Nodes, 1)), float64(load)/float64(max(b.Nodes, 1))
	if mean > 0 {
		b.BytesMin, b.BytesMax = b.BytesMin/mean, b.BytesMax/mean
	}
	if meanLoad > 0 {
		b.LoadMax /= meanLoad
	}
	return b
}

// String returns the balance as golden files show it.
func (b Balance) String() string {
	return fmt.Sprintf("%d nodes: bytes %.1f to %.1f %% of the mean, leaders %d to %d, load at most %.1f %% of the mean\n"+
		"ranges with too few live voters: %d, without quorum: %d, with voters in one zone: %d\n",
		b.Nodes, 100*b.BytesMin, 100*b.BytesMax, b.LeadersMin, b.LeadersMax, 100*b.LoadMax, b.Under, b.Stopped, b.Together)
}
