package placement

import (
	"context"

	"github.com/skeindb/skein/placement/fsm"
)

// Alarms returns all alarms of the cluster, as of a moment after the call. The node's map has them then.
func (c *Client) Alarms(ctx context.Context) ([]fsm.Alarm, error) {
	return c.alarms(ctx, fsm.ChangeAlarm{}, true)
}

// KnownAlarms returns all alarms by the node's newest copy of the map.
func (c *Client) KnownAlarms() []fsm.Alarm {
	if m := c.maps.load(); m != nil && m.Alarms != nil {
		return m.Alarms.All
	}
	return nil
}

// ActivateAlarm raises an alarm, which lasts until DeactivateAlarm. Whatever asks for a revision after the
// answer under a permit from before gets none. If its fate is unknown, it returns kverror.Timeout.
func (c *Client) ActivateAlarm(ctx context.Context, id fsm.AlarmID) error {
	_, err := c.alarms(ctx, fsm.ChangeAlarm{Change: fsm.AlarmActivated, Alarm: id}, false)
	return err
}

// DeactivateAlarm ends an alarm. It says whether it was raised. If its cause lasts, it is raised again soon.
// If its fate is unknown, it returns kverror.Timeout.
func (c *Client) DeactivateAlarm(ctx context.Context, id fsm.AlarmID) (was bool, err error) {
	all, err := c.alarms(ctx, fsm.ChangeAlarm{Change: fsm.AlarmDeactivated, Alarm: id}, false)
	return len(all) > 0, err
}

// alarms asks about alarms, and waits until the node's map has what the answer says, at most until ctx ends.
func (c *Client) alarms(ctx context.Context, o fsm.ChangeAlarm, repeat bool) ([]fsm.Alarm, error) {
	a, err := c.ask(ctx, &request{Kind: requestAlarms, Alarm: o}, repeat)
	if err != nil {
		return nil, err
	}
	c.maps.await(ctx, c.ctx, a.MapVersion)
	return a.Alarms, nil
}
