//go:build !planted

package chaos

// buildTags are those of the nodes of a storm: what must hold inside of them is asserted
// as well.
const buildTags = "invariants"
