package conformance

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"os"
	"path/filepath"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	etcdauth "go.etcd.io/etcd/server/v3/auth"
	"go.etcd.io/etcd/server/v3/etcdserver/apply"
	"go.etcd.io/etcd/server/v3/lease"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/auth"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rights"
)

// accessPair is etcd's store beside our gate, for one user with one auth revision.
type accessPair struct {
	*rightsPair
	tokens auth.Tokens
	gate   *auth.Gate
	// vague says that the last request had a span that ends before it begins: etcd's answer depends on the
	// shape of a tree then, and is yes only if ours is.
	vague bool
}

func newAccessPair(t *testing.T, seed uint64) *accessPair {
	t.Helper()
	secret := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(secret, []byte("a secret of all nodes"), 0o600); err != nil {
		t.Fatal(err)
	}
	tokens, err := openTokens("jwt,sign-method=HS256,priv-key=" + secret)
	if err != nil {
		t.Fatal(err)
	}
	return &accessPair{rightsPair: newRightsPair(t, seed), tokens: tokens, gate: auth.NewGate(clock.System(), tokens)}
}

// caller chooses who asks: mostly a user of the present revision, at times of another one, or nobody.
func (p *accessPair) caller(t *testing.T) (*etcdauth.AuthInfo, *auth.Caller) {
	t.Helper()
	p.gate.Update(&auth.View{Rights: p.ours.Clone(), Index: p.index})
	var claim auth.Claim
	var info *etcdauth.AuthInfo
	if p.IntN(12) > 0 {
		info = &etcdauth.AuthInfo{Username: p.user(), Revision: p.ours.Revision}
		switch p.IntN(12) {
		case 0:
			info.Revision -= min(info.Revision, 1+p.Uint64N(2))
		case 1:
			info.Revision++
		}
		token, err := p.tokens.Issue(auth.Keys{}, auth.Proof{User: info.Username, Revision: info.Revision})
		if err != nil {
			t.Fatal(err)
		}
		claim = auth.Claim{Token: token, HasToken: true}
	}
	c, err := p.gate.Identify(t.Context(), claim)
	if err != nil {
		t.Fatal(err)
	}
	return info, c
}

// span is any span that requests may have.
func (p *accessPair) span() (key, end []byte) {
	for len(key) == 0 { // refused by its look
		key = []byte(p.key())
	}
	if p.IntN(2) == 0 {
		end = []byte(p.key())
	}
	p.vague = p.vague || len(end) > 0 && string(end) != "\x00" && bytes.Compare(key, end) >= 0
	return key, end
}

func (p *accessPair) rangeRequest() *pb.RangeRequest {
	key, end := p.span()
	return &pb.RangeRequest{Key: key, RangeEnd: end}
}

func (p *accessPair) txn(depth int) *pb.TxnRequest {
	r := &pb.TxnRequest{}
	for range p.IntN(3) {
		key, end := p.span()
		r.Compare = append(r.Compare, &pb.Compare{Key: key, RangeEnd: end})
	}
	for range p.IntN(3) {
		r.Success = append(r.Success, p.op(depth))
	}
	for range p.IntN(3) {
		r.Failure = append(r.Failure, p.op(depth))
	}
	return r
}

func (p *accessPair) op(depth int) *pb.RequestOp {
	key, end := p.span()
	switch n := p.IntN(4); {
	case n == 0:
		return &pb.RequestOp{Request: &pb.RequestOp_RequestRange{RequestRange: &pb.RangeRequest{Key: key, RangeEnd: end}}}
	case n == 1:
		return &pb.RequestOp{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: key, PrevKv: p.IntN(2) == 0, Lease: 7}}}
	case n == 2 || depth == 0:
		return &pb.RequestOp{Request: &pb.RequestOp_RequestDeleteRange{RequestDeleteRange: &pb.DeleteRangeRequest{Key: key, RangeEnd: end, PrevKv: p.IntN(2) == 0}}}
	}
	return &pb.RequestOp{Request: &pb.RequestOp_RequestTxn{RequestTxn: p.txn(depth - 1)}}
}

// request makes a request and says how etcd's own checks answer it.
func (p *accessPair) request(info *etcdauth.AuthInfo) (proto.Message, error) {
	someone := info
	if info == nil {
		someone = &etcdauth.AuthInfo{} // as each place does that checks keys
	}
	txn := func(r *pb.TxnRequest) error { return apply.CheckTxnAuth(p.etcd, someone, &lease.FakeLessor{}, r) }
	p.vague = false
	switch p.IntN(7) {
	case 0:
		r := p.rangeRequest()
		return r, p.etcd.IsRangePermitted(someone, r.Key, r.RangeEnd)
	case 1, 2:
		op := p.op(0)
		err := txn(&pb.TxnRequest{Success: []*pb.RequestOp{op}})
		switch o := op.Request.(type) {
		case *pb.RequestOp_RequestRange:
			return o.RequestRange, err
		case *pb.RequestOp_RequestPut:
			return o.RequestPut, err
		case *pb.RequestOp_RequestDeleteRange:
			return o.RequestDeleteRange, err
		}
		panic("an operation of an unknown kind")
	case 3:
		r := p.rangeRequest()
		if p.IntN(4) == 0 {
			r.Key = []byte{0} // what etcd makes of none
		}
		err := p.etcd.IsRangePermitted(someone, r.Key, r.RangeEnd)
		create := &pb.WatchCreateRequest{Key: r.Key, RangeEnd: r.RangeEnd}
		if string(r.Key) == "\x00" && p.IntN(2) == 0 {
			create.Key = nil
		}
		return &pb.WatchRequest{RequestUnion: &pb.WatchRequest_CreateRequest{CreateRequest: create}}, err
	case 4:
		r := &pb.AuthUserGetRequest{Name: p.user()}
		if someone.Username == r.Name {
			return r, nil
		}
		return r, p.etcd.IsAdminPermitted(info)
	case 5:
		r := &pb.AuthRoleGetRequest{Role: p.role()}
		if p.etcd.HasRole(someone.Username, r.Role) {
			return r, nil
		}
		return r, p.etcd.IsAdminPermitted(info)
	}
	r := p.txn(3)
	return r, txn(r)
}

// TestRequestsAreRefusedAsByEtcd: any request of anybody gets the same verdict as from etcd's own checks, with
// any users and roles.
func TestRequestsAreRefusedAsByEtcd(t *testing.T) {
	verdicts := map[string]int{}
	for seed := range uint64(20) {
		p := newAccessPair(t, seed)
		for range 400 {
			_, _, _ = p.apply() // TestRightsMeanWhatEtcdsMean compares what it answers
			asks := 2
			if p.ours.Enabled {
				asks = 60
			}
			for range asks {
				info, c := p.caller(t)
				r, etcd := p.request(info)
				ours := auth.Check(c, r)
				same := sameRefusal(etcd, ours) || errors.Is(etcd, etcdauth.ErrAuthOldRevision) && errors.Is(ours, kverror.AuthOldRevision)
				// etcd looks at the identity of a transaction without keys where it reads, and not here.
				_, txn := r.(*pb.TxnRequest)
				same = same || txn && proto.Size(r) == 0 && etcd == nil && errors.Is(ours, kverror.AuthOldRevision)
				if !same && (!p.vague || ours != nil) {
					t.Fatalf("seed %d: %+v sends %T %v: etcd %v, ours %v\n%s", seed, info, r, r, etcd, ours, p.ours)
				}
				verdict := "yes"
				if ours != nil {
					verdict = kverror.Of(ours).Kind.Error()
				} else if !p.ours.Enabled {
					verdict = "checks are off"
				} else if info != nil && info.Username != "root" {
					verdict = "yes to a user"
				}
				verdicts[verdict]++
				if admin := p.etcd.IsAdminPermitted(info); !sameRefusal(admin, auth.RootOnly.Begin(c)) {
					t.Fatalf("seed %d: %+v as root: etcd %v, ours %v\n%s", seed, info, admin, auth.RootOnly.Begin(c), p.ours)
				}
			}
		}
	}
	for _, verdict := range []string{
		"yes", "yes to a user", "checks are off", kverror.PermissionDenied.Error(), kverror.UserEmpty.Error(),
		kverror.UserNotFound.Error(), kverror.AuthOldRevision.Error(),
	} {
		if verdicts[verdict] < 1000 {
			t.Errorf("few requests end with %q: %v", verdict, verdicts)
		}
	}
}

// TestClaimsMeanWhatEtcdsMean: both find the same user in the metadata and the certificate of a call.
func TestClaimsMeanWhatEtcdsMean(t *testing.T) {
	dir := t.TempDir()
	tokenKeys(t, dir)
	options := "jwt,sign-method=HS256,priv-key=" + filepath.Join(dir, "secret.key")
	store := enabledStore(t, options)
	tokens, err := openTokens(options)
	if err != nil {
		t.Fatal(err)
	}
	state := rights.New()
	state.Enabled, state.Revision = true, store.Revision()
	gate := auth.NewGate(clock.System(), tokens)
	gate.Update(&auth.View{Rights: state, Index: 1})
	token, err := tokens.Issue(auth.Keys{}, auth.Proof{User: "by-token", Revision: store.Revision()})
	if err != nil {
		t.Fatal(err)
	}
	leaf := func(name string) *x509.Certificate { return &x509.Certificate{Subject: pkix.Name{CommonName: name}} }
	chains := map[string][][]*x509.Certificate{
		"none": nil, "empty": {{}}, "one": {{leaf("by-cert"), leaf("ca")}}, "two": {{}, {leaf("by-cert")}, {leaf("other")}}, "no name": {{leaf("")}},
	}
	users := map[string]int{}
	for which, verified := range chains {
		for _, names := range [][]string{{}, {"token"}, {"authorization"}, {"token", "authorization"}, {"authorization", "token"}} {
			for _, value := range []string{token, "Bearer " + token, "bearer " + token, "Bearer Bearer " + token, "", "bad"} {
				for _, gateway := range []bool{false, true} {
					for _, certAuth := range []bool{false, true} {
						var kv []string
						for i, name := range names {
							kv = append(kv, name, []string{value, "of the second name"}[i])
						}
						if gateway {
							kv = append(kv, "grpcgateway-accept", "*/*")
						}
						ctx := peer.NewContext(metadata.NewIncomingContext(t.Context(), metadata.Pairs(kv...)),
							&peer.Peer{AuthInfo: credentials.TLSInfo{State: tls.ConnectionState{VerifiedChains: verified}}})
						etcd := etcdUser(ctx, store, certAuth)
						c, err := gate.Identify(ctx, auth.ReadClaim(ctx, certAuth))
						ours := "invalid"
						if err == nil {
							ours = "user " + c.User
							if c.AnyUser() != nil {
								ours = "nobody"
							}
						} else if !errors.Is(err, kverror.InvalidAuthToken) {
							t.Fatal(err)
						}
						if etcd != ours {
							t.Errorf("%v, certificates %s, --client-cert-auth %t: etcd %q, ours %q", kv, which, certAuth, etcd, ours)
						}
						users[ours]++
					}
				}
			}
		}
	}
	if len(users) != 5 {
		t.Errorf("the calls are of %v", users)
	}
}

// etcdUser is the user whom etcd's server sees.
func etcdUser(ctx context.Context, store etcdauth.AuthStore, certAuth bool) string {
	info, err := store.AuthInfoFromCtx(ctx)
	if err == nil && info == nil && certAuth {
		info = store.AuthInfoFromTLS(ctx)
	}
	switch {
	case errors.Is(err, etcdauth.ErrInvalidAuthToken):
		return "invalid"
	case err != nil:
		return err.Error()
	case info == nil:
		return "nobody"
	}
	return "user " + info.Username
}
