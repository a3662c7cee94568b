package sim

import (
	"slices"
	"testing"

	"github.com/skeindb/skein/sim/judge"
)

// TestWhatCompactionLeavesMustBeOnTheDisks: of the versions kept before a compaction
// only those count that it may have removed.
func TestWhatCompactionLeavesMustBeOnTheDisks(t *testing.T) {
	old, now, later := judge.Version{Key: "a", Value: "1", Mod: 2}, judge.Version{Key: "a", Value: "2", Mod: 5}, judge.Version{Key: "a", Value: "3", Mod: 9}
	gone, b := judge.Version{Key: "b", Mod: 4, Deleted: true}, judge.Version{Key: "b", Value: "x", Mod: 3}
	lost := judge.Version{Key: "c", Value: "lost", Mod: 6}
	// A transaction that has put d and deleted it leaves nothing; one that has deleted e
	// and put it leaves both.
	d, noD := judge.Version{Key: "d", Value: "d", Mod: 7, Sub: 1}, judge.Version{Key: "d", Mod: 7, Sub: 2, Deleted: true}
	noE, e := judge.Version{Key: "e", Mod: 7, Sub: 3, Deleted: true}, judge.Version{Key: "e", Value: "e", Mod: 7, Sub: 4}
	k := &keptVersions{compacted: 7, set: map[judge.Version]bool{old: true, now: true, b: true, gone: true, lost: true, d: true, noD: true, noE: true, e: true}}
	// One disk has removed what it may, the other nothing yet. lost is on neither.
	all := k.divide([][]judge.Version{{now, noE, e, later}, {old, b, gone, now, d, noD, noE, e, later}})
	if len(all) != 3 || !slices.Equal(all[0], all[1]) || !slices.Equal(all[0], []judge.Version{now, noE, e, later}) {
		t.Errorf("the disks have %v and %v", all[0], all[1])
	}
	if want := []judge.Version{old, b, gone, d, noD}; !slices.Equal(all[2], want) {
		t.Errorf("taken from what was kept: %v, want %v", all[2], want)
	}
	if slices.Contains(merge(all), lost) {
		t.Error("a version that no compaction may remove is lost, and was taken from what was kept")
	}
}
