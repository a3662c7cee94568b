package sim

import (
	"fmt"
	"strings"
	"testing"
)

// pairKinds are the faults of the story of pairs, without leases and with them. With leases, an old
// sequencer that goes on is believed by who has not heard of its successor. A fault of the network makes
// that likely, and --lease-reads documents it. The story "sequencers" has the suspended sequencer alone.
func pairKinds(leases bool) []Fault {
	kinds := make([]Fault, 0, len(AllFaults)+2)
	for _, f := range AllFaults {
		if f == SuspendSeen && !leases {
			f = Suspend
		}
		kinds = append(kinds, f)
	}
	if !leases {
		kinds = append(kinds, SuspendSequencer)
	}
	return append(kinds, Rot)
}

// A tournament has each pair once, and no two rounds the same one.
func TestEachFaultMeetsEachOther(t *testing.T) {
	for k := 2; k <= len(AllFaults); k++ {
		kinds := AllFaults[:k]
		met := map[Pair]int{}
		for r := range roundsOf(kinds) {
			round := roundOf(kinds, r)
			seen := map[Fault]bool{}
			for i := 0; i < len(round); i += 2 {
				met[pairOf(round[i], round[i+1])]++
				for _, f := range round[i : i+2] {
					if seen[f] {
						t.Errorf("%d kinds, round %d: %s twice", k, r, f)
					}
					seen[f] = true
				}
			}
		}
		for i, a := range kinds {
			for _, b := range kinds[:i] {
				want := 0
				if pairOf(a, b).meets() {
					want = 1
				}
				if p := pairOf(a, b); met[p] != want {
					t.Errorf("%d kinds: %s %d times, want %d", k, p, met[p], want)
				}
			}
		}
	}
}

// pairsMet says which pairs of the story's kinds have met, and how often.
func pairsMet(all []*outcome) string {
	sums := map[string]int{}
	for _, o := range all {
		for p, k := range o.Pairs {
			sums[p] += k
		}
	}
	if len(sums) == 0 {
		return ""
	}
	could, met := map[string]bool{}, 0
	for _, leases := range []bool{true, false} {
		kinds := pairKinds(leases)
		for i, a := range kinds {
			for _, b := range kinds[:i] {
				if p := pairOf(a, b); p.meets() {
					could[p.String()] = true
				}
			}
		}
	}
	var never []string
	sum := 0
	for p := range could {
		if sums[p] == 0 {
			never = append(never, p)
			continue
		}
		met++
		sum += sums[p]
	}
	return fmt.Sprintf("%d of %d kinds of pairs have met, %d times in all; not: %s", met, len(could), sum, strings.Join(never, ", "))
}
