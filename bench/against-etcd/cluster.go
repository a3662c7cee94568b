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
	"strings"
	"syscall"
	"time"
)

const (
	nodes = 3
	// startLimit bounds the wait for a cluster to serve, stopLimit the wait for a
	// process that was asked to end.
	startLimit = 60 * time.Second
	stopLimit  = 15 * time.Second
	pollEvery  = 100 * time.Millisecond
)

// cluster is one side: three processes with etcd's flags.
type cluster struct {
	name   string
	binary string
	dir    string // data directories and logs
	port   int    // of the first node's clients; node i has 10·i more, its peers one more
	flags  []string

	running []*exec.Cmd
}

func (c *cluster) clientURL(i int) string { return fmt.Sprintf("http://127.0.0.1:%d", c.port+10*i) }
func (c *cluster) peerURL(i int) string   { return fmt.Sprintf("http://127.0.0.1:%d", c.port+10*i+1) }

// endpoints returns the client URLs of all nodes, each followed by path.
func (c *cluster) endpoints(path string) string {
	var all []string
	for i := range nodes {
		all = append(all, c.clientURL(i)+path)
	}
	return strings.Join(all, ",")
}

// start starts the nodes and waits until each of them is healthy.
func (c *cluster) start(ctx context.Context) error {
	var peers []string
	for i := range nodes {
		peers = append(peers, fmt.Sprintf("n%d=%s", i+1, c.peerURL(i)))
	}
	for i := range nodes {
		if err := c.startNode(i, strings.Join(peers, ",")); err != nil {
			return fmt.Errorf("start %s: %w", c.name, err)
		}
	}
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	for i := range nodes {
		if err := c.waitHealthy(ctx, i); err != nil {
			return fmt.Errorf("start %s, node n%d, log %s: %w", c.name, i+1, c.log(i), err)
		}
	}
	return nil
}

func (c *cluster) log(i int) string { return filepath.Join(c.dir, fmt.Sprintf("n%d.log", i+1)) }

func (c *cluster) startNode(i int, peers string) error {
	if err := os.MkdirAll(c.dir, 0o700); err != nil {
		return err
	}
	log, err := os.Create(c.log(i))
	if err != nil {
		return err
	}
	defer log.Close()
	name := fmt.Sprintf("n%d", i+1)
	args := []string{
		"--name", name, "--data-dir", filepath.Join(c.dir, name),
		"--listen-client-urls", c.clientURL(i), "--advertise-client-urls", c.clientURL(i),
		"--listen-peer-urls", c.peerURL(i), "--initial-advertise-peer-urls", c.peerURL(i),
		"--initial-cluster", peers,
	}
	cmd := exec.Command(c.binary, append(args, c.flags...)...)
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		return err
	}
	c.running = append(c.running, cmd)
	return nil
}

// waitHealthy waits until a node answers /health with health.
func (c *cluster) waitHealthy(ctx context.Context, i int) error {
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for {
		last := healthy(ctx, c.clientURL(i))
		if last == nil {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("not healthy: %w", last)
		}
	}
}

func healthy(ctx context.Context, base string) error {
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

// stop ends the processes that start started, gently first.
func (c *cluster) stop() error {
	var all []error
	for _, cmd := range c.running {
		// A process that is gone already is what is wanted.
		_ = cmd.Process.Signal(syscall.SIGTERM)
	}
	for i, cmd := range c.running {
		timer := time.AfterFunc(stopLimit, func() { _ = cmd.Process.Kill() })
		err := cmd.Wait()
		timer.Stop()
		// etcd ends by the signal that it was sent.
		if state, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok && state.Signaled() && state.Signal() == syscall.SIGTERM {
			err = nil
		}
		if err != nil {
			all = append(all, fmt.Errorf("%s, node n%d, log %s: %w", c.name, i+1, c.log(i), err))
		}
	}
	c.running = nil
	return errors.Join(all...)
}
