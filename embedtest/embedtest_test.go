package embedtest_test

import (
	"fmt"
	"net"
	"slices"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/goleak"

	"github.com/skeindb/skein/config"
	"github.com/skeindb/skein/embedtest"
	"github.com/skeindb/skein/internal/measure"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func put(t *testing.T, c *clientv3.Client, key, value string) {
	t.Helper()
	if _, err := c.Put(t.Context(), key, value); err != nil {
		t.Fatalf("put %s: %v", key, err)
	}
}

func get(t *testing.T, c *clientv3.Client, key string) string {
	t.Helper()
	r, err := c.Get(t.Context(), key)
	if err != nil {
		t.Fatalf("get %s: %v", key, err)
	}
	if len(r.Kvs) == 0 {
		return ""
	}
	return string(r.Kvs[0].Value)
}

func isFree(t *testing.T, addr string) {
	t.Helper()
	l, err := net.Listen("tcp", addr)
	if err != nil {
		t.Errorf("the port of a server that has ended: %v", err)
		return
	}
	l.Close()
}

// Two servers in one process do not see each other, and each has its own configuration.
func TestTwoServers(t *testing.T) {
	var first *embedtest.Server
	t.Run("both run", func(t *testing.T) {
		first = embedtest.New(t)
		second := embedtest.New(t, embedtest.WithConfig(func(c *config.Config) { c.MaxTxnOps = 1 }))
		put(t, first.Client(), "k", "first")
		put(t, second.Client(), "k", "second")
		if a, b := get(t, first.Client(), "k"), get(t, second.Client(), "k"); a != "first" || b != "second" {
			t.Errorf("the servers have %q and %q", a, b)
		}
		two := []clientv3.Op{clientv3.OpGet("a"), clientv3.OpGet("b")}
		if _, err := first.Client().Txn(t.Context()).Then(two...).Commit(); err != nil {
			t.Error(err)
		}
		if _, err := second.Client().Txn(t.Context()).Then(two...).Commit(); err == nil {
			t.Error("a setting was not taken")
		}
	})
	// Behind the test its port is free.
	isFree(t, first.Endpoints()[0])
}

// A node that is killed has everything acknowledged when it is started again on its directory; one that is stopped, too.
func TestKillAndStart(t *testing.T) {
	s := embedtest.New(t)
	n := s.Node(0)
	put(t, s.Client(), "a", "1")
	n.Kill()
	isFree(t, n.Endpoint())
	n.Start()
	put(t, s.Client(), "b", "2")
	n.Stop()
	n.Start()
	for key, want := range map[string]string{"a": "1", "b": "2"} {
		if got := get(t, s.Client(), key); got != want {
			t.Errorf("%s is %q, want %q", key, got, want)
		}
	}
}

// One of three nodes is killed: the others go on, and its watchers miss nothing.
func TestThreeNodes(t *testing.T) {
	s := embedtest.New(t, embedtest.Nodes(3))
	if n := len(s.Endpoints()); n != 3 {
		t.Fatalf("%d endpoints", n)
	}
	events := s.Client().Watch(t.Context(), "k", clientv3.WithPrefix(), clientv3.WithRev(1))
	put(t, s.Client(), "k1", "v")
	s.Node(1).Kill()
	for i := 2; i <= 20; i++ {
		// An attempt may have reached the node that was killed, and its fate be unknown.
		for {
			if _, err := s.Client().Put(t.Context(), fmt.Sprintf("k%d", i), "v"); err == nil {
				break
			}
		}
	}
	s.Node(1).Start()
	put(t, s.Node(1).Server().Client(), "k21", "v")
	seen := map[string]bool{}
	for len(seen) < 21 {
		r, ok := <-events
		if !ok || r.Err() != nil {
			t.Fatalf("the watch ended: %v", r.Err())
		}
		for _, e := range r.Events {
			seen[string(e.Kv.Key)] = true
		}
	}
}

// scope is a test that ends within another one.
type scope struct {
	testing.TB
	cleanups []func()
}

func (s *scope) Cleanup(f func()) { s.cleanups = append(s.cleanups, f) }

func (s *scope) end() {
	for _, f := range slices.Backward(s.cleanups) {
		f()
	}
}

// BenchmarkNew is the time of a test for a server of its own, and until it is gone.
func BenchmarkNew(b *testing.B) {
	for _, nodes := range []int{1, 3} {
		b.Run(fmt.Sprintf("nodes=%d", nodes), func(b *testing.B) {
			var started time.Duration
			cpu := measure.CPU()
			for b.Loop() {
				s, began := &scope{TB: b}, time.Now()
				embedtest.New(s, embedtest.Nodes(nodes))
				started += time.Since(began)
				s.end()
			}
			b.ReportMetric(float64(started.Milliseconds())/float64(b.N), "ms-started")
			b.ReportMetric(float64(measure.CPU()-cpu)/float64(b.N)/1e6, "cpu-ms/op")
		})
	}
}
