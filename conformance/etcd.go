package conformance

import (
	"context"
	"fmt"
	"math"
	"net/url"
	"path/filepath"
	"time"

	"go.etcd.io/etcd/server/v3/embed"
	"go.etcd.io/etcd/server/v3/etcdserver"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/skeindb/skein/conformance/cluster"
	"github.com/skeindb/skein/internal/ports"
)

// store is one of the two stores under comparison.
type store struct {
	name string
	// conns has one connection per gateway.
	conns []*grpc.ClientConn
	stop  func() error
	// etcd is the server in this process, nil for Skein.
	etcd *etcdserver.EtcdServer
}

// stopTimeout bounds the stop of a store, so that a test ends in any case.
const stopTimeout = time.Minute

// close ends the connections and stops the store.
func (s *store) close() error {
	for _, c := range s.conns {
		forget(hostOf(c))
		c.Close()
	}
	ctx, cancel := context.WithTimeout(context.Background(), stopTimeout)
	defer cancel()
	stopped := make(chan error, 1)
	go func() { stopped <- s.stop() }()
	select {
	case err := <-stopped:
		return err
	case <-ctx.Done():
		return fmt.Errorf("it still waits for its clients after %s", stopTimeout)
	}
}

// dial opens a connection that retries nothing and bounds no message, so that the
// comparison sees the server's answers.
func dial(target string) (*grpc.ClientConn, error) {
	return grpc.NewClient("passthrough:///"+target, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDisableRetry(),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(math.MaxInt32), grpc.MaxCallSendMsgSize(math.MaxInt32), grpc.WaitForReady(true)))
}

// etcdToken gives the member an id whose bit 15 is set. etcd makes the ids of its
// proposals from these bits. A proposal's size, which etcd compares with
// max-request-bytes, depends on the length of the id: ten bytes with that bit, as for
// half of all members.
const etcdToken = "conformance-1"

// Stores begin with simple tokens unless a test has others. Hashes of passwords are as cheap as they can be.
const (
	simpleTokens = "simple"
	bcryptCost   = 4
)

// lastWords logs the reason that ends this process; otherwise the test would end
// without a message.
func lastWords() *zap.Logger {
	cfg := zap.NewDevelopmentConfig()
	cfg.Level.SetLevel(zap.DPanicLevel)
	return zap.Must(cfg.Build())
}

// startEtcd starts an etcd of one member in dir, with etcd's defaults. It does not sync
// its files: nobody reads them again.
func startEtcd(ctx context.Context, dir, tokens string) (*store, error) {
	anyPort := []url.URL{{Scheme: "http", Host: "127.0.0.1:0"}}
	cfg := embed.NewConfig()
	cfg.Dir = filepath.Join(dir, "etcd")
	cfg.ZapLoggerBuilder = embed.NewZapLoggerBuilder(lastWords())
	port, err := ports.Unused(1) // its own gateway dials this address
	if err != nil {
		return nil, fmt.Errorf("etcd: %w", err)
	}
	client := []url.URL{{Scheme: "http", Host: fmt.Sprint("127.0.0.1:", port[0])}}
	cfg.ListenClientUrls, cfg.AdvertiseClientUrls = client, client
	cfg.ListenPeerUrls, cfg.AdvertisePeerUrls = anyPort, anyPort
	cfg.InitialClusterToken = etcdToken
	cfg.InitialCluster = cfg.InitialClusterFromName(cfg.Name)
	cfg.UnsafeNoFsync = true
	cfg.AuthToken, cfg.BcryptCost = tokens, bcryptCost
	cfg.ElectionMs = uint(cluster.ElectionTimeout.Milliseconds()) // the shortest TTL of a lease depends on it
	e, err := embed.StartEtcd(cfg)
	if err != nil {
		return nil, fmt.Errorf("start etcd: %w", err)
	}
	stop := func() error { e.Close(); return nil }
	select {
	case <-e.Server.ReadyNotify():
	case err := <-e.Err():
		e.Close()
		return nil, fmt.Errorf("etcd: %w", err)
	case <-ctx.Done():
		e.Close()
		return nil, fmt.Errorf("etcd did not become ready: %w", ctx.Err())
	}
	if id := uint64(e.Server.MemberID()); id&(1<<15) == 0 {
		e.Close()
		return nil, fmt.Errorf("etcd's member id %x has bit 15 clear: choose another etcdToken", id)
	}
	conn, err := dial(e.Clients[0].Addr().String())
	if err != nil {
		e.Close()
		return nil, fmt.Errorf("etcd: %w", err)
	}
	return &store{name: "etcd", conns: []*grpc.ClientConn{conn}, stop: stop, etcd: e.Server}, nil
}
