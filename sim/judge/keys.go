package judge

import (
	"fmt"
)

// Clients with ids of their own, beyond all others.
const (
	// Holders is the id of the first client that holds leases.
	Holders = 500
	// LoaderID is who wrote the store that is loaded, and loads it.
	LoaderID = 901
)

// MaxDrift bounds the difference between the rates of a clock and of the world. Two
// clocks then differ by less than raftgroup's default of 1 %.
const MaxDrift = 0.004

// The keys of a run: groups of neighbours, each named by a letter, some of them hot.
const (
	Groups       = "cfiloruxz"
	KeysPerGroup = 4
)

// allKeys returns every key that a run touches.
func allKeys() []string {
	var keys []string
	for _, g := range Groups {
		for i := range KeysPerGroup {
			keys = append(keys, fmt.Sprintf("%c%d", g, i))
		}
	}
	return keys
}
