//go:build !planted

package sim

import (
	"testing"

	"github.com/skeindb/skein/internal/plant"
)

func setBug(t *testing.T, b plant.Bug) {
	t.Helper()
	if b != plant.None {
		t.Fatalf("%q cannot be planted without the build tag", b)
	}
}
