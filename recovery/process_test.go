package recovery_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/skeindb/skein/internal/ports"
	"github.com/skeindb/skein/recovery"
)

// process is a node as a process of its own.
type process struct {
	name, client string
	args         []string
	cmd          *exec.Cmd
}

// processes are a cluster in a directory, with the skein of this tree.
type processes struct {
	t        *testing.T
	dir, bin string
	nodes    []*process
}

func newProcesses(t *testing.T, n int) *processes {
	t.Helper()
	if testing.Short() {
		t.Skip("runs real processes")
	}
	c := &processes{t: t, dir: t.TempDir()}
	c.bin = filepath.Join(c.dir, "skein")
	if out, err := exec.Command("go", "build", "-o", c.bin, "../cmd/skein").CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	at, err := ports.Unused(2 * n)
	if err != nil {
		t.Fatal(err)
	}
	var members []string
	for i := range n {
		members = append(members, fmt.Sprintf("n%d=http://127.0.0.1:%d", i+1, at[n+i]))
	}
	for i := range n {
		p := &process{name: fmt.Sprintf("n%d", i+1), client: fmt.Sprintf("http://127.0.0.1:%d", at[i])}
		peer := fmt.Sprintf("http://127.0.0.1:%d", at[n+i])
		p.args = []string{
			"--name", p.name, "--data-dir", p.name, "--listen-client-urls", p.client, "--advertise-client-urls", p.client,
			"--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
			"--initial-cluster", strings.Join(members, ","), "--initial-ranges", "5", "--memory-budget-bytes", "1073741824",
		}
		c.nodes = append(c.nodes, p)
	}
	t.Cleanup(func() {
		c.kill(c.nodes...)
		for _, p := range c.nodes {
			if b, err := os.ReadFile(filepath.Join(c.dir, p.name+".log")); err == nil && t.Failed() {
				t.Logf("--- %s\n%s", p.name, b[max(0, len(b)-4<<10):])
			}
		}
	})
	return c
}

func (c *processes) start(more []string, ps ...*process) {
	c.t.Helper()
	for _, p := range ps {
		f, err := os.OpenFile(filepath.Join(c.dir, p.name+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
		if err != nil {
			c.t.Fatal(err)
		}
		p.cmd = exec.Command(c.bin, append(append([]string{}, p.args...), more...)...)
		p.cmd.Dir, p.cmd.Stdout, p.cmd.Stderr = c.dir, f, f
		err = p.cmd.Start()
		f.Close()
		if err != nil {
			c.t.Fatal(err)
		}
	}
}

// kill ends processes with kill -9, all in one moment.
func (c *processes) kill(ps ...*process) {
	for _, p := range ps {
		if p.cmd != nil {
			_ = p.cmd.Process.Signal(syscall.SIGKILL)
		}
	}
	for _, p := range ps {
		if p.cmd != nil {
			_ = p.cmd.Wait()
			p.cmd = nil
		}
	}
}

func (c *processes) clientOf(ps ...*process) *clientv3.Client {
	c.t.Helper()
	var urls []string
	for _, p := range ps {
		urls = append(urls, p.client)
	}
	cl, err := clientv3.New(clientv3.Config{Endpoints: urls, Logger: zap.NewNop(), DialTimeout: 5 * time.Second})
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() { cl.Close() })
	return cl
}

// eventually repeats f for a minute, until it succeeds.
func (c *processes) eventually(what string, f func(ctx context.Context) error) {
	c.t.Helper()
	var err error
	for range 60 {
		ctx, cancel := context.WithTimeout(c.t.Context(), 5*time.Second)
		err = f(ctx)
		cancel()
		if err == nil {
			return
		}
		time.Sleep(500 * time.Millisecond)
	}
	c.t.Fatalf("%s: %v", what, err)
}

// commands are the command lines of a document's code blocks.
func commands(t *testing.T, path string) (lines []string) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for i, block := range strings.Split(string(b), "```") {
		if i%2 == 1 {
			lines = append(lines, strings.Split(strings.Trim(block, "\n"), "\n")...)
		}
	}
	return lines
}

// run runs a command line of the document.
func (c *processes) run(line string) (string, error) {
	args := strings.Fields(strings.ReplaceAll(line, "http://127.0.0.1:2379", c.nodes[0].client))
	cmd := exec.Command(c.bin, args[1:]...)
	cmd.Dir = c.dir
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// load writes keys over the whole keyspace until stop is called, and returns what was acknowledged.
func (c *processes) load(cl *clientv3.Client) (stop func() (last map[string]string, revisions map[int64]bool)) {
	ctx, cancel := context.WithCancel(c.t.Context())
	var mu sync.Mutex
	last, revisions := map[string]string{}, map[int64]bool{}
	var wg sync.WaitGroup
	for i := range 16 {
		k := fmt.Sprintf("%ckey", byte(i*16))
		wg.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				v := fmt.Sprintf("%06d", n)
				put, end := context.WithTimeout(ctx, 5*time.Second)
				resp, err := cl.Put(put, k, v)
				end()
				if err == nil {
					mu.Lock()
					last[k], revisions[resp.Header.Revision] = v, true
					mu.Unlock()
				}
			}
		})
	}
	return func() (map[string]string, map[int64]bool) {
		cancel()
		wg.Wait()
		return last, revisions
	}
}

// The commands of docs/RECOVERY.md bring back two of five nodes that were killed under load.
func TestDocument(t *testing.T) {
	c := newProcesses(t, 5)
	c.start(nil, c.nodes...)
	cl := c.clientOf(c.nodes...)
	c.eventually("the cluster serves", func(ctx context.Context) error {
		_, err := cl.Put(ctx, "ready", "yes")
		return err
	})
	stop := c.load(cl)
	time.Sleep(3 * time.Second)
	c.kill(c.nodes...)
	last, revisions := stop()
	for _, p := range c.nodes[2:] {
		if err := os.RemoveAll(filepath.Join(c.dir, p.name)); err != nil {
			t.Fatal(err)
		}
	}
	lines := commands(t, "../docs/RECOVERY.md")
	if len(lines) != 7 {
		t.Fatalf("%d commands: %q", len(lines), lines)
	}
	for _, line := range lines[:5] {
		out, err := c.run(line)
		if err != nil {
			t.Fatalf("%s: %v\n%s", line, err, out)
		}
		t.Logf("%s\n%s", line, out)
	}
	c.start(nil, c.nodes[:2]...)
	after := c.clientOf(c.nodes[:2]...)
	c.eventually(lines[5], func(context.Context) error {
		out, err := c.run(lines[5])
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
	here := c.still(after, last, revisions)
	t.Logf("%d of %d keys are there with two nodes", here, len(last))
	c.waitsForALeader(lines[5])
	c.kill(c.nodes[:2]...)
	out, err := c.run("skein recover apply --data-dir n1 --plan plan.json")
	if err != nil || !strings.Contains(out, "before") {
		t.Errorf("applied again: %v %s", err, out)
	}
}

// waitsForALeader ends the survivor without placement: verify says which ranges wait for it, and that nothing is wrong.
func (c *processes) waitsForALeader(verify string) {
	c.t.Helper()
	b, err := os.ReadFile(filepath.Join(c.dir, "plan.json"))
	if err != nil {
		c.t.Fatal(err)
	}
	p, err := recovery.DecodePlan(b)
	if err != nil {
		c.t.Fatal(err)
	}
	asked, ended := c.nodes[0], c.nodes[1]
	if p.Nodes[slices.IndexFunc(p.Nodes, func(o recovery.Orders) bool { return o.Placement })].Node == p.Survivors[slices.IndexFunc(p.Survivors, func(n recovery.NodeRow) bool { return n.Name == "n2" })].Node {
		asked, ended = ended, asked
	}
	c.kill(ended)
	c.eventually("verify says what waits", func(context.Context) error {
		out, err := c.run(strings.ReplaceAll(verify, "http://127.0.0.1:2379", asked.client))
		exit, ok := errors.AsType[*exec.ExitError](err)
		if !ok || exit.ExitCode() != 4 || !strings.Contains(out, "has no leader yet: its replicas are on "+ended.name) {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
}

// Apply was run on one of three survivors alone, and all are started: that one does not serve, and says why.
func TestApplyForgotten(t *testing.T) {
	c := newProcesses(t, 5)
	c.start(nil, c.nodes...)
	cl := c.clientOf(c.nodes...)
	c.eventually("the cluster serves", func(ctx context.Context) error {
		_, err := cl.Put(ctx, "ready", "yes")
		return err
	})
	c.kill(c.nodes...) // all but three for good
	for _, line := range []string{
		"skein recover collect --data-dir n1 -o n1.json", "skein recover collect --data-dir n2 -o n2.json", "skein recover collect --data-dir n3 -o n3.json",
		"skein recover plan n1.json n2.json n3.json --dead n4,n5 -o plan.json", "skein recover apply --data-dir n1 --plan plan.json",
	} {
		if out, err := c.run(line); err != nil {
			t.Fatalf("%s: %v\n%s", line, err, out)
		}
	}
	c.start(nil, c.nodes[:3]...)
	c.eventually("n1 says that it waits", func(context.Context) error {
		b, err := os.ReadFile(filepath.Join(c.dir, "n1.log"))
		if err == nil && !strings.Contains(string(b), `"without the plan": "n2, n3"`) && !strings.Contains(string(b), `"without the plan":"n2, n3"`) {
			err = errors.New("nothing in its log")
		}
		return err
	})
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	if _, err := c.clientOf(c.nodes[0]).Get(ctx, "ready"); err == nil {
		t.Error("n1 serves beside the two to which the plan was not applied")
	}
	c.kill(c.nodes...)
	if out, err := c.run("skein recover apply --data-dir n2 --plan plan.json"); err == nil || !strings.Contains(out, "the plan is stale") {
		t.Errorf("apply on a node that has run since: %v\n%s", err, out)
	}
}

// --force-new-cluster makes a cluster of one of three nodes, which has a copy of all ranges. It may be given again.
func TestForceNewCluster(t *testing.T) {
	c := newProcesses(t, 3)
	c.start(nil, c.nodes...)
	cl := c.clientOf(c.nodes...)
	c.eventually("the cluster serves", func(ctx context.Context) error {
		_, err := cl.Put(ctx, "ready", "yes")
		return err
	})
	stop := c.load(cl)
	time.Sleep(2 * time.Second)
	last, revisions := stop()
	time.Sleep(time.Second) // all of it has reached all nodes
	c.kill(c.nodes...)
	lines := commands(t, "../docs/RECOVERY.md")
	for range 2 {
		// As the document has it, with the ports of this test.
		if line := lines[len(lines)-1]; line != "skein --name n1 --data-dir n1 --force-new-cluster" {
			t.Fatalf("the last command is %q", line)
		}
		c.start([]string{"--force-new-cluster"}, c.nodes[0])
		here := c.still(c.clientOf(c.nodes[0]), last, revisions)
		if here != len(last) {
			t.Errorf("%d of %d keys are there", here, len(last))
		}
		for k := range last {
			last[k] = "after"
		}
		c.kill(c.nodes[0])
	}
}

// still counts the keys that have their last acknowledged value or a later one, and checks that new
// revisions are new.
func (c *processes) still(cl *clientv3.Client, last map[string]string, revisions map[int64]bool) (here int) {
	c.t.Helper()
	for k, v := range last {
		c.eventually("read and write "+k, func(ctx context.Context) error {
			resp, err := cl.Get(ctx, k)
			if err != nil {
				return err
			}
			if len(resp.Kvs) > 0 && string(resp.Kvs[0].Value) >= v {
				here++
			}
			put, err := cl.Put(ctx, k, "after")
			if err == nil && revisions[put.Header.Revision] {
				c.t.Errorf("revision %d comes again", put.Header.Revision)
			}
			return err
		})
	}
	return here
}
