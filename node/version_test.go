package node

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"go.uber.org/zap"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/internal/simdisk"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/transport"
)

// TestUpgrade: three nodes change from a build of versions 5 and 6 to one of 6 and 7, one after the
// other, and go back until the cluster version is raised.
func TestUpgrade(t *testing.T) {
	older, newer := keyspace.Versions{Oldest: 5, Newest: 6}, keyspace.Versions{Oldest: 6, Newest: 7}
	runs := map[keyspace.NodeID]keyspace.Versions{}
	var regs [4]*prometheus.Registry // by node
	bubble(t, 3, nil, func(o *Options) {
		regs[o.Self] = prometheus.NewRegistry()
		o.Versions, o.UpgradeAfter, o.Registry = older, 5*time.Minute, regs[o.Self]
		if v, ok := runs[o.Self]; ok {
			o.Versions = v
		}
	}, func(r *rig) {
		t := r.t
		writes := func(want keyspace.Version) {
			t.Helper()
			time.Sleep(5 * time.Second)
			for _, n := range r.nodes {
				if n.core == nil {
					continue // it is away
				}
				m, _ := n.core.client.WatchMap()
				if v, _ := n.core.version.Now(); v != want || m.ClusterVersion != want {
					t.Errorf("node %s writes in version %d, and its map says %d; want %d", n.id, v, m.ClusterVersion, want)
				}
				gauge := fmt.Sprintf("# HELP skein_placement_cluster_version Cluster version in this node's copy of the range map, 0 for none.\n"+
					"# TYPE skein_placement_cluster_version gauge\nskein_placement_cluster_version %d\n", want)
				if err := testutil.GatherAndCompare(regs[n.id], strings.NewReader(gauge), "skein_placement_cluster_version"); err != nil {
					t.Error(err)
				}
			}
		}
		change := func(n *rigNode, to keyspace.Versions) {
			t.Helper()
			r.stop(n)
			runs[n.id] = to
			r.start(n)
			r.announce(n)
		}
		r.announce(r.nodes...)
		writes(6) // a new cluster: the newest version that all read
		r.mustPut(r.nodes[0], "a", "1")

		back := func(n *rigNode, wantMay, wantHeld bool) {
			t.Helper()
			for _, linearizable := range []bool{false, true} {
				if may, held, ready, err := (etcdDowngrades{n.core}).GoingBack(t.Context(), linearizable); may != wantMay || held != wantHeld || !ready || err != nil {
					t.Errorf("node %s may go back: %t, held %t, %t, %v", n.id, may, held, ready, err)
				}
			}
		}
		back(r.nodes[0], false, false) // not to the release before the older one
		admin := r.nodes[0].core.Admin()
		var refusal *adminapi.Refusal
		if _, err := admin.Upgrade(t.Context()); !errors.As(err, &refusal) || !strings.Contains(refusal.Reason, "not raised to version 7") {
			t.Fatal(err)
		}
		change(r.nodes[1], newer)
		change(r.nodes[2], newer)
		if _, err := r.nodes[1].core.Admin().Upgrade(t.Context()); !errors.As(err, &refusal) || !strings.Contains(refusal.Reason, "n1") || strings.Contains(refusal.Reason, "n2") {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Minute)
		writes(6)
		change(r.nodes[2], older) // back
		r.mustPut(r.nodes[2], "b", "2")
		change(r.nodes[2], newer)
		change(r.nodes[0], newer)
		if err := r.nodes[0].core.Admin().HoldUpgrade(t.Context(), true); err != nil {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Minute)
		writes(6) // held
		back(r.nodes[0], true, true)
		if err := (etcdDowngrades{r.nodes[0].core}).Hold(t.Context(), false); err != nil {
			t.Fatal(err)
		}
		r.stop(r.nodes[2])
		writes(7) // by itself: all have read it for long enough, node 3 too, which is away
		show, err := r.nodes[0].core.Admin().ClusterVersion(t.Context())
		if err != nil || show.GetVersion() != 7 || show.GetNext() != 0 || len(show.GetNodes()) != 3 {
			t.Fatal(show, err)
		}
		r.start(r.nodes[2])
		r.announce(r.nodes[2])
		writes(7)
		r.mustGet(r.nodes[2], "a", "1")
		back(r.nodes[2], false, false)

		// There is no way back.
		r.stop(r.nodes[2])
		runs[3] = older
		if _, err := Open(t.Context(), r.optionsOf(r.nodes[2])); !errors.Is(err, engine.ErrIdentity) || !strings.Contains(err.Error(), "start a newer build") {
			t.Fatal(err)
		}
	})
}

// reportsTo notes the version of each report to placement.
type reportsTo struct {
	Bus
	note func(version byte)
}

// Call implements Bus.
func (b reportsTo) Call(ctx context.Context, to keyspace.NodeID, m transport.Method, p []byte) ([]byte, error) {
	if m == transport.MethodPlacementReport {
		b.note(p[0])
	}
	return b.Bus.Call(ctx, to, m, p)
}

// TestOldFormUntilTheRaise: while one node's build reads the older version alone, all nodes write the
// older form. Once the cluster version is raised they write the newer one.
func TestOldFormUntilTheRaise(t *testing.T) {
	var mu sync.Mutex
	sent := map[byte]int{}
	older := keyspace.Versions{Oldest: keyspace.VersionFullNodes - 1, Newest: keyspace.VersionFullNodes - 1}
	bubble(t, 3, nil, func(o *Options) {
		if o.Versions = keyspace.OwnVersions(); o.Self == 1 && older != (keyspace.Versions{}) {
			o.Versions = older
		}
		newBus := o.NewBus
		o.NewBus = func(c transport.Config) (Bus, error) {
			b, err := newBus(c)
			return reportsTo{b, func(v byte) {
				mu.Lock()
				defer mu.Unlock()
				sent[v]++
			}}, err
		}
	}, func(r *rig) {
		only := func(want byte) {
			t.Helper()
			time.Sleep(time.Minute)
			mu.Lock()
			clear(sent)
			mu.Unlock()
			time.Sleep(time.Minute)
			mu.Lock()
			defer mu.Unlock()
			if sent[want] == 0 || len(sent) != 1 {
				t.Errorf("reports by version: %v, want version %d alone", sent, want)
			}
		}
		r.announce(r.nodes...)
		only(2)
		r.stop(r.nodes[0])
		older = keyspace.Versions{}
		r.start(r.nodes[0])
		r.announce(r.nodes[0])
		only(2)
		if _, err := r.nodes[0].core.Admin().Upgrade(r.t.Context()); err != nil {
			t.Fatal(err)
		}
		only(3)
	})
}

// announce has nodes publish their rows.
func (r *rig) announce(nodes ...*rigNode) {
	rows := r.founders()
	for _, n := range nodes {
		n.core.Announce(r.t.Context(), rows[n.id-1])
	}
}

// A node writes in a raised version once its directories name that. A loss of power does not undo it, and
// an older build refuses them.
func TestARaisedVersionIsNoted(t *testing.T) {
	disk, me := simdisk.New(), engine.Identity{Cluster: 1, Node: 1}
	older, newer := keyspace.Versions{Oldest: 5, Newest: 6}, keyspace.Versions{Oldest: 5, Newest: 7}
	dirs, err := engine.OpenDir(disk, "data", "wal", me, newer)
	if err != nil {
		t.Fatal(err)
	}
	v := newWrittenVersion(dirs, newer, nil, zap.NewNop())
	before, _ := v.Now()
	if err := v.Raise(7); err != nil {
		t.Fatal(err)
	}
	if now, _ := v.Now(); before == 7 || now != 7 {
		t.Fatalf("it writes in version %d, and in %d before", now, before)
	}
	if _, err := engine.OpenDir(disk.Crash(0, nil), "data", "wal", me, older); !errors.Is(err, engine.ErrIdentity) {
		t.Errorf("an older build opens the directories: %v", err)
	}
	v.close()
	if err := dirs.Close(); err != nil {
		t.Error(err)
	}
}
