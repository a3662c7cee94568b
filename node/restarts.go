package node

import (
	"slices"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
)

// maxRestarts bounds the restarts of a node that are remembered.
const maxRestarts = 100

// restarts are those of the other nodes that this one has noticed lately. A boot that begins and ends between two looks is not
// noticed, so there may have been more.
type restarts map[keyspace.NodeID]*heardBoots

type heardBoots struct {
	boot keyspace.BootID
	// at is when further boots were noticed, ascending.
	at []clock.Time
}

// see takes in which boot each node was last heard, 0 for never. Nodes that are not among them are forgotten.
func (r *restarts) see(boots map[keyspace.NodeID]keyspace.BootID, now clock.Time) {
	if *r == nil {
		*r = restarts{}
	}
	for id, boot := range boots {
		h := (*r)[id]
		switch {
		case boot == 0:
		case h == nil:
			(*r)[id] = &heardBoots{boot: boot} // how often it has started before is not known
		case h.boot != boot:
			h.boot, h.at = boot, append(h.at, now)
			h.at = h.at[max(0, len(h.at)-maxRestarts):]
		}
	}
	for id := range *r {
		if _, is := boots[id]; !is {
			delete(*r, id)
		}
	}
}

// lately counts the restarts within adminapi.RestartsKept of the nodes that had some.
func (r *restarts) lately(now clock.Time) (all map[keyspace.NodeID]int) {
	for id, h := range *r {
		h.at = slices.DeleteFunc(h.at, func(at clock.Time) bool { return now.Sub(at) >= adminapi.RestartsKept })
		if len(h.at) == 0 {
			continue
		}
		if all == nil {
			all = map[keyspace.NodeID]int{}
		}
		all[id] = len(h.at)
	}
	return all
}
