package node

import (
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/skeindb/skein/internal/simdisk"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/node/join"
	"github.com/skeindb/skein/placement/fsm"
)

// Two machines join at once under one name and one peer URL. One becomes the node, and the
// other gets advice, even if it asks again. The first one may crash between the answer and
// its note, ask again, and is the same node.
func TestTwoMachinesThatJoinAsOneNode(t *testing.T) {
	bubble(t, 3, nil, nil, func(r *rig) {
		r.publish(r.nodes...)
		time.Sleep(time.Second)
		twins := [2]*rigNode{r.joiner("n4"), {name: "n4", disk: newMemDisk(simdisk.New())}}
		find := func(n *rigNode, via *rigNode) (*join.Membership, error) {
			return r.joinerOf(n, via, n.disk).Find(r.t.Context())
		}
		var ids [2]keyspace.NodeID
		var errs [2]error
		var wg sync.WaitGroup
		for i, n := range twins {
			wg.Go(func() {
				seat, err := find(n, r.nodes[i])
				if errs[i] = err; err == nil {
					ids[i] = seat.Self
				}
			})
		}
		wg.Wait()
		if (errs[0] == nil) == (errs[1] == nil) {
			t.Fatalf("node %s, %v; node %s, %v", ids[0], errs[0], ids[1], errs[1])
		}
		in := 0
		if errs[0] != nil {
			in = 1
		}
		if !strings.Contains(errs[1-in].Error(), "another directory has been admitted as node") {
			t.Errorf("the other one: %v", errs[1-in])
		}
		for range 2 {
			time.Sleep(2 * time.Second)
			twins[in].disk = twins[in].disk.crash(0, r.rng)
			if seat, err := find(twins[in], r.nodes[2]); err != nil || seat.Self != ids[in] {
				t.Fatalf("the admitted one asks again: %+v, %v", seat, err)
			}
			if _, err := find(twins[1-in], r.nodes[2]); err == nil || !strings.Contains(err.Error(), "another directory has been admitted as node "+ids[in].String()) {
				t.Fatalf("the other one asks again: %v", err)
			}
		}
	})
}

// A member of etcd's MemberAdd belongs to the first machine that comes, even before that
// serves. Any other machine is refused.
func TestTwoMachinesThatStartAsOneMember(t *testing.T) {
	bubble(t, 3, nil, nil, func(r *rig) {
		r.publish(r.nodes...)
		if _, _, err := r.nodes[0].core.Members(1, true).MemberAdd(r.t.Context(), []string{peerURL("n4")}, false); err != nil {
			t.Fatal(err)
		}
		others := map[string]*rigNode{"a": r.nodes[0], "b": r.nodes[1]}
		first, second := r.joiner("n4"), r.joiner("n4")
		if err := r.joinAdded(r.t.Context(), first, others); err != nil {
			t.Fatal(err)
		}
		rows, err := r.nodes[0].core.client.NodeTable(r.t.Context(), true)
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range rows {
			if n.ID == first.id && (n.State != fsm.NodeUnstarted || n.Instance != first.core.dirs.Identity.Instance) {
				t.Errorf("before it has published itself: %+v", n)
			}
		}
		refused := func(what string, err error) {
			t.Helper()
			if err == nil || !strings.Contains(err.Error(), "another directory has been admitted as node "+first.id.String()) {
				t.Errorf("%s: %v", what, err)
			}
		}
		r.crash(first)
		refused("another machine", r.joinAdded(r.t.Context(), second, others))
		refused("by --join", r.join(r.t.Context(), second, r.nodes[0]))
		// By an answer of before.
		second.id, second.seat = first.id, first.seat
		_, err = Open(r.t.Context(), r.optionsOf(second))
		refused("by what it was told before", err)
		if err := r.joinAdded(r.t.Context(), first, others); err != nil {
			t.Fatal(err)
		}
		r.announced(first)
		r.mustPut(first, "k", "v")
		// A machine that was admitted by mistake cannot publish itself as the node either.
		first.core.dirs.Identity.Instance++
		r.announced(first)
		select {
		case <-first.core.Fatal():
			refused("by publishing itself", first.core.Err())
		case <-time.After(time.Minute):
			t.Error("it goes on")
		}
		r.crash(first)
	})
}
