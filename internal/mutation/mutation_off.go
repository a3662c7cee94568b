//go:build !planted

package mutation

// Is reports whether the bug is active: never in this build.
func Is(Bug) bool { return false }
