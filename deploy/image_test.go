package deploy

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"sigs.k8s.io/yaml"

	"github.com/skeindb/skein/internal/leftout"
	"github.com/skeindb/skein/internal/ports"
)

// patience bounds every wait: it only has to end a test that would wait for ever.
const patience = 2 * time.Minute

// imageUser is the user of the Dockerfile.
const imageUser = 65532

// image is the root of the image, unpacked.
type image struct {
	t    *testing.T
	root string
	// clients and peers are the ports of the nodes.
	clients, peers []int
}

// command is a program of the image, which sees nothing else.
func (i *image) command(name string, args ...string) *exec.Cmd {
	c := exec.Command("/usr/local/bin/"+name, args...)
	c.Dir = "/"
	c.SysProcAttr = &syscall.SysProcAttr{Chroot: i.root, Credential: &syscall.Credential{Uid: imageUser, Gid: imageUser}}
	return c
}

// start starts a node, with the same settings for all but the names and ports. It returns what kills it.
func (i *image) start(n int) (kill func()) {
	i.t.Helper()
	url := func(port int) string { return fmt.Sprintf("http://127.0.0.1:%d", port) }
	log, err := os.Create(filepath.Join(i.t.TempDir(), "log"))
	if err != nil {
		i.t.Fatal(err)
	}
	c := i.command("skein", "--name", fmt.Sprintf("n%d", n+1), "--data-dir", fmt.Sprintf("/data/n%d", n+1),
		"--listen-client-urls", url(i.clients[n]), "--advertise-client-urls", url(i.clients[n]),
		"--listen-peer-urls", url(i.peers[n]), "--initial-advertise-peer-urls", url(i.peers[n]),
		"--initial-cluster", fmt.Sprintf("n1=%s,n2=%s,n3=%s", url(i.peers[0]), url(i.peers[1]), url(i.peers[2])),
		"--join", strings.Join([]string{url(i.clients[0]), url(i.clients[1]), url(i.clients[2])}, ","), "--initial-ranges=8")
	c.Stdout, c.Stderr = log, log
	if err := c.Start(); err != nil {
		i.t.Fatal(err)
	}
	killed := false
	kill = func() {
		if killed {
			return
		}
		killed = true
		_ = c.Process.Kill()
		_ = c.Wait()
		log.Close()
		if b, _ := os.ReadFile(log.Name()); i.t.Failed() {
			i.t.Logf("n%d:\n%s", n+1, b[max(0, len(b)-4<<10):])
		}
	}
	i.t.Cleanup(kill)
	return kill
}

// runs repeats a program of the image until it succeeds, and returns what it printed.
func (i *image) runs(name string, args ...string) string {
	i.t.Helper()
	for began := time.Now(); ; time.Sleep(100 * time.Millisecond) {
		out, err := i.command(name, args...).CombinedOutput()
		if err == nil {
			return string(out)
		}
		if time.Since(began) > time.Minute {
			i.t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
		}
	}
}

// The image has all that a cluster needs: three nodes in its root, without a file of this machine. They keep their data,
// a fourth one joins with the same settings, and the gateway finds those that live.
func TestImageRoot(t *testing.T) {
	dir := made(t)
	if os.Getuid() != 0 {
		leftout.Because(t, "only root may change the root of a process")
	}
	free, err := ports.Unused(10)
	if err != nil {
		t.Fatal(err)
	}
	i := &image{t: t, root: t.TempDir(), clients: free[:4], peers: free[4:8]}
	output(t, "tar", "-xpf", filepath.Join(dir, "root.tar"), "-C", i.root)
	at := fmt.Sprintf("--endpoints=127.0.0.1:%d,127.0.0.1:%d,127.0.0.1:%d", free[0], free[1], free[2])
	kills := make([]func(), 4)
	for n := range 3 {
		kills[n] = i.start(n)
	}
	i.runs("etcdctl", at, "put", "a", "1")
	for n := range 3 {
		kills[n]()
	}
	for n := range 3 {
		kills[n] = i.start(n)
	}
	if got := i.runs("etcdctl", at, "get", "a", "--print-value-only"); got != "1\n" {
		t.Errorf("after a restart: %q", got)
	}
	kills[3] = i.start(3)
	i.runs("etcdctl", fmt.Sprintf("--endpoints=127.0.0.1:%d", free[3]), "endpoint", "health")
	if got := i.runs("skein", "node", "list", at); !strings.Contains(got, "n4") {
		t.Errorf("the fourth node has not joined:\n%s", got)
	}
	i.behindProxy(fmt.Sprintf("127.0.0.1:%d", free[9]))
	i.behindGateway(fmt.Sprintf("127.0.0.1:%d", free[8]), kills[0])
}

// behindProxy uses etcd's gRPC proxy. Keys of its clients begin with its namespace in the cluster, and with nothing for
// themselves.
func (i *image) behindProxy(listen string) {
	t := i.t
	t.Helper()
	cluster := fmt.Sprintf("127.0.0.1:%d", i.clients[0])
	proxy := i.command("skein", "grpc-proxy", "start", "--listen-addr", listen, "--endpoints", cluster, "--namespace", "tenant/", "--data-dir", "/tmp/proxy")
	if err := proxy.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = proxy.Process.Kill()
		_ = proxy.Wait()
	}()
	i.runs("etcdctl", "--endpoints", listen, "put", "b", "2")
	if got := i.runs("etcdctl", "--endpoints", cluster, "get", "--prefix", "tenant/"); got != "tenant/b\n2\n" {
		t.Errorf("in the cluster: %q", got)
	}
	if got := i.runs("etcdctl", "--endpoints", listen, "get", "--prefix", "--keys-only", ""); strings.TrimSpace(got) != "b" {
		t.Errorf("through the proxy: %q", got)
	}
	coalesces(t, func() (*clientv3.Client, error) {
		return clientv3.New(clientv3.Config{Endpoints: []string{listen}, Logger: zap.NewNop()})
	}, func(path string) (string, error) { return get(http.DefaultClient, "http://"+cluster+path) })
}

// coalesces has four clients watch one key and keep a lease alive each, through the proxy. The first watch and the first
// stream of renewals reach the cluster, and those of the others do not.
func coalesces(t *testing.T, connect func() (*clientv3.Client, error), page func(path string) (string, error)) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var clients []*clientv3.Client
	for range 4 {
		c, err := connect()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		clients = append(clients, c)
	}
	before := seen(t, page)
	var watches []clientv3.WatchChan
	for _, c := range clients {
		w := c.Watch(ctx, "c", clientv3.WithCreatedNotify())
		if r := <-w; !r.Created {
			t.Fatalf("%+v", r)
		}
		watches = append(watches, w)
		lease, err := c.Grant(ctx, 60)
		if err != nil {
			t.Fatal(err)
		}
		renewed, err := c.KeepAlive(ctx, lease.ID)
		if err != nil {
			t.Fatal(err)
		}
		if r := <-renewed; r == nil || r.TTL != 60 {
			t.Fatalf("renewed: %v", r)
		}
		if got, want := seen(t, page), (load{before.watchers + 1, before.renewing + 1}); got != want {
			t.Errorf("the node has %+v with %d clients behind the proxy, want %+v", got, len(watches), want)
		}
	}
	if _, err := clients[0].Put(ctx, "c", "3"); err != nil {
		t.Fatal(err)
	}
	for _, w := range watches {
		if r := <-w; len(r.Events) != 1 || string(r.Events[0].Kv.Key) != "c" {
			t.Errorf("%+v", r)
		}
	}
}

// load is what a node has had to do with its clients.
type load struct {
	watchers int // now
	renewing int // streams that renew leases, ever
}

// seen reads it from the node's metrics.
func seen(t *testing.T, page func(path string) (string, error)) (l load) {
	t.Helper()
	text, err := page("/metrics")
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	for line := range strings.Lines(text) {
		for prefix, to := range map[string]*int{
			"etcd_debugging_mvcc_watcher_total ":                      &l.watchers,
			`grpc_server_started_total{grpc_method="LeaseKeepAlive",`: &l.renewing,
		} {
			if strings.HasPrefix(line, prefix) {
				found++
				if _, err := fmt.Sscan(line[strings.LastIndexByte(line, ' '):], to); err != nil {
					t.Fatalf("%s: %v", line, err)
				}
			}
		}
	}
	if found != 2 {
		t.Fatalf("%d of 2 metrics", found)
	}
	return l
}

// behindGateway puts through the gateway before and after a node is killed.
func (i *image) behindGateway(listen string, kill func()) {
	t := i.t
	t.Helper()
	gateway := i.command("etcd", "gateway", "start", "--listen-addr", listen, "--endpoints",
		fmt.Sprintf("127.0.0.1:%d,127.0.0.1:%d,127.0.0.1:%d", i.clients[0], i.clients[1], i.clients[2]))
	if err := gateway.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = gateway.Process.Signal(syscall.SIGTERM)
		if err := gateway.Wait(); err != nil {
			t.Errorf("the gateway ended with %v", err)
		}
	}()
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{listen}, Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	put := func(key string) {
		t.Helper()
		for began := time.Now(); ; time.Sleep(100 * time.Millisecond) {
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
			_, err := client.Put(ctx, key, "v")
			cancel()
			if err == nil {
				return
			}
			if time.Since(began) > time.Minute {
				t.Fatalf("put %s: %v", key, err)
			}
		}
	}
	put("before")
	kill()
	put("after")
}

// composeFile is what the tests read of compose.yaml.
type composeFile struct {
	Services map[string]struct{ Image string }
}

// compose runs docker compose, in a project of its own.
type compose struct {
	t   *testing.T
	env []string
}

// run runs a line at the top of the tree until it succeeds, and returns what it printed.
func (c *compose) run(line string) string {
	c.t.Helper()
	// There is no terminal here, which exec expects.
	args := strings.Fields(strings.Replace(line, " exec ", " exec -T ", 1))
	for began := time.Now(); ; time.Sleep(200 * time.Millisecond) {
		cmd := exec.CommandContext(c.t.Context(), args[0], args[1:]...)
		cmd.Dir, cmd.Env = "..", c.env
		var wrong strings.Builder
		cmd.Stderr = &wrong
		out, err := cmd.Output()
		if err == nil {
			return string(out)
		}
		if time.Since(began) > patience {
			c.t.Fatalf("%s: %v\n%s%s", line, err, out, wrong.String())
		}
	}
}

// TestCompose: docker compose does with compose.yaml what README.md says. The services are healthy by their own checks, and keep their
// data when their containers are made anew. It takes the port 2379 of this machine, as the file does.
func TestCompose(t *testing.T) {
	dir := made(t)
	leftout.Tool(t, "docker", "docker.io")
	for what, advice := range map[string]string{"info": "docker does not run here", "compose version": "docker has no compose (Debian 13: apt-get install docker-compose)"} {
		if out, err := exec.CommandContext(t.Context(), "docker", strings.Fields(what)...).CombinedOutput(); err != nil {
			leftout.Because(t, "%s: %v\n%s", advice, err, out)
		}
	}
	readme, err := os.ReadFile("../README.md")
	if err != nil {
		t.Fatal(err)
	}
	var lines []string
	for line := range strings.Lines(string(readme)) {
		if line, _, _ = strings.Cut(line, "  #"); strings.HasPrefix(line, "docker compose ") {
			lines = append(lines, strings.TrimSpace(line))
		}
	}
	const file = "docker compose -f deploy/docker/compose.yaml "
	if len(lines) != 4 || !strings.HasPrefix(lines[0], file) {
		t.Fatalf("README.md has %q", lines)
	}
	c := &compose{t, append(os.Environ(), fmt.Sprintf("COMPOSE_PROJECT_NAME=skeintest%d", os.Getpid()))}
	if got := strings.Fields(c.run(file + "--profile more config --services")); len(got) != 4 {
		t.Fatalf("services %q", got)
	}
	output(t, "docker", "build", "-q", "-t", strings.TrimSpace(c.run(file+"config --images n1")), dir)
	t.Cleanup(func() {
		cmd := exec.Command("docker", strings.Fields(strings.TrimPrefix(file, "docker ")+"--profile more down -v -t 0")...)
		cmd.Dir, cmd.Env = "..", c.env
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("down: %v\n%s", err, out)
		}
	})
	for _, line := range lines {
		t.Logf("%s\n%s", line, c.run(line))
	}
	c.run(file + "--profile more up -d --wait")
	if got := c.run(file + "exec n3 skein node list"); !strings.Contains(got, "n4") {
		t.Errorf("n4 has not joined:\n%s", got)
	}
	c.run(file + "--profile more down")
	c.run(file + "up -d --wait")
	if got := c.run(file + "exec n2 etcdctl get a --print-value-only"); got != "1\n" {
		t.Errorf("after the containers were made anew: %q", got)
	}
}

// The compose file and the Helm chart name the image that make image makes.
func TestVersionsOfImages(t *testing.T) {
	version := strings.TrimSpace(output(t, "sed", "-n", `s/.*SkeinVersion = "\(.*\)"/\1/p`, "../etcdapi/version.go"))
	var chart struct{ AppVersion string }
	var compose composeFile
	for path, into := range map[string]any{"helm/skein/Chart.yaml": &chart, "docker/compose.yaml": &compose} {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := yaml.Unmarshal(b, into); err != nil {
			t.Fatal(err)
		}
	}
	if chart.AppVersion != version || version == "" {
		t.Errorf("the chart is for version %q, this is %q", chart.AppVersion, version)
	}
	for name, s := range compose.Services {
		if s.Image != "skein:"+version {
			t.Errorf("%s runs %s, and this is version %s", name, s.Image, version)
		}
	}
}
