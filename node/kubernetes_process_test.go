package node_test

import (
	"strings"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/skeindb/skein/loadtest"
)

// firstSecond is closed when a load has said what its first measured second was.
type firstSecond struct {
	once sync.Once
	over chan struct{}
}

func (f *firstSecond) Write(b []byte) (int, error) {
	if strings.HasPrefix(string(b), "run ") {
		f.once.Do(func() { close(f.over) })
	}
	return len(b), nil
}

// API servers of Kubernetes lose no event and no update while a node is killed and comes back, and nothing of theirs
// is left behind.
func TestKubernetesBesideKill(t *testing.T) {
	c := newProcessesOf(t, 3)
	c.startAll()
	c.ready()
	cfg := loadtest.DefaultConfig()
	for _, n := range c.nodes {
		cfg.Endpoints = append(cfg.Endpoints, n.client)
	}
	cfg.Workload, cfg.Clients, cfg.Conns, cfg.Duration = loadtest.Kubernetes, 12, 3, 5*time.Second
	cfg.Kubernetes = loadtest.KubernetesConfig{Nodes: 50, Pods: 1200, Watchers: 3, Mix: loadtest.DefaultMix}
	cfg.Verify, cfg.Cleanup, cfg.Live, cfg.DataPath = true, true, true, t.TempDir()
	out := &firstSecond{over: make(chan struct{})}
	var report loadtest.Report
	ended := make(chan error, 1)
	go func() {
		var err error
		report, err = loadtest.Run(t.Context(), cfg, out)
		ended <- err
	}()
	select {
	case <-out.over:
	case err := <-ended:
		t.Fatalf("the load ended before its first second: %v", err)
	}
	c.nodes[1].kill()
	c.start(c.nodes[1])
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	if err := report.Broken(); err != nil {
		t.Errorf("%v\n%s", err, strings.Join(report.Verify.First, "\n"))
	}
	w, v := report.Watch, report.Verify
	if w.Events == 0 || w.Progress == 0 || w.Failed != 0 || v.Acknowledged < 1000 {
		t.Errorf("watched %+v, verified %+v", w, v)
	}
	left, err := c.clientOf(c.nodes[0]).Get(t.Context(), "/registry/", clientv3.WithPrefix(), clientv3.WithCountOnly())
	if err != nil || left.Count != 0 {
		t.Errorf("%v, %d keys are left", err, left.Count)
	}
}
