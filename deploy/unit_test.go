package deploy

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
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
	// What OPERATIONS.md adds is understood as well: verify reads it with the unit.
	for _, line := range []string{"", "ReadWritePath=/srv"} {
		if err := os.MkdirAll(path+".d", 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(path+".d", "override.conf"), []byte(dropIn(t)+line), 0o600); err != nil {
			t.Fatal(err)
		}
		if out := output(t, "systemd-analyze", "verify", "--man=no", path); strings.Contains(out, "override.conf") != (line != "") {
			t.Errorf("verify, with %q in the drop-in:\n%s", line, out)
		}
	}
	if err := os.RemoveAll(path + ".d"); err != nil {
		t.Fatal(err)
	}
	// 20 is an exposure of 2.0.
	out := output(t, "systemd-analyze", "security", "--offline=true", "--no-pager", "--threshold=20", path)
	lines := strings.Split(strings.TrimSpace(out), "\n")
	t.Log(lines[len(lines)-1])
}

// dropIn is what OPERATIONS.md adds to the unit.
func dropIn(t *testing.T) string {
	t.Helper()
	page, err := os.ReadFile("../docs/OPERATIONS.md")
	if err != nil {
		t.Fatal(err)
	}
	_, text, found := strings.Cut(string(page), "sudo systemctl edit skein\n")
	_, text, begun := strings.Cut(text, "```ini\n")
	text, _, ended := strings.Cut(text, "```")
	if !found || !begun || !ended {
		t.Fatal("OPERATIONS.md has no drop-in")
	}
	return text
}

// The unit is started by each boot once it is enabled, as README.md says, and by none once the package is removed.
func TestUnitIsEnabled(t *testing.T) {
	readme, err := os.ReadFile("../README.md")
	if err != nil {
		t.Fatal(err)
	}
	var enable []string
	for line := range strings.Lines(string(readme)) {
		if f := strings.Fields(line); len(f) > 2 && f[0] == "sudo" && f[1] == "systemctl" {
			enable = f[2:]
		}
	}
	b, err := os.ReadFile("systemd/skein.service")
	if err != nil {
		t.Fatal(err)
	}
	root := t.TempDir()
	dir := filepath.Join(root, "lib/systemd/system")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "skein.service"), b, 0o600); err != nil {
		t.Fatal(err)
	}
	booted := filepath.Join(root, "etc/systemd/system/multi-user.target.wants/skein.service")
	for _, c := range []struct {
		args []string
		want bool
	}{{enable, true}, {[]string{"disable", "--now", "skein.service"}, false}} { // the second is prerm's
		now := slices.Index(c.args, "--now")
		if now < 0 {
			t.Fatalf("systemctl %q waits for the next boot", c.args)
		}
		// Nothing is started or stopped here.
		output(t, "systemctl", append([]string{"--root=" + root}, slices.Delete(slices.Clone(c.args), now, now+1)...)...)
		if _, err := os.Lstat(booted); (err == nil) != c.want {
			t.Errorf("after systemctl %s a boot starts the node: %v", strings.Join(c.args, " "), err == nil)
		}
	}
}

// An upgrade restarts no node; a removal stops it.
func TestScripts(t *testing.T) {
	for _, c := range []struct{ script, args, want string }{
		{"postinst", "configure 0.1.0-1", "systemd-sysusers skein.conf\nsystemctl --system daemon-reload\n"},
		{"postinst", "configure", "systemd-sysusers skein.conf\nsystemctl --system daemon-reload\n"},
		{"postinst", "abort-upgrade 0.1.0-1", ""},
		{"prerm", "upgrade 0.2.0-1", ""},
		{"prerm", "remove", "systemctl --no-reload disable --now skein.service\n"},
		{"postrm", "upgrade 0.2.0-1", "systemctl --system daemon-reload\n"},
		{"postrm", "purge", "systemctl --system daemon-reload\n"},
	} {
		dir := t.TempDir()
		log := filepath.Join(dir, "log")
		for _, tool := range []string{"systemctl", "systemd-sysusers"} {
			text := "#!/bin/sh\necho " + tool + ` "$@" >>` + log + "\n"
			if err := os.WriteFile(filepath.Join(dir, tool), []byte(text), 0o755); err != nil {
				t.Fatal(err)
			}
		}
		b, err := os.ReadFile(filepath.Join("deb", c.script))
		if err != nil {
			t.Fatal(err)
		}
		// As on a machine that runs systemd.
		text := strings.ReplaceAll(string(b), "/run/systemd/system", dir)
		cmd := exec.CommandContext(t.Context(), "sh", append([]string{"-c", text, c.script}, strings.Fields(c.args)...)...)
		cmd.Env = []string{"PATH=" + dir + ":" + os.Getenv("PATH")}
		out, err := cmd.CombinedOutput()
		called, _ := os.ReadFile(log)
		if err != nil || string(called) != c.want {
			t.Errorf("%s %s: %v\n%scalled %q, want %q", c.script, c.args, err, out, called, c.want)
		}
	}
}
