package config

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/skeindb/skein/auth"
	"github.com/skeindb/skein/certs"
	"github.com/skeindb/skein/clock"
)

// Check says what would keep a node from starting with the configuration that [Load] makes of the same arguments. Besides what
// Load refuses it finds certificates and keys of tokens that cannot be used, and founders that do not fit together. It also
// finds directories, an audit log and outputs of the log that this user cannot make or write. It does not look at what
// is in a directory, changes nothing and opens no port. Errors are joined.
func Check(args, environ []string, wall func() time.Time) (*Config, []Notice, error) {
	c, notices, err := Load(args, environ)
	if err != nil {
		return nil, nil, err
	}
	if len(c.InitialCluster) > 0 {
		_, err = c.Bootstrap()
	}
	err = errors.Join(err, c.checkFiles("client", &c.ClientTLS, wall), c.checkFiles("peer", &c.PeerTLS, wall), c.checkPlaces())
	secrets, terr := c.checkTokens()
	for _, path := range append(secrets, c.ClientTLS.KeyFile, c.ClientTLS.ClientKeyFile, c.PeerTLS.KeyFile, c.PeerTLS.ClientKeyFile) {
		open := Notice{"a key is open to other users", []zap.Field{zap.String("file", path), zap.String("next", "chmod 600 "+path)}}
		known := slices.ContainsFunc(notices, func(n Notice) bool { return n.Message == open.Message && n.Fields[0].String == path })
		if info, err := os.Stat(path); err == nil && info.Mode()&0o077 != 0 && !known {
			notices = append(notices, open)
		}
	}
	return c, notices, errors.Join(err, terr)
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

// checkTokens reads the keys of tokens as a start does, and returns the files that nobody else should read.
func (c *Config) checkTokens() (secrets []string, err error) {
	o, err := auth.ParseOptions(c.AuthToken)
	if err == nil {
		secrets = o.Secrets()
		_, err = o.Open(clock.System(), rand.Reader, c.AuthTokenTTL)
	}
	if err != nil {
		return secrets, fmt.Errorf("--auth-token: %w", err)
	}
	return secrets, nil
}

// checkPlaces says what the node cannot write to.
func (c *Config) checkPlaces() error {
	all := []error{checkDir("data-dir", c.DataDir)}
	if c.WALDir != filepath.Join(c.DataDir, "wal") { // else it is in the data directory
		all = append(all, checkDir("wal-dir", c.WALDir))
	}
	if c.AuditLog != "" {
		all = append(all, checkFile("audit-log", c.AuditLog, unix.R_OK|unix.W_OK))
	}
	for _, o := range c.Log.Outputs {
		all = append(all, c.Log.checkOutput(o))
	}
	return errors.Join(all...)
}

// checkDir says why a directory cannot be used, or made with those above it, as a node does that.
func checkDir(flag, dir string) error {
	at, err := filepath.Abs(dir)
	for err == nil {
		var info fs.FileInfo
		info, err = os.Stat(at)
		switch {
		case err == nil && !info.IsDir():
			return fmt.Errorf("--%s %s: %s is no directory", flag, dir, at)
		case err == nil:
			if err = unix.Access(at, unix.R_OK|unix.W_OK|unix.X_OK); err != nil {
				return fmt.Errorf("--%s %s: this user cannot write in %s: %w", flag, dir, at, err)
			}
			return nil
		case errors.Is(err, fs.ErrNotExist) && filepath.Dir(at) != at:
			at, err = filepath.Dir(at), nil
		}
	}
	return fmt.Errorf("--%s %s: %w", flag, dir, err)
}

// checkFile says why a file cannot be opened with these rights, or made in its directory, which has to be there.
func checkFile(flag, path string, rights uint32) error {
	info, err := os.Stat(path)
	switch dir := filepath.Dir(path); {
	case err == nil && info.IsDir():
		return fmt.Errorf("--%s %s: it is a directory: give a file", flag, path)
	case err == nil:
		if err = unix.Access(path, rights); err != nil {
			return fmt.Errorf("--%s %s: this user cannot open it: %w", flag, path, err)
		}
		return nil
	case errors.Is(err, fs.ErrNotExist):
		if err = unix.Access(dir, unix.W_OK|unix.X_OK); err != nil {
			return fmt.Errorf("--%s %s: it cannot be made in %s: %w", flag, path, dir, err)
		}
		return nil
	}
	return fmt.Errorf("--%s %s: %w", flag, path, err)
}

// checkOutput says why an output of the log cannot be opened.
func (l *Log) checkOutput(output string) error {
	const flag = "log-outputs"
	if output == journalOutput {
		return journalMissing()
	}
	if !isFile(output) {
		return nil
	}
	path, err := outputPath(output)
	if err != nil {
		return err
	}
	if _, err := os.Stat(path); l.Rotate && errors.Is(err, fs.ErrNotExist) {
		return checkDir(flag, filepath.Dir(path)) // rotation makes the directory too
	}
	return checkFile(flag, path, unix.W_OK)
}
