package node

import (
	"fmt"
	"strings"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/etcdapi"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/fsm"
)

// alarmsOf prints alarms, sticky ones with a mark.
func alarmsOf(all []etcdapi.Alarm) string {
	var out []string
	for _, a := range all {
		mark := ""
		if a.Sticky {
			mark = "!"
		}
		out = append(out, fmt.Sprintf("%s %s%s", a.Member, a.Type, mark))
	}
	return strings.Join(out, ", ")
}

// waitAlarms waits until each of the nodes knows and lists these alarms.
func (r *rig) waitAlarms(what, want string, nodes ...*rigNode) {
	r.t.Helper()
	for _, n := range nodes {
		a := etcdAlarms{n.core}
		r.wait(20*time.Second, fmt.Sprintf("%s: node %s knows %q", what, n.id, want), func() bool { return alarmsOf(a.Known()) == want })
		if all, err := a.List(r.t.Context()); err != nil || alarmsOf(all) != want {
			r.t.Errorf("%s: node %s lists %q, %v, want %q", what, n.id, alarmsOf(all), err, want)
		}
	}
}

// TestAlarmsOfAllMembers: each member lists the alarms of all. What a member observes of itself it lists at
// once, and the others soon. A client's stays. Trap 109: the alarms of a removed member go with it.
func TestAlarmsOfAllMembers(t *testing.T) {
	bubble(t, 4, borders(spaceRanges), shortLog, func(r *rig) {
		full, gone, other := r.nodes[0], r.nodes[3], r.nodes[1]
		if all, err := (etcdAlarms{full.core}).List(r.t.Context()); err != nil || len(all) > 0 {
			r.t.Fatalf("before there is a cluster version: %v, %v", all, err)
		}
		r.publish(r.nodes...)
		r.wait(time.Minute, "the cluster has a version", func() bool {
			m, _ := full.core.client.WatchMap()
			return m.ClusterVersion >= keyspace.VersionAccess && full.core.version.written() >= keyspace.VersionAccess
		})
		r.spread(full, spaceRanges, "before")
		mine := r.ledBy(full, spaceRanges)
		full.disk.fill(0)
		r.waitFull(full, true)
		r.waitAlarms("a full disk", "1 NOSPACE", r.nodes...)
		// It refuses only what the node leads.
		_, err := other.put(r.t.Context(), keyOf(mine), "refused")
		r.wantKind("a put led by the full node", err, kverror.NoSpace)
		r.mustPut(full, keyOf(r.ledBy(other, spaceRanges)), "elsewhere")

		// To end what lasts has no use: it comes back.
		if was, err := (etcdAlarms{other.core}).Deactivate(r.t.Context(), pb.AlarmType_NOSPACE, full.id); err != nil || !was {
			r.t.Fatal(was, err)
		}
		r.waitAlarms("ended while its cause lasts", "1 NOSPACE", r.nodes...)

		// A client's over it stays when the cause is gone.
		for _, id := range []keyspace.NodeID{full.id, gone.id, 77} {
			if err := (etcdAlarms{other.core}).Activate(r.t.Context(), pb.AlarmType_NOSPACE, id); err != nil {
				r.t.Fatal(err)
			}
			if n := len((etcdAlarms{other.core}).Sticky()); n == 0 {
				r.t.Errorf("the member that has raised it does not know it")
			}
		}
		r.waitAlarms("raised by a client", "1 NOSPACE!, 4 NOSPACE!, 4d NOSPACE!", r.nodes...)
		full.disk.free()
		r.wait(15*time.Second, "there is room", func() bool { return !full.core.full() })
		time.Sleep(time.Minute)
		r.waitAlarms("there is room", "1 NOSPACE!, 4 NOSPACE!, 4d NOSPACE!", r.nodes...)

		if err := other.core.client.LeaveNode(r.t.Context(), gone.id, fsm.NodeServing); err != nil {
			r.t.Fatal(err)
		}
		left := r.nodes[:3]
		r.wait(5*time.Minute, "it is removed", func() bool {
			m, _ := other.core.client.WatchMap()
			n, _ := m.Node(gone.id)
			return n.State == fsm.NodeRemoved
		})
		r.waitAlarms("a member is removed", "1 NOSPACE!, 4d NOSPACE!", left...)
		for _, id := range []keyspace.NodeID{full.id, 77} {
			for _, want := range []bool{true, false} {
				if was, err := (etcdAlarms{other.core}).Deactivate(r.t.Context(), pb.AlarmType_NOSPACE, id); err != nil || was != want {
					r.t.Errorf("alarm of member %s was raised: %t, want %t, %v", id, was, want, err)
				}
			}
		}
		r.waitAlarms("all are ended", "", left...)

		// Its own word is newer than the record.
		full.disk.fill(0)
		r.waitFull(full, true)
		r.waitAlarms("a full disk again", "1 NOSPACE", left...)
		full.disk.free()
		r.waitFull(full, false)
		if got := alarmsOf((etcdAlarms{other.core}).Known()); got != "1 NOSPACE" {
			r.t.Errorf("the record is gone before the report: %q", got)
		}
		r.waitAlarms("there is room again", "", left...)
	})
}
