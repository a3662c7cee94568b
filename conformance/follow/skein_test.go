package follow

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/config"
	"github.com/skeindb/skein/conformance/cluster"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mirror"
	"github.com/skeindb/skein/mirror/diff"
	"github.com/skeindb/skein/transfer"
)

// startSkein starts a cluster of three nodes and returns a client of it.
func startSkein(ctx context.Context, t *testing.T) *clientv3.Client {
	t.Helper()
	c, err := cluster.Start(ctx, cluster.Options{Dir: t.TempDir(), Logger: zap.NewNop(), Configure: func(c *config.Config) {
		c.BcryptCost = 4 // as the etcds': it is what a login with a wrong name computes
	}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Stop(); err != nil {
			t.Error(err)
		}
	})
	client, err := clientv3.New(clientConfig(c.Endpoints()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	for {
		if _, err = client.Get(ctx, "ready"); err == nil {
			return client
		}
		if ctx.Err() != nil {
			t.Fatal(err)
		}
	}
}

// stepped waits until the mirror of a directory follows, and has compared all keys since this start.
func stepped(ctx context.Context, t *testing.T, dir string, ended chan error) {
	t.Helper()
	for {
		st, err := mirror.ReadStatus(vfs.Default, dir)
		if err == nil && st.Step == mirror.Following && st.Passes > 0 {
			t.Log(st)
			return
		}
		select {
		case err := <-ended:
			t.Fatalf("the mirror ends: %v", err)
		case <-ctx.Done():
			t.Fatalf("%s, %v", st, err)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// TestSkein: an etcd is mirrored into a cluster of Skein while clients write. The mirror is killed while it follows
// and goes on; meanwhile 20,000 keys go in one revision (trap 116) and a lease ends. Behind the cut-over the cluster has every revision that the source has, its leases and users, and the
// next write has the next revision.
func TestSkein(t *testing.T) {
	_, endpoints := startEtcds(t)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	source, err := clientv3.New(clientConfig(endpoints))
	if err != nil {
		t.Fatal(err)
	}
	defer source.Close()
	target := startSkein(ctx, t)
	putMany(ctx, t, source)
	early, err := source.Grant(ctx, 500) // it ends while no mirror runs
	if err != nil {
		t.Fatal(err)
	}
	if _, err := source.Put(ctx, "early", "v", clientv3.WithLease(early.ID)); err != nil {
		t.Fatal(err)
	}
	if _, err := source.UserAdd(ctx, "somebody", "secret"); err != nil {
		t.Fatal(err)
	}

	var stop atomic.Bool
	var writers sync.WaitGroup
	defer writers.Wait()
	defer stop.Store(true)
	for w := range uint64(2) {
		writers.Go(func() { write(ctx, source, w, &stop) })
	}
	dir := filepath.Join(t.TempDir(), "mirror")
	run := func(ctx context.Context, number uint64) chan error {
		ended := make(chan error, 1)
		go func() {
			ended <- transfer.Mirror(ctx, &transfer.Cluster{Client: target, Clock: clock.System(), Report: t.Logf}, transfer.MirrorOptions{
				Source: clientConfig(endpoints), Dir: dir, Number: number,
			})
		}()
		return ended
	}
	running, kill := context.WithCancel(ctx)
	ended := run(running, 7)
	stepped(ctx, t, dir, ended)
	// A cluster that is loaded takes no writes, and shows what it has.
	if _, err := target.Put(ctx, "k", "v"); err == nil {
		t.Error("a cluster that is loaded takes a write")
	}
	kill()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Fatalf("the mirror ends: %v", err)
	}
	again := func(f func() error) { // a slow machine lets a request of 20,000 keys time out
		t.Helper()
		for err := f(); err != nil && !errors.Is(err, rpctypes.ErrLeaseNotFound); err = f() {
			if ctx.Err() != nil {
				t.Fatal(err)
			}
		}
	}
	again(func() error {
		_, err := source.Delete(ctx, "many", clientv3.WithPrefix())
		return err
	})
	again(func() error {
		_, err := source.Revoke(ctx, early.ID)
		return err
	})
	ended = run(ctx, 8) // the number of the first start stays
	stepped(ctx, t, dir, ended)
	stop.Store(true)
	writers.Wait()
	if err := mirror.RequestCutover(vfs.Default, dir); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	st, err := mirror.ReadStatus(vfs.Default, dir)
	if err != nil || st.Warning != "" || st.Step != mirror.Done {
		t.Fatalf("%+v, %v", st, err)
	}
	t.Logf("%.1f s frozen, revision %d", st.FreezeSeconds, st.Position)
	same(ctx, t, source, target, st.Position)
	if u, err := target.UserGet(ctx, "somebody"); err != nil {
		t.Errorf("%v, %v", u, err)
	}
	put, err := target.Put(ctx, "next", "")
	if err != nil || keyspace.Revision(put.Header.Revision) != st.Position+1 {
		t.Errorf("%v, %v, want revision %d", put, err, st.Position+1)
	}
}

// same compares two stores at revisions up to the last one.
func same(ctx context.Context, t *testing.T, a, b *clientv3.Client, last keyspace.Revision) {
	t.Helper()
	compared := 0
	for rev := last; rev > last-2000 && rev > 1; rev -= 1 + (last-rev)/3 {
		r, err := diff.Compare(ctx, diff.NewEndpoint(a), diff.NewEndpoint(b), diff.Options{Revision: rev, Show: 5})
		if errors.Is(err, diff.ErrCompacted) {
			break
		}
		if err != nil {
			t.Fatal(fmt.Errorf("revision %d: %w", rev, err))
		}
		if !r.Equal() {
			var text bytes.Buffer
			r.Write(&text)
			t.Fatalf("revision %d: %s", rev, strings.TrimSpace(text.String()))
		}
		if rev == last && (r.KeysA == 0 || r.LeasesA == 0) {
			t.Errorf("there is nothing to compare: %+v", r)
		}
		compared++
	}
	if compared < 5 {
		t.Errorf("only %d revisions were compared", compared)
	}
}
