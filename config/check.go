package config

import (
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/certs"
)

// Check says what would keep a node from starting with the configuration that [Load] makes of the same arguments. Besides what
// Load refuses it finds certificates that cannot be used, and founders that do not fit together. It does not look at keys of
// tokens, the audit log, outputs of the log, or directories. It changes nothing and opens no port. Errors are joined.
func Check(args, environ []string, wall func() time.Time) (*Config, []Notice, error) {
	c, notices, err := Load(args, environ)
	if err != nil {
		return nil, nil, err
	}
	if len(c.InitialCluster) > 0 {
		_, err = c.Bootstrap()
	}
	return c, notices, errors.Join(err, c.checkFiles("client", &c.ClientTLS, wall), c.checkFiles("peer", &c.PeerTLS, wall))
}

// checkFiles reads the certificates of one side as a start does.
func (c *Config) checkFiles(side string, t *TLS, wall func() time.Time) error {
	_, err := certs.NewLive(certs.LiveOptions{
		Files: certs.Files{
			Cert: t.CertFile, Key: t.KeyFile, ClientCert: t.ClientCertFile, ClientKey: t.ClientKeyFile, CA: t.TrustedCAFile, CRL: t.CRLFile,
		},
		AllowedCNs: t.AllowedCNs, AllowedHostnames: t.AllowedHostnames, Wall: wall, Side: side, Log: zap.NewNop(),
	})
	if err != nil {
		return fmt.Errorf("%s TLS: %w", side, err)
	}
	return nil
}
