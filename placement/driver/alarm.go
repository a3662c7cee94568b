package driver

import (
	"context"

	"go.uber.org/zap"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/fsm"
)

// changeAlarms raises what nodes say of themselves as alarms, and ends those that they say no more.
func (d *decider) changeAlarms(ctx context.Context, v *fsm.View) {
	for _, o := range d.alarmChanges(v) {
		fields := []zap.Field{zap.Stringer("peer", o.Alarm.Member), zap.Stringer("alarm", o.Alarm.Type), zap.Bool("raised", o.Change == fsm.AlarmObserved)}
		if err := d.s.o.Group.Propose(ctx, d.term, o).Err; err != nil {
			// The next round tries again.
			d.s.o.Logger.Warn("the alarm of a node cannot be changed yet", append(fields, zap.Error(err))...)
			continue
		}
		d.s.o.Logger.Warn("an alarm of a node was raised, or has ended", fields...)
	}
}

// alarmChanges returns what differs from the reports. A node that has not told everything in this leadership
// has the alarms that it had. What clients have raised stays. The release before does not read the records.
func (d *decider) alarmChanges(v *fsm.View) (changes []fsm.ChangeAlarm) {
	if v.Map.ClusterVersion < keyspace.VersionAccess {
		return nil
	}
	for id, row := range v.NodeRows() {
		noSpace, corrupt, told := d.tracker.Alarms(id)
		if !counts(&row) || !told {
			continue
		}
		for t, cause := range map[fsm.AlarmType]bool{fsm.AlarmNoSpace: noSpace, fsm.AlarmCorrupt: corrupt} {
			name := fsm.AlarmID{Type: t, Member: id}
			switch a, raised := v.Alarms.Find(name); {
			case cause && !raised:
				changes = append(changes, fsm.ChangeAlarm{Change: fsm.AlarmObserved, Alarm: name})
			case !cause && raised && !a.Sticky:
				changes = append(changes, fsm.ChangeAlarm{Change: fsm.AlarmPassed, Alarm: name})
			}
		}
	}
	return changes
}
