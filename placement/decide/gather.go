package decide

import "fmt"

// gatherLeast is how many puts and reads a second a range needs for its lead to go to the
// sequencer's node. With half of that it stays there.
const gatherLeast = 20

// gatherLeaders gives the node with the sequencer, while it has little to do, the leads of
// ranges in use. It needs a voter of them; nothing is copied for this. A lead that somebody has
// given to another node stays there for a while, and so does one that had to move. One that only makes leads
// even goes at once: a new cluster's are evened in its first minutes, before it has any load.
func (c *Cluster) gatherLeaders() {
	to := c.nodes[c.gatherTo]
	if to == nil {
		return
	}
	var found []*rng
	for r := range c.some(to) {
		from := c.nodes[r.Leader]
		free := r.Leader == r.evened || c.rested(r.ledAt) && c.rested(r.turnedAt)
		if from != nil && from != to && from.live() && c.gathered(r) && free && c.calm(r) {
			found = append(found, r)
		}
	}
	for _, r := range found {
		from := c.nodes[r.Leader]
		if c.underWay >= c.settings.MaxOperations || from.tasks >= c.settings.NodeTasks {
			continue
		}
		c.transfer(r, from, to, Load, fmt.Sprintf("the range has %d puts and reads a second, and node %s, which has the sequencer, has little to do",
			r.Load, to.ID))
	}
}
