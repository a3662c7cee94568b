package config

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/url"
	"path/filepath"
	"slices"
	"time"

	"go.etcd.io/etcd/client/pkg/v3/tlsutil"
	"go.etcd.io/etcd/client/pkg/v3/transport"
	"go.uber.org/zap"

	"github.com/skeindb/skein/certs"
)

// TLS names the certificates of one side, the clients' or the peers'. Empty names
// mean none. A wrong name is found when the settings are built, before anything
// listens; files are looked at for each connection, so that certificates can be
// renewed in place.
type TLS struct {
	// CertFile and KeyFile are the server's certificate and key, both or neither.
	CertFile, KeyFile string
	// ClientCertFile and ClientKeyFile are what the node shows as a client. Empty
	// means CertFile and KeyFile.
	ClientCertFile, ClientKeyFile string
	// TrustedCAFile holds the authorities that the other side's certificate must come
	// from. Set, it demands a certificate of every client, as in etcd. The bus does not do
	// without it, unless its URLs are http or its certificates automatic.
	TrustedCAFile string
	// CRLFile is a revocation list.
	CRLFile string
	// ClientCertAuth demands a certificate of every client.
	ClientCertAuth bool
	// Auto makes a self-signed certificate where no certificate is given, for clients
	// under the data directory. It encrypts and proves nothing.
	Auto bool
	// AllowedCNs and AllowedHostnames are the common names, or the host names, of which
	// a client's certificate must bear one. They exclude each other. Empty means any.
	AllowedCNs, AllowedHostnames []string
}

// certsDirSets are the flags that certs-dir stands for.
var certsDirSets = []string{
	"cert-file", "key-file", "client-cert-file", "client-key-file", "trusted-ca-file", "client-crl-file", "auto-tls",
	"peer-cert-file", "peer-key-file", "peer-client-cert-file", "peer-client-key-file", "peer-trusted-ca-file", "peer-crl-file", "peer-auto-tls",
}

// useCertsDir sets what certs-dir stands for, before all other settings are applied. It returns what
// is wrong with those.
func (c *Config) useCertsDir(dir string, settings []given) (wrong []error) {
	in := func(name string) string { return filepath.Join(dir, name) }
	c.CertsDir = dir
	c.ClientTLS = TLS{
		CertFile: in(certs.NodeFile), KeyFile: in(certs.NodeKey), TrustedCAFile: in(certs.CAFile), CRLFile: in(certs.CRLFile), ClientCertAuth: true,
	}
	c.PeerTLS = c.ClientTLS
	for _, urls := range [][]url.URL{c.ListenClientURLs, c.AdvertiseClientURLs, c.ListenPeerURLs, c.AdvertisePeerURLs} {
		for i := range urls {
			urls[i].Scheme = "https"
		}
	}
	for _, g := range settings {
		name, asks := g.flag.Name, g.value.text != "" || g.value.b
		switch {
		case slices.Contains(certsDirSets, name) && asks:
			wrong = append(wrong, fmt.Errorf("%s and --certs-dir exclude each other: --certs-dir stands for the files of both sides", g.source))
		case (name == "client-cert-auth" || name == "peer-client-cert-auth") && !g.value.b:
			wrong = append(wrong, fmt.Errorf("%s is false, and --certs-dir demands certificates: leave one of them out", g.source))
		}
	}
	return wrong
}

// validateCertsDir says which URL has no TLS in spite of certs-dir. Those of metrics may: probes have no
// certificates. Those of the console may not: root's password is typed there.
func (c *Config) validateCertsDir() error {
	if c.CertsDir == "" {
		return nil
	}
	for _, urls := range [][]url.URL{c.ListenClientURLs, c.ListenClientHTTPURLs, c.AdvertiseClientURLs, c.ListenPeerURLs, c.AdvertisePeerURLs, c.ListenConsoleURLs} {
		for i := range urls {
			if urls[i].Scheme == "http" {
				return fmt.Errorf("the URL %s is without TLS, and --certs-dir asks for it: write https://%s", &urls[i], urls[i].Host)
			}
		}
	}
	return nil
}

// given says whether a server certificate is named.
func (t *TLS) given() bool { return t.CertFile != "" || t.KeyFile != "" }

func (c *Config) validateTLS() error {
	if err := c.validateCertsDir(); err != nil {
		return err
	}
	for _, side := range []struct {
		prefix string
		tls    *TLS
		urls   []url.URL
	}{
		{"", &c.ClientTLS, slices.Concat(c.ListenClientURLs, c.ListenClientHTTPURLs, c.ListenMetricsURLs, c.ListenConsoleURLs)},
		{"peer-", &c.PeerTLS, append(c.ListenPeerURLs[:len(c.ListenPeerURLs):len(c.ListenPeerURLs)], c.AdvertisePeerURLs...)},
	} {
		t := side.tls
		switch {
		case (t.CertFile == "") != (t.KeyFile == ""):
			return fmt.Errorf("--%scert-file and --%skey-file must both be given or both be left out", side.prefix, side.prefix)
		case (t.ClientCertFile == "") != (t.ClientKeyFile == ""):
			return fmt.Errorf("--%[1]sclient-cert-file and --%[1]sclient-key-file must both be given or both be left out", side.prefix)
		case len(t.AllowedCNs) > 0 && len(t.AllowedHostnames) > 0:
			return fmt.Errorf("--%[1]scert-allowed-cn and --%[1]scert-allowed-hostname exclude each other", side.prefix)
		}
		for i := range side.urls {
			if u := &side.urls[i]; secure(u) && !t.given() && !t.Auto {
				return fmt.Errorf("TLS key/cert (--%[1]scert-file, --%[1]skey-file) must be provided for the url %[2]s", side.prefix, u)
			}
		}
	}
	if t := &c.PeerTLS; t.given() && t.TrustedCAFile == "" && anySecure(append(c.ListenPeerURLs[:len(c.ListenPeerURLs):len(c.ListenPeerURLs)], c.AdvertisePeerURLs...)) {
		return errors.New("https:// peer URLs need --peer-trusted-ca-file: without it whoever reaches the peer port is taken for a node; " +
			"name the authority that signs the nodes' certificates, or make one with skein cert create-ca")
	}
	switch {
	case c.TLSMaxVersion != 0 && c.TLSMinVersion > c.TLSMaxVersion:
		return fmt.Errorf("min version (%s) is greater than max version (%s)", tls.VersionName(c.TLSMinVersion), tls.VersionName(c.TLSMaxVersion))
	case c.TLSMinVersion == tls.VersionTLS13 && len(c.CipherSuites) > 0:
		return errors.New("cipher suites cannot be configured when only TLS1.3 is enabled")
	case c.SelfSignedCertYears == 0:
		return errors.New("--self-signed-cert-validity must be at least 1 (year)")
	}
	return nil
}

// secure says whether the URL asks for TLS.
func secure(u *url.URL) bool { return u.Scheme == "https" || u.Scheme == "unixs" }

// Insecure returns the URLs of clients and peers that others than this machine reach without TLS. Those of metrics do
// not count: probes have no certificates.
func (c *Config) Insecure() (urls []string) {
	for _, u := range slices.Concat(c.ListenClientURLs, c.ListenClientHTTPURLs, c.AdvertiseClientURLs, c.ListenPeerURLs, c.AdvertisePeerURLs, c.ListenConsoleURLs) {
		ip := net.ParseIP(u.Hostname())
		if u.Scheme != "http" || u.Hostname() == "localhost" || ip != nil && ip.IsLoopback() || slices.Contains(urls, u.String()) {
			continue
		}
		urls = append(urls, u.String())
	}
	return urls
}

// ClientSide is the TLS of the client and metrics listeners.
type ClientSide struct {
	// TLS is nil where no listener is secure.
	TLS *tls.Config
	// Verify says why the certificates of a connected client do not hold any more, or nil. It is nil if clients show none.
	Verify func(shown []*x509.Certificate) error
}

// ClientSide returns the TLS of the client and metrics listeners. With auto-tls it makes the certificate in
// the data directory if it is not there. Files are read again where they have changed; unusable counts those that
// cannot be taken.
func (c *Config) ClientSide(wall func() time.Time, logger *zap.Logger, unusable interface{ Inc() }) (side ClientSide, err error) {
	urls := slices.Concat(c.ListenClientURLs, c.ListenClientHTTPURLs, c.ListenMetricsURLs, c.ListenConsoleURLs)
	if !anySecure(urls) {
		return side, nil
	}
	info, err := c.clientInfo(urls, logger)
	if err != nil {
		return side, fmt.Errorf("client TLS: %w", err)
	}
	live, err := certs.NewLive(certs.LiveOptions{
		Files:      certs.Files{Cert: info.CertFile, Key: info.KeyFile, ClientCert: info.ClientCertFile, ClientKey: info.ClientKeyFile, CA: info.TrustedCAFile, CRL: info.CRLFile},
		AllowedCNs: info.AllowedCNs, AllowedHostnames: info.AllowedHostnames,
		Wall: wall, Side: "client", Log: logger, Unusable: unusable,
	})
	if err != nil {
		return side, fmt.Errorf("client TLS: %w", err)
	}
	base := &tls.Config{MinVersion: c.TLSMinVersion, MaxVersion: c.TLSMaxVersion, CipherSuites: c.CipherSuites, Time: wall}
	if info.TrustedCAFile != "" || info.ClientCertAuth {
		base.ClientAuth = tls.RequireAndVerifyClientCert
		// A resumed session would show no certificate, and outlive what was revoked meanwhile.
		base.SessionTicketsDisabled = true
		// Not VerifyPeerCertificate, which is not called for a resumed session.
		base.VerifyConnection = func(st tls.ConnectionState) error { return live.Allows(st.PeerCertificates) }
		side.Verify = func(shown []*x509.Certificate) error { return live.Verify(shown, x509.ExtKeyUsageClientAuth) }
	}
	side.TLS = base.Clone()
	side.TLS.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) {
		t := base.Clone()
		t.Certificates, t.ClientCAs = []tls.Certificate{*live.Server()}, live.Authorities()
		return t, nil
	}
	return side, nil
}

// CertificateFiles are the files of the certificates that the node shows to clients and to peers.
func (c *Config) CertificateFiles() (paths []string) {
	add := func(path string) {
		if path != "" && !slices.Contains(paths, path) {
			paths = append(paths, path)
		}
	}
	if anySecure(slices.Concat(c.ListenClientURLs, c.ListenClientHTTPURLs, c.ListenMetricsURLs, c.ListenConsoleURLs)) {
		add(c.ClientTLS.CertFile)
		if c.ClientTLS.Auto && !c.ClientTLS.given() {
			add(filepath.Join(c.autoDir(), "cert.pem"))
		}
	}
	if anySecure(c.ListenPeerURLs) {
		add(c.PeerTLS.CertFile)
		add(c.PeerTLS.ClientCertFile)
	}
	return paths
}

// autoDir is where etcd's auto-tls has its files.
func (c *Config) autoDir() string { return filepath.Join(c.DataDir, "fixtures", "client") }

func anySecure(urls []url.URL) bool {
	for i := range urls {
		if secure(&urls[i]) {
			return true
		}
	}
	return false
}

// clientInfo turns the clients' settings into etcd's, which makes the certificate of auto-tls and the settings
// of a client.
func (c *Config) clientInfo(urls []url.URL, logger *zap.Logger) (transport.TLSInfo, error) {
	t := &c.ClientTLS
	info := transport.TLSInfo{
		CertFile: t.CertFile, KeyFile: t.KeyFile,
		ClientCertFile: t.ClientCertFile, ClientKeyFile: t.ClientKeyFile,
		TrustedCAFile: t.TrustedCAFile, CRLFile: t.CRLFile, ClientCertAuth: t.ClientCertAuth,
		AllowedCNs: t.AllowedCNs, AllowedHostnames: t.AllowedHostnames,
	}
	if t.Auto && !t.given() {
		hosts := make([]string, len(urls))
		for i := range urls {
			hosts[i] = urls[i].Host
		}
		auto, err := transport.SelfCert(logger, c.autoDir(), hosts, c.SelfSignedCertYears)
		if err != nil {
			return info, err
		}
		info = auto
	}
	info.Logger = logger
	info.CipherSuites = c.CipherSuites
	info.MinVersion, info.MaxVersion = c.TLSMinVersion, c.TLSMaxVersion
	return info, nil
}

func parseTLSVersion(s string) (uint16, error) { return tlsutil.GetTLSVersion(s) }

func parseCipherSuites(names []string) ([]uint16, error) { return tlsutil.GetCipherSuites(names) }
