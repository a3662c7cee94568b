package placement

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/driver"
	"github.com/skeindb/skein/placement/fsm"
)

// awaitAlarms waits until every node that is up knows these alarms, and no others.
func (r *rig) awaitAlarms(want ...fsm.Alarm) {
	r.t.Helper()
	var bad *rigNode
	for range 1200 {
		bad = nil
		for _, n := range r.nodes {
			if n.up() && !slices.Equal(n.client.KnownAlarms(), want) {
				bad = n
			}
		}
		if bad == nil {
			return
		}
		time.Sleep(50 * time.Millisecond)
	}
	r.t.Fatalf("node %s knows the alarms %v, want %v", bad.id, bad.client.KnownAlarms(), want)
}

// TestAlarms: a client raises and ends alarms at any node, and each node hears of it. From the answer on no
// request gets revisions that was permitted before.
func TestAlarms(t *testing.T) {
	virtually(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
		defer cancel()
		r := accessCluster(ctx, t)
		id := fsm.AlarmID{Type: fsm.AlarmNoSpace, Member: 2}
		waits, stop := context.WithTimeout(ctx, 10*time.Second)
		defer stop()
		if err := r.nodes[0].client.ActivateAlarm(waits, id); !errors.Is(err, kverror.Timeout) || !strings.Contains(err.Error(), "cluster version 4") {
			t.Fatalf("in cluster version 0: %v", err)
		}
		if all, err := r.nodes[3].client.Alarms(ctx); err != nil || len(all) > 0 {
			t.Fatalf("in cluster version 0: %v, %v", all, err)
		}
		// A member that has started does not know when alarms have changed. An older build would not read them.
		for _, n := range r.nodes[:3] {
			n.crash()
			n.start()
		}
		r.leader()
		if err := r.nodes[3].client.SetPeerURLs(ctx, 4, []string{"http://elsewhere"}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		if m, _ := r.nodes[3].client.WatchMap(); m.Alarms != nil || m.Nodes()[3].PeerURLs[0] != "http://elsewhere" {
			t.Fatalf("node 4 was told alarms in cluster version 0: %v", m.Alarms)
		}
		if err := r.nodes[0].client.RaiseVersion(ctx, keyspace.VersionAccess); err != nil {
			t.Fatal(err)
		}
		leader := r.leader()
		for i, n := range r.nodes {
			before := keyspace.PermitAt(leader.service.View().AccessIndex())
			last := n.sequence(0).Current
			if err := n.client.ActivateAlarm(ctx, id); err != nil {
				t.Fatal(err)
			}
			want := []fsm.Alarm{{AlarmID: id, Sticky: true}}
			if known := n.client.KnownAlarms(); !slices.Equal(known, want) {
				t.Errorf("node %s, which answered, knows %v", n.id, known)
			}
			o := r.nodes[(i+1)%len(r.nodes)]
			if all, err := o.client.Alarms(ctx); err != nil || !slices.Equal(all, want) {
				t.Errorf("node %s answers %v, %v", o.id, all, err)
			}
			for _, o := range r.nodes {
				if a := o.permitted(before, 3); !errors.Is(a.Err, kverror.AccessChanged) || a.First != 0 {
					t.Errorf("node %s, permitted before the alarm: %+v", o.id, a)
				}
			}
			if now := o.sequence(0).Current; now != last {
				t.Errorf("revisions up to %d are used, and %d were before", now, last)
			}
			r.awaitAlarms(want...)

			// Its end takes nothing from anybody.
			now := keyspace.PermitAt(leader.service.View().AccessIndex())
			for _, want := range []bool{true, false} {
				if was, err := o.client.DeactivateAlarm(ctx, id); err != nil || was != want {
					t.Fatalf("it was raised: %t, want %t, %v", was, want, err)
				}
			}
			if a := n.permitted(now, 1); a.Err != nil {
				t.Errorf("permitted before the end of the alarm: %+v", a)
			}
			r.awaitAlarms()
		}
		r.stopAllAtOnce()
	})
}

// TestAlarmsAreOfNow: who may lead no more does not say what is raised.
func TestAlarmsAreOfNow(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newRig(t, 1, 3, quiet)
		r.noLease = true
		r.startAll()
		old := r.leader()
		if _, err := old.client.Alarms(t.Context()); err != nil {
			t.Fatal(err)
		}
		r.net.Partition(old.id)
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		if all, err := old.client.Alarms(ctx); err == nil {
			t.Errorf("cut off, it says %v", all)
		}
	})
}

// alarmed is a node's measurer with the alarms of a gauge.
type alarmed struct {
	seat
	g *gauge
}

// Alarms implements driver.Measurer.
func (a alarmed) Alarms() (noSpace, corrupt bool) { return a.g.Alarms() }

// TestObservedAlarms: placement's leader raises what nodes say of themselves, in cluster version 4, and ends
// it with its cause, whoever leads. What a client ends comes back while the cause lasts.
func TestObservedAlarms(t *testing.T) {
	virtually(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Minute)
		defer cancel()
		r := pretendedRig(t, 1, 4)
		r.mover = func() driver.Mover { return r }
		gauges := []*gauge{{}, {}, {}, {}, {}}
		r.measurer = func(n keyspace.NodeID) driver.Measurer { return alarmed{seat{r, n}, gauges[n]} }
		r.startAll()
		noSpace := func(member keyspace.NodeID) fsm.Alarm {
			return fsm.Alarm{AlarmID: fsm.AlarmID{Type: fsm.AlarmNoSpace, Member: member}}
		}
		corrupt := fsm.Alarm{AlarmID: fsm.AlarmID{Type: fsm.AlarmCorrupt, Member: 2}}
		gauges[4].alarms(true, false)
		r.written.Store(uint32(keyspace.VersionAccess))
		time.Sleep(time.Minute)
		r.awaitAlarms() // some nodes may not read the record
		r.publish(ctx)  // the leader raises the version
		r.awaitAlarms(noSpace(4))
		gauges[2].alarms(true, true)
		r.awaitAlarms(noSpace(2), noSpace(4), corrupt)
		if at := r.leader().service.View().AccessIndex(); at != 0 {
			t.Errorf("observed alarms take something from everybody at %d", at)
		}

		// The next leader knows no reports at first, and ends nothing before it does.
		gauges[2].alarms(false, true)
		r.awaitAlarms(noSpace(4), corrupt)
		first := r.leader()
		first.crash()
		r.leader()
		r.awaitAlarms(noSpace(4), corrupt)
		first.start()
		time.Sleep(time.Minute)
		r.awaitAlarms(noSpace(4), corrupt)

		if was, err := r.nodes[0].client.DeactivateAlarm(ctx, corrupt.AlarmID); err != nil || !was {
			t.Fatal(was, err)
		}
		r.awaitAlarms(noSpace(4), corrupt)
		if err := r.nodes[0].client.ActivateAlarm(ctx, noSpace(4).AlarmID); err != nil {
			t.Fatal(err)
		}
		gauges[2].alarms(false, false)
		gauges[4].alarms(false, false)
		sticky := noSpace(4)
		sticky.Sticky = true
		r.awaitAlarms(sticky)
		time.Sleep(time.Minute)
		r.awaitAlarms(sticky)
		r.stopAllAtOnce()
	})
}
