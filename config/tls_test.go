package config

import (
	"crypto/tls"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest"
)

func TestAutoTLS(t *testing.T) {
	dir := t.TempDir()
	c, _ := mustLoad(t, []string{
		"--name=n", "--data-dir=" + dir, "--auto-tls", "--peer-auto-tls", "--tls-max-version=TLS1.2",
		"--listen-client-urls=https://127.0.0.1:0", "--advertise-client-urls=https://127.0.0.1:1",
		"--listen-peer-urls=https://127.0.0.1:0", "--initial-advertise-peer-urls=https://127.0.0.1:1",
	})
	side, err := c.ClientSide(time.Now, zaptest.NewLogger(t), nil)
	if err != nil {
		t.Fatal(err)
	}
	server := side.TLS
	if server.MaxVersion != tls.VersionTLS12 || server.ClientAuth != tls.NoClientCert {
		t.Errorf("max version %x, client auth %v", server.MaxVersion, server.ClientAuth)
	}
	if _, err := os.Stat(filepath.Join(dir, "fixtures", "client", "cert.pem")); err != nil {
		t.Error(err)
	}
	if got := c.CertificateFiles(); !slices.Equal(got, []string{filepath.Join(dir, "fixtures", "client", "cert.pem")}) {
		t.Errorf("certificates: %q", got)
	}
}

// The files whose ends are told are those that the node shows: each once, and none where nothing is secure.
func TestCertificateFiles(t *testing.T) {
	files := []string{"--cert-file=/c", "--key-file=/k", "--peer-cert-file=/p", "--peer-key-file=/k", "--peer-client-cert-file=/c", "--peer-client-key-file=/k", "--peer-trusted-ca-file=/ca"}
	secure := []string{
		"--listen-client-urls=https://127.0.0.1:0", "--advertise-client-urls=https://127.0.0.1:1",
		"--listen-peer-urls=https://127.0.0.1:0", "--initial-advertise-peer-urls=https://127.0.0.1:1", "--initial-cluster=default=https://127.0.0.1:1",
	}
	for _, x := range []struct {
		args []string
		want string
	}{{slices.Concat(files, secure), "[/c /p]"}, {slices.Concat(files, secure[:2]), "[/c]"}, {files, "[]"}} {
		c, _ := mustLoad(t, x.args)
		if got := fmt.Sprint(c.CertificateFiles()); got != x.want {
			t.Errorf("%v: %s, want %s", x.args, got, x.want)
		}
	}
}

func TestNoTLS(t *testing.T) {
	c, _ := mustLoad(t, nil)
	side, err := c.ClientSide(time.Now, zap.NewNop(), nil)
	if side.TLS != nil || err != nil {
		t.Errorf("clients: %v, %v", side, err)
	}
}

func TestTLSFilesMissing(t *testing.T) {
	c, _ := mustLoad(t, []string{"--cert-file=/no/cert", "--key-file=/no/key", "--listen-metrics-urls=https://127.0.0.1:0"})
	if _, err := c.ClientSide(time.Now, zap.NewNop(), nil); err == nil || !strings.Contains(err.Error(), "/no/cert") {
		t.Error(err)
	}
}

func TestLogBuild(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	c, _ := mustLoad(t, []string{"--log-outputs=" + path, "--log-level=warn", "--log-format=console"})
	logger, err := c.Log.Build()
	if err != nil {
		t.Fatal(err)
	}
	logger.Info("too low")
	logger.Warn("written", zap.String("node", "n1"))
	_ = logger.Sync()
	b, err := os.ReadFile(path)
	if err != nil || strings.Contains(string(b), "too low") || !strings.Contains(string(b), "written") || strings.HasPrefix(string(b), "{") {
		t.Errorf("%s, %v", b, err)
	}
	c.Log.Outputs = []string{"/no/such/directory/log"}
	if _, err := c.Log.Build(); err == nil {
		t.Error("a log in no directory")
	}
}
