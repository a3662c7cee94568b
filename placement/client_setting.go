package placement

import (
	"context"
	"slices"
	"strconv"
	"time"

	"github.com/skeindb/skein/placement/decide"
	"github.com/skeindb/skein/placement/fsm"
)

// MergeAfter returns after how long ranges are merged by themselves by the settings, 0 where
// they are not; set is false where the settings say nothing.
func MergeAfter(settings []fsm.Setting) (after time.Duration, set bool) {
	for _, s := range settings {
		if s.Name == fsm.SettingMergeAfter {
			return fsm.ParseMergeAfter(s.Value)
		}
	}
	return 0, false
}

// Replication returns how many voters a range is to have by the settings.
func Replication(settings []fsm.Setting) int {
	for _, s := range settings {
		if n, ok := fsm.ParseReplication(s.Value); ok && s.Name == fsm.SettingReplication {
			return n
		}
	}
	return decide.Defaults().ReplicationFactor
}

// Paused says whether the settings have placement decide nothing by itself.
func Paused(settings []fsm.Setting) bool {
	return slices.ContainsFunc(settings, func(s fsm.Setting) bool { return s.Name == fsm.SettingPaused && len(s.Value) > 0 })
}

// PausedSince is when they were paused, by the clock of the node that was asked for it; 0 if they are not, or nobody has noted it.
func PausedSince(settings []fsm.Setting) fsm.UnixMillis {
	for _, s := range settings {
		if ms, err := strconv.ParseInt(string(s.Value), 10, 64); err == nil && s.Name == fsm.SettingPaused {
			return fsm.UnixMillis(ms)
		}
	}
	return 0
}

// ValidReplication says whether a range can be told to have so many voters.
func ValidReplication(n int) bool { return fsm.ValidReplication(n) }

// SetMergeAfter has ranges that are small and cold for so long merged by themselves; 0 is by
// command alone. BadRequest says why that cannot be.
func (c *Client) SetMergeAfter(ctx context.Context, after time.Duration) error {
	value := fsm.MergeOff
	if after != 0 {
		value = after.String()
	}
	return c.PutSetting(ctx, fsm.SettingMergeAfter, []byte(value))
}

// UnsetMergeAfter has RangeMergeAfter of the node that leads count again.
func (c *Client) UnsetMergeAfter(ctx context.Context) error {
	return c.PutSetting(ctx, fsm.SettingMergeAfter, nil)
}

// SetReplication has each range get so many voters. BadRequest says why that cannot be.
func (c *Client) SetReplication(ctx context.Context, n int) error {
	return c.PutSetting(ctx, fsm.SettingReplication, []byte(strconv.Itoa(n)))
}

// SetPaused has placement stop to decide, or go on. Where it has stopped already, PausedSince stays.
func (c *Client) SetPaused(ctx context.Context, paused bool) error {
	var value []byte
	if paused {
		settings, _, err := c.Settings(ctx)
		if err != nil || Paused(settings) {
			return err
		}
		value = strconv.AppendInt(nil, c.o.Clock.Wall().UnixMilli(), 10)
	}
	return c.PutSetting(ctx, fsm.SettingPaused, value)
}

// SetUpgradeHeld has the cluster version be raised by command alone, or by itself again.
func (c *Client) SetUpgradeHeld(ctx context.Context, held bool) error {
	var value []byte
	if held {
		value = []byte("true")
	}
	return c.PutSetting(ctx, fsm.SettingUpgradeHeld, value)
}
