package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/skeindb/skein/internal/ports"
)

// program is skein under the name of a link to it.
func program(t *testing.T, name string, env []string, args ...string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	c := exec.CommandContext(t.Context(), self)
	c.Args = append([]string{name}, args...)
	c.Env = append(append(os.Environ(), asCommand+"=1"), env...)
	return c
}

// members returns the client URLs of all nodes.
func members(t *testing.T, client *clientv3.Client) (urls []string) {
	t.Helper()
	resp, err := client.MemberList(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range resp.Members {
		urls = append(urls, m.ClientURLs...)
	}
	return urls
}

// etcd's own command line is in the same program, by skein etcdctl and by a link's name. Its habit of taking a command
// by its first letters is not skein's.
func TestEtcdctl(t *testing.T) {
	if testing.Short() {
		t.Skip("it starts a process for each command")
	}
	url, client := runningCluster(t, 3)
	at := []string{"ETCDCTL_ENDPOINTS=" + url}
	for _, c := range []struct {
		name, line, input, want string
		code                    int
	}{
		{"skein", "etcdctl --endpoints " + url + " put a 1", "", "OK\n", 0},
		{"/usr/bin/etcdctl", "put b 2", "", "OK\n", 0},
		{"etcdctl", "get a --print-value-only", "", "1\n", 0},
		{"skein", "etcdctl get -w fields b", "", `"Key" : "b"`, 0},
		{"etcdctl", "txn", "value(\"a\") = \"1\"\n\nput c 3\n\n\n", "SUCCESS", 0},
		{"etcdctl", "del --prefix c", "", "1\n", 0},
		{"etcdctl", "lease grant 60", "", "granted with TTL(60s)", 0},
		{"etcdctl", "endpoint health --cluster", "", "is healthy", 0},
		{"etcdctl", "memb list", "", ", started, ", 0},
		{"skein", "etcdctl --help", "", "A simple command line client for etcd3.", 0},
		{"etcdctl", "snapshot save " + filepath.Join(t.TempDir(), "a.db"), "", "Snapshot saved at", 0},
		{"etcdctl", "no-such-command", "", `unknown command "no-such-command" for "etcdctl"`, 1},
		{"skein", "grpc-proxy start", "", "/skein-grpc-proxy: no such file or directory: it lies beside skein", 1},
		{"skein", "rang list", "", `unknown command "rang"`, 2},
	} {
		env := at
		if strings.Contains(c.line, "--endpoints") {
			env = nil // etcdctl takes no flag beside its variable
		}
		p := program(t, c.name, env, strings.Fields(c.line)...)
		p.Stdin = strings.NewReader(c.input)
		out, err := p.CombinedOutput()
		if p.ProcessState.ExitCode() != c.code || !strings.Contains(string(out), c.want) {
			t.Errorf("%s %s: %v\n%s", c.name, c.line, err, out)
		}
	}
	watch := program(t, "etcdctl", at, "watch", "w")
	out, err := watch.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := watch.Start(); err != nil {
		t.Fatal(err)
	}
	// The watch may begin later than the first of them.
	seen := make(chan string, 1)
	go func() {
		b := make([]byte, len("PUT\nw\n"))
		_, _ = io.ReadFull(out, b)
		seen <- string(b)
	}()
	awaits(t, "an event", func() bool {
		mustPut(t, client, "w", "v")
		return len(seen) > 0
	})
	if got := <-seen; got != "PUT\nw\n" {
		t.Errorf("watched %q", got)
	}
	if err := watch.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	_ = watch.Wait() // it would not return if skein's handler of signals were there still
}

// Clients reach the cluster through etcd's gateway, past a node that is not there. What cannot work is refused.
func TestGateway(t *testing.T) {
	_, direct := runningCluster(t, 3)
	free, err := ports.Unused(2)
	if err != nil {
		t.Fatal(err)
	}
	listen, silent := fmt.Sprintf("127.0.0.1:%d", free[0]), fmt.Sprintf("127.0.0.1:%d", free[1])
	ctx, cancel := context.WithCancel(t.Context())
	code := make(chan int, 1)
	var stderr bytes.Buffer
	go func() {
		nodes := strings.Join(append([]string{silent}, members(t, direct)...), ",")
		code <- execute(ctx, []string{"gateway", "start", "--listen-addr", listen, "--endpoints", nodes}, nil, io.Discard, &stderr)
	}()
	awaits(t, "the gateway", func() bool {
		c, err := net.Dial("tcp", listen)
		if err == nil {
			c.Close()
		}
		return err == nil
	})
	for range 4 { // each connection goes to the next node
		client, err := clientv3.New(clientv3.Config{Endpoints: []string{listen}, Logger: zap.NewNop()})
		if err != nil {
			t.Fatal(err)
		}
		watching, stop := context.WithCancel(t.Context())
		events := client.Watch(watching, "k", clientv3.WithCreatedNotify())
		if r := <-events; !r.Created {
			t.Errorf("%+v", r)
		}
		at := mustPut(t, client, "k", "v")
		if r := <-events; len(r.Events) != 1 || r.Events[0].Kv.ModRevision != at {
			t.Errorf("%+v, put at %d", r, at)
		}
		if got, err := direct.Get(t.Context(), "k"); err != nil || got.Kvs[0].ModRevision != at {
			t.Errorf("%v, %v", got, err)
		}
		stop()
		client.Close()
	}
	cancel()
	if c := <-code; c != 0 {
		t.Errorf("exit %d: %s", c, &stderr)
	}
	for args, want := range map[string]string{
		"--endpoints 127.0.0.1:23790":                             "leads to --listen-addr 127.0.0.1:23790, the gateway itself",
		"--listen-addr 0.0.0.0:23790 --endpoints 127.0.0.1:23790": "the gateway itself",
		"--listen-addr :23790 --endpoints 127.0.0.2:23790":        "the gateway itself",
		"--endpoints 127.0.0.1":                                   `--endpoints: "127.0.0.1" is not HOST:PORT`,
		"--endpoints http://127.0.0.1:0":                          "has no port from 1 to 65535",
		"--endpoints=":                                            "--endpoints must not be empty",
		"--listen-addr 127.0.0.1":                                 `--listen-addr: "127.0.0.1" is not HOST:PORT`,
		"--discovery-srv nowhere.invalid":                         "--discovery-srv: ",
		"--listen-addr 192.0.2.1:1":                               "--listen-addr: listen tcp 192.0.2.1:1: ",
		"--endpoints 127.0.0.1:1,nowhere.invalid:1":               "--endpoints: lookup nowhere.invalid",
	} {
		var stderr bytes.Buffer
		code := execute(t.Context(), append([]string{"gateway", "start"}, strings.Fields(args)...), nil, io.Discard, &stderr)
		if code != exitRefused || !strings.Contains(stderr.String(), want) {
			t.Errorf("%s: exit %d: %s", args, code, &stderr)
		}
	}
}

// scarce is a listener for which there is no file now and then.
type scarce struct {
	net.Listener
	left []error
}

func (s *scarce) Accept() (net.Conn, error) {
	if len(s.left) == 0 {
		return nil, net.ErrClosed
	}
	err := s.left[0]
	s.left = s.left[1:]
	if err != nil {
		return nil, &net.OpError{Op: "accept", Err: os.NewSyscallError("accept4", err)}
	}
	near, far := net.Pipe()
	far.Close()
	return near, nil
}

// TestPatient: a gateway whose files are used up waits for one, and ends neither itself nor its connections.
func TestPatient(t *testing.T) {
	l := patient{&scarce{left: []error{syscall.EMFILE, syscall.ENFILE, syscall.ECONNABORTED, nil}}, t.Context(), zap.NewNop()}
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
	if _, err := l.Accept(); !errors.Is(err, net.ErrClosed) {
		t.Error(err)
	}
}

// unit is a node in a process of its own, as a service manager starts it.
type unit struct {
	*exec.Cmd
	// make makes the command anew, with the same settings and directory.
	make         func() *exec.Cmd
	client, peer string
	output       *bytes.Buffer
	told         *net.UnixConn
}

// newUnit is a program with those variables, and ports that nobody uses, under a service manager.
func newUnit(t *testing.T, name string, env []string, args ...string) *unit {
	t.Helper()
	if testing.Short() {
		t.Skip("it starts a process")
	}
	free, err := ports.Unused(2)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	u := &unit{
		client: fmt.Sprintf("http://127.0.0.1:%d", free[0]), peer: fmt.Sprintf("http://127.0.0.1:%d", free[1]),
		output: &bytes.Buffer{},
	}
	socket := filepath.Join(dir, "notify")
	if u.told, err = net.ListenUnixgram("unixgram", &net.UnixAddr{Name: socket, Net: "unixgram"}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { u.told.Close() })
	env = append(env, "NOTIFY_SOCKET="+socket, "ETCD_DATA_DIR="+filepath.Join(dir, "data"),
		"ETCD_LISTEN_CLIENT_URLS="+u.client, "ETCD_ADVERTISE_CLIENT_URLS="+u.client,
		"ETCD_LISTEN_PEER_URLS="+u.peer, "ETCD_INITIAL_ADVERTISE_PEER_URLS="+u.peer)
	u.make = func() *exec.Cmd { return program(t, name, env, args...) }
	return u
}

// start starts the unit, with more arguments. The test ends it.
func (u *unit) start(t *testing.T, more ...string) {
	t.Helper()
	u.Cmd = u.make()
	u.Args = append(u.Args, more...)
	u.Stdout, u.Stderr = u.output, u.output
	if err := u.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		u.kill()
		if t.Failed() {
			t.Logf("%s", u.output)
		}
	})
}

func (u *unit) kill() {
	_ = u.Process.Kill()
	_ = u.Wait()
}

func startUnit(t *testing.T, name string, env []string, args ...string) *unit {
	t.Helper()
	u := newUnit(t, name, env, args...)
	u.start(t)
	return u
}

// awaitTold waits until the manager was told so.
func (u *unit) awaitTold(t *testing.T, want string) {
	t.Helper()
	b := make([]byte, 4096)
	for {
		n, err := u.told.Read(b)
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(b[:n]), want) {
			return
		}
	}
}

// dropIn is the one for a unit, of OPERATIONS.md.
func dropIn(t *testing.T, unit string) string {
	t.Helper()
	page, err := os.ReadFile("../../docs/OPERATIONS.md")
	if err != nil {
		t.Fatal(err)
	}
	_, text, found := strings.Cut(string(page), "systemctl edit "+unit)
	_, text, begun := strings.Cut(text, "```ini\n")
	text, _, ended := strings.Cut(text, "```")
	if !found || !begun || !ended {
		t.Fatalf("OPERATIONS.md has no drop-in for %s", unit)
	}
	return text
}

// etcd's own unit (contrib/systemd/etcd.service) works with skein, with the drop-in that OPERATIONS.md has: it gets its settings by
// variables, and is ready when it serves. What it starts is in the Debian package.
func TestEtcdsOwnUnit(t *testing.T) {
	text, err := os.ReadFile("testdata/etcd.service")
	if err != nil {
		t.Fatal(err)
	}
	var env, command []string
	last := map[string]string{}
	for line := range strings.Lines(string(text) + dropIn(t, "etcd")) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		value = strings.ReplaceAll(value, "%m", "0f0f0f")
		last[key] = value
		switch key {
		case "Environment":
			env = append(env, value)
		case "ExecStart":
			if command = append(command, strings.Fields(value)...); value == "" { // it takes back what was said before
				command = nil
			}
		case "Type":
			if value != "notify" {
				t.Fatalf("the unit is of type %s", value)
			}
		}
	}
	if pack, err := os.ReadFile("../../deploy/deb/nfpm.yaml"); err != nil || len(command) != 1 || !strings.Contains(string(pack), "dst: "+command[0]+",") {
		t.Fatalf("it starts %q, which the Debian package does not have (%v)", command, err)
	}
	// A node that was decommissioned ends with 0, and each further start of it with exitRemoved.
	if last["Restart"] != "on-failure" || last["RestartPreventExitStatus"] != strconv.Itoa(exitRemoved) {
		t.Errorf("a node that was removed is started again: Restart=%s, RestartPreventExitStatus=%s", last["Restart"], last["RestartPreventExitStatus"])
	}
	u := startUnit(t, command[0], env)
	u.awaitTold(t, "READY=1")
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{u.client}, Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	mustPut(t, client, "k", "v")
	if got, err := client.MemberList(t.Context()); err != nil || got.Members[0].Name != "0f0f0f" {
		t.Errorf("%v, %v", got, err)
	}
	if err := u.Process.Signal(unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	u.awaitTold(t, "STOPPING=1")
	if err := u.Wait(); err != nil {
		t.Errorf("it ended with %v", err)
	}
}

// The log of a node that has data is moved as OPERATIONS.md says. Without that the node does not start, and says what to do.
func TestLogIsMoved(t *testing.T) {
	u := newUnit(t, "skein", nil)
	var data string
	for _, v := range u.make().Env {
		if dir, is := strings.CutPrefix(v, "ETCD_DATA_DIR="); is {
			data = dir
		}
	}
	log := filepath.Join(t.TempDir(), "log")
	serves := func(args ...string) *clientv3.Client {
		t.Helper()
		u.start(t, args...)
		u.awaitTold(t, "READY=1")
		client, err := clientv3.New(clientv3.Config{Endpoints: []string{u.client}, Logger: zap.NewNop()})
		if err != nil {
			t.Fatal(err)
		}
		return client
	}
	stops := func() {
		t.Helper()
		if err := errors.Join(u.Process.Signal(unix.SIGTERM), u.Wait()); err != nil {
			t.Fatal(err)
		}
	}
	client := serves()
	mustPut(t, client, "k", "v")
	client.Close()
	stops()

	u.start(t, "--wal-dir="+log)
	if err := u.Wait(); err == nil || !strings.Contains(u.output.String(), "move all files from there to "+log) {
		t.Fatalf("before the move it ended with %v", err)
	}
	page, err := os.ReadFile("../../docs/OPERATIONS.md")
	if err != nil {
		t.Fatal(err)
	}
	_, text, _ := strings.Cut(string(page), "\nsudo systemctl stop skein\n")
	text, _, found := strings.Cut(text, "```")
	if !found {
		t.Fatal("OPERATIONS.md does not say how to move a log")
	}
	text = strings.NewReplacer("sudo systemctl start skein", "true", "sudo ", "", "/var/lib/skein", data, "/srv/wal/skein", log).Replace(text)
	if out, err := exec.CommandContext(t.Context(), "sh", "-ec", text).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", text, err, out)
	}
	client = serves("--wal-dir=" + log)
	defer client.Close()
	if got, err := client.Get(t.Context(), "k"); err != nil || len(got.Kvs) != 1 || string(got.Kvs[0].Value) != "v" {
		t.Errorf("after the move: %v, %v", got, err)
	}
	stops()
	if _, err := os.Stat(filepath.Join(data, "wal")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the old log is there: %v", err)
	}
}

// From SIGTERM on /readyz fails, and the node serves on for --shutdown-delay. A second signal ends it at once.
func TestShutdownDelay(t *testing.T) {
	u := startUnit(t, "skein", nil, "--shutdown-delay=1h")
	u.awaitTold(t, "READY=1")
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{u.client}, Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	mustPut(t, client, "k", "before")
	page := func(path string) (int, string) {
		resp, err := http.Get(u.client + path)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		b, _ := io.ReadAll(resp.Body)
		return resp.StatusCode, string(b)
	}
	if code, body := page("/readyz"); code != http.StatusOK {
		t.Errorf("before: %d %s", code, body)
	}
	if err := u.Process.Signal(unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	u.awaitTold(t, "STATUS=serve on for --shutdown-delay")
	if code, body := page("/readyz"); code != http.StatusServiceUnavailable || !strings.Contains(body, "[-]stopping failed: the node stops") {
		t.Errorf("after SIGTERM: %d %s", code, body)
	}
	if code, body := page("/livez"); code != http.StatusOK {
		t.Errorf("after SIGTERM, /livez: %d %s", code, body)
	}
	mustPut(t, client, "k", "meanwhile")
	if err := u.Process.Signal(unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := u.Wait(); err == nil || u.ProcessState.Sys().(interface{ Signal() unix.Signal }).Signal() != unix.SIGTERM {
		t.Errorf("after the second signal it ended with %v", err)
	}
	http.DefaultClient.CloseIdleConnections()
}

// The delay ends by itself.
func TestShutdownDelayEnds(t *testing.T) {
	u := startUnit(t, "skein", nil, "--shutdown-delay=1ms")
	u.awaitTold(t, "READY=1")
	if err := u.Process.Signal(unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := u.Wait(); err != nil {
		t.Errorf("it ended with %v", err)
	}
}

// A node of a cluster that has run is ready without a quorum: units that are started one after the other do not wait
// for each other. Only the first start of a cluster needs a majority of the founders.
func TestReadyWithoutAQuorum(t *testing.T) {
	var units []*unit
	var cluster []string
	for i := range 3 {
		name := fmt.Sprintf("n%d", i+1)
		u := newUnit(t, "skein", nil, "--name="+name)
		units, cluster = append(units, u), append(cluster, name+"="+u.peer)
	}
	found := "--initial-cluster=" + strings.Join(cluster, ",")
	for _, u := range units {
		u.start(t, found)
	}
	for _, u := range units {
		u.awaitTold(t, "READY=1")
	}
	for _, u := range units {
		u.kill()
	}
	units[0].start(t, found)
	units[0].awaitTold(t, "READY=1")
}
