package driver

import (
	"context"

	"go.uber.org/zap"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/fsm"
)

// changeAlarms raises what nodes say of themselves as alarms, and ends those that they say no more. A node
// that has not told everything in this leadership has the alarms that it had. The release before does not
// read the records.
func (d *decider) changeAlarms(ctx context.Context, v *fsm.View) {
	if v.Map.ClusterVersion < keyspace.VersionAccess {
		return
	}
	for id, row := range v.NodeRows() {
		if !counts(&row) {
			continue
		}
		noSpace, corrupt, told := d.tracker.Alarms(id)
		if !told {
			continue
		}
		d.changeAlarm(ctx, v, fsm.AlarmID{Type: fsm.AlarmNoSpace, Member: id}, noSpace)
		d.changeAlarm(ctx, v, fsm.AlarmID{Type: fsm.AlarmCorrupt, Member: id}, corrupt)
	}
}

func (d *decider) changeAlarm(ctx context.Context, v *fsm.View, id fsm.AlarmID, cause bool) {
	a, raised := v.Alarms.Find(id)
	if raised == cause || a.Sticky {
		return
	}
	change := fsm.AlarmPassed
	if cause {
		change = fsm.AlarmObserved
	}
	if err := d.s.o.Group.Propose(ctx, d.term, fsm.ChangeAlarm{Change: change, Alarm: id}).Err; err != nil {
		// The next round tries again.
		d.s.o.Logger.Warn("an alarm cannot be changed yet", zap.Stringer("peer", id.Member), zap.Int32("type", int32(id.Type)), zap.Bool("raised", cause), zap.Error(err))
		return
	}
	d.s.o.Logger.Warn("the alarm of a node has changed (1 is NOSPACE, 2 is CORRUPT)", zap.Stringer("peer", id.Member), zap.Int32("type", int32(id.Type)), zap.Bool("raised", cause))
}
