package node

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"go.etcd.io/etcd/client/pkg/v3/types"
	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/config"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement"
	"github.com/skeindb/skein/sim/simdisk"
)

// Two machines join at once under one name and one peer URL: one of them is the node, the
// other one is told what to do, also when it asks again; the first one that asks again, after
// a crash between asking and noting, is the same node.
func TestTwoMachinesThatJoinAsOneNode(t *testing.T) {
	bubble(t, 3, nil, nil, func(r *rig) {
		r.publish(r.nodes...)
		time.Sleep(time.Second)
		twins := [2]*rigNode{r.joiner("n4"), {name: "n4", disk: newMemDisk(simdisk.New())}}
		find := func(n *rigNode, via *rigNode) (*place, error) {
			return r.placerOf(n, via, n.disk).find(r.t.Context())
		}
		var ids [2]keyspace.NodeID
		var errs [2]error
		var wg sync.WaitGroup
		for i, n := range twins {
			wg.Go(func() {
				seat, err := find(n, r.nodes[i])
				if errs[i] = err; err == nil {
					ids[i] = seat.self
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
		if !strings.Contains(errs[1-in].Error(), "another directory has been let in as node") {
			t.Errorf("the other one: %v", errs[1-in])
		}
		for range 2 {
			time.Sleep(2 * time.Second)
			twins[in].disk = twins[in].disk.crash(0, r.rng)
			if seat, err := find(twins[in], r.nodes[2]); err != nil || seat.self != ids[in] {
				t.Fatalf("who was let in asks again: %+v, %v", seat, err)
			}
			if _, err := find(twins[1-in], r.nodes[2]); err == nil || !strings.Contains(err.Error(), "another directory has been let in as node "+ids[in].String()) {
				t.Fatalf("the other one asks again: %v", err)
			}
		}
	})
}

// A member that etcd's MemberAdd has made is that of the first machine that comes, before
// that serves; another one is refused, however it comes.
func TestTwoMachinesThatStartAsOneMember(t *testing.T) {
	bubble(t, 3, nil, nil, func(r *rig) {
		r.publish(r.nodes...)
		if _, _, err := (members{r.nodes[0].core, 1}).MemberAdd(r.t.Context(), []string{peerURL("n4")}, false); err != nil {
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
			if n.ID == first.id && (n.State != placement.NodeUnstarted || n.Instance != first.core.dirs.Identity.Instance) {
				t.Errorf("before it has published itself: %+v", n)
			}
		}
		refused := func(what string, err error) {
			t.Helper()
			if err == nil || !strings.Contains(err.Error(), "another directory has been let in as node "+first.id.String()) {
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
		// Nor does anybody publish itself as the node who was let in by mistake.
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

// Of the others of --initial-cluster not all have heard of the newest members: who has
// decides, and what they all have heard of late may pass.
func TestAnAddedMemberGoesByTheNewestTable(t *testing.T) {
	row := func(id keyspace.NodeID, s placement.NodeState, at ...string) placement.Node {
		return placement.Node{ID: id, Name: "n4", State: s, PeerURLs: at}
	}
	at := peerURL("n4")
	old := toldOf{cluster: 0xc1, version: 20, nodes: []placement.Node{row(4, placement.NodeServing, at)}}
	fresh := toldOf{cluster: 0xc1, version: 30, nodes: []placement.Node{row(4, placement.NodeRemoved), row(5, placement.NodeUnstarted, at)}}
	taken := toldOf{cluster: 0xc1, version: 40, nodes: []placement.Node{row(5, placement.NodeServing, at)}}
	strange := toldOf{cluster: 0xc2, version: 50, nodes: fresh.nodes}
	for _, c := range []struct {
		what string
		// a and b are what the two others say, round by round; nil is silence.
		a, b  []*toldOf
		id    keyspace.NodeID
		error string
	}{
		{what: "both know", a: []*toldOf{&fresh}, b: []*toldOf{&fresh}, id: 5},
		{what: "the first is behind", a: []*toldOf{&old}, b: []*toldOf{&fresh}, id: 5},
		{what: "the second is behind", a: []*toldOf{&fresh}, b: []*toldOf{&old}, id: 5},
		{what: "the one that answers is behind", a: []*toldOf{&old, &old, &old, &fresh}, b: []*toldOf{nil}, id: 5},
		{what: "the one that knows comes late", a: []*toldOf{&old}, b: []*toldOf{nil, nil, &fresh}, id: 5},
		{what: "it has started", a: []*toldOf{&old}, b: []*toldOf{&taken}, error: "has run before"},
		{what: "nobody knows it", a: []*toldOf{{cluster: 0xc1}}, b: []*toldOf{nil}, error: "etcdctl member add n4 --peer-urls=" + at},
		{what: "two clusters, then one", a: []*toldOf{&fresh}, b: []*toldOf{&strange, nil}, id: 5},
	} {
		t.Run(c.what, func(t *testing.T) {
			bubble(t, 1, nil, nil, func(r *rig) {
				p := r.placerOf(&rigNode{name: "n4"}, r.nodes[0], newMemDisk(simdisk.New()))
				p.cfg.Join, p.cfg.InitialClusterState = nil, config.StateExisting
				p.clock, p.log = clock.Virtual(), zap.NewNop()
				p.cfg.InitialCluster = map[string]types.URLs{"n4": p.cfg.AdvertisePeerURLs, "a": urls(t, peerURL("a")), "b": urls(t, peerURL("b"))}
				says := map[string][]*toldOf{"a:2380": c.a, "b:2380": c.b}
				var mu sync.Mutex
				p.tell = func(_ context.Context, addr string) ([]byte, error) {
					mu.Lock()
					defer mu.Unlock()
					s := says[addr]
					if len(s) > 1 {
						says[addr] = s[1:]
					}
					if s[0] == nil {
						return nil, errors.New("it does not answer")
					}
					return encodeTold(s[0]), nil
				}
				j, err := p.added(r.t.Context(), engine.Identity{Instance: 7})
				switch {
				case c.error != "" && (err == nil || !strings.Contains(err.Error(), c.error)):
					t.Errorf("%+v, %v; want %s", j, err, c.error)
				case c.error == "" && (err != nil || j.self != c.id):
					t.Errorf("%+v, %v; want node %s", j, err, c.id)
				}
			})
		})
	}
}

func urls(t *testing.T, text string) types.URLs {
	t.Helper()
	us, err := types.NewURLs([]string{text})
	if err != nil {
		t.Fatal(err)
	}
	return us
}
