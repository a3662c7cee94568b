package driver

import (
	"fmt"
	"iter"
	"maps"
	"slices"
	"sync"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/decide"
)

// maxClaims bounds the ranges that a leadership has heard of. It is twice the size of the
// largest cluster, since ranges that are not in the map are forgotten only now and then.
const maxClaims = 1 << 21

// Tracker is what one leadership has heard of nodes, by their own word. It begins empty:
// a node that goes on where it was with the leader before is asked to tell everything.
type Tracker struct {
	mu sync.Mutex
	// Guarded by mu.
	nodes  map[keyspace.NodeID]*trackedNode
	claims map[keyspace.RangeID]claim
	// changed are the ranges of which claims or quarantines have changed since take.
	changed map[keyspace.RangeID]bool
	// quarantined are the replicas in quarantine, by their nodes' word.
	quarantined map[keyspace.RangeID]map[keyspace.NodeID]quarantine
}

// quarantine is what a node says of a replica of its own, in the report of everything with the number
// whole.
type quarantine struct {
	decide.Quarantined
	whole uint64
}

// trackedNode is how far a node's reports have come.
type trackedNode struct {
	boot   keyspace.BootID
	number uint64
	// whole counts the reports of everything. complete says that one of them came to its
	// end, open that the last one has not yet.
	whole          uint64
	complete, open bool
	capacity, used int64
	// full says that the node has no memory for another replica.
	full bool
	// noSpace says that the node takes no more data, corrupt that it has a replica in quarantine.
	noSpace, corrupt bool
	// again asks it for everything once more.
	again bool
}

// claim is what a node says of a range that it leads, or was the last to lead.
type claim struct {
	Measure
	// leader leads the range. It is 0 if the former leader has reported that it does not any
	// more.
	leader keyspace.NodeID
	// from is who says so, in the report of everything with the number whole.
	from  keyspace.NodeID
	whole uint64
	// absent counts the surveys in a row in which the map did not have the range. bare counts
	// those in which its leader was known and had not reported its size yet.
	absent, bare int
}

// claimSurveys is after how many surveys a claim on a range that the map does not have is
// forgotten. It is kept at first: a range that a split has made is led, and its leader says so
// and does not repeat it, before the map has it.
const claimSurveys = 60

// BareSurveys is in how many surveys a leader that was found may not have said how large its range
// is, before it is asked for everything.
const BareSurveys = 3

func newTracker() *Tracker {
	return &Tracker{nodes: map[keyspace.NodeID]*trackedNode{}, claims: map[keyspace.RangeID]claim{}, changed: map[keyspace.RangeID]bool{}, quarantined: map[keyspace.RangeID]map[keyspace.NodeID]quarantine{}}
}

// Report takes one part of a node's report. anew says that one before it is missing. A
// part that has come already changes nothing.
func (h *Tracker) Report(from keyspace.NodeID, p *Part) (anew bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	n := h.nodes[from]
	switch {
	case p.Whole && (n == nil || n.boot != p.Boot || n.number < p.Number):
		next := &trackedNode{boot: p.Boot, whole: 1, open: true}
		if n != nil {
			next.whole, next.complete = n.whole+1, n.complete
		}
		n = next
		h.nodes[from] = n
	case n == nil || n.boot != p.Boot:
		return true
	case p.Number <= n.number:
		return false // it was taken, and the answer lost
	case p.Number != n.number+1 || n.again:
		return true
	}
	n.number, n.capacity, n.used, n.full = p.Number, p.Capacity, p.Used, p.Full
	n.noSpace, n.corrupt = p.NoSpace, p.Corrupt
	for i := range p.Led {
		h.claim(from, n.whole, &p.Led[i])
	}
	for _, q := range p.Quarantined {
		h.quarantine(from, n.whole, q)
	}
	if n.open && !p.More {
		n.open, n.complete = false, true
		h.forgetOlder(from, n.whole)
	}
	return false
}

// claim takes what a node says of one range.
func (h *Tracker) claim(from keyspace.NodeID, whole uint64, m *Measure) {
	old, ok := h.claims[m.Range]
	switch {
	case !ok && (m.Term == 0 || len(h.claims) >= maxClaims):
		return
	case m.Term == 0 && old.from != from:
		return // somebody else has said since that he leads it
	case m.Term == 0:
		old.leader = 0
		h.put(old)
		return
	case ok && old.Term > m.Term:
		return // the word of a leader of yesterday
	}
	h.put(claim{Measure: *m, leader: from, from: from, whole: whole, absent: old.absent})
}

// quarantine takes what a node says of a replica of its own.
func (h *Tracker) quarantine(from keyspace.NodeID, whole uint64, q Quarantined) {
	h.changed[q.Range] = true
	on := h.quarantined[q.Range]
	switch {
	case q.Replica != 0 && on == nil:
		if len(h.quarantined) >= maxClaims {
			return
		}
		on = map[keyspace.NodeID]quarantine{}
		h.quarantined[q.Range] = on
		fallthrough
	case q.Replica != 0:
		on[from] = quarantine{decide.Quarantined{Replica: q.Replica, Reason: q.Reason}, whole}
	case on != nil:
		delete(on, from)
	}
	if len(on) == 0 {
		delete(h.quarantined, q.Range)
	}
}

// Quarantined returns the replicas of a range that are in quarantine, by their nodes' word.
func (h *Tracker) Quarantined(id keyspace.RangeID) (qs []decide.Quarantined) {
	h.mu.Lock()
	defer h.mu.Unlock()
	on := h.quarantined[id]
	for _, n := range slices.Sorted(maps.Keys(on)) {
		qs = append(qs, on[n].Quarantined)
	}
	return qs
}

// votes returns whether the replica of a range on a node can vote, as far as is known: the node lives,
// and has told everything, and does not keep the replica closed.
func (h *Tracker) votes(d *keyspace.Descriptor, alive func(keyspace.NodeID) bool) func(keyspace.NodeID) bool {
	return func(n keyspace.NodeID) bool {
		return alive(n) && h.Told(&decide.Node{ID: n}) && !h.closed(d, n)
	}
}

// closes returns an error if a replica of the ranges is in quarantine: a merge needs each of them.
func (h *Tracker) closes(ds ...*keyspace.Descriptor) error {
	for _, d := range ds {
		for _, m := range d.Replicas {
			if h.closed(d, m.Node) {
				return fmt.Errorf("the replica of range %s on node %s is in quarantine, and each replica of both ranges is needed", d.Range, m.Node)
			}
		}
	}
	return nil
}

// closed says whether the range's replica on the node is in quarantine.
func (h *Tracker) closed(d *keyspace.Descriptor, n keyspace.NodeID) bool {
	m, ok := d.ReplicaOn(n)
	return ok && slices.ContainsFunc(h.Quarantined(d.Range), func(q decide.Quarantined) bool { return q.Replica == m.ID })
}

func (h *Tracker) put(c claim) {
	h.claims[c.Range] = c
	h.changed[c.Range] = true
}

// forgetOlder takes back what a node said before it told everything, and did not repeat.
func (h *Tracker) forgetOlder(from keyspace.NodeID, whole uint64) {
	for id, c := range h.claims {
		if c.from == from && c.whole < whole && c.leader != 0 {
			c.leader = 0
			h.claims[id] = c
			h.changed[id] = true
		}
	}
	for id, on := range h.quarantined {
		if q, ok := on[from]; ok && q.whole < whole {
			h.quarantine(from, whole, Quarantined{Range: id})
		}
	}
}

// saw notes who leads a range by the range's own word.
func (h *Tracker) saw(id keyspace.RangeID, leader keyspace.NodeID) {
	h.mu.Lock()
	defer h.mu.Unlock()
	c := h.claims[id]
	if c.leader == leader {
		return
	}
	// Its own report says in which term; until then any that is as new counts.
	c.Range, c.leader, c.from = id, leader, leader
	if n := h.nodes[leader]; n != nil {
		c.whole = n.whole
	}
	h.put(c)
}

// take returns the ranges of which nodes have said something new since the last time.
func (h *Tracker) take() []keyspace.RangeID {
	h.mu.Lock()
	defer h.mu.Unlock()
	out := make([]keyspace.RangeID, 0, len(h.changed))
	for id := range h.changed {
		out = append(out, id)
	}
	clear(h.changed)
	return out
}

// of returns what is claimed of a range.
func (h *Tracker) of(id keyspace.RangeID) claim {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.claims[id]
}

// Forget forgets what nodes have said of ranges. Leaders do not repeat it by themselves, so
// that a survey has to ask for it.
func (h *Tracker) Forget() {
	h.mu.Lock()
	defer h.mu.Unlock()
	clear(h.claims)
}

// Leader returns who leads a range by the word of nodes, 0 if nobody is known to, and what it
// said of the range.
func (h *Tracker) Leader(id keyspace.RangeID) (keyspace.NodeID, Measure) {
	c := h.of(id)
	return c.leader, c.Measure
}

// Told takes what a node has said of its disk and memory over into n. It says whether the node has told
// everything once.
func (h *Tracker) Told(n *decide.Node) (complete bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	t := h.nodes[n.ID]
	if t == nil {
		return false
	}
	n.Capacity, n.Used, n.Full = t.capacity, t.used, t.full
	return t.complete
}

// Alarms returns the alarms that a node reports. It says whether the node has told everything once.
func (h *Tracker) Alarms(id keyspace.NodeID) (noSpace, corrupt, complete bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if t := h.nodes[id]; t != nil {
		return t.noSpace, t.corrupt, t.complete
	}
	return false, false, false
}

// keep forgets the ranges that the map has not had for long, and has leaders tell everything that
// have been found and not told how large their range is.
func (h *Tracker) keep(in func(keyspace.RangeID) bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for id, c := range h.claims {
		was := c
		if c.absent++; in(id) {
			c.absent = 0
		}
		if c.bare++; c.Term > 0 || c.leader == 0 {
			c.bare = 0
		}
		if n := h.nodes[c.leader]; c.bare >= BareSurveys && n != nil && !n.open {
			n.again, c.bare = true, 0 // it has said so once, and does not repeat it
		}
		switch {
		case c.absent > claimSurveys:
			delete(h.claims, id)
			delete(h.changed, id)
		case c != was:
			h.claims[id] = c
		}
	}
}

// unled returns those of the ranges of which nobody says that he leads them.
func (h *Tracker) unled(ranges iter.Seq[keyspace.RangeID]) (ids []keyspace.RangeID) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for id := range ranges {
		if h.claims[id].leader == 0 {
			ids = append(ids, id)
		}
	}
	return ids
}
