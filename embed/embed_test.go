package embed_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"go.etcd.io/etcd/client/pkg/v3/types"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/goleak"

	"github.com/skeindb/skein/config"
	"github.com/skeindb/skein/embed"
	"github.com/skeindb/skein/internal/ports"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// onLoopback returns a configuration by hand, of a single node.
func onLoopback(dir string) (*config.Config, error) {
	free, err := ports.Unused(2)
	if err != nil {
		return nil, err
	}
	at := func(port int) []url.URL {
		return []url.URL{{Scheme: "http", Host: fmt.Sprintf("127.0.0.1:%d", port)}}
	}
	cfg := config.Default()
	cfg.DataDir = dir
	cfg.BcryptCost = 4 // with the race detector a hash of the default cost takes seconds
	cfg.ListenClientURLs, cfg.AdvertiseClientURLs = at(free[0]), at(free[0])
	cfg.ListenPeerURLs, cfg.AdvertisePeerURLs = at(free[1]), at(free[1])
	return cfg, nil
}

func start(t *testing.T, opts ...embed.Option) *embed.Server {
	t.Helper()
	cfg, err := onLoopback(filepath.Join(t.TempDir(), "data"))
	if err != nil {
		t.Fatal(err)
	}
	return startWith(t, cfg, opts...)
}

func startWith(t *testing.T, cfg *config.Config, opts ...embed.Option) *embed.Server {
	t.Helper()
	s, err := embed.Start(t.Context(), cfg, append(opts, embed.SurelyNew())...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Stop(context.Background()); err != nil {
			t.Error(err)
		}
	})
	<-s.Ready()
	return s
}

// Two servers run in one process, serve at their addresses, tell their stages and are gone after Stop. The process is left alone.
func TestTwoServers(t *testing.T) {
	limit, percent := debug.SetMemoryLimit(-1), debug.SetGCPercent(100)
	debug.SetGCPercent(percent)
	var stages []string // of Start and Stop, which this goroutine calls
	a, b := start(t, embed.OnStage(func(s string) { stages = append(stages, s) })), start(t)
	for _, s := range []*embed.Server{a, b} {
		if _, err := s.Client().Put(t.Context(), "k", s.ClientAddrs()[0].String()); err != nil {
			t.Fatal(err)
		}
	}
	for _, s := range []*embed.Server{a, b} {
		addr := s.ClientAddrs()[0].String()
		c, err := clientv3.New(clientv3.Config{Endpoints: []string{addr}})
		if err != nil {
			t.Fatal(err)
		}
		if r, err := c.Get(t.Context(), "k"); err != nil || len(r.Kvs) != 1 || string(r.Kvs[0].Value) != addr {
			t.Errorf("%v, %v", r, err)
		}
		c.Close()
		if text := page(t, "http://"+addr+"/metrics"); strings.Count(text, "\nskein_insecure ") != 1 {
			t.Error("its metrics are not those of one node")
		}
	}
	families, err := prometheus.DefaultGatherer.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if n := f.GetName(); strings.HasPrefix(n, "skein_") || strings.HasPrefix(n, "etcd_") {
			t.Errorf("%s is in the program's registry", n)
		}
	}
	if err := a.Stop(t.Context()); err != nil {
		t.Error(err)
	}
	<-a.Done()
	if a.Err() != nil || b.Err() != nil {
		t.Errorf("%v, %v", a.Err(), b.Err())
	}
	select {
	case <-b.Done():
		t.Error("the other one has ended too")
	default:
	}
	if _, err := a.Client().Get(t.Context(), "k"); err == nil {
		t.Error("a server that was stopped answers")
	}
	if _, err := b.Client().Get(t.Context(), "k"); err != nil {
		t.Error(err)
	}
	if first, last := stages[0], stages[len(stages)-1]; first != "find the node's place in the cluster" || last != "end the process" {
		t.Errorf("stages: %q", stages)
	}
	if l := debug.SetMemoryLimit(-1); l != limit {
		t.Errorf("the memory limit is %d, was %d", l, limit)
	}
	if p := debug.SetGCPercent(percent); p != percent {
		t.Errorf("the collector's pace is %d, was %d", p, percent)
	}
}

func page(t *testing.T, url string) string {
	t.Helper()
	tr := &http.Transport{DisableKeepAlives: true}
	resp, err := (&http.Client{Transport: tr}).Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// A bad configuration is refused in the words of the command line, and touches nothing.
func TestBadConfig(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "data")
	for want, change := range map[string]func(*config.Config){
		"--name must not be empty":                                 func(c *config.Config) { c.Name = "" },
		"--election-timeout[1000ms] should be at least as 5 times": func(c *config.Config) { c.HeartbeatInterval = 900 * time.Millisecond },
		"--force-new-cluster is done by the command":               func(c *config.Config) { c.ForceNewCluster = true },
		"couldn't find local name":                                 func(c *config.Config) { c.InitialCluster = types.URLsMap{"other": types.URLs(c.AdvertisePeerURLs)} },
	} {
		cfg, err := onLoopback(dir)
		if err != nil {
			t.Fatal(err)
		}
		change(cfg)
		s, err := embed.Start(t.Context(), cfg)
		if err == nil {
			_ = s.Stop(t.Context())
			t.Fatalf("%s: it starts", want)
		}
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
		if _, err := os.Stat(dir); err == nil {
			t.Errorf("%s: the directory was made", want)
		}
	}
}

// A client within the process has a user where users are checked, like any other.
func TestUsers(t *testing.T) {
	s := start(t)
	c := s.Client()
	for _, err := range []error{
		second(c.UserAdd(t.Context(), "root", "secret")), second(c.RoleAdd(t.Context(), "root")),
		second(c.UserGrantRole(t.Context(), "root", "root")), second(c.AuthEnable(t.Context())),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	if _, err := c.Get(t.Context(), "k"); !errors.Is(err, rpctypes.ErrUserEmpty) {
		t.Errorf("without a user: %v", err)
	}
	root, err := s.NewClient(clientv3.Config{Username: "root", Password: "secret"})
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	if _, err := root.Get(t.Context(), "k"); err != nil {
		t.Errorf("root: %v", err)
	}
}

func second[T any](_ T, err error) error { return err }

// A start that its context ends leaves nothing.
func TestStartIsEnded(t *testing.T) {
	cfg, err := onLoopback(filepath.Join(t.TempDir(), "data"))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	s, err := embed.Start(ctx, cfg, embed.OnStage(func(stage string) {
		if stage == "take part in the cluster" {
			cancel()
		}
	}))
	if err == nil {
		_ = s.Stop(t.Context())
		t.Fatal("it starts")
	}
	startWith(t, cfg) // its directory and its ports are free
}

// A server that is killed has what it acknowledged when its directory is served again.
func TestKill(t *testing.T) {
	cfg, err := onLoopback(filepath.Join(t.TempDir(), "data"))
	if err != nil {
		t.Fatal(err)
	}
	s := startWith(t, cfg)
	watch := s.Client().Watch(t.Context(), "k")
	if _, err := s.Client().Put(t.Context(), "k", "v"); err != nil {
		t.Fatal(err)
	}
	s.Kill()
	<-s.Done()
	for range watch { // ends
	}
	if r, err := startWith(t, cfg).Client().Get(t.Context(), "k"); err != nil || len(r.Kvs) != 1 {
		t.Errorf("%v, %v", r, err)
	}
}
