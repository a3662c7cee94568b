package certs

import (
	"crypto/x509"
	"errors"
	"io/fs"
	"path/filepath"
	"strings"
)

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
