package sim

import (
	"slices"
	"testing"
)

// TestWhatCompactionLeavesMustBeOnTheDisks: of what was kept before a compaction only
// that counts which the compaction may have removed.
func TestWhatCompactionLeavesMustBeOnTheDisks(t *testing.T) {
	old, now, later := Version{Key: "a", Value: "1", Mod: 2}, Version{Key: "a", Value: "2", Mod: 5}, Version{Key: "a", Value: "3", Mod: 9}
	gone, b := Version{Key: "b", Mod: 4, Deleted: true}, Version{Key: "b", Value: "x", Mod: 3}
	lost := Version{Key: "c", Value: "lost", Mod: 6}
	k := &keptVersions{compacted: 7, set: map[Version]bool{old: true, now: true, b: true, gone: true, lost: true}}
	// One disk has removed what it may, the other nothing yet; lost is on neither.
	all := k.divide([][]Version{{now, later}, {old, b, gone, now, later}})
	if len(all) != 3 || !slices.Equal(all[0], all[1]) || !slices.Equal(all[0], []Version{now, later}) {
		t.Errorf("the disks have %v and %v", all[0], all[1])
	}
	if want := []Version{old, b, gone}; !slices.Equal(all[2], want) {
		t.Errorf("taken from what was kept: %v, want %v", all[2], want)
	}
	if slices.Contains(merge(all), lost) {
		t.Error("a version that no compaction may remove is lost, and was taken from what was kept")
	}
}
