package follow

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mirror"
	"github.com/skeindb/skein/transfer"
)

// TestRefusedForASilentNode: each node has to note that users are checked before the cluster serves anybody. While one is down a
// cut-over is refused with its name before the source has to stand still. What is written then is followed, and once the node
// is back the next request is met.
func TestRefusedForASilentNode(t *testing.T) {
	_, endpoints := startEtcds(t)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	source := connect(ctx, t, endpoints)
	_, err := source.Put(ctx, "a", "1")
	if err == nil {
		_, err = source.UserAdd(ctx, "root", "p")
	}
	if err == nil {
		_, err = source.UserGrantRole(ctx, "root", "root")
	}
	if err == nil {
		_, err = source.AuthEnable(ctx)
	}
	if err != nil {
		t.Fatal(err)
	}
	asRoot := func(endpoints []string) *clientv3.Client {
		cfg := clientConfig(endpoints)
		cfg.Username, cfg.Password = "root", "p"
		c, err := clientv3.New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	}
	skeins, to := startProcesses(t, "skein", skeinArguments)
	target := connect(ctx, t, to)
	dir, cfg := filepath.Join(t.TempDir(), "mirror"), clientConfig(endpoints)
	cfg.Username, cfg.Password = "root", "p"
	ended := make(chan error, 1)
	go func() {
		ended <- transfer.Mirror(ctx, &transfer.Cluster{Client: target, Clock: clock.System(), Report: t.Logf}, transfer.MirrorOptions{Source: cfg, Dir: dir, Number: 7})
	}()
	stepped(ctx, t, dir, ended)

	const down = 2
	skeins[down].kill()
	skeins[down].ended <- nil // for the cleanup
	heard(ctx, t, target, down, false)
	if err := mirror.RequestCutover(vfs.Default, dir); err != nil {
		t.Fatal(err)
	}
	for stands := true; stands; time.Sleep(20 * time.Millisecond) {
		if stands, err = mirror.CutoverRequested(vfs.Default, dir); err != nil || ctx.Err() != nil {
			t.Fatal(err, ctx.Err())
		}
	}
	st, err := mirror.ReadStatus(vfs.Default, dir)
	if err != nil || st.Step != mirror.Following || st.Refused == nil || !strings.Contains(st.Refused.Reason, "do not answer: m2 (") {
		t.Fatalf("%+v, %v", st, err)
	}
	put, err := asRoot(endpoints).Put(ctx, "a", "2")
	if err != nil {
		t.Fatal(err)
	}
	skeins[down].start()
	heard(ctx, t, target, down, true)
	if err := mirror.RequestCutover(vfs.Default, dir); err != nil {
		t.Fatal(err)
	}
	for waits := true; waits; {
		select {
		case err := <-ended:
			if err != nil {
				t.Fatal(err)
			}
			waits = false
		case <-time.After(time.Second):
			// Once the request is gone the status is that after it.
			if stands, err := mirror.CutoverRequested(vfs.Default, dir); err != nil || stands {
				continue
			}
			if st, err := mirror.ReadStatus(vfs.Default, dir); err == nil && st.Refused != nil {
				t.Fatalf("refused with all nodes there: %+v", st)
			}
		}
	}
	st, err = mirror.ReadStatus(vfs.Default, dir)
	if err != nil || st.Step != mirror.Done || st.Refused != nil || int64(st.Position) != put.Header.Revision {
		t.Fatalf("%+v, %v", st, err)
	}
	if _, err := target.Get(ctx, "a"); err == nil {
		t.Error("somebody without a name is served")
	}
	next, err := asRoot(to).Put(ctx, "next", "")
	if err != nil || keyspace.Revision(next.Header.Revision) != st.Position+1 {
		t.Errorf("%v, %v, want revision %d", next, err, st.Position+1)
	}
}

// heard waits until a node of a cluster is heard by the others, or no more.
func heard(ctx context.Context, t *testing.T, c *clientv3.Client, node int, want bool) {
	t.Helper()
	for ; ctx.Err() == nil; time.Sleep(50 * time.Millisecond) {
		l, err := adminpb.NewAdminClient(c.ActiveConnection()).NodeList(ctx, &adminpb.NodeListRequest{})
		if err != nil {
			continue // the one that was asked is down
		}
		for _, n := range l.GetNodes() {
			if n.GetName() == fmt.Sprint("m", node) && n.GetAlive() == want {
				return
			}
		}
	}
	t.Fatalf("node m%d heard: not %t", node, want)
}
