package conformance

import (
	"context"
	"net"
	"net/http"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
)

// TestCloseWithASilentConnection: a store stops although a connection to it has said nothing. A JSON call leaves
// one behind if it ends while its connection is dialled. The embedded etcd waits for the first byte of each connection, also
// when it stops.
func TestCloseWithASilentConnection(t *testing.T) {
	t.Parallel()
	etcd, err := startEtcd(t.Context(), t.TempDir(), simpleTokens)
	if err != nil {
		t.Fatal(err)
	}
	host := hostOf(etcd.conns[0])
	dialled, goOn := make(chan struct{}), make(chan struct{})
	clientOf(host).Transport.(*http.Transport).DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		close(dialled)
		<-goOn
		return new(net.Dialer).DialContext(context.WithoutCancel(ctx), network, addr)
	}
	ctx, cancel := context.WithCancel(t.Context())
	answered := make(chan answer, 1)
	go func() {
		answered <- post(ctx, host, "/v3/kv/range", &pb.RangeRequest{Key: []byte("a")}, &pb.RangeResponse{}, false)
	}()
	<-dialled
	cancel()
	if a := <-answered; a.response != nil {
		t.Fatalf("an answer without a connection: %s", a)
	}
	close(goOn)
	if err := etcd.close(); err != nil {
		t.Error(err)
	}
}
