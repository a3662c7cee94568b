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
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/skeindb/skein/certs"
	"github.com/skeindb/skein/keyspace"
)

// Security says how the two ends of a connection authenticate each other. Files are
// looked at for each handshake, so replaced certificates take effect by themselves.
// One that cannot be taken leaves the last good one in use.
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
	// Unusable, if not nil, counts the changes of files that could not be taken.
	Unusable interface{ Inc() }
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
	live     *certs.Live // nil if selfMade is not
	// roles has the paths of the node's own certificates that have had a role.
	roles sync.Map
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
	if sec.TrustedCAFile == "" {
		return nil, errors.New("transport: certificates of peers need a trusted CA file: without one anybody is a node")
	}
	var err error
	cr.live, err = certs.NewLive(certs.LiveOptions{
		Files: certs.Files{
			Cert: sec.CertFile, Key: sec.KeyFile, ClientCert: sec.ClientCertFile, ClientKey: sec.ClientKeyFile, CA: sec.TrustedCAFile, CRL: sec.CRLFile,
		},
		AllowedCNs: sec.AllowedCNs, AllowedHostnames: sec.AllowedHostnames,
		Own: cr.checkOwn, Wall: cr.clock.Wall, Side: "peer", Log: cfg.Logger, Unusable: sec.Unusable,
	})
	if err == nil && cr.live.Server() == nil {
		err = errors.New("certificate: none is given")
	}
	if err != nil {
		return nil, fmt.Errorf("transport: peer %w", err)
	}
	return cr, nil
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
func (cr *credentials) accepting() *tls.Config {
	c := cr.base()
	if cr.selfMade != nil {
		c.Certificates = []tls.Certificate{*cr.selfMade}
		return c
	}
	cert := cr.live.Server()
	role := hasRole(cert)
	c.Certificates, c.ClientCAs, c.ClientAuth = []tls.Certificate{*cert}, cr.live.Authorities(), tls.RequireAndVerifyClientCert
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
		return cr.allows(st.PeerCertificates)
	}
	return c
}

// allows applies the revocation list and the operator's restrictions to verified certificates.
func (cr *credentials) allows(shown []*x509.Certificate) error {
	if err := cr.live.Allows(shown); err != nil {
		return fmt.Errorf("%w: %w", errIdentity, err)
	}
	return nil
}

// holds says why the certificates of a peer with a session do not hold any more, or nil. Names are not looked at
// again: a node may be renamed.
func (cr *credentials) holds(shown []*x509.Certificate, dialled bool) error {
	if cr.selfMade != nil {
		return nil
	}
	use := x509.ExtKeyUsageClientAuth
	if dialled {
		use = x509.ExtKeyUsageServerAuth
	}
	return cr.live.Verify(shown, use)
}

// errNoRole says why a certificate of the authority is not enough. Clients may have one of it too.
var errNoRole = fmt.Errorf("%w: the certificate proves no node, and this node's own does", errIdentity)

// checkOwn refuses a certificate of this node that proves another one. It also refuses one without a role in the
// place of one that has had it: the node would begin to take any holder of a certificate for a node.
func (cr *credentials) checkOwn(path string, cert *tls.Certificate) error {
	id, role, err := provenIdentity(cert.Leaf)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	if _, had := cr.roles.Load(path); had && !role {
		return fmt.Errorf("%s proves no node any more: give the node a certificate of skein cert create-node, or start it anew", path)
	}
	if id.name != "" && cr.sec.Name != "" && id.name != cr.sec.Name {
		return fmt.Errorf("%s is of the node %s, and this node is %s: give it its own certificate", path, id.name, cr.sec.Name)
	}
	if role {
		cr.roles.Store(path, true)
	}
	return nil
}

// hasRole says whether the node's own certificate proves which node this is. Peers that prove nothing
// are refused then.
func hasRole(own *tls.Certificate) bool {
	_, role, _ := provenIdentity(own.Leaf) // checkOwn has seen it
	return role
}

// dialling returns the configuration of the side that dials the node at host.
func (cr *credentials) dialling(host string, want keyspace.NodeID) *tls.Config {
	c := cr.base()
	c.ServerName = host
	// The standard check knows host names only, and a certificate that names the node
	// needs none. VerifyConnection does the whole check instead.
	c.InsecureSkipVerify = true
	if cr.selfMade != nil {
		return c
	}
	if cr.sec.ServerName != "" {
		c.ServerName = cr.sec.ServerName
	}
	cert := cr.live.Client()
	role, name := hasRole(cert), c.ServerName
	c.Certificates = []tls.Certificate{*cert}
	c.VerifyConnection = func(st tls.ConnectionState) error { return cr.verifyDialled(st.PeerCertificates, name, want, role) }
	return c
}

// verifyDialled checks the chain and the identity of a dialled node. want is 0 for a node that asks
// and knows no identity yet.
func (cr *credentials) verifyDialled(shown []*x509.Certificate, host string, want keyspace.NodeID, role bool) error {
	if err := cr.holds(shown, true); err != nil {
		if _, ok := errors.AsType[*tls.CertificateVerificationError](err); ok {
			return err
		}
		return fmt.Errorf("%w: %w", errIdentity, err)
	}
	id, proven, err := provenIdentity(shown[0])
	switch {
	case err != nil:
		return err
	case proven && want != 0:
		return cr.fits(id, want)
	case !proven && role:
		return errNoRole
	case !proven:
		if err := shown[0].VerifyHostname(host); err != nil {
			return &tls.CertificateVerificationError{UnverifiedCertificates: shown, Err: err}
		}
	}
	return nil
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
