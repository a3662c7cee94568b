package transport

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/skeindb/skein/certs"
	"github.com/skeindb/skein/keyspace"
)

// Security says how the two ends of a connection authenticate each other. Files are
// read again for each handshake, so replaced certificates take effect by themselves.
type Security struct {
	// SelfMade is the meaning of http:// peer URLs and --peer-auto-tls: the node makes
	// its own certificate and nobody checks it. The traffic is encrypted, but open to
	// anybody who can reach the port. All other fields but Why are ignored then.
	SelfMade bool
	// Why names, in the warning about SelfMade, the setting that asks for it.
	Why string
	// CertFile and KeyFile (PEM) are the node's certificate. It serves both roles
	// unless ClientCertFile and ClientKeyFile name another for dialling.
	CertFile, KeyFile             string
	ClientCertFile, ClientKeyFile string
	// TrustedCAFile (PEM) has the authorities that sign peers' certificates.
	TrustedCAFile string
	// AllowedCNs and AllowedHostnames, if set, must match the common name or a host name
	// of a peer's certificate. Only one of them may be set.
	AllowedCNs, AllowedHostnames []string
	// CRLFile (PEM or DER) has revoked serial numbers.
	CRLFile string
	// Name is this node's name. A certificate of its own that proves another name is refused.
	Name string
	// ServerName replaces the host of a peer's URL in the check of its certificate.
	ServerName string
}

// errIdentity is wrapped by every error about a certificate's content.
var errIdentity = errors.New("certificate identity")

// identity is which node a certificate proves: by its ids, or by the name of its role.
type identity struct {
	cluster keyspace.ClusterID
	node    keyspace.NodeID
	name    string // empty: by ids
}

// String returns the URI.
func (i identity) String() string {
	if i.name != "" {
		return certs.NodeURI(i.name).String()
	}
	return IdentityURI(i.cluster, i.node)
}

// provenIdentity returns what a certificate's URI proves. proven is false if it has no such URI.
func provenIdentity(cert *x509.Certificate) (id identity, proven bool, err error) {
	for _, u := range cert.URIs {
		if u.Scheme != certs.URIScheme {
			continue
		}
		if proven {
			return identity{}, false, fmt.Errorf("%w: more than one %s name", errIdentity, certs.URIScheme)
		}
		if id.name, proven, err = certs.NodeName(u); err != nil {
			return identity{}, false, fmt.Errorf("%w: %w", errIdentity, err)
		}
		if proven {
			continue
		}
		var c, n uint64
		_, err := fmt.Sscanf(u.Host+" "+strings.TrimPrefix(u.Path, "/"), "%x %x", &c, &n)
		id.cluster, id.node, proven = keyspace.ClusterID(c), keyspace.NodeID(n), true
		if err != nil || u.String() != id.String() || n == 0 {
			return identity{}, false, fmt.Errorf("%w: %q is neither %s nor %s://CLUSTER/NODE", errIdentity, u, certs.NodeURI("NAME"), certs.URIScheme)
		}
	}
	return id, proven, nil
}

// IdentityURI returns the URI of a certificate that proves a node by its ids. It is stronger than a
// role: a node that takes another's name does not get its id.
func IdentityURI(c keyspace.ClusterID, n keyspace.NodeID) string {
	return certs.URIScheme + "://" + c.String() + "/" + n.String()
}

// fits compares what a peer's certificate proves with the node that it is to be.
func (cr *credentials) fits(id identity, want keyspace.NodeID) error {
	switch {
	case id.name == "" && (id.cluster != cr.cluster || id.node != want):
		return fmt.Errorf("%w: certificate of %s, not of %s", errIdentity, id, IdentityURI(cr.cluster, want))
	case id.name != "" && (cr.named == nil || !cr.named(want, id.name)):
		return fmt.Errorf("%w: certificate of %s, which is not the name of node %s", errIdentity, id, want)
	}
	return nil
}

// credentials makes the TLS configurations of one node.
type credentials struct {
	sec      Security
	cluster  keyspace.ClusterID
	named    func(keyspace.NodeID, string) bool
	clock    interface{ Wall() time.Time }
	selfMade *tls.Certificate
}

func newCredentials(cfg *Config, sec Security) (*credentials, error) {
	cr := &credentials{sec: sec, cluster: cfg.Cluster, named: cfg.Named, clock: cfg.Clock}
	if len(sec.AllowedCNs) > 0 && len(sec.AllowedHostnames) > 0 {
		return nil, errors.New("transport: allowed common names and allowed host names exclude each other")
	}
	if sec.SelfMade {
		cert, err := makeCertificate(cr.clock.Wall())
		cr.selfMade = cert
		return cr, err
	}
	// A broken file is found at the start, not at the first handshake.
	if _, err := cr.accepting(); err != nil {
		return nil, err
	}
	_, err := cr.dialling("localhost", 1)
	return cr, err
}

// base is what both roles share. QUIC needs at least TLS 1.3. Sessions are never
// resumed, so each connection is checked in full.
func (cr *credentials) base() *tls.Config {
	return &tls.Config{
		MinVersion:             tls.VersionTLS13,
		NextProtos:             []string{ALPN},
		SessionTicketsDisabled: true,
		Time:                   cr.clock.Wall,
	}
}

// accepting returns the configuration of the accepting side.
func (cr *credentials) accepting() (*tls.Config, error) {
	c := cr.base()
	if cr.selfMade != nil {
		c.Certificates = []tls.Certificate{*cr.selfMade}
		return c, nil
	}
	cert, role, err := cr.own("peer certificate", cr.sec.CertFile, cr.sec.KeyFile)
	if err != nil {
		return nil, err
	}
	c.Certificates = []tls.Certificate{*cert}
	if c.ClientCAs, err = cr.authorities(); err != nil {
		return nil, err
	}
	c.ClientAuth = tls.RequireAndVerifyClientCert
	revoked, err := cr.revoked()
	if err != nil {
		return nil, err
	}
	c.VerifyConnection = func(st tls.ConnectionState) error {
		id, proven, err := provenIdentity(st.PeerCertificates[0])
		if err != nil {
			return err
		}
		if proven && id.name == "" && id.cluster != cr.cluster {
			return fmt.Errorf("%w: certificate of cluster %s, this is %s", errIdentity, id.cluster, cr.cluster)
		}
		if !proven && role {
			return errNoRole
		}
		return cr.checkAllowed(st.PeerCertificates[0], revoked)
	}
	return c, nil
}

// errNoRole says why a certificate of the authority is not enough. Clients may have one of it too.
var errNoRole = fmt.Errorf("%w: the certificate proves no node, and this node's own does", errIdentity)

// own reads the node's own certificate. role says that it proves which node this is. Peers that prove
// nothing are refused then.
func (cr *credentials) own(what, certFile, keyFile string) (cert *tls.Certificate, role bool, err error) {
	pair, err := tls.LoadX509KeyPair(certFile, keyFile)
	if err != nil {
		return nil, false, fmt.Errorf("transport: %s: %w", what, err)
	}
	id, role, err := provenIdentity(pair.Leaf)
	if err != nil {
		return nil, false, fmt.Errorf("transport: %s %s: %w", what, certFile, err)
	}
	if id.name != "" && cr.sec.Name != "" && id.name != cr.sec.Name {
		return nil, false, fmt.Errorf("transport: %s %s is of the node %s, and this node is %s: give it its own certificate", what, certFile, id.name, cr.sec.Name)
	}
	return &pair, role, nil
}

// dialling returns the configuration of the side that dials the node at host.
func (cr *credentials) dialling(host string, want keyspace.NodeID) (*tls.Config, error) {
	c := cr.base()
	c.ServerName = host
	// The standard check knows host names only, and a certificate that names the node
	// needs none. VerifyConnection does the whole check instead.
	c.InsecureSkipVerify = true
	if cr.selfMade != nil {
		return c, nil
	}
	if cr.sec.ServerName != "" {
		c.ServerName = cr.sec.ServerName
	}
	certFile, keyFile := cr.sec.ClientCertFile, cr.sec.ClientKeyFile
	if certFile == "" {
		certFile, keyFile = cr.sec.CertFile, cr.sec.KeyFile
	}
	cert, role, err := cr.own("peer client certificate", certFile, keyFile)
	if err != nil {
		return nil, err
	}
	c.Certificates = []tls.Certificate{*cert}
	roots, err := cr.authorities()
	if err != nil {
		return nil, err
	}
	revoked, err := cr.revoked()
	if err != nil {
		return nil, err
	}
	name := c.ServerName
	c.VerifyConnection = func(st tls.ConnectionState) error {
		if err := cr.verifyDialled(st.PeerCertificates, roots, name, want, role); err != nil {
			return err
		}
		return cr.checkAllowed(st.PeerCertificates[0], revoked)
	}
	return c, nil
}

// verifyDialled checks the chain and the identity of a dialled node. want is 0 for a node that asks
// and knows no identity yet.
func (cr *credentials) verifyDialled(certs []*x509.Certificate, roots *x509.CertPool, host string, want keyspace.NodeID, role bool) error {
	opts := x509.VerifyOptions{Roots: roots, CurrentTime: cr.clock.Wall(), Intermediates: x509.NewCertPool()}
	for _, c := range certs[1:] {
		opts.Intermediates.AddCert(c)
	}
	if _, err := certs[0].Verify(opts); err != nil {
		return &tls.CertificateVerificationError{UnverifiedCertificates: certs, Err: err}
	}
	id, proven, err := provenIdentity(certs[0])
	switch {
	case err != nil:
		return err
	case proven && want != 0:
		return cr.fits(id, want)
	case !proven && role:
		return errNoRole
	case !proven:
		if err := certs[0].VerifyHostname(host); err != nil {
			return &tls.CertificateVerificationError{UnverifiedCertificates: certs, Err: err}
		}
	}
	return nil
}

// checkAllowed applies the operator's restrictions to a verified certificate.
func (cr *credentials) checkAllowed(cert *x509.Certificate, revoked []*big.Int) error {
	if slices.ContainsFunc(revoked, func(n *big.Int) bool { return n.Cmp(cert.SerialNumber) == 0 }) {
		return fmt.Errorf("%w: serial number %x is revoked", errIdentity, cert.SerialNumber)
	}
	if a := cr.sec.AllowedCNs; len(a) > 0 && !slices.Contains(a, cert.Subject.CommonName) {
		return fmt.Errorf("%w: common name %q is not allowed", errIdentity, cert.Subject.CommonName)
	}
	matches := func(host string) bool { return cert.VerifyHostname(host) == nil }
	if a := cr.sec.AllowedHostnames; len(a) > 0 && !slices.ContainsFunc(a, matches) {
		return fmt.Errorf("%w: no allowed host name in %q", errIdentity, cert.DNSNames)
	}
	return nil
}

// authorities returns the pool of TrustedCAFile.
func (cr *credentials) authorities() (*x509.CertPool, error) {
	if cr.sec.TrustedCAFile == "" {
		return nil, errors.New("transport: certificates of peers need a trusted CA file: without one anybody is a node")
	}
	b, err := os.ReadFile(cr.sec.TrustedCAFile)
	if err != nil {
		return nil, fmt.Errorf("transport: trusted CA file: %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(b) {
		return nil, fmt.Errorf("transport: trusted CA file %s has no certificate", cr.sec.TrustedCAFile)
	}
	return pool, nil
}

// revoked returns the serial numbers of CRLFile.
func (cr *credentials) revoked() ([]*big.Int, error) {
	if cr.sec.CRLFile == "" {
		return nil, nil
	}
	b, err := os.ReadFile(cr.sec.CRLFile)
	if err != nil {
		return nil, fmt.Errorf("transport: revocation list: %w", err)
	}
	list, err := x509.ParseRevocationList(derOf(b))
	if err != nil {
		return nil, fmt.Errorf("transport: revocation list %s: %w", cr.sec.CRLFile, err)
	}
	var serials []*big.Int
	for _, e := range list.RevokedCertificateEntries {
		serials = append(serials, e.SerialNumber)
	}
	return serials, nil
}

// resetKey returns the key by which a restarted node tells its peers that it does not
// know their connections. It is the same after a restart and differs between nodes. If
// the node has a private key, nobody else can compute it.
func (cr *credentials) resetKey(node keyspace.NodeID) (*[32]byte, error) {
	secret := []byte("no secret: the peers' traffic is not authenticated")
	if cr.selfMade == nil {
		b, err := os.ReadFile(cr.sec.KeyFile)
		if err != nil {
			return nil, fmt.Errorf("transport: peer key: %w", err)
		}
		secret = b
	}
	b, err := hkdf.Key(sha256.New, secret, nil, "stateless reset "+IdentityURI(cr.cluster, node), 32)
	if err != nil {
		return nil, fmt.Errorf("transport: reset key: %w", err)
	}
	return (*[32]byte)(b), nil
}

// makeCertificate makes the certificate of SelfMade. Nobody checks its validity; it is
// wide, for wrong clocks.
func makeCertificate(now time.Time) (*tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("transport: make a key: %w", err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1),
		Subject:      pkix.Name{Organization: []string{"skein, self-made"}},
		NotBefore:    now.AddDate(-1, 0, 0), NotAfter: now.AddDate(100, 0, 0),
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		DNSNames:    []string{"localhost"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("transport: make a certificate: %w", err)
	}
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, nil
}

// derOf returns the content of the first PEM block, or b itself if it is no PEM.
func derOf(b []byte) []byte {
	if block, _ := pem.Decode(b); block != nil {
		return block.Bytes
	}
	return b
}
