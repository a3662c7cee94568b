//go:build !planted

package plant

// Is says whether the bug is planted: never.
func Is(Bug) bool { return false }
