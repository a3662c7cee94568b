//go:build planted

package sim

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/skeindb/skein/internal/plant"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/node"
	"github.com/skeindb/skein/transport"
)

// twice is a bus that hands each request to its range two times: what a transport
// that repeats calls would do, or a router that repeats writes of unknown fate.
type twice struct{ node.Bus }

func (b twice) HandleCall(m transport.Method, class transport.Class, h transport.CallHandler) {
	if m != transport.MethodShardRequest {
		b.Bus.HandleCall(m, class, h)
		return
	}
	b.Bus.HandleCall(m, class, func(ctx context.Context, from keyspace.NodeID, payload []byte) ([]byte, error) {
		again := append([]byte(nil), payload...)
		answer, err := h(ctx, from, payload)
		_, _ = h(ctx, from, again)
		return answer, err
	})
}

// setBug plants a bug into this process and the run's machines.
func setBug(_ *testing.T, b plant.Bug, cfg *Config) {
	plant.Set(b)
	switch b { //nolint:exhaustive // the others are asked for by the nodes themselves
	case plant.RequestTwice:
		cfg.plant.bus = func(b node.Bus) node.Bus { return twice{b} }
	case plant.DiskLies:
		cfg.plant.noSync = true
	case plant.ClockFreezes:
		cfg.plant.freeze = true
	}
}

// plantedIn says in which story each bug is looked for.
var plantedIn = map[plant.Bug]string{
	plant.FsyncSkipped:             "blackout",
	plant.AcknowledgedBeforeQuorum: "leaders",
	plant.LeaseByTicks:             "leaders",
	plant.PromiseForgotten:         "leaders",
	plant.HandOutWithoutLease:      "leaders",
	plant.OtherTerm:                "leaders",
	plant.AppliedTwice:             "restarts",
	plant.SnapshotNotDurable:       "snapshots",
	plant.NoopFromOverlay:          "leaders",
	plant.RequestTwice:             "quiet",
	plant.DiskLies:                 "blackout",
	plant.ClockFreezes:             "leaders",
}

// byChecker says whether a violation was found by a checker of runs. A node that
// panics has found the bug too, but proves nothing of the checkers.
func byChecker(violation string) bool { return !strings.HasPrefix(violation, "assertion: ") }

// plantedSeeds is how many seeds may be needed to find a bug.
const plantedSeeds = 12

// TestPlanted plants each bug, expects a checker to find it within a few seeds of its
// story, and the same seeds to be clean without it.
func TestPlanted(t *testing.T) {
	type run struct {
		story string
		seed  uint64
	}
	used := map[run]bool{}
	var lines []string
	only := only(t)
	for _, bug := range plant.All() {
		if only != plant.None && bug != only {
			continue
		}
		found := false
		for seed := uint64(0); seed < plantedSeeds && !found; seed += 2 {
			jobs := []job{{plantedIn[bug], seed, bug}, {plantedIn[bug], seed + 1, bug}}
			for _, o := range fleet(t, jobs, func(*outcome) {}) {
				used[run{o.Story, o.Seed}] = true
				if i := slices.IndexFunc(o.Violations, byChecker); i >= 0 && !found {
					found = true
					lines = append(lines, fmt.Sprintf("%-44s story %-10s seed %d  %.300s", bug, o.Story, o.Seed, o.Violations[i]))
				}
			}
		}
		if !found {
			lines = append(lines, fmt.Sprintf("%-44s story %-10s NOT FOUND with %d seeds", bug, plantedIn[bug], plantedSeeds))
			t.Errorf("%q was not found", bug)
		}
		t.Log(lines[len(lines)-1])
	}
	var jobs []job
	for u := range used {
		jobs = append(jobs, job{story: u.story, seed: u.seed})
	}
	fleet(t, jobs, func(o *outcome) {
		verdict := "clean"
		if len(o.Violations) > 0 {
			verdict = o.Violations[0]
			t.Errorf("nothing planted: story %s, seed %d: %s", o.Story, o.Seed, verdict)
		}
		lines = append(lines, fmt.Sprintf("%-44s story %-10s seed %d  %s", plant.None, o.Story, o.Seed, verdict))
	})
	t.Log("\n" + strings.Join(lines, "\n"))
}

// only is the bug that SKEIN_SIM_BUG names by its number, None for all.
func only(t *testing.T) plant.Bug {
	t.Helper()
	n, _ := number(t, "SKEIN_SIM_BUG")
	return plant.Bug(n)
}
