package auth

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"testing"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
)

// TestReadClaim: what counts of a request's metadata and certificate. Trap 93 (CVE-2018-16886) is the common name through the
// gateway.
func TestReadClaim(t *testing.T) {
	cert, other := certificate("a", ""), certificate("b", "")
	verified := credentials.TLSInfo{State: tls.ConnectionState{PeerCertificates: []*x509.Certificate{cert}, VerifiedChains: [][]*x509.Certificate{{}, {cert, other}}}}
	unverified := credentials.TLSInfo{State: tls.ConnectionState{PeerCertificates: []*x509.Certificate{cert}}}
	with := func(info credentials.AuthInfo, kv ...string) context.Context {
		ctx := metadata.NewIncomingContext(t.Context(), metadata.Pairs(kv...))
		return peer.NewContext(ctx, &peer.Peer{AuthInfo: info})
	}
	for _, c := range []struct {
		what  string
		ctx   context.Context
		token string
		has   bool
		cert  *x509.Certificate
	}{
		{"nothing", t.Context(), "", false, nil},
		{"token", with(nil, "token", "t"), "t", true, nil},
		{"upper case", with(nil, "Token", "t"), "t", true, nil},
		{"first of two", with(nil, "token", "t", "token", "u"), "t", true, nil},
		{"authorization", with(nil, "authorization", "t"), "t", true, nil},
		{"bearer", with(nil, "authorization", "Bearer t"), "t", true, nil},
		{"token wins", with(nil, "authorization", "a", "token", "t"), "t", true, nil},
		{"empty", with(nil, "token", "", "authorization", "a"), "", true, nil},
		{"certificate", with(verified), "", false, cert},
		{"both", with(verified, "token", "t"), "t", true, cert},
		{"not verified", with(unverified), "", false, nil},
		{"gateway (93)", with(verified, "grpcgateway-accept", "*/*"), "", false, nil},
		{"gateway with a token", with(verified, "grpcgateway-accept", "", "authorization", "t"), "t", true, nil},
		{"no TLS", with(nil), "", false, nil},
	} {
		if got := ReadClaim(c.ctx, true); got != (Claim{c.token, c.has, c.cert}) {
			t.Errorf("%s: %+v", c.what, got)
		}
		if got := ReadClaim(c.ctx, false); got != (Claim{c.token, c.has, nil}) {
			t.Errorf("%s, without --client-cert-auth: %+v", c.what, got)
		}
	}
}
