package follow

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/config"
	"github.com/skeindb/skein/internal/ports"
	"github.com/skeindb/skein/node"
	"github.com/skeindb/skein/transfer"
)

// roleVariable has this binary be a process of a test: a member of the source, a node of the target or the mirror. So all of
// them have the race detector if the test has it.
const roleVariable = "SKEIN_FOLLOW_ROLE"

func TestMain(m *testing.M) {
	role := os.Getenv(roleVariable)
	if role == "" {
		os.Exit(m.Run())
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	if err := play(ctx, role, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// play is a process of a test.
func play(ctx context.Context, role string, args []string) error {
	switch role {
	case "etcd":
		return playEtcd(ctx, args[0], args[1], args[2], args[3], args[4])
	case "skein":
		return playSkein(ctx, args)
	case "mirror":
		return playMirror(ctx, args[0], args[1], args[2])
	}
	return fmt.Errorf("no role %q", role)
}

func playEtcd(ctx context.Context, name, dir, client, peer, initial string) error {
	urls := func(s string) []url.URL {
		u, err := url.Parse(s)
		if err != nil {
			panic(err)
		}
		return []url.URL{*u}
	}
	cfg := embed.NewConfig()
	cfg.Name, cfg.Dir, cfg.InitialCluster = name, dir, initial
	cfg.ListenPeerUrls, cfg.AdvertisePeerUrls = urls(peer), urls(peer)
	cfg.ListenClientUrls, cfg.AdvertiseClientUrls = urls(client), urls(client)
	cfg.MaxTxnOps = maxTxnOps
	cfg.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zap.NewNop())
	e, err := embed.StartEtcd(cfg)
	if err != nil {
		return err
	}
	defer e.Close()
	select {
	case err := <-e.Err():
		return err
	case <-ctx.Done():
		return nil
	}
}

func playSkein(ctx context.Context, args []string) error {
	cfg, _, err := config.Load(args, nil)
	if err != nil {
		return err
	}
	log, err := zap.NewProduction(zap.IncreaseLevel(zap.WarnLevel))
	if err != nil {
		return err
	}
	n, err := node.Start(ctx, cfg, log)
	if err != nil {
		return err
	}
	<-ctx.Done()
	return n.Stop(context.Background())
}

func playMirror(ctx context.Context, source, target, dir string) error {
	c, err := clientv3.New(config3(target))
	if err != nil {
		return err
	}
	defer c.Close()
	return transfer.Mirror(ctx, &transfer.Cluster{Client: c, Clock: clock.System(), Report: func(format string, args ...any) {
		fmt.Fprintf(os.Stderr, format+"\n", args...)
	}}, transfer.MirrorOptions{Source: config3(source), Dir: dir, Number: 7})
}

// config3 is a configuration of clients of endpoints that are separated by commas.
func config3(endpoints string) clientv3.Config { return clientConfig(strings.Split(endpoints, ",")) }

// A process can be killed and started again.
type process struct {
	t    *testing.T
	role string
	args []string
	log  string

	cmd   *exec.Cmd
	ended chan error
}

// start starts a process, also again. It ends with the test.
func (p *process) start() {
	p.t.Helper()
	self, err := os.Executable()
	if err != nil {
		p.t.Fatal(err)
	}
	out, err := os.OpenFile(p.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		p.t.Fatal(err)
	}
	defer out.Close()
	p.cmd = exec.Command(self, p.args...)
	p.cmd.Env = append(os.Environ(), roleVariable+"="+p.role)
	p.cmd.Stdout, p.cmd.Stderr = out, out
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := p.cmd.Start(); err != nil {
		p.t.Fatal(err)
	}
	cmd, ended := p.cmd, make(chan error, 1)
	p.ended = ended
	go func() { ended <- cmd.Wait() }()
}

// kill kills the process, and waits for its end.
func (p *process) kill() {
	p.t.Helper()
	if err := p.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		p.t.Error(err)
	}
	p.alive(<-p.ended)
}

// alive fails the test for a process that ended otherwise than by a kill.
func (p *process) alive(err error) {
	p.t.Helper()
	if exit := (*exec.ExitError)(nil); err != nil && (!errors.As(err, &exit) || exit.ExitCode() >= 0) {
		b, _ := os.ReadFile(p.log)
		p.t.Fatalf("%s %s: %v\n%s", p.role, p.args, err, b[max(0, len(b)-4000):])
	}
}

// startProcesses starts three processes of a role, and returns the URLs for clients. arguments makes the arguments of one.
func startProcesses(t *testing.T, role string, arguments func(name, dir, client, peer, initial string) []string) (all [members]*process, endpoints []string) {
	t.Helper()
	p, err := ports.Unused(2 * members)
	if err != nil {
		t.Fatal(err)
	}
	at := func(i int) string { return "http://127.0.0.1:" + strconv.Itoa(p[i]) }
	var initial []string
	for i := range members {
		initial = append(initial, fmt.Sprintf("m%d=%s", i, at(i)))
		endpoints = append(endpoints, at(members+i))
	}
	dir := t.TempDir()
	for i := range members {
		name := fmt.Sprint("m", i)
		all[i] = &process{
			t: t, role: role, log: filepath.Join(dir, name+".log"),
			args: arguments(name, filepath.Join(dir, name), at(members+i), at(i), strings.Join(initial, ",")),
		}
		all[i].start()
	}
	t.Cleanup(func() {
		for _, p := range all {
			p.kill()
		}
	})
	return all, endpoints
}

func etcdArguments(name, dir, client, peer, initial string) []string {
	return []string{name, dir, client, peer, initial}
}

func skeinArguments(name, dir, client, peer, initial string) []string {
	return []string{
		"--name", name, "--data-dir", dir, "--listen-client-urls", client, "--advertise-client-urls", client,
		"--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", initial, "--initial-ranges", "4", "--max-txn-ops", fmt.Sprint(maxTxnOps),
		"--memory-budget-bytes", "1073741824",
	}
}

// leader returns which of the members leads: of a Skein, the placement group.
func leader(ctx context.Context, t *testing.T, c *clientv3.Client, endpoints []string) int {
	t.Helper()
	for ctx.Err() == nil {
		for i, endpoint := range endpoints {
			if s, err := c.Status(ctx, endpoint); err == nil && s.Leader != 0 && s.Leader == s.Header.MemberId {
				return i
			}
		}
	}
	t.Fatal("nobody leads")
	return 0
}
