package node_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/skeindb/skein/internal/ports"
)

// The tests of this file run real processes: skein built from this tree, three
// nodes on loopback, used through clientv3.

// binaryDir is where the skein under test lies, once it is built.
var binaryDir string

func TestMain(m *testing.M) {
	m.Run()
	_ = os.RemoveAll(binaryDir)
}

// binary is the skein under test, built once.
var binary = sync.OnceValues(func() (path string, err error) {
	if binaryDir, err = os.MkdirTemp("", "skein-binary-"); err != nil {
		return "", err
	}
	path = filepath.Join(binaryDir, "skein")
	out, err := exec.Command("go", "build", "-tags", "invariants", "-o", path, "../cmd/skein").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("go build: %w\n%s", err, out)
	}
	return path, nil
})

// process is one node.
type process struct {
	name        string
	args        []string
	client      string
	log         *os.File
	cmd         *exec.Cmd
	exited      chan struct{}
	exitErr     error
	binary, dir string
}

// processes are the nodes of one cluster.
type processes struct {
	t     *testing.T
	nodes []*process
}

func unusedPorts(t *testing.T, n int) []int {
	t.Helper()
	p, err := ports.Unused(n)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// serving returns processes that serve.
func serving(t *testing.T) *processes {
	t.Helper()
	c := newProcesses(t)
	c.startAll()
	c.ready()
	return c
}

// newProcesses returns processes that are not started yet. Its tests wait most of their
// time, for elections, leases and nodes that start, and so run beside each other.
func newProcesses(t *testing.T) *processes {
	t.Helper()
	return newProcessesOf(t, 3)
}

func newProcessesOf(t *testing.T, nodes int) *processes {
	t.Helper()
	if testing.Short() {
		t.Skip("runs real processes")
	}
	t.Parallel()
	bin, err := binary()
	if err != nil {
		t.Fatal(err)
	}
	ports := unusedPorts(t, 2*nodes)
	var members []string
	for i := range nodes {
		members = append(members, fmt.Sprintf("n%d=http://127.0.0.1:%d", i+1, ports[nodes+i]))
	}
	c := &processes{t: t}
	dir := t.TempDir()
	for i := range nodes {
		client, peer := fmt.Sprintf("http://127.0.0.1:%d", ports[i]), fmt.Sprintf("http://127.0.0.1:%d", ports[nodes+i])
		p := &process{name: fmt.Sprintf("n%d", i+1), client: client, binary: bin, dir: dir}
		p.args = []string{
			"--name", p.name, "--data-dir", filepath.Join(dir, p.name),
			"--listen-client-urls", client, "--advertise-client-urls", client,
			"--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
			"--initial-cluster", strings.Join(members, ","), "--initial-ranges", "4", "--memory-budget-bytes", "1073741824",
		}
		c.nodes = append(c.nodes, p)
	}
	t.Cleanup(func() {
		for _, p := range c.nodes {
			p.kill()
			if t.Failed() {
				b, _ := os.ReadFile(p.logPath())
				t.Logf("--- log of %s\n%s", p.name, tail(b, 8<<10))
			}
		}
	})
	return c
}

func tail(b []byte, n int) []byte { return b[max(0, len(b)-n):] }

func (p *process) logPath() string { return filepath.Join(p.dir, p.name+".log") }

func (c *processes) start(p *process) {
	c.t.Helper()
	f, err := os.OpenFile(p.logPath(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		c.t.Fatal(err)
	}
	p.log = f
	p.cmd = exec.Command(p.binary, p.args...)
	p.cmd.Stdout, p.cmd.Stderr = f, f
	if err := p.cmd.Start(); err != nil {
		c.t.Fatal(err)
	}
	p.exited = make(chan struct{})
	go func(cmd *exec.Cmd, done chan struct{}) {
		p.exitErr = cmd.Wait()
		f.Close()
		close(done)
	}(p.cmd, p.exited)
}

func (c *processes) startAll() {
	for _, p := range c.nodes {
		c.start(p)
	}
}

// kill ends a process without a warning and waits until it is gone.
func (p *process) kill() {
	if p.cmd == nil || p.exited == nil {
		return
	}
	_ = p.cmd.Process.Kill()
	<-p.exited
}

// stopAll stops every process by SIGTERM, all at the same moment, and wants each
// to end by itself and well.
func (c *processes) stopAll() {
	c.t.Helper()
	for _, p := range c.nodes {
		_ = p.cmd.Process.Signal(syscall.SIGTERM)
	}
	for _, p := range c.nodes {
		select {
		case <-p.exited:
			if p.exitErr != nil {
				c.t.Errorf("%s ended with %v", p.name, p.exitErr)
			}
		case <-time.After(20 * time.Second):
			c.t.Fatalf("%s did not stop", p.name)
		}
	}
}

func (c *processes) clientOf(nodes ...*process) *clientv3.Client {
	c.t.Helper()
	var endpoints []string
	for _, p := range nodes {
		endpoints = append(endpoints, p.client)
	}
	cl, err := clientv3.New(clientv3.Config{Endpoints: endpoints, DialTimeout: 5 * time.Second, Logger: zap.NewNop()})
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() { cl.Close() })
	return cl
}

// ready waits until a put through each node succeeds, and returns how many puts
// that took.
func (c *processes) ready() (puts int) {
	c.t.Helper()
	for _, p := range c.nodes {
		cl := c.clientOf(p)
		deadline := time.Now().Add(60 * time.Second)
		for {
			ctx, cancel := context.WithTimeout(c.t.Context(), 10*time.Second)
			_, err := cl.Put(ctx, "ready", p.name)
			cancel()
			if err == nil {
				puts++
				break
			}
			if time.Now().After(deadline) {
				c.t.Fatalf("%s: not ready: %v", p.name, err)
			}
			// A node that has not opened its port refuses at once.
			time.Sleep(50 * time.Millisecond)
		}
	}
	return puts
}

// history is what the writers of a test were told.
type history struct {
	mu sync.Mutex
	// acked is the last acknowledged value of each key and its revision; each key
	// has one writer. maybe is what was sent after it and may have taken effect.
	acked map[string]string
	maybe map[string]map[string]bool
	// revisions is who was told each revision.
	revisions map[int64]string
	puts      int
	failed    map[string]int
}

func newHistory() *history {
	return &history{acked: map[string]string{}, maybe: map[string]map[string]bool{}, revisions: map[int64]string{}, failed: map[string]int{}}
}

// write puts ever new values to its keys until ctx ends, one every pace.
func (h *history) write(ctx context.Context, t *testing.T, cl *clientv3.Client, writer int, pace time.Duration) {
	t.Helper()
	rng := rand.New(rand.NewPCG(uint64(writer), 7))
	var last int64
	for i := 0; ctx.Err() == nil; i++ {
		time.Sleep(pace)
		key := fmt.Sprintf("%c/%d/%d", ' '+rng.IntN(95), writer, rng.IntN(5))
		value := fmt.Sprintf("%d-%d", writer, i)
		pctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 8*time.Second)
		resp, err := cl.Put(pctx, key, value)
		cancel()
		h.mu.Lock()
		if err != nil {
			h.failed[err.Error()]++
			if h.maybe[key] == nil {
				h.maybe[key] = map[string]bool{}
			}
			h.maybe[key][value] = true
			h.mu.Unlock()
			continue
		}
		h.puts++
		h.acked[key] = value
		delete(h.maybe, key)
		if other, twice := h.revisions[resp.Header.Revision]; twice {
			t.Errorf("revision %d was given to %s and to %s", resp.Header.Revision, other, value)
		}
		h.revisions[resp.Header.Revision] = value
		if resp.Header.Revision <= last {
			t.Errorf("writer %d: revision %d after %d", writer, resp.Header.Revision, last)
		}
		last = resp.Header.Revision
		h.mu.Unlock()
	}
}

// verify reads every key back through each node.
func (h *history) verify(t *testing.T, clients ...*clientv3.Client) {
	t.Helper()
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, cl := range clients {
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		all, err := cl.Get(ctx, "", clientv3.WithPrefix())
		cancel()
		if err != nil {
			t.Fatalf("reading everything: %v", err)
		}
		got := map[string]string{}
		for _, kv := range all.Kvs {
			got[string(kv.Key)] = string(kv.Value)
		}
		if all.Count != int64(len(all.Kvs)) {
			t.Errorf("count %d, but %d keys", all.Count, len(all.Kvs))
		}
		for key, value := range h.acked {
			if got[key] != value && !h.maybe[key][got[key]] {
				t.Errorf("%s = %q, acknowledged was %q", key, got[key], value)
			}
		}
	}
}

// No acknowledged write is lost and no revision given twice while any one of three
// nodes is killed with -9 under load, again and again.
func TestKillUnderLoad(t *testing.T) {
	c := serving(t)
	h := newHistory()
	ctx, cancel := context.WithCancel(t.Context())
	var writers sync.WaitGroup
	all := c.clientOf(c.nodes...)
	for w := range 16 {
		writers.Go(func() { h.write(ctx, t, all, w, 0) })
	}
	rng := rand.New(rand.NewPCG(uint64(time.Now().UnixNano()), 3))
	for round := range 6 {
		victim := c.nodes[round%3]
		time.Sleep(time.Second + time.Duration(rng.IntN(1000))*time.Millisecond)
		victim.kill()
		// Whatever it led must be led by others before it comes back.
		before, since := h.count(), time.Now()
		for h.count() < before+200 {
			if time.Since(since) > 30*time.Second {
				t.Fatalf("round %d: %d puts in 30s after %s was killed", round, h.count()-before, victim.name)
			}
			time.Sleep(50 * time.Millisecond)
		}
		t.Logf("round %d: %d puts %v after %s was killed", round, h.count()-before, time.Since(since).Round(time.Millisecond), victim.name)
		c.start(victim)
	}
	time.Sleep(2 * time.Second)
	cancel()
	writers.Wait()
	t.Logf("%d puts acknowledged, failed: %v", h.count(), h.failed)
	if h.count() < 100 {
		t.Errorf("only %d puts were acknowledged", h.count())
	}
	c.ready()
	h.verify(t, c.clientOf(c.nodes[0]), c.clientOf(c.nodes[1]), c.clientOf(c.nodes[2]))
}

func (h *history) count() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.puts
}

// A second signal ends a node at once, and bad flags are refused before anything
// is touched.
func TestWrongUse(t *testing.T) {
	c := newProcesses(t)
	for _, bad := range [][]string{
		{"--no-such-flag"},
		{"--name", "n9", "--initial-cluster", "n1=http://127.0.0.1:1"},
		{"--election-timeout", "10", "--heartbeat-interval", "100"},
		{"--data-dir", "/dev/null/x"},
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		out, err := exec.CommandContext(ctx, c.nodes[0].binary, bad...).CombinedOutput()
		cancel()
		var exit *exec.ExitError
		if !errors.As(err, &exit) || exit.ExitCode() <= 0 || len(bytes.TrimSpace(out)) == 0 {
			t.Errorf("skein %s: %v\n%s", strings.Join(bad, " "), err, out)
		}
	}
}

// A second signal ends a node at once, whatever the first one waits for.
func TestSecondSignalEndsAtOnce(t *testing.T) {
	c := serving(t)
	// With both others stopped, a clean stop waits for a quorum.
	for _, p := range c.nodes[1:] {
		if err := p.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
	}
	first := c.nodes[0]
	_ = first.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-first.exited:
		t.Log("the first signal was enough")
	case <-time.After(300 * time.Millisecond):
	}
	_ = first.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-first.exited:
	case <-time.After(5 * time.Second):
		t.Error("the second signal did not end the node")
	}
	for _, p := range c.nodes[1:] {
		_ = p.cmd.Process.Signal(syscall.SIGCONT)
	}
}

// trap 47: a node that lost its disk has forgotten its votes; with its old id it is
// not admitted again.
func TestANodeWithoutItsDiskIsRefused(t *testing.T) {
	c := serving(t)
	p := c.nodes[1]
	p.kill()
	if err := os.RemoveAll(filepath.Join(p.dir, p.name)); err != nil {
		t.Fatal(err)
	}
	c.start(p)
	select {
	case <-p.exited:
	case <-time.After(time.Minute):
		t.Fatal("the node runs")
	}
	log, err := os.ReadFile(p.logPath())
	if err != nil {
		t.Fatal(err)
	}
	if p.exitErr == nil || !bytes.Contains(log, []byte("has run before")) {
		t.Errorf("it ended with %v:\n%s", p.exitErr, tail(log, 1000))
	}
}

// trap 47: a founder whose disk is lost while no other one can be reached waits, says for
// whom, and is refused when it reaches them.
func TestAFounderWithoutItsDiskWaitsForTheOthers(t *testing.T) {
	c := serving(t)
	for _, p := range c.nodes {
		p.kill()
	}
	lost := c.nodes[0]
	if err := os.RemoveAll(filepath.Join(lost.dir, lost.name)); err != nil {
		t.Fatal(err)
	}
	c.start(lost)
	said := func(what string) {
		t.Helper()
		for deadline := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
			log, err := os.ReadFile(lost.logPath())
			if err == nil && bytes.Contains(log, []byte(what)) {
				return
			}
			if time.Now().After(deadline) {
				t.Fatalf("%s does not say %q: %v\n%s", lost.name, what, err, tail(log, 1000))
			}
		}
	}
	said("waits until a majority of the founders runs")
	c.start(c.nodes[1])
	select {
	case <-lost.exited:
	case <-time.After(time.Minute):
		t.Fatal("the node runs")
	}
	said("has run before: restore its directory")
}

// No acknowledged write is lost when all nodes are killed at the same moment, twice.
func TestKillAllAtOnce(t *testing.T) {
	c := serving(t)
	h := newHistory()
	for round := range 2 {
		ctx, cancel := context.WithCancel(t.Context())
		var writers sync.WaitGroup
		all := c.clientOf(c.nodes...)
		for w := range 16 {
			writers.Go(func() { h.write(ctx, t, all, 100*round+w, 0) })
		}
		before := h.count()
		for h.count() < before+500 {
			time.Sleep(10 * time.Millisecond)
		}
		for _, p := range c.nodes {
			_ = p.cmd.Process.Kill()
		}
		for _, p := range c.nodes {
			<-p.exited
		}
		cancel()
		all.Close()
		writers.Wait()
		c.startAll()
		c.ready()
		h.verify(t, c.clientOf(c.nodes[round]), c.clientOf(c.nodes[2]))
	}
}
