package recovery

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/raftgroup/offline"
)

// ErrLostSpans says that no copy of a span of keys survives.
var ErrLostSpans = errors.New("recovery: spans of keys are lost")

// cover gives each key to the range that held it last, by the generation: for each key it only grows. A
// generation that a committed entry gave is the only one of its number at a key. One that is not known to be committed is
// at most one above the last committed one: a leader proposes one change at a time, for the generation that it has
// applied. Whatever was committed instead has that number too, or a higher one. So it is only in a tie that
// the foundation decides.
// An absorb that is not known to be committed may be further above: its generation is above the source's too. If nothing
// proves that it was not (neverAbsorbed), it counts. The range with the absorb then may lack a committed entry, so it is not
// called safe. If something does, the keys of the range and those of the source count with the generations that each had before.
// A range keeps of its span what begins at its start, and what no other one has held later becomes ranges of
// their own. What no survivor has is made anew, and empty.
func (p *planner) cover() error {
	var rows []RangeRow
	for _, c := range p.claims() {
		g := c.group
		if c.source == nil {
			rows = slices.DeleteFunc(rows, func(r RangeRow) bool { return r.Range == g.rng })
		}
		switch {
		case c.source != nil:
			for _, s := range free(*c.source, rows) {
				rows = append(rows, RangeRow{Range: g.rng, Start: key(s.Start), End: key(s.End)})
			}
		case g.covered:
			g.end = g.chosen.copy.End.End
		default:
			more, err := p.fit(g, rows)
			if err != nil {
				return err
			}
			rows = append(rows, more...)
		}
		sortRows(rows)
	}
	lost := gaps(rows)
	for _, s := range lost {
		p.plan.Groups = append(p.plan.Groups, Verdict{Verdict: Lost, Why: p.whyLost(s), Start: key(s.Start), End: key(s.End)})
	}
	if len(lost) > 0 && !p.o.AcceptLost {
		return fmt.Errorf("%w: no copy survives of %d; find another node that has one, or take empty ranges in their place with --accept-lost-spans: %v", ErrLostSpans, len(lost), lost)
	}
	for _, s := range lost {
		rows = append(rows, p.emptyRange(s))
	}
	sortRows(rows)
	p.plan.Map = rows
	return nil
}

// claim is a group's right to the keys of its span that no claim before it has.
type claim struct {
	group      *group
	generation keyspace.Generation
	stands     foundation
	// source is what a doubted absorb has brought to the group, with the generation that it had there. The group gets it by
	// its own claim, which comes later, and keeps it free of others until then. It is nil for the group's own claim.
	source *keyspace.Span
}

// claims returns those of all groups, in their order.
func (p *planner) claims() (order []claim) {
	var all []*group
	for _, g := range p.groups {
		g.end = nil
		if g.rng != 0 && g.chosen != nil {
			all = append(all, g)
		}
	}
	for _, g := range all {
		c := claim{group: g, generation: g.chosen.copy.End.Generation, stands: g.stands}
		if never, gone := g.neverAbsorbed(all); gone {
			g.covered = true
		} else if never {
			order = append(order, p.sourceClaim(g))
			c.generation, c.stands = g.chosen.copy.Settled.Generation, committed
		}
		order = append(order, c)
	}
	slices.SortFunc(order, func(a, b claim) int {
		return cmp.Or(cmp.Compare(b.generation, a.generation), cmp.Compare(a.stands, b.stands),
			cmp.Compare(boolInt(a.source != nil), boolInt(b.source != nil)), cmp.Compare(a.group.rng, b.group.rng))
	})
	return order
}

// neverAbsorbed says that the absorb in the tail of the group's chosen copy was certainly not committed. The proof is
// another range with one of the group's own keys, whose committed generation lies between that before the absorb and the
// absorb's. For an absorb that was committed leaves its own generation or a higher one there, and all that was there before
// has that before the absorb or a lower one.
// If another range certainly had the group's first key later, it has absorbed the group: the group is gone. Its source needs no
// care then. If it is not certain that the other one had, the absorb counts.
func (g *group) neverAbsorbed(all []*group) (never, gone bool) {
	c := g.chosen.copy
	if !c.Tentative || c.Settled == nil || len(c.Absorbs) == 0 {
		return false, false
	}
	own := keyspace.Span{Start: c.End.Start, End: c.Settled.End}
	for _, o := range all {
		e := &o.chosen.copy.End
		if o == g || e.Generation <= c.Settled.Generation || !own.Overlaps(e.span()) {
			continue
		}
		if e.span().Contains(own.Start) {
			if o.stands != committed {
				return false, false
			}
			gone = true
		}
		never = never || o.stands == committed && e.Generation < c.End.Generation
	}
	return never, never && gone
}

// sourceClaim is the claim to the keys of the source, of a group whose absorb was not committed. The tail that goes on
// absorbs the source's copy beside it all the same, so that copy does not go on by itself. The source had been frozen, with a
// generation that was certain: one below the absorb's, as the group's own was lower still.
func (p *planner) sourceClaim(g *group) claim {
	c := g.chosen.copy
	if s := p.groups[c.Absorbs[len(c.Absorbs)-1]]; s != nil && s.chosen != nil && s.chosen.node == g.chosen.node {
		s.covered = true
	}
	return claim{group: g, generation: c.End.Generation - 1, stands: committed, source: &keyspace.Span{Start: c.Settled.End, End: c.End.End}}
}

func boolInt(b bool) int {
	if b {
		return 1
	}
	return 0
}

func sortRows(rows []RangeRow) {
	slices.SortFunc(rows, func(a, b RangeRow) int { return bytes.Compare(a.Start, b.Start) })
}

// fit returns the rows of a group beside those of ranges that have held keys after it.
func (p *planner) fit(g *group, rows []RangeRow) (more []RangeRow, err error) {
	e := &g.chosen.copy.End
	parts := free(e.span(), rows)
	if g.end = e.End; len(parts) == 0 || !bytes.Equal(parts[0].Start, e.Start) {
		// A range keeps its first key until it is absorbed. So what is left of it, if anything, is older
		// than what has absorbed it, and goes.
		g.covered = true
		return nil, nil
	}
	if len(parts) > 1 || !bytes.Equal(parts[0].End, e.End) {
		if g.verdict == Kept {
			g.verdict, g.why = Safe, "the majority of its voters survives, and parts of its span have been held by other ranges since"
		}
		more = p.cut(g, parts)
	}
	row, err := g.row()
	return append(more, row), err
}

// cut splits the group's range so that it keeps the first of the parts. The others become ranges of
// their own, and what is between them goes.
func (p *planner) cut(g *group, parts []keyspace.Span) (rows []RangeRow) {
	c := g.chosen.copy
	self := []Member{{Replica: c.Replica, Node: g.chosen.node, Role: roles[keyspace.RoleVoter]}}
	o := p.orders[g.chosen.node]
	end := c.End.End
	gone := func(from []byte) {
		r := p.newRange()
		g.cuts = append(g.cuts, Cut{Key: key(from), Child: r})
		o.Drop = append(o.Drop, Drop{Range: r, Replica: c.Replica})
		end = key(from)
	}
	for i := len(parts) - 1; i >= 0; i-- {
		if s := parts[i]; !bytes.Equal(s.End, end) {
			gone(s.End)
		}
		if i == 0 {
			break
		}
		r := p.newRange()
		g.cuts = append(g.cuts, Cut{Key: key(parts[i].Start), Child: r})
		rows = append(rows, RangeRow{
			Range: r, Generation: c.End.Generation + keyspace.Generation(len(g.cuts)), Start: key(parts[i].Start), End: key(parts[i].End),
			ConfIndex: initIndex, Members: self,
		})
		end = key(parts[i].Start)
	}
	g.end = parts[0].End
	return rows
}

func (p *planner) newRange() keyspace.RangeID {
	p.nextRange++
	return p.nextRange - 1
}

// emptyRange is a new range for a lost span.
func (p *planner) emptyRange(s keyspace.Span) RangeRow {
	r := RangeRow{Range: p.newRange(), Generation: p.generation, Start: key(s.Start), End: key(s.End), ConfIndex: initIndex, New: true}
	for _, n := range p.plan.Survivors[:min(newReplicas, len(p.plan.Survivors))] {
		r.Members = append(r.Members, Member{Replica: p.nextReplica, Node: n.Node, Role: roles[keyspace.RoleVoter]})
		p.nextReplica++
	}
	return r
}

// whyLost names the ranges that held the span.
func (p *planner) whyLost(s keyspace.Span) string {
	why := "no survivor has a copy"
	for _, r := range p.placed.Ranges {
		if at := (keyspace.Span{Start: r.Start, End: r.End}); at.Overlaps(s) {
			why += "; range " + r.Range.String() + " was there"
			if g := p.groups[r.Range]; g != nil && g.chosen == nil {
				why += " (" + g.why + ")"
			}
		}
	}
	return why
}

// free returns the parts of the span that no row has, in order. The rows are in order and do not overlap.
func free(s keyspace.Span, rows []RangeRow) (parts []keyspace.Span) {
	at := s.Start
	for _, r := range rows {
		x, ok := s.Intersect(keyspace.Span{Start: r.Start, End: r.End})
		if !ok {
			continue
		}
		if bytes.Compare(at, x.Start) < 0 {
			parts = append(parts, keyspace.Span{Start: at, End: x.Start})
		}
		if at = x.End; len(at) == 0 {
			return parts
		}
	}
	if len(s.End) == 0 || bytes.Compare(at, s.End) < 0 {
		parts = append(parts, keyspace.Span{Start: at, End: s.End})
	}
	return parts
}

// gaps returns the parts of the keyspace that no row has.
func gaps(rows []RangeRow) []keyspace.Span { return free(keyspace.Span{}, rows) }

// row is the group's row of the map behind what is done.
func (g *group) row() (RangeRow, error) {
	c := g.chosen.copy
	r := RangeRow{
		Range: g.rng, Generation: c.End.Generation + keyspace.Generation(len(g.cuts)), Start: c.End.Start, End: key(g.end),
		ConfIndex: c.End.ConfIndex, Members: c.End.Members,
	}
	if g.verdict == Kept {
		return r, nil
	}
	rs, err := replicasOf(c.End.Members)
	if err != nil {
		return r, fmt.Errorf("recovery: %s: %w", groupName(g.rng), err)
	}
	steps, after := offline.Steps(rs, c.Replica)
	if len(after) != 1 {
		return r, fmt.Errorf("recovery: %s: replica %d on node %s is no member: collect anew", groupName(g.rng), c.Replica, g.chosen.node.node())
	}
	if r.Members = membersOf(after); len(steps) > 0 {
		r.ConfIndex = c.Last.Index + uint64(len(g.cuts)+len(steps))
		if c.End.Merge != 0 {
			r.ConfIndex++
		}
	}
	return r, nil
}
