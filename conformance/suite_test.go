package conformance

import (
	"os/exec"
	"testing"
)

// TestStorageSuite runs kube-apiserver's own storage suite against Skein, in the module
// that requires it: what is asked of a test there holds here. It is a process of its own
// without the race detector, since the suite bounds by the wall clock what a server may
// take; and no test of this package runs beside it, for the same reason.
func TestStorageSuite(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), "go", "test", "-tags", "invariants", "-count=1", "-timeout", "30m", "-v", ".")
	cmd.Dir = "apiserver"
	out, err := cmd.CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Fatalf("go test in conformance/apiserver: %v", err)
	}
}
