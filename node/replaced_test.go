package node

import (
	"fmt"
	"testing"
	"time"

	"github.com/skeindb/skein/keyspace"
)

// A node need not hear nodes that were removed, or members that have not started. Otherwise every node
// would be isolated for ever once enough of them had been replaced.
func TestReplacedNodesDoNotIsolateTheOthers(t *testing.T) {
	bubble(t, 3, borders(2), shortLog, func(r *rig) {
		r.publish(r.nodes...)
		for i := range 3 {
			n := r.joiner(fmt.Sprintf("n%d", i+4))
			if err := r.join(r.t.Context(), n, r.nodes[i+1]); err != nil {
				r.t.Fatal(err)
			}
			r.announced(n)
			time.Sleep(2 * rigElection) // until all hear it
			r.removed(5*time.Minute, n, r.nodes[i].id)
			r.crash(r.nodes[i])
		}
		live := r.nodes[3:]
		for i := range 3 {
			if _, _, err := live[0].core.Members(1, true).MemberAdd(r.t.Context(), []string{peerURL(fmt.Sprint("later", i))}, false); err != nil {
				r.t.Fatal(err)
			}
			time.Sleep(2 * time.Second) // ids are made of the second
		}
		isolated := func() (ids []keyspace.NodeID) {
			time.Sleep(5 * rigElection)
			for _, n := range live {
				if !n.core.host.Connected(n.id) {
					ids = append(ids, n.id)
				}
			}
			return ids
		}
		if got := isolated(); len(got) > 0 {
			r.t.Fatalf("nodes %v hear all others, and are isolated", got)
		}
		// They still notice that they hear nobody, and after a restart too.
		cut := live[2]
		r.net.Partition(cut.id)
		if got := isolated(); len(got) != 1 || got[0] != cut.id {
			r.t.Errorf("node %s is cut off, and %v are isolated", cut.id, got)
		}
		r.net.HealAll()
		if got := isolated(); len(got) > 0 {
			r.t.Errorf("after that nodes %v are isolated", got)
		}
		r.stop(live...)
		r.start(live...)
		r.net.Partition(cut.id)
		if got := isolated(); len(got) != 1 || got[0] != cut.id {
			r.t.Errorf("node %s is cut off after its start, and %v are isolated", cut.id, got)
		}
		r.net.HealAll()
		r.spread(live[0], 2, "v")
	})
}
