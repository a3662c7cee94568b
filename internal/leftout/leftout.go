// Package leftout ends tests that this machine cannot run. They are skipped with the reason. Where SKEIN_NOTHING_LEFT_OUT is set, as
// CI and make soak have it, they fail: no run is green though a part of it did not run.
package leftout

import (
	"os"
	"os/exec"
	"testing"
)

// nothing says whether what is left out is a failure.
func nothing() bool { return os.Getenv("SKEIN_NOTHING_LEFT_OUT") != "" }

// Because ends the test with the reason.
func Because(t testing.TB, format string, args ...any) {
	t.Helper()
	leave := t.Skipf
	if nothing() {
		leave = t.Fatalf
	}
	leave("left out: "+format, args...)
}

// Part says that a part of the test is left out, and why. The rest goes on.
func Part(t testing.TB, format string, args ...any) {
	t.Helper()
	leave := t.Logf
	if nothing() {
		leave = t.Errorf
	}
	leave("left out: "+format, args...)
}

// Tool returns the path of a program. Where it is missing it ends the test, and names Debian's package that has it.
func Tool(t testing.TB, name, pack string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		Because(t, "%s is missing (Debian: apt-get install %s)", name, pack)
	}
	return path
}
