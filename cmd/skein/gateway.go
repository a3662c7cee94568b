package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"slices"
	"strconv"
	"syscall"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
	"github.com/spf13/cobra"
	"go.etcd.io/etcd/client/pkg/v3/logutil"
	"go.etcd.io/etcd/client/pkg/v3/srv"
	"go.etcd.io/etcd/client/pkg/v3/transport"
	"go.etcd.io/etcd/server/v3/proxy/tcpproxy"
	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
)

// tcpGateway has etcd's flags of etcd gateway start.
type tcpGateway struct {
	listen, domain, service, authority string
	insecureDiscovery                  bool
	endpoints                          []string
	retryDelay                         time.Duration
}

// newGateway is skein gateway.
func newGateway() *cobra.Command {
	var g tcpGateway
	c := &cobra.Command{Use: "gateway", Short: "Forward TCP connections of clients to a cluster", Args: cobra.NoArgs, RunE: needsCommand}
	start := &cobra.Command{
		Use: "start", Short: "Start the gateway", Args: cobra.NoArgs,
		Long: `Listen on one address, and forward each connection to one node of the cluster, by turns. A node that does not
answer is left out for the retry delay. The gateway is etcd's: it looks into nothing, so TLS is between client and node.`,
		Example: "  skein gateway start --listen-addr 127.0.0.1:23790 --endpoints 10.0.0.1:2379,10.0.0.2:2379,10.0.0.3:2379",
		RunE: failing(func(c *cobra.Command, _ []string) error {
			log, err := logutil.CreateDefaultZapLogger(zap.InfoLevel)
			if err != nil {
				return err
			}
			return g.run(c.Context(), log)
		}),
	}
	f := start.Flags()
	f.StringVar(&g.listen, "listen-addr", "127.0.0.1:23790", "the address to listen on")
	f.StringVar(&g.domain, "discovery-srv", "", "a domain whose SRV records name the nodes")
	f.StringVar(&g.service, "discovery-srv-name", "", "a suffix of the service's name in these records")
	f.BoolVar(&g.insecureDiscovery, "insecure-discovery", false, "take SRV records whose nodes show no certificate for the domain")
	f.StringVar(&g.authority, "trusted-ca-file", "", "the certificates of authorities by which nodes from SRV records are checked")
	f.StringSliceVar(&g.endpoints, "endpoints", []string{"127.0.0.1:2379"}, "the nodes, unless SRV records name them")
	f.DurationVar(&g.retryDelay, "retry-delay", time.Minute, "for how long a node that does not answer is left out")
	c.AddCommand(start)
	return c
}

// run forwards until ctx ends. Connections last as long as the process.
func (g *tcpGateway) run(ctx context.Context, log *zap.Logger) error {
	nodes, err := g.discovered(log)
	if err != nil {
		return err
	}
	if len(nodes) == 0 {
		if nodes, err = given(g.endpoints); err != nil {
			return err
		}
	}
	if err := g.refuseLoop(ctx, nodes); err != nil {
		return err
	}
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", g.listen)
	if err != nil {
		return fmt.Errorf("--listen-addr: %w", err)
	}
	proxy := &tcpproxy.TCPProxy{Logger: log, Listener: patient{l, ctx, log}, Endpoints: nodes, MonitorInterval: g.retryDelay}
	ended := make(chan error, 1)
	go func() { ended <- proxy.Run() }()
	if _, err := daemon.SdNotify(false, daemon.SdNotifyReady); err != nil {
		log.Warn("the service manager cannot be told that the gateway serves", zap.Error(err))
	}
	select {
	case err = <-ended:
	case <-ctx.Done():
		l.Close()
		log.Debug("the proxy has stopped", zap.Error(<-ended)) // Stop must not come before Run has begun
	}
	proxy.Stop()
	return err
}

// discovered returns the nodes that SRV records name, none without a domain.
func (g *tcpGateway) discovered(log *zap.Logger) ([]*net.SRV, error) {
	if g.domain == "" {
		return nil, nil
	}
	found, err := srv.GetClient("etcd-client", g.domain, g.service)
	if err != nil {
		return nil, fmt.Errorf("--discovery-srv: %w", err)
	}
	good := found.Endpoints
	if !g.insecureDiscovery {
		good, err = transport.ValidateSecureEndpoints(transport.TLSInfo{TrustedCAFile: g.authority, ServerName: g.domain}, found.Endpoints)
		if err != nil {
			log.Warn("some nodes show no certificate for the domain, and are left out", zap.String("domain", g.domain), zap.Error(err))
		}
	}
	var nodes []*net.SRV
	for i, e := range found.Endpoints {
		if slices.Contains(good, e) {
			nodes = append(nodes, found.SRVs[i])
		}
	}
	if len(nodes) == 0 {
		return nil, fmt.Errorf("--discovery-srv: no node of %s shows a certificate for it: give --trusted-ca-file, or --insecure-discovery", g.domain)
	}
	return nodes, nil
}

// given reads the nodes of --endpoints: HOST:PORT, or a URL of which these count.
func given(endpoints []string) ([]*net.SRV, error) {
	var nodes []*net.SRV
	for _, e := range endpoints {
		at := e
		if u, err := url.Parse(e); err == nil && u.Host != "" {
			at = u.Host
		}
		host, port, err := net.SplitHostPort(at)
		if err != nil {
			return nil, fmt.Errorf("--endpoints: %q is not HOST:PORT: %w", e, err)
		}
		n, err := strconv.ParseUint(port, 10, 16)
		if err != nil || n == 0 {
			return nil, fmt.Errorf("--endpoints: %q has no port from 1 to 65535", e)
		}
		nodes = append(nodes, &net.SRV{Target: host, Port: uint16(n)})
	}
	if len(nodes) == 0 {
		return nil, errors.New("--endpoints must not be empty")
	}
	return nodes, nil
}

// patient is a listener that waits where a connection cannot be taken for want of files, or was given up by its client.
// The proxy would end, and with it all connections.
type patient struct {
	net.Listener
	ctx context.Context //nolint:containedctx // a listener is asked without one
	log *zap.Logger
}

// acceptPause is the pause before the next connection is taken after one could not be.
const acceptPause = 100 * time.Millisecond

// Accept implements net.Listener.
func (p patient) Accept() (net.Conn, error) {
	for {
		c, err := p.Listener.Accept()
		if !errors.Is(err, syscall.EMFILE) && !errors.Is(err, syscall.ENFILE) && !errors.Is(err, syscall.ECONNABORTED) {
			return c, err
		}
		p.log.Warn("a connection cannot be taken; raise the limit of open files if this goes on: each connection takes two", zap.Error(err))
		if err := clock.Sleep(p.ctx, clock.System(), acceptPause); err != nil {
			return nil, err
		}
	}
}

// addressesOf are the addresses of a host, and all those of this machine for none.
func addressesOf(ctx context.Context, host string) ([]string, error) {
	if ip := net.ParseIP(host); host != "" && (ip == nil || !ip.IsUnspecified()) {
		return net.DefaultResolver.LookupHost(ctx, host)
	}
	all, err := net.InterfaceAddrs()
	if err != nil {
		return nil, err
	}
	own := []string{"0.0.0.0", "::"}
	for _, a := range all {
		if n, ok := a.(*net.IPNet); ok {
			own = append(own, n.IP.String())
		}
	}
	return own, nil
}

// refuseLoop refuses a node that is the gateway itself: a connection would be forwarded for ever.
func (g *tcpGateway) refuseLoop(ctx context.Context, nodes []*net.SRV) error {
	host, port, err := net.SplitHostPort(g.listen)
	if err != nil {
		return fmt.Errorf("--listen-addr: %q is not HOST:PORT: %w", g.listen, err)
	}
	own, err := addressesOf(ctx, host)
	if err != nil {
		return fmt.Errorf("--listen-addr: %w", err)
	}
	for _, n := range nodes {
		theirs, err := net.DefaultResolver.LookupHost(ctx, n.Target)
		if err != nil {
			return fmt.Errorf("--endpoints: %w", err)
		}
		for _, a := range theirs {
			if (slices.Contains(own, a) || slices.Contains(own, "::") && net.ParseIP(a).IsLoopback()) && strconv.Itoa(int(n.Port)) == port {
				return fmt.Errorf("--endpoints: %s:%d leads to --listen-addr %s, the gateway itself", n.Target, n.Port, g.listen)
			}
		}
	}
	return nil
}
