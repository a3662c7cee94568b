// Package simbus is the bus of simulated nodes: transport's Endpoint over an in-process
// network that delays, loses, repeats, reorders and cuts as a seed and its settings
// say. It runs in a testing/synctest bubble, in virtual time. Only the sockets of
// package transport are missing.
//
// It may do to a frame what QUIC may do: one-way messages can be lost. It also repeats
// and reorders them, which raft must bear. Calls and streams arrive in order or their
// session breaks. A cut delays the frames that meet it. If it lasts, the Endpoint's
// probes notice and end the session, as over a real network.
//
// Each lane has its own random source. So its choices depend only on the order of
// frames within the lane and not on the interleaving of goroutines. Package sim makes
// networks; the conformance suite of transport runs over this package too.
package simbus

import (
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/transport"
)

// Faults are what one direction between two nodes does to frames. Probabilities are per
// frame. The zero value is a perfect network without delay.
type Faults struct {
	Delay Delay
	// Loss drops a one-way message.
	Loss float64
	// Duplicate delivers a one-way message again, after another delay.
	Duplicate float64
	// Reorder lets later messages overtake a one-way message, which is held back by up
	// to ReorderBy.
	Reorder   float64
	ReorderBy time.Duration
	// Break ends the session: frames under way are lost, calls and streams fail.
	Break float64
}

// Delay is a distribution of delays: uniform between Min and Max. With probability Tail
// it adds an exponential delay of mean TailMean, at most ten times that.
type Delay struct {
	Min, Max time.Duration
	Tail     float64
	TailMean time.Duration
}

func (d *Delay) draw(r *rand.Rand) time.Duration {
	delay := d.Min
	if d.Max > d.Min {
		delay += time.Duration(r.Int64N(int64(d.Max - d.Min)))
	}
	if d.Tail > 0 && r.Float64() < d.Tail {
		delay += time.Duration(min(r.ExpFloat64(), 10) * float64(d.TailMean))
	}
	return delay
}

// Stats count the faults that the network has executed. A simulation fails if a
// promised fault never happened.
type Stats struct {
	Delivered, Lost, Duplicated, Reordered int64
	// CutOff counts messages that met a cut, Broken sessions that a Break ended.
	CutOff, Broken, Crashes int64
	// Sessions counts the sessions made, of both kinds.
	Sessions int64
}

type counters struct {
	delivered, lost, duplicated, reordered, cutOff, broken, crashes, sessions atomic.Int64
}

// direction is a one-way path.
type direction struct{ from, to keyspace.NodeID }

// Network connects the buses of one simulation. All methods may be called from many
// goroutines of its bubble.
type Network struct {
	seed  uint64
	clock clock.Clock
	stats counters

	mu       sync.Mutex // guards what follows
	rand     *rand.Rand // for choices that belong to no lane
	buses    map[keyspace.NodeID]*Bus
	pairs    map[direction]*pair // from < to
	standard Faults
	faults   map[direction]Faults
	cut      map[direction]bool
	paused   map[keyspace.NodeID]bool
	made     uint64        // sessions ever made
	changed  chan struct{} // closed and replaced whenever cut or paused change
}

// New makes a network without nodes. It must be called in the bubble.
func New(seed uint64, standard Faults) *Network {
	return &Network{
		seed: seed, clock: clock.Virtual(),
		rand:  rand.New(rand.NewPCG(seed, 0)),
		buses: map[keyspace.NodeID]*Bus{}, pairs: map[direction]*pair{},
		standard: standard, faults: map[direction]Faults{},
		cut: map[direction]bool{}, paused: map[keyspace.NodeID]bool{},
		changed: make(chan struct{}),
	}
}

// Stats returns what has happened so far.
func (n *Network) Stats() Stats {
	c := &n.stats
	return Stats{
		Delivered: c.delivered.Load(), Lost: c.lost.Load(), Duplicated: c.duplicated.Load(), Reordered: c.reordered.Load(),
		CutOff: c.cutOff.Load(), Broken: c.broken.Load(), Crashes: c.crashes.Load(), Sessions: c.sessions.Load(),
	}
}

// SetStandard changes the faults of every direction without its own. Frames under way
// keep their fate.
func (n *Network) SetStandard(f Faults) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.standard = f
}

// SetFaults gives one direction faults of its own.
func (n *Network) SetFaults(from, to keyspace.NodeID, f Faults) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.faults[direction{from, to}] = f
}

// ClearFaults ends the directions' own faults.
func (n *Network) ClearFaults() {
	n.mu.Lock()
	defer n.mu.Unlock()
	clear(n.faults)
}

// Cut stops one direction. Messages that meet the cut are lost; calls and streams wait
// for Heal or for the end of their session.
func (n *Network) Cut(from, to keyspace.NodeID) {
	n.topology(func() { n.cut[direction{from, to}] = true })
}

// Heal opens one direction again.
func (n *Network) Heal(from, to keyspace.NodeID) {
	n.topology(func() { delete(n.cut, direction{from, to}) })
}

// Partition cuts, in both directions, every node of a group from every node
// outside of it.
func (n *Network) Partition(group ...keyspace.NodeID) {
	n.topology(func() {
		for id := range n.buses {
			for _, in := range group {
				if !slices.Contains(group, id) {
					n.cut[direction{in, id}], n.cut[direction{id, in}] = true, true
				}
			}
		}
	})
}

// HealCuts opens every direction. Who is paused stays so.
func (n *Network) HealCuts() { n.topology(func() { clear(n.cut) }) }

// HealAll opens every direction and resumes every node.
func (n *Network) HealAll() {
	n.topology(func() {
		clear(n.cut)
		clear(n.paused)
	})
}

// Pause holds everything to and from a node, as if its process were stopped. Nothing is
// lost but what its peers give up meanwhile. The caller pauses the node's clock.
func (n *Network) Pause(id keyspace.NodeID) { n.topology(func() { n.paused[id] = true }) }

// Resume ends a pause.
func (n *Network) Resume(id keyspace.NodeID) { n.topology(func() { delete(n.paused, id) }) }

// topology changes cuts and pauses, and wakes everything that waits for one.
func (n *Network) topology(change func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	change()
	close(n.changed)
	n.changed = make(chan struct{})
	for _, d := range n.sortedPairs() {
		n.connectLocked(n.pairs[d])
	}
}

// sortedPairs makes the following random draws independent of the order of maps.
func (n *Network) sortedPairs() []direction {
	all := make([]direction, 0, len(n.pairs))
	for d := range n.pairs {
		all = append(all, d)
	}
	slices.SortFunc(all, func(a, b direction) int {
		if a.from != b.from {
			return compare(a.from, b.from)
		}
		return compare(a.to, b.to)
	})
	return all
}

func compare(a, b keyspace.NodeID) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

// Crash stops a node's bus as the loss of power does. Frames to and from it are lost,
// nothing more comes out, nobody is told. The contexts of the node's handlers end;
// Crash does not wait for them, but the bus's Close does.
func (n *Network) Crash(id keyspace.NodeID) {
	n.mu.Lock()
	b := n.buses[id]
	if b == nil || b.crashed {
		n.mu.Unlock()
		return
	}
	b.crashed = true
	delete(n.buses, id)
	close(n.changed)
	n.changed = make(chan struct{})
	n.mu.Unlock()
	n.stats.crashes.Add(1)
	b.Stop()
}

// pathState is what a direction does to a frame that arrives now.
type pathState struct {
	cut, held bool
	gone      bool            // one of the nodes has crashed
	changed   <-chan struct{} // closed when any of this may have changed
}

func (n *Network) path(d direction, ends [2]*Bus) pathState {
	n.mu.Lock()
	defer n.mu.Unlock()
	return pathState{
		cut:  n.cut[d],
		held: n.paused[d.from] || n.paused[d.to],
		gone: ends[0].crashed || ends[1].crashed, changed: n.changed,
	}
}

func (n *Network) faultsOf(d direction) Faults {
	n.mu.Lock()
	defer n.mu.Unlock()
	if f, ok := n.faults[d]; ok {
		return f
	}
	return n.standard
}

// laneRand returns the source of one lane's choices.
func (n *Network) laneRand(d direction, session uint64, l *transport.Lane) *rand.Rand {
	h := fnv.New64a()
	fmt.Fprint(h, d.from, d.to, session, l.Class(), l.Slot())
	return rand.New(rand.NewPCG(n.seed, h.Sum64()))
}
