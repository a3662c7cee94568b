package node_test

import (
	"bytes"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// A process honours the flags of sockets, memory, the log's files and the disk that etcd's users set.
func TestFlagsOfEtcdsUsers(t *testing.T) {
	c := newProcessesOf(t, 1)
	p, page, log := c.nodes[0], unusedPorts(t, 1)[0], filepath.Join(t.TempDir(), "skein.log")
	p.args = append(p.args, "--socket-reuse-port", "--socket-reuse-address", "--unsafe-no-fsync",
		"--listen-client-http-urls", fmt.Sprintf("http://127.0.0.1:%d", page),
		"--log-outputs", log, "--enable-log-rotation", "--log-rotation-config-json", `{"maxsize": 1, "maxbackups": 2}`)
	c.startAll()
	c.ready()
	a, err := http.Get(fmt.Sprintf("http://127.0.0.1:%d/version", page))
	if err != nil || a.StatusCode != http.StatusOK {
		t.Fatal(a, err)
	}
	_ = a.Body.Close()
	if a, err := http.Get(p.client + "/version"); err == nil {
		_ = a.Body.Close()
		t.Errorf("the client URL serves HTTP: %s", a.Status)
	}
	b, err := os.ReadFile(log)
	if err != nil || !bytes.Contains(b, []byte("NEVER WAITS FOR THE DISK")) {
		t.Errorf("%v, the log:\n%s", err, tail(b, 2000))
	}
	c.stopAll()
}

// With --memory-mlock the kernel counts locked memory, or the process says what it lacks and does not start.
func TestMemoryLock(t *testing.T) {
	c := newProcessesOf(t, 1)
	p := c.nodes[0]
	p.args = append(p.args, "--memory-mlock")
	c.startAll()
	locked := func() string {
		b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
		for line := range strings.Lines(string(b)) {
			if size, ok := strings.CutPrefix(line, "VmLck:"); ok {
				return strings.TrimSpace(size)
			}
		}
		return ""
	}
	for locked() == "" || locked() == "0 kB" {
		select {
		case <-p.exited:
			if b, _ := os.ReadFile(p.logPath()); p.exitErr == nil || !bytes.Contains(b, []byte("may not lock its memory")) {
				t.Errorf("%v\n%s", p.exitErr, tail(b, 2000))
			}
			t.Log("this process may not lock memory, and its node says so")
			return
		case <-time.After(20 * time.Millisecond):
		}
	}
	t.Log("locked: " + locked())
	c.ready()
	c.stopAll()
}
