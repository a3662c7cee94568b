package join

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"go.etcd.io/etcd/client/pkg/v3/types"
	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/config"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/fsm"
)

// Not every other node of --initial-cluster has heard of the newest members. The ones
// that have decide, and members that all of them heard of late may pass.
func TestAnAddedMemberGoesByTheNewestTable(t *testing.T) {
	row := func(id keyspace.NodeID, s fsm.NodeState, at ...string) fsm.Node {
		return fsm.Node{ID: id, Name: "n4", State: s, PeerURLs: at}
	}
	at := "http://n4:2380"
	old := peerTable{cluster: 0xc1, version: 20, nodes: []fsm.Node{row(4, fsm.NodeServing, at)}}
	fresh := peerTable{cluster: 0xc1, version: 30, nodes: []fsm.Node{row(4, fsm.NodeRemoved), row(5, fsm.NodeUnstarted, at)}}
	taken := peerTable{cluster: 0xc1, version: 40, nodes: []fsm.Node{row(5, fsm.NodeServing, at)}}
	strange := peerTable{cluster: 0xc2, version: 50, nodes: fresh.nodes}
	for _, c := range []struct {
		what string
		// a and b are what the two others say, round by round; nil is silence.
		a, b  []*peerTable
		id    keyspace.NodeID
		error string
	}{
		{what: "both know", a: []*peerTable{&fresh}, b: []*peerTable{&fresh}, id: 5},
		{what: "the first is behind", a: []*peerTable{&old}, b: []*peerTable{&fresh}, id: 5},
		{what: "the second is behind", a: []*peerTable{&fresh}, b: []*peerTable{&old}, id: 5},
		{what: "the one that answers is behind", a: []*peerTable{&old, &old, &old, &fresh}, b: []*peerTable{nil}, id: 5},
		{what: "the one that knows comes late", a: []*peerTable{&old}, b: []*peerTable{nil, nil, &fresh}, id: 5},
		{what: "it has started", a: []*peerTable{&old}, b: []*peerTable{&taken}, error: "has run before"},
		{what: "nobody knows it", a: []*peerTable{{cluster: 0xc1}}, b: []*peerTable{nil}, error: "etcdctl member add n4 --peer-urls=" + at},
		{what: "two clusters, then one", a: []*peerTable{&fresh}, b: []*peerTable{&strange, nil}, id: 5},
	} {
		t.Run(c.what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				cfg := config.Default()
				cfg.Name, cfg.InitialClusterState, cfg.AdvertisePeerURLs = "n4", config.StateExisting, urls(t, at)
				cfg.InitialCluster = map[string]types.URLs{"n4": cfg.AdvertisePeerURLs, "a": urls(t, "http://a:2380"), "b": urls(t, "http://b:2380")}
				says := map[string][]*peerTable{"a:2380": c.a, "b:2380": c.b}
				var mu sync.Mutex
				tell := func(_ context.Context, addr string) ([]byte, error) {
					mu.Lock()
					defer mu.Unlock()
					s := says[addr]
					if len(s) > 1 {
						says[addr] = s[1:]
					}
					if s[0] == nil {
						return nil, errors.New("it does not answer")
					}
					return EncodePeerTable(s[0].cluster, s[0].version, s[0].nodes), nil
				}
				j := &Joiner{Config: cfg, Clock: clock.Virtual(), Logger: zap.NewNop(), PeerTable: tell}
				a, err := j.askExisting(t.Context(), engine.Identity{Instance: 7})
				switch {
				case c.error != "" && (err == nil || !strings.Contains(err.Error(), c.error)):
					t.Errorf("%+v, %v; want %s", a, err, c.error)
				case c.error == "" && (err != nil || a.self != c.id):
					t.Errorf("%+v, %v; want node %s", a, err, c.id)
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

// FuzzPeerTable: what is decoded is encoded to the same again, and nothing else is decoded.
func FuzzPeerTable(f *testing.F) {
	f.Add(EncodePeerTable(0xc1, 12, []fsm.Node{{ID: 1, Name: "n1", PeerURLs: []string{"http://n1:2380"}, Instance: 7}}))
	f.Fuzz(func(t *testing.T, b []byte) {
		table, err := decodePeerTable(b)
		if err != nil {
			return
		}
		again, err := decodePeerTable(EncodePeerTable(table.cluster, table.version, table.nodes))
		same := func(x, y fsm.Node) bool { return x.Equal(&y) }
		if err != nil || again.cluster != table.cluster || again.version != table.version || !slices.EqualFunc(again.nodes, table.nodes, same) {
			t.Fatalf("%x: %+v, %v", b, again, err)
		}
	})
}
