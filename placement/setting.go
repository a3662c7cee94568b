package placement

import (
	"context"
	"slices"
)

// Settings of the cluster by which placement decides.
const (
	// SettingPaused stops all decisions, those about repairs too, while its value is not
	// empty. Operations under way come to their end, and an operator may begin others.
	SettingPaused = "placement.paused"
	// SettingReplication is how many voters a range has, in decimal; 3 where it is not set.
	SettingReplication = "placement.replication"
)

// SetPaused has placement stop to decide, or go on.
func (c *Client) SetPaused(ctx context.Context, paused bool) error {
	var value []byte
	if paused {
		value = []byte("true")
	}
	return c.PutSetting(ctx, SettingPaused, value)
}

// Paused says whether the settings have placement decide nothing by itself.
func Paused(settings []Setting) bool {
	return slices.ContainsFunc(settings, func(s Setting) bool { return s.Name == SettingPaused && len(s.Value) > 0 })
}

// Paused says whether placement is to decide nothing by itself.
func (v *View) Paused() bool { return len(v.settings[SettingPaused]) > 0 }
