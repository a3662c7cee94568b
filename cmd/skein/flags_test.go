package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/config"
	"github.com/skeindb/skein/embed"
	"github.com/skeindb/skein/internal/ports"
)

// flagsNode is a node that a command line started in this process.
type flagsNode struct {
	t        *testing.T
	log      string
	client   *clientv3.Client
	endpoint string
	peer     string
	metrics  string
	cfg      *config.Config
}

// startWith starts a node by the command line of a user, on free ports, and ends it
// with the test.
func startWith(t *testing.T, scheme string, args ...string) *flagsNode {
	t.Helper()
	free, err := ports.Unused(3)
	if err != nil {
		t.Fatal(err)
	}
	at := func(i int) string { return fmt.Sprintf("127.0.0.1:%d", free[i]) }
	n := &flagsNode{t: t, log: filepath.Join(t.TempDir(), "log"), metrics: at(0), peer: at(1)}
	addr := at(2)
	n.endpoint = scheme + "://" + addr
	ready := make(chan *config.Config, 1)
	replaceRun(t, func(ctx context.Context, cfg *config.Config, logger *zap.Logger) error {
		nd, err := embed.Start(ctx, cfg, embed.WithLogger(logger), embed.SurelyNew())
		if err != nil {
			return err
		}
		ready <- cfg
		<-ctx.Done()
		return nd.Stop(context.Background())
	})
	args = append([]string{
		"--listen-client-urls=" + n.endpoint, "--advertise-client-urls=" + n.endpoint + ",http://192.0.2.1:1",
		"--listen-peer-urls=http://" + n.peer, "--initial-advertise-peer-urls=http://" + n.peer,
		"--listen-metrics-urls=http://" + n.metrics, "--log-outputs=" + n.log,
	}, args...)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan int, 1)
	var stderr bytes.Buffer
	go func() { ended <- execute(ctx, args, nil, io.Discard, &stderr) }()
	t.Cleanup(func() {
		cancel()
		if code := <-ended; code != 0 {
			t.Errorf("exit %d: %s", code, &stderr)
		}
	})
	select {
	case n.cfg = <-ready:
	case code := <-ended:
		ended <- code
		t.Fatalf("exit %d: %s", code, &stderr)
	}
	c, err := clientv3.New(clientv3.Config{
		Endpoints: []string{n.endpoint}, Logger: zap.NewNop(), MaxUnaryRetries: 1,
		TLS: &tls.Config{MinVersion: tls.VersionTLS12, InsecureSkipVerify: true},
	})
	if err != nil {
		t.Fatal(err)
	}
	n.client = c
	t.Cleanup(func() { c.Close() })
	return n
}

// page fetches a page of the node.
func (n *flagsNode) page(url string) (int, string) {
	n.t.Helper()
	tr := &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{MinVersion: tls.VersionTLS12, InsecureSkipVerify: true}}
	resp, err := (&http.Client{Transport: tr}).Get(url)
	if err != nil {
		n.t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		n.t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

// starts returns where the ranges begin.
func (n *flagsNode) starts() []string {
	n.t.Helper()
	c, err := adminapi.NewClient([]string{n.endpoint}, nil)
	if err != nil {
		n.t.Fatal(err)
	}
	ranges, err := c.RangeList(n.t.Context())
	if err != nil {
		n.t.Fatal(err)
	}
	var keys []string
	for _, r := range ranges.GetRanges() {
		keys = append(keys, string(r.Start))
	}
	return keys
}

// TestFlagsReachTheNode: what a command line says is seen from outside. Package config
// has a test that each flag arrives in the Config; here a value that the node does not
// use fails.
func TestFlagsReachTheNode(t *testing.T) {
	dir := t.TempDir()
	splits := filepath.Join(dir, "splits")
	if err := os.WriteFile(splits, []byte("d\nm\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	n := startWith(t, "http", "--name=n9", "--data-dir="+filepath.Join(dir, "data"), "--wal-dir="+filepath.Join(dir, "wal"),
		"--initial-cluster-token=other", "--initial-split-keys="+splits, "--max-txn-ops=2", "--max-request-bytes=1000",
		"--enable-pprof", "--warning-unary-request-duration=1ns", "--log-format=console", "--log-level=debug")
	ctx := t.Context()
	for _, d := range []string{"data/engine", "wal/skein.identity"} {
		if _, err := os.Stat(filepath.Join(dir, d)); err != nil {
			t.Error(err)
		}
	}
	put, err := n.client.Put(ctx, "k", "v")
	if err != nil {
		t.Fatal(err)
	}
	boot, err := n.cfg.Bootstrap()
	if err != nil || put.Header.ClusterId != uint64(boot.Cluster) || put.Header.MemberId != uint64(boot.Self) {
		t.Errorf("header %v, bootstrap %+v, %v", put.Header, boot, err)
	}
	n.cfg.InitialClusterToken = "etcd-cluster"
	if usual, err := n.cfg.Bootstrap(); err != nil || usual.Cluster == boot.Cluster {
		t.Errorf("the token makes no difference: %v", err)
	}
	if _, err := n.client.Put(ctx, "k", strings.Repeat("v", 1000)); !errors.Is(err, rpctypes.ErrRequestTooLarge) {
		t.Error(err)
	}
	three := []clientv3.Op{clientv3.OpGet("k"), clientv3.OpGet("k"), clientv3.OpGet("k")}
	if _, err := n.client.Txn(ctx).Then(three...).Commit(); !errors.Is(err, rpctypes.ErrTooManyOps) {
		t.Error(err)
	}
	if got, want := n.starts(), []string{"", "d", "m"}; !slices.Equal(got, want) {
		t.Errorf("ranges begin at %q, want %q", got, want)
	}
	n.checkMembers(ctx)
	n.checkPages()
	// The peer port is UDP, and taken.
	if c, err := net.ListenPacket("udp", n.peer); err == nil {
		c.Close()
		t.Errorf("nobody listens at %s", n.peer)
	}
	b, err := os.ReadFile(n.log)
	if log := string(b); err != nil || !strings.Contains(log, "request took long") || !strings.Contains(log, "\tdebug\t") || strings.HasPrefix(log, "{") {
		t.Errorf("%v\n%s", err, log)
	}
}

func (n *flagsNode) checkMembers(ctx context.Context) {
	n.t.Helper()
	resp, err := n.client.MemberList(ctx)
	if err != nil || len(resp.Members) != 1 {
		n.t.Fatalf("%v, %v", resp, err)
	}
	m := resp.Members[0]
	clients := []string{"http://192.0.2.1:1", n.endpoint}
	slices.Sort(m.ClientURLs)
	slices.Sort(clients)
	if m.Name != "n9" || !slices.Equal(m.PeerURLs, []string{"http://" + n.peer}) || !slices.Equal(m.ClientURLs, clients) {
		n.t.Errorf("%+v", m)
	}
}

func (n *flagsNode) checkPages() {
	n.t.Helper()
	for url, want := range map[string]int{
		n.endpoint + "/debug/pprof/": http.StatusOK, "http://" + n.metrics + "/metrics": http.StatusOK,
		"http://" + n.metrics + "/debug/pprof/": http.StatusNotFound,
	} {
		if code, _ := n.page(url); code != want {
			n.t.Errorf("%s: %d, want %d", url, code, want)
		}
	}
}

// TestMoreFlagsReachTheNode: values that exclude those of the test above.
func TestMoreFlagsReachTheNode(t *testing.T) {
	n := startWith(t, "http", "--data-dir="+t.TempDir(), "--initial-ranges=3")
	if got := n.starts(); len(got) != 3 {
		t.Errorf("ranges begin at %q", got)
	}
	if code, _ := n.page(n.endpoint + "/debug/pprof/"); code != http.StatusNotFound {
		t.Errorf("profiles that nobody asked for: %d", code)
	}
}

// TestTLSFlagsReachTheNode: the bounds of the version hold at the client port.
func TestTLSFlagsReachTheNode(t *testing.T) {
	n := startWith(t, "https", "--data-dir="+t.TempDir(), "--auto-tls", "--tls-max-version=TLS1.2",
		"--cipher-suites=TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384")
	if _, err := n.client.Put(t.Context(), "k", "v"); err != nil {
		t.Error(err)
	}
	c, err := tls.Dial("tcp", strings.TrimPrefix(n.endpoint, "https://"), &tls.Config{MinVersion: tls.VersionTLS12, InsecureSkipVerify: true})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	s := c.ConnectionState()
	if got, want := fmt.Sprint(tls.VersionName(s.Version), " ", tls.CipherSuiteName(s.CipherSuite)), "TLS 1.2 TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}
