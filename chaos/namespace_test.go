package chaos

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"testing"

	"go.uber.org/goleak"
)

// inside is set in the process that runs in namespaces of its own. It is a directory for what all tests need, which the
// parent process removes.
const inside = "SKEIN_CHAOS_INSIDE"

// noNamespace says why this process has no namespaces of its own, "" if it has.
var noNamespace string

// TestMain runs the tests in a process with its own mount namespace and network
// namespace. However the process ends, the kernel unmounts its mounts and removes its
// links.
func TestMain(m *testing.M) {
	if os.Getenv(inside) == "" {
		code, err := runInside()
		if err == nil {
			os.Exit(code)
		}
		noNamespace = fmt.Sprintf("namespaces: %v (it takes root)", err)
	} else if err := bringUp("lo"); err != nil {
		fmt.Fprintf(os.Stderr, "chaos: the loopback of the namespace: %v\n", err)
		os.Exit(1)
	}
	goleak.VerifyTestMain(m)
}

// outside runs f in the network of the test's parent process, where packages can be
// downloaded.
func outside(f func() error) error {
	if noNamespace != "" {
		return f()
	}
	s, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", os.Getppid()))
	if err != nil {
		return err
	}
	defer s.Close()
	return space{s}.do(f)
}

func runInside() (code int, err error) {
	// The death signal is bound to the thread that starts the process.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	self, err := os.Executable()
	if err != nil {
		return 0, err
	}
	dir, err := os.MkdirTemp("", "skein-chaos-binaries-")
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	cmd := exec.Command(self, os.Args[1:]...)
	cmd.Env = append(os.Environ(), inside+"="+dir)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	err = cmd.Wait()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		// -1 if a signal ended it; any code but 0 tells go test.
		return max(1, exit.ExitCode()), nil
	}
	return 0, err
}
