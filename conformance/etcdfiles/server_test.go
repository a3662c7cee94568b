package etcdfiles

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"math"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/etcdutl/v3/snapshot"
	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"
	"google.golang.org/grpc"

	"github.com/skeindb/skein/internal/ports"
)

var binaries = flag.String("binaries", "", "directory with etcd and etcdutl of other versions, named etcd-3.5 and so on")

const (
	memberName = "m"
	// testTimeout bounds a call of a test that waits for nothing but the processor.
	testTimeout = 3 * time.Minute
	bcryptCost  = 4
)

// server is a running etcd.
type server struct {
	endpoint string
	stop     func()
}

// version is an etcd that restores files and runs on them.
type version struct {
	name string
	// binaries is empty for the etcd of this module.
	binaries string
}

func urls(t *testing.T) (client, peer url.URL) {
	t.Helper()
	p, err := ports.Unused(2)
	if err != nil {
		t.Fatal(err)
	}
	at := func(port int) url.URL { return url.URL{Scheme: "http", Host: fmt.Sprint("127.0.0.1:", port)} }
	return at(p[0]), at(p[1])
}

// startEmbedded starts the etcd of this module on a directory.
func startEmbedded(t *testing.T, dir string) *server {
	t.Helper()
	client, peer := urls(t)
	cfg := embed.NewConfig()
	cfg.Name, cfg.Dir = memberName, dir
	cfg.ListenClientUrls, cfg.AdvertiseClientUrls = []url.URL{client}, []url.URL{client}
	cfg.ListenPeerUrls, cfg.AdvertisePeerUrls = []url.URL{peer}, []url.URL{peer}
	cfg.InitialCluster = cfg.InitialClusterFromName(cfg.Name)
	cfg.UnsafeNoFsync, cfg.BcryptCost, cfg.MaxTxnOps = true, bcryptCost, 100_000
	cfg.MaxRequestBytes = 32 << 20
	log := zap.NewDevelopmentConfig()
	log.Level.SetLevel(zap.DPanicLevel)
	cfg.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zap.Must(log.Build()))
	e, err := embed.StartEtcd(cfg)
	if err != nil {
		t.Fatal(err)
	}
	s := &server{endpoint: client.Host, stop: e.Close}
	t.Cleanup(s.close)
	select {
	case <-e.Server.ReadyNotify():
	case err := <-e.Err():
		t.Fatal(err)
	case <-time.After(testTimeout):
		t.Fatal("etcd does not become ready")
	}
	return s
}

// close stops the server, once.
func (s *server) close() {
	if s.stop != nil {
		s.stop()
		s.stop = nil
	}
}

// startBinary starts another etcd on a directory.
func startBinary(t *testing.T, v version, dir string) *server {
	t.Helper()
	client, peer := urls(t)
	var out bytes.Buffer
	cmd := exec.Command(filepath.Join(v.binaries, "etcd-"+v.name), "--name", memberName, "--data-dir", dir,
		"--listen-client-urls", client.String(), "--advertise-client-urls", client.String(),
		"--listen-peer-urls", peer.String(), "--initial-advertise-peer-urls", peer.String(),
		"--initial-cluster", memberName+"="+peer.String(), "--unsafe-no-fsync", "--max-txn-ops=100000")
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	s := &server{endpoint: client.Host, stop: func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() {
			t.Logf("etcd %s:\n%s", v.name, out.Bytes())
		}
	}}
	t.Cleanup(s.close)
	return s
}

// restoreEmbedded restores a file by the tools of this module, and returns the directory.
func restoreEmbedded(t *testing.T, file string, bump uint64) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "data")
	err := snapshot.NewV3(zap.NewNop()).Restore(snapshot.RestoreConfig{
		SnapshotPath: file, Name: memberName, OutputDataDir: dir, PeerURLs: []string{"http://127.0.0.1:1"},
		InitialCluster: memberName + "=http://127.0.0.1:1", InitialClusterToken: "t",
		RevisionBump: bump, MarkCompacted: bump > 0,
	})
	if err != nil {
		t.Fatalf("restore %s: %v", file, err)
	}
	return dir
}

// start restores a file and starts an etcd on it.
func (v version) start(t *testing.T, file string) *server {
	t.Helper()
	if v.binaries == "" {
		return startEmbedded(t, restoreEmbedded(t, file, 0))
	}
	dir := filepath.Join(t.TempDir(), "data")
	out, err := exec.Command(filepath.Join(v.binaries, "etcdutl-"+v.name), "snapshot", "restore", file, "--name", memberName,
		"--data-dir", dir, "--initial-cluster", memberName+"=http://127.0.0.1:1", "--initial-advertise-peer-urls", "http://127.0.0.1:1").CombinedOutput()
	if err != nil {
		t.Fatalf("restore %s by %s: %v\n%s", file, v.name, err, out)
	}
	return startBinary(t, v, dir)
}

// dial returns a client, of the user if there is one.
func (s *server) dial(t *testing.T, user, password string) *clientv3.Client {
	t.Helper()
	c, err := clientv3.New(clientv3.Config{
		Endpoints: []string{s.endpoint}, Username: user, Password: password, DialTimeout: testTimeout, Logger: zap.NewNop(),
		MaxCallSendMsgSize: math.MaxInt32, MaxCallRecvMsgSize: math.MaxInt32,
		DialOptions: []grpc.DialOption{grpc.WithDefaultCallOptions(grpc.WaitForReady(true))},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil && !errors.Is(err, context.Canceled) {
			t.Errorf("close the client: %v", err)
		}
	})
	return c
}

// versions are those that there are here.
func versions(t *testing.T) []version {
	t.Helper()
	all := []version{{name: "3.7"}}
	for _, name := range []string{"3.6", "3.5"} {
		if *binaries == "" {
			t.Logf("no etcd %s: give -binaries", name)
			continue
		}
		for _, tool := range []string{"etcd-", "etcdutl-"} {
			if _, err := os.Stat(filepath.Join(*binaries, tool+name)); err != nil {
				t.Fatal(err)
			}
		}
		all = append(all, version{name, *binaries})
	}
	return all
}
