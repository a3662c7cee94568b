//go:build !planted

package sim

import (
	"testing"

	"github.com/skeindb/skein/internal/mutation"
)

// setMutation sets a mutation in this process and in the run's machines.
func setMutation(t *testing.T, b mutation.Bug, _ *Config) {
	t.Helper()
	if b != mutation.None {
		t.Fatalf("%q needs the build tag planted", b)
	}
}
