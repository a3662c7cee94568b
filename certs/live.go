package certs

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"math/big"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"
)

// Files are the files of one side of a running node, towards its clients or towards its peers.
type Files struct {
	// Cert and Key are shown to whoever connects. Empty names are none.
	Cert, Key string
	// ClientCert and ClientKey are shown where the node connects. Empty means Cert and Key.
	ClientCert, ClientKey string
	// CA has the authorities of the other side. Empty means those of the system.
	CA string
	// CRL is what is revoked (PEM or DER). Empty means nothing.
	CRL string
}

// LiveOptions say what a Live does beside reading.
type LiveOptions struct {
	Files
	// AllowedCNs and AllowedHostnames are the common names, or the host names, of which a certificate
	// of the other side must bear one. Empty means any.
	AllowedCNs, AllowedHostnames []string
	// Own, if not nil, finds fault with a certificate of this node.
	Own func(path string, cert *tls.Certificate) error
	// Wall is the time by which certificates hold.
	Wall func() time.Time
	// Side names the side in the log.
	Side string
	Log  *zap.Logger
	// Unusable, if not nil, counts the changes of files that could not be taken.
	Unusable interface{ Inc() }
}

// Live is what one side of a node shows and checks. Its files are looked at for each use, and read if
// they have changed. A change that cannot be taken leaves the last good content in use: a node neither stops
// to serve for it, nor forgets what is revoked. All methods may be called from many goroutines.
type Live struct {
	o              LiveOptions
	server, client *kept[*tls.Certificate]
	authorities    *kept[*x509.CertPool]
	revoked        *kept[map[string]bool] // by serial number, as serialOf writes it
}

// NewLive reads the files. Only here a file that is no good is an error.
func NewLive(o LiveOptions) (*Live, error) {
	l := &Live{
		o: o,
		authorities: &kept[*x509.CertPool]{what: "trusted CA file", read: func(paths []string) (*x509.CertPool, error) {
			all, err := readCerts(paths[0])
			pool := x509.NewCertPool()
			for _, c := range all {
				pool.AddCert(c)
			}
			return pool, err
		}},
		revoked: &kept[map[string]bool]{what: "revocation list", read: readRevoked},
	}
	pair := func(cert, key string) *kept[*tls.Certificate] {
		k := &kept[*tls.Certificate]{what: "certificate and key", read: l.readPair}
		if cert != "" || key != "" {
			k.paths = []string{cert, key}
		}
		return k
	}
	l.server = pair(o.Cert, o.Key)
	if l.client = l.server; o.ClientCert != "" {
		l.client = pair(o.ClientCert, o.ClientKey)
	}
	if o.CA != "" {
		l.authorities.paths = []string{o.CA}
	}
	if o.CRL != "" {
		l.revoked.paths = []string{o.CRL}
	}
	return l, errors.Join(l.server.refresh(l), l.client.refresh(l), l.authorities.refresh(l), l.revoked.refresh(l))
}

// Server returns what is shown to whoever connects, nil without one.
func (l *Live) Server() *tls.Certificate { return l.server.get(l) }

// Client returns what is shown where the node connects, nil without one.
func (l *Live) Client() *tls.Certificate { return l.client.get(l) }

// Authorities returns those of the other side; nil is the system's.
func (l *Live) Authorities() *x509.CertPool { return l.authorities.get(l) }

// Refresh reads the files that have changed.
func (l *Live) Refresh() {
	l.Server()
	l.Client()
	l.Authorities()
	l.revoked.get(l)
}

// Allows says why the other side's certificates are refused although an authority has signed them, or nil. The
// first one is the other side's own. Like etcd it looks for all of them in the list.
func (l *Live) Allows(shown []*x509.Certificate) error {
	revoked := l.revoked.get(l)
	for _, c := range shown {
		if revoked[serialOf(c.SerialNumber)] {
			return fmt.Errorf("serial number %x is revoked", c.SerialNumber)
		}
	}
	if a := l.o.AllowedCNs; len(a) > 0 && !slices.Contains(a, shown[0].Subject.CommonName) {
		return fmt.Errorf("common name %q is not allowed", shown[0].Subject.CommonName)
	}
	matches := func(host string) bool { return shown[0].VerifyHostname(host) == nil }
	if a := l.o.AllowedHostnames; len(a) > 0 && !slices.ContainsFunc(a, matches) {
		return fmt.Errorf("no allowed host name in %q", shown[0].DNSNames)
	}
	return nil
}

// Verify says why the other side's certificates do not hold for a use now, or nil: by time, authorities and
// Allows.
func (l *Live) Verify(shown []*x509.Certificate, use x509.ExtKeyUsage) error {
	opts := x509.VerifyOptions{
		Roots: l.Authorities(), Intermediates: x509.NewCertPool(), CurrentTime: l.o.Wall(), KeyUsages: []x509.ExtKeyUsage{use},
	}
	for _, c := range shown[1:] {
		opts.Intermediates.AddCert(c)
	}
	if _, err := shown[0].Verify(opts); err != nil {
		return &tls.CertificateVerificationError{UnverifiedCertificates: shown, Err: err}
	}
	return l.Allows(shown)
}

func (l *Live) readPair(paths []string) (*tls.Certificate, error) {
	pair, err := tls.LoadX509KeyPair(paths[0], paths[1])
	if err == nil && l.o.Own != nil {
		err = l.o.Own(paths[0], &pair)
	}
	return &pair, err
}

func serialOf(n *big.Int) string { return n.Text(16) }

func readRevoked(paths []string) (map[string]bool, error) {
	b, err := os.ReadFile(paths[0])
	if err != nil {
		return nil, err
	}
	list, err := parseList(b)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", paths[0], err)
	}
	serials := make(map[string]bool, len(list.RevokedCertificateEntries))
	for _, e := range list.RevokedCertificateEntries {
		serials[serialOf(e.SerialNumber)] = true
	}
	return serials, nil
}

// kept is the last good content of files that are read together.
type kept[T any] struct {
	what  string
	paths []string // none: good stays empty
	read  func(paths []string) (T, error)

	mu sync.Mutex
	// Guarded by mu: what the files looked like when they were read last, and the last good content.
	seen string
	good T
	// failed is the look and the error that was told last, guarded by mu.
	failed string
}

func (k *kept[T]) get(l *Live) T {
	if err := k.refresh(l); err != nil {
		if l.o.Unusable != nil {
			l.o.Unusable.Inc()
		}
		l.o.Log.Error("a file of certificates cannot be taken, and the last good one stays in use", zap.String("side", l.o.Side), zap.Error(err))
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.good
}

// refresh reads the files if they have changed. It tells an error once per change.
func (k *kept[T]) refresh(l *Live) error {
	if len(k.paths) == 0 {
		return nil
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	// Before the files are read: a change during the reading shows the next time.
	now := looks(k.paths)
	if now == k.seen {
		return nil
	}
	again := k.seen != ""
	content, err := k.read(k.paths)
	if err != nil {
		// It is read again at the next use: a process without free files could not read it either.
		if failed := now + err.Error(); failed != k.failed {
			k.failed = failed
			return fmt.Errorf("%s: %w", k.what, err)
		}
		return nil
	}
	k.seen, k.failed = now, ""
	if k.good = content; again {
		l.o.Log.Info("took changed certificates", zap.String("side", l.o.Side), zap.String("what", k.what), zap.Strings("files", k.paths))
	}
	return nil
}

// looks tells two states of files apart. Time and size are not enough. A copy may keep the time (cp -p), and two
// lists that revoke equally many are equally long.
func looks(paths []string) string {
	var b strings.Builder
	for _, path := range paths {
		var s unix.Stat_t
		if err := unix.Stat(path, &s); err != nil {
			fmt.Fprintf(&b, "%v\n", err)
			continue
		}
		fmt.Fprintln(&b, s.Dev, s.Ino, s.Size, s.Mtim, s.Ctim)
	}
	return b.String()
}
