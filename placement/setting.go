package placement

import (
	"bytes"
	"context"
	"slices"
	"strconv"
	"time"

	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/decide"
)

// Settings of the cluster by which placement decides.
const (
	// SettingPaused stops all decisions, those about repairs too, while its value is not
	// empty. Operations under way come to their end, and an operator may begin others.
	SettingPaused = "placement.paused"
	// SettingReplication is how many voters a range has, in decimal; 3 where it is not set.
	SettingReplication = "placement.replication"
	// SettingMergeAfter is after how long neighbours that are small and cold are merged by
	// themselves, as a duration, or MergeOff. Where it is not set it is RangeMergeAfter of the
	// node that leads.
	SettingMergeAfter = "placement.merge-after"
)

// MergeOff is SettingMergeAfter's value that has ranges merged by command alone.
const MergeOff = "off"

// MinMergeAfter is the shortest time that SettingMergeAfter takes: with less, ranges would be
// merged and split to and fro.
const MinMergeAfter = 5 * time.Minute

// MergeAfter returns after how long ranges are merged by themselves by the settings, 0 where
// they are not; set is false where the settings say nothing.
func MergeAfter(settings []Setting) (after time.Duration, set bool) {
	for _, s := range settings {
		if s.Name == SettingMergeAfter {
			return parseMergeAfter(s.Value)
		}
	}
	return 0, false
}

// SetMergeAfter has ranges that are small and cold for so long merged by themselves; 0 is by
// command alone. BadRequest says why that cannot be.
func (c *Client) SetMergeAfter(ctx context.Context, after time.Duration) error {
	value := MergeOff
	if after != 0 {
		value = after.String()
	}
	return c.PutSetting(ctx, SettingMergeAfter, []byte(value))
}

// UnsetMergeAfter has RangeMergeAfter of the node that leads count again.
func (c *Client) UnsetMergeAfter(ctx context.Context) error {
	return c.PutSetting(ctx, SettingMergeAfter, nil)
}

// parseMergeAfter reads the value of SettingMergeAfter.
func parseMergeAfter(value []byte) (time.Duration, bool) {
	if string(value) == MergeOff {
		return 0, true
	}
	after, err := time.ParseDuration(string(value))
	return after, err == nil && after >= MinMergeAfter
}

// maxReplication bounds the replication factor: more voters than that make every write
// slower, and hardly any loss likelier to be survived.
const maxReplication = 7

// Replication returns how many voters a range is to have by the settings.
func Replication(settings []Setting) int {
	for _, s := range settings {
		if n, ok := parseReplication(s.Value); ok && s.Name == SettingReplication {
			return n
		}
	}
	return decide.Defaults().ReplicationFactor
}

// ValidReplication says whether a range can be told to have so many voters.
func ValidReplication(n int) bool { return n >= 1 && n <= maxReplication && n%2 == 1 }

// SetReplication has each range get so many voters. BadRequest says why that cannot be.
func (c *Client) SetReplication(ctx context.Context, n int) error {
	return c.PutSetting(ctx, SettingReplication, []byte(strconv.Itoa(n)))
}

// parseReplication reads the value of SettingReplication.
func parseReplication(value []byte) (int, bool) {
	n, err := strconv.Atoi(string(bytes.TrimSpace(value)))
	return n, err == nil && ValidReplication(n)
}

// checkSetting says why a setting cannot have a value; an empty one removes it.
func (v *View) checkSetting(name string, value []byte) error {
	if name == "" {
		return kverror.New(kverror.BadRequest, "a setting without a name")
	}
	if len(value) == 0 {
		return nil
	}
	if _, ok := parseMergeAfter(value); name == SettingMergeAfter && !ok {
		return kverror.New(kverror.BadRequest, "ranges cannot be merged after %q: it is a time of at least %v, or %s", value, MinMergeAfter, MergeOff)
	}
	if name != SettingReplication {
		return nil
	}
	n, ok := parseReplication(value)
	if !ok {
		return kverror.New(kverror.BadRequest, "%q voters: a range has 1, 3, 5 or 7", value)
	}
	if take := v.taking(); n > take {
		return kverror.New(kverror.BadRequest, "%d voters of each range need as many nodes, and %d take replicas: add %d", n, take, n-take)
	}
	return nil
}

// taking counts the nodes that take replicas.
func (v *View) taking() (n int) {
	for _, row := range v.nodes {
		if row.State == NodeServing {
			n++
		}
	}
	return n
}

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
