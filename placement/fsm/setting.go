package fsm

import (
	"bytes"
	"strconv"
	"time"

	"github.com/skeindb/skein/kverror"
)

// Settings of the cluster by which placement decides.
const (
	// SettingPaused stops all decisions, those about repairs too, while its value is not
	// empty: that is when they were stopped, in milliseconds since 1970. Operations under way come to their end, and an operator
	// may begin others.
	SettingPaused = "placement.paused"
	// SettingReplication is how many voters a range has, in decimal; 3 where it is not set.
	SettingReplication = "placement.replication"
	// SettingMergeAfter is after how long neighbours that are small and cold are merged by
	// themselves, as a duration, or MergeOff. Without it RangeMergeAfter of the leading node
	// counts.
	SettingMergeAfter = "placement.merge-after"
	// SettingUpgradeHeld keeps the cluster version from being raised by itself while its value is
	// not empty.
	SettingUpgradeHeld = "placement.upgrade-held"
)

// MergeOff is SettingMergeAfter's value that has ranges merged by command alone.
const MergeOff = "off"

// MinMergeAfter is the shortest time that SettingMergeAfter takes: with less, ranges would be
// merged and split to and fro.
const MinMergeAfter = 5 * time.Minute

// ParseMergeAfter reads the value of SettingMergeAfter.
func ParseMergeAfter(value []byte) (time.Duration, bool) {
	if string(value) == MergeOff {
		return 0, true
	}
	after, err := time.ParseDuration(string(value))
	return after, err == nil && after >= MinMergeAfter
}

// maxReplication bounds the replication factor: more voters than that make every write
// slower, and hardly any loss likelier to be survived.
const maxReplication = 7

// ValidReplication says whether a range can be told to have so many voters.
func ValidReplication(n int) bool { return n >= 1 && n <= maxReplication && n%2 == 1 }

// ParseReplication reads the value of SettingReplication.
func ParseReplication(value []byte) (int, bool) {
	n, err := strconv.Atoi(string(bytes.TrimSpace(value)))
	return n, err == nil && ValidReplication(n)
}

// CheckSetting says why a setting cannot have a value; an empty one removes it.
func (v *View) CheckSetting(name string, value []byte) error {
	if name == "" {
		return kverror.New(kverror.BadRequest, "a setting without a name")
	}
	if len(value) == 0 {
		return nil
	}
	if _, ok := ParseMergeAfter(value); name == SettingMergeAfter && !ok {
		return kverror.New(kverror.BadRequest, "ranges cannot be merged after %q: it is a time of at least %v, or %s", value, MinMergeAfter, MergeOff)
	}
	if name != SettingReplication {
		return nil
	}
	n, ok := ParseReplication(value)
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

// Paused says whether placement is to decide nothing by itself.
func (v *View) Paused() bool { return len(v.settings[SettingPaused]) > 0 }

// UpgradeHeld says whether the cluster version is raised by command alone.
func (v *View) UpgradeHeld() bool { return len(v.settings[SettingUpgradeHeld]) > 0 }

// Setting is one of the cluster's settings.
type Setting struct {
	Name  string
	Value []byte
}
