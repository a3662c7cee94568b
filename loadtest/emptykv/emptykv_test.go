package emptykv

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/goleak"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	skein "github.com/skeindb/skein/client"
	"github.com/skeindb/skein/internal/ports"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func freeAddr(t *testing.T) string {
	t.Helper()
	p, err := ports.Unused(1)
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("127.0.0.1:%d", p[0])
}

// TestRun: puts and gets are answered, gets with a value of the requested size. The
// pages are served, and the end of the context ends the server.
func TestRun(t *testing.T) {
	cfg := Config{Listen: freeAddr(t), Web: freeAddr(t), ValueBytes: 256}
	if err := cfg.Validate(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- Run(ctx, cfg) }()
	conn, err := grpc.NewClient(cfg.Listen, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.WaitForReady(true)))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ask, stop := context.WithTimeout(t.Context(), 30*time.Second)
	defer stop()
	kv := etcdserverpb.NewKVClient(conn)
	if r, err := kv.Put(ask, &etcdserverpb.PutRequest{Key: []byte("k")}); err != nil || r.Header.Revision == 0 {
		t.Errorf("put: %v, %v", r, err)
	}
	if r, err := kv.Txn(ask, &etcdserverpb.TxnRequest{}); err != nil || !r.Succeeded {
		t.Errorf("txn: %v, %v", r, err)
	}
	r, err := kv.Range(ask, &etcdserverpb.RangeRequest{Key: []byte("k")})
	if err != nil || len(r.Kvs) != 1 || string(r.Kvs[0].Key) != "k" || len(r.Kvs[0].Value) != 256 {
		t.Errorf("get: %v, %v", r, err)
	}
	if s, err := etcdserverpb.NewMaintenanceClient(conn).Status(ask, &etcdserverpb.StatusRequest{}); err != nil || s.Version != "empty" {
		t.Errorf("status: %v, %v", s, err)
	}
	pipe, err := skein.Open(ask, skein.Config{Etcd: clientv3.Config{Endpoints: []string{cfg.Listen}, Logger: zap.NewNop()}})
	if err != nil {
		t.Fatal(err)
	}
	defer pipe.Close()
	if r, err := pipe.Get(ask, "k"); err != nil || len(r.GetKvs()) != 1 {
		t.Errorf("get by the pipe: %v, %v", r, err)
	}
	if _, err := pipe.Delete(ask, "k"); status.Code(err) != codes.Unimplemented {
		t.Errorf("delete by the pipe: %v", err)
	}
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	for path, want := range map[string]string{"/metrics": "process_cpu_seconds_total", "/health": `"true"`} {
		answer, err := client.Get("http://" + cfg.Web + path)
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(answer.Body)
		answer.Body.Close()
		if err != nil || !strings.Contains(string(text), want) {
			t.Errorf("%s: %v\n%s", path, err, text)
		}
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// TestRefusals: invalid settings and a port in use are refused.
func TestRefusals(t *testing.T) {
	for _, c := range []struct {
		cfg  Config
		want string
	}{
		{Config{Web: "w"}, "listen and web"},
		{Config{Listen: "l"}, "listen and web"},
		{Config{Listen: "l", Web: "w", ValueBytes: -1}, "value-size"},
		{Config{Listen: "l", Web: "w", ValueBytes: 4 << 20}, "value-size"},
	} {
		if err := c.cfg.Validate(); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: %v, want %q", c.cfg, err, c.want)
		}
	}
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	for _, cfg := range []Config{
		{Listen: taken.Addr().String(), Web: freeAddr(t)},
		{Listen: freeAddr(t), Web: taken.Addr().String()},
	} {
		if err := Run(t.Context(), cfg); err == nil || !strings.Contains(err.Error(), "in use") {
			t.Errorf("%+v: %v", cfg, err)
		}
	}
}
