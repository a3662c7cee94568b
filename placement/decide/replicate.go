package decide

import (
	"fmt"

	"github.com/skeindb/skein/keyspace"
)

// Replication is what a replication factor means for the ranges as they are.
type Replication struct {
	Ranges int
	// Added and Removed are voters, over all ranges, and Bytes what is copied for those that
	// are added.
	Added, Removed int
	Bytes          int64
	// Waiting are ranges with a replica on a node that is silent: they change when it is heard
	// again, or counts as lost.
	Waiting int
	// Zones counts the zones with nodes that take replicas.
	Zones int
}

// ReplicationRefusal says why ranges cannot have so many voters, and what to do.
type ReplicationRefusal struct {
	Factor  int
	Why, Do string
}

// Error returns the refusal in one sentence.
func (r *ReplicationRefusal) Error() string {
	return fmt.Sprintf("ranges cannot have %d voters: %s; %s", r.Factor, r.Why, r.Do)
}

// CanReplicate says what a replication factor costs, or returns a *ReplicationRefusal if the
// change could not be completed. The replication factor in the settings plays no part.
func (c *Cluster) CanReplicate(factor int) (Replication, error) {
	c.reindex()
	refuse := func(why, do string, args ...any) (Replication, error) {
		return Replication{}, &ReplicationRefusal{factor, why, fmt.Sprintf(do, args...)}
	}
	if factor > c.sum.live {
		return refuse(fmt.Sprintf("they need as many nodes, and %d take replicas", c.sum.live), "%s", c.missing(factor-c.sum.live, nil))
	}
	var out Replication
	var stopped []keyspace.RangeID
	var homeless *rng
	for _, r := range c.all {
		t := c.count(r)
		out.Ranges++
		if t.spare < 0 {
			stopped = append(stopped, r.Descriptor.Range)
		}
		if t.silent > 0 {
			out.Waiting++
		}
		if add := factor - t.voters; add > 0 {
			out.Added += add
			out.Bytes += int64(add) * r.Bytes
			if homeless == nil && !c.houses(r, add) {
				homeless = r
			}
		} else {
			out.Removed -= add
		}
	}
	for _, z := range c.zones {
		if z.fill.Len() > 0 {
			out.Zones++
		}
	}
	switch room := c.roomWithout(nil); {
	case len(stopped) > 0:
		return refuse("without a quorum nothing can be changed about "+named(stopped), "bring back its nodes first")
	case out.Bytes > room:
		return refuse(fmt.Sprintf("%d MiB are to be copied, and the nodes have room for %d MiB", out.Bytes>>20, room>>20)+c.declining(nil), "%s", c.orMemory("add a node, or delete data", nil))
	case homeless != nil:
		return refuse(fmt.Sprintf("too few nodes without a replica of range %s have room for its %d MiB", homeless.Descriptor.Range, homeless.Bytes>>20)+c.declining(nil),
			"%s", c.orMemory("add a node, or free space", nil))
	}
	return out, nil
}

// houses says whether so many nodes without a replica of the range have room for one. The
// emptiest come first, so that few are looked at.
func (c *Cluster) houses(r *rng, more int) bool {
	for _, z := range c.zones {
		z.fill.Ascend(func(n *node) bool {
			if r.seatOf(n.ID) == nil && c.fits(n, c.cost(r)) {
				more--
			}
			return more > 0
		})
	}
	return more <= 0
}
