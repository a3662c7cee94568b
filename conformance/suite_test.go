package conformance

import (
	"os/exec"
	"testing"
)

// TestStorageSuite runs kube-apiserver's own storage suite against Skein, in the module
// that requires it. It runs in a process of its own without the race detector, because
// the suite bounds by the wall clock what a server may take. For the same reason no
// test of this package runs beside it.
func TestStorageSuite(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), "go", "test", "-tags", "invariants", "-vet=off", "-count=1", "-timeout", "30m", "-v", ".")
	cmd.Dir = "apiserver"
	out, err := cmd.CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Fatalf("go test in conformance/apiserver: %v", err)
	}
}
