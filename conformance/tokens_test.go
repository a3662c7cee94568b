package conformance

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	etcdauth "go.etcd.io/etcd/server/v3/auth"
	"go.etcd.io/etcd/server/v3/storage/backend"
	"go.etcd.io/etcd/server/v3/storage/schema"
	"go.uber.org/zap"
	"google.golang.org/grpc/metadata"

	"github.com/skeindb/skein/auth"
	"github.com/skeindb/skein/clock"
)

// tokenKeys writes a key of each type into a directory: NAME.key and NAME.pub.
func tokenKeys(t *testing.T, dir string) {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	write := func(name string, b []byte) { must(os.WriteFile(filepath.Join(dir, name), b, 0o600)) }
	add := func(name string, k crypto.Signer, err error) {
		must(err)
		private, err := x509.MarshalPKCS8PrivateKey(k)
		must(err)
		public, err := x509.MarshalPKIXPublicKey(k.Public())
		must(err)
		write(name+".key", pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private}))
		write(name+".pub", pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: public}))
	}
	for _, name := range []string{"rsa", "rsa2"} {
		k, err := rsa.GenerateKey(rand.Reader, 2048)
		add(name, k, err)
	}
	for name, curve := range map[string]elliptic.Curve{"p256": elliptic.P256(), "p256b": elliptic.P256(), "p384": elliptic.P384(), "p521": elliptic.P521()} {
		k, err := ecdsa.GenerateKey(curve, rand.Reader)
		add(name, k, err)
	}
	for _, name := range []string{"ed", "ed2"} {
		_, k, err := ed25519.GenerateKey(rand.Reader)
		add(name, k, err)
	}
	write("secret.key", []byte("a secret of all nodes"))
	write("junk", []byte("no key"))
	write("empty", nil)
}

// openTokens is our reader of the options of tokens.
func openTokens(options string) (auth.Tokens, error) {
	o, err := auth.ParseOptions(options)
	if err != nil {
		return nil, err
	}
	return o.Open(clock.System(), rand.Reader, time.Minute)
}

// TestTokenOptions gives both readers of --auth-token the same options. Where etcd refuses, we do, and our
// error begins with its text. We refuse some more, which would fail at each login.
func TestTokenOptions(t *testing.T) {
	dir := t.TempDir()
	tokenKeys(t, dir)
	values := map[string][]string{
		"sign-method": {"RS256", "PS512", "ES256", "ES512", "EdDSA", "HS256", "none", "rs256", "RS", ""},
		"priv-key":    {"rsa.key", "p256.key", "p521.key", "ed.key", "secret.key", "rsa.pub", "junk", "empty", "missing"},
		"pub-key":     {"rsa.pub", "rsa2.pub", "p256.pub", "p256b.pub", "ed.pub", "ed2.pub", "rsa.key", "junk", "empty", "missing"},
		"ttl":         {"1m", "10", "x", ""},
	}
	list := []string{
		"", "simple", "Simple", "jwt", "bearer", ",", "simple,", "simple,a=b", "simple,a=b,a=c", "jwt,,sign-method=HS256", "jwt,sign-method",
		"jwt,sign-method=HS256=x", "jwt,=,sign-method=HS256", "jwt,sign-method=HS256,more=x,priv-key=" + filepath.Join(dir, "secret.key"),
	}
	for _, method := range values["sign-method"] {
		for _, private := range append(values["priv-key"], "-") {
			for _, public := range append(values["pub-key"], "-") {
				o := "jwt,sign-method=" + method
				if private != "-" {
					o += ",priv-key=" + filepath.Join(dir, private)
				}
				if public != "-" {
					o += ",pub-key=" + filepath.Join(dir, public)
				}
				list = append(list, o)
			}
		}
	}
	for _, ttl := range values["ttl"] {
		list = append(list, "jwt,sign-method=HS256,ttl="+ttl+",priv-key="+filepath.Join(dir, "secret.key"), "jwt,ttl="+ttl)
	}
	accepted, refused, more := 0, map[string]int{}, 0
	for _, o := range list {
		_, etcd := etcdauth.NewTokenProvider(zap.NewNop(), o, nil, time.Minute)
		_, ours := openTokens(o)
		switch {
		case etcd == nil && ours == nil:
			accepted++
		case etcd == nil && strings.Contains(ours.Error(), "bits, and this one has"):
			more++
		case etcd != nil && ours != nil && strings.HasPrefix(ours.Error(), "unsupported signing method"):
			refused[ours.Error()]++ // etcd reads the files before
		case etcd == nil || ours == nil || !strings.HasPrefix(ours.Error(), etcd.Error()):
			t.Errorf("%s\nours: %v\netcd: %v", o, ours, etcd)
		default:
			refused[etcd.Error()]++
		}
	}
	if accepted < 20 || len(refused) < 6 || more == 0 {
		t.Errorf("the options say little: %d accepted, refused %v, %d by us alone", accepted, refused, more)
	}
}

// TestJWTOfBoth: etcd's tokens are good for us and ours for etcd, with each method, and mean the same.
func TestJWTOfBoth(t *testing.T) {
	dir := t.TempDir()
	tokenKeys(t, dir)
	for method, key := range map[string]string{
		"RS256": "rsa", "RS384": "rsa", "RS512": "rsa", "PS256": "rsa", "PS384": "rsa", "PS512": "rsa",
		"ES256": "p256", "ES384": "p384", "ES512": "p521", "EdDSA": "ed", "HS256": "secret", "HS384": "secret", "HS512": "secret",
	} {
		t.Run(method, func(t *testing.T) {
			options := fmt.Sprintf("jwt,sign-method=%s,priv-key=%s", method, filepath.Join(dir, key+".key"))
			store := enabledStore(t, options)
			tokens, err := openTokens(options)
			if err != nil {
				t.Fatal(err)
			}
			answer, err := store.Authenticate(t.Context(), "root", "")
			if err != nil {
				t.Fatal(err)
			}
			id, err := tokens.Verify(nil, answer.Token)
			if err != nil || id.User != "root" || id.Revision != store.Revision() {
				t.Errorf("etcd's token at revision %d: %+v, %v", store.Revision(), id, err)
			}
			token, err := tokens.Issue(auth.Keys{}, auth.Proof{User: "root", Revision: 5})
			if err != nil {
				t.Fatal(err)
			}
			info, err := store.AuthInfoFromCtx(withToken(t.Context(), token))
			if err != nil || info.Username != "root" || info.Revision != 5 {
				t.Errorf("our token: %+v, %v", info, err)
			}
		})
	}
}

func withToken(ctx context.Context, token string) context.Context {
	return metadata.NewIncomingContext(ctx, metadata.Pairs(rpctypes.TokenFieldNameGRPC, token))
}

// enabledStore is etcd's store of users with user root, who has a password, and with checks on.
func enabledStore(t *testing.T, options string) etcdauth.AuthStore {
	t.Helper()
	tokens, err := etcdauth.NewTokenProvider(zap.NewNop(), options, nil, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	b := backend.NewDefaultBackend(zap.NewNop(), filepath.Join(t.TempDir(), "db"))
	store := etcdauth.NewAuthStore(zap.NewNop(), schema.NewAuthBackend(zap.NewNop(), b), tokens, 4)
	t.Cleanup(func() {
		if err := errors.Join(store.Close(), b.Close()); err != nil {
			t.Error(err)
		}
	})
	_, err = store.UserAdd(&pb.AuthUserAddRequest{Name: "root", HashedPassword: base64.StdEncoding.EncodeToString([]byte("hash"))})
	if err == nil {
		_, err = store.RoleAdd(&pb.AuthRoleAddRequest{Name: "root"})
	}
	if err == nil {
		_, err = store.UserGrantRole(&pb.AuthUserGrantRoleRequest{User: "root", Role: "root"})
	}
	if err == nil {
		err = store.AuthEnable()
	}
	if err != nil {
		t.Fatal(err)
	}
	return store
}
