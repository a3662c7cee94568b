package certs

import (
	"bytes"
	"crypto"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// The files of a directory.
const (
	CAFile   = "ca.crt"
	CAKey    = "ca.key"
	CRLFile  = "ca.crl"
	NodeFile = "node.crt"
	NodeKey  = "node.key"

	clientPrefix = "client."
	certSuffix   = ".crt"
	keySuffix    = ".key"
	issuedDir    = "issued"
)

// A Problem is something that the caller can mend.
type Problem struct {
	What string // what is wrong
	Next string // what to do
}

// Error returns both, in the form in which skein's commands refuse.
func (p *Problem) Error() string { return p.What + "\nnext: " + p.Next }

func problem(next, what string, args ...any) error {
	return &Problem{What: fmt.Sprintf(what, args...), Next: next}
}

// Dir is a directory of certificates.
type Dir struct {
	path string
	now  func() time.Time
}

// At returns the directory at path, which need not be there yet.
func At(path string, wall func() time.Time) *Dir { return &Dir{path: filepath.Clean(path), now: wall} }

func (d *Dir) file(name string) string { return filepath.Join(d.path, name) }

// A file that is to be written.
type file struct {
	name  string
	bytes []byte
	mode  fs.FileMode
}

func certFile(name string, der []byte) file {
	return file{name, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o644}
}

func keyFile(name string, key crypto.Signer) (file, error) {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return file{}, fmt.Errorf("certs: encode a key: %w", err)
	}
	return file{name, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), 0o600}, nil
}

// lock makes the directory, if it is not there, and holds it against other commands until
// unlock is called.
func (d *Dir) lock() (unlock func(), err error) {
	if err := os.MkdirAll(d.path, 0o700); err != nil {
		return nil, err
	}
	f, err := os.Open(d.path)
	if err != nil {
		return nil, err
	}
	unlock = func() { _ = f.Close() } // nothing was written through it
	info, err := f.Stat()
	switch {
	case err != nil:
	case !info.IsDir():
		err = problem("give another --certs-dir", "%s is no directory", d.path)
	case info.Mode()&0o022 != 0:
		err = problem("chmod 700 "+d.path, "other users can replace the keys in %s (mode %04o)", d.path, info.Mode().Perm())
	default:
		if err = unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
			err = fmt.Errorf("lock %s: %w", d.path, err)
		}
	}
	if err != nil {
		unlock()
		return nil, err
	}
	return unlock, nil
}

// mayWrite says whether none of the files is there with another content. A revocation list may
// follow an older one. The caller holds the lock.
func (d *Dir) mayWrite(overwrite bool, files ...file) error {
	if overwrite {
		return nil
	}
	for _, f := range files {
		old, err := os.ReadFile(d.file(f.name))
		switch {
		case errors.Is(err, fs.ErrNotExist) || err == nil && bytes.Equal(old, f.bytes):
		case err != nil:
			return err
		case f.name == CRLFile && follows(f.bytes, old):
		default:
			return problem("move it away, or give --overwrite", "%s is there already", d.file(f.name))
		}
	}
	return nil
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

// write writes the files, one after the other, each atomically. The caller holds the lock.
func (d *Dir) write(files ...file) error {
	for _, f := range files {
		if err := d.replace(f); err != nil {
			return fmt.Errorf("write %s: %w", d.file(f.name), err)
		}
	}
	return nil
}

// replace puts a file in its place: whoever opens the name finds the old content or the new one, and
// after a crash too.
func (d *Dir) replace(f file) (err error) {
	path := d.file(f.name)
	tmp, err := os.CreateTemp(filepath.Dir(path), ".new-")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(tmp.Name()))
		}
	}()
	if _, err = tmp.Write(f.bytes); err == nil {
		err = tmp.Chmod(f.mode)
	}
	if err == nil {
		err = tmp.Sync()
	}
	if err = errors.Join(err, tmp.Close()); err != nil {
		return err
	}
	if err = os.Rename(tmp.Name(), path); err != nil {
		return err
	}
	return syncDir(filepath.Dir(path))
}

func syncDir(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// readCerts returns the certificates of a file, at least one.
func readCerts(path string) ([]*x509.Certificate, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var all []*x509.Certificate
	for block, rest := pem.Decode(b); block != nil; block, rest = pem.Decode(rest) {
		if block.Type != "CERTIFICATE" {
			continue
		}
		c, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		all = append(all, c)
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("%s has no certificate (PEM)", path)
	}
	return all, nil
}

// readKey returns the key of a file.
func readKey(path string) (crypto.Signer, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	block, _ := pem.Decode(b)
	if block == nil {
		return nil, fmt.Errorf("%s has no key (PEM)", path)
	}
	var key any
	if block.Type == "EC PRIVATE KEY" {
		key, err = x509.ParseECPrivateKey(block.Bytes)
	} else {
		key, err = x509.ParsePKCS8PrivateKey(block.Bytes)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	signer, ok := key.(crypto.Signer)
	if !ok {
		return nil, fmt.Errorf("%s: a %T cannot sign", path, key)
	}
	return signer, nil
}

// sameKey says whether the key is that of the certificate.
func sameKey(cert *x509.Certificate, key crypto.Signer) bool {
	p, ok := key.Public().(interface{ Equal(crypto.PublicKey) bool })
	return ok && p.Equal(cert.PublicKey)
}

func day(t time.Time) string { return t.UTC().Format(time.DateOnly) }
