package fsm

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/internal/testkit"
)

// alarmEffect reads the commands about alarms of TestState's stories.
func alarmEffect(t *testing.T, d *datadriven.TestData) Effect {
	t.Helper()
	change, ok := map[string]AlarmChange{"activate": AlarmActivated, "deactivate": AlarmDeactivated, "observe": AlarmObserved, "pass": AlarmPassed}[d.Cmd]
	if !ok {
		return nil
	}
	return ChangeAlarm{change, AlarmID{AlarmType(testkit.Arg(t, d, "type")), keyspace.NodeID(testkit.Arg(t, d, "member"))}}
}

func printAlarm(a Alarm) string {
	kind := "observed"
	if a.Sticky {
		kind = "sticky"
	}
	return fmt.Sprintf("alarm %d of member %s, %s", a.Type, a.Member, kind)
}

func (h *stateStory) printAlarms() string {
	var b strings.Builder
	v := h.s.View(0, 0, nil)
	if v.Alarms != nil {
		for _, a := range v.Alarms.All {
			fmt.Fprintln(&b, printAlarm(a))
			if found, ok := v.Alarms.Find(a.AlarmID); !ok || found != a {
				fmt.Fprintf(&b, "not found: %v\n", found)
			}
		}
	}
	fmt.Fprintf(&b, "access index %d\n", v.AccessIndex())
	return b.String()
}

// TestAlarmsAreBounded: clients may raise alarms of members that are not there, up to a bound.
func TestAlarmsAreBounded(t *testing.T) {
	s, index := bootstrapped(t), uint64(firstIndex)
	activate := func(member keyspace.NodeID) error {
		index++
		return s.Apply(index, ChangeAlarm{AlarmActivated, AlarmID{AlarmNoSpace, member}}).Err
	}
	for member := range keyspace.NodeID(maxAlarms) {
		if err := activate(member); err != nil {
			t.Fatal(member, err)
		}
	}
	if err := activate(maxAlarms); kverror.Of(err).Kind != kverror.TooManyRequests || len(s.alarms) != maxAlarms {
		t.Errorf("%v, %d alarms", err, len(s.alarms))
	}
	if err := activate(1); err != nil {
		t.Errorf("one that is there: %v", err)
	}
	list := s.View(index, 1, nil).Alarms.All
	r := NewReader(AppendAlarms(nil, list))
	if got := r.Alarms(); r.Finish() != nil || !slices.Equal(got, list) {
		t.Errorf("%d alarms are read, want %d: %v", len(got), len(list), r.Finish())
	}
}

// TestAlarmRecordUnderItsName: a record under another one's key is damage.
func TestAlarmRecordUnderItsName(t *testing.T) {
	value := appendAlarm([]byte{FormatVersion}, Alarm{AlarmID: AlarmID{AlarmCorrupt, 7}})
	s := NewState()
	if err := s.Load(alarmKey(AlarmID{AlarmNoSpace, 7}), value); err == nil || len(s.alarms) > 0 {
		t.Errorf("loaded %v: %v", slices.Collect(maps.Keys(s.alarms)), err)
	}
}

// TestAlarmsAreToldAfterARestart: a member that has started does not know when alarms have changed. A node
// with an older map is told all of them.
func TestAlarmsAreToldAfterARestart(t *testing.T) {
	s, r := bootstrapped(t), records{}
	id := AlarmID{AlarmCorrupt, 1}
	s.Apply(firstIndex+1, ChangeAlarm{AlarmActivated, id})
	known := s.View(firstIndex+1, 1, nil)
	s.Apply(firstIndex+2, ChangeAlarm{AlarmDeactivated, id})
	if err := s.Flush(r); err != nil {
		t.Fatal(err)
	}
	now := r.reload(t).View(firstIndex+2, 1, nil)
	if now.Alarms == nil || now.Alarms.Changed <= known.Version || len(now.Alarms.All) > 0 {
		t.Errorf("after the restart %+v; a node has version %d with %+v", now.Alarms, known.Version, known.Alarms)
	}
}
