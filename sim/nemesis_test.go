package sim

import "testing"

// Two faults meet only if each can have its effect.
func TestFaultsThatMeet(t *testing.T) {
	for _, c := range []struct {
		a, b Fault
		meet bool
	}{
		{SyncError, Pause, false}, // the node must give up by its own timers
		{SyncError, PauseLeader, false},
		{SyncError, Stall, false}, // a sync that hangs does not fail
		{SyncError, SickLeader, false},
		{Restart, Pause, false},
		{Restart, Restart, false},
		{Flaky, Slow, false},
		{SyncError, Isolate, true},
		{SyncError, Restart, true},
		{Flaky, PauseLeader, true},
		{CrashOne, IsolateLeader, true},
	} {
		if excludes(c.a, c.b) == c.meet || excludes(c.b, c.a) == c.meet {
			t.Errorf("%s, %s: are to meet: %t", c.a, c.b, c.meet)
		}
	}
}
