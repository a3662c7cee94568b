//go:build !planted

package chaos

// buildTags are those of the nodes of a storm: their invariants are asserted too.
const buildTags = "invariants"
