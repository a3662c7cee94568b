package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/skeindb/skein/adminapi"
)

// skein doctor --local measures this machine, whatever it is like, without a node, for a directory that is not there yet.
// The exit code is what its findings say.
func TestDoctorOfThisMachine(t *testing.T) {
	dir := t.TempDir()
	var stdout, stderr bytes.Buffer
	code := execute(t.Context(), []string{"doctor", "--local", "--data-dir", filepath.Join(dir, "data"), "-w", "json"}, nil, &stdout, &stderr)
	var out struct {
		Healthy  bool
		Findings []adminapi.Finding
	}
	if err := json.Unmarshal(stdout.Bytes(), &out); err != nil || stderr.Len() > 0 {
		t.Fatalf("%v: %s%s", err, &stdout, &stderr)
	}
	if out.Healthy != adminapi.Healthy(out.Findings) || out.Healthy != (code == 0) || !out.Healthy && code != exitRefused {
		t.Errorf("exit %d: %+v", code, out)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("%v, %v", left, err)
	}
	stdout.Reset()
	if code := execute(t.Context(), []string{"doctor", "--local", "--data-dir", filepath.Join(dir, "data"), "--memory-budget-bytes", "1099511627776000"}, nil, &stdout, &stderr); code != exitRefused || !bytes.Contains(stdout.Bytes(), []byte("critical  memory: ")) {
		t.Errorf("exit %d: %s", code, &stdout)
	}
}
