package deploy

import (
	"os"
	"os/exec"
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
