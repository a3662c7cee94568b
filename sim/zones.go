package sim

import (
	"fmt"
	"sync"
	"time"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/fsm"
)

// zoneEvery is how often the places of replicas are checked.
const zoneEvery = 20 * time.Millisecond

// zoned is the observation of a range: its newest configuration, and whether its voters
// have been in different zones.
type zoned struct {
	confIndex uint64
	apart     bool
}

// zoneLoop checks all the time where the replicas of ranges are, by the maps of all
// nodes. Once a range's replicas are in different zones, nothing may put two of them
// into one. No node is lost for good, and the operator moves within zones. Before a merge
// the replicas of both ranges gather by another way or wait.
func (n *nemesis) zoneLoop(stop <-chan struct{}, wg *sync.WaitGroup) {
	if n.c.cfg.Zones == 0 {
		return
	}
	wg.Go(func() {
		seen := map[keyspace.RangeID]zoned{}
		for ; !closed(stop) && !n.broken(); n.c.sleep(zoneEvery) {
			for _, r := range n.c.runs() {
				m, _ := r.core.Placement().WatchMap()
				if m == nil {
					continue
				}
				for _, d := range m.Descriptors() {
					n.watchZones(seen, &d)
				}
			}
		}
	})
}

func (n *nemesis) watchZones(seen map[keyspace.RangeID]zoned, d *keyspace.Descriptor) {
	was, ok := seen[d.Range]
	if ok && d.ConfIndex <= was.confIndex {
		return
	}
	err := n.c.inZones(d)
	if err != nil && was.apart {
		n.found("zones: %v", err)
	}
	seen[d.Range] = zoned{d.ConfIndex, was.apart || err == nil}
}

// inZones says which of a range's voters are in one zone.
func (c *cluster) inZones(d *keyspace.Descriptor) error {
	in := map[string]keyspace.NodeID{}
	for _, r := range d.Replicas {
		m := c.machine(r.Node)
		if m == nil || m.zone == "" || r.Role != keyspace.RoleVoter && r.Role != keyspace.RoleVoterIncoming {
			continue
		}
		if o, twice := in[m.zone]; twice {
			return fmt.Errorf("range %s has voters on nodes %s and %s, both in zone %s: %v", d.Range, o, r.Node, m.zone, d.Replicas)
		}
		in[m.zone] = r.Node
	}
	return nil
}

// attributes are the operator's attributes of the machine's node.
func (m *machine) attributes() []fsm.Attribute {
	if m.zone == "" {
		return nil
	}
	return []fsm.Attribute{{Key: "zone", Value: m.zone}}
}
