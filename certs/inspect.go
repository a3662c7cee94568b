package certs

import (
	"cmp"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// Info is what List says of a certificate.
type Info struct {
	File   string    `json:"file"`
	Kind   string    `json:"kind"` // authority, node or client
	Name   string    `json:"name"`
	Hosts  []string  `json:"hosts,omitempty"`
	Serial string    `json:"serial"`
	Until  time.Time `json:"until"`
	State  string    `json:"state"` // valid, revoked, expired, not yet valid, or of another authority
}

func serialText(cert *x509.Certificate) string { return fmt.Sprintf("%032x", cert.SerialNumber) }

// hostsOf returns the names and addresses that a certificate holds for.
func hostsOf(cert *x509.Certificate) []string {
	all := slices.Clone(cert.DNSNames)
	for _, ip := range cert.IPAddresses {
		all = append(all, ip.String())
	}
	return all
}

// clientName is the name that CreateClient was given.
func clientName(cert *x509.Certificate) string {
	for _, unit := range cert.Subject.OrganizationalUnit {
		if name, ok := strings.CutPrefix(unit, clientUnit); ok && cert.Subject.CommonName == "" {
			return name
		}
	}
	return cert.Subject.CommonName
}

// info describes a certificate of the directory's authority. list may be nil.
func (d *Dir) info(name string, cert *x509.Certificate, list *x509.RevocationList) Info {
	i := Info{File: name, Kind: "client", Name: clientName(cert), Serial: serialText(cert), Until: cert.NotAfter, State: "valid"}
	i.Hosts = hostsOf(cert)
	if role, err := roleOf(cert); err == nil && role != "" {
		i.Kind, i.Name = "node", role
	}
	if cert.IsCA {
		i.Kind = "authority"
	}
	switch now := d.now(); {
	case isRevoked(list, cert.SerialNumber):
		i.State = "revoked"
	case now.After(cert.NotAfter):
		i.State = "expired"
	case now.Before(cert.NotBefore):
		i.State = "not yet valid"
	}
	return i
}

// List returns the certificates of the directory, then the others that its authority has issued, the
// oldest first.
func (d *Dir) List() ([]Info, error) {
	authorities, err := d.trusted()
	if err != nil {
		return nil, err
	}
	list, err := d.readList(authorities)
	if err != nil {
		return nil, err
	}
	var all []Info
	begins := map[string]time.Time{}
	for _, pattern := range []string{"*" + certSuffix, filepath.Join(issuedDir, "*"+certSuffix)} {
		paths, err := filepath.Glob(filepath.Join(globbed(d.path), pattern))
		if err != nil {
			return nil, fmt.Errorf("list %s: %w", d.path, err)
		}
		var part []Info
		for _, path := range paths {
			certs, err := readCerts(path)
			if err != nil {
				return nil, err
			}
			for _, c := range certs {
				if _, seen := begins[serialText(c)]; seen {
					continue
				}
				begins[serialText(c)] = c.NotBefore
				i := d.info(strings.TrimPrefix(path, d.path+string(filepath.Separator)), c, list)
				signed := func(ca *x509.Certificate) bool { return c.CheckSignatureFrom(ca) == nil }
				if !slices.ContainsFunc(authorities, signed) {
					i.State = "of another authority"
				}
				part = append(part, i)
			}
		}
		if pattern[0] != '*' { // their file names say nothing
			slices.SortFunc(part, func(a, b Info) int {
				return cmp.Or(begins[a.Serial].Compare(begins[b.Serial]), strings.Compare(a.Name, b.Name), strings.Compare(a.Serial, b.Serial))
			})
		}
		all = append(all, part...)
	}
	return all, nil
}

// globbed returns a path as a pattern that matches it alone.
func globbed(path string) string {
	return strings.NewReplacer(`\`, `\\`, "*", `\*`, "?", `\?`, "[", `\[`).Replace(path)
}

// WriteList writes certificates as a table.
func WriteList(w io.Writer, all []Info) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "KIND\tNAME\tSTATE\tUNTIL\tSERIAL\tFILE\tHOSTS")
	for _, i := range all {
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%s\n", i.Kind, i.Name, i.State, day(i.Until), i.Serial, i.File, strings.Join(i.Hosts, ","))
	}
	return t.Flush()
}

// trusted returns the authorities of ca.crt.
func (d *Dir) trusted() ([]*x509.Certificate, error) {
	certs, err := readCerts(d.file(CAFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, problem("copy it from the authority's directory, or make an authority with skein cert create-ca", "there is no %s", d.file(CAFile))
	}
	return certs, err
}

// Validity says from when to when, and for which hosts, the first certificate of a file, which is its owner's, is valid.
func Validity(path string) (from, until time.Time, hosts []string, err error) {
	all, err := readCerts(path)
	if err != nil {
		return from, until, nil, err
	}
	return all[0].NotBefore, all[0].NotAfter, hostsOf(all[0]), nil
}

// soon is how long before its end Check says of a certificate that it ends.
const soon = 30 * 24 * time.Hour

// Report is what Check finds.
type Report struct {
	Node string // the node's name; empty without one
	// Problems stop the node, its peers or its clients. Notes say what will.
	Problems, Notes []error
}

// Check says whether a node's files fit together, and whether its certificate holds for the hosts.
func (d *Dir) Check(hosts []string) *Report {
	r := &Report{}
	authorities, err := d.trusted()
	if err != nil {
		r.Problems = append(r.Problems, err)
		return r
	}
	for _, ca := range authorities {
		r.checkTime(d, CAFile, ca, "make a new authority with skein cert create-ca --overwrite, then all certificates anew")
	}
	list, err := d.readList(authorities)
	r.add(err)
	certs, err := readCerts(d.file(NodeFile))
	if errors.Is(err, fs.ErrNotExist) {
		err = problem("make it with skein cert create-node NAME --host HOST --out "+d.path, "there is no %s", d.file(NodeFile))
	}
	if err != nil {
		r.Problems = append(r.Problems, err)
		return r
	}
	cert := certs[0]
	r.Node, err = roleOf(cert)
	r.checkPair(d, cert)
	r.checkTime(d, NodeFile, cert, renew)
	r.checkUse(d, certs, authorities)
	switch {
	case err != nil:
		r.add(problem(renew, "%s: %v", d.file(NodeFile), err))
	case r.Node == "":
		r.add(problem(renew, "%s names no node by a URI %s://%s/NAME", d.file(NodeFile), URIScheme, nodeHost))
	}
	if isRevoked(list, cert.SerialNumber) {
		r.add(problem(renew, "%s is revoked (serial number %s)", d.file(NodeFile), serialText(cert)))
	}
	if len(cert.DNSNames)+len(cert.IPAddresses) == 0 {
		r.add(problem(renew, "%s names no host, so no client can check it", d.file(NodeFile)))
	}
	for _, h := range hosts {
		if err := cert.VerifyHostname(h); err != nil {
			r.add(problem("make a certificate with --host "+h+" too: skein cert create-node with --overwrite", "%s does not hold for %s", d.file(NodeFile), h))
		}
	}
	return r
}

// renew is what to do about a node's certificate that is no good.
const renew = "make a new one with skein cert create-node NAME --host HOST --overwrite in the authority's directory, and copy it here"

func (r *Report) add(err error) {
	if err != nil {
		r.Problems = append(r.Problems, err)
	}
}

// checkPair looks at the node's key.
func (r *Report) checkPair(d *Dir, cert *x509.Certificate) {
	path := d.file(NodeKey)
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		r.add(problem("copy it from where the certificate was made, or make both anew", "there is no %s", path))
		return
	}
	if err != nil {
		r.add(err)
		return
	}
	if info.Mode()&0o077 != 0 {
		r.add(problem("chmod 600 "+path, "%s is open to other users (mode %04o)", path, info.Mode().Perm()))
	}
	key, err := readKey(path)
	switch {
	case err != nil:
		r.add(err)
	case !sameKey(cert, key):
		r.add(problem("copy both files from where they were made", "%s is not the key of %s", path, d.file(NodeFile)))
	}
}

// checkTime looks at the time of a certificate.
func (r *Report) checkTime(d *Dir, name string, cert *x509.Certificate, next string) {
	switch now := d.now(); {
	case now.After(cert.NotAfter):
		r.add(problem(next, "%s ended on %s", d.file(name), day(cert.NotAfter)))
	case now.Before(cert.NotBefore):
		r.add(problem("set this machine's clock, or wait", "%s begins on %s only", d.file(name), day(cert.NotBefore)))
	case now.Add(soon).After(cert.NotAfter):
		r.Notes = append(r.Notes, problem(next, "%s ends on %s", d.file(name), day(cert.NotAfter)))
	}
}

// checkUse looks at the chain, and at what the certificate may be used for. Times are looked at apart.
func (r *Report) checkUse(d *Dir, certs, authorities []*x509.Certificate) {
	opts := x509.VerifyOptions{Roots: x509.NewCertPool(), Intermediates: x509.NewCertPool(), KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}}
	opts.CurrentTime = certs[0].NotBefore
	for _, c := range authorities {
		opts.Roots.AddCert(c)
		if c.NotBefore.After(opts.CurrentTime) {
			opts.CurrentTime = c.NotBefore
		}
	}
	for _, c := range certs[1:] {
		opts.Intermediates.AddCert(c)
	}
	if _, err := certs[0].Verify(opts); err != nil {
		r.add(problem("copy "+CAFile+" and "+NodeFile+" from the same authority", "%s is not signed by %s: %v", d.file(NodeFile), d.file(CAFile), err))
		return
	}
	for _, u := range []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth} {
		if !slices.Contains(certs[0].ExtKeyUsage, u) && !slices.Contains(certs[0].ExtKeyUsage, x509.ExtKeyUsageAny) {
			r.add(problem(renew, "%s may not be used on both ends of a connection", d.file(NodeFile)))
			return
		}
	}
}
