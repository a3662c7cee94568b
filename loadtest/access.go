package loadtest

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"strings"
	"syscall"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
)

// Access is how clients prove who they are, and how they know the servers.
type Access struct {
	// TLS is used for https:// endpoints and metrics URLs; nil for Go's defaults.
	TLS *tls.Config `json:"-"`
	// User is a user of etcd's, Password its password. Without a user no client logs in.
	User     string `json:"user,omitempty"`
	Password string `json:"-"`
}

// connect makes a client of one endpoint. With a user it waits for the login, otherwise for nothing.
func (a *Access) connect(endpoint string, change func(*clientv3.Config)) (*clientv3.Client, error) {
	cfg := a.config(endpoint)
	if change != nil {
		change(&cfg)
	}
	client, err := clientv3.New(cfg)
	if err != nil {
		return nil, a.notConnected(endpoint, err)
	}
	return client, nil
}

// config returns the settings of a client of one endpoint.
func (a *Access) config(endpoint string) clientv3.Config {
	return clientv3.Config{
		Endpoints: []string{endpoint}, TLS: a.tlsFor(endpoint), Username: a.User, Password: a.Password,
		DialTimeout: askTimeout, Logger: zap.NewNop(),
	}
}

// notConnected says that there is no client of an endpoint.
func (a *Access) notConnected(endpoint string, err error) error {
	if a.User != "" {
		return fmt.Errorf("endpoint %s: log in as %s: %w", endpoint, a.User, err)
	}
	return fmt.Errorf("endpoint %s: %w", endpoint, err)
}

// once has the calls of a client tried once.
func once(cfg *clientv3.Config) { cfg.MaxUnaryRetries = 1 }

// tlsFor returns the settings for an endpoint, and nil if it is reached without TLS.
func (a *Access) tlsFor(endpoint string) *tls.Config {
	if !strings.HasPrefix(endpoint, "https://") && (a.TLS == nil || strings.Contains(endpoint, "://")) {
		return nil
	}
	if a.TLS == nil {
		return &tls.Config{MinVersion: tls.VersionTLS12}
	}
	return a.TLS
}

// status asks an endpoint for its status. Before that it looks whether somebody listens there: gRPC tries to connect
// until the time is over, and then says no more than that.
func (a *Access) status(ctx context.Context, endpoint string) (*clientv3.StatusResponse, error) {
	if err := a.reach(ctx, endpoint); err != nil {
		return nil, err
	}
	client, err := a.connect(endpoint, once)
	if err != nil {
		return nil, err
	}
	// Nothing is under way any more, so nobody needs the error.
	defer func() { _ = client.Close() }()
	asking, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	status, err := client.Status(asking, endpoint)
	if err != nil {
		return nil, fmt.Errorf("endpoint %s: somebody listens there, but: %w (does it want https://, --cacert, --cert and --key, or --user?)", endpoint, err)
	}
	return status, nil
}

// reach says what is wrong if nobody listens at an endpoint, or not by TLS as it should.
func (a *Access) reach(ctx context.Context, endpoint string) error {
	scheme, address, found := strings.Cut(endpoint, "://")
	switch {
	case !found:
		address = endpoint
	case strings.HasPrefix(scheme, "unix"):
		return nil // gRPC says what is wrong with a socket
	}
	address, _, _ = strings.Cut(address, "/")
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", address)
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return fmt.Errorf("nobody listens at %s: start the server there, or give the address of its client port", address)
	case err != nil:
		return fmt.Errorf("%s cannot be reached: %w", address, err)
	}
	// It was only to see who listens.
	_ = conn.Close()
	secure := a.tlsFor(endpoint)
	if secure == nil {
		return nil
	}
	secure = secure.Clone()
	secure.NextProtos = []string{"h2"}
	conn, err = (&tls.Dialer{Config: secure}).DialContext(ctx, "tcp", address)
	if err != nil {
		return fmt.Errorf("endpoint %s: somebody listens there, but TLS with it fails: %w", endpoint, err)
	}
	_ = conn.Close()
	return nil
}
