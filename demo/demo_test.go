package demo

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/goleak"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/skeindb/skein/config"
	"github.com/skeindb/skein/embed"
	"github.com/skeindb/skein/internal/ports"
)

// asNode has the test's program be a node of a demo, and asDemo a demo with a kill that never comes, in that directory and at
// the ports from its first argument on.
const asNode, asDemo = "SKEIN_DEMO_NODE", "SKEIN_DEMO_DIR"

func TestMain(m *testing.M) {
	if dir := os.Getenv(asDemo); dir != "" {
		if err := runDemo(dir, os.Args[1]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	if os.Getenv(asNode) != "" {
		if err := runNode(os.Args[1:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	goleak.VerifyTestMain(m)
}

// runNode is skein start.
func runNode(args []string) error {
	cfg, _, err := config.Load(args, nil)
	if err != nil {
		return err
	}
	log, err := cfg.Log.Build()
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGTERM)
	defer stop()
	s, err := embed.Start(ctx, cfg, embed.WithLogger(log))
	if err != nil {
		return err
	}
	select {
	case <-ctx.Done():
	case <-s.Done():
	}
	return errors.Join(s.Err(), s.Stop(context.Background()))
}

// runDemo is skein demo --kill, which kills no node.
func runDemo(dir, port string) error {
	if err := errors.Join(os.Unsetenv(asDemo), os.Setenv(asNode, "1")); err != nil {
		return err
	}
	first, err := strconv.Atoi(port)
	if err != nil {
		return err
	}
	o := Options{Nodes: 3, Ranges: 1, DataDir: dir, Port: first, Kill: true, Command: []string{os.Args[0]}}
	return kill(context.Background(), &o, phases{before: time.Hour}, os.Stdout)
}

// A demo that is killed itself leaves no nodes behind.
func TestAKilledDemoLeavesNoNodes(t *testing.T) {
	if testing.Short() {
		t.Skip("runs real processes")
	}
	port := freePorts(t, 6)
	dir := t.TempDir()
	cmd := exec.Command(os.Args[0], strconv.Itoa(port))
	cmd.Env, cmd.Stderr = append(os.Environ(), asDemo+"="+dir), os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line, rerr := bufio.NewReader(out).ReadString('\n') // the nodes serve
	before := processesOf(t, dir)
	if err := cmd.Process.Kill(); err != nil {
		t.Error(err)
	}
	_ = cmd.Wait() // it was killed
	if rerr != nil || !strings.Contains(line, "serve etcd clients") || len(before) != 3 {
		t.Fatalf("%q, %v, nodes %v", line, rerr, before)
	}
	for end := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		left := processesOf(t, dir)
		if len(left) == 0 {
			return
		}
		if time.Now().After(end) {
			for _, id := range left {
				if pid, err := strconv.Atoi(id); err == nil {
					_ = syscall.Kill(pid, syscall.SIGKILL)
				}
			}
			t.Fatalf("of the nodes %v these live on: %v", before, left)
		}
	}
}

// processesOf returns the ids of the processes that have a file of that directory in their command lines.
func processesOf(t *testing.T, dir string) (ids []string) {
	t.Helper()
	all, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil || len(all) == 0 {
		t.Fatalf("%v, %v", all, err)
	}
	for _, file := range all {
		if line, err := os.ReadFile(file); err == nil && bytes.Contains(line, []byte(dir+"/")) { // an error: it has ended
			ids = append(ids, filepath.Base(filepath.Dir(file)))
		}
	}
	return ids
}

// TestKill: the node that allocates the revisions is killed under load and started again. The demo judges by itself that nothing
// is lost; here it has to have seen what it says.
func TestKill(t *testing.T) {
	if testing.Short() {
		t.Skip("runs real processes")
	}
	t.Setenv(asNode, "1")
	o := Options{Nodes: 3, Ranges: 4, DataDir: t.TempDir(), Port: freePorts(t, 6), Kill: true, Command: []string{os.Args[0]}}
	var out bytes.Buffer
	if err := kill(t.Context(), &o, phases{before: 200 * time.Millisecond, down: 200 * time.Millisecond, after: 200 * time.Millisecond}, &out); err != nil {
		t.Errorf("%v", err)
		for i := range o.Nodes {
			b, _ := os.ReadFile(filepath.Join(o.DataDir, fmt.Sprintf("n%d.log", i+1)))
			t.Logf("n%d: %s", i+1, b[max(0, len(b)-4<<10):])
		}
	}
	for _, want := range []string{
		`3 nodes with 4 ranges, a process each, serve`, `kill -9 of n\d, which allocated the revisions and led \d of 4 ranges, after \d+ writes\n`,
		`writes stood still for \S*[1-9]\S*s, then went on`, `n\d is started again, and serves after`, `[1-9]\d+ writes were acknowledged: none is lost\n`,
		`each of the 3 watchers got all of them`,
	} {
		if !regexp.MustCompile(want).MatchString(out.String()) {
			t.Errorf("%q is missing in\n%s", want, &out)
		}
	}
}

// A write that is lost, and an event that is missing, comes twice or too early, is found.
func TestJudgement(t *testing.T) {
	event := func(key string, revision int64) *clientv3.Event {
		return &clientv3.Event{Type: clientv3.EventTypePut, Kv: &mvccpb.KeyValue{Key: []byte(key), ModRevision: revision}}
	}
	all := []string{"a", "b"}
	for want, events := range map[string][]*clientv3.Event{
		"":                             {event("a", 2), event("x", 3), event("b", 4)},
		`has not got the event of "b"`: {event("a", 2)},
		"the event of revision 2 came behind that of 4": {event("a", 2), event("b", 4), event("a", 2)},
		"the event of revision 3 came behind that of 4": {event("a", 4), event("b", 3)},
	} {
		o := observer{seen: map[string]bool{}, complete: true}
		for _, e := range events {
			o.take(e)
		}
		if err := o.judge(all); (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	if err := (&observer{}).judge(nil); err == nil {
		t.Error("a watch that ended early counts as complete")
	}
}

// freePorts returns the first of n ports in a row that nobody has, for TCP or UDP.
func freePorts(t *testing.T, n int) int {
	t.Helper()
	p, err := ports.Unused(n)
	if err != nil {
		t.Fatal(err)
	}
	return p[0]
}

// TestLoad: the whole demo with a load test, twice on the same data.
func TestLoad(t *testing.T) {
	o := Options{Nodes: 3, Ranges: 4, DataDir: t.TempDir(), Port: freePorts(t, 6), Load: 300 * time.Millisecond}
	for range 2 {
		var out bytes.Buffer
		if err := Run(t.Context(), o, &out, zap.NewNop()); err != nil {
			t.Fatalf("%v\n%s", err, &out)
		}
		for _, want := range []string{"3 nodes with 4 ranges serve etcd clients", "etcdctl --endpoints 127.0.0.1:", "verified 10000 keys", "0 violations"} {
			if !strings.Contains(out.String(), want) {
				t.Errorf("%q is missing in\n%s", want, &out)
			}
		}
	}
}

// watched is an output that tells when a line is there.
type watched struct {
	mu   sync.Mutex
	text strings.Builder
	line string
	seen chan struct{}
}

func (w *watched) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	before := strings.Contains(w.text.String(), w.line)
	w.text.Write(b)
	if !before && strings.Contains(w.text.String(), w.line) {
		close(w.seen)
	}
	return len(b), nil
}

// TestInterrupted: without a load test the cluster serves at the port that it was
// given until the context ends, and leaves nothing behind.
func TestInterrupted(t *testing.T) {
	tmp := t.TempDir()
	t.Setenv("TMPDIR", tmp)
	o := Options{Nodes: 1, Ranges: 2, Port: freePorts(t, 2)}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	out := &watched{line: "Ctrl-C stops it.", seen: make(chan struct{})}
	ended := make(chan error)
	go func() { ended <- Run(ctx, o, out, zap.NewNop()) }()
	select {
	case err := <-ended:
		t.Fatalf("ended: %v", err)
	case <-out.seen:
	}
	if left, err := os.ReadDir(tmp); err != nil || len(left) != 1 {
		t.Errorf("the data is not in the temporary directory: %v, %v", left, err)
	}
	cl, err := clientv3.New(clientv3.Config{Endpoints: []string{loopback(o.Port)[0].Host}, Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := cl.Put(ctx, "greeting", "hello"); err != nil {
		t.Error(err)
	}
	cl.Close()
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if left, err := os.ReadDir(tmp); err != nil || len(left) != 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

// TestPortTaken: the refusal names the flag that helps, and nothing is left running. The other
// node does not wait for the one that failed.
func TestPortTaken(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	for name, take := range map[string]func(port int) (io.Closer, error){
		"of clients": func(port int) (io.Closer, error) {
			return net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: port + 1})
		},
		"of peers": func(port int) (io.Closer, error) {
			return net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1), Port: port + 3})
		},
	} {
		t.Run(name, func(t *testing.T) {
			port := freePorts(t, 4)
			l, err := take(port)
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			var out bytes.Buffer
			err = Run(ctx, Options{Nodes: 2, Ranges: 1, Port: port}, &out, zap.NewNop())
			if ctx.Err() != nil {
				t.Error("it did not end by itself")
			}
			if err == nil || !strings.Contains(err.Error(), "n2: ") || strings.Contains(err.Error(), "n1: ") ||
				!strings.Contains(err.Error(), "give other ports with --port") || out.Len() > 0 {
				t.Errorf("%v\n%s", err, &out)
			}
		})
	}
}

func TestValidate(t *testing.T) {
	good := Options{Nodes: 3, Ranges: 4, Port: 2379}
	if err := good.Validate(); err != nil {
		t.Error(err)
	}
	for want, change := range map[string]func(*Options){
		"--nodes must be between 1 and 9 (set to 0)":                     func(o *Options) { o.Nodes = 0 },
		"--nodes must be between 1 and 9 (set to 10)":                    func(o *Options) { o.Nodes = 10 },
		"--ranges must be between 1 and 10000 (set to 0)":                func(o *Options) { o.Ranges = 0 },
		"--ranges must be between 1 and 10000 (set to 10001)":            func(o *Options) { o.Ranges = 10001 },
		"--port must leave room for 6 ports up to 65535 (set to 0)":      func(o *Options) { o.Port = 0 },
		"--port must leave room for 6 ports up to 65535 (set to 65531)":  func(o *Options) { o.Port = 65531 },
		"--kill has a load of its own: leave --load out":                 func(o *Options) { o.Kill, o.Load = true, time.Second },
		"--kill needs --nodes 3 at least, of which two go on (set to 2)": func(o *Options) { o.Kill, o.Nodes = true, 2 },
		"--load must not be negative (set to -1s)":                       func(o *Options) { o.Load = -time.Second },
	} {
		o := good
		change(&o)
		if err := o.Validate(); err == nil || err.Error() != want {
			t.Errorf("got %v, want %s", err, want)
		}
		if err := Run(t.Context(), o, nil, zap.NewNop()); err == nil || err.Error() != want {
			t.Errorf("Run: got %v, want %s", err, want)
		}
	}
	// The last port is a port.
	last := Options{Nodes: 3, Ranges: 1, Port: 65530}
	if err := last.Validate(); err != nil {
		t.Error(err)
	}
}
