package certs

import (
	"crypto/rand"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"os"
	"slices"
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
