//go:build linux

package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/skeindb/skein/internal/ports"
)

// TestSecureQuickStart runs the secure production quick start of README.md as it is written. Only its ports are others,
// and it waits until the nodes serve, as who types it does. It has at most ten lines.
func TestSecureQuickStart(t *testing.T) {
	if testing.Short() {
		t.Skip("starts three processes")
	}
	readme, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	_, block, begun := strings.Cut(string(readme), "```\nbin/skein cert create-ca ")
	block, _, ended := strings.Cut("bin/skein cert create-ca "+block, "```\n")
	start, use, exported := strings.Cut(block, "export ETCDCTL_")
	if lines := strings.Count(block, "\n"); !begun || !ended || !exported || lines > 10 {
		t.Fatalf("the quick start is not found, or has %d lines:\n%s", lines, block)
	}
	variables, use, _ := strings.Cut("export ETCDCTL_"+use, "\n")
	free, err := ports.Unused(6)
	if err != nil {
		t.Fatal(err)
	}
	replace := []string{"${i}2379", "${CLIENT[i]}", "${i}2380", "${PEER[i]}"}
	for i := range 3 {
		replace = append(replace, fmt.Sprintf(":%d2379", i+1), fmt.Sprint(":", free[i]), fmt.Sprintf(":%d2380", i+1), fmt.Sprint(":", free[3+i]))
	}
	script := strings.NewReplacer(replace...).Replace(strings.Join([]string{
		"set -eu", "trap 'kill $(jobs -p); wait' EXIT",
		fmt.Sprintf("CLIENT=(0 %d %d %d) PEER=(0 %d %d %d)", free[0], free[1], free[2], free[3], free[4], free[5]),
		start, variables, "until etcdctl endpoint health; do sleep 0.2; done", use,
		"echo == status; etcdctl auth status; etcdctl put a 1; cat n?.audit",
		"if ETCDCTL_CERT= ETCDCTL_KEY= etcdctl --command-timeout 2s get a; then echo 'nobody may read'; fi",
	}, "\n"))

	dir := t.TempDir()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	bin := filepath.Join(dir, "bin")
	if err := os.Mkdir(bin, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"skein", "etcdctl"} {
		if err := os.Symlink(self, filepath.Join(bin, name)); err != nil {
			t.Fatal(err)
		}
	}
	out, err := os.Create(filepath.Join(dir, "out"))
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	c := exec.CommandContext(ctx, "bash", "-c", script)
	c.Dir, c.Stdout, c.Stderr = dir, out, out
	c.Env = append(os.Environ(), asCommand+"=1", "PATH="+bin+":"+os.Getenv("PATH"), "ETCDCTL_COMMAND_TIMEOUT=1m", "ETCDCTL_DIAL_TIMEOUT=1m")
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // its nodes end with it
	c.Cancel = func() error { return syscall.Kill(-c.Process.Pid, syscall.SIGKILL) }
	ran := c.Run()
	text, err := os.ReadFile(out.Name())
	if err != nil {
		t.Fatal(err)
	}
	_, said, _ := strings.Cut(string(text), "== status")
	for _, part := range []string{"Authentication Status: true", "OK", "AuthEnable"} {
		if !strings.Contains(said, part) {
			t.Errorf("%q is not said", part)
		}
	}
	if ran != nil || strings.Contains(said, "nobody may read") || strings.Count(string(text), "| serving ") != 3 || t.Failed() {
		t.Errorf("%v\n%s\n%s", ran, script, text)
	}
}
