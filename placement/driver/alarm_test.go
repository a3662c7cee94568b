package driver

import (
	"cmp"
	"fmt"
	"slices"
	"testing"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/fsm"
)

// TestAlarmChanges: alarms follow what nodes report, once they have reported everything to this leader. What
// clients have raised stays.
func TestAlarmChanges(t *testing.T) {
	d := &decider{tracker: newTracker()}
	id := func(t fsm.AlarmType, member keyspace.NodeID) fsm.AlarmID { return fsm.AlarmID{Type: t, Member: member} }
	m := (&fsm.Map{}).With(1, nil, []fsm.Node{
		{ID: 1, State: fsm.NodeServing}, {ID: 2, State: fsm.NodeLearner}, {ID: 3, State: fsm.NodeDecommissioned}, {ID: 4, State: fsm.NodeUnstarted}, {ID: 5, State: fsm.NodeRemoved}, {ID: 6, State: fsm.NodeServing},
	}, keyspace.Descriptor{})
	m.Alarms = &fsm.Alarms{All: []fsm.Alarm{{AlarmID: id(1, 1)}, {AlarmID: id(1, 2), Sticky: true}, {AlarmID: id(1, 6)}, {AlarmID: id(2, 1)}, {AlarmID: id(2, 77), Sticky: true}}}
	want := func(what, want string) {
		t.Helper()
		changes := d.alarmChanges(&fsm.View{Map: *m})
		slices.SortFunc(changes, func(a, b fsm.ChangeAlarm) int {
			return cmp.Or(cmp.Compare(a.Alarm.Member, b.Alarm.Member), cmp.Compare(a.Alarm.Type, b.Alarm.Type))
		})
		got := ""
		for _, o := range changes {
			got += fmt.Sprintf("%d of %s %t ", o.Alarm.Type, o.Alarm.Member, o.Change == fsm.AlarmObserved)
		}
		if got != want {
			t.Errorf("%s: %q, want %q", what, got, want)
		}
	}
	m.ClusterVersion = keyspace.VersionAccess
	want("nobody has reported", "")
	d.tracker.Report(1, &Part{Boot: 1, Number: 1, Whole: true, More: true})
	want("half of a report", "")
	d.tracker.Report(1, &Part{Boot: 1, Number: 2, Corrupt: true})
	want("one alarm has passed", "1 of 1 false ")
	for n := range keyspace.NodeID(4) {
		d.tracker.Report(n+2, &Part{Boot: 1, Number: 1, Whole: true, NoSpace: n > 0, Corrupt: true})
	}
	want("those that serve, or have, count", "1 of 1 false 2 of 2 true 1 of 3 true 2 of 3 true ")
	m.ClusterVersion--
	want("the release before", "")
}
