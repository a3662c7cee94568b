package certs

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"os"
	"time"
)

// Days for which certificates are valid, unless their maker says otherwise.
const (
	CADays   = 3652
	LeafDays = 365

	maxDays = 36524
)

// early is how long before its making a certificate is valid, for nodes whose clocks are behind.
const early = time.Hour

// validity returns from when and until when a certificate made now is valid.
func (d *Dir) validity(days int) (from, until time.Time, err error) {
	if days < 1 || days > maxDays {
		return from, until, problem(fmt.Sprintf("give 1 to %d days", maxDays), "--days %d: no certificate can be valid that long", days)
	}
	now := d.now().UTC().Truncate(time.Second)
	return now.Add(-early), now.AddDate(0, 0, days), nil
}

// newSerial returns a serial number that no other certificate has: 126 random bits.
func newSerial() *big.Int {
	b := make([]byte, 16)
	_, _ = rand.Read(b) // never fails since Go 1.24
	b[0] &= 0x7f        // positive in DER without a leading zero byte
	b[0] |= 0x40        // all are equally long
	return new(big.Int).SetBytes(b)
}

// CreateCA makes the authority: its certificate and key, and a list that revokes nothing yet.
func (d *Dir) CreateCA(days int, overwrite bool) (Info, error) {
	from, until, err := d.validity(days)
	if err != nil {
		return Info{}, err
	}
	unlock, err := d.lock()
	if err != nil {
		return Info{}, err
	}
	defer unlock()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return Info{}, fmt.Errorf("certs: make a key: %w", err)
	}
	template := &x509.Certificate{
		SerialNumber: newSerial(), Subject: pkix.Name{Organization: []string{"skein"}, CommonName: "skein authority"},
		NotBefore: from, NotAfter: until,
		IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return Info{}, fmt.Errorf("certs: make the authority's certificate: %w", err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return Info{}, fmt.Errorf("certs: read the new certificate: %w", err)
	}
	kf, err := keyFile(CAKey, key)
	if err != nil {
		return Info{}, err
	}
	crl, err := (&authority{dir: d, cert: cert, key: key, list: &x509.RevocationList{Number: new(big.Int)}}).nextList()
	if err != nil {
		return Info{}, err
	}
	files := []file{kf, certFile(CAFile, der), crl}
	if err := d.mayWrite(overwrite, files...); err != nil {
		return Info{}, err
	}
	if err := d.write(files...); err != nil {
		return Info{}, err
	}
	return d.info(d.file(CAFile), cert, nil), nil
}

// authority is the authority of a directory with its key.
type authority struct {
	dir  *Dir
	cert *x509.Certificate
	key  crypto.Signer
	list *x509.RevocationList
}

// authority reads the authority's files. The caller holds the lock.
func (d *Dir) authority() (*authority, error) {
	for _, name := range []string{CAFile, CAKey} {
		if _, err := os.Stat(d.file(name)); errors.Is(err, fs.ErrNotExist) {
			return nil, problem("make an authority with skein cert create-ca, or give the --certs-dir where it is", "there is no %s", d.file(name))
		}
	}
	certs, err := readCerts(d.file(CAFile))
	if err != nil {
		return nil, err
	}
	a := &authority{dir: d}
	if a.key, err = readKey(d.file(CAKey)); err != nil {
		return nil, err
	}
	for _, c := range certs {
		if sameKey(c, a.key) {
			a.cert = c
		}
	}
	switch {
	case a.cert == nil:
		return nil, problem("put the two files of one authority together", "%s is not the key of %s", d.file(CAKey), d.file(CAFile))
	case !a.cert.IsCA || a.cert.KeyUsage&x509.KeyUsageCertSign == 0:
		return nil, problem("make an authority with skein cert create-ca", "%s is no certificate of an authority", d.file(CAFile))
	case a.cert.NotAfter.Before(d.now()):
		return nil, problem("make a new authority with skein cert create-ca --overwrite, then all certificates anew", "%s ended on %s", d.file(CAFile), day(a.cert.NotAfter))
	}
	a.list, err = d.readList([]*x509.Certificate{a.cert})
	return a, err
}
