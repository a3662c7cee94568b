//go:build planted

package chaos

import (
	"fmt"
	"testing"

	"github.com/skeindb/skein/internal/plant"
)

// buildTags are those of the nodes of a storm.
const buildTags = "invariants planted"

// plantedStorms is how many seeds may be needed to find a bug.
const plantedStorms = 4

// TestPlantedStorms plants bugs into real nodes, some of each kind that a storm is there
// for, and expects it to find each within a few seeds.
func TestPlantedStorms(t *testing.T) {
	var table string
	for _, bug := range []plant.Bug{
		plant.AcknowledgedBeforeQuorum, plant.FsyncSkipped, plant.AppliedTwice, plant.TxnHalfVisible,
		plant.ReleasedTooEarly, plant.VoidDespiteLock, plant.EventLostAtSplit, plant.AttachedWhileEnding,
	} {
		t.Run(fmt.Sprint(bug), func(t *testing.T) {
			for seed := range uint64(plantedStorms) {
				if wrong := runStorm(t, seed, 0, fmt.Sprint(uint32(bug))); len(wrong) > 0 {
					table += fmt.Sprintf("\n%-44s seed %d  %.160s", bug, seed, wrong[0])
					return
				}
			}
			table += fmt.Sprintf("\n%-44s NOT FOUND", bug)
			t.Error("not found")
		})
	}
	t.Log(table)
}
