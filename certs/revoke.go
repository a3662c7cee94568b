package certs

import (
	"bytes"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// readList returns the revocation list of one of the authorities. A missing one is a problem: whoever
// lost it would trust again what was revoked.
func (d *Dir) readList(authorities []*x509.Certificate) (*x509.RevocationList, error) {
	path := d.file(CRLFile)
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, problem("copy it from the authority's directory, or from a node's", "there is no %s, which says what is revoked", path)
	}
	if err != nil {
		return nil, err
	}
	list, err := parseList(b)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	signed := func(ca *x509.Certificate) bool { return list.CheckSignatureFrom(ca) == nil }
	switch {
	case !slices.ContainsFunc(authorities, signed):
		return nil, problem("copy "+CAFile+" and "+CRLFile+" from the same authority's directory", "%s is not signed by %s", path, d.file(CAFile))
	case list.Number == nil:
		return nil, problem("copy it from the authority's directory", "%s has no number", path)
	}
	return list, nil
}

func parseList(b []byte) (*x509.RevocationList, error) {
	if block, _ := pem.Decode(b); block != nil {
		b = block.Bytes
	}
	return x509.ParseRevocationList(b)
}

// follows says whether b is a later list than a of the same authority.
func follows(b, a []byte) bool {
	x, err := parseList(a)
	if err != nil || x.Number == nil {
		return false
	}
	y, err := parseList(b)
	return err == nil && y.Number != nil && bytes.Equal(x.AuthorityKeyId, y.AuthorityKeyId) && y.Number.Cmp(x.Number) > 0
}

// nextList returns the list that follows the authority's list, with one entry for each revoked serial
// number. It is valid as long as the authority: a list that ends earlier would stop the cluster.
func (a *authority) nextList(revoked ...*big.Int) (file, error) {
	now := a.dir.now().UTC().Truncate(time.Second)
	entries := slices.Clone(a.list.RevokedCertificateEntries)
	for _, n := range revoked {
		entries = append(entries, x509.RevocationListEntry{SerialNumber: n, RevocationTime: now})
	}
	der, err := x509.CreateRevocationList(rand.Reader, &x509.RevocationList{
		Number: new(big.Int).Add(a.list.Number, big.NewInt(1)), ThisUpdate: now, NextUpdate: a.cert.NotAfter,
		RevokedCertificateEntries: entries,
	}, a.cert, a.key)
	if err != nil {
		return file{}, fmt.Errorf("certs: sign the revocation list: %w", err)
	}
	return file{CRLFile, der, 0o644}, nil // no PEM: etcd reads DER alone
}

func isRevoked(list *x509.RevocationList, serial *big.Int) bool {
	return list != nil && slices.ContainsFunc(list.RevokedCertificateEntries, func(e x509.RevocationListEntry) bool {
		return e.SerialNumber.Cmp(serial) == 0
	})
}

// Revoke adds a certificate to the revocation list: what is its serial number, as List prints it, or
// the name of its file. It says which one, and whether the list has had it before.
func (d *Dir) Revoke(what string) (info Info, before bool, err error) {
	unlock, err := d.lock()
	if err != nil {
		return info, false, err
	}
	defer unlock()
	a, err := d.authority()
	if err != nil {
		return info, false, err
	}
	cert, name, err := d.find(what)
	switch {
	case err != nil:
		return info, false, err
	case cert.Equal(a.cert):
		return info, false, problem("make a new one with skein cert create-ca --overwrite, then all certificates anew", "an authority does not revoke itself")
	case cert.CheckSignatureFrom(a.cert) != nil:
		return info, false, problem("give the --certs-dir of its authority", "%s is not signed by %s", name, d.file(CAFile))
	}
	if isRevoked(a.list, cert.SerialNumber) {
		return d.info(name, cert, a.list), true, nil
	}
	f, err := a.nextList(cert.SerialNumber)
	if err == nil {
		err = d.write(f)
	}
	if err != nil {
		return info, false, err
	}
	if a.list, err = d.readList([]*x509.Certificate{a.cert}); err != nil {
		return info, false, err
	}
	return d.info(name, cert, a.list), false, nil
}

// find returns the certificate with a serial number, or the first one of a file.
func (d *Dir) find(what string) (*x509.Certificate, string, error) {
	serial := strings.ToLower(what)
	for _, path := range []string{d.file(filepath.Join(issuedDir, serial+certSuffix)), what} {
		if path != what && strings.ContainsRune(serial, filepath.Separator) {
			continue
		}
		certs, err := readCerts(path)
		if err == nil {
			return certs[0], path, nil
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return nil, "", err
		}
	}
	return nil, "", problem("see skein cert list, or give the certificate's file", "%s is no serial number that was issued here, and no file", what)
}
