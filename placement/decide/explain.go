package decide

import (
	"fmt"

	"github.com/skeindb/skein/keyspace"
)

// Explain says what the range needs and what holds it up, in words for the operator.
func (c *Cluster) Explain(id keyspace.RangeID) string {
	r, ok := c.ranges[id]
	if !ok {
		return fmt.Sprintf("range %s is not known", id)
	}
	if r.op != nil {
		return fmt.Sprintf("under way: %s, since %s", r.op.String(), r.op.Why)
	}
	c.reindex()
	if t := c.count(r); t.spare < 0 {
		why := fmt.Sprintf("it has lost its quorum: %d of its replicas are silent", t.silent)
		switch k := len(r.Quarantined); {
		case k == t.silent:
			return why + ", all of them in quarantine; only serializable reads at the others are answered yet"
		case k > 0:
			why += fmt.Sprintf(", %d of them in quarantine", k)
		}
		return why + "; bring a node back"
	}
	c.review(r)
	if r.need == None {
		return c.explainRest(r)
	}
	if r.need == Cold {
		return "needed: cold; it is merged with its right neighbour step by step"
	}
	_, h := c.act(r)
	text := fmt.Sprintf("needed: %s; %s", r.need, h)
	if h == holdNodes {
		text += c.declining(nil)
	}
	return text
}

// explainRest says why nothing is done for a range that one could expect something of.
func (c *Cluster) explainRest(r *rng) string {
	if t := c.count(r); t.silent > 0 {
		return "it waits for a silent node, which is heard again or counts as lost"
	}
	if err := c.mergeable(r); err != nil {
		return "nothing is needed; it is not merged: " + err.Error()
	}
	return "nothing is needed"
}

// Pending returns how many ranges wait with each need.
func (c *Cluster) Pending() map[Reason]int {
	out := map[Reason]int{}
	for need := range c.queues {
		if k := len(c.queues[need].items); k > 0 {
			out[Reason(need)] = k
		}
	}
	return out
}

// Health counts, over all ranges, those that have fewer live voters than they should have
// and those that have no quorum. It looks at every range.
func (c *Cluster) Health() (under, stopped int) {
	for _, r := range c.all {
		t := c.count(r)
		if t.spare < 0 {
			stopped++
		}
		live := 0
		for _, is := range r.Descriptor.Replicas {
			if n := c.nodes[is.Node]; n != nil && n.live() && r.votes(n) {
				live++
			}
		}
		if live < c.settings.ReplicationFactor {
			under++
		}
	}
	return under, stopped
}
