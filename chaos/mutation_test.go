//go:build planted

package chaos

import (
	"cmp"
	"fmt"
	"strings"
	"testing"

	"github.com/skeindb/skein/internal/mutation"
)

// buildTags are those of the nodes of a storm.
const buildTags = "invariants planted"

// mutationStorms is how many seeds may be needed to find a mutation.
const mutationStorms = 4

// TestMutationStorms builds nodes with mutations, some of each kind that a storm can
// find, and requires a storm to find each within a few seeds.
func TestMutationStorms(t *testing.T) {
	binary := buildForStorms(t)
	var table string
	for _, bug := range []mutation.Bug{
		mutation.AcknowledgedBeforeQuorum, mutation.FsyncSkipped, mutation.TxnHalfVisible,
		mutation.ReleasedTooEarly, mutation.EventLostAtSplit, mutation.AttachedWhileEnding,
		mutation.ProgressBehindEvent, mutation.WatchersKept,
	} {
		found, ran, apart := "", false, uint64(1)
		if bug == mutation.WatchersKept {
			// Every fourth storm has users and no clock that stands still. Only there what watchers are told is judged.
			apart = 4
		}
		for seed := uint64(0); seed < mutationStorms*apart && found == ""; seed += apart {
			t.Run(fmt.Sprintf("%s/%d", bug, seed), func(t *testing.T) {
				ran = true
				if wrong := runStorm(t, binary, seed, 0, fmt.Sprint(uint32(bug))); len(wrong) > 0 {
					t.Log(strings.Join(wrong, "\n"))
					found = fmt.Sprintf("seed %d  %.160s", seed, wrong[0])
				}
			})
		}
		if !ran {
			continue // -run names others
		}
		if found == "" {
			t.Errorf("%s was not found", bug)
		}
		table += fmt.Sprintf("\n%-44s %s", bug, cmp.Or(found, "NOT FOUND"))
	}
	t.Log(table)
}
