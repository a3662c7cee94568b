package etcdapi

import (
	"context"
	"fmt"
	"math"
	"net"
	"net/http"
	"strings"
	"sync/atomic"

	"github.com/grpc-ecosystem/grpc-gateway/v2/runtime"
	etcdservergw "go.etcd.io/etcd/api/v3/etcdserverpb/gw"
	v3electiongw "go.etcd.io/etcd/server/v3/etcdserver/api/v3election/v3electionpb/gw"
	v3lockgw "go.etcd.io/etcd/server/v3/etcdserver/api/v3lock/v3lockpb/gw"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/encoding/protojson"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/budget"
)

const (
	// gatewayWindowBytes is the buffer of the connection between gateway and services.
	gatewayWindowBytes = 1 << 20
	// gatewayBodyFactor is how much larger than the message a body may be; base64 takes a third
	// more.
	gatewayBodyFactor = 2
)

// gateway is etcd's JSON gateway: etcd's own translation of HTTP requests under /v3/ into calls of
// all services. The calls use a connection within the process. So they pass the same checks, bounds
// and counters as all others. A missing service answers Unimplemented, as in gRPC.
type gateway struct {
	listener *bufconn.Listener
	conn     *grpc.ClientConn
	mux      *runtime.ServeMux
	// maxBodyBytes bounds a request's body, or each message of a stream.
	maxBodyBytes int64
	// large says that a larger body is being read.
	large atomic.Bool
	clock clock.Clock
	// answers counts the bytes of answers that clients have not taken yet.
	answers *budget.Bytes
	sockets *sockets
}

// newGateway makes the gateway; its listener has to be served.
func newGateway(o *Options) (*gateway, error) {
	g := &gateway{
		clock:        o.Clock,
		answers:      o.Answers,
		listener:     bufconn.Listen(gatewayWindowBytes),
		maxBodyBytes: gatewayBodyFactor * int64(o.MaxRequestBytes+grpcOverheadBytes),
		mux: runtime.NewServeMux(runtime.WithMarshalerOption(runtime.MIMEWildcard, &runtime.HTTPBodyMarshaler{
			Marshaler: gatewayJSON{&runtime.JSONPb{
				MarshalOptions:   protojson.MarshalOptions{UseProtoNames: true},
				UnmarshalOptions: protojson.UnmarshalOptions{DiscardUnknown: true},
			}},
		})),
	}
	conn, err := grpc.NewClient("passthrough:///gateway",
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return g.listener.DialContext(ctx) }),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(math.MaxInt32), grpc.MaxCallSendMsgSize(math.MaxInt32)))
	if err != nil {
		return nil, fmt.Errorf("JSON gateway: %w", err)
	}
	g.conn = conn
	g.sockets = newSockets(g.mux, o, g.maxBodyBytes)
	for _, register := range []func(context.Context, *runtime.ServeMux, *grpc.ClientConn) error{
		etcdservergw.RegisterKVHandler, etcdservergw.RegisterWatchHandler, etcdservergw.RegisterLeaseHandler,
		etcdservergw.RegisterClusterHandler, etcdservergw.RegisterMaintenanceHandler, etcdservergw.RegisterAuthHandler,
		v3lockgw.RegisterLockHandler, v3electiongw.RegisterElectionHandler,
	} {
		if err := register(context.Background(), g.mux, conn); err != nil {
			return nil, fmt.Errorf("JSON gateway: %w", err)
		}
	}
	return g, nil
}

// Conn is a connection to all services within this process: the gateway's, nil without one. Its calls are served
// from Start to Stop.
func (s *Server) Conn() *grpc.ClientConn {
	if s.gateway == nil {
		return nil
	}
	return s.gateway.conn
}

// ServeHTTP implements http.Handler.
func (g *gateway) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if wantsSocket(r) {
		g.sockets.ServeHTTP(w, r)
		return
	}
	if mayGoOn(r.URL.Path) {
		// Otherwise the first answer would discard the unread body. Without full duplex the client
		// hears nothing before it has sent everything.
		_ = http.NewResponseController(w).EnableFullDuplex()
	}
	body := newGatewayBody(w, r, g.maxBodyBytes, &g.large)
	r.Body = body
	g.mux.ServeHTTP(&gatewayWriter{ResponseWriter: w, clock: g.clock, answers: g.answers}, r)
	body.end(g.clock.Wall().Add(sniffTimeout))
}

// close ends the connection and its calls.
func (g *gateway) close(log *zap.Logger) {
	if err := g.conn.Close(); err != nil {
		log.Warn("close the JSON gateway's connection", zap.Error(err))
	}
	g.listener.Close()
}

// today maps the paths of old clients to those of today, as etcd does.
func today(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if rest, old := strings.CutPrefix(r.URL.Path, "/v3beta/"); old {
			r = r.Clone(r.Context())
			r.URL.Path = "/v3/" + rest
		}
		next.ServeHTTP(w, r)
	})
}
