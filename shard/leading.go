package shard

import "github.com/skeindb/skein/keyspace"

// Leading is a range that this node leads.
type Leading struct {
	Range keyspace.RangeID
	// Term is the raft term in which it leads.
	Term uint64
	// Bytes is what Summary says of it.
	Bytes int64
}

// Leading returns the ranges that this node leads and serves.
func (n *Node) Leading() []Leading {
	var l []Leading
	for _, r := range n.Replicas() {
		r.mu.Lock()
		lead, span := r.lead, r.rec.span
		r.mu.Unlock()
		if lead != nil {
			l = append(l, Leading{Range: r.id, Term: lead.term, Bytes: n.spanBytes(span)})
		}
	}
	return l
}
