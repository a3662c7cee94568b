package main

import (
	"bytes"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/skeindb/skein/internal/ports"
	"github.com/skeindb/skein/mirror"
)

// TestMirrorErrors: wrong input is named with what to do, and a script tells it from a mirror that cannot run.
func TestMirrorErrors(t *testing.T) {
	nobody, err := ports.Unused(1)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for _, c := range []struct {
		args string
		code int
		want string
	}{
		{"", exitUsage, "skein mirror needs a command"},
		{"start", exitUsage, "--spool is missing"},
		{"start --spool DIR", exitUsage, "--source-endpoints is missing"},
		{"start --spool DIR --source-endpoints http://x --source-cacert /nowhere", exitUsage, "store SOURCE: --cacert: open /nowhere"},
		{"start --spool DIR --source-endpoints http://x --source-password p", exitUsage, "store SOURCE: --password without a user"},
		{"start --spool DIR --source-endpoints http://x --user u:", exitUsage, "--user without a name or a password"},
		{fmt.Sprintf("start --spool DIR --source-endpoints http://x --command-timeout 200ms --endpoints http://127.0.0.1:%d", nobody[0]), exitRefused, "give client URLs of running nodes to --endpoints"},
		{"status", exitUsage, "--spool is missing"},
		{"status --spool DIR", exitRefused, "holds no mirror: give the --spool of `skein mirror start`"},
		{"status --spool DIR -w xml", exitUsage, "there are table and json"},
		{"cutover", exitUsage, "--spool is missing"},
		{"cutover --spool DIR", exitRefused, "holds no mirror"},
		{"abandon --spool DIR", exitRefused, "holds no mirror"},
		{"abandon DIR", exitUsage, "unknown command"},
	} {
		var out bytes.Buffer
		line := strings.ReplaceAll(c.args, "DIR", filepath.Join(dir, "none"))
		code := execute(t.Context(), append([]string{"mirror"}, strings.Fields(line)...), nil, &out, &out)
		if code != c.code || !strings.Contains(out.String(), c.want) {
			t.Errorf("skein mirror %s: exit code %d, want %d and %q in\n%s", c.args, code, c.code, c.want, &out)
		}
	}
	if _, err := vfs.Default.Stat(filepath.Join(dir, "none")); err == nil {
		t.Error("a command that failed has made the directory")
	}
}

// TestMirrorRequests: a request stands where no mirror runs, and one that has ended takes none.
func TestMirrorRequests(t *testing.T) {
	for _, c := range []struct {
		step, command, want string
		code                int
	}{
		{"following", "status", "following: position 0 of 0", 0},
		{"following", "cutover", "does not run; the request stands\nnext: give its `skein mirror start` again", exitRefused},
		{"following", "abandon", "does not run; the request stands", exitRefused},
		{"done", "cutover", "the mirror in DIR has ended: it is done", exitRefused},
		{"failed", "cutover", "the mirror in DIR has ended: it is failed", exitRefused},
		{"failed", "abandon", "does not run; the request stands", exitRefused},
		{"done", "status -w json", `"step":"done"`, 0},
	} {
		dir := t.TempDir()
		state := fmt.Sprintf(`{"version":1,"step":%q,"nonce":"7","source":1,"after":1,"sum":{}}`, c.step)
		f, err := vfs.Default.Create(filepath.Join(dir, "state.json"), vfs.WriteCategoryUnspecified)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.Write([]byte(state)); err != nil {
			t.Fatal(err)
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
		var out bytes.Buffer
		code := execute(t.Context(), append([]string{"mirror"}, strings.Fields(c.command+" --spool "+dir)...), nil, &out, &out)
		if want := strings.ReplaceAll(c.want, "DIR", dir); code != c.code || !strings.Contains(out.String(), want) {
			t.Errorf("skein mirror %s, step %s: exit code %d, want %d and %q in\n%s", c.command, c.step, code, c.code, want, &out)
		}
		_, err = vfs.Default.Stat(filepath.Join(dir, c.command))
		if stands := strings.Contains(c.want, "stands"); stands != (err == nil) {
			t.Errorf("skein mirror %s, step %s: the request: %v", c.command, c.step, err)
		}
	}
	if _, err := mirror.ReadStatus(vfs.Default, t.TempDir()); err == nil {
		t.Error("an empty directory has a status")
	}
}
