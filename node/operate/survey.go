package operate

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/fsm"
)

// maxOutageIDs bounds the ids of an outage that are listed.
const maxOutageIDs = 16

// Survey implements adminapi.Backend. One view of all nodes gives it nearly everything.
func (a *Admin) Survey(ctx context.Context) (*adminpb.SurveyResponse, error) {
	v, err := a.completeView(ctx)
	if err != nil {
		return nil, err
	}
	if m, _ := a.o.Placement.WatchMap(); m != nil && len(v.placement.Replicas) == 0 {
		v.placement.Replicas = m.PlacementGroup().Replicas // none of them answers
	}
	out := &adminpb.SurveyResponse{
		UnixMs: a.o.Clock.Wall().UnixMilli(), Stale: v.stale, Ranges: int64(len(v.ranges)), Missing: int64(len(v.missing)),
		Outages: v.outages(), Alarms: a.alarms(v), Replication: a.replicationOf(v), Versions: a.versions(v),
	}
	for i := range v.nodes {
		n := &v.nodes[i]
		out.Nodes = append(out.Nodes, v.nodeSurvey(n))
		if n.ID == a.o.Self {
			out.Asked = n.Name
		}
	}
	for i := range v.ranges {
		d := &v.ranges[i]
		switch {
		case v.stopped[d.Range]:
		case v.led[i].by == 0:
			out.Leaderless++
		default:
			v.addLoad(out, d.Range, &v.led[i])
		}
	}
	for _, o := range v.operations {
		out.Operations = append(out.Operations, operationRow(&o, v.byName))
	}
	for _, h := range a.o.Placement.KnownHolds() {
		out.Holds = append(out.Holds, holdRow(&h))
	}
	return out, nil
}

// addLoad adds what a range serves.
func (v *clusterView) addLoad(out *adminpb.SurveyResponse, id keyspace.RangeID, l *lead) {
	load := l.says.WritesPerSecond + l.says.ReadsPerSecond
	if out.RequestsPerSecond += load; load > out.HottestRequestsPerSecond {
		out.HottestRequestsPerSecond, out.HottestRange, out.HottestLeader = load, uint64(id), v.byName[l.by]
	}
}

func (v *clusterView) nodeSurvey(n *fsm.Node) *adminpb.NodeSurvey {
	r := v.reports[n.ID]
	s := &adminpb.NodeSurvey{
		Node: v.listed(n), DiskCapacity: r.Capacity, DiskUsed: r.Used, Isolated: r.Isolated, ClockAheadMs: v.clockAhead[n.ID].Milliseconds(),
		FsyncP99Us: r.FsyncP99.Microseconds(), FsyncSlowMs: r.FsyncSlow.Milliseconds(), FullMs: r.Full.Milliseconds(), FullWhy: r.FullWhy,
		CertificateFile: r.Certificate, CertificateLeftMs: r.CertificateLeft.Milliseconds(), CertificateLifeMs: r.CertificateLife.Milliseconds(),
		CertificateHosts: r.CertificateHosts,
		LaggingWatchers:  int64(r.Lag.Watchers), LaggingMs: r.Lag.For.Milliseconds(), LaggingClient: r.Lag.Client, LaggingRevisions: r.Lag.Behind,
		ClockStepMs: r.ClockStep.Milliseconds(), ClockSteppedAgoMs: r.ClockStepped.Milliseconds(),
	}
	// Nodes that have started later themselves, or were cut off, have heard fewer.
	for _, other := range v.reports {
		s.Restarts = max(s.Restarts, int64(other.Restarts[n.ID]))
	}
	// That a dead one does not answer is no news.
	if err := v.unanswered[n.ID]; err != nil && !v.dead(n) {
		s.Error = v.words().Replace(err.Error())
	}
	if _, said := v.reports[n.ID]; !said {
		return s
	}
	for i := range v.nodes {
		o := &v.nodes[i]
		if o.ID != n.ID && o.State.Started() && v.alive(o.ID) && !slices.Contains(r.Hears, o.ID) {
			s.Unheard = append(s.Unheard, o.Name)
		}
	}
	return s
}

// outages returns what has no quorum, by what it waits for; the placement group comes first.
func (v *clusterView) outages() (all []*adminpb.Outage) {
	if !v.placementStands() {
		own := keyspace.Descriptor{Replicas: v.placement.Replicas}
		all = append(all, &adminpb.Outage{Placement: true, WaitsFor: waitsFor(&own, v.byName, v.alive)})
	}
	by := map[string]*adminpb.Outage{}
	for i := range v.ranges {
		d := &v.ranges[i]
		if !v.stopped[d.Range] {
			continue
		}
		names, closed := waitsFor(d, v.byName, v.alive), len(closedOf(d, v.reports))
		key := fmt.Sprintf("%s/%d", strings.Join(names, "/"), closed)
		o := by[key]
		if o == nil {
			o = &adminpb.Outage{WaitsFor: names, Quarantined: int64(closed)}
			by[key], all = o, append(all, o)
		}
		if o.Ranges++; len(o.Ids) < maxOutageIDs {
			o.Ids = append(o.Ids, uint64(d.Range))
		}
	}
	return all
}

// alarms are those of the map, and what nodes say of themselves: without a leader of placement nobody records it.
func (a *Admin) alarms(v *clusterView) (all []*adminpb.Alarm) {
	known := map[fsm.AlarmID]bool{} // whether they are sticky
	if m, _ := a.o.Placement.WatchMap(); m != nil && m.Alarms != nil {
		for _, r := range m.Alarms.All {
			known[r.AlarmID] = r.Sticky
		}
	}
	for id, r := range v.reports {
		for _, own := range []struct {
			is   bool
			kind fsm.AlarmType
		}{{r.NoSpace, fsm.AlarmNoSpace}, {r.Corrupt, fsm.AlarmCorrupt}} {
			if alarm := (fsm.AlarmID{Type: own.kind, Member: id}); own.is && !known[alarm] {
				known[alarm] = false
			}
		}
	}
	for id, sticky := range known {
		all = append(all, &adminpb.Alarm{
			Type: id.Type.String(), Node: cmp.Or(v.byName[id.Member], id.Member.String()), Sticky: sticky,
		})
	}
	return all
}

// replicationOf is how many voters ranges are to have and how many have others, by the view; nil where the settings are not
// known.
func (a *Admin) replicationOf(v *clusterView) *adminpb.Replication {
	if v.settings == nil && v.stale {
		return nil
	}
	alive := v.alive
	if !v.lacks {
		alive = func(keyspace.NodeID) bool { return true } // each that a range has a replica on
	}
	out := progress(v.settings, v.ranges, v.operations, alive)
	out.Declining = declining(v.nodes, v.reports, a.o.Peers.Reached)
	return out
}

// versions is what the nodes of the view read, by this node's copy of the node table.
func (a *Admin) versions(v *clusterView) *adminpb.ClusterShowResponse {
	m, _ := a.o.Placement.WatchMap()
	if m == nil {
		return nil
	}
	return versionRows(m.ClusterVersion, v.nodes, v.settings, v.stale)
}
