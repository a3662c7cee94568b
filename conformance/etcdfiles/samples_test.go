package etcdfiles

import (
	"compress/gzip"
	"context"
	"flag"
	"io"
	"os"
	"path/filepath"
	"testing"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	clientsnapshot "go.etcd.io/etcd/client/v3/snapshot"
	"go.uber.org/zap"
)

var samples = flag.String("samples", "", "write the snapshots that package etcdfile's tests read to this directory")

// TestSamples makes a small snapshot by each version, with everything that a file has.
func TestSamples(t *testing.T) {
	if *samples == "" {
		t.Skip("it writes the files of package etcdfile's tests: give -samples ../../etcdfile/testdata")
	}
	for _, v := range versions(t) {
		dir := filepath.Join(t.TempDir(), "data")
		var s *server
		if v.binaries == "" {
			s = startEmbedded(t, dir)
		} else {
			s = startBinary(t, v, dir)
		}
		sample(t, s.dial(t, "", ""))
		path := filepath.Join(t.TempDir(), "db")
		if _, err := clientsnapshot.SaveWithVersion(t.Context(), zap.NewNop(), clientv3.Config{
			Endpoints: []string{s.endpoint}, Username: "root", Password: rootPassword, Logger: zap.NewNop(),
		}, path); err != nil {
			t.Fatal(err)
		}
		compress(t, path, filepath.Join(*samples, "etcd-"+v.name+".db.gz"))
	}
}

func sample(t *testing.T, c *clientv3.Client) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testTimeout)
	defer cancel()
	for _, l := range []clientv3.LeaseID{7, -8} {
		if _, err := clientv3.RetryLeaseClient(c).LeaseGrant(ctx, &etcdserverpb.LeaseGrantRequest{ID: int64(l), TTL: 1000}); err != nil {
			t.Fatal(err)
		}
	}
	for _, op := range []clientv3.Op{
		clientv3.OpPut("a", "1"),
		clientv3.OpPut("a", "2", clientv3.WithLease(7)),
		clientv3.OpPut("b", "old", clientv3.WithLease(-8)),
		clientv3.OpDelete("b"),
		clientv3.OpPut("b", "new", clientv3.WithLease(-8)),
		clientv3.OpTxn(nil, []clientv3.Op{
			clientv3.OpTxn(nil, []clientv3.Op{clientv3.OpPut("c", "for a moment")}, nil),
			clientv3.OpPut("d", ""),
			clientv3.OpTxn(nil, []clientv3.Op{clientv3.OpDelete("c")}, nil),
		}, nil),
		clientv3.OpPut("\xff\x00", "\x00", clientv3.WithLease(7)),
		clientv3.OpDelete("a", clientv3.WithRange("b\x00")),
	} {
		if _, err := c.Do(ctx, op); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := c.Compact(ctx, 3, clientv3.WithCompactPhysical()); err != nil {
		t.Fatal(err)
	}
	accounts := []func() error{
		func() error { _, err := c.RoleAdd(ctx, "root"); return err },
		func() error { _, err := c.UserAdd(ctx, "root", rootPassword); return err },
		func() error { _, err := c.UserGrantRole(ctx, "root", "root"); return err },
		func() error { _, err := c.RoleAdd(ctx, "some"); return err },
		func() error {
			_, err := c.RoleGrantPermission(ctx, "some", "b", "", clientv3.PermissionType(clientv3.PermWrite))
			return err
		},
		func() error {
			_, err := c.RoleGrantPermission(ctx, "some", "a", "\x00", clientv3.PermissionType(clientv3.PermRead))
			return err
		},
		func() error {
			_, err := c.UserAddWithOptions(ctx, "cn", "", &clientv3.UserAddOptions{NoPassword: true})
			return err
		},
		func() error { _, err := c.UserGrantRole(ctx, "cn", "some"); return err },
		func() error { _, err := c.AuthEnable(ctx); return err },
	}
	for _, f := range accounts {
		if err := f(); err != nil {
			t.Fatal(err)
		}
	}
}

func compress(t *testing.T, from, to string) {
	t.Helper()
	in, err := os.Open(from)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	out, err := os.Create(to)
	if err != nil {
		t.Fatal(err)
	}
	w, err := gzip.NewWriterLevel(out, gzip.BestCompression)
	if err == nil {
		_, err = io.Copy(w, in)
	}
	if err == nil {
		err = w.Close()
	}
	if err == nil {
		err = out.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
}
