package shard

import (
	"bytes"
	"fmt"
	"slices"
	"sort"

	"github.com/skeindb/skein/keyspace"
)

// claim is a span that a range here is about to hold. Until a replica of the range
// is open and says the same, the claim keeps all others out: two logs over one span
// would undo each other's deletes. There is one for each snapshot that is being
// received, each range that is being created, and each child of an applied split
// that is not open yet.
type claim struct {
	id   keyspace.RangeID
	span keyspace.Span
	// generation is that of a snapshot's range, 0 otherwise.
	generation keyspace.Generation
}

// claim keeps the spans for their ranges and returns why it refuses some of them:
// they overlap what another range holds or claims, or an earlier one of the call.
//
// The claims are set before the replicas are looked at, and whoever has claimed
// becomes a holder before it gives its claim up: of two that overlap, one sees the
// other.
func (n *Node) claim(want []claim) (refused map[keyspace.RangeID]error) {
	refused = make(map[keyspace.RangeID]error)
	kept := make([]claim, 0, len(want))
	n.mu.Lock()
	for _, c := range want {
		if err := n.claimedLocked(c); err != nil {
			refused[c.id] = err
			continue
		}
		n.claims[c.id] = c.span
		kept = append(kept, c)
	}
	n.mu.Unlock()
	slices.SortFunc(kept, func(a, b claim) int { return bytes.Compare(a.span.Start, b.span.Start) })
	for _, o := range n.Replicas() {
		o.mu.Lock()
		holds, span := o.holdsLocked(), o.rec.Span
		o.mu.Unlock()
		if !holds {
			continue
		}
		// kept are disjoint and in order: those that overlap follow each other.
		i := sort.Search(len(kept), func(i int) bool {
			return len(kept[i].span.End) == 0 || bytes.Compare(kept[i].span.End, span.Start) > 0
		})
		for ; i < len(kept) && kept[i].span.Overlaps(span); i++ {
			if c := kept[i]; c.id != o.id && refused[c.id] == nil && !o.yields(&c) {
				refused[c.id] = fmt.Errorf("shard: %s for range %s overlaps %s of range %s", c.span, c.id, span, o.id)
				n.unclaim(c.id)
			}
		}
	}
	return refused
}

func (n *Node) claimedLocked(c claim) error {
	for id, have := range n.claims {
		if id != c.id && have.Overlaps(c.span) {
			return fmt.Errorf("shard: %s for range %s overlaps %s, which range %s is about to hold", c.span, c.id, have, id)
		}
	}
	return nil
}

// claimChild keeps the span of a split's child. The parent holds it, so that nobody
// else does.
func (n *Node) claimChild(id keyspace.RangeID, s keyspace.Span) {
	n.mu.Lock()
	n.claims[id] = s
	n.mu.Unlock()
}

// claimMore makes the claim of a range larger, by what its replica holds yet, and says whether
// nobody else claims a part of that: who does, looks at the replicas after it, and will find
// nothing in the way.
func (n *Node) claimMore(id keyspace.RangeID, s keyspace.Span) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.claimedLocked(claim{id: id, span: s}) != nil {
		return false
	}
	n.claims[id] = s
	return true
}

// unclaim gives a claim up.
func (n *Node) unclaim(id keyspace.RangeID) {
	n.mu.Lock()
	delete(n.claims, id)
	n.mu.Unlock()
}
