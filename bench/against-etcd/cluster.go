package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

const (
	nodes = 3
	// mostNodes are the nodes of a cluster that one has joined.
	mostNodes = nodes + 1
	// roomNodes are the most that a measure starts.
	roomNodes = 9
	// startLimit bounds the wait for a cluster to serve, stopLimit the wait for a
	// process to end on request.
	startLimit = 60 * time.Second
	stopLimit  = 15 * time.Second
	pollEvery  = 100 * time.Millisecond
)

// cluster is one side: three processes, each with a client port and a page of health
// and metrics.
type cluster struct {
	name   string
	binary string
	dir    string // data directories and logs
	port   int    // of the first node's clients; node i has 10·i more, its peers one more
	args   func(c *cluster, i int) []string
	web    func(i int) string // see webURL; nil if it is the clients'
	// size is how many nodes it begins with, 0 for three.
	size int
	// alone says that no other side waits until it is quiet. Many nodes may never be.
	alone bool

	// running are the processes; a killed one is nil.
	running [roomNodes]*process
}

// process is a started server.
type process struct {
	cmd   *exec.Cmd
	ended chan struct{} // closed when it has, after which err is set
	err   error
}

// wait waits for the end, and kills the process if that takes too long.
func (p *process) wait() error {
	timer := time.AfterFunc(stopLimit, func() { _ = p.cmd.Process.Kill() })
	defer timer.Stop()
	<-p.ended
	return p.err
}

// etcdArgs makes the command lines of etcd, and of Skein, which has the same flags,
// with extra ones appended. A node that is no founder joins, as Skein's nodes can.
func etcdArgs(flags ...string) func(*cluster, int) []string {
	return func(c *cluster, i int) []string {
		var peers []string
		for j := range c.founders() {
			peers = append(peers, fmt.Sprintf("%s=%s", nodeName(j), c.peerURL(j)))
		}
		cluster := []string{"--initial-cluster", strings.Join(peers, ",")}
		if i >= c.founders() {
			cluster = []string{"--join", c.all(c.clientURL, "")}
		}
		return slices.Concat([]string{
			"--name", nodeName(i), "--data-dir", filepath.Join(c.dir, nodeName(i)),
			"--listen-client-urls", c.clientURL(i), "--advertise-client-urls", c.clientURL(i),
			"--listen-peer-urls", c.peerURL(i), "--initial-advertise-peer-urls", c.peerURL(i),
		}, cluster, flags)
	}
}

// emptyArgs makes the command lines of servers that answer at once.
func emptyArgs(valueBytes int) func(*cluster, int) []string {
	return func(c *cluster, i int) []string {
		return []string{"empty", "--listen", c.clientAddr(i), "--web", c.peerAddr(i), "--value-size", strconv.Itoa(valueBytes)}
	}
}

// founders is how many nodes the cluster begins with.
func (c *cluster) founders() int {
	if c.size > 0 {
		return c.size
	}
	return nodes
}

func nodeName(i int) string { return fmt.Sprintf("n%d", i+1) }

func (c *cluster) clientAddr(i int) string { return fmt.Sprintf("127.0.0.1:%d", c.port+10*i) }
func (c *cluster) peerAddr(i int) string   { return fmt.Sprintf("127.0.0.1:%d", c.port+10*i+1) }
func (c *cluster) clientURL(i int) string  { return "http://" + c.clientAddr(i) }
func (c *cluster) peerURL(i int) string    { return "http://" + c.peerAddr(i) }

// webURL is the base URL of a node's /health and /metrics.
func (c *cluster) webURL(i int) string {
	if c.web != nil {
		return c.web(i)
	}
	return c.clientURL(i)
}

// all returns a URL of each node that the cluster begins with, each followed by path.
func (c *cluster) all(url func(int) string, path string) string {
	var urls []string
	for i := range c.founders() {
		urls = append(urls, url(i)+path)
	}
	return strings.Join(urls, ",")
}

// start starts the nodes with empty directories, and waits until each of them is
// healthy.
func (c *cluster) start(ctx context.Context) error {
	if _, err := os.Stat(c.dir); err == nil {
		// The old ranges, keys and history belong to another measure.
		return fmt.Errorf("start %s: %s is left of an earlier run", c.name, c.dir)
	}
	for i := range c.founders() {
		if err := c.startNode(i); err != nil {
			return fmt.Errorf("start %s: %w", c.name, err)
		}
	}
	return c.waitHealthy(ctx)
}

func (c *cluster) log(i int) string { return filepath.Join(c.dir, nodeName(i)+".log") }

// startNode starts a node's process, for the first time or again.
func (c *cluster) startNode(i int) error {
	if err := os.MkdirAll(c.dir, 0o700); err != nil {
		return err
	}
	log, err := os.OpenFile(c.log(i), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(c.binary, c.args(c, i)...)
	cmd.Stdout, cmd.Stderr = log, log
	// A killed tool leaves no servers behind that hold the ports of the next run.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return err
	}
	p := &process{cmd: cmd, ended: make(chan struct{})}
	go func() {
		p.err = cmd.Wait()
		close(p.ended)
	}()
	c.running[i] = p
	return nil
}

// kill ends a node's process as kill -9 does.
func (c *cluster) kill(i int) error {
	p := c.running[i]
	c.running[i] = nil
	if err := p.cmd.Process.Kill(); err != nil {
		return fmt.Errorf("kill %s of %s: %w", nodeName(i), c.name, err)
	}
	<-p.ended
	return nil
}

// restart ends a node's process as an operator does, and starts it again.
func (c *cluster) restart(i int) error {
	p := c.running[i]
	c.running[i] = nil
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return fmt.Errorf("stop %s of %s: %w", nodeName(i), c.name, err)
	}
	if err := p.wait(); err != nil {
		return fmt.Errorf("stop %s of %s, log %s: %w", nodeName(i), c.name, c.log(i), err)
	}
	return c.startNode(i)
}

// alive says which node has ended unasked.
func (c *cluster) alive() error {
	for i, p := range c.running {
		if p == nil {
			continue
		}
		select {
		case <-p.ended:
			return fmt.Errorf("%s: node %s ended by itself: %w; log %s", c.name, nodeName(i), errors.Join(errEnded, p.err), c.log(i))
		default:
		}
	}
	return nil
}

var errEnded = errors.New("the process is gone")

func (c *cluster) pid(i int) int { return c.running[i].cmd.Process.Pid }

// waitHealthy waits until all nodes are healthy.
func (c *cluster) waitHealthy(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	for i := range c.founders() {
		if err := c.waitNode(ctx, i); err != nil {
			return err
		}
	}
	return nil
}

// waitNode waits until a node is healthy.
func (c *cluster) waitNode(ctx context.Context, i int) error {
	err := waitUntil(ctx, pollEvery, func() error {
		if err := c.alive(); err != nil {
			return err
		}
		return healthy(ctx, c.webURL(i))
	})
	if err != nil {
		return fmt.Errorf("%s, node %s, log %s: not healthy: %w", c.name, nodeName(i), c.log(i), err)
	}
	return nil
}

// waitUntil polls until done returns nil. If ctx is done first, or a process has ended,
// it returns the last error.
func waitUntil(ctx context.Context, every time.Duration, done func() error) error {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		last := done()
		if last == nil || errors.Is(last, errEnded) {
			return last
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return last
		}
	}
}

func healthy(ctx context.Context, base string) error {
	ctx, cancel := context.WithTimeout(ctx, askLimit)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, base+"/health", http.NoBody)
	if err != nil {
		return err
	}
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(io.LimitReader(answer.Body, 1<<16))
	if err == nil && (answer.StatusCode != http.StatusOK || !strings.Contains(string(text), `"true"`)) {
		err = fmt.Errorf("%s: %s", answer.Status, text)
	}
	return err
}

// stop ends the running processes, gently first, and removes the data unless they are
// to be kept.
func (c *cluster) stop(keep bool) error {
	wrong := []error{c.alive()}
	for _, p := range c.running {
		if p != nil {
			// A process that has ended already was just reported.
			_ = p.cmd.Process.Signal(syscall.SIGTERM)
		}
	}
	for i, p := range c.running {
		if p == nil {
			continue
		}
		err := p.wait()
		// etcd exits by the signal that it was sent.
		if state, ok := p.cmd.ProcessState.Sys().(syscall.WaitStatus); ok && state.Signaled() && state.Signal() == syscall.SIGTERM {
			err = nil
		}
		if err != nil {
			wrong = append(wrong, fmt.Errorf("%s, node %s, log %s: %w", c.name, nodeName(i), c.log(i), err))
		}
	}
	c.running = [roomNodes]*process{}
	if !keep && errors.Join(wrong...) == nil {
		wrong = append(wrong, os.RemoveAll(c.dir))
	}
	return errors.Join(wrong...)
}
