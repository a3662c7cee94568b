package node_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/skeindb/skein/certs"
)

// authority makes certificates for a test.
type authority struct {
	t      *testing.T
	dir    string
	cert   *x509.Certificate
	key    *ecdsa.PrivateKey
	serial int64
}

func newAuthority(t *testing.T, name string) *authority {
	t.Helper()
	a := &authority{t: t, dir: t.TempDir()}
	a.key = newKey(t)
	a.cert = &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageCertSign,
	}
	a.write("ca.pem", "CERTIFICATE", a.sign(a.cert, &a.key.PublicKey))
	return a
}

func newKey(t *testing.T) *ecdsa.PrivateKey {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func (a *authority) sign(c *x509.Certificate, key *ecdsa.PublicKey) []byte {
	a.t.Helper()
	der, err := x509.CreateCertificate(rand.Reader, c, a.cert, key, a.key)
	if err != nil {
		a.t.Fatal(err)
	}
	return der
}

func (a *authority) write(name, kind string, der []byte) string {
	a.t.Helper()
	path := filepath.Join(a.dir, name)
	if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
		a.t.Fatal(err)
	}
	return path
}

// issue writes a certificate for this machine and its key.
func (a *authority) issue(name string) (certFile, keyFile string) {
	a.t.Helper()
	a.serial++
	key := newKey(a.t)
	der := a.sign(&x509.Certificate{
		SerialNumber: big.NewInt(100 + a.serial), Subject: pkix.Name{CommonName: name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}, &key.PublicKey)
	pkcs, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		a.t.Fatal(err)
	}
	return a.write(name+".pem", "CERTIFICATE", der), a.write(name+"-key.pem", "PRIVATE KEY", pkcs)
}

func (a *authority) caFile() string { return filepath.Join(a.dir, "ca.pem") }

// With https:// URLs nodes and clients are who their certificates say: a cluster
// forms, a client without a certificate is refused, and so is a node whose
// certificate comes from somewhere else.
func TestClusterWithCertificates(t *testing.T) {
	ca, stranger := newAuthority(t, "ours"), newAuthority(t, "theirs")
	c := newProcesses(t)
	for _, p := range c.nodes {
		cert, key := ca.issue(p.name)
		p.useTLS(cert, key, ca.caFile())
	}
	// The third node's peer certificate is of another authority.
	honest := c.nodes[2].args
	cert, key := stranger.issue("n3")
	c.nodes[2].args = append(strings.Split(strings.Join(honest, "\n"), "\n"), "--peer-cert-file", cert, "--peer-key-file", key)
	c.startAll()

	clientCert, clientKey := ca.issue("client")
	good := ca.clientTLS(clientCert, clientKey)
	bare := &tls.Config{RootCAs: good.RootCAs, MinVersion: tls.VersionTLS12}

	putUntil(t, c.nodes[0], good, 30*time.Second)
	if err := putOnce(t, c.nodes[0], bare, 3*time.Second); err == nil {
		t.Error("a client without a certificate was served")
	}
	if err := putOnce(t, c.nodes[2], good, 3*time.Second); err == nil {
		t.Error("a node with a stranger's certificate is part of the cluster")
	}
	c.nodes[2].kill()
	c.nodes[2].args = honest
	c.start(c.nodes[2])
	putUntil(t, c.nodes[2], good, 30*time.Second)
}

// With the certificates of skein cert each node is the one that its role names. A client's certificate
// of the same authority makes nobody a node.
func TestClusterWithRoles(t *testing.T) {
	dir := t.TempDir()
	ca := certs.At(filepath.Join(dir, "ca"), time.Now)
	if _, err := ca.CreateCA(10, false); err != nil {
		t.Fatal(err)
	}
	at := func(parts ...string) string { return filepath.Join(append([]string{dir}, parts...)...) }
	c := newProcesses(t)
	for _, p := range c.nodes {
		if _, err := ca.CreateNode(p.name, []string{"127.0.0.1"}, certs.Issue{Days: 5, Out: at(p.name)}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := ca.CreateClient("root", certs.Issue{Days: 5}); err != nil {
		t.Fatal(err)
	}
	clientCert, clientKey := at("ca", "client.root.crt"), at("ca", "client.root.key")
	// The third node shows the others a client's certificate.
	var honest []string
	for i, p := range c.nodes {
		plain := slices.Clone(p.args)
		p.useTLS(at(p.name, certs.NodeFile), at(p.name, certs.NodeKey), at(p.name, certs.CAFile))
		honest = append(p.args[:len(plain):len(plain)], "--certs-dir", at(p.name))
		if i < 2 {
			p.args = honest
		} else {
			p.args = append(p.args, "--peer-cert-file", clientCert, "--peer-key-file", clientKey)
		}
	}
	c.startAll()
	good := (&authority{t: t, dir: at("ca")}).clientTLSOf(certs.CAFile, clientCert, clientKey)
	putUntil(t, c.nodes[0], good, 30*time.Second)
	if err := putOnce(t, c.nodes[2], good, 3*time.Second); err == nil {
		t.Error("a node with a client's certificate is part of the cluster")
	}
	c.nodes[2].kill()
	c.nodes[2].args = honest
	c.start(c.nodes[2])
	putUntil(t, c.nodes[2], good, 30*time.Second)
}

// Trap 95 (GHSA-3wh4-j44w-pg92): a client whose certificate is revoked is refused without a restart, by gRPC, by HTTP on the
// same port, and on the port of metrics. Another client is served.
func TestRevokedWhileTheNodeRuns(t *testing.T) {
	dir := t.TempDir()
	ca := certs.At(filepath.Join(dir, "ca"), time.Now)
	if _, err := ca.CreateCA(10, false); err != nil {
		t.Fatal(err)
	}
	at := func(parts ...string) string { return filepath.Join(append([]string{dir}, parts...)...) }
	c := newProcessesOf(t, 1)
	p := c.nodes[0]
	if _, err := ca.CreateNode(p.name, []string{"127.0.0.1"}, certs.Issue{Days: 5, Out: at(p.name)}); err != nil {
		t.Fatal(err)
	}
	clients := map[string]*tls.Config{}
	for _, name := range []string{"good", "bad"} {
		if _, err := ca.CreateClient(name, certs.Issue{Days: 5}); err != nil {
			t.Fatal(err)
		}
		clients[name] = (&authority{t: t, dir: at("ca")}).clientTLSOf(certs.CAFile, at("ca", "client."+name+".crt"), at("ca", "client."+name+".key"))
	}
	metrics := fmt.Sprintf("https://127.0.0.1:%d", unusedPorts(t, 1)[0])
	plain := slices.Clone(p.args)
	p.useTLS("", "", "")
	p.args = append(p.args[:len(plain):len(plain)], "--certs-dir", at(p.name), "--listen-metrics-urls", metrics)
	c.startAll()
	putUntil(t, p, clients["good"], 30*time.Second)
	ask := map[string]func(*tls.Config) error{
		"gRPC":    func(cfg *tls.Config) error { return putOnce(t, p, cfg, 3*time.Second) },
		"HTTP":    func(cfg *tls.Config) error { return getOnce(p.client+"/version", cfg) },
		"metrics": func(cfg *tls.Config) error { return getOnce(metrics+"/metrics", cfg) },
	}
	for what, f := range ask {
		if err := f(clients["bad"]); err != nil {
			t.Errorf("%s before the revocation: %v", what, err)
		}
	}
	if _, _, err := ca.Revoke(at("ca", "client.bad.crt")); err != nil {
		t.Fatal(err)
	}
	list, err := os.ReadFile(at("ca", certs.CRLFile))
	if err == nil {
		err = os.WriteFile(at(p.name, certs.CRLFile), list, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	for what, f := range ask {
		if err := f(clients["bad"]); err == nil {
			t.Errorf("%s: a revoked client is served", what)
		}
		if err := f(clients["good"]); err != nil {
			t.Errorf("%s: the other client: %v", what, err)
		}
	}
}

// getOnce asks over a connection of its own.
func getOnce(url string, cfg *tls.Config) error {
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: cfg, DisableKeepAlives: true}, Timeout: 10 * time.Second}
	resp, err := client.Get(url)
	if err != nil {
		return err
	}
	return resp.Body.Close()
}

// clientTLS are the settings of a client with a certificate.
func (a *authority) clientTLS(cert, key string) *tls.Config {
	a.t.Helper()
	return a.clientTLSOf("ca.pem", cert, key)
}

func (a *authority) clientTLSOf(ca, cert, key string) *tls.Config {
	a.t.Helper()
	pair, err := tls.LoadX509KeyPair(cert, key)
	if err != nil {
		a.t.Fatal(err)
	}
	roots := x509.NewCertPool()
	pemCA, err := os.ReadFile(filepath.Join(a.dir, ca))
	if err != nil {
		a.t.Fatal(err)
	}
	roots.AppendCertsFromPEM(pemCA)
	return &tls.Config{RootCAs: roots, Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12}
}

// useTLS changes a node's URLs to https and gives it certificates.
func (p *process) useTLS(cert, key, ca string) {
	for i := range p.args {
		p.args[i] = strings.ReplaceAll(p.args[i], "http://", "https://")
	}
	p.client = strings.ReplaceAll(p.client, "http://", "https://")
	p.args = append(p.args, "--cert-file", cert, "--key-file", key, "--trusted-ca-file", ca, "--client-cert-auth",
		"--peer-cert-file", cert, "--peer-key-file", key, "--peer-trusted-ca-file", ca, "--peer-client-cert-auth")
}

func putOnce(t *testing.T, p *process, cfg *tls.Config, d time.Duration) error {
	t.Helper()
	cl, err := clientv3.New(clientv3.Config{Endpoints: []string{p.client}, TLS: cfg, DialTimeout: d, Logger: zap.NewNop()})
	if err != nil {
		return err
	}
	defer cl.Close()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	defer cancel()
	_, err = cl.Put(ctx, "tls", "yes")
	return err
}

func putUntil(t *testing.T, p *process, cfg *tls.Config, limit time.Duration) {
	t.Helper()
	deadline := time.Now().Add(limit)
	for {
		err := putOnce(t, p, cfg, 5*time.Second)
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: %v", p.name, err)
		}
		time.Sleep(100 * time.Millisecond)
	}
}
