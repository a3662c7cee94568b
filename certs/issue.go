package certs

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"unicode"
)

// Issue says how a certificate is made.
type Issue struct {
	// Days is how long it is valid; the authority must be valid as long.
	Days int
	// Out is the directory that gets the certificate, its key and what goes with them. Empty means
	// the authority's own.
	Out       string
	Overwrite bool
	// NoUser leaves the common name out of a client's certificate, so that it stands for no user. etcd's gRPC proxy takes no
	// other one.
	NoUser bool
}

// clientUnit is before the name in the organizational unit of a client that is no user.
const clientUnit = "client "

// maxName bounds names in bytes: what X.509 allows in a common name.
const maxName = 64

func checkName(name string) error {
	bad := func(r rune) bool {
		return r == '/' || r == '\\' || unicode.IsControl(r) || r == unicode.ReplacementChar
	}
	switch {
	case name == "" || len(name) > maxName:
		return problem(fmt.Sprintf("give 1 to %d bytes", maxName), "the name %q has %d bytes", name, len(name))
	case strings.ContainsFunc(name, bad) || name[0] == '.':
		return problem("give a name without slashes and control characters that begins with no dot; it becomes part of a file name", "%q can be no name of a certificate", name)
	}
	return nil
}

// CreateNode makes a node's certificate. It holds for the hosts: names and addresses at which clients
// and nodes reach the node.
func (d *Dir) CreateNode(name string, hosts []string, o Issue) (Info, error) {
	template := &x509.Certificate{
		// No common name: the node is no user.
		Subject:     pkix.Name{Organization: []string{"skein"}, OrganizationalUnit: []string{"node " + name}},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		URIs:        []*url.URL{NodeURI(name)},
	}
	if err := addHosts(template, hosts); err != nil {
		return Info{}, err
	}
	return d.issue(name, template, NodeFile, NodeKey, o)
}

// CreateClient makes a client's certificate. Its common name, which is the user, is the name.
func (d *Dir) CreateClient(name string, o Issue) (Info, error) {
	subject := pkix.Name{Organization: []string{"skein"}, CommonName: name}
	if o.NoUser {
		subject.CommonName, subject.OrganizationalUnit = "", []string{clientUnit + name}
	}
	return d.issue(name, &x509.Certificate{
		Subject:     subject,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}, clientPrefix+name+certSuffix, clientPrefix+name+keySuffix, o)
}

func addHosts(template *x509.Certificate, hosts []string) error {
	if len(hosts) == 0 {
		return problem("give --host with each name and address at which clients and nodes reach it", "a node's certificate needs a host")
	}
	for _, h := range hosts {
		if ip := net.ParseIP(h); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
			continue
		}
		if !isHostName(h) {
			return problem("give a host name or an address, without a port", "--host %q is no host", h)
		}
		template.DNSNames = append(template.DNSNames, h)
	}
	return nil
}

// isHostName says whether a certificate's check can match h. A wildcard stands for the first label.
func isHostName(h string) bool {
	h = strings.TrimPrefix(h, "*.")
	if h == "" || len(h) > 253 {
		return false
	}
	for label := range strings.SplitSeq(h, ".") {
		odd := func(r rune) bool {
			return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && r != '-' && r != '_'
		}
		if label == "" || len(label) > 63 || strings.ContainsFunc(label, odd) || label[0] == '-' {
			return false
		}
	}
	return true
}

// issue signs a certificate with a new key and writes both.
func (d *Dir) issue(name string, template *x509.Certificate, certName, keyName string, o Issue) (Info, error) {
	err := checkName(name)
	if err == nil {
		template.NotBefore, template.NotAfter, err = d.validity(o.Days)
	}
	if err != nil {
		return Info{}, err
	}
	if _, err := os.Stat(d.path); errors.Is(err, fs.ErrNotExist) {
		return Info{}, problem("make an authority with skein cert create-ca, or give the --certs-dir where it is", "there is no directory %s", d.path)
	}
	unlock, err := d.lock()
	if err != nil {
		return Info{}, err
	}
	defer unlock()
	a, err := d.authority()
	if err != nil {
		return Info{}, err
	}
	if template.NotAfter.After(a.cert.NotAfter) {
		return Info{}, problem("give fewer --days, or make a new authority with skein cert create-ca --overwrite, then all certificates anew",
			"the certificate would end on %s, and its authority already on %s", day(template.NotAfter), day(a.cert.NotAfter))
	}
	cert, files, err := a.sign(template, certName, keyName)
	if err != nil {
		return Info{}, err
	}
	out := d
	if o.Out != "" && !sameDir(o.Out, d.path) {
		out = At(o.Out, d.now)
		release, err := out.lock()
		if err != nil {
			return Info{}, err
		}
		defer release()
		beside, err := d.shared()
		if err != nil {
			return Info{}, err
		}
		files = append(beside, files...)
	}
	if err := out.mayWrite(o.Overwrite, files...); err != nil {
		return Info{}, err
	}
	if err := a.note(cert); err != nil {
		return Info{}, err
	}
	return out.info(out.file(certName), cert, a.list), out.write(files...)
}

// sameDir says whether both paths lead to one directory, which can be locked only once.
func sameDir(a, b string) bool {
	x, err := os.Stat(a)
	if err != nil {
		return false
	}
	y, err := os.Stat(b)
	return err == nil && os.SameFile(x, y)
}

// sign makes the key and the certificate, and their files.
func (a *authority) sign(template *x509.Certificate, certName, keyName string) (*x509.Certificate, []file, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, fmt.Errorf("certs: make a key: %w", err)
	}
	template.SerialNumber, template.KeyUsage = newSerial(), x509.KeyUsageDigitalSignature
	template.BasicConstraintsValid = true
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, key.Public(), a.key)
	if err != nil {
		return nil, nil, fmt.Errorf("certs: sign %s: %w", certName, err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, nil, fmt.Errorf("certs: read the new certificate: %w", err)
	}
	kf, err := keyFile(keyName, key)
	return cert, []file{kf, certFile(certName, der)}, err
}

// note keeps a certificate under issued.
func (a *authority) note(cert *x509.Certificate) error {
	if err := os.MkdirAll(a.dir.file(issuedDir), 0o700); err != nil {
		return err
	}
	if err := syncDir(a.dir.path); err != nil {
		return err
	}
	return a.dir.write(certFile(filepath.Join(issuedDir, serialText(cert)+certSuffix), cert.Raw))
}

// shared returns the authority's files that go beside each certificate.
func (d *Dir) shared() ([]file, error) {
	var files []file
	for _, name := range []string{CAFile, CRLFile} {
		b, err := os.ReadFile(d.file(name))
		if err != nil {
			return nil, err
		}
		files = append(files, file{name, b, 0o644})
	}
	return files, nil
}
