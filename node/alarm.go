package node

import (
	"cmp"
	"context"
	"slices"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/etcdapi"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/fsm"
)

// etcdAlarms implements etcdapi.Alarms. A node tells its own observations by itself: they are new, need no
// leader of placement, and exist in a cluster version without records of alarms.
type etcdAlarms struct{ c *Core }

// Known implements etcdapi.Alarms.
func (a etcdAlarms) Known() []etcdapi.Alarm { return a.withOwn(a.c.client.KnownAlarms()) }

// Sticky implements etcdapi.Alarms.
func (a etcdAlarms) Sticky() (sticky []etcdapi.Alarm) {
	for _, r := range a.c.client.KnownAlarms() {
		if r.Sticky {
			sticky = append(sticky, etcdAlarm(r))
		}
	}
	return sticky
}

// List implements etcdapi.Alarms. The release before cannot be asked, and has no records.
func (a etcdAlarms) List(ctx context.Context) ([]etcdapi.Alarm, error) {
	m, err := a.c.client.Map(ctx)
	if err != nil {
		return nil, err
	}
	if m.ClusterVersion < keyspace.VersionAccess {
		return a.Known(), nil
	}
	all, err := a.c.client.Alarms(ctx)
	if err != nil {
		return nil, err
	}
	return a.withOwn(all), nil
}

// Activate implements etcdapi.Alarms.
func (a etcdAlarms) Activate(ctx context.Context, t pb.AlarmType, member keyspace.NodeID) error {
	return a.c.client.ActivateAlarm(ctx, fsm.AlarmID{Type: fsm.AlarmType(t), Member: member})
}

// Deactivate implements etcdapi.Alarms.
func (a etcdAlarms) Deactivate(ctx context.Context, t pb.AlarmType, member keyspace.NodeID) (was bool, err error) {
	return a.c.client.DeactivateAlarm(ctx, fsm.AlarmID{Type: fsm.AlarmType(t), Member: member})
}

// withOwn returns the recorded alarms, with what this node observes of itself now in place of what
// placement's leader has heard of it.
func (a etcdAlarms) withOwn(recorded []fsm.Alarm) (all []etcdapi.Alarm) {
	noSpace, corrupt := measurer(a).Alarms()
	for _, r := range recorded {
		own := r.Member == a.c.o.Self
		if own && !r.Sticky {
			continue
		}
		all = append(all, etcdAlarm(r))
		noSpace = noSpace && !(own && r.Type == fsm.AlarmNoSpace)
		corrupt = corrupt && !(own && r.Type == fsm.AlarmCorrupt)
	}
	if noSpace {
		all = append(all, etcdapi.Alarm{Type: pb.AlarmType_NOSPACE, Member: a.c.o.Self})
	}
	if corrupt {
		all = append(all, etcdapi.Alarm{Type: pb.AlarmType_CORRUPT, Member: a.c.o.Self})
	}
	slices.SortFunc(all, func(a, b etcdapi.Alarm) int {
		return cmp.Or(cmp.Compare(a.Type, b.Type), cmp.Compare(a.Member, b.Member))
	})
	return all
}

func etcdAlarm(a fsm.Alarm) etcdapi.Alarm {
	return etcdapi.Alarm{Type: pb.AlarmType(a.Type), Member: a.Member, Sticky: a.Sticky}
}
