package main

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.uber.org/zap"

	"github.com/skeindb/skein/audit"
	"github.com/skeindb/skein/clock"
)

// skein audit check takes the files of a rotated log in their order, and names the line that does not fit.
func TestAuditCheck(t *testing.T) {
	dir := t.TempDir()
	path, old := filepath.Join(dir, "log"), filepath.Join(dir, "log.1")
	for i := range 2 {
		l, err := audit.Open(audit.Options{Path: path, Node: "n1", Clock: clock.System(), Logger: zap.NewNop()})
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range []string{"a", "b", "c"} {
			l.Note(&audit.Entry{Method: m})
		}
		if i == 0 {
			for len(read(t, path)) == 0 || !strings.Contains(read(t, path), `"c"`) {
			}
			if err := os.Rename(path, old); err != nil {
				t.Fatal(err)
			}
			l.Note(&audit.Entry{Method: "d"})
		}
		if err := l.Close(context.Background()); err != nil {
			t.Fatal(err)
		}
	}
	check := func(files ...string) (int, string) {
		var out, stderr bytes.Buffer
		code := execute(t.Context(), append([]string{"audit", "check"}, files...), nil, &out, &stderr)
		return code, out.String() + stderr.String()
	}
	if code, out := check(old, path); code != 0 || !strings.Contains(out, "log.1: 4 lines") || !strings.Contains(out, "log: 5 lines") || strings.Contains(out, "goes on") {
		t.Errorf("exit %d: %s", code, out)
	}
	if code, out := check(path); code != 0 || !strings.Contains(out, "goes on with an earlier file") {
		t.Errorf("exit %d: %s", code, out)
	}
	if code, out := check(path, old); code != 1 || !strings.Contains(out, "does not follow") {
		t.Errorf("exit %d: %s", code, out)
	}
	lines := strings.SplitAfter(read(t, old), "\n")
	if err := os.WriteFile(old, []byte(strings.Join(append(lines[:1:1], lines[2:]...), "")), 0o600); err != nil {
		t.Fatal(err)
	}
	if code, out := check(old, path); code != 1 || !strings.Contains(out, "line 2 does not follow line 1") {
		t.Errorf("exit %d: %s", code, out)
	}
	if code, out := check(filepath.Join(dir, "none")); code != 1 || !strings.Contains(out, "no such file") {
		t.Errorf("exit %d: %s", code, out)
	}
	if code, _ := check(); code != exitUsage {
		t.Errorf("exit %d without a file", code)
	}
}

func read(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}
