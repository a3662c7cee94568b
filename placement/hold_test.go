package placement

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/driver"
	"github.com/skeindb/skein/placement/fsm"
)

// awaitHeld waits until the lowest held revision is that on every node that is up.
func (r *rig) awaitHeld(want keyspace.Revision) {
	r.t.Helper()
	held := func(n *rigNode) keyspace.Revision {
		m, _ := n.client.WatchMap()
		if m == nil {
			return -1
		}
		return m.Holds.Lowest()
	}
	for range 1200 {
		bad := 0
		for _, n := range r.nodes {
			if n.up() && held(n) != want {
				bad++
			}
		}
		if bad == 0 {
			return
		}
		time.Sleep(50 * time.Millisecond)
	}
	for _, n := range r.nodes {
		r.t.Errorf("node %s: held from %d, want %d", n.id, held(n), want)
	}
	r.t.FailNow()
}

// TestHolds: any node makes, renews, moves up and ends holds, and each node hears of them. One that nobody renews ends
// by placement's leader, which may be another one by then. An older build would not read them.
func TestHolds(t *testing.T) {
	virtually(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Hour)
		defer cancel()
		r := pretendedRig(t, 1, 4)
		r.mover = func() driver.Mover { return r }
		r.startAll()
		r.leader()
		r.written.Store(uint32(keyspace.VersionData))
		put := fsm.PutHold{Create: true, ID: 7, Kind: "backup", Owner: "me", Life: time.Hour}
		waits, stop := context.WithTimeout(ctx, 10*time.Second)
		defer stop()
		if _, err := r.nodes[0].client.PutHold(waits, put); !errors.Is(err, kverror.Timeout) || !strings.Contains(err.Error(), "cluster version 4") {
			t.Fatalf("in cluster version 0: %v", err)
		}
		r.publish(ctx) // the leader raises the version
		r.awaitHeld(keyspace.MaxRevision)
		n := r.nodes[3]
		last := n.sequence(20).Current
		if _, err := n.client.Compact(ctx, last-10); err != nil {
			t.Fatal(err)
		}
		h, err := n.client.PutHold(ctx, put)
		if err != nil || h.Revision != last-10 || h.Kind != "backup" || h.Owner != "me" || h.Made == 0 || h.Expires != h.Made+fsm.UnixMillis(time.Hour/time.Millisecond) {
			t.Fatalf("%+v, %v", h, err)
		}
		if known := n.client.KnownHolds(); len(known) != 1 || known[0] != h {
			t.Errorf("node %s, which answered, knows %v", n.id, known)
		}
		synctest.Wait() // the copy of the map counts before its metrics do
		if count, made := testutil.ToFloat64(n.client.o.Metrics.Holds), testutil.ToFloat64(n.client.o.Metrics.OldestHold); count != 1 || made != float64(h.Made)/1000 {
			t.Errorf("the metrics count %v holds, the oldest of %v", count, made)
		}
		r.awaitHeld(last - 10)
		if _, err := r.nodes[1].client.PutHold(ctx, fsm.PutHold{Create: true, ID: 8, Revision: last - 11, Life: time.Hour}); !errors.Is(err, kverror.Compacted) {
			t.Errorf("what is compacted is held: %v", err)
		}
		if _, err := r.nodes[1].client.PutHold(ctx, fsm.PutHold{ID: 8, Life: time.Hour}); !errors.Is(err, kverror.HoldEnded) {
			t.Errorf("a hold that was never made is renewed: %v", err)
		}
		time.Sleep(50 * time.Minute)
		if _, err := r.nodes[1].client.PutHold(ctx, fsm.PutHold{ID: 7, Revision: last - 5, Life: time.Hour}); err != nil {
			t.Fatal(err)
		}
		leader := r.leader()
		leader.crash()
		r.leader()
		leader.start()
		time.Sleep(50 * time.Minute)
		r.awaitHeld(last - 5)
		time.Sleep(11 * time.Minute)
		r.awaitHeld(keyspace.MaxRevision)
		if _, err := n.client.PutHold(ctx, put); err != nil {
			t.Fatal(err)
		}
		r.awaitHeld(last - 10)
		for range 2 {
			if err := r.nodes[2].client.EndHold(ctx, 7); err != nil {
				t.Error(err)
			}
		}
		r.awaitHeld(keyspace.MaxRevision)
		r.stopAllAtOnce()
	})
}
