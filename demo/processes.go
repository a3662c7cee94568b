package demo

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"

	"github.com/skeindb/skein/config"
)

// processes are the nodes of a cluster, each a process.
type processes struct {
	nodes []*process
	// ended tells of a process that ended by itself.
	ended chan error
}

// process is one node.
type process struct {
	name, endpoint string
	command        []string
	log            string
	ended          chan<- error

	cmd *exec.Cmd // nil while it does not run
	// exited is closed when cmd has exited; wanted says before that the demo ends it.
	exited chan struct{}
	wanted chan struct{}
}

// startProcesses starts all nodes and returns when they serve.
func startProcesses(ctx context.Context, o *Options) (c *processes, err error) {
	cfgs, endpoints := configure(o)
	c = &processes{ended: make(chan error, len(cfgs))}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.stop())
		}
	}()
	for i, cfg := range cfgs {
		p := &process{name: cfg.Name, endpoint: endpoints[i], log: filepath.Join(o.DataDir, cfg.Name+".log"), ended: c.ended}
		p.command = append(append([]string(nil), o.Command...), flagsOf(cfg)...)
		if err := p.start(); err != nil {
			return c, err
		}
		c.nodes = append(c.nodes, p)
	}
	return c, c.ready(ctx, c.nodes...)
}

// flagsOf is the command line of a configuration.
func flagsOf(cfg *config.Config) []string {
	client, peer := cfg.ListenClientURLs[0].String(), cfg.ListenPeerURLs[0].String()
	return []string{
		"--name", cfg.Name, "--data-dir", cfg.DataDir,
		"--listen-client-urls", client, "--advertise-client-urls", client, "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
		"--initial-cluster", cfg.InitialCluster.String(), "--initial-cluster-token", cfg.InitialClusterToken,
		"--initial-ranges", fmt.Sprint(cfg.InitialRanges), "--memory-budget-bytes", fmt.Sprint(cfg.MemoryBytes),
	}
}

func (p *process) start() error {
	log, err := os.OpenFile(p.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("demo: %w", err)
	}
	defer log.Close() // the process has its own
	cmd := exec.Command(p.command[0], p.command[1:]...)
	cmd.Stdout, cmd.Stderr = log, log
	// Ctrl-C is for the demo, which stops the nodes. A demo that is killed cannot: then the kernel kills them.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	exited, wanted, started := make(chan struct{}), make(chan struct{}), make(chan error)
	go func() {
		// That kill comes when the thread ends that has started the process: so this one stays until it has exited.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		if started <- err; err != nil {
			return
		}
		err = cmd.Wait()
		select {
		case <-wanted:
		default:
			select {
			case p.ended <- fmt.Errorf("demo: %s has ended (%w); its log is %s", p.name, err, p.log):
			default: // another one is told of
			}
		}
		close(exited)
	}()
	if err := <-started; err != nil {
		return fmt.Errorf("demo: start %s: %w", p.name, err)
	}
	p.cmd, p.exited, p.wanted = cmd, exited, wanted
	return nil
}

// kill is kill -9.
func (p *process) kill() error { return p.end(syscall.SIGKILL) }

// end sends a signal and waits until the process has exited.
func (p *process) end(s syscall.Signal) error {
	if p.cmd == nil {
		return nil
	}
	close(p.wanted)
	err := p.cmd.Process.Signal(s)
	if err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("demo: end %s: %w", p.name, err)
	}
	<-p.exited
	p.cmd = nil
	return nil
}

// stop ends all nodes at the same time.
func (c *processes) stop() error {
	errs := make(chan error, len(c.nodes))
	for _, p := range c.nodes {
		go func() { errs <- p.end(syscall.SIGTERM) }()
	}
	var all []error
	for range c.nodes {
		all = append(all, <-errs)
	}
	return errors.Join(all...)
}

func (c *processes) endpoints() (all []string) {
	for _, p := range c.nodes {
		all = append(all, p.endpoint)
	}
	return all
}

// ready returns when the nodes serve, or one of all has ended.
func (c *processes) ready(ctx context.Context, nodes ...*process) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	done := make(chan struct{})
	watching := make(chan struct{})
	go func() {
		defer close(watching)
		select {
		case err := <-c.ended:
			cancel(err)
		case <-done:
		}
	}()
	var endpoints []string
	for _, p := range nodes {
		endpoints = append(endpoints, p.endpoint)
	}
	err := awaitReady(ctx, endpoints)
	close(done)
	<-watching
	if err != nil && ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}
