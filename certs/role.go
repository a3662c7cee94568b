package certs

import (
	"crypto/x509"
	"errors"
	"fmt"
	"net/url"
)

// URIScheme begins the URI in a certificate that says which node it belongs to.
const URIScheme = "skein"

// nodeHost stands in a role's URI where the certificates of package transport have a cluster's id. It is no
// hexadecimal number, so neither can be taken for the other.
const nodeHost = "node"

// NodeURI returns the role of the node with that name: skein://node/NAME.
func NodeURI(name string) *url.URL {
	return &url.URL{Scheme: URIScheme, Host: nodeHost, Path: "/" + name, RawPath: "/" + url.PathEscape(name)}
}

// NodeName returns the name in a role. ok is false for a URI of another kind. A role that NodeURI does
// not make is an error: two readers must not see two names in it.
func NodeName(u *url.URL) (name string, ok bool, err error) {
	if u.Scheme != URIScheme || u.Host != nodeHost {
		return "", false, nil
	}
	if len(u.Path) > 1 && u.Path[0] == '/' && NodeURI(u.Path[1:]).String() == u.String() {
		return u.Path[1:], true, nil
	}
	return "", false, fmt.Errorf("%q is not %s://%s/NAME", u, URIScheme, nodeHost)
}

// roleOf returns the node's name in a certificate's role, and "" for a certificate without one.
func roleOf(cert *x509.Certificate) (string, error) {
	name := ""
	for _, u := range cert.URIs {
		if u.Scheme != URIScheme {
			continue
		}
		n, ok, err := NodeName(u)
		switch {
		case err != nil:
			return "", err
		case !ok:
			continue
		case name != "":
			return "", errors.New("more than one role")
		}
		name = n
	}
	return name, nil
}
