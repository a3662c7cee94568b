package deploy

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// The unit is understood by systemd, and leaves the node little that it does not need.
func TestUnit(t *testing.T) {
	b, err := os.ReadFile("systemd/skein.service")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "skein.service")
	// The program need not be installed here.
	if err := os.WriteFile(path, []byte(strings.Replace(string(b), "ExecStart=/usr/bin/skein", "ExecStart=/bin/true", 1)), 0o600); err != nil {
		t.Fatal(err)
	}
	if out := output(t, "systemd-analyze", "verify", "--man=no", path); strings.Contains(out, "skein.service") {
		t.Errorf("verify:\n%s", out)
	}
	// 20 is an exposure of 2.0.
	out := output(t, "systemd-analyze", "security", "--offline=true", "--no-pager", "--threshold=20", path)
	lines := strings.Split(strings.TrimSpace(out), "\n")
	t.Log(lines[len(lines)-1])
}
