package etcdapi

import (
	"context"
	"crypto/tls"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/auth"
	"github.com/skeindb/skein/kverror"
)

// consolePath is where the console is served.
const consolePath = "/console/"

// Services are all unary methods of this server, called within the process in the name of whoever sent an HTTP
// request: by its address, token and certificate. Every call passes what a call by gRPC does, so it is checked, counted,
// logged and audited alike. The contexts of calls come from that request.
type Services struct {
	s *Server
	// methods are by their full names. New fills it, and nothing changes it.
	methods map[string]within

	mu    sync.Mutex
	ended bool           // no call begins any more; guarded by mu
	calls sync.WaitGroup // those under way; mu guards Add, so that none comes after Wait has begun
}

// within is a method, and what it is called on.
type within struct {
	desc grpc.MethodDesc
	impl any
}

// RegisterService implements grpc.ServiceRegistrar: what is registered here is registered with gRPC too.
func (c *Services) RegisterService(desc *grpc.ServiceDesc, impl any) {
	for _, m := range desc.Methods {
		c.methods["/"+desc.ServiceName+"/"+m.MethodName] = within{m, impl}
	}
	c.s.grpc.RegisterService(desc, impl)
}

// enter begins a call, which ends by c.calls.Done. It returns false once the server has stopped.
func (c *Services) enter() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.ended {
		c.calls.Add(1)
	}
	return !c.ended
}

// close lets no call begin any more, and returns when those under way have ended. HTTP servers do not wait for their
// handlers, and some calls outlive the request that they come from.
func (c *Services) close() {
	c.mu.Lock()
	c.ended = true
	c.mu.Unlock()
	c.calls.Wait()
}

// Invoke implements grpc.ClientConnInterface. The context of a call ends with the server too.
func (c *Services) Invoke(ctx context.Context, method string, args, reply any, _ ...grpc.CallOption) error {
	m, ok := c.methods[method]
	if !ok {
		return status.Errorf(codes.Unimplemented, "this node has no method %s", method)
	}
	if !c.enter() {
		return status.Error(codes.Unavailable, "the node has stopped")
	}
	defer c.calls.Done()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	forget := context.AfterFunc(c.s.life, cancel)
	defer forget()
	sent, err := proto.Marshal(args.(proto.Message))
	if err != nil {
		return status.Errorf(codes.InvalidArgument, "%s: %v", method, err)
	}
	// Handlers may keep parts of their requests, so each gets its own.
	decode := func(into any) error { return proto.Unmarshal(sent, into.(proto.Message)) }
	answer, err := m.desc.Handler(m.impl, ctx, decode, c.s.unary)
	if err != nil {
		return err
	}
	// Some answers are no messages before they are encoded, and hold memory until then.
	encoded, err := c.s.codec.Marshal(answer)
	if err != nil {
		return status.Errorf(codes.Internal, "%s: %v", method, err)
	}
	defer encoded.Free()
	return proto.Unmarshal(encoded.Materialize(), reply.(proto.Message))
}

// NewStream implements grpc.ClientConnInterface. There are no streams.
func (c *Services) NewStream(_ context.Context, _ *grpc.StreamDesc, method string, _ ...grpc.CallOption) (grpc.ClientStream, error) {
	return nil, status.Errorf(codes.Unimplemented, "%s: streams are not served within the process", method)
}

// Root returns an error where the sender of the request may not see the cluster: users are checked, and this is not root.
func (c *Services) Root(ctx context.Context) error {
	if _, err := c.s.allowed(ctx, (*auth.Caller).Root); err != nil {
		return kverror.GRPC(err)
	}
	return nil
}

// Known says by what this node knows whether users are checked, and returns an error as Root does. It asks no other node,
// so it answers without a quorum: it is for what a page shows of itself, and guards nothing. A node that has not heard yet
// who may do what waits for that as long as ctx lasts.
func (c *Services) Known(ctx context.Context) (checked bool, err error) {
	caller, err := c.s.check(ctx, (*auth.Caller).Root)
	if err != nil {
		return true, kverror.GRPC(err)
	}
	return !caller.Off(), nil
}

// ownName says whether a host's name is surely this node's: an address, localhost, one that the node was given as its own,
// or one of --host-whitelist. Under any other name a page of somebody else may have come here (DNS rebinding). It would
// be of the console's own origin then, and could send commands from the reader's machine.
func (s *Server) ownName(host string) bool {
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	host = strings.ToLower(strings.Trim(host, "[]"))
	if _, err := netip.ParseAddr(host); err == nil || host == "localhost" {
		return true
	}
	is := func(name string) bool { return host != "" && strings.EqualFold(name, host) }
	return slices.ContainsFunc(s.opts.HostWhitelist, is) || slices.ContainsFunc(s.opts.ConsoleHosts, is)
}

// peerOf is whom the request comes from, as gRPC would say it. Without an address it is nobody who is here.
func peerOf(r *http.Request, shown *tls.ConnectionState) *peer.Peer {
	p := &peer.Peer{Addr: queueAddr{}}
	if a, err := netip.ParseAddrPort(r.RemoteAddr); err == nil {
		p.Addr = net.TCPAddrFromAddrPort(a)
	}
	if shown != nil {
		p.AuthInfo = credentials.TLSInfo{State: *shown, CommonAuthInfo: credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity}}
	}
	return p
}
