//go:build !invariants

package clock

// pausedFor is for nodes that tests start.
func pausedFor() int64 { return 0 }
