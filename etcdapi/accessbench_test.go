package etcdapi

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"

	"github.com/skeindb/skein/auth"
	"github.com/skeindb/skein/clock"
)

// benchmarkPut measures a put through interceptor and handler, without gRPC and keys. There are 1,000 roles of 10
// permissions, and the user has all of them.
func benchmarkPut(b *testing.B, change func(*Users, *records) context.Context) {
	b.Helper()
	users, records := newUsers()
	records.hear(false)
	records.do(b, "user root", "grant root root", "user u")
	for role := range 1000 {
		records.do(b, fmt.Sprintf("role r%d", role), fmt.Sprintf("grant u r%d", role))
		for key := range 10 {
			records.do(b, fmt.Sprintf("permit r%d rw k%d-%d k%d-%dx", role, role+1000, key, role+1000, key))
		}
	}
	records.do(b, "enable")
	records.hear(true)
	ctx := change(users, records)
	node := &fakeNode{}
	node.leader.Store(0xb)
	s := New(Options{Users: users, KV: &fakeKV{}, Members: node, Node: node, Cluster: 0xc, Self: 0xb, Clock: clock.System(), NoGateway: true})
	defer s.Stop(context.Background())
	kv := &kvServer{s: s}
	info := &grpc.UnaryServerInfo{FullMethod: "/etcdserverpb.KV/Put"}
	handler := func(ctx context.Context, req any) (any, error) { return kv.Put(ctx, req.(*pb.PutRequest)) }
	req := &pb.PutRequest{Key: []byte("k1500-5"), Value: []byte("v")}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := s.unary(ctx, req, info, handler); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkPutAuthOff: nothing is checked.
func BenchmarkPutAuthOff(b *testing.B) {
	benchmarkPut(b, func(_ *Users, r *records) context.Context {
		r.do(b, "disable")
		return metadata.NewIncomingContext(b.Context(), nil)
	})
}

// BenchmarkPutAuthSimple: a simple token.
func BenchmarkPutAuthSimple(b *testing.B) {
	benchmarkPut(b, func(_ *Users, r *records) context.Context {
		return metadata.NewIncomingContext(b.Context(), metadata.Pairs(rpctypes.TokenFieldNameGRPC, r.token(b, "u")))
	})
}

// BenchmarkPutAuthJWT: a JSON web token.
func BenchmarkPutAuthJWT(b *testing.B) {
	benchmarkPut(b, func(u *Users, r *records) context.Context {
		key := filepath.Join(b.TempDir(), "key")
		if err := os.WriteFile(key, []byte(strings.Repeat("secret", 10)), 0o600); err != nil {
			b.Fatal(err)
		}
		o, err := auth.ParseOptions("jwt,sign-method=HS256,priv-key=" + key)
		if err != nil {
			b.Fatal(err)
		}
		tokens, err := o.Open(clock.System(), rand.Reader, 0)
		if err != nil {
			b.Fatal(err)
		}
		r.tokens, u.Tokens = tokens, tokens
		r.gate = auth.NewGate(clock.System(), tokens)
		u.Gate = r.gate
		r.hear(true)
		return metadata.NewIncomingContext(b.Context(), metadata.Pairs(rpctypes.TokenFieldNameGRPC, r.token(b, "u")))
	})
}

// BenchmarkPutAuthCommonName: a certificate's common name.
func BenchmarkPutAuthCommonName(b *testing.B) {
	benchmarkPut(b, func(u *Users, _ *records) context.Context {
		u.ClientCertAuth = true
		chain := []*x509.Certificate{{Subject: pkix.Name{CommonName: "u"}}}
		info := credentials.TLSInfo{State: tls.ConnectionState{VerifiedChains: [][]*x509.Certificate{chain}}}
		return metadata.NewIncomingContext(peer.NewContext(b.Context(), &peer.Peer{AuthInfo: info}), nil)
	})
}
