package watch

import (
	"bytes"
	"slices"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/keyspace"
)

// group are watchers of one span at one position. A live group gets every event of its
// span that comes, and holds it until all lower ones have been delivered or declared
// void. A group that lags reads history instead.
type group struct {
	span keyspace.Span
	prev bool
	live bool
	// pos: everything at or below it was queued for the members.
	pos     keyspace.Revision
	members []*Watcher
	// rest is when the next release may be, see pace.
	rest clock.Time
	// pending are a live group's events above pos.
	pending eventList
	bytes   int64

	// indexed says that the group is in the index, inTree that it is in its tree.
	indexed, inTree bool

	// A lagging group is queued for a reader, read by one, parked, or waits until its
	// watcher's queue is empty.
	state lagState
	// least is what the frontier must have reached before a lagging group goes on: the
	// revision that was current when its watcher came.
	least keyspace.Revision
	// largest says that its next revision waits until no other large one is being read.
	largest bool
}

// join takes a watcher in.
func (g *group) join(w *Watcher) {
	w.group, w.at = g, len(g.members)
	g.members = append(g.members, w)
}

type groupKey struct {
	start, end string
	prev       bool
}

func keyOf(g *group) groupKey {
	return groupKey{string(g.span.Start), string(g.span.End), g.prev}
}

// groupIndex holds the live groups: by their span, and by the keys that they want.
type groupIndex struct {
	bySpan map[groupKey]*group
	// singles are those that want one key, by that key; the others are in tree, or in fresh
	// until there are maxFresh of those.
	singles map[string][]*group
	// tree is sorted by start, and has gone that are not live any more; ends[i] is the
	// greatest end in the half of the tree that hangs on i.
	tree  []*group
	ends  []keyspace.Span
	gone  int
	fresh []*group
}

// maxFresh bounds the groups that are looked through one by one for each event.
const maxFresh = 128

func newGroupIndex() groupIndex {
	return groupIndex{bySpan: map[groupKey]*group{}, singles: map[string][]*group{}}
}

func isSingle(s keyspace.Span) bool {
	return len(s.Start) > 0 && len(s.End) == len(s.Start)+1 && s.End[len(s.Start)] == 0 && bytes.Equal(s.End[:len(s.Start)], s.Start)
}

func (x *groupIndex) add(g *group) {
	x.bySpan[keyOf(g)] = g
	g.indexed = true
	switch {
	case isSingle(g.span):
		x.singles[string(g.span.Start)] = append(x.singles[string(g.span.Start)], g)
	case g.inTree:
		x.gone--
	default:
		if x.fresh = append(x.fresh, g); len(x.fresh) > maxFresh {
			x.merge()
		}
	}
}

func (x *groupIndex) remove(g *group) {
	delete(x.bySpan, keyOf(g))
	g.indexed = false
	switch k := string(g.span.Start); {
	case isSingle(g.span):
		if x.singles[k] = slices.DeleteFunc(x.singles[k], func(o *group) bool { return o == g }); len(x.singles[k]) == 0 {
			delete(x.singles, k)
		}
	case g.inTree:
		if x.gone++; x.gone > maxFresh && x.gone > len(x.tree)/2 {
			x.merge()
		}
	default:
		x.fresh = slices.DeleteFunc(x.fresh, func(o *group) bool { return o == g })
	}
}

// each calls f with the groups that want the key. f does not change the index.
func (x *groupIndex) each(key []byte, f func(*group)) {
	for _, g := range x.singles[string(key)] {
		f(g)
	}
	for _, g := range x.fresh {
		if g.span.Contains(key) {
			f(g)
		}
	}
	x.search(key, 0, len(x.tree), f)
}

// merge puts the fresh groups into the tree and takes out those that are gone. The tree is
// sorted already: a hundred thousand groups take a millisecond or two.
func (x *groupIndex) merge() {
	byStart := func(a, b *group) int { return bytes.Compare(a.span.Start, b.span.Start) }
	slices.SortFunc(x.fresh, byStart)
	tree, fresh := make([]*group, 0, len(x.tree)-x.gone+len(x.fresh)), x.fresh
	for _, g := range x.tree {
		if !g.indexed {
			g.inTree = false
			continue
		}
		for len(fresh) > 0 && byStart(fresh[0], g) < 0 {
			tree, fresh = append(tree, fresh[0]), fresh[1:]
		}
		tree = append(tree, g)
	}
	tree = append(tree, fresh...)
	for _, g := range x.fresh {
		g.inTree = true
	}
	x.tree, x.fresh, x.gone = tree, nil, 0
	x.ends = make([]keyspace.Span, len(tree))
	x.greatest(0, len(tree))
}

// greatest fills in ends for tree[lo:hi] and returns the greatest end there.
func (x *groupIndex) greatest(lo, hi int) (end keyspace.Span, ok bool) {
	if lo >= hi {
		return end, false
	}
	mid := (lo + hi) / 2
	end = keyspace.Span{End: x.tree[mid].span.End}
	for _, half := range [2][2]int{{lo, mid}, {mid + 1, hi}} {
		if e, ok := x.greatest(half[0], half[1]); ok && e.Covers(end) {
			end = e
		}
	}
	x.ends[mid] = end
	return end, true
}

func (x *groupIndex) search(key []byte, lo, hi int, f func(*group)) {
	if lo >= hi {
		return
	}
	mid := (lo + hi) / 2
	if !x.ends[mid].Contains(key) {
		return // all of the half end at or below the key
	}
	x.search(key, lo, mid, f)
	if g := x.tree[mid]; bytes.Compare(g.span.Start, key) <= 0 {
		if g.indexed && g.span.Contains(key) {
			f(g)
		}
		x.search(key, mid+1, hi, f)
	}
}

// eachGroupLocked calls f with all groups, live or not.
func (h *Hub) eachGroupLocked(f func(*group)) {
	var all []*group
	for _, g := range h.groups.bySpan {
		all = append(all, g)
	}
	for g := range h.lagGroups {
		all = append(all, g)
	}
	for _, g := range all {
		f(g)
	}
}

// addPending gives a live group an event, unless it has had it.
func (h *Hub) addPendingLocked(g *group, e *event) {
	if e.rev <= g.pos {
		return
	}
	if twin := g.pending.insert(e); twin != nil {
		if twin.whole == nil {
			twin.whole = e.whole // it comes again with the version before
		}
		return
	}
	g.bytes += e.bytes
	h.pendingBytes += e.bytes
	h.waiting[g] = struct{}{}
}

// dropPendingLocked forgets what waits in a group.
func (h *Hub) dropPendingLocked(g *group) {
	h.pendingBytes -= g.bytes
	g.pending, g.bytes = eventList{}, 0
	delete(h.waiting, g)
}

// What one more watcher of a group costs a release is a message, of a few microseconds on
// both sides, however many events are in it. So a group rests after a release for as long as
// its members make that much work, with ten times as long for everything else: under load
// events go in few messages, and leave the processors to what brings them. The first one
// behind a rest leaves at once. Few members need no rest.
const (
	restEach  = 30 * time.Microsecond
	restLeast = time.Millisecond
	restMost  = 25 * time.Millisecond
)

// pace is how long a group of so many rests.
func pace(members int) time.Duration {
	if rest := time.Duration(members) * restEach; rest >= restLeast {
		return min(rest, restMost)
	}
	return 0
}

// restsLocked says whether the group's next release is to wait, and has it made then;
// otherwise its next rest begins.
func (h *Hub) restsLocked(g *group) bool {
	rest := pace(len(g.members))
	if rest == 0 {
		return false
	}
	now := h.cfg.Clock.Now()
	if now < g.rest {
		h.resumeLocked(g.rest)
		return true
	}
	g.rest = now.Add(rest)
	return false
}

// releaseLocked delivers what nothing lower can precede any more.
func (h *Hub) releaseLocked(g *group) {
	frontier := h.frontierLocked(g.span)
	if mutation.Is(mutation.ReleasedTooEarly) && g.pending.len() > 0 {
		frontier = max(frontier, g.pending.last().rev)
	}
	if g.pending.len() == 0 || g.pending.first().rev > frontier || h.restsLocked(g) {
		return
	}
	batch := g.pending.takeUpTo(frontier)
	for _, e := range batch {
		g.bytes -= e.bytes
		h.pendingBytes -= e.bytes
	}
	if g.pending.len() == 0 {
		delete(h.waiting, g)
	}
	pos := g.pos
	g.pos = frontier
	h.deliverLocked(g, batch, frontier, pos)
}

// deliverLocked queues a batch for all members of a group, which is at pos now and was
// at before. Whose client is too slow leaves it, right below the batch: what is below
// that and was not delivered is void.
func (h *Hub) deliverLocked(g *group, batch []*event, pos, before keyspace.Revision) {
	before = max(before, batch[0].rev-1)
	shared := h.newDelivery(batch, g.prev, pos)
	if len(g.members) > 1 {
		shared.of.share(shared.events)
	}
	for _, w := range slices.Clone(g.members) {
		if !w.offerLocked(batch, shared) {
			h.cfg.Metrics.Slow.Inc()
			w.past = true
			h.leaveLocked(w)
			h.lagLocked(h.lagBehindLocked(w, before))
		}
	}
}

// leaveLocked takes a watcher out of its group, which goes with its last one.
func (h *Hub) leaveLocked(w *Watcher) {
	g := w.group
	last := len(g.members) - 1
	g.members[w.at], g.members[last].at = g.members[last], w.at
	g.members[last] = nil
	g.members, w.group = g.members[:last], nil
	if last > 0 {
		return
	}
	if g.live {
		h.groups.remove(g)
		h.dropPendingLocked(g)
		g.live = false
	} else {
		h.endLagLocked(g)
	}
	if !h.unused {
		h.unused, h.unusedSince = true, h.cfg.Clock.Now()
	}
}

// failLocked cancels the members of a group who want what is compacted; the others, who
// begin later, go on behind that.
func (h *Hub) failLocked(g *group, at keyspace.Revision) {
	for _, w := range slices.Clone(g.members) {
		if w.from < at {
			h.leaveLocked(w)
			w.cancelLocked(at)
		}
	}
	g.pos = max(g.pos, at-1)
}

// tooLargeLocked cancels the members of a group who want a revision that is too large to be
// told whole; the others, who begin later, go on behind it.
func (h *Hub) tooLargeLocked(g *group, rev keyspace.Revision) {
	for _, w := range slices.Clone(g.members) {
		if w.from <= rev {
			h.leaveLocked(w)
			w.tooLarge = rev
			w.readyLocked()
		}
	}
	g.pos = max(g.pos, rev)
}

// cutLocked has the groups with the most events that wait go on from history, until
// the others fit.
func (h *Hub) cutLocked() {
	for h.pendingBytes > h.cfg.PendingBytes {
		var most *group
		for g := range h.waiting {
			if most == nil || g.bytes > most.bytes {
				most = g
			}
		}
		if most == nil {
			return
		}
		h.cfg.Metrics.Cut.Inc()
		// It may have been idle for long, and is not to ask for what is compacted by now.
		most.pos = max(most.pos, min(h.frontierLocked(most.span), most.pending.first().rev-1))
		h.groups.remove(most)
		h.dropPendingLocked(most)
		most.live = false
		h.lagGroups[most] = struct{}{}
		h.lagLocked(most)
	}
}
