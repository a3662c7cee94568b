package node_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/skeindb/skein/backup/block"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/dataapi"
	"github.com/skeindb/skein/etcdfile"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
)

// must fails the test with what was done.
func must(t *testing.T, what string, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

// etcdctl snapshot save takes a file of any member, with the history that is not compacted, leases and users. The data
// service's client reads the same versions. Nothing stays on the disk, and no hold.
func TestSnapshotSave(t *testing.T) {
	c := serving(t)
	cl := c.clientOf(c.nodes...)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	lease, err := cl.Grant(ctx, 600)
	must(t, "grant", err)
	for i := range 300 {
		_, err := cl.Put(ctx, fmt.Sprintf("%c%03d", "ahpx"[i%4], i%150), strings.Repeat("v", i*10), clientv3.WithLease(lease.ID))
		must(t, "put", err)
	}
	at, err := cl.Delete(ctx, "a000")
	must(t, "delete", err)
	_, err = cl.Compact(ctx, at.Header.Revision-100)
	must(t, "compact", err)
	_, err = cl.UserAdd(ctx, "alice", "secret")
	must(t, "add a user", err)

	first := block.Sum{}
	for i, p := range c.nodes {
		path := filepath.Join(t.TempDir(), "snapshot.db")
		version := c.save(ctx, p, path)
		if version != "3.7.0" {
			t.Errorf("%s says version %q", p.name, version)
		}
		db, err := etcdfile.Open(ctx, path, etcdfile.Options{})
		must(t, "open the snapshot of "+p.name, err)
		info := db.Info()
		if info.Revision != keyspace.Revision(at.Header.Revision) || info.Compacted != info.Revision-100 || !info.HasLease(keyspace.LeaseID(lease.ID)) || len(info.Auth.Users) != 1 {
			t.Errorf("%s: %+v, at revision %d", p.name, info, at.Header.Revision)
		}
		vs, err := db.Versions(ctx, etcdfile.ReadOptions{TempDir: t.TempDir()})
		must(t, "read the snapshot of "+p.name, err)
		sum := block.Sum{}
		for {
			v, err := vs.Next()
			if errors.Is(err, io.EOF) {
				break
			}
			must(t, "read the snapshot of "+p.name, err)
			sum.Add(v)
		}
		vs.Close()
		must(t, "close", db.Close())
		if i == 0 {
			first = sum
		}
		if sum != first || sum.Versions < 200 {
			t.Errorf("the snapshot of %s has %v, that of %s has %v", p.name, sum, c.nodes[0].name, first)
		}
		left, err := os.ReadDir(filepath.Join(c.nodes[i].dir, p.name, "snapshots"))
		if err != nil || len(left) > 0 {
			t.Errorf("%s has left %v, %v", p.name, left, err)
		}
	}
	c.dataOf(ctx, at.Header.Revision, first)
	c.cancelled(ctx, cl)
}

// save is etcdctl snapshot save, with its check of the size.
func (c *processes) save(ctx context.Context, p *process, path string) (version string) {
	c.t.Helper()
	resp, err := c.clientOf(p).SnapshotWithVersion(ctx)
	must(c.t, "ask for a snapshot of "+p.name, err)
	defer resp.Snapshot.Close()
	f, err := os.Create(path)
	must(c.t, "save", err)
	n, err := io.Copy(f, resp.Snapshot)
	must(c.t, "save a snapshot of "+p.name, errors.Join(err, f.Close()))
	if n%512 != 32 {
		c.t.Errorf("the snapshot of %s has %d bytes: no hash is behind it", p.name, n)
	}
	return resp.Version
}

// dataOf reads a cut by the data service, which has the same history.
func (c *processes) dataOf(ctx context.Context, at int64, want block.Sum) {
	t := c.t
	t.Helper()
	conn, err := grpc.NewClient(strings.TrimPrefix(c.nodes[1].client, "http://"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	must(t, "connect", err)
	defer conn.Close()
	client := dataapi.NewClient(conn, clock.System())
	cut, err := client.Cut(ctx, dataapi.CutOptions{Owner: "a test"})
	must(t, "cut", err)
	if int64(cut.Revision) != at || int64(cut.Compacted) != at-100 || cut.Held != cut.Compacted || len(cut.Leases) != 1 || cut.Leases[0].TTL != 600 || len(cut.Access) < 2 || len(cut.Borders) != 3 || cut.Cluster == 0 {
		t.Errorf("%+v, at revision %d", cut, at)
	}
	held, stop := client.Hold(ctx, cut.Hold)
	vs := client.Read(held, dataapi.ReadOptions{Cut: mvcc.Cut{Select: mvcc.SelectKept, At: cut.Revision, After: cut.Compacted}})
	for err == nil {
		_, err = vs.Next()
	}
	if !errors.Is(err, io.EOF) || vs.Sum() != want {
		t.Errorf("the data service has %v, %v, and a snapshot %v", vs.Sum(), err, want)
	}
	vs.Close()
	stop()
	must(t, "renew and move up", client.Renew(ctx, cut.Hold, cut.Revision))
	must(t, "release", client.Release(ctx, cut.Hold))
	if err := client.Renew(ctx, cut.Hold, 0); status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "begin it anew") {
		t.Errorf("a released hold is renewed: %v", err)
	}
}

// cancelled ends a snapshot's stream in its middle: the next one is served.
func (c *processes) cancelled(ctx context.Context, cl *clientv3.Client) {
	t := c.t
	t.Helper()
	for range 3 {
		one, cancel := context.WithCancel(ctx)
		st, err := pb.NewMaintenanceClient(cl.ActiveConnection()).Snapshot(one, &pb.SnapshotRequest{})
		must(t, "snapshot", err)
		m, err := st.Recv()
		must(t, "the first piece", err)
		if len(m.GetBlob()) != 32<<10 || m.GetRemainingBytes() == 0 || m.GetRemainingBytes()%(4<<10) != 0 {
			t.Errorf("%d bytes, %d remain", len(m.GetBlob()), m.GetRemainingBytes())
		}
		cancel()
	}
}
