package helm

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"
)

// inside is set in the process that runs the tests. It is the directory of the programs that they need.
const inside = "SKEIN_CHART_INSIDE"

// TestMain builds helm and skein, and runs the tests in a process with mounts and a network of its own, as far as this
// user may have them. However that process ends, nothing of its networks is left.
func TestMain(m *testing.M) {
	if os.Getenv(inside) != "" {
		os.Exit(m.Run())
	}
	code, err := runInside()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

func runInside() (code int, err error) {
	dir, err := os.MkdirTemp("", "skein-chart-")
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	if err := os.Chmod(dir, 0o755); err != nil { // programs in it run as another user
		return 0, err
	}
	for name, build := range map[string]string{"helm": "go build -o $0 helm.sh/helm/v4/cmd/helm", "skein": "go build -C ../.. -trimpath -ldflags='-s -w' -o $0 ./cmd/skein"} {
		c := exec.Command("sh", "-c", build, filepath.Join(dir, name))
		c.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := c.CombinedOutput(); err != nil {
			return 0, fmt.Errorf("%s: %w\n%s", build, err, out)
		}
	}
	self, err := os.Executable()
	if err != nil {
		return 0, err
	}
	// The death signal is bound to the thread that starts the process.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	c := exec.Command(self, os.Args[1:]...)
	c.Env = append(os.Environ(), inside+"="+dir)
	c.Stdin, c.Stdout, c.Stderr = os.Stdin, os.Stdout, os.Stderr
	c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if os.Getuid() == 0 {
		c.SysProcAttr.Unshareflags = syscall.CLONE_NEWNS | syscall.CLONE_NEWNET
	}
	err = c.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return max(1, exit.ExitCode()), nil // -1 if a signal ended it
	}
	return 0, err
}

// program is the path of a program that was built for the tests.
func program(name string) string { return filepath.Join(os.Getenv(inside), name) }

// leaveOut is internal/leftout's Because: this module does not require Skein's.
func leaveOut(t *testing.T, format string, args ...any) {
	t.Helper()
	leave := t.Skipf
	if os.Getenv("SKEIN_NOTHING_LEFT_OUT") != "" {
		leave = t.Fatalf
	}
	leave("left out: "+format, args...)
}

// output runs a command and returns what it prints.
func output(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %q: %v\n%s", name, args, err, out)
	}
	return string(out)
}
