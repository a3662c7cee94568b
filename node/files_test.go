package node

import (
	"strings"
	"testing"
)

// The files that the process may open are divided. Clients leave the engine its tables, and both
// leave something for the rest. Too low a limit is refused with what to do.
func TestFileBudget(t *testing.T) {
	for _, limit := range []uint64{512, 1024, 4096, 65536, 1 << 20, 1 << 40, 1<<64 - 1} {
		b, err := NewFileBudget(limit)
		if err != nil {
			t.Fatalf("%d: %v", limit, err)
		}
		if b.Tables < 64 || b.Connections < 64 || uint64(b.Tables+b.Connections)+256 > limit {
			t.Errorf("%d is divided into %+v", limit, b)
		}
		if b.Connections < b.Tables {
			t.Errorf("of %d clients get %d and tables %d", limit, b.Connections, b.Tables)
		}
	}
	for _, limit := range []uint64{0, 64, 511} {
		if _, err := NewFileBudget(limit); err == nil || !strings.Contains(err.Error(), "ulimit -n") {
			t.Errorf("%d: %v", limit, err)
		}
	}
}
