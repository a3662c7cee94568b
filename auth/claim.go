package auth

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"net/http"
	"strings"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"

	"github.com/skeindb/skein/certs"
)

// throughGateway is the metadata of a request that has come through a JSON gateway, which has a certificate
// of its own.
const throughGateway = "grpcgateway-accept"

// Claim is what a request brings to say who sends it. A token wins over a certificate.
type Claim struct {
	// Token counts where HasToken: an empty one is a bad one.
	Token    string
	HasToken bool
	// Certificate is the client's, from a verified chain.
	Certificate *x509.Certificate
}

// ReadClaim returns what the incoming context of a gRPC call claims. Certificates count only with
// --client-cert-auth. The gateway and websockets have none, because they reach the server without TLS.
func ReadClaim(ctx context.Context, clientCertAuth bool) Claim {
	var c Claim
	if v := metadata.ValueFromIncomingContext(ctx, rpctypes.TokenFieldNameGRPC); len(v) > 0 {
		c.Token, c.HasToken = v[0], true
	} else if v := metadata.ValueFromIncomingContext(ctx, rpctypes.TokenFieldNameSwagger); len(v) > 0 {
		c.Token, c.HasToken = v[0], true
	}
	c.Token = strings.TrimPrefix(c.Token, "Bearer ")
	if !clientCertAuth || len(metadata.ValueFromIncomingContext(ctx, throughGateway)) > 0 {
		return c
	}
	if p, ok := peer.FromContext(ctx); ok {
		if info, ok := p.AuthInfo.(credentials.TLSInfo); ok {
			c.Certificate = leaf(info.State.VerifiedChains)
		}
	}
	return c
}

// ReadHTTPClaim returns what an HTTP request claims by a token, or by the certificate that its connection's handshake has
// shown; nil means none. It is not for calls of the gateway.
func ReadHTTPClaim(h http.Header, shown *tls.ConnectionState, clientCertAuth bool) Claim {
	var c Claim
	if v := h.Values("Authorization"); len(v) > 0 {
		c.Token, c.HasToken = strings.TrimPrefix(v[0], "Bearer "), true
	} else if clientCertAuth && shown != nil {
		c.Certificate = leaf(shown.VerifiedChains)
	}
	return c
}

func leaf(chains [][]*x509.Certificate) *x509.Certificate {
	for _, chain := range chains {
		if len(chain) > 0 {
			return chain[0]
		}
	}
	return nil
}

// nodeOf says whether a certificate is a node's, and of which one. A role that cannot be read makes nobody
// a node, and no user either.
func nodeOf(cert *x509.Certificate) (name string, role bool) {
	for _, u := range cert.URIs {
		if u.Scheme != certs.URIScheme {
			continue
		}
		n, ok, err := certs.NodeName(u)
		if err != nil || !ok || role {
			return "", true
		}
		name, role = n, true
	}
	return name, role
}
