package conformance

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
	"go.uber.org/zap"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/conformance/cluster"
)

const (
	// limit bounds a whole test: a test that waits for ever fails here.
	limit = 4 * time.Minute
	// leaseSeconds is far above any pause of the machine: only the test ends sessions.
	leaseSeconds = 120
)

// rig is a cluster with some clients, each of one node, and splits under way.
type rig struct {
	clients []*clientv3.Client
	admin   *adminapi.Client
	// cuts are keys at which ranges must begin.
	cuts   chan string
	splits atomic.Int64
	work   sync.WaitGroup
}

func newRig(t *testing.T, clients int) (r *rig, ctx context.Context) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	t.Cleanup(cancel)
	starting, cancelStart := context.WithTimeout(ctx, startTimeout)
	defer cancelStart()
	c, err := cluster.Start(starting, cluster.Options{Dir: t.TempDir(), Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Stop(); err != nil {
			t.Error(err)
		}
	})
	r = &rig{cuts: make(chan string, 1000)}
	if r.admin, err = adminapi.NewClient(c.Endpoints(), nil); err != nil {
		t.Fatal(err)
	}
	for i := range clients {
		client, err := clientv3.New(clientv3.Config{Endpoints: c.Endpoints()[i%cluster.Nodes:][:1], Logger: zap.NewNop()})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { client.Close() })
		r.clients = append(r.clients, client)
	}
	for _, client := range r.clients[:min(clients, cluster.Nodes)] {
		for _, err = client.Get(starting, "x"); err != nil && starting.Err() == nil; {
			_, err = client.Get(starting, "x")
		}
		if err != nil {
			t.Fatalf("a node does not serve: %v", err)
		}
	}
	r.work.Go(func() { r.split(ctx, t) })
	t.Cleanup(func() {
		close(r.cuts)
		r.work.Wait()
	})
	return r, ctx
}

// split splits ranges at the keys of cuts, one after the other.
func (r *rig) split(ctx context.Context, t *testing.T) {
	t.Helper()
	for key := range r.cuts {
		_, err := r.admin.RangeSplit(ctx, []byte(key))
		var refused *adminapi.Refusal
		switch {
		case err == nil:
			r.splits.Add(1)
		case errors.As(err, &refused) && strings.Contains(refused.Reason, "already"):
		case ctx.Err() != nil:
			return
		default:
			t.Errorf("split at %q: %v", key, err)
		}
	}
}

// cut requests that a range begin at the key, soon.
func (r *rig) cut(key string) { r.cuts <- key }

// session makes a session with a lease of its own, and requests that a range begin at
// its key below prefix.
func (r *rig) session(t *testing.T, client *clientv3.Client, prefix string) *concurrency.Session {
	t.Helper()
	s, err := concurrency.NewSession(client, concurrency.WithTTL(leaseSeconds))
	if err != nil {
		t.Error(err)
		return nil
	}
	r.cut(sessionKey(prefix, s))
	return s
}
